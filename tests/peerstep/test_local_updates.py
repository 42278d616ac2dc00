"""Tests of local updates: a swarm takes the same steps as DiLoCo in one process, whoever is late, joins or leaves."""

import itertools
from collections import defaultdict
from collections.abc import Iterator

import pytest
import torch

from cotrain.training.builders import build_local_optimizer, build_param_groups
from peerstep.local_updates import INNER_WARMUP_STEPS
from tests.support.models import build_model
from tests.support.state import CONFIG, arguments, flat
from tests.support.swarm import Contribution, Swarm, parameters_of, set_parameters

OUTER = {"outer_learning_rate": 0.7, "outer_momentum": 0.9}
LOCAL = {"local_updates": True, "max_grad_norm": 1.0, **OUTER}


class LocalReplay:
    """Reference: DiLoCo in one process, from its paper's equations.

    Each trainer begins a global step with the parameters of the last one (theta). Its inner optimizer is its own.
    """

    def __init__(self):
        self.args = arguments()
        self.theta = [p.detach().clone() for p in parameters_of(build_model(CONFIG, "run"))]
        self.momentum = [torch.zeros_like(p) for p in self.theta]
        self.num_steps = 0
        self._trainers = defaultdict(self._build_trainer)

    def _build_trainer(self) -> tuple[torch.nn.Module, torch.optim.Optimizer, Iterator[int]]:
        """Return a model, its inner optimizer, and the numbers of its local steps."""
        model = build_model(CONFIG, "run")
        groups = build_param_groups(model, self.args.weight_decay)
        return model, build_local_optimizer(groups, self.args), itertools.count(1)

    def pseudo_gradient(self, number: int, contribution: Contribution) -> list[torch.Tensor]:
        """Take the local steps of a trainer."""
        model, optimizer, local_steps = self._trainers[number]
        set_parameters(model, self.theta)
        for batch, _ in contribution:
            model.zero_grad()
            model(**batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            warmup = min(1.0, next(local_steps) / INNER_WARMUP_STEPS)
            for group in optimizer.param_groups:
                # The schedule has no warm-up here, and decays linearly over 1,000 global steps
                group["lr"] = self.args.learning_rate * (1 - self.num_steps / self.args.total_steps) * warmup
            optimizer.step()
        return torch._foreach_sub(self.theta, [p.detach() for p in parameters_of(model)])

    def step(self, contributions: list[Contribution]) -> torch.Tensor:
        """Take a global step with the local steps of the first trainers.

        :returns: the new parameters
        """
        sizes = [sum(len(batch["labels"]) for batch, _ in contribution) for contribution in contributions]
        mean = [torch.zeros_like(p) for p in self.theta]
        for number, contribution in enumerate(contributions):
            update = self.pseudo_gradient(number, contribution)
            torch._foreach_add_(mean, update, alpha=sizes[number] / sum(sizes))
        rate, decay = OUTER["outer_learning_rate"], OUTER["outer_momentum"]
        self.momentum = [decay * old + new for old, new in zip(self.momentum, mean, strict=True)]
        self.theta = [
            theta - rate * (gradient + decay * momentum)
            for theta, gradient, momentum in zip(self.theta, mean, self.momentum, strict=True)
        ]
        self.num_steps += 1
        return flat(self.theta)


def take_step(swarm: Swarm, replay: LocalReplay, *sizes: tuple[int, ...]) -> None:
    """Take a global step with local steps of `sizes` samples at each trainer, and compare it with the reference."""
    swarm.meet()
    step = swarm.trainers[0].completed + 1
    for trainer in swarm.trainers:
        trainer.optimizer.finish_pending_update()
    for trainer, sizes_of_trainer in zip(swarm.trainers, sizes, strict=True):
        for size in sizes_of_trainer:
            trainer.local_step(swarm.take(size))
    before = flat(replay.theta)
    expected = replay.step(swarm.wait_for(step))
    assert (expected - before).norm() > 0.01
    for trainer in swarm.trainers:
        assert trainer.entry["outcome"] == "averaged" and trainer.entry["received"] == 1.0
        assert len(trainer.entry["group"]) >= len(swarm.trainers)
        assert (trainer.parameters - expected).abs().max() < 1e-6
        trainer.optimizer.finish_pending_update()
        assert torch.equal(trainer.model_parameters, trainer.parameters)


@pytest.mark.parametrize("are_delayed", [True, False], ids=["delayed", "not delayed"])
def test_unequal_peers_take_the_steps_of_diloco(build_swarm, are_delayed):
    """Three trainers with different numbers of local steps, one of them in client mode.

    After two steps a newcomer takes parameters and momentum from a donor.
    """
    swarm = build_swarm(**LOCAL, delay_grad_averaging=are_delayed, delay_optimizer_step=are_delayed)
    replay = LocalReplay()
    swarm.add_several(False, True, False)
    take_step(swarm, replay, (2, 1), (2, 2, 2), (1,) * 3)
    take_step(swarm, replay, (4,), (1, 1), (2, 2, 2))
    newcomer = swarm.add()
    newcomer.join()
    assert (newcomer.model_parameters - swarm.trainers[0].parameters).abs().max() < 1e-6
    take_step(swarm, replay, (1,) * 3, (3,), (2,), (2, 2))


def test_sparse_rounds_keep_unequal_trainers_equal(build_swarm):
    """They send one value in 64 of a block. What they do not send stays with them; a newcomer begins with nothing."""
    swarm = build_swarm(**LOCAL, gradient_compression="topk")
    swarm.add_several(False, True, False)
    before = swarm.trainers[0].parameters
    for sizes in (((2, 1), (2, 2, 2), (1,) * 3), ((4,), (1, 1), (2, 2, 2)), ((1,) * 3, (3,), (2,), (2, 2))):
        if len(sizes) > len(swarm.trainers):
            swarm.add().join()
        swarm.meet()
        step = swarm.trainers[0].completed + 1
        for trainer, sizes_of_trainer in zip(swarm.trainers, sizes, strict=True):
            trainer.optimizer.finish_pending_update()
            for size in sizes_of_trainer:
                trainer.local_step(swarm.take(size))
        swarm.wait_for(step)
        after = swarm.trainers[0].parameters
        assert all((trainer.parameters - after).abs().max() < 1e-6 for trainer in swarm.trainers)
        assert 0 < ((after - before) != 0).float().mean() < 0.5
    for trainer in swarm.trainers:
        kept, moved = flat(trainer.optimizer.accumulator.contribution), after - before
        assert kept.isfinite().all() and kept.norm() > 0.01 * moved.norm()
