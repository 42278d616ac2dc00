"""run_forever.py: what is started again, what is not, and how a hang is told from a long wait."""

import signal
import sys
import threading

import psutil
import pytest

import run_forever
from run_forever import keep_running
from tests.support.peers import steps_of, wait_until

# A command that notes each of its starts, beats as a trainer does, and then ends or hangs.
COMMAND = """\
import json, os, sys, time
starts, *ends = sys.argv[1:]
number = len(open(starts).read()) if os.path.exists(starts) else 0
open(starts, "a").write("x")
end = ends[min(number, len(ends) - 1)]
has_worked, _, what = end.rpartition(" ")
beat = {"beats": 0, "work": 1 if has_worked else 0, "longest_wait": 0.5}
while True:
    beat["beats"] += what != "freeze"
    temporary = os.environ["COLLABORATION_HEARTBEAT"] + ".new"
    open(temporary, "w").write(json.dumps(beat))
    os.replace(temporary, os.environ["COLLABORATION_HEARTBEAT"])
    if what.lstrip("-").isdigit():
        code = int(what)
        sys.exit(code) if code >= 0 else os.kill(os.getpid(), -code)
    if what in ("wait", "freeze"):
        beat["longest_wait"] = 60.0
    if what == "wait" and beat["beats"] > 20:
        sys.exit(0)
    time.sleep(0.05)
"""


@pytest.fixture
def supervise(tmp_path, monkeypatch, capfd):
    """Supervise a command that ends in given ways, one after the other; return code, number of starts, messages."""
    monkeypatch.setattr(run_forever, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(run_forever, "LONGEST_PAUSE", 0.02)
    monkeypatch.setattr(run_forever, "SILENT_SECONDS", 2.0)
    monkeypatch.setattr(run_forever, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(run_forever, "STOP_SECONDS", 1.0)

    def supervise(*ends: str) -> tuple[int, int, str]:
        starts = tmp_path / "starts"
        code = keep_running([sys.executable, "-c", COMMAND, str(starts), *ends], threading.Event())
        return code, len(starts.read_text()), capfd.readouterr().err

    return supervise


@pytest.mark.parametrize(
    "ends, code, starts",
    [
        (["0"], 0, 1),
        (["2"], 2, 1),  # a wrong flag
        (["1"], 1, 1),  # an error at the first start, in sight of who has typed the command
        (["worked 1", "1", "1", "0"], 0, 4),  # it has worked, so the error may pass
        (["worked 1", "1"], 1, 6),  # but not five times in a row
        (["worked 1", "1", "worked 1", "1", "1", "1", "1", "0"], 0, 8),
        (["75"] * 8 + ["0"], 0, 9),  # nobody answers, for a night
        (["-9", "0"], 0, 2),  # out of memory, say
        (["-9"], 1, 5),
        (["worked 2"], 2, 1),
        (["worked hang", "0"], 0, 2),
        (["freeze", "0"], 0, 2),
        (["worked wait"], 0, 1),  # a long wait is no hang
    ],
)
def test_what_is_started_again(supervise, ends, code, starts):
    assert supervise(*ends)[:2] == (code, starts)


def test_messages_say_why(supervise):
    _, _, messages = supervise("worked hang", "freeze", "-9", "1", "2")
    for reason in ("nothing was done for 0 seconds", "frozen for 2 seconds", "SIGKILL", "exit code 1; starting it"):
        assert reason in messages
    assert "exit code 2" in messages and "does not cure this" in messages


def test_command_that_does_not_exist(capsys):
    with pytest.raises(SystemExit) as exit_info:
        keep_running(["./no_such_script.py"], threading.Event())
    assert exit_info.value.code == 2
    assert "'./no_such_script.py' cannot be started" in capsys.readouterr().err


@pytest.mark.peers
@pytest.mark.parametrize(
    ("victim", "number"), [("trainer", signal.SIGKILL), ("p2pd", signal.SIGKILL), ("p2pd", signal.SIGSTOP)]
)
def test_trainer_comes_back(scripts, victim, number):
    """Its children are those of one trainer: none of a killed or frozen one is left."""
    monitor = scripts.monitor("--save_checkpoint_step_interval", 1)
    supervisor = scripts.trainer(
        "trainer", "--initial_peers", monitor.address, *steps_of(seconds=2, num_trainers=1),
        wrappers=["tests/support/quick_supervisor.py"],
    )  # fmt: skip
    monitor.wait_for("Saved")  # what the next trainer begins with
    (trainer,) = psutil.Process(supervisor.process.pid).children()
    family = [trainer, *trainer.children(recursive=True)]
    target = trainer if victim == "trainer" else next(p for p in family if p.name().startswith("p2pd"))
    target.send_signal(number)
    # One that was asked to end has saved a checkpoint.
    restarted = r"(?s)starting it again in.*(Joined the collaboration|Resumed from a checkpoint).*Step #\d+"
    supervisor.wait_for(restarted, timeout=240)
    wait_until(lambda: not any(p.is_running() for p in family), 15, "the end of the first trainer's processes")
    (trainer,) = psutil.Process(supervisor.process.pid).children()
    assert supervisor.stop(signal.SIGINT) == 0
    wait_until(lambda: not trainer.is_running(), 15, "the end of the second trainer")
    assert "Traceback" not in supervisor.output
