import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from arguments import CollaborationArguments
from cotrain.common.errors import UserError
from cotrain.common.run_folder import claim_folder, find_run
from cotrain.status.loss_meter import LossMeter
from cotrain.status.status import (
    FILE_NAME,
    TrainerStatus,
    describe_contribution,
    describe_progress,
    describe_status,
    read_status,
    recorded_start,
    show_status,
)
from cotrain.status.status_keeper import REASONS, StatusKeeper
from peerstep.reports.progress_report import MAX_ROUNDS
from peerstep.step.coordinator import Outcome, StepRecord
from tests.support.fakes import FakeTracker
from tests.support.processes import ROOT


def make_status(**fields) -> TrainerStatus:
    """Build the status of this process as a trainer at step 39, with one missed step."""
    now = time.time()
    known = {
        "time": now, "started_at": now - 7300, "worked_at": now, "step": 39, "next_step": 40, "seconds_to_next": 31.0,
        "own_samples": 96, "all_samples": 800, "computed": 1000, "applied": 980, "joined": 38, "missed": 1,
        "last_miss": (12, "no group in time"), "num_trainers": 5, "rank": 2, "samples_per_second": 12.34, "loss": 6.5,
        "first_loss": 8.25,
    }  # fmt: skip
    return TrainerStatus("quick-otter-3f2a", "run", 4096, **{**known, **fields})


@pytest.fixture
def keeper(tmp_path) -> StatusKeeper:
    optimizer = SimpleNamespace(tracker=FakeTracker(), target_batch_size=256, num_computed=0, dht="dht")
    args = CollaborationArguments(run_id="run")
    return StatusKeeper(tmp_path, optimizer, args, "quick-otter-3f2a", LossMeter())


def record(keeper: StatusKeeper, *records: StepRecord) -> TrainerStatus:
    """Record steps, as the session does, and return the status after the last of them."""
    keeper.begin_at(records[0].step - 1)
    for step_record in records:
        keeper.record_step(step_record)
        keeper.optimizer.tracker.local_progress.completed = step_record.step
    return keeper.update()


def compute(keeper: StatusKeeper, num_computed: int) -> None:
    """Take local steps until a number of samples is computed."""
    keeper.optimizer.num_computed = num_computed
    keeper.record_local_step()


MISS = "the other trainers averaged without this one"


@pytest.mark.parametrize(
    ("records", "joined", "missed", "applied", "last_miss"),
    [
        ([StepRecord(5, Outcome.AVERAGED, 64), StepRecord(6, Outcome.ALONE, 256)], 2, 0, 320, None),
        ([StepRecord(5, Outcome.MISSED)], 0, 1, 0, (5, MISS)),
        ([StepRecord(5, Outcome.FAILED)], 0, 0, 0, (5, "no group in time")),
        ([StepRecord(5, Outcome.FAILED, error="a\nb " + "x" * 500)], 0, 0, 0, (5, "a b " + "x" * 96)),
        ([StepRecord(5, Outcome.AVERAGED)], 0, 1, 0, (5, REASONS[Outcome.AVERAGED])),
        (
            [StepRecord(4, Outcome.ALONE, 64), StepRecord(9, Outcome.CAUGHT_UP)],
            1, 5, 64, (9, "this trainer was too far behind"),
        ),
        (
            [StepRecord(8, Outcome.CAUGHT_UP), StepRecord(9, Outcome.MISSED), StepRecord(10, Outcome.AVERAGED, 1)],
            1, 2, 1, (9, MISS),
        ),
    ],
    ids=["in rounds", "missed", "tried again", "tried again after an error", "too old", "caught up", "several"],
)  # fmt: skip
def test_steps_are_joined_or_missed_with_a_reason(keeper, records, joined, missed, applied, last_miss):
    status = record(keeper, *records)
    assert (status.joined, status.missed, status.applied, status.last_miss) == (joined, missed, applied, last_miss)


