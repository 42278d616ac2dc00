"""What a peer has computed since the last round: its contribution to the next one.

GradientAccumulator, and LocalTraining in local_updates.py, give the optimizer the same methods.
"""

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from peerstep.base import shared_zeros_like
from peerstep.bounds import MAX_GRADIENT_NORM


class Accumulator:
    """The tensors that an accumulator works with, and the samples in it.

    :param main_parameters: parameters of the model
    :param step_parameters, contribution: parameters of the last global step, and what receives the contribution to a
      round; tensors of the same shapes on the CPU
    """

    def __init__(
        self,
        main_parameters: Sequence[torch.Tensor],
        step_parameters: Sequence[torch.Tensor],
        contribution: Sequence[torch.Tensor],
    ):
        self.main_parameters, self.step_parameters = tuple(main_parameters), tuple(step_parameters)
        self.contribution = tuple(contribution)
        self.num_samples = 0  # since the last round
        self.lock = threading.RLock()


class GradientAccumulator(Accumulator):
    """Sum of the gradients of this peer's samples since the last round. Thread-safe. A contribution is their mean.

    :param tensors: of Accumulator
    """

    name = "gradients"
    ages = True  # it loses value while the parameters change
    inner: torch.optim.Optimizer | None = None  # that takes the local steps

    def __init__(self, *tensors: Sequence[torch.Tensor]):
        super().__init__(*tensors)
        self._sums = [shared_zeros_like(parameter) for parameter in self.main_parameters]

    @torch.no_grad()
    def add(self, num_samples: int) -> int:
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
    def take_back(self, num_samples: int) -> int:
        """Add the loaded contribution, which no round has used, to the sum again. Return the samples in it."""
        with self.lock:
            for mean, total in zip(self.contribution, self._sums, strict=True):
                total.add_(mean.to(total.device), alpha=num_samples)
            self.num_samples += num_samples
            return self.num_samples

    def confirm(self) -> None:
        """Record that the loaded contribution became part of a global step."""

    @torch.no_grad()
    def drop(self) -> None:
        """Start a new sum."""
        with self.lock:
            self.num_samples = 0
            torch._foreach_zero_(self._sums)

    def take_local_step(self, num_samples: int, _step: int) -> int:
        """Use the gradients of the model in a local step of global step `_step + 1`. Return as `add` does."""
        return self.add(num_samples)

    @torch.no_grad()
    def rebase(self) -> None:
        """Set the model to the newest global step."""
        torch._foreach_copy_(self.main_parameters, self.step_parameters)

    def set_aside(self) -> AbstractContextManager:
        """Give the model the parameters of the last global step while the context is open: it has them."""
        return nullcontext()

    def reset(self) -> None:
        """Start as at the beginning of the run, after the state was replaced."""

    def can_reset(self) -> bool:
        """Whether parameters of the model that are not finite are due to local updates alone."""
        return False


class UpdateAccumulator(Accumulator):
    """Local updates of this peer since the last round, as a pseudo-gradient (DiLoCo, arXiv 2311.08105). Thread-safe.

    The pseudo-gradient is `base - parameters`. The base is the parameters of the last global step once the model has
    them, and until then the parameters of the model when the contribution to that step was loaded. Local steps
    during a round and before its result is copied therefore count in the next round.

    :param tensors: of Accumulator. Hold `lock` while changing the parameters of the model
    :param project: returns what a round takes of a tensor; the rest stays in the model as a local update. None: all
    """

    def __init__(
        self, *tensors: Sequence[torch.Tensor], project: Callable[[torch.Tensor], torch.Tensor] | None = None
    ):
        super().__init__(*tensors)
        self.project = project
        self._base = [shared_zeros_like(parameter).copy_(parameter.detach()) for parameter in self.step_parameters]
        self._loaded = [shared_zeros_like(base) for base in self._base]  # parameters of the model at the last load
        self._is_loaded = False  # whether a round has the loaded contribution

    def add(self, num_samples: int) -> int:
        """Count the samples of a local step. Hold `lock` from before the parameters change."""
        with self.lock:
            self.num_samples += num_samples
            return self.num_samples

    @torch.no_grad()
    def load(self) -> int:
        """Load the pseudo-gradient as the contribution to a round.

        :returns: the number of samples in the contribution; 0 if the parameters of the model are not finite
        """
        with self.lock:
            num_samples, self.num_samples = self.num_samples, 0
            self._is_loaded = True
            for base, loaded, parameter, difference in zip(
                self._base, self._loaded, self.main_parameters, self.contribution, strict=True
            ):
                loaded.copy_(parameter)
                torch.sub(base, loaded, out=difference)
            if not math.isfinite(clip_norm(self.contribution, MAX_GRADIENT_NORM)):
                num_samples = 0
                torch._foreach_copy_(self._loaded, self._base)
                torch._foreach_zero_(self.contribution)
            elif self.project is not None:
                for loaded, difference in zip(self._loaded, self.contribution, strict=True):
                    sent = self.project(difference)
                    loaded.add_(difference - sent)
                    difference.copy_(sent)
        return num_samples

    def take_back(self, num_samples: int) -> int:
        """Count the loaded contribution, which no round has used, in the next round. Return the samples for it."""
        with self.lock:
            self._is_loaded = False
            return self.add(num_samples)

    @torch.no_grad()
    def confirm(self) -> None:
        with self.lock:
            self._is_loaded = False
            self._base, self._loaded = self._loaded, self._base

    @torch.no_grad()
    def local_changes(self) -> list[torch.Tensor]:
        """Return the local updates that no step has used, on the device of the model."""
        return [
            parameter - base.to(parameter.device)
            for parameter, base in zip(self.main_parameters, self._base, strict=True)
        ]

    @torch.no_grad()
    def rebase(self, changes: Sequence[torch.Tensor] | None = None) -> None:
        """Set the model to the newest global step plus local updates; default: those that no step has used."""
        with self.lock:
            changes = self.local_changes() if changes is None else changes
            for parameter, change, newest, base, loaded in zip(
                self.main_parameters, changes, self.step_parameters, self._base, self._loaded, strict=True
            ):
                parameter.copy_(newest.to(parameter.device) + change)
                if self._is_loaded:
                    loaded.add_(newest - base)
                base.copy_(newest)

    def drop(self) -> None:
        """Drop the local updates: set the model to the parameters of the last global step."""
        self.rebase([torch.zeros_like(parameter) for parameter in self.main_parameters])
        with self.lock:
            self.num_samples = 0


@torch.no_grad()
def clip_norm(tensors: Sequence[torch.Tensor], max_norm: float) -> float:
    """Scale tensors in place so that their total norm is at most `max_norm` (0: no bound). Return the norm before."""
    norm = math.hypot(*(float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) for tensor in tensors))
    if max_norm > 0 and math.isfinite(norm) and norm > max_norm:
        for tensor in tensors:
            tensor.mul_(max_norm / (norm + 1e-6))
    return norm
