"""Running sum of the local loss."""

import torch


class LossMeter:
    """Sums the losses of micro-batches on their device, without a synchronization for each. Skips NaN and Inf."""

    def __init__(self):
        self._sum: torch.Tensor | float = 0.0
        self._count: torch.Tensor | int = 0

    def add(self, loss: torch.Tensor) -> None:
        """Add the loss of a micro-batch.

        :param loss: a scalar, the mean over the micro-batch; or a vector of such means, one for each device
        """
        loss = loss.detach().float().mean()
        finite = loss.isfinite()
        self._sum = self._sum + torch.where(finite, loss, 0.0)
        self._count = self._count + finite.int()

    def mean(self) -> float | None:
        """Return the mean of the losses since the last call of `pop`, if there are any. For other threads."""
        total, count = float(self._sum), int(self._count)
        return total / count if count else None

    def pop(self) -> tuple[float, int]:
        """Return the sum and the number of the losses since the last call, and reset both."""
        result = float(self._sum), int(self._count)
        self._sum, self._count = 0.0, 0
        return result