def test_steps_before_joining_are_not_missed_nor_those_before_a_rollback(keeper):
    status = record(keeper, StepRecord(1001, Outcome.ALONE, 64), StepRecord(1002, Outcome.ALONE, 64))
    assert (status.joined, status.missed) == (2, 0)
    status = record(keeper, StepRecord(1001, Outcome.ALONE, 64), StepRecord(1002, Outcome.MISSED))
    assert (status.joined, status.missed) == (3, 1)


def test_step_that_is_not_recorded_yet_is_not_missed(keeper):
    """The step thread has taken two more, while the main thread computes a local step of minutes."""
    compute(keeper, 16)
    record(keeper, StepRecord(1, Outcome.ALONE, 16))
    compute(keeper, 48)
    own = keeper.optimizer.tracker.local_progress
    own.epoch = own.completed = 3
    status = keeper.update()
    assert (status.step, status.joined, status.missed, status.applied_fraction) == (3, 1, 0, 1.0)


def test_samples_of_the_newest_steps(keeper):
    """No more samples are applied than computed, although they are counted at different moments."""
    for step in range(1, 101):
        compute(keeper, 16 * step)
        keeper.record_step(StepRecord(step, Outcome.ALONE, 16) if step % 2 else StepRecord(step, Outcome.MISSED))
    assert keeper.recent_samples() == (16 * MAX_ROUNDS, 8 * MAX_ROUNDS)
    keeper.record_step(StepRecord(101, Outcome.ALONE, 10**6))
    assert keeper.recent_samples() == (16 * (MAX_ROUNDS - 1), 16 * (MAX_ROUNDS - 1))


def test_keeper_combines_what_tracker_and_rounds_know(keeper):
    tracker = keeper.optimizer.tracker = FakeTracker(epoch=7, others=[(7, 3.0), (6, 1.0), (7, 0.5)])
    own, tracker.seconds_to_step, tracker.all_samples = tracker.local_progress, 12.0, 100
    own.samples_per_second, own.samples_accumulated, own.contributed, own.completed = 2.0, 16, 32, 6
    compute(keeper, 128)
    record(keeper, StepRecord(6, Outcome.ALONE, 48))
    status = keeper.update()
    assert (status.step, status.next_step, status.seconds_to_next) == (6, 8, 12.0)
    assert (status.own_samples, status.all_samples, status.num_trainers, status.rank) == (16, 100, 4, 2)
    assert status.computed == 128 - 16 - 32, "without those for the running round and the next step"
    assert status.applied_fraction == 48 / 80
    worked_at, status.worked_at = status.worked_at, None
    assert not keeper.record_local_step() and worked_at is not None
    assert status.worked_at is None, "a local step whose gradient is dropped or skipped is no work"
    for loss in (8.0, 7.0, 6.0):
        keeper.record_loss(loss)
    own.samples_accumulated, keeper.speed = 500, 1.5
    status = keeper.update()
    assert status.own_samples == 100, "no more than all: a trainer counts for one target batch"
    assert status.samples_per_second == 1.5, "that of the newest step's line"
    own.samples_per_second, tracker.seconds_to_step = 0.0, 1e23
    status = keeper.update()
    assert (status.rank, status.seconds_to_next, status.loss, status.first_loss) == (None, None, 6.0, 8.0)


def test_start_is_shown_before_the_trainer_has_joined_and_then_why_it_ended(tmp_path, capsys):
    """Imports and the data take seconds to minutes, and most errors come in this time."""
    folder = tmp_path / "outputs"
    with pytest.raises(UserError), recorded_start(folder):
        assert show_status(folder) == 0 and capsys.readouterr().out.startswith("State         starting: ")
        with pytest.raises(UserError), recorded_start(folder):  # another start, which does not get the folder
            raise UserError("the folder is in use")
        assert show_status(folder) == 0 and "starting" in capsys.readouterr().out
        raise UserError("the invitation is revoked; ask the organiser")
    assert show_status(folder) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith("after 0 samples in 0 global steps: the invitation is revoked; ask the organiser.")
    claim_folder(folder, "run")
    assert not (folder / "other-runs").exists() and find_run(folder) == "run", "the start is not that of another run"


