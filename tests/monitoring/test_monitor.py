"""The records that trainers publish and the monitor reads."""

import errno
import json
import os
import threading
from collections.abc import Callable, Collection, Hashable
from types import SimpleNamespace
from unittest.mock import ANY, Mock

import pytest
import torch
from hivemind.utils import get_dht_time
from hivemind.utils.timed_storage import ValueWithExpiration

from cotrain.common import backoff
from cotrain.common.names import short
from cotrain.monitoring import monitor as monitor_module
from cotrain.monitoring.advice import Adviser
from cotrain.monitoring.aggregation import MetricsAggregator
from cotrain.monitoring.contributors import Contributors
from cotrain.monitoring.monitor import CheckpointKeeper, TrainingMonitor
from cotrain.monitoring.reporters import Reporters
from cotrain.task import Task
from peerstep.peer.clock import run_time
from peerstep.reports import records as dht_records
from peerstep.step.coordinator import Outcome, StepRecord
from run_training_monitor import RunArguments
from tests.support.dht_records import entries, heartbeat, metric, trainer_record
from tests.support.fakes import FakeAverager, make_session, storing_peer
from tests.support.peers import read_jsonl


@pytest.fixture
def stored(monkeypatch) -> dict:
    """Return the content of a fake DHT: key -> subkey -> record."""
    records = {}

    def store(_dht, key, public_key, value, lifetime) -> None:
        records.setdefault(key, {})[public_key] = ValueWithExpiration(value, get_dht_time() + lifetime)

    monkeypatch.setattr(dht_records, "store_record", store)
    monkeypatch.setattr(dht_records, "get_records", lambda _dht, key: records.get(key, {}))
    return records


@pytest.fixture(autouse=True)
def shown_log(caplog) -> None:
    caplog.set_level("INFO")


def publish(
    stored: dict, step: int, *trainers: Hashable, gone: Collection = (), first: int = 1, samples: int = 32, **fields
) -> None:
    """Let trainers report that they are at a step, and others that they leave after it.

    :param fields: of the trainers' records
    """
    now, expires = run_time(), run_time() + 600
    for peer in (*trainers, *gone):
        rows = entries(*(metric(number, samples=samples) for number in range(first, step + 1)))
        beat = None if peer in gone else heartbeat(now, step)
        for key, value in (("trainers", trainer_record(*rows, **fields)), ("training_progress", beat)):
            stored.setdefault(f"run_{key}", {})[peer] = ValueWithExpiration(value, expires)


def make_monitor(folder, reporter=None, *, keeper=None, uploader=None, interval=100, **options) -> TrainingMonitor:
    """Build a monitor that writes files, unless it has another reporter.

    :param interval: between checkpoints
    :param options: of the aggregator
    """
    peer, counted = SimpleNamespace(dht=None, public_key=b"monitor", run_id="run"), Contributors(folder, "run")
    reporter, aggregator = reporter or Reporters(folder, "run"), MetricsAggregator(**options)
    settings = RunArguments()
    adviser = Adviser(settings, settings)
    return TrainingMonitor(peer, aggregator, reporter, counted, keeper, uploader, adviser, 30.0, interval)


@pytest.fixture
def finish(monkeypatch) -> Callable[..., float]:
    """Return a function that ends a monitor, and returns the seconds that this takes.

    Each sleep lets half a second pass, and then something may happen: `events` are functions by second.
    """

    def finish(monitor: TrainingMonitor, events: dict[float, Callable[[], None]] | None = None) -> float:
        clock = SimpleNamespace(now=0.0)
        clock.monotonic = clock.time = lambda: clock.now

        def sleep(seconds: float) -> None:
            clock.now += seconds
            (events or {}).pop(clock.now, lambda: None)()

        clock.sleep = sleep
        monkeypatch.setattr(monitor_module, "time", clock)
        monitor.finish()
        return clock.now

    return finish


def test_shares_come_from_the_records_of_the_trainers(tmp_path, stored):
    """Each has computed 4 samples in each of 100 local steps; the second one missed the newest 16 steps."""
    for key, rounds, num_missed in ((b"a", [True, True, False], 0), (b"b", [True], 16), (b"c", [], 100)):
        session = make_session(tmp_path / key.decode(), offered=None, peer=storing_peer(stored, key))
        session.optimizer.local_progress = SimpleNamespace(samples_per_second=1.0)
        session.optimizer.pace.recent_rounds = rounds
        session.status.begin_at(0)
        for step in range(1, 101):
            session.optimizer.num_computed += 0 if key == b"c" else 4
            session.status.record_local_step()
            is_missed = step > 100 - num_missed
            session.status.record_step(StepRecord(step, *((Outcome.MISSED,) if is_missed else (Outcome.ALONE, 4))))
        session.publisher.report(StepRecord(10, Outcome.AVERAGED, 8))
        session.status.close()
    reporter = Mock()
    make_monitor(tmp_path, reporter, last_reported_step=9).refresh()
    applied_share = (64 + 48) / 128
    reporter.report.assert_called_once_with(
        ANY, {"complete rounds": 0.75, "applied share": applied_share, "paused peers": 0}
    )


