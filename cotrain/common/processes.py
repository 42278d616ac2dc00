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
import re
import select
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import NoReturn

import psutil

from cotrain.common.errors import TEMPORARY
from cotrain.common.threads import PeriodicThread

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
# What torchrun, mpirun, accelerate and operators of Kubernetes set. accelerate waits for all ranks if it finds them.
_LAUNCHERS = re.compile(
    r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE))|ROLE_NAME|MASTER_(ADDR|PORT)|MPI_LOCALN?RANK(S|ID)|"
    r"(TORCHELASTIC|OMPI_COMM_WORLD|PMI|MV2_COMM_WORLD|ACCELERATE|FSDP)_\w+"
)
_REQUESTS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP  # to stop
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
    signal.set_wakeup_fd(-1)  # the parent reads the pipe, see StopSignal
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def ignore_launcher() -> None:
    """Remove the variables by which a launcher gives each of its processes a rank, with one line on stderr."""
    if names := sorted(filter(_LAUNCHERS.fullmatch, os.environ)):
        what = "a peer is one process, and finds the others by --initial_peers; start it without torchrun or mpirun"
        print(f"warning: ignoring {', '.join(names)}: {what}", file=sys.stderr)
    for name in names:
        del os.environ[name]


@cache
def guard_children() -> None:
    """Make every process that is forked from now on end with this one. Call this before hivemind forks a process."""
    # "spawn" and "forkserver" (Python 3.14's default) pickle the process object; averagers hold locks, which cannot be
    # pickled.
    multiprocessing.set_start_method("fork", force=True)
    # Before it is detached, a child has the handlers of its parent: a Ctrl-C would count twice.
    masks: list[set] = []
    os.register_at_fork(
        before=lambda: masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, _REQUESTS)),
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
    _exits.append(timer)


def call_off_exits() -> None:
    """Let this process live: it has shut down what `exit_after` was to end, and has other things to do."""
    while _exits:
        _exits.pop().cancel()


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
        for number in _REQUESTS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._handle)
        self._previous_fd = signal.set_wakeup_fd(self._writing_end, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_exception) -> None:
        if self._requested:
            self.event.wait(1.0)  # until the thread has announced it
        signal.set_wakeup_fd(self._previous_fd)
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

    def _handle(self, number: int, _frame) -> None:
        if not (self._requested or self._deferred):
            self._requested = True
            raise SystemExit(0)
        self._requested = True

    def _watch(self) -> None:
        first = self._read_signal()
        _say(f"{signal.Signals(first).name}: stopping (send it again to end at once)")
        self.event.set()
        exit_after(self.grace, 0, f"Still busy {self.grace:.0f} seconds after the signal")
        second = self._read_signal()
        # The shell, the kernel and systemd may each send a SIGHUP when a terminal ends.
        while second == signal.SIGHUP:
            second = self._read_signal()
        _say("Stopped at once")
        # By the signal itself: a shell then ends its loop, and systemd does not start the peer again.
        _libc.signal(second, ctypes.c_void_p(None))  # SIG_DFL; `signal.signal` works in the main thread only
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


class Watchdog(PeriodicThread):
    """Ends the process with a message and exit code TEMPORARY when a child has died or hangs, or when it hangs itself.

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
        if dead:
            return f"The {dead[0]} process has died (out of memory?); start again to rejoin"
        silent = [name for name, checks in self._silences.items() if checks >= self.MAX_SILENCE]
        if silent:
            return f"The {silent[0]} process hangs or was stopped; start again to rejoin"
        if time.monotonic() > self._worked_at + self.longest_wait:
            return f"Nothing was done for {self.longest_wait:.0f} seconds: this peer hangs; start again to rejoin"
        return None

    def work(self) -> None:
        beats = {name: child.beats.value for name, child in self.children.items()}
        silent = {name for name in beats if beats[name] == self._beats[name]}
        if any(_status(process) == psutil.STATUS_STOPPED for process in self.daemons):
            silent.add("p2p daemon")
        self._beats, self._silences = beats, Counter({name: self._silences[name] + 1 for name in silent})
        if (fault := self.find_fault()) and not self.stopped.is_set():
            end_process(TEMPORARY, fault, logging.ERROR)


def _status(process: psutil.Process) -> str:
    try:
        return process.status() if process.is_running() else psutil.STATUS_DEAD
    except psutil.NoSuchProcess:
        return psutil.STATUS_DEAD
