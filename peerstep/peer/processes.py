"""Processes of a peer: children that end with their parent, and a watchdog.

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
import resource
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from functools import cache
from typing import NoReturn

import psutil

from peerstep.peer.threads import PeriodicThread

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
STOP_REQUESTS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP  # to stop
stop_requested = threading.Event()  # set after a signal to stop
libc = ctypes.CDLL(None, use_errno=True)
ENOUGH_FILES = 65_536  # open files of a process
EXIT_TEMPORARY = 75  # EX_TEMPFAIL of sysexits.h: another start may help


def signal_at_end_of_parent(number: int) -> None:
    """Let the kernel send this process a signal when its parent ends. Linux only; elsewhere nothing happens."""
    if sys.platform == "linux":
        libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def leave_with_parent() -> None:
    """End a child process when its parent ends, and detach it from the terminal's Ctrl-C. Runs in each forked child.

    The kernel watches the parent's thread that forked, so hivemind's objects must be built in the main thread.
    `subprocess` runs no fork hooks: pass this function as `preexec_fn`.
    """
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    signal_at_end_of_parent(signal.SIGKILL)
    signal.set_wakeup_fd(-1)  # the parent reads the pipe, see StopSignal
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@cache
def guard_children() -> None:
    """Make every process that is forked from now on end with this one. Call this before hivemind forks a process."""
    # "spawn" and "forkserver" (Python 3.14's default) pickle the process object; averagers hold locks, which cannot be
    # pickled.
    multiprocessing.set_start_method("fork", force=True)
    # Before it is detached, a child has the handlers of its parent: a Ctrl-C would count twice.
    masks: list[set] = []
    os.register_at_fork(
        before=lambda: masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, STOP_REQUESTS)),
        after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop()),
        after_in_child=lambda: (leave_with_parent(), signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop())),
    )


def start_shared_memory_manager() -> None:
    """Start torch's shared-memory manager with SIGINT and SIGTERM blocked, and TMPDIR short enough for its socket.

    libshm waits for the manager in a loop that a signal makes endless. The manager inherits the blocked signals, so
    Ctrl-C does not end it: without the manager, shared tensors would stay in /dev/shm.
    """
    import torch  # the import takes a second; the script already handles signals

    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    # The path of a socket has at most 107 bytes. The variable is for child processes: `tempfile` keeps its own folder.
    folders = (tempfile.gettempdir(), os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp", "/var/tmp")
    short = [folder for folder in folders if len(os.fsencode(folder)) <= 55 and os.access(folder, os.W_OK | os.X_OK)]
    os.environ["TMPDIR"] = next(iter(short), folders[0])
    try:
        torch.multiprocessing.set_sharing_strategy("file_system")  # as hivemind does
        torch.zeros(1).share_memory_()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def raise_file_limit() -> int:
    """Raise the limit on open files of this process and its children to ENOUGH_FILES if it is lower. Return it.

    Shells start with 1,024, which libp2p's daemon exceeds in a run of some hundred peers.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(ENOUGH_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def keep_memory_shared() -> None:
    """Exclude all current objects from garbage collection. Call this before the first child is forked.

    A child's garbage collector would write to the objects that it shares with its parent: 60 MB of copies each.
    """
    gc.collect()
    gc.freeze()
    return_free_memory()


def return_free_memory() -> None:
    """Return the heap's free memory to the system. A child that is forked later would keep its pages."""
    if hasattr(libc, "malloc_trim"):  # of GNU's library
        libc.malloc_trim(0)


def keep_free_memory() -> None:
    """Keep what this process frees for the next local step. Call this once its children are forked.

    GNU's library returns it to the system, and the next local step faults it in again: 11,155 page faults in one of 8
    samples of a small ALBERT, 0.34 CPU seconds, of which 0.025 in the kernel. With this, 121, 0.32 and 0.001.
    """
    if hasattr(libc, "mallopt"):
        for option, size in ((-1, 2**29), (-3, 2**25)):  # M_TRIM_THRESHOLD, and M_MMAP_THRESHOLD at its largest
            libc.mallopt(option, size)


def end_process(code: int, message: str, level: int = logging.WARNING) -> NoReturn:
    """Log a message, and end this process and its children, from any thread and even if the log blocks.

    A terminal after Ctrl-S, or a pipe whose reader has stopped, takes no line, and blocks the threads that log.
    """
    try:
        line = threading.Thread(target=logger.log, args=(level, message), daemon=True)
        line.start()
        line.join(1.0)
    finally:
        os._exit(code)


def exit_after(seconds: float, code: int, why: str) -> None:
    """End this process and its children after `seconds`, even if the main thread is blocked."""
    timer = threading.Timer(seconds, end_process, args=(code, f"{why}: ending now"))
    timer.daemon = True
    timer.start()


def call_off_exits() -> None:
    """Cancel the pending `exit_after`s: what they were to end has shut down, and this process has more to do."""
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer) and thread.function is end_process:
            thread.cancel()


class Watchdog(PeriodicThread):
    """Ends the process with a message and exit code EXIT_TEMPORARY when a child died or hangs, or this one does.

    hivemind waits for answers of its children without a timeout: the main thread may be blocked forever.

    :param children: each has `beats`, a shared counter that its event loop increments at least every three seconds
    :param longest_wait: seconds between two calls of `record_work` after which the process hangs. The time that the
        machine sleeps does not count
    """

    MAX_SILENCE = 120  # checks, one a second, without a beat of a child; a pause of all processes does not count

    def __init__(self, children: dict[str, multiprocessing.Process], longest_wait: float = math.inf):
        super().__init__(period=1.0)
        self.children, self.longest_wait = children, longest_wait
        self._silences: Counter[str] = Counter()  # checks since the last beat, or for which a daemon has been stopped
        self._beats = dict.fromkeys(children, -1)
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
        ended = psutil.STATUS_DEAD, psutil.STATUS_ZOMBIE
        dead += ["p2p daemon" for process in self.daemons if _status(process) in ended]
        if dead and stop_requested.is_set():  # systemd signals all processes of a service at once
            return f"The signal has also ended the {dead[0]} process: ending at once"
        if dead:
            return f"The {dead[0]} process has died (out of memory?); start again to rejoin"
        silent = [name for name, checks in self._silences.items() if checks >= self.MAX_SILENCE]
        if silent:
            return f"The {silent[0]} process hangs or was stopped; start again to rejoin"
        if time.monotonic() > self._worked_at + self.longest_wait:
            return f"Nothing was done for {self.longest_wait:.0f} seconds: this peer hangs; start again to rejoin"
        return None

    def work(self) -> None:
        beats = {name: child.beats.value for name, child in self.children.items()}  # pyright: ignore[reportAttributeAccessIssue]
        silent = {name for name in beats if beats[name] == self._beats[name]}
        if any(_status(process) == psutil.STATUS_STOPPED for process in self.daemons):
            silent.add("p2p daemon")
        self._beats, self._silences = beats, Counter({name: self._silences[name] + 1 for name in silent})
        # After a moment, in which a signal to all processes is noticed here, too.
        if self.find_fault() and not self.stopped.wait(0.2) and (fault := self.find_fault()):
            is_asked = stop_requested.is_set()
            end_process(0 if is_asked else EXIT_TEMPORARY, fault, logging.WARNING if is_asked else logging.ERROR)


def _status(process: psutil.Process) -> str:
    try:
        return process.status() if process.is_running() else psutil.STATUS_DEAD
    except psutil.NoSuchProcess:
        return psutil.STATUS_DEAD
