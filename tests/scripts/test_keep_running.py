"""The loop of docs/running.md: what it starts again, and what it does not."""

import os
import re
import signal
import subprocess
import sys

import psutil
import pytest

from tests.support.looped import make_loop
from tests.support.peers import steps_of, wait_until
from tests.support.processes import ROOT

# A command that notes each of its starts, and then ends or hangs.
COMMAND = """\
import os, signal, sys, time
from peerstep.peer.processes import Watchdog
starts, *ends = sys.argv[1:]
number = len(open(starts).read()) if os.path.exists(starts) else 0
open(starts, "a").write("x")
end = ends[min(number, len(ends) - 1)]
if end == "hang":
    Watchdog({}, longest_wait=0.2).start()
    time.sleep(3600)
if end == "Ctrl-C":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.killpg(0, signal.SIGINT)
    time.sleep(3600)
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
    subprocess.run(loop, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300, start_new_session=True, check=False)
    assert len((tmp_path / "starts").read_text(encoding="utf-8")) == starts


@pytest.mark.peers
@pytest.mark.early
def test_trainer_comes_back_as_the_same_peer(scripts):
    """First it is killed, then its p2p daemon. Nothing is left of either, and Ctrl-C ends the loop."""
    monitor = scripts.monitor()
    common = ("--initial_peers", monitor.address, *steps_of(seconds=2.5, num_trainers=2))
    stays = scripts.trainer("stays", *common)
    stays.wait_for(r"\bStep #")
    loop = scripts.trainer("restarts", *common, "--dataloader_num_workers", 1, wrappers=["tests/support/looped.py"])
    averaged = r"(?s)Joined the collaboration at step #(\d+)\n.*gradients with 2 peers.*\bStep #"
    before, end = 1, 0
    for victim in ("trainer", "p2pd", None):
        joined = wait_until(lambda end=end: re.search(averaged, loop.output[end:]), 240, "an averaged step")
        assert int(joined[1]) >= before
        if victim is not None:
            (trainer,) = psutil.Process(loop.process.pid).children()
            family = [trainer, *trainer.children(recursive=True)]
            target = trainer if victim == "trainer" else next(p for p in family if p.name().startswith("p2pd"))
            before, end = max(stays.steps), len(loop.output)
            target.kill()
            wait_until(lambda family=family: not any(p.is_running() for p in family), 120, "the end of its processes")
    assert "process has died" in loop.output and "Traceback" not in loop.output
    newest = max(loop.steps)
    wait_until(lambda: scripts.newest_step() >= newest, 120, "the monitor's report")
    records = scripts.metrics()
    assert [record["step"] for record in records] == list(range(1, len(records) + 1)), "none lost, none repeated"
    assert max(record["alive peers"] for record in records) == 2, "the restarted peer counts once"
    for process in psutil.Process(loop.process.pid).children():
        process.send_signal(signal.SIGINT)  # as a terminal does
    assert loop.wait() == 0
    loop.assert_nothing_left()