def test_organiser_is_told_what_helps_when_rounds_take_the_time(tmp_path, stored, caplog):
    """The trainers have slow, fast and no connections. One line in half an hour."""
    monitor = make_monitor(tmp_path, last_reported_step=0)
    for step, share in ((1, 0.5), (2, 0.97), (3, 0.99)):
        for key, of_trainer in ((b"a", share), (b"b", 1.0), (b"c", 0.1)):
            publish(stored, step, key, averaging=of_trainer)
        monitor.refresh()
        assert ("97% of the time" in caplog.text) == (step > 1) and "99%" not in caplog.text
    assert "--gradient_compression blockwise8" in caplog.text


def test_last_checkpoint_is_saved_for_the_last_trainer_that_leaves(tmp_path, stored):
    """The others have left before it, and wait for nothing."""
    for number, leaves in enumerate([False, False, True]):
        publish(stored, 10, number, first=10, leaving=leaves)
    monitor = make_monitor(tmp_path, Mock(), keeper=Mock(saved_step=-1), last_reported_step=9)
    monitor.refresh()
    for number, leaves in enumerate([False, False, True]):
        publish(stored, 10, gone=[number], first=10, leaving=leaves)
    monitor.refresh()
    assert [call.args[1] for call in monitor.keeper.update.call_args_list] == [False, True]
    assert monitor.keeper.update.call_args.args[2], "the last one is still there to be asked"


@pytest.mark.parametrize(
    ("leaving", "is_due", "run_is_over"),
    [
        ([], False, False),
        ([True, False], False, False),
        ([True, True, False], True, False),
        ([True, True], True, True),
    ],
)
def test_last_checkpoint_is_saved_and_uploaded_when_trainers_leave(tmp_path, stored, leaving, is_due, run_is_over):
    """A stranger that took no step and claims to leave has no effect."""
    for number, leaves in enumerate(leaving):
        publish(stored, 10, number, first=10, leaving=leaves)
    strangers = dict.fromkeys("abc", ValueWithExpiration(trainer_record(leaving=True), run_time() + 600))
    stored.setdefault("run_trainers", {}).update(strangers)
    monitor = make_monitor(tmp_path, Mock(), keeper=Mock(saved_step=-1), uploader=Mock(), last_reported_step=9)
    monitor.refresh()
    trainers = set(range(len(leaving)))
    monitor.keeper.update.assert_called_once_with(10 if leaving else 9, is_due, trainers)
    monitor.uploader.update.assert_called_once_with(None, run_is_over=run_is_over)


def test_leaderboard_is_shown_as_often_as_checkpoints_are_saved_and_at_the_end(tmp_path, stored, finish, caplog):
    monitor = make_monitor(tmp_path, reporter := Mock(), interval=2)
    for step in range(1, 5):
        publish(stored, step, b"[owner:a]", username="al\ni/<c>e", samples=8, own_base_loss=1.5, own_loss=1.25)
        monitor.refresh()
    finish(monitor)
    key = short(monitor.contributors.leaders[0].peer_id)
    # trackio and wandb show the cells as plain text
    columns, own = ("#", "name", "share", "state", "own loss", "samples", "steps", "peer"), "1.500 -> 1.250"
    assert [call.args for call in reporter.report_table.call_args_list] == [
        ("contributors", columns, [(1, "al i/<c>e", "100.0%", "", own, 8 * step, step, key)], step)
        for step in (1, 3, 4)
    ]
    assert caplog.text.count("Contributors, by samples: al i/<c>e") == 3
    first, _, last = (message for message in caplog.messages if "samples in all" in message)
    assert first == "8 samples in all", "the pace is not known yet"
    assert last.startswith("32 samples in all; step #125,000, the last of the schedule, in about ")
    assert json.loads((tmp_path / "contributors.json").read_text(encoding="utf-8"))["contributors"][0]["samples"] == 32


