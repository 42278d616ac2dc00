"""Processes of our scripts that are forked from this process, which has the imports, in place of new interpreters."""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import IO

import psutil

from tests.support.launcher import run_forked


class ForkedProcess(psutil.Process):
    """Replaces `subprocess.Popen` or `psutil.Popen` for a Python script. Its options are those of Popen.

    :param command: the interpreter, which is not used, the script, and its flags
    """

    def __init__(self, command: list[str], **options):
        self.returncode: int | None = None
        process = multiprocessing.get_context("fork").Process(target=_become, args=(command[1:],), kwargs=options)
        process.start()
        super().__init__(process.pid)

    def poll(self) -> int | None:
        with contextlib.suppress(psutil.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self.returncode = super().wait(timeout)
        return self.returncode

    def kill(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            super().kill()


def _become(
    command: list[str], env: dict[str, str], preexec_fn: Callable[[], None], process_group: int | None = None,
    stdin: int | None = None, stdout: IO | None = None, stderr: int | None = None,
) -> None:  # fmt: skip
    """Run the script in this forked process. stdin is empty in any case, and stderr goes where stdout goes."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if process_group is not None:
        os.setpgid(0, process_group)
    preexec_fn()
    if stdout is not None:
        for number in (1, 2):
            os.dup2(stdout.fileno(), number)
    os.environ.update(env)
    run_forked(command)