def test_error_is_added_to_what_the_trainer_has_given(keeper, tmp_path, capsys):
    with pytest.raises(UserError), recorded_start(tmp_path):
        keeper.start()
        assert show_status(tmp_path) == 0
        record(keeper, StepRecord(5, Outcome.ALONE, 256))
        keeper.close()
        raise UserError("the invitation has expired")
    assert show_status(tmp_path) == 1
    assert capsys.readouterr().out.endswith(", after 256 samples in 1 global step: the invitation has expired.\n")


def test_progress_is_logged(keeper, caplog, tmp_path):
    keeper.log_at = 0.0
    caplog.set_level("INFO")
    keeper.optimizer.tracker.others = [SimpleNamespace(peer_id=b"", samples_per_second=1.0)] * 2
    assert keeper.update().loss is None
    keeper.loss_meter.add(torch.tensor(6.5))
    keeper.work()
    line = "Accumulated 0 of 256 samples for step #1 from 3 peers, 0 of them yours; ETA unknown; local loss 6.500"
    assert line in caplog.text
    keeper.work()
    assert caplog.text.count("Accumulated") == 1
    assert dict(describe_status(read_status(tmp_path)))["Local loss"] == "6.500, 6.500 at first", "before a step"


@pytest.mark.parametrize(
    ("step", "of_run", "has_worked", "is_late"),
    [(0, 42, False, True), (0, 1, False, True), (0, 0, False, False), (0, None, False, False), (39, 42, True, True),
     (41, 42, True, False)],
)  # fmt: skip
def test_trainer_that_needs_a_later_state_says_so(keeper, caplog, step, of_run, has_worked, is_late):
    """A trainer that came back said 'Accumulated 0 of 256 samples for step #1' of a run at step 42."""
    keeper.optimizer.tracker = FakeTracker(step, [(of_run or 0, 1.0)])
    keeper.optimizer.tracker.credible_step = of_run
    if has_worked:
        compute(keeper, 64)
    keeper.log_at = 0.0
    caplog.set_level("INFO")
    keeper.work()
    row = dict(describe_status(keeper.update()))["Next step"]
    said = "The run is at step #42: downloading its state first; 2 peers"
    assert (said.replace("#42", f"#{of_run}") in caplog.text) == is_late
    assert (f"for step #{step + 1} from" in caplog.text) == (f"#{step + 1} at an unknown" in row) == (not is_late)


# What the user reads


def test_description_of_a_trainer_that_joins():
    status = make_status(
        worked_at=None, seconds_to_next=None, own_samples=0, all_samples=0, computed=0, applied=0, rank=None,
        loss=None, first_loss=None, last_miss=None, page="https://example.org/curves",
        end_time=4102576200.0,
    )  # fmt: skip
    rows = dict(describe_status(status))
    assert rows.pop("Curves") == "https://example.org/curves"
    assert rows.pop("Run ends").startswith("2100-01-02 12:30 UTC, in ")
    assert rows["State"] == "joining: no local step yet, at step #39" and rows["Last miss"] == "none"
    assert list(rows) == list(dict(describe_status(make_status())))
    assert rows["Local loss"] == "not known yet"
    assert rows["Your samples"] == "none in a global step yet" and "at an unknown time: 0 of" in rows["Next step"]


def test_round_that_runs_is_named():
    status = make_status(step=9, next_step=11, seconds_to_next=17.0)
    assert dict(describe_status(status))["Next step"].startswith("averaging #10; then #11 in 17 s: 800 of 4,096")
    assert "; averaging step #10; ETA 17 s" in describe_progress(status, None)
    assert "averaging" not in str(describe_status(make_status())) + describe_progress(make_status(), None)


