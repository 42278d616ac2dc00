"""What a peer has computed since the last round: its contribution to the next one."""

import math
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from peerstep.base import shared_zeros_like
from peerstep.bounds import MAX_GRADIENT_NORM


class Accumulator:
    """Base class of GradientAccumulator and LocalTraining. Thread-safe.

    :param main_parameters: parameters of the model
    :param step_parameters, contribution: parameters of the last global step, and what receives the contribution to a
      round; tensors of the same shapes on the CPU
    :param max_norm: bound on the norm of an average; 0: none
    """

    name: str  # of what a round averages
    ages: bool  # whether it loses value while the parameters change
    inner: torch.optim.Optimizer | None = None  # that takes the local steps

    def __init__(
        self,
        main_parameters: Sequence[torch.Tensor],
        step_parameters: Sequence[torch.Tensor],
        contribution: Sequence[torch.Tensor],
        max_norm: float = 0.0,
    ):
        self.main_parameters, self.step_parameters = tuple(main_parameters), tuple(step_parameters)
        self.contribution, self.max_norm = tuple(contribution), max_norm
        self.num_samples = 0  # since the last round
        self.lock = threading.RLock()  # hold it while the parameters of the model change

    def bound(self) -> float:
        """Return the norm to which the average of a round is clipped; 0: no bound."""
        return self.max_norm

    def confirm(self) -> None:
        """Record that the loaded contribution became part of a global step."""

    def set_aside(self) -> AbstractContextManager:
        """Give the model the parameters of the last global step while the context is open."""
        return nullcontext()

    def reset(self) -> None:
        """Start as at the beginning of the run, after the state was replaced."""

    def can_reset(self) -> bool:
        """Whether parameters of the model that are not finite are due to local updates alone."""
        return False


class GradientAccumulator(Accumulator):
    """Sum of the gradients of this peer's samples since the last round. A contribution is their mean."""

    name, ages = "gradients", True

    def __init__(self, *tensors: Sequence[torch.Tensor], max_norm: float = 0.0):
        super().__init__(*tensors, max_norm=max_norm)
        self._sums = [shared_zeros_like(parameter) for parameter in self.main_parameters]

    @torch.no_grad()
    def add(self, num_samples: int, _step: int = 0) -> int:
        """Accumulate the gradients of the model, means over `num_samples`. Return the samples accumulated so far."""
        with self.lock:
            for parameter, total in zip(self.main_parameters, self._sums, strict=True):
                if parameter.grad is not None:
                    total.add_(parameter.grad, alpha=num_samples)
            self.num_samples += num_samples
            return self.num_samples

    @torch.no_grad()
    def load(self) -> int:
        """Load the mean of the accumulated gradients as the contribution to a round, and start a new sum.

        :returns: the number of samples in the contribution; 0 if the sum of the finite gradients has overflowed
        """
        with self.lock:
            num_samples = self.num_samples
            for total, mean in zip(self._sums, self.contribution, strict=True):
                mean.copy_(total).mul_(1.0 / max(1, num_samples))
            self.drop()
        if math.isfinite(clip_norm(self.contribution, MAX_GRADIENT_NORM)):
            return num_samples
        torch._foreach_zero_(self.contribution)
        return 0

    @torch.no_grad()
    def take_back(self, num_samples: int) -> None:
        """Add the loaded contribution, which no round has used, to the sum again."""
        with self.lock:
            for mean, total in zip(self.contribution, self._sums, strict=True):
                total.add_(mean.to(total.device), alpha=num_samples)
            self.num_samples += num_samples

    @torch.no_grad()
    def drop(self) -> None:
        """Start a new sum."""
        with self.lock:
            self.num_samples = 0
            torch._foreach_zero_(self._sums)

    @torch.no_grad()
    def rebase(self) -> None:
        """Set the model to the newest global step."""
        torch._foreach_copy_(self.main_parameters, self.step_parameters)


@torch.no_grad()
def clip_norm(tensors: Sequence[torch.Tensor], max_norm: float) -> float:
    """Scale tensors in place so that their total norm is at most `max_norm` (0: no bound). Return the norm before."""
    norm = math.hypot(*(float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) for tensor in tensors))
    if max_norm > 0 and math.isfinite(norm) and norm > max_norm:
        for tensor in tensors:
            tensor.mul_(max_norm / (norm + 1e-6))
    return norm
