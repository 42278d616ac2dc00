"""Tests of local updates: a swarm takes the same steps as DiLoCo in one process, whoever is late, joins or leaves."""

import math

import pytest
import torch

from arguments import HyperparameterArguments
from lib.averaging.local_updates import INNER_WARMUP_STEPS
from lib.training.model import build_model
from lib.training.optimizer import build_local_optimizer, build_param_groups
from tests.support.peers import wait_until
from tests.support.swarm import CONFIG, HYPERPARAMETERS, Contribution, Swarm, Trainer, flat, parameters_of

OUTER = {"outer_learning_rate": 0.7, "outer_momentum": 0.9}
LOCAL = {"local_updates": True, "max_grad_norm": 1.0, **OUTER}


class LocalReplay:
    """Reference: DiLoCo in one process, from its paper's equations.

    Each trainer begins a global step with the parameters of the last one (theta). Its inner optimizer is its own.
    """

    def __init__(self):
        self.model = build_model(CONFIG, "run")
        self.theta = [p.detach().clone() for p in parameters_of(self.model)]
        self.versions = [self.theta]
        self.momentum = [torch.zeros_like(p) for p in self.theta]
        self._inner: dict[int, tuple[list[torch.nn.Parameter], torch.optim.Optimizer]] = {}
        self._num_steps: dict[int, int] = {}

    def train(self, number: int, contribution: Contribution, start: list[torch.Tensor]) -> list[torch.Tensor]:
        """Take the local steps of a trainer. Each gradient is that of the version of theta which it was computed at.

        :param start: the parameters before the first step
        :returns: the parameters after the last step
        """
        args = HyperparameterArguments(**HYPERPARAMETERS)
        if number not in self._inner:
            model = build_model(CONFIG, "run")
            self._inner[number] = model, build_local_optimizer(build_param_groups(model, args.weight_decay), args)
            self._num_steps[number] = 0
        model, optimizer = self._inner[number]
        current = start
        for batch in contribution:
            self._set(model, current)
            model.zero_grad()
            model(**batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            self._num_steps[number] += 1
            warmup = min(1.0, self._num_steps[number] / INNER_WARMUP_STEPS)
            for group in optimizer.param_groups:
                # The schedule has no warm-up here, and decays linearly over 1,000 global steps
                group["lr"] = args.learning_rate * (1 - len(self.versions) / args.total_steps) * warmup
            optimizer.step()
            current = [p.detach().clone() for p in parameters_of(model)]
        return current

    def step(self, updates: list[tuple[list[torch.Tensor], int]]) -> torch.Tensor:
        """Take a global step.

        :param updates: of each trainer, its pseudo-gradient and number of samples
        :returns: the new parameters
        """
        num_samples = sum(size for _, size in updates)
        mean = [sum(update[i] * (size / num_samples) for update, size in updates) for i in range(len(self.theta))]
        rate, decay = OUTER["outer_learning_rate"], OUTER["outer_momentum"]
        self.momentum = [decay * old + new for old, new in zip(self.momentum, mean, strict=True)]
        self.theta = [
            theta - rate * (gradient + decay * momentum)
            for theta, gradient, momentum in zip(self.theta, mean, self.momentum, strict=True)
        ]
        self.versions.append(self.theta)
        return flat(self.theta)

    def global_step(self, contributions: dict[int, Contribution]) -> torch.Tensor:
        """Take a global step in which each trainer starts at theta.

        :param contributions: number of a trainer -> batches of its local steps
        """
        updates = []
        for number, batches in contributions.items():
            trained = self.train(number, batches, self.theta)
            updates.append((difference(self.theta, trained), sum(len(batch["labels"]) for batch in batches)))
        return self.step(updates)

    @torch.no_grad()
    def _set(self, model: torch.nn.Module, values: list[torch.Tensor]) -> None:
        for parameter, value in zip(parameters_of(model), values, strict=True):
            parameter.copy_(value)


def difference(old: list[torch.Tensor], new: list[torch.Tensor]) -> list[torch.Tensor]:
    return [before - after for before, after in zip(old, new, strict=True)]


def batches_of(contribution: Contribution) -> list[dict[str, torch.Tensor]]:
    return [batch for batch, _ in contribution]


def take_step(swarm: Swarm, replay: LocalReplay, *sizes: tuple[int, ...]) -> None:
    """Take a global step with local steps of `sizes` samples at each trainer, and compare it with the reference."""
    swarm.meet()
    step = swarm.trainers[0].completed + 1
    for trainer in swarm.trainers:
        trainer.optimizer.finish_pending_update()
    for trainer, sizes_of_trainer in zip(swarm.trainers, sizes, strict=True):
        for size in sizes_of_trainer:
            trainer.local_step(swarm.take(size))
    contributions = dict(enumerate(map(batches_of, swarm.wait_for(step))))
    before = flat(replay.theta)
    expected = replay.global_step(contributions)
    assert (expected - before).norm() > 0.01
    for trainer in swarm.trainers:
        assert trainer.entry["outcome"] == "averaged" and trainer.entry["received"] == 1.0
        assert len(trainer.entry["group"]) >= len(swarm.trainers)
        assert (trainer.parameters - expected).abs().max() < 1e-6
        trainer.optimizer.finish_pending_update()
        assert torch.equal(trainer.model_parameters, trainer.parameters)


@pytest.mark.parametrize("are_delayed", [True, False], ids=["delayed", "not delayed"])
def test_unequal_peers_take_the_steps_of_diloco(build_swarm, are_delayed):
    """Three trainers with different numbers of local steps, one of them in client mode, and an auxiliary peer."""
    swarm = build_swarm(**LOCAL, delay_grad_averaging=are_delayed, delay_optimizer_step=are_delayed)
    replay = LocalReplay()
    swarm.add_several(False, True, False)
    swarm.add_auxiliary_peer()
    take_step(swarm, replay, (2, 1), (2, 2, 2), (1,) * 3)
    take_step(swarm, replay, (4,), (1, 1), (2, 2, 2))
    take_step(swarm, replay, (1,) * 4, (3, 3), (2,))


def test_newcomer_takes_parameters_and_momentum_from_a_donor(build_swarm):
    swarm, replay = build_swarm(**LOCAL), LocalReplay()
    swarm.add_several(False, False)
    take_step(swarm, replay, (3, 3), (2, 2, 2))
    take_step(swarm, replay, (3, 3), (2, 2, 2))
    newcomer = swarm.add()
    newcomer.join()
    assert (newcomer.model_parameters - swarm.trainers[0].parameters).abs().max() < 1e-6
    take_step(swarm, replay, (2, 2), (2, 2), (2, 2))
    take_step(swarm, replay, (2, 2), (2, 2), (2, 2))


def local_changes(trainer: Trainer) -> torch.Tensor:
    return flat(trainer.optimizer.accumulator.local_changes())


def test_local_steps_during_a_round_count_in_the_next_one(build_swarm):
    swarm, replay = build_swarm(**LOCAL), LocalReplay()
    first, second = swarm.add_several(False, False)
    swarm.meet()
    second.local_step(swarm.take(6))
    with second.hold():  # the round waits for it
        first.local_step(swarm.take(6))
        wait_until(lambda: first.optimizer._in_round, 30, "the round")
        contributions = [batches_of(trainer.pop_contribution()) for trainer in (first, second)]
        first.local_step(swarm.take(3))
        assert first.optimizer.accumulator.num_samples == 3
    first.wait_for(1)
    second.wait_for(1)
    (during,) = batches_of(first.pop_contribution())
    start, trained = replay.theta, [replay.train(n, batches, replay.theta) for n, batches in enumerate(contributions)]
    update = difference(trained[0], replay.train(0, [during], trained[0]))
    expected = replay.step([(difference(start, new), 6) for new in trained])
    for trainer in (first, second):
        assert (trainer.parameters - expected).abs().max() < 1e-6
        trainer.optimizer.finish_pending_update()
    assert (local_changes(first) + flat(update)).abs().max() < 1e-6
    second.local_step(swarm.take(9))
    ((batch,),) = (batches_of(contribution) for contribution in swarm.wait_for(2)[1:])
    other_update = difference(replay.theta, replay.train(1, [batch], replay.theta))
    expected = replay.step([(update, 3), (other_update, 9)])
    for trainer in (first, second):
        assert (trainer.parameters - expected).abs().max() < 1e-6


def test_peer_that_misses_a_round_keeps_its_local_updates(build_swarm):
    """It downloads theta and the momentum; its samples count once, in its next round."""
    swarm, replay = build_swarm(**LOCAL), LocalReplay()
    first, second, late = swarm.add_several(False, False, False)
    take_step(swarm, replay, (2, 2), (2, 2), (2, 2))
    with late.hold():
        late.local_step(swarm.take(3))
        swarm.compute(6, 6, trainers=[first, second])
        contributions = swarm.wait_for(2, [first, second])
        expected = replay.global_step(dict(enumerate(map(batches_of, contributions))))
        kept = local_changes(late)
        assert kept.norm() > 0
    late.wait_for(2)
    assert late.entry["outcome"] == "missed"
    late_batches = batches_of(late.pop_contribution())
    start = replay.versions[-2]
    trained = replay.train(2, late_batches, start)
    late.local_step(swarm.take(1))  # it computes this gradient, and downloads
    (last_batch,) = batches_of(late.pop_contribution())
    trained = replay.train(2, [last_batch], trained)
    assert (late.parameters - expected).abs().max() < 1e-6
    late_update = difference(start, trained)
    assert (local_changes(late) + flat(late_update)).abs().max() < 1e-5
    assert late.optimizer.accumulator.num_samples == late.tracker.local_progress.samples_accumulated == 4
    assert late.optimizer.missed_updates == 0

    for trainer in (first, second):
        trainer.optimizer.finish_pending_update()
    swarm.meet()
    swarm.compute(4, 4, trainers=[first, second])
    contributions = swarm.wait_for(3)
    assert not contributions[2], "no other local step"
    weights = [trainer.entry["weights"] for trainer in swarm.trainers if trainer.entry["weights"]]
    assert weights and all(weight[trainer.name] == 4 for weight in weights for trainer in swarm.trainers)
    updates = []
    for number in (0, 1):
        trained = replay.train(number, batches_of(contributions[number]), replay.theta)
        updates.append((difference(replay.theta, trained), 4))
    expected = replay.step([*updates, (late_update, 4)])
    for trainer in swarm.trainers:
        assert (trainer.parameters - expected).abs().max() < 1e-5


def test_local_updates_that_diverge_are_sent_to_nobody(build_swarm):
    """The peer contributes nothing to the round and goes back to the parameters of the last step."""
    swarm, replay = build_swarm(**LOCAL), LocalReplay()
    healthy, broken = swarm.add_several(False, False)
    take_step(swarm, replay, (3, 3), (3, 3))
    broken.local_step(swarm.take(6))
    with torch.no_grad():
        next(broken.model.parameters()).view(-1)[0] = math.nan
    healthy.local_step(swarm.take(6))
    contributions = swarm.wait_for(2)
    expected = replay.global_step({0: batches_of(contributions[0])})
    for trainer in (healthy, broken):
        assert (trainer.parameters - expected).abs().max() < 1e-6
        assert not trainer.optimizer.banned_peers()
    assert broken.optimizer.discard_local_updates()
    assert torch.equal(broken.model_parameters, broken.parameters)
    assert not healthy.optimizer.discard_local_updates()


def test_updates_far_larger_than_the_others_are_scaled_down_and_their_sender_is_banned(build_swarm):
    """They are within the bound relative to the parameters."""
    swarm, replay = build_swarm(**LOCAL, target_batch_size=16, max_update_norm=10.0), LocalReplay()
    *honest, liar = swarm.add_several(False, False, False, True)
    swarm.compute(4, 4, 4, 0)
    with torch.no_grad():
        for parameter in liar.model.parameters():
            parameter.add_(0.5 * parameter)
    swarm.compute(4, trainers=[liar])
    start, contributions = replay.theta, swarm.wait_for(1, honest)
    trained = [replay.train(number, batches_of(sent), start) for number, sent in enumerate(contributions)]
    expected = replay.step([(difference(start, new), 4) for new in trained])
    honest_change = (expected - flat(start)).norm()
    for trainer in honest:
        assert (trainer.parameters - flat(start)).norm() < 3 * honest_change
    assert any(liar.id in trainer.optimizer.banned_peers() for trainer in honest)