@pytest.mark.parametrize(("seconds", "words"), [(45, "45 s"), (1500, "25 min"), (11_000, "3 hours")])
def test_thanks_name_the_trainer_and_its_time(seconds, words):
    status = make_status(time=time.time(), started_at=time.time() - seconds)
    given = f"Since this start you contributed 980 samples to 38 global steps in {words}"
    assert describe_contribution(status) == f"Thank you, {status.name}! {given}"
    status.traffic = "0.30 GB, 3.6 GB an hour; 2.10 GB in this month"
    assert describe_contribution(status).endswith(", with traffic of 0.30 GB, 3.6 GB an hour")


# Whether a trainer runs


def show(folder: Path, capsys, **fields) -> tuple[int, str]:
    """Show a trainer's status; return the exit code and the output."""
    (folder / FILE_NAME).write_text(json.dumps(dataclasses.asdict(make_status(**fields))), encoding="utf-8")
    return show_status(folder), capsys.readouterr().out


def test_running_trainer_is_shown_and_the_exit_code_is_0(tmp_path, capsys):
    """A trainer that waits for long runs: if it hangs, it ends itself."""
    code, output = show(tmp_path, capsys, worked_at=time.time() - 800, last_miss=(7, "another's \x1b]8;;x\x07words"))
    assert code == 0 and output.count("\n") == 8 and "no local step for 13 min, at step #39" in output
    assert "#7: another's ]8;;xwords\n" in output


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"pid": 1}'])
def test_folder_without_a_status(tmp_path, content, capsys):
    if content is not None:
        (tmp_path / FILE_NAME).write_text(content, encoding="utf-8")
    assert show_status(tmp_path) == 1
    assert capsys.readouterr().out == f"No trainer has started in '{tmp_path}' yet.\n"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"ended_at": 1_800_000_000.0}, "ended at 20"),
        ({"pid": 2**22 + 1}, "was killed or lost at about 20"),
        ({"time": time.time() - 100}, "has not written its status since 20"),
    ],
)
def test_trainer_that_does_not_run(tmp_path, capsys, fields, words):
    code, output = show(tmp_path, capsys, **fields)
    assert code == 1 and words in output and output.endswith(".\n") and output.count("\n") == 1


@pytest.mark.parametrize("script", ["run_trainer.py", "run_custom_trainer.py"])
@pytest.mark.programs
def test_script_prints_the_status_without_torch(tmp_path, capsys, script):
    show(tmp_path, capsys)
    command = [sys.executable, "-X", "importtime", str(ROOT / script), "--status", "--output_dir", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, encoding="utf-8")
    assert result.returncode == 0 and "98.0% of them applied" in result.stdout
    modules = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "cotrain.status.status" in modules and not {"torch", "hivemind"} & modules
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_volunteer_is_told_once_nothing_was_averaged_for_half_an_hour(keeper, monkeypatch):
    """A step that is taken alone is no average, and the time of a pause does not count."""
    clock, sent = SimpleNamespace(now=time.monotonic()), []
    monkeypatch.setattr(
        "cotrain.status.status_keeper.time", SimpleNamespace(monotonic=lambda: clock.now, time=time.time)
    )
    keeper.alerts = SimpleNamespace(send=lambda kind, text: sent.append(kind))

    def pass_minutes(minutes: float) -> int:
        clock.now += 60 * minutes
        keeper.work()
        return len(sent)

    record(keeper, StepRecord(1, Outcome.AVERAGED, 8))
    assert pass_minutes(20) == 0
    record(keeper, StepRecord(2, Outcome.AVERAGED, 8))
    assert pass_minutes(20) == 0
    record(keeper, StepRecord(3, Outcome.ALONE, 8))
    assert pass_minutes(11) == 1
    keeper.record_pause("until --resume")
    assert pass_minutes(60) == 1
    keeper.record_pause("")
    assert pass_minutes(20) == 1 and pass_minutes(11) == 2
