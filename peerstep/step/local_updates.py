"""Local updates: each peer trains by itself between two rounds, and the rounds average what the peers have changed.

This is DiLoCo (https://arxiv.org/abs/2311.08105) without a fixed number of local steps: a global step is due once all
peers together have computed the target batch, and each peer is weighted by its samples.
"""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from peerstep.rounds.bounds import MAX_GRADIENT_NORM
from peerstep.state.averager import set_schedule
from peerstep.state.layout import all_finite
from peerstep.state.statistics import OptimizerBuilder, SchedulerBuilder, build_with_statistics
from peerstep.step.accumulators import Accumulator, clip_norm
from peerstep.tensors.side_stream import copy_from_device

# Local steps over which the learning rate of an inner optimizer without statistics rises to its value
INNER_WARMUP_STEPS = 20


@dataclass(frozen=True)
class LocalUpdates:
    """Options of the outer optimizer, which takes the global steps: SGD with Nesterov momentum, as in DiLoCo.

    :param learning_rate: of a global step
    :param momentum: in long published runs 0.9
    :param max_norm: bound on the norm of a peer's change, relative to that of the parameters; 0: none
    """

    learning_rate: float = 0.7
    momentum: float = 0.5
    max_norm: float = 1.0

    def build_outer(self, param_groups: list[dict]) -> torch.optim.SGD:
        """Build the outer optimizer for copies of the parameters."""
        groups = [{"params": group["params"]} for group in param_groups]
        optimizer = torch.optim.SGD(groups, lr=self.learning_rate, momentum=self.momentum, nesterov=True)
        optimizer.second_moments = ()  # pyright: ignore[reportAttributeAccessIssue]
        return optimizer


def step_builders(
    optimizer: OptimizerBuilder, scheduler: SchedulerBuilder | None, local_updates: LocalUpdates | None = None
) -> dict:
    """Return the builders of the optimizer of the global steps, with statistics of zero, and of its schedule."""
    if local_updates is not None:
        return {"optimizer": partial(build_with_statistics, local_updates.build_outer), "scheduler": None}
    return {"optimizer": partial(build_with_statistics, optimizer), "scheduler": scheduler}


