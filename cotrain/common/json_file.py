"""JSON files: a small one that a process keeps across restarts, written atomically, and JSON Lines."""

import contextlib
import errno
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from cotrain.common.atomic_files import new_file
from cotrain.common.errors import describe, first_line

logger = logging.getLogger(__name__)

T = TypeVar("T")


def write_json(path: Path, content: object) -> None:
    """Write a JSON file atomically."""
    with new_file(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_records(path: Path, name: str = "step", kind: type = int) -> list[dict]:
    """Return the records of a JSON Lines file that have a field of a kind. Damaged lines are skipped."""
    records = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError, RecursionError):  # ValueError is also raised for invalid UTF-8
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict) and type(record.get(name)) is kind]


class JsonFile:
    """File for content that the process also holds in memory. It is read once, after a restart."""

    def __init__(self, path: Path):
        self.path = path
        self._has_warned = False

    def load(self, parse: Callable[[object], T]) -> T | None:
        """Return the parsed content; None without a file. An invalid one is renamed to NAME.old, with a warning.

        :param parse: raises ValueError, KeyError, TypeError or AttributeError if the content is invalid
        """
        if not self.path.exists():
            return None
        try:
            return parse(json.loads(self.path.read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            kept = self.path.with_name(f"{self.path.name}.old")
            self.path.replace(kept)
            reason = "a value is missing, or of another type" if isinstance(error, TypeError) else first_line(error)
            logger.warning(f"Starting without {self.path}, renamed to {kept.name}: {reason}")
            return None

    def save(self, content: object) -> None:
        """Write the file. Log one warning for consecutive failures, such as on a full disk, instead of raising."""
        try:
            write_json(self.path, content)
            self._has_warned = False
        except OSError as error:
            if not self._has_warned:
                logger.warning(f"Cannot write {self.path}: {describe(error)}. Trying again with the next change")
            self._has_warned = True


class JsonLinesFile:
    """A file with one JSON object per line, which is on disk (fsync) when `write` returns.

    If a write fails (a full disk), lines are kept in memory (25 MB for 125 000 steps) and written first at the next.

    :param max_bytes: size at which a file of less worth becomes NAME.1. Its lines are neither synced nor kept
    """

    def __init__(self, path: Path, max_bytes: int | None = None):
        self.path, self.max_bytes = path, max_bytes
        path.parent.mkdir(parents=True, exist_ok=True)
        self._waiting: list[bytes] = []
        content = path.read_bytes() if path.is_file() else b""
        end = content.rfind(b"\n") + 1
        if end < len(content):  # a process died in a write; the next line would follow the incomplete one
            logger.warning(f"{path} ends with an incomplete line: removed its {len(content) - end} bytes")
            os.truncate(path, end)

    def write(self, record: dict) -> None:
        line = json.dumps(record, allow_nan=self.max_bytes is not None)  # what others read has no NaN
        self._waiting.append(line.encode() + b"\n")
        self.flush()

    def flush(self) -> None:
        """Write the lines that wait in memory.

        If that fails, a warning is logged. The lines wait for the next call; with `max_bytes` they are dropped.
        """
        if not self._waiting:
            return
        try:
            if self.max_bytes is not None and self.path.is_file() and self.path.stat().st_size > self.max_bytes:
                self.path.replace(f"{self.path}.1")
            # Opened for each write: a file that was moved or a disk that was remounted needs no special handling.
            with open(self.path, "ab", buffering=0) as file:
                size, data = file.tell(), b"".join(self._waiting)
                try:
                    if file.write(data) < len(data):  # a disk that fills up accepts a part first
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    if self.max_bytes is None:
                        os.fsync(file.fileno())
                except OSError:
                    file.truncate(size)
                    raise
            self._waiting.clear()
        except OSError as error:
            logger.warning(f"Cannot write {self.path}: {describe(error)}. {len(self._waiting)} steps wait in memory")
            if self.max_bytes is not None:
                self._waiting.clear()
