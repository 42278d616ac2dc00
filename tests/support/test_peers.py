"""Tests of the helpers that start scripts: no script outlives the tests."""

import subprocess
import sys

import psutil

from tests.support.peers import ROOT, wait_until

PROGRAM = """
import sys, time
from pathlib import Path
from lib.common.processes import guard_children
from tests.support.peers import Script
if sys.argv[2] == "guarded":
    guard_children()
print(Script(sys.argv[1], log=Path(sys.argv[1]).with_suffix(".log")).process.pid, flush=True)
time.sleep(600)
"""


def test_scripts_end_when_the_tests_are_killed(tmp_path):
    (tmp_path / "script.py").write_text("import signal, time\nprint(signal.getsignal(2))\ntime.sleep(600)\n")
    for guard in ("guarded", "not guarded"):
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / "script.py"), guard]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as tests:
            script = psutil.Process(int(tests.stdout.readline()))
            log = tmp_path / "script.log"
            wait_until(lambda log=log: "default_int_handler" in log.read_text(), 60, "a script that Ctrl-C can end")
            tests.kill()
        wait_until(lambda script=script: not script.is_running(), 15, "the end of the script")
        log.unlink()
