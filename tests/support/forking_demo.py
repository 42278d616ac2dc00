"""Run run_local_demo.py, whose scripts are forked from this process, which has the imports.

python tests/support/forking_demo.py run_local_demo.py FLAGS
"""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import IO

sys.path.insert(0, str(Path(__file__).parents[2]))

import run_local_demo
from cotrain.common.errors import ORGANISER_MODULES, run_script
from tests.support.launcher import run_forked


class ForkedProcess(multiprocessing.get_context("fork").Process):
    """Replaces `subprocess.Popen` for a Python script. Its options are those of Popen.

    :param command: the interpreter, which is not used, the script, and its flags
    """

    def __init__(self, command: list[str], **options):
        super().__init__(target=_become, args=(command[1:],), kwargs=options)
        self.start()

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self, timeout: float | None = None) -> None:
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired("a forked script", timeout)


def _become(
    command: list[str], env: dict[str, str], preexec_fn: Callable[[], None], stdin: int, stdout: IO, stderr: int
) -> None:
    """Run the script in this forked process. stdin is empty in any case, and stderr goes where stdout goes."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    preexec_fn()
    for number in (1, 2):
        os.dup2(stdout.fileno(), number)
    os.environ.update(env)
    run_forked(command)


if __name__ == "__main__":
    for name in ORGANISER_MODULES:
        del sys.modules[name]  # the demo is the organiser's
    del sys.argv[0]  # error messages name the script that is now sys.argv[0]
    run_local_demo.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": ForkedProcess})
    run_script(run_local_demo.main)
