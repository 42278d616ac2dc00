"""The life of a peer's processes: children that end with their parent, signals that end a run cleanly, and a watchdog
for children that die.

hivemind starts a DHT process, two averagers, and libp2p's daemon. Left to themselves they outlive a killed parent and
go on offering its state; Ctrl-C kills the daemon but not the trainer; and nobody notices when one of them dies.
"""

import contextlib
import ctypes
import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable

import psutil

from lib.common.threads import PeriodicThread

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_libc = ctypes.CDLL(None, use_errno=True)


def leave_with_parent() -> None:
    """In each forked child: end when the parent does, and stay out of the terminal's Ctrl-C.

    The kernel watches the thread that forked: hivemind's objects must be built in the main thread. For the children of
    `subprocess`, which knows no hooks, it is the `preexec_fn`.
    """
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    if sys.platform == "linux":
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


_guarded = False


def guard_children() -> None:
    """Let every process that is forked from now on end with this one. Call it once, before hivemind starts any."""
    global _guarded
    if not _guarded:
        # Averagers hold locks and cannot be pickled, as "spawn" and "forkserver" (Python 3.14's default) need.
        multiprocessing.set_start_method("fork", force=True)
        os.register_at_fork(after_in_child=leave_with_parent)
        _guarded = True


def start_shared_memory_manager() -> None:
    """Let torch start its helper for shared memory while no signal can get in between.

    libshm waits for it in a loop that a signal makes endless. The helper inherits the blocked signals, so that Ctrl-C
    does not reach it: without it, what peers share would stay in /dev/shm.
    """
    import torch  # takes a second, in which a script can already answer signals

    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        torch.multiprocessing.set_sharing_strategy("file_system")  # as hivemind does
        torch.zeros(1).share_memory_()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def keep_memory_shared() -> None:
    """Let children share what is there now with us. Call it before the first of them is forked.

    A process whose garbage collector walks over what it inherited gets a copy of it all: 60 MB in each of ours, some
    minutes after the start.
    """
    gc.collect()
    gc.freeze()


def exit_after(seconds: float, code: int, why: str) -> threading.Timer:
    """End this process `seconds` from now whatever the main thread waits for. Children follow, see guard_children."""

    def end() -> None:
        logger.warning(f"{why}: ending now")
        os._exit(code)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    return timer


class StopSignal:
    """SIGINT and SIGTERM as a wish to stop. The first sets `event`; a second ends the process at once.

    Before `defer` is called there is nothing to finish yet, and the first signal ends the script with exit code 0.

    :param grace: seconds from the first signal within which the process ends in any case
    """

    def __init__(self, grace: float = 12.0):
        self.event = threading.Event()
        self.grace = grace
        self._requested = self._deferred = False
        self._previous: dict[int, object] = {}
        # A handler runs in the middle of whatever the main thread does, maybe with a lock of `threading` taken: it
        # only writes to a pipe, and a thread does the rest.
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
        """From here on the main thread watches `event` and ends by itself."""
        self._deferred = True

    def is_set(self) -> bool:
        return self._requested

    def _handle(self, number: int, _frame) -> None:
        if self._requested:
            os.write(2, b"Stopped at once\n")
            os._exit(128 + number)
        self._requested = True
        os.write(2, f"{signal.Signals(number).name}: stopping (again: at once)\n".encode())
        os.write(self._writing_end, b"x")
        if not self._deferred:
            raise SystemExit(0)

    def _watch(self) -> None:
        os.read(self._reading_end, 1)
        self.event.set()
        exit_after(self.grace, 0, f"Still busy {self.grace:.0f} seconds after the signal")


class Watchdog(PeriodicThread):
    """Ends the process with a message when one of its children has died.

    hivemind waits for answers from its children without a time limit, so the main thread may never come back.

    :param children: name -> process object with `is_alive()`
    :param on_death: called with the message; the default logs it and exits with code 1
    """

    def __init__(self, children: dict[str, multiprocessing.Process], period: float = 1.0,
                 on_death: Callable[[str], None] | None = None):  # fmt: skip
        super().__init__(period)
        self.children, self.on_death = children, on_death or self._end
        self.daemons = [
            process
            for child in children.values()
            for process in psutil.Process(child.pid).children()
            if process.name().startswith("p2pd")
        ]

    def work(self) -> None:
        dead = [name for name, child in self.children.items() if not child.is_alive()]
        dead += ["p2p daemon" for process in self.daemons if not _is_running(process)]
        if dead and not self.stopped.is_set():
            self.on_death(f"The {dead[0]} process has died (out of memory?); start again to rejoin")
            self.stop()

    @staticmethod
    def _end(message: str) -> None:
        logger.error(message)
        os._exit(1)


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
