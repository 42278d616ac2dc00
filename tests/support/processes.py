"""Processes that tests start, and waits for what these do."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from peerstep.peer.processes import signal_at_end_of_parent

ROOT = Path(__file__).parents[2]
PYTHON = (sys.executable, "-u", "-W", "ignore")
# One core, and no GPU: all trainers of a test would share it
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}


def end_with_parent() -> None:
    """End a script's process when the tests end, even if they are killed. Runs in the process before the script.

    The kernel watches the thread that started the process. The process gets a session, by which `Script.family` finds
    its descendants. The fork hook of `guard_children` may have run before: it ignores SIGINT and makes a process
    group, whose leader must leave it for `setsid`.
    """
    os.setpgid(0, os.getpgid(os.getppid()))
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal_at_end_of_parent(signal.SIGKILL)


def wait_until(condition, timeout: float, what: str):
    """Wait until a condition is true and return its value.

    :param timeout: seconds; where the code under test promises no time, tests use up to 120
    :param what: what the condition means, for the error message
    :raises AssertionError: after `timeout`
    """
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.1)
    raise AssertionError(f"not within {timeout} seconds: {what}")


def namespace_prefix(namespace: str) -> list[str]:
    """Return the prefix of a command that runs in a network namespace. The process ID does not change.

    :param namespace: its path
    """
    return ["nsenter", f"--net={namespace}", "--"]


class Script:
    """A process that runs one of our scripts, in a separate process group, with its output in a file.

    :param namespace: network namespace of the host to run it on (see Host)
    :param launcher: a Launcher, which forks the script if its environment allows that; otherwise the script is started
      from scratch
    """

    def __init__(
        self,
        name: str,
        *args: object,
        log: Path,
        env: dict[str, str] | None = None,
        namespace: str | None = None,
        launcher=None,
    ):
        self.log = log
        self._offset = log.stat().st_size if log.exists() else 0  # a restarted script appends to the same file
        command, env = [str(ROOT / name), *map(str, args)], env or {}
        if launcher is not None and launcher.can_start(env):
            self.process = launcher.start(command, env, log, namespace)
        else:
            enter = [] if namespace is None else namespace_prefix(namespace)
            with open(log, "ab") as file:
                self.process = subprocess.Popen(
                    [*enter, *PYTHON, *command], stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                    cwd=log.parent, env={**os.environ, **ENVIRONMENT, **env}, preexec_fn=end_with_parent,
                )  # fmt: skip

    @property
    def output(self) -> str:
        return self.log.read_bytes()[self._offset :].decode(errors="replace")

    @property
    def steps(self) -> list[int]:
        """The global steps that a trainer or monitor has logged."""
        return [int(step) for step in re.findall(r"\bStep #(\d+)", self.output)]

    def family(self) -> list[psutil.Process]:
        """Return the live processes of the script.

        They share its session, but for torch_shm_manager: it ends by itself after the others, and removes their files
        in /dev/shm.
        """
        found = []
        for pid in psutil.pids():
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getsid(pid) == self.process.pid:
                    process = psutil.Process(pid)
                    if process.status() != psutil.STATUS_ZOMBIE:
                        found.append(process)
        return found

    def wait_for(self, pattern: str, timeout: float = 120) -> re.Match:
        """Wait until the output matches a pattern.

        :raises AssertionError: with the output, if the process ends before that, or after `timeout` seconds
        """

        def found():
            match = re.search(pattern, self.output)
            if match is None and self.process.poll() is not None:
                time.sleep(0.2)
                match = re.search(pattern, self.output)
                assert match is not None, f"ended with {self.process.returncode} before '{pattern}':\n{self.output}"
            return match

        try:
            return wait_until(found, timeout, pattern)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output}") from None

    def wait(self, timeout: float = 120) -> int:
        """Wait until the main process ends, and return its exit code."""
        deadline = time.monotonic() + timeout
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"still running after {timeout} seconds:\n{self.output}"
            time.sleep(0.1)
        return self.process.returncode

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal to the main process, wait until it ends, and return its exit code."""
        self.process.send_signal(number)
        return self.wait()

    def assert_nothing_left(self, timeout: float = 60) -> None:
        """Check that no process of the script is left `timeout` seconds after the end of the main process."""
        wait_until(lambda: not self.family(), timeout, f"the end of {[p.pid for p in self.family()]} {self.family()}")

    def kill(self) -> None:
        """Kill the main process (SIGKILL), and check that the others end, too."""
        self.process.kill()
        self.wait()
        self.assert_nothing_left()

    def freeze(self, seconds: float) -> None:
        """Stop all processes for some seconds."""
        family = self.family()
        try:
            for process in family:
                process.suspend()
            time.sleep(seconds)
        finally:
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()

    def kill_all(self) -> None:
        """Kill all processes of the script."""
        for process in (self.process, *self.family()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()

    @property
    def address(self) -> str:
        return self.wait_for(r"--initial_peers (/ip4/\S+)")[1]