@pytest.mark.parametrize("samples", [32, 0], ids=["samples", "none, as of a trainer that has just joined"])
def test_samples_that_are_reported_late_are_on_the_leaderboard(tmp_path, stored, caplog, samples):
    monitor = make_monitor(tmp_path, settle_time=0.0)
    for step in (1, 2, 3):
        publish(stored, step, "one")
        if step != 2:
            publish(stored, step, "late", samples=samples)
        monitor.refresh()
    assert "Step #3\t" in caplog.text
    told = caplog.messages.count("Step #2: 32 more samples of anonymous (late), reported late")
    assert told == caplog.text.count("reported late") == (samples > 0)
    saved = json.loads((tmp_path / "contributors.json").read_text(encoding="utf-8"))["contributors"]
    assert [row["samples"] for row in saved] == [3 * 32] * (1 + (samples > 0))


def test_last_leaderboard_has_what_was_reported_late(tmp_path, stored, finish, caplog):
    monitor = make_monitor(tmp_path, settle_time=0.0, interval=1)
    for step, peers in ((1, ("one", "late")), (2, ("one",)), (2, ("late",))):
        publish(stored, step, *peers)
        monitor.refresh()
    finish(monitor)
    boards = [message.split()[0] for message in caplog.messages if "samples in all" in message]
    assert boards == ["64", "96", "128"], caplog.text


def test_repeated_steps_get_a_second_line(tmp_path, stored, caplog):
    monitor = make_monitor(tmp_path, settle_time=1.0)
    for key, steps in ((b"killed", range(1, 17)), (b"revived", range(15, 19))):
        for step in steps:
            publish(stored, step, key, first=steps[0])
            monitor.refresh()
        publish(stored, step, gone=(key,), first=steps[0])
        monitor.refresh()
    assert [record["step"] for record in read_jsonl(tmp_path / "metrics.jsonl")] == [*range(1, 17), *range(15, 19)]
    assert caplog.text.count("reporting from step #15 again") == 1
    assert [leader.samples for leader in monitor.contributors.leaders[:2]] == [16 * 32, 4 * 32]


# The end


@pytest.mark.parametrize("leaves_at", [None, 1.0, 2.5])
def test_last_report_has_all_steps(tmp_path, stored, finish, caplog, leaves_at):
    """All peers are stopped at once. A trainer says goodbye first, and publishes its last step seconds later."""
    monitor = make_monitor(tmp_path, settle_time=30.0)
    publish(stored, 3, "one", "late")
    monitor.refresh()
    publish(stored, 5, "one")
    events = {} if leaves_at is None else {
        leaves_at: lambda: publish(stored, 5, gone=("one", "late")),
        leaves_at + 2.0: lambda: publish(stored, 6, gone=("one", "late")),
    }  # fmt: skip
    assert finish(monitor, events) < 12
    newest = 5 if leaves_at is None else 6
    assert [record["step"] for record in read_jsonl(tmp_path / "metrics.jsonl")] == [*range(1, newest + 1)]
    assert f"The monitor has stopped at step #{newest}" in caplog.messages


@pytest.mark.parametrize(("told_at", "contributors"), [(11.0, 2), (None, 1)])
def test_last_report_waits_for_a_slow_trainer(tmp_path, stored, finish, told_at, contributors):
    """It reports its last step at the end of its local step, if it comes to that."""
    monitor = make_monitor(tmp_path, settle_time=30.0)
    publish(stored, 3, "one", "slow")
    monitor.refresh()
    publish(stored, 4, gone=("one",))
    begun = heartbeat(run_time() + 1, 4, contributed=32)
    stored["run_training_progress"]["slow"] = ValueWithExpiration(begun, run_time() + 600)
    seconds = finish(monitor, {told_at: lambda: publish(stored, 4, gone=("slow",))})
    records = read_jsonl(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3, 4] and records[-1]["contributors"] == contributors
    assert seconds <= (told_at or monitor_module.END_SECONDS) + 4


def make_keeper(folder, averager: FakeAverager) -> CheckpointKeeper:
    return CheckpointKeeper(averager, Task(), torch.nn.Linear(2, 2), "run", folder, 5, (2, 8), 30.0)


@pytest.mark.parametrize(("saved", "offered", "expected"), [(3, True, 5), (5, True, 5), (3, False, 3)])
def test_last_checkpoint_is_that_of_the_newest_state(tmp_path, stored, finish, caplog, saved, offered, expected):
    keeper = make_keeper(tmp_path, FakeAverager(step=5 if offered else -1))
    keeper.saved_step = saved
    publish(stored, 5, "one")
    finish(make_monitor(tmp_path, keeper=keeper))
    keeper.close()
    assert caplog.messages[-1] == f"The monitor has stopped at step #5; the newest checkpoint is checkpoint-{expected}"


