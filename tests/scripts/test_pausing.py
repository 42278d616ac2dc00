"""The owner of a machine needs it: the trainer pauses, by a command or by the clock, and continues."""

import json
import re
import signal
import time
from pathlib import Path

import pytest

from cotrain.common.json_file import write_json
from tests.support.peers import Script, read_jsonl, steps_of, wait_until

TOGETHER = "Averaged gradients with 2 peers"
# Averaged parameters mark the history of a run: with a common mark, a trainer needs no download after a pause.
FLAGS = (*steps_of(seconds=2.5, num_trainers=2), "--learning_rate", 0.01, "--average_state_every", 1)


def call(scripts, name: str, flag: str) -> str:
    """Run `run_trainer.py` with --pause, --resume or --status for a trainer, and return what it prints."""
    command = scripts.start("run_trainer.py", flag, "--output_dir", scripts.folder / name, log=f"{name}{flag}")
    assert command.wait() == 0, command.output
    return command.output


def read_events(path: Path, event: str) -> list[dict]:
    return [record for record in read_jsonl(path) if record["event"] == event]


def wait_for_steps(trainer: Script, number: int) -> None:
    """Wait until a trainer has taken more global steps."""
    before = len(trainer.steps)
    wait_until(lambda: len(trainer.steps) >= before + number, 120, f"{number} more steps")


def wait_again(trainer: Script, what: str, before: int) -> None:
    """Wait until the output has a text more often than `before`."""
    wait_until(lambda: trainer.output.count(what) > before, 240, f"'{what}' once more")


@pytest.mark.early
def test_paused_trainer_costs_the_other_nothing_and_continues_without_a_download(scripts):
    """The slower one pauses, continues, pauses again and is stopped by Ctrl-C."""
    monitor, record = scripts.monitor("--run_id", "albert", *FLAGS), scripts.folder / "events.jsonl"
    fast = scripts.trainer("fast", "--initial_peers", monitor.address, *FLAGS)
    env = {"RECORD": str(record)}
    slow = scripts.trainer("slow", "--initial_peers", monitor.address, *FLAGS, pace=0.5, env=env)
    wait_until(lambda: slow.output.count(TOGETHER) >= 2, 120, "two steps of both")

    assert "pauses after its local step" in call(scripts, "slow", "--pause")
    slow.wait_for("Paused: until --resume")
    rounds = read_jsonl(scripts.folder / "slow" / "rounds.jsonl")
    local_steps = len(read_events(record, "local step"))
    monitor.wait_for("paused; now 2 trainers, 1 of them paused")
    paused_at = time.time()
    wait_for_steps(fast, 3)
    alone = [line for line in read_jsonl(scripts.folder / "fast" / "rounds.jsonl") if line["time"] > paused_at]
    assert {line["outcome"] for line in alone[1:]} == {"alone"}, "the round that ran at the pause apart"
    assert re.search(r"State +paused: until --resume, at step #\d+", call(scripts, "slow", "--status"))
    assert read_jsonl(scripts.folder / "slow" / "rounds.jsonl") == rounds
    assert len(read_events(record, "local step")) == local_steps

    resumed_at, together = time.time(), slow.output.count(TOGETHER)
    assert "continues" in call(scripts, "slow", "--resume")
    slow.wait_for("Continuing after a pause")
    wait_again(slow, TOGETHER, together)
    assert not [event for event in read_events(record, "download") if event["began"] > resumed_at]
    assert "State         training" in call(scripts, "slow", "--status")

    paused = slow.output.count("Paused: until --resume")
    call(scripts, "slow", "--pause")
    wait_again(slow, "Paused: until --resume", paused)
    assert slow.stop(signal.SIGINT) == 0
    slow.assert_nothing_left()
    wait_for_steps(fast, 1)
    assert json.loads((scripts.folder / "slow" / "status.json").read_text(encoding="utf-8"))["ended_at"] is not None
    assert fast.stop() == 0


def test_clock_that_jumps_over_the_hours_begins_and_ends_a_pause(scripts, tmp_path):
    """The hours begin in half an hour, and last nine. A laptop sleeps until then; its clock jumps."""
    clock = tmp_path / "clock"
    write_json(clock, 0)
    hours = "-".join(time.strftime("%H:%M", time.localtime(time.time() + hour * 3600)) for hour in (0.5, 9.5))
    monitor = scripts.monitor("--run_id", "albert", *FLAGS)
    awake = scripts.trainer("awake", "--initial_peers", monitor.address, *FLAGS, pace=0.5)
    night = scripts.trainer(
        "night", "--initial_peers", monitor.address, "--only_between", hours, *FLAGS, env={"CLOCK": str(clock)}
    )
    pause = f"Paused: until {hours[:5]}, since --only_between {hours}"
    night.wait_for(pause)
    wait_for_steps(awake, 1)
    assert TOGETHER not in awake.output
    write_json(clock, 3600)
    night.wait_for("Continuing after a pause")
    for trainer in (night, awake):
        trainer.wait_for(TOGETHER, 240)
    write_json(clock, 10 * 3600)
    wait_again(night, pause, 1)
    assert night.stop(signal.SIGINT) == 0
    assert awake.stop() == 0
