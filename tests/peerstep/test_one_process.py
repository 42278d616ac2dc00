"""Real peers learn what one process learns: beside plain PyTorch, with its own optimizers and schedule."""

import asyncio
import math
from itertools import zip_longest

import torch
from hivemind.utils import MPFuture

from peerstep.peer.averager_process import SafeAverager
from tests.support.engine import build_model
from tests.support.processes import wait_until
from tests.support.swarm import SAMPLES, Swarm, Trainer

RATE, WARMUP, TOTAL, DECAY, MAX_NORM = 0.01, 3, 20, 0.1, 0.05
BETAS, EPSILON = (0.9, 0.999), 1e-6
# Samples of the local steps of three peers in each global step: 12 in all, as in one batch of the other process
SIZES = [((2,), (1, 1, 1), (3, 4)), ((1, 2), (2,), (7,)), ((4,), (4,), (2, 2)), ((1,), (3, 3), (5,))] * 2


class PlainLamb(torch.optim.Optimizer):
    """LAMB from its paper (https://arxiv.org/abs/1904.00962, algorithm 2), without bias correction."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                mean, square = self.state.setdefault(parameter, [torch.zeros_like(parameter) for _ in range(2)])
                mean.lerp_(parameter.grad, 1 - BETAS[0])
                square.lerp_(parameter.grad**2, 1 - BETAS[1])
                update = mean / (square.sqrt() + EPSILON) + group["weight_decay"] * parameter
                norm, size = float(parameter.norm().clamp(0, 10)), float(update.norm())
                parameter -= group["lr"] * (norm / size if norm and size else 1.0) * update


class PlainProcess:
    """One process with one batch per step."""

    def __init__(self, optimizer: str):
        self.model = build_model()
        matrices = {
            id(module.weight)
            for name, module in self.model.named_modules()
            if isinstance(module, torch.nn.Linear) and name.startswith("albert.")
        }
        parameters = list(self.model.parameters())
        decayed = [p for p in parameters if p.ndim > 1 and not (optimizer == "muon" and id(p) in matrices)]
        groups = [
            {"params": decayed, "weight_decay": DECAY},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ]
        options = {"lr": RATE, "betas": BETAS, "eps": EPSILON}
        if optimizer == "lamb":
            self.optimizers = [PlainLamb(groups, {"lr": RATE})]
        else:
            self.optimizers = [torch.optim.AdamW(groups, **options)]
        if optimizer == "muon":
            hidden = [p for p in parameters if id(p) in matrices]
            self.optimizers.append(
                torch.optim.Muon(hidden, lr=RATE, weight_decay=DECAY, eps=EPSILON, adjust_lr_fn="match_rms_adamw")
            )
        self.num_steps, self.norm = 0, math.nan

    def step(self, batch: dict[str, torch.Tensor]) -> None:
        self.model.zero_grad()
        self.model(**batch).loss.backward()
        self.norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM))
        self.num_steps += 1
        factor = min(self.num_steps / WARMUP, (TOTAL - self.num_steps + 1) / (TOTAL - WARMUP))
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = RATE * factor
            optimizer.step()

    @property
    def parameters(self) -> torch.Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])


def parameters_of(trainer: Trainer) -> torch.Tensor:
    """Return the trainer's parameters in the order of the model."""
    trainer.optimizer.finish_pending_update()
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


async def count_streams(self, future: MPFuture) -> None:
    """Count the open streams of other peers. Runs in the averager's process."""
    names = [getattr(task.get_coro(), "__name__", "") for task in asyncio.all_tasks()]
    future.set_result(names.count("_process_stream"))


def has_open_streams(trainer: Trainer) -> bool:
    future = MPFuture()
    trainer.averager._outer_pipe.send(("count_streams", [], {"future": future}))
    return future.result(120) > 0


def compare_with_one_process(build_swarm, optimizer: str, monkeypatch, **options) -> None:
    """Train with three unequal peers: warm-up, decay, groups without weight decay, and clipping in each step.

    Callers close their streams: otherwise each side would wait for the other to do so, and open streams would pile up
    over rounds.
    """
    monkeypatch.setattr(SafeAverager, "LINGER_SECONDS", 10_000.0)
    monkeypatch.setattr(SafeAverager, "count_streams", count_streams, raising=False)
    swarm: Swarm = build_swarm(
        optimizer=optimizer, learning_rate=RATE, warmup_steps=WARMUP, total_steps=TOTAL, weight_decay=DECAY,
        max_grad_norm=MAX_NORM, adam_epsilon=EPSILON, clamp_value=10.0, **options,
    )  # fmt: skip
    swarm.add_several(False, True, False)
    process = PlainProcess(optimizer)
    start, worst = process.parameters, 0.0
    for step, sizes in enumerate(SIZES, 1):
        swarm.meet()
        begin = swarm.num_taken
        for trainer in swarm.trainers:
            trainer.optimizer.finish_pending_update()
        for sizes_of_a_local_step in zip_longest(*sizes, fillvalue=0):
            swarm.compute(*sizes_of_a_local_step)
        swarm.wait_for(step)
        process.step({name: values[begin : swarm.num_taken] for name, values in SAMPLES.items()})
        assert process.norm > MAX_NORM and swarm.num_taken - begin == 12
        moved = (process.parameters - start).norm()
        for trainer in swarm.trainers:
            assert trainer.entry["outcome"] == "averaged" and trainer.entry["received"] == 1.0
            worst = max(worst, float((parameters_of(trainer) - process.parameters).norm() / moved))
    print(f"{optimizer}: largest difference {worst:.2g} of the distance moved")
    assert worst < 1e-5
    for trainer in swarm.trainers:
        wait_until(lambda trainer=trainer: not has_open_streams(trainer), 120, "the end of the streams")


def test_three_unequal_peers_learn_what_one_process_learns(build_swarm, monkeypatch):
    compare_with_one_process(build_swarm, "adamw", monkeypatch)
