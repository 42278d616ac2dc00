"""Signals and variables that a script gets from its shell, its service or its launcher."""

import contextlib
import ctypes
import os
import re
import select
import signal
import sys
import threading
from collections.abc import Iterator

from peerstep.peer.processes import STOP_REQUESTS, exit_after, libc, stop_requested

# What torchrun, mpirun, accelerate and operators of Kubernetes set. accelerate waits for all ranks if it finds them.
_LAUNCHERS = re.compile(
    r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE))|ROLE_NAME|MASTER_(ADDR|PORT)|MPI_LOCALN?RANK(S|ID)|"
    r"(TORCHELASTIC|OMPI_COMM_WORLD|PMI|MV2_COMM_WORLD|ACCELERATE|FSDP)_\w+"
)


def ignore_launcher() -> None:
    """Remove the variables by which a launcher gives each of its processes a rank, with one line on stderr."""
    if names := sorted(filter(_LAUNCHERS.fullmatch, os.environ)):
        what = "a peer is one process, and finds the others by --initial_peers; start it without torchrun or mpirun"
        print(f"warning: ignoring {', '.join(names)}: {what}", file=sys.stderr)
    for name in names:
        del os.environ[name]


class StopSignal:
    """Handler of SIGINT, SIGTERM and SIGHUP: the first signal sets `event`, the second ends the process immediately.

    Before `defer` is called, the script has nothing to finish, and the first signal ends it with exit code 0. `grace`
    seconds after the first signal the process is ended. A SIGHUP that is ignored (nohup) stays ignored.

    A handler in Python runs only when the main thread leaves a call of C. So a thread does what must happen: Python's
    handler in C writes the number of each signal to its pipe (`signal.set_wakeup_fd`).
    """

    def __init__(self, grace: float = 12.0):
        self.event = threading.Event()
        self.grace = grace
        self._requested = self._deferred = False
        self._previous: dict[int, object] = {}
        self._reading_end, self._writing_end = os.pipe()
        os.set_blocking(self._writing_end, False)
        threading.Thread(target=self._watch, name="StopSignal", daemon=True).start()

    def __enter__(self) -> "StopSignal":
        for number in STOP_REQUESTS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self.handle)
        self._previous_fd = signal.set_wakeup_fd(self._writing_end, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_exception) -> None:
        if self._requested:
            self.event.wait(1.0)  # until the thread has announced it
        signal.set_wakeup_fd(self._previous_fd)
        stop_requested.clear()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def defer(self) -> None:
        """From now on the main thread polls `event` and shuts down: signals no longer raise SystemExit."""
        self._deferred = True

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Defer a signal to the end of the block, where it raises SystemExit."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
            if self._requested:
                raise SystemExit(0)

    def is_set(self) -> bool:
        return self._requested or self.event.is_set()

    def handle(self, number: int, _frame) -> None:
        if not (self._requested or self._deferred):
            self._requested = True
            raise SystemExit(0)
        self._requested = True

    def _watch(self) -> None:
        first = self._read_signal()
        _say(f"{signal.Signals(first).name}: stopping (send it again to end at once)")
        stop_requested.set()
        self.event.set()
        exit_after(self.grace, 0, f"Still busy {self.grace:.0f} seconds after the signal")
        second = self._read_signal()
        # The shell, the kernel and systemd may each send a SIGHUP when a terminal ends.
        while second == signal.SIGHUP:
            second = self._read_signal()
        _say("Stopped at once")
        # By the signal itself: a shell then ends its loop, and systemd does not start the peer again.
        libc.signal(second, ctypes.c_void_p(None))  # SIG_DFL; `signal.signal` works in the main thread only
        os.kill(os.getpid(), second)

    def _read_signal(self) -> int:
        while (number := os.read(self._reading_end, 1)[0]) not in self._previous:
            pass  # SIGCHLD of torch's DataLoader, for example
        return number


def _say(line: str) -> None:
    """Write a line to stderr if that is possible at once: `print` may fail or block."""
    with contextlib.suppress(OSError, ValueError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, f"{line}\n".encode())
