"""Local updates: each peer trains by itself between two rounds, and the rounds average what the peers have changed.

This is DiLoCo (https://arxiv.org/abs/2311.08105) without a fixed number of local steps: a global step is due once all
peers together have computed the target batch, and each peer is weighted by its samples.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.optim.lr_scheduler import LambdaLR

from peerstep.accumulators import UpdateAccumulator
from peerstep.optimizer import CollaborativeOptimizer
from peerstep.rounds import RoundAverager
from peerstep.state import all_finite, set_schedule

# Local steps over which the learning rate of an inner optimizer without statistics rises to its value
INNER_WARMUP_STEPS = 20


class LocalUpdatesOptimizer(CollaborativeOptimizer):
    """Takes a local step of an inner optimizer at each call of `step`, and global steps of an outer optimizer.

    The outer optimizer is the one of CollaborativeOptimizer. It holds the parameters of the last global step (theta)
    on the CPU. The model has theta plus the local updates of this peer. A round averages theta, and the
    pseudo-gradients of the peers: theta minus the parameters of the model, weighted by samples. The outer optimizer
    takes its step with their average. A peer that missed a round receives theta of the others in a later round.

    With `delay_grad_averaging` the local steps continue during the round, and count in the next one. Without it the
    main thread waits at the end of a local step while a round is due or runs. The round waits for no local step.

    The statistics of the inner optimizer are never sent: a newcomer begins without them.

    :param inner_params: parameter groups of the model, in the order of `params`
    :param inner_optimizer, inner_scheduler: build the inner optimizer for them, and its schedule over global steps
    :param max_local_grad_norm: bound on the norm of the gradient of a local step; 0: no bound
    """

    def __init__(
        self,
        *,
        inner_params: list[dict],
        inner_optimizer: Callable[[list[dict]], torch.optim.Optimizer],
        inner_scheduler: Callable[[torch.optim.Optimizer], LambdaLR],
        max_local_grad_norm: float,
        **kwargs,
    ):
        self._inner_params, self._build_inner, self._build_schedule = inner_params, inner_optimizer, inner_scheduler
        self.max_local_grad_norm = max_local_grad_norm
        self._reset_inner()
        super().__init__(**kwargs)

    def _reset_inner(self) -> None:
        self.inner = self._build_inner([dict(group) for group in self._inner_params])
        self._schedule = self._build_schedule(self.inner)
        self._num_inner_steps = 0

    def _make_accumulator(self, averager: RoundAverager) -> UpdateAccumulator:
        return UpdateAccumulator(
            self.state_averager.main_parameters,
            self._offloaded_parameters(),
            averager.gradients,
            project=averager.project,
        )

    @property
    def param_groups(self) -> list[dict]:
        """Groups of the inner optimizer, for the training loop."""
        return self.inner.param_groups

    # Local steps, in the main thread

    def _take_local_step(self, num_samples: int) -> int:
        self._set_learning_rate()
        parameters = self.state_averager.main_parameters
        if self.max_local_grad_norm:
            torch.nn.utils.clip_grad_norm_(parameters, self.max_local_grad_norm)
        with self.accumulator.lock:  # a round that begins now has all of this step or nothing of it
            self.inner.step()
            self._num_inner_steps += 1
            return self.accumulator.add(num_samples)

    def _set_learning_rate(self) -> None:
        """Set the learning rate of the global step that is computed."""
        set_schedule(self._schedule, self.local_epoch)
        if self._num_inner_steps < INNER_WARMUP_STEPS:
            for group in self.inner.param_groups:
                group["lr"] *= (self._num_inner_steps + 1) / INNER_WARMUP_STEPS

    def _copy_parameters(self) -> None:
        self.accumulator.rebase()

    @contextmanager
    def saved_state(self) -> Iterator[None]:
        """Give the model the parameters of the last global step while the context is open, without local updates.

        A checkpoint has no local updates: a peer that resumes from it lacks those of one global step at most.
        """
        with super().saved_state(), self.accumulator.lock:  # a step that begins now waits for the local updates
            changes = self.accumulator.local_changes()
            self.accumulator.rebase([torch.zeros_like(change) for change in changes])
            try:
                yield
            finally:
                self.accumulator.rebase(changes)

    # Joining and catching up

    def restore(self, metadata: dict, tensors: list[torch.Tensor]) -> None:
        super().restore(metadata, tensors)
        self.inner.state.clear()  # frees 8 bytes per parameter before as many are allocated
        self._reset_inner()

    def discard_local_updates(self) -> bool:
        with self.frozen_state():
            if all_finite(self.state_averager.main_parameters) or not all_finite(self._offloaded_parameters()):
                return False
            self.forget_progress()
            self._reset_inner()
            return True
