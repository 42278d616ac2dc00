"""Fast start of our scripts: fork them from a process that has already imported their modules.

A script spends 7 CPU seconds on its imports, and the tests start hundreds of scripts. The launcher process gets its
requests from the tests through a pipe, and ends with them. Tests that depend on the imports start their scripts
without the launcher.

The scripts run without the organiser's packages, as on a machine that has only requirements.txt installed.
"""

import ctypes
import gc
import importlib
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing import Pipe, RawValue
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from cotrain.common.errors import ORGANISER_MODULES
from peerstep.peer.processes import keep_memory_shared
from tests.support.processes import ENVIRONMENT, PYTHON, ROOT, end_with_parent

MODULES = (
    "cotrain.join", "cotrain.data.download", "cotrain.data.loading",
    "cotrain.monitoring.evaluation", "cotrain.monitoring.hub_upload", "cotrain.monitoring.monitor",
    "cotrain.training.hf_trainer", "cotrain.training.session",
    "run_custom_trainer", "run_evaluator", "run_trainer", "run_training_monitor",
)  # fmt: skip
# Variables that nothing reads during the imports: a forked script may have other values than the launcher
LATE_VARIABLES = frozenset({
    "ATTACK", "AWS_ACCESS_KEY_ID", "AWS_ENDPOINT_URL", "AWS_SECRET_ACCESS_KEY", "CLOCK", "DOWNLOAD_SECONDS",
    "FAKE_NGROK", "FAKE_NGROK_CERTIFICATE", "HOME", "IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR",
    "JUPYTER_RUNTIME_DIR", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NGROK_AUTHTOKEN", "PACE", "PAUSE",
    "PYTHONPATH", "RANK", "RECORD", "TRACKIO_DIR", "TRACKIO_WRITE_TOKEN", "WORLD_SIZE", "XDG_CONFIG_HOME",
})  # fmt: skip
CLONE_NEWNET = 0x40000000  # <linux/sched.h>


class LaunchedProcess:
    """A process that the launcher has started, with the methods of subprocess.Popen that tests use."""

    def __init__(self, launcher: "Launcher", pid: int):
        self.launcher, self.pid = launcher, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.launcher.ask(poll=self.pid)
        return self.returncode

    def wait(self) -> int:
        while self.poll() is None:
            time.sleep(0.05)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Launcher:
    """Client of the launcher process. Build it in the main thread: the process ends with the thread that starts it.

    :param log: file for the output of the launcher process
    """

    def __init__(self, log: Path):
        self._lock = threading.Lock()
        self._environment = dict(os.environ)
        self._connection, theirs = Pipe()
        with theirs, open(log, "ab") as file:
            self.process = subprocess.Popen(
                [*PYTHON, __file__, str(theirs.fileno())], stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                cwd=ROOT, env={**os.environ, **ENVIRONMENT}, pass_fds=[theirs.fileno()], preexec_fn=end_with_parent,
            )  # fmt: skip

    def can_start(self, environment: dict[str, str]) -> bool:
        """Whether a forked script gets the right environment: the imported libraries have already read theirs."""
        return self._changes(environment).keys() <= LATE_VARIABLES

    def start(
        self, command: Sequence[str], environment: dict[str, str], log: Path, namespace: str | None = None
    ) -> LaunchedProcess:
        """Start a Python script in the folder of its log.

        :param environment: variables to add to those of the tests
        :param namespace: path of the network namespace to enter
        """
        log.touch()
        pid = self.ask(command=list(command), changes=self._changes(environment), log=str(log), namespace=namespace)
        return LaunchedProcess(self, pid)

    def _changes(self, environment: dict[str, str]) -> dict[str, str | None]:
        """Return the variables with other values than in the launcher process; None: to be removed."""
        launchers = {**self._environment, **ENVIRONMENT}
        wanted = {**os.environ, **ENVIRONMENT, **environment}
        names = (launchers.keys() | wanted.keys()) - {"PYTEST_CURRENT_TEST"}
        return {name: wanted.get(name) for name in names if wanted.get(name) != launchers.get(name)}

    def ask(self, **request):
        with self._lock:
            self._connection.send(request)
            return self._connection.recv()

    def close(self) -> None:
        self._connection.close()
        self.process.wait(60)  # Python takes its time to leave on a busy machine


def serve(connection: Connection) -> dict:
    """Fork a process for each start request until the connection closes. Runs in the launcher process.

    :returns: the request, in the forked process only
    """
    codes: dict[int, int] = {}
    with connection:
        while True:
            try:
                request = connection.recv()
            except EOFError:
                sys.exit(0)
            if "poll" not in request:
                answer = os.fork()
                if answer == 0:
                    return request
            else:
                pid = request["poll"]
                if pid not in codes and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                    codes[pid] = os.waitstatus_to_exitcode(ended[1])
                answer = codes.get(pid)
            connection.send(answer)


def become(command: list[str], changes: dict[str, str | None], log: str, namespace: str | None) -> None:
    """Run a script in this forked process. The parameters are those of `Launcher.start`."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(Path(log).parent)
    if namespace is not None:
        enter_namespace(namespace)
    for name, value in changes.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    run_forked(command)


def run_forked(command: list[str]) -> None:
    """Run a script in this process, which has been forked from one with hivemind."""
    from hivemind.utils import MPFuture

    from peerstep.peer import clock

    MPFuture.reset_backend()  # all scripts would share its locks
    clock.offset = RawValue("d", 0.0)  # and the correction of their clocks
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent))
    runpy.run_path(command[0], run_name="__main__")


def enter_namespace(path: str) -> None:
    """Move this process, which must have one thread, to a network namespace; os.setns is new in Python 3.12."""
    with open(path, encoding="utf-8") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {path}")


def main() -> None:
    gc.disable()  # garbage collection takes 2 of 9 CPU seconds of the imports
    sys.modules |= dict.fromkeys(ORGANISER_MODULES)  # None: not installed, as on a volunteer's machine
    for name in MODULES:
        importlib.import_module(name)
    gc.enable()
    threads = {path.read_text(encoding="utf-8").strip() for path in Path("/proc/self/task").glob("*/comm")}
    # A forked process has no copies of threads. Only the thread of pyarrow's allocator restarts there.
    assert len(threads - {"jemalloc_bg_thd"}) == 1, threads
    keep_memory_shared()  # otherwise each script looks through the imported objects for garbage
    become(**serve(Connection(int(sys.argv[1]))))


if __name__ == "__main__":
    main()
