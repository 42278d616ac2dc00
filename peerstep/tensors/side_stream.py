"""Copies between a GPU and the host that wait for no kernel that the main thread has launched."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from peerstep.tensors.memory import shared_zeros_like


class SideStream:
    """A stream of the step thread for tensors that the main thread changes too.

    torch gives all threads the same stream. A blocking copy in it waits for all kernels of the main thread that were
    launched before, and each of N copies for those that were launched meanwhile: 24 s in a model of one stream, where
    448 copies alone take 0.04 s. Here, only the last change of the tensors counts. A device without streams (a CPU,
    MPS) has none of this: copies block, and `exists` is False. Hold one lock around each use of `beside` and `main`.

    :param device: of the tensors
    """

    def __init__(self, device: torch.device):
        self.device, self.exists = device, device.type in ("cuda", "xpu")
        self._stream = torch.Stream(device) if self.exists else None
        self.last_change = self._copied = None  # events: last change by the main thread, last use in `beside`

    def host_memory_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return zeros on the CPU to copy to without waiting: pinned memory; without streams shared memory."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        return torch.zeros_like(host, pin_memory=True) if self.exists else shared_zeros_like(host)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Launch what the context launches beside the main thread's kernels, after its last change of the tensors."""
        if self._stream is None:
            yield
            return
        if self.last_change is not None:
            self._stream.wait_event(self.last_change)
        with self._stream:
            yield
        self._copied = self._stream.record_event()

    @contextmanager
    def main(self) -> Iterator[None]:
        """Let the main thread change the tensors, on its own stream, after what `beside` has launched."""
        if self._stream is None:
            yield
            return
        stream = torch.accelerator.current_stream(self.device)
        if self._copied is not None:
            stream.wait_event(self._copied)
        yield
        self.last_change = stream.record_event()

    def wait(self) -> None:
        """Wait until what `beside` has launched is done."""
        if self._stream is not None:
            self._stream.synchronize()


@torch.no_grad()
def copy_from_device(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Copy tensors to memory of `SideStream.host_memory_like`, within `SideStream.beside`."""
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, non_blocking=target.is_pinned())
