"""What a peer has computed since the last round: its contribution to the next one."""

import math
import threading
from collections.abc import Sequence

import torch


class GradientAccumulator:
    """Sum of the gradients of this peer's samples since the last round. Thread-safe.

    :param main_parameters: parameters of the model, whose `.grad` is accumulated
    :param contribution: receives the mean gradient for a round; tensors of the same shapes on the CPU
    :param max_norm: bound on the norm of the mean gradient; 0: no bound. transformers' Trainer would clip each
      micro-batch instead, which biases the mean
    """

    def __init__(self, main_parameters: Sequence[torch.Tensor], contribution: Sequence[torch.Tensor], max_norm: float):
        self.main_parameters, self.contribution = tuple(main_parameters), tuple(contribution)
        self.max_norm = max_norm
        self.num_samples = 0  # since the last round
        self.lock = threading.Lock()
        self._sums = [torch.zeros_like(parameter) for parameter in self.main_parameters]

    @torch.no_grad()
    def add(self, num_samples: int) -> int:
        """Accumulate the gradients of the model, which are means over `num_samples`.

        :returns: the number of samples accumulated so far
        """
        with self.lock:
            for parameter, total in zip(self.main_parameters, self._sums, strict=True):
                if parameter.grad is not None:
                    total.add_(parameter.grad, alpha=num_samples)
            self.num_samples += num_samples
            return self.num_samples

    @torch.no_grad()
    def load(self) -> int:
        """Load the clipped mean of the accumulated gradients as the contribution to a round, and start a new sum.

        :returns: the number of samples in the contribution
        """
        with self.lock:
            num_samples = self.num_samples
            for total, mean in zip(self._sums, self.contribution, strict=True):
                mean.copy_(total).mul_(1.0 / max(1, num_samples))
            self._reset()
        clip_norm(self.contribution, self.max_norm)
        return num_samples

    @torch.no_grad()
    def take_back(self, num_samples: int) -> int:
        """Add the loaded contribution, which no round has used, to the sum again.

        :returns: the number of samples accumulated so far
        """
        with self.lock:
            for mean, total in zip(self.contribution, self._sums, strict=True):
                total.add_(mean.to(total.device), alpha=num_samples)
            self.num_samples += num_samples
            return self.num_samples

    @torch.no_grad()
    def drop(self) -> None:
        """Drop the accumulated gradients: they belong to previous parameters."""
        with self.lock:
            self._reset()

    def _reset(self) -> None:
        self.num_samples = 0
        for total in self._sums:
            total.zero_()


@torch.no_grad()
def clip_norm(tensors: Sequence[torch.Tensor], max_norm: float) -> float:
    """Scale tensors in place so that their total norm is at most `max_norm` (0: no bound).

    :returns: the total norm before scaling
    """
    norm = math.hypot(*(float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) for tensor in tensors))
    if max_norm > 0 and math.isfinite(norm) and norm > max_norm:
        for tensor in tensors:
            tensor.mul_(max_norm / (norm + 1e-6))
    return norm
