"""Processes of a peer: children that end with their parent, clean shutdown on signals, and a watchdog.

hivemind starts a DHT process, two averager processes, and libp2p's daemon. By default they outlive a killed parent and
continue to offer its state, Ctrl-C kills the daemon but not the trainer, and the death of a child is not noticed.
"""

import contextlib
import ctypes
import gc
import logging
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from functools import cache

import psutil

from cotrain.common.errors import TEMPORARY
from cotrain.common.threads import PeriodicThread

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_libc = ctypes.CDLL(None, use_errno=True)
_exits: list[threading.Timer] = []  # of `exit_after`


def signal_at_end_of_parent(number: int) -> None:
    """Let the kernel send this process a signal when its parent ends. Linux only; elsewhere nothing happens."""
    if sys.platform == "linux":
        _libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def leave_with_parent() -> None:
    """End a child process when its parent ends, and detach it from the terminal's Ctrl-C. Runs in each forked child.

    The kernel watches the parent's thread that forked, so hivemind's objects must be built in the main thread.
    `subprocess` runs no fork hooks: pass this function as `preexec_fn`.
    """
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    signal_at_end_of_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@cache
def guard_children() -> None:
    """Make every process that is forked from now on end with this one. Call this before hivemind forks a process."""
    # "spawn" and "forkserver" (Python 3.14's default) pickle the process object; averagers hold locks, which cannot be
    # pickled.
    multiprocessing.set_start_method("fork", force=True)
    os.register_at_fork(after_in_child=leave_with_parent)


def start_shared_memory_manager() -> None:
    """Start torch's shared-memory manager with SIGINT and SIGTERM blocked.

    libshm waits for the manager in a loop that a signal makes endless. The manager inherits the blocked signals, so
    Ctrl-C does not end it: without the manager, shared tensors would stay in /dev/shm.
    """
    import torch  # the import takes a second; the script already handles signals

    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        torch.multiprocessing.set_sharing_strategy("file_system")  # as hivemind does
        torch.zeros(1).share_memory_()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def keep_memory_shared() -> None:
    """Exclude all current objects from garbage collection. Call this before the first child is forked.

    A child's garbage collector would write to the objects that it shares with its parent: 60 MB of copies each.
    """
    gc.collect()
    gc.freeze()
    return_free_memory()


def return_free_memory() -> None:
    """Return the heap's free memory to the system. A child that is forked later would keep its pages."""
    if hasattr(_libc, "malloc_trim"):  # of GNU's library
        _libc.malloc_trim(0)


def exit_after(seconds: float, code: int, why: str) -> None:
    """End this process and its children after `seconds`, even if the main thread is blocked."""

    def end() -> None:
        logger.warning(f"{why}: ending now")
        os._exit(code)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    _exits.append(timer)


def call_off_exits() -> None:
    """Let this process live: it has shut down what `exit_after` was to end, and has other things to do."""
    while _exits:
        _exits.pop().cancel()


class StopSignal:
    """Handler of SIGINT and SIGTERM: the first signal sets `event`, the second ends the process immediately.

    Before `defer` is called, the script has nothing to finish, and the first signal ends it with exit code 0. `grace`
    seconds after the first signal the process is ended.
    """

    def __init__(self, grace: float = 12.0):
        self.event = threading.Event()
        self.grace = grace
        self._requested = self._deferred = False
        self._previous: dict[int, object] = {}
        # The handler may interrupt the main thread while it holds a lock of `threading`. The handler therefore only
        # writes to a pipe, and a thread sets the event.
        self._reading_end, self._writing_end = os.pipe()
        threading.Thread(target=self._watch, name="StopSignal", daemon=True).start()

    def __enter__(self) -> "StopSignal":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_exception) -> None:
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
        return self._requested

    def _handle(self, number: int, _frame) -> None:
        if self._requested:
            os.write(2, b"Stopped at once\n")
            # By the signal itself: a shell then ends its loop, and systemd does not start the peer again.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._requested = True
        os.write(2, f"{signal.Signals(number).name}: stopping (send it again to end at once)\n".encode())
        os.write(self._writing_end, b"x")
        if not self._deferred:
            raise SystemExit(0)

    def _watch(self) -> None:
        os.read(self._reading_end, 1)
        self.event.set()
        exit_after(self.grace, 0, f"Still busy {self.grace:.0f} seconds after the signal")


class Watchdog(PeriodicThread):
    """Ends the process with a message and exit code TEMPORARY when a child has died, or when it hangs.

    hivemind waits for answers of its children without a timeout, so the main thread may be blocked forever.

    :param longest_wait: seconds between two calls of `record_work` after which the process hangs. The time that the
        machine sleeps does not count
    """

    def __init__(self, children: dict[str, multiprocessing.Process], longest_wait: float = math.inf):
        super().__init__(period=1.0)
        self.children, self.longest_wait = children, longest_wait
        self.record_work()
        self.daemons = [
            process
            for child in children.values()
            for process in psutil.Process(child.pid).children()
            if process.name().startswith("p2pd")
        ]

    def record_work(self) -> None:
        self._worked_at = time.monotonic()

    def find_fault(self) -> str | None:
        """Return why the process must end; None if it is well."""
        dead = [name for name, child in self.children.items() if not child.is_alive()]
        dead += ["p2p daemon" for process in self.daemons if not _is_running(process)]
        if dead:
            return f"The {dead[0]} process has died (out of memory?); start again to rejoin"
        if time.monotonic() > self._worked_at + self.longest_wait:
            return f"Nothing was done for {self.longest_wait:.0f} seconds: this peer hangs; start again to rejoin"
        return None

    def work(self) -> None:
        if (fault := self.find_fault()) and not self.stopped.is_set():
            logger.error(fault)
            os._exit(TEMPORARY)


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