class LocalTraining(Accumulator):
    """Takes local steps of an inner optimizer. A contribution is a pseudo-gradient: what they have changed.

    The optimizer of the run is the outer one. It holds the parameters of the last global step (theta) on the CPU. The
    model has theta plus the local updates of this peer. A round averages theta, and the pseudo-gradients of the peers:
    theta minus the parameters of the model, weighted by samples. The outer optimizer takes its step with their
    average. A peer that missed a round receives theta of the others in a later round.

    With delayed averaging the local steps continue during the round, and count in the next one: until the model has
    the result, a pseudo-gradient is the difference from the model at the last load. Without it the main thread waits
    at the end of a local step while a round is due or runs. The round waits for no local step.

    The statistics of the inner optimizer are never sent: a newcomer begins without them.

    :param param_groups: of the model, in the order of the outer optimizer's
    :param build_inner, build_schedule: build the inner optimizer for them, and its schedule over global steps
    :param max_grad_norm: bound on the norm of the gradient of a local step; 0: no bound
    :param tensors: of Accumulator
    :param max_norm: bound on the norm of an average, relative to that of the parameters; 0: none
    :param project: returns what a round takes of a tensor; the rest stays in the model as a local update. None: all
    """

    name, ages = "updates", False
    inner: torch.optim.Optimizer

    def __init__(
        self,
        param_groups: list[dict],
        build_inner: OptimizerBuilder,
        build_schedule: SchedulerBuilder,
        max_grad_norm: float,
        *tensors: Sequence[torch.Tensor],
        max_norm: float = 0.0,
        project: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ):
        super().__init__(*tensors, max_norm=max_norm)
        self._groups, self._build_inner, self._build_schedule = param_groups, build_inner, build_schedule
        self.max_grad_norm, self.project = max_grad_norm, project
        self._host_lock = threading.RLock()  # of the two below; taken before `lock`
        host_memory_like = self.side_stream.host_memory_like
        self._base = [host_memory_like(parameter).copy_(parameter.detach()) for parameter in self.step_parameters]
        self._loaded = [host_memory_like(base) for base in self._base]  # parameters of the model at the last load
        self._is_loaded = False  # whether a round has the loaded contribution
        self._start_inner()

    def _start_inner(self) -> None:
        self.inner = build_with_statistics(self._build_inner, [dict(group) for group in self._groups])
        self._schedule = self._build_schedule(self.inner)
        self.num_inner_steps = 0

    @torch.no_grad()
    def bound(self) -> float:
        return self.max_norm * float(torch.nn.utils.get_total_norm(self.step_parameters))

    def add(self, num_samples: int, step: int = 0) -> int:
        """Take a local step with the gradients of the model, at the learning rate of global step `step + 1`.

        :returns: the samples since the last round
        """
        set_schedule(self._schedule, step)
        if self.num_inner_steps < INNER_WARMUP_STEPS:
            for group in self.inner.param_groups:
                group["lr"] *= (self.num_inner_steps + 1) / INNER_WARMUP_STEPS
        if self.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(self.main_parameters, self.max_grad_norm)
        with self.lock, self.side_stream.main():  # a round that begins now has all of this step or nothing of it
            self.inner.step()
            self.num_inner_steps += 1
            self.num_samples += num_samples
            return self.num_samples

    @torch.no_grad()
    def load(self) -> int:
        """Load the pseudo-gradient as the contribution to a round.

        :returns: the number of samples in the contribution; 0 if the parameters of the model are not finite
        """
        with self._host_lock:
            with self.lock, self.side_stream.beside():
                num_samples, self.num_samples = self.num_samples, 0
                self._is_loaded = True
                copy_from_device(self.main_parameters, self._loaded)
            self.side_stream.wait()
            for base, loaded, difference in zip(self._base, self._loaded, self.contribution, strict=True):
                torch.sub(base, loaded, out=difference)
            if not math.isfinite(clip_norm(self.contribution, MAX_GRADIENT_NORM)):
                num_samples = 0
                torch._foreach_copy_(self._loaded, self._base)
                torch._foreach_zero_(self.contribution)
            elif self.project is not None:  # 97 ns for a parameter
                for loaded, difference in zip(self._loaded, self.contribution, strict=True):
                    sent = self.project(difference)
                    loaded.add_(difference - sent)
                    difference.copy_(sent)
        return num_samples

    def move(self, model: torch.nn.Module, device: torch.device) -> None:
        with self._host_lock, self.lock:
            model.to(device)
            self.inner.load_state_dict(self.inner.state_dict())  # moves the statistics to the parameters

    def take_back(self, num_samples: int) -> None:
        """Count the loaded contribution, which no round has used, in the next round."""
        with self.lock:
            self._is_loaded = False
            self.num_samples += num_samples

    @torch.no_grad()
    def confirm(self) -> None:
        with self._host_lock, self.lock:
            self._is_loaded = False
            self._base, self._loaded = self._loaded, self._base

    @torch.no_grad()
    def local_changes(self, unsent: bool = False) -> list[torch.Tensor]:
        """Return the local updates that no step has used, on the device of the model.

        :param unsent: without those that a running round has, whose members may use them
        """
        with self._host_lock, self.lock:
            bases = self._loaded if unsent and self._is_loaded else self._base
            pairs = zip(self.main_parameters, bases, strict=True)
            return [parameter - base.to(parameter.device) for parameter, base in pairs]

    @torch.no_grad()
    def rebase(self, changes: Sequence[torch.Tensor] | None = None) -> None:
        """Set the model to the newest global step plus local updates; default: those that no step has used."""
        with self._host_lock, self.lock, self.side_stream.main():
            changes = self.local_changes() if changes is None else changes
            for parameter, change, newest, base, loaded in zip(
                self.main_parameters, changes, self.step_parameters, self._base, self._loaded, strict=True
            ):
                parameter.copy_(newest.to(parameter.device) + change.to(parameter.device))
                if self._is_loaded:
                    loaded.add_(newest - base)
                base.copy_(newest)

    def drop(self) -> None:
        """Drop the local updates: set the model to the parameters of the last global step."""
        with self._host_lock, self.lock:
            self.rebase([torch.zeros_like(parameter) for parameter in self.main_parameters])
            self.num_samples = 0

    @contextmanager
    def set_aside(self) -> Iterator[list[torch.Tensor] | None]:
        """Give the model the parameters of the last global step while the context is open, without local updates.

        Yields what sparse rounds have not taken yet. Otherwise a peer that resumes lacks the local updates of one
        global step at most.
        """
        with self._host_lock, self.lock:  # a step that begins now waits for the local updates
            changes = self.local_changes()
            unsent = None if self.project is None else self.local_changes(unsent=True)
            self.rebase([torch.zeros_like(change) for change in changes])
            try:
                yield unsent
            finally:
                self.rebase(changes)

    def reset(self) -> None:
        self.inner.state.clear()  # frees 8 bytes per parameter before as many are allocated
        self._start_inner()

    def can_reset(self) -> bool:
        return not all_finite(self.main_parameters) and all_finite(self.step_parameters)
