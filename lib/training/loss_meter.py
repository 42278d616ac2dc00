"""The local loss, summed on its device."""

import torch


class LossMeter:
    """Sums the losses of micro-batches on their device, without a synchronisation each; skips what is not finite."""

    def __init__(self):
        self._sum: torch.Tensor | float = 0.0
        self._count: torch.Tensor | int = 0

    def add(self, loss: torch.Tensor) -> None:
        """`loss`: the mean over a micro-batch, or one such mean for each device."""
        loss = loss.detach().float().mean()
        finite = loss.isfinite()
        self._sum = self._sum + torch.where(finite, loss, 0.0)
        self._count = self._count + finite.int()

    def pop(self) -> tuple[float, int]:
        """The sum of the losses and their number since the last call."""
        result = float(self._sum), int(self._count)
        self._sum, self._count = 0.0, 0
        return result