def test_a_break_does_not_delay_the_next_checkpoint(tmp_path, monkeypatch):
    """While nobody is there, no attempt fails. Trainers that join are asked at once."""
    now, averager = [0.0], FakeAverager(step=-1)
    monkeypatch.setattr(backoff.time, "monotonic", lambda: now[0])
    keeper, attempts = make_keeper(tmp_path, averager), []
    monkeypatch.setattr(keeper, "save", lambda *_steps: (attempts.append(now[0]), keeper.backoff.fail()))

    def refresh(seconds: int, trainers: set[str]) -> list[float]:
        attempts.clear()
        for _ in range(0, seconds, 30):
            keeper.update(188, False, trainers)
            if keeper.pending is not None:
                keeper.pending.result(60)
            now[0] += 30
        return [at - now[0] + seconds for at in attempts]

    assert refresh(1800, {"client"})[:5] == [0, 30, 90, 210, 450]
    assert refresh(1800, set()) == []
    assert refresh(60, {"client"}) == [0, 30], "the next session"
    refresh(1800, {"client"})
    assert refresh(60, {"client", "reachable"}) == [0, 30]
    keeper.close()


def test_a_full_disk_is_named_once(tmp_path, monkeypatch, caplog):
    """There was a warning at each attempt, with the name of a temporary file."""
    keeper = make_keeper(tmp_path, FakeAverager(step=5))
    full = (OSError(errno.ENOSPC, "No space left on device", f".checkpoint-5.{number}.new") for number in range(4))
    with monkeypatch.context() as patched:
        patched.setattr(monitor_module.checkpoints, "save_checkpoint", Mock(side_effect=full))
        for _ in range(3):
            keeper.save(5, 9)
    warning = "Could not save step #5 or later. No space left on device; trying again later"
    assert [message for message in caplog.messages if "save" in message] == [warning]
    keeper.save(5, 9)
    with monkeypatch.context() as patched:
        patched.setattr(monitor_module.checkpoints, "save_checkpoint", Mock(side_effect=full))
        keeper.save(5, 9)
    assert [message for message in caplog.messages if "save" in message] == [warning, warning], "full again"
    keeper.close()


