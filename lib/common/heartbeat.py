"""A sign of life for the supervisor of a process: run_forever.py."""

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil

from lib.common.json_file import write_json
from lib.common.threads import PeriodicThread

VARIABLE = "COLLABORATION_HEARTBEAT"  # environment variable of a supervised process: the file to write
PERIOD = 5.0  # seconds between two beats


class Heartbeat(PeriodicThread):
    """Writes a file: a number that grows while this process and its descendants run, and one that grows with its work.

    A long wait is not a hang: the process says how long its work may stand still.

    :param path: the file; None if nobody supervises this process
    :param longest_wait: seconds between two calls of `note_work` after which the process hangs
    """

    def __init__(self, path: Path | None, longest_wait: float):
        super().__init__(PERIOD)
        self.path, self.longest_wait = path, longest_wait
        self._beats = self._work_done = 0
        self._lock = threading.Lock()

    def note_work(self) -> None:
        """Note that work continues. The next beat reports it; the first call reports it immediately."""
        self._work_done += 1
        if self._work_done == 1 and self.path is not None:
            self.work()

    def work(self) -> None:
        if any(_is_frozen(process) for process in psutil.Process().children(recursive=True)):
            return
        # On a full disk the beat is lost. That must not end this thread: later beats may be written.
        with self._lock, contextlib.suppress(OSError):
            self._beats += 1
            write_json(self.path, {"beats": self._beats, "work": self._work_done, "longest_wait": self.longest_wait})


def _is_frozen(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


@contextlib.contextmanager
def open_heartbeat(longest_wait: float) -> Iterator[Heartbeat]:
    """Beat while the context is open, if a supervisor asks for it."""
    path = os.environ.get(VARIABLE)
    heartbeat = Heartbeat(Path(path) if path else None, longest_wait)
    if path:
        heartbeat.work()
        heartbeat.start()
    try:
        yield heartbeat
    finally:
        heartbeat.stop()


def read_heartbeat(path: Path) -> dict | None:
    """Return what the process has written; None before its first beat."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
