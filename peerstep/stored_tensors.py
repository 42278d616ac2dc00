"""Tensors in a temporary file, which other processes read one at a time."""

import mmap
import tempfile
from collections.abc import Iterable, Iterator
from multiprocessing.reduction import DupFd
from pathlib import Path

import torch


class StoredTensors:
    """Tensors in a file without a name: it is removed when the last process that has it open ends.

    A pickled object names the file, and is to be loaded once, by another process while this one runs.

    :param tensors: on the CPU; each is written before the next one is taken
    :param folder: of the file, on a disk; None: that for temporary files, which may be in memory
    :raises OSError: if the disk is full
    """

    def __init__(self, tensors: Iterable[torch.Tensor], folder: Path | None = None):
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  closed with this object
        self._entries: list[tuple[int, torch.dtype, torch.Size]] = []  # each begins at a page
        for tensor in tensors:
            offset = -(-self._file.tell() // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
            self._file.seek(offset)
            left = memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())
            while left:  # a call of the system writes 2 GiB at most
                left = left[self._file.write(left) :]
            self._entries.append((offset, tensor.dtype, tensor.shape))

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yield the tensors. Each is mapped to memory for as long as it is used; changes do not reach the file."""
        for offset, dtype, shape in self._entries:
            num_bytes = dtype.itemsize * shape.numel()
            if not num_bytes:
                yield torch.empty(shape, dtype=dtype)
                continue
            pages = mmap.mmap(self._file.fileno(), num_bytes, offset=offset, access=mmap.ACCESS_COPY)
            yield torch.frombuffer(pages, dtype=dtype).view(shape)

    def __getstate__(self) -> tuple:
        return DupFd(self._file.fileno()), self._entries

    def __setstate__(self, state: tuple) -> None:
        descriptor, self._entries = state
        self._file = open(descriptor.detach(), "rb", buffering=0)  # noqa: SIM115  closed with this object
