"""What a peer has computed since the last round: its contribution to the next one."""

import math
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from peerstep.rounds.bounds import MAX_GRADIENT_NORM
from peerstep.tensors.memory import shared_zeros_like
from peerstep.tensors.side_stream import SideStream, copy_from_device

# Elements whose norm is computed at once: float64 takes a copy of them. In float32, a norm of 10^8 is wrong by 1 %.
NORM_PART = 2**18


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
        self.side_stream = SideStream(self.main_parameters[0].device)

    def bound(self) -> float:
        """Return the norm to which the average of a round is clipped; 0: no bound."""
        return self.max_norm

    def move(self, model: torch.nn.Module, device: torch.device) -> None:
        """Move a model with the parameters to another device, with what was computed on its own since the last round.

        Also while a round runs, whose contribution is on the CPU already.
        """
        raise NotImplementedError

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
        self._staging: list[torch.Tensor] = []  # copies of the sums, where they come from a stream
        if self.side_stream.exists:
            self._staging = [self.side_stream.host_memory_like(total) for total in self._sums]
        self._num_kept = 0  # samples of the last contribution that count in the next one
        self._staging_lock, self._uploaded = threading.Lock(), None  # an event: the last copy from there to the device

    @torch.no_grad()
    def add(self, num_samples: int, _step: int = 0) -> int:
        """Accumulate the gradients of the model, means over `num_samples`. Return the samples accumulated so far."""
        pairs = zip(self.main_parameters, self._sums, strict=True)
        used = [(total, parameter.grad) for parameter, total in pairs if parameter.grad is not None]
        with self.lock, self.side_stream.main():
            if used:
                torch._foreach_add_(*map(list, zip(*used, strict=True)), alpha=num_samples)
            self.num_samples += num_samples
            return self.num_samples

    @torch.no_grad()
    def load(self) -> int:
        """Load the mean of the accumulated gradients as the contribution to a round, and start a new sum.

        :returns: the number of samples in the contribution; 0 if the sum of the finite gradients has overflowed
        """
        with self._staging_lock:
            with self.lock:
                num_samples, num_kept = self.num_samples, self._num_kept
                with self.side_stream.beside():
                    copy_from_device(self._sums if self._staging else (), self._staging)
                    if not self._staging:
                        self._load_means(self._sums, num_samples, num_kept)
                    self._clear()
            if self._staging:
                self.side_stream.wait()
                self._load_means(self._staging, num_samples, num_kept)
        if math.isfinite(clip_norm(self.contribution, MAX_GRADIENT_NORM)):
            return num_samples
        torch._foreach_zero_(self.contribution)
        return 0

    def _load_means(self, sums: Sequence[torch.Tensor], num_samples: int, num_kept: int) -> None:
        """Load the mean of sums, which are on the CPU, and of what `take_back` has kept."""
        for mean, total in zip(self.contribution, sums, strict=True):
            total = total.add_(mean, alpha=num_kept) if num_kept else total
            torch.mul(total, 1.0 / max(1, num_samples), out=mean)

    def move(self, model: torch.nn.Module, device: torch.device) -> None:
        with self._staging_lock, self.lock:
            model.to(device)
            self._sums = [total.to(device) for total in self._sums]

    def take_back(self, num_samples: int) -> None:
        """Count the loaded contribution, which no round has used, in the next one. It stays where it is until then."""
        with self.lock:
            self.num_samples += num_samples
            self._num_kept = num_samples

    @torch.no_grad()
    def drop(self) -> None:
        """Start a new sum."""
        with self.lock, self.side_stream.main():
            self._clear()

    def _clear(self) -> None:
        self.num_samples = self._num_kept = 0
        torch._foreach_zero_(self._sums)

    @torch.no_grad()
    def rebase(self) -> None:
        """Set the model to the newest global step. From pinned memory, the copies wait for no kernel, nor the host."""
        if not self._staging:
            torch._foreach_copy_(self.main_parameters, self.step_parameters)
            return
        with self._staging_lock:
            if self._uploaded is not None:
                self._uploaded.synchronize()
            torch._foreach_copy_(self._staging, self.step_parameters)
            with self.lock, self.side_stream.main():
                torch._foreach_copy_(self.main_parameters, self._staging, non_blocking=True)
            self._uploaded = self.side_stream.last_change


@torch.no_grad()
def clip_norm(tensors: Sequence[torch.Tensor], max_norm: float) -> float:
    """Scale tensors in place so that their total norm is at most `max_norm` (0: no bound). Return the norm before."""
    parts = (part for tensor in tensors for part in tensor.reshape(-1).split(NORM_PART))
    norm = math.hypot(*(float(torch.linalg.vector_norm(part, dtype=torch.float64)) for part in parts))
    if max_norm > 0 and math.isfinite(norm) and norm > max_norm:
        for tensor in tensors:
            tensor.mul_(max_norm / (norm + 1e-6))
    return norm