def test_an_unreadable_checkpoint_delays_no_other(tmp_path, monkeypatch, caplog):
    """Each save ended with "Could not save", and the next one waited for five minutes."""
    stat, unreadable = os.stat, tmp_path / "checkpoint-3"
    unreadable.mkdir()

    def read(path, **options):
        if str(path).startswith(f"{unreadable}/"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", read)
    keeper = make_keeper(tmp_path, FakeAverager(step=5))
    keeper.save(5, 9)
    assert keeper.backoff.failures == 0 and unreadable.is_dir() and "Could not save" not in caplog.text
    keeper.close()


def test_last_checkpoint_is_saved_once(tmp_path, caplog):
    """The monitor is stopped while it saves the newest state."""
    begun, goes_on = threading.Event(), threading.Event()
    averager = FakeAverager(step=5)
    download = averager.download_state
    averager.download_state = lambda min_step: (begun.set(), goes_on.wait(60), download(min_step))[-1]
    keeper = make_keeper(tmp_path, averager)
    keeper.update(5, False, {"one"})
    assert begun.wait(60)
    threading.Timer(0.2, goes_on.set).start()
    keeper.save_newest(5, seconds=60)
    keeper.close()
    assert [message for message in caplog.messages if "ave" in message] == [f"Saved {tmp_path / 'checkpoint-5'}"]


@pytest.mark.parametrize("last_step", [3, None])
def test_monitor_ends_after_the_last_step_of_the_schedule(tmp_path, stored, monkeypatch, caplog, last_step):
    """It waits for trainers that have not left, and for those that join late. Another one has no end."""
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = clock.time = lambda: clock.now
    monkeypatch.setattr(monitor_module, "time", clock)
    monitor = make_monitor(tmp_path, Mock(), settle_time=0.0)
    monitor.last_step, patience = last_step, 4 * monitor.refresh_period

    def has_ended(step: int, *trainers: bytes, gone: Collection = (), after: float = 0.0) -> bool:
        clock.now += after
        publish(stored, step, *trainers, gone=gone)
        monitor.refresh()
        return monitor.has_ended()

    assert not has_ended(2, b"a", b"b") and not has_ended(2, b"a", b"b", after=1000)
    assert "has ended" not in caplog.text
    assert not has_ended(3, b"a", b"b") and not has_ended(3, b"a", b"b", after=1000), "they leave only now"
    assert not has_ended(3, gone=(b"a", b"b"), after=patience - 1)
    assert not has_ended(3, b"late", after=patience) and not has_ended(3, gone=(b"late",), after=1)
    assert has_ended(3, after=patience) == (last_step is not None)
    assert caplog.text.count("Step #3 is the last of the schedule: the run has ended.") == (last_step is not None)


def test_restarted_monitor_of_a_finished_run_ends(tmp_path, stored, monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: clock.now, time=lambda: clock.now, now=0.0)
    monkeypatch.setattr(monitor_module, "time", clock)
    keeper = SimpleNamespace(saved_step=3, is_running=True, update=lambda *_: None)
    monitor = make_monitor(tmp_path, Mock(), keeper=keeper)
    monitor.last_step = 3
    assert not monitor.has_ended()
    clock.now = 1000.0
    assert not monitor.has_ended(), "a download runs"
    keeper.is_running, clock.now = False, 2000.0
    assert monitor.has_ended()


def test_paused_trainers_are_named_in_log_leaderboard_and_dashboard(tmp_path, stored, caplog):
    """Those at an old step do not hide the progress of the others, and a record outlives a trainer that is gone."""
    monitor, now = make_monitor(tmp_path, reporter := Mock(), interval=1), run_time()
    publish(stored, 4, "alice", "bob", "carol", username="a volunteer")
    monitor.refresh()
    publish(stored, 4, "alice", "bob", username="a volunteer", paused=True)
    publish(stored, 4, gone=["bob"], username="a volunteer", paused=True)
    stored["run_training_progress"]["alice"].value["away"] = True
    publish(stored, 6, "carol", username="a volunteer")
    stored["run_training_progress"]["carol"] = ValueWithExpiration(heartbeat(now, 6, samples=8), now + 600)
    monitor.refresh()
    assert "a volunteer (alice) paused; now 2 trainers, 1 of them paused" in caplog.text
    board = next(line for line in reversed(caplog.messages) if line.startswith("Contributors"))
    assert board.count("(paused)") == 1 and "(alice) 128 (paused)" in board
    rows = reporter.report_table.call_args.args[2]
    assert sorted((row[-1], row[3]) for row in rows) == [("alice", "paused"), ("bob", ""), ("carol", "")]
    assert reporter.report.call_args.args[1]["paused peers"] == 1
    publish(stored, 7, "alice", "carol", username="a volunteer", paused=False)
    monitor.refresh()
    assert "a volunteer (alice) continued; now 2 trainers" in caplog.text


def test_organiser_is_told_what_needs_a_person(tmp_path, stored, monkeypatch):
    clock, sent, disk = SimpleNamespace(now=0.0), [], SimpleNamespace(percent=50.0)
    clock.monotonic = clock.time = lambda: clock.now
    monkeypatch.setattr(monitor_module, "time", clock)
    monkeypatch.setattr(monitor_module.psutil, "disk_usage", lambda path: disk)
    parts = {name: Mock(saved_step=-1, backoff=backoff.Backoff(30.0, 300.0)) for name in ("keeper", "uploader")}
    monitor = make_monitor(tmp_path, Mock(), **parts)
    monitor.alerts = SimpleNamespace(is_on=True, send=lambda kind, text: sent.append(f"{kind}: {text}"))

    def told(step: int | None = None, loss: float = 2.0, **fields) -> list[str]:
        sent.clear()
        if step is not None:
            rows = entries(metric(step, loss=loss, mini_steps=1))
            publish(stored, step, "alice")
            stored["run_trainers"]["alice"] = ValueWithExpiration(trainer_record(*rows, **fields), run_time() + 600)
        monitor.refresh()
        return list(sent)

    assert not any(told(step) for step in range(1, 8))
    assert told(8, loss=2.8) == []
    assert told(9, loss=3.2) == ["loss: the loss has jumped to 3.200 at step #9, from 2.000"]
    disk.percent = 96.0
    for _ in range(3):
        assert [line.partition(":")[0] for line in told()] == ["disk"], "it may pass"
        parts["keeper"].backoff.fail("No space left on device")
        parts["uploader"].backoff.fail("the Hub refused (500)")
    faults = told()
    assert [line.partition(":")[0] for line in faults] == ["save a checkpoint", "upload a checkpoint", "disk"]
    assert "No space left" in faults[0] and "96 %" in faults[2]
    parts["keeper"].backoff.reset()
    parts["uploader"].backoff.reset()
    disk.percent = 50.0
    stored["run_training_progress"] = {}
    clock.now += 599.0
    monitor.aggregator.peers.clear()
    assert told() == []
    clock.now += 2.0
    assert told() == ["trainers: the run has had no trainer for 10 minutes"]
