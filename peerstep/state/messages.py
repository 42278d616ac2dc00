"""Messages in a temporary file, which other processes read one at a time."""

import os
import tempfile
from collections.abc import Iterable, Iterator
from multiprocessing.resource_sharer import DupFd
from pathlib import Path

LENGTH_BYTES = 4  # before each message


class StoredMessages:
    """Messages in a file without a name: it is removed when the last process that has it open ends.

    A pickled object names the file, and is to be loaded once, by another process while this one runs.

    :param messages: each is written before the next one is taken
    :param folder: of the file, on a disk; None: that for temporary files, which may be in memory
    :raises OSError: if the disk is full
    """

    def __init__(self, messages: Iterable[bytes], folder: Path | None = None):
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  closed with this object
        for message in messages:
            self._file.write(len(message).to_bytes(LENGTH_BYTES, "big") + message)
        self._file.flush()

    def __iter__(self) -> Iterator[bytes]:
        offset = 0
        while header := os.pread(self._file.fileno(), LENGTH_BYTES, offset):
            offset, length = offset + LENGTH_BYTES, int.from_bytes(header, "big")
            yield os.pread(self._file.fileno(), length, offset)
            offset += length

    def __getstate__(self) -> DupFd:
        return DupFd(self._file.fileno())

    def __setstate__(self, descriptor: DupFd) -> None:
        self._file = open(descriptor.detach(), "rb", buffering=0)  # noqa: SIM115  closed with this object
