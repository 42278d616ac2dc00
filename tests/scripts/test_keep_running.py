"""The loop of docs/running.md: what it starts again, and what it does not."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from tests.support.looped import make_loop
from tests.support.peers import ROOT, steps_of, wait_until

# A command that notes each of its starts, and then ends or hangs.
COMMAND = """\
import os, signal, sys, time
from lib.common.processes import Watchdog
starts, *ends = sys.argv[1:]
number = len(open(starts).read()) if os.path.exists(starts) else 0
open(starts, "a").write("x")
end = ends[min(number, len(ends) - 1)]
if end == "hang":
    Watchdog({}, longest_wait=0.2).start()
    time.sleep(60)
if end == "Ctrl-C":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.killpg(0, signal.SIGINT)
    time.sleep(60)
code = int(end)
sys.exit(code) if code >= 0 else os.kill(os.getpid(), -code)
"""


@pytest.mark.programs
@pytest.mark.parametrize(
    ("ends", "starts"),
    [
        (["0"], 1),
        (["2"], 1),  # a wrong flag
        (["1"], 1),  # an error that another start does not cure
        (["75", "75", "0"], 3),  # nobody answers
        (["-9", "hang", "0"], 3),  # out of memory, say
        (["75", "2"], 2),
        (["Ctrl-C"], 1),  # the second one: after the first, a trainer ends with 0
    ],
)
def test_what_is_started_again(tmp_path, ends, starts):
    loop = make_loop([sys.executable, "-c", COMMAND, str(tmp_path / "starts"), *ends])
    # A shell that runs the tests in the background makes its programs ignore SIGINT.
    loop = ["env", "--default-signal=INT", *loop]
    subprocess.run(loop, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60, start_new_session=True, check=False)
    assert len((tmp_path / "starts").read_text()) == starts


@pytest.mark.peers
def test_trainer_comes_back(scripts):
    """First it is killed, then its p2p daemon. Nothing is left of either, and Ctrl-C ends the loop."""
    monitor = scripts.monitor("--save_checkpoint_step_interval", 1)
    loop = scripts.trainer(
        "trainer", "--initial_peers", monitor.address, *steps_of(seconds=2, num_trainers=1),
        wrappers=["tests/support/looped.py"],
    )  # fmt: skip
    monitor.wait_for("Saved")  # what the next trainer begins with
    for number, victim in enumerate(("trainer", "p2pd"), start=1):
        (trainer,) = psutil.Process(loop.process.pid).children()
        family = [trainer, *trainer.children(recursive=True)]
        target = trainer if victim == "trainer" else next(p for p in family if p.name().startswith("p2pd"))
        target.kill()
        loop.wait_for(rf"(?s)(Joined the collaboration.*Step #\d+.*){{{number}}}", timeout=240)
        wait_until(lambda family=family: not any(p.is_running() for p in family), 15, "the end of its processes")
    assert "process has died" in loop.output and "Traceback" not in loop.output
    for process in psutil.Process(loop.process.pid).children():
        process.send_signal(signal.SIGINT)  # as a terminal does
    assert loop.wait(60) == 0
    loop.assert_nothing_left()
