"""The records that trainers publish and the monitor reads."""

import json
import threading
from collections.abc import Callable, Collection, Hashable
from types import SimpleNamespace
from unittest.mock import ANY, Mock

import pytest
import torch
from hivemind.utils import get_dht_time
from hivemind.utils.timed_storage import ValueWithExpiration

from cotrain.common.flags import ArgumentsError
from cotrain.common.names import short
from cotrain.monitoring import monitor as monitor_module
from cotrain.monitoring.advice import PERIOD, Adviser, parse_shares
from cotrain.monitoring.aggregation import MetricsAggregator
from cotrain.monitoring.contributors import Contributors
from cotrain.monitoring.monitor import CheckpointKeeper, TrainingMonitor
from cotrain.monitoring.reporters import Reporters
from cotrain.task import Task
from peerstep import records as dht_records
from peerstep.clock import run_time
from peerstep.coordinator import Outcome, StepRecord
from run_training_monitor import RunArguments, TrainingMonitorArguments
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


@pytest.fixture
def make_trainer(tmp_path, stored):
    """Return a function that builds the session of a trainer with this public key."""

    def make_trainer(key: bytes):
        session = make_session(tmp_path / key.decode(), offered=None)
        session.peer = storing_peer(stored, key)
        session.optimizer.local_progress = SimpleNamespace(samples_per_second=1.0)
        return session

    return make_trainer


def make_settings(**flags) -> RunArguments:
    return RunArguments(model_name_or_path="albert-large-v2", **flags)


def make_monitor(folder, reporter, aggregator=None, uploader=None, save_checkpoint_step_interval=100):
    args = TrainingMonitorArguments(save_checkpoint_step_interval=save_checkpoint_step_interval)
    peer, counted = SimpleNamespace(dht=None, public_key=b"monitor"), Contributors(folder, "run")
    aggregator, adviser = aggregator or MetricsAggregator(), Adviser(make_settings())
    return TrainingMonitor(peer, "run", aggregator, reporter, counted, None, uploader, args, adviser)


def test_share_of_complete_rounds_is_over_the_rounds_of_all_trainers(tmp_path, stored, make_trainer):
    """Records come from the trainers' own code. Who has had no round yet does not count."""
    for key, rounds in ((b"a", [True, True, False]), (b"b", [True]), (b"c", [])):
        session = make_trainer(key)
        session.optimizer.pace.recent_rounds = rounds
        session.report(StepRecord(10, Outcome.AVERAGED, 8))
        session.status.close()
    reporter = Mock()
    make_monitor(tmp_path, reporter, MetricsAggregator(last_reported_step=9)).refresh()
    reporter.report.assert_called_once_with(ANY, {"complete rounds": 0.75})


def test_organiser_is_told_what_helps_when_rounds_take_the_time(tmp_path, stored, make_trainer, caplog):
    """The trainers have slow, fast and no connections. One line in half an hour."""
    monitor = make_monitor(tmp_path, Mock(), MetricsAggregator(last_reported_step=0))
    for step, share in ((1, 0.5), (2, 0.97), (3, 0.99)):
        for key, of_trainer in ((b"a", share), (b"b", 1.0), (b"c", 0.1)):
            session = make_trainer(key)
            session.optimizer.pace.averaging_share = of_trainer
            session.report(StepRecord(step, Outcome.AVERAGED, 8))
            session.status.close()
        monitor.refresh()
        assert ("97% of the time" in caplog.text) == (step > 1) and "99%" not in caplog.text
    assert "--gradient_compression blockwise8" in caplog.text


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({}, "blockwise8, or --local_updates --gradient_compression topk"),
        ({"gradient_compression": "blockwise8"}, "with --local_updates --gradient_compression topk"),
        ({"local_updates": True}, "with --gradient_compression topk --average_state_every 64. "),
        ({"local_updates": True, "gradient_compression": "topk"}, "--average_state_every 64. "),
        (
            {"local_updates": True, "gradient_compression": "topk", "average_state_every": 64},
            "with a larger --target_batch_size. ",
        ),
    ],
)
def test_advice_depends_on_the_settings(settings, advice, monkeypatch):
    adviser = Adviser(make_settings(**settings))
    assert adviser.advise(None) is None and adviser.advise(0.8) is None
    assert advice in adviser.advise(1.0) and adviser.advise(1.0) is None
    adviser._advised_at -= PERIOD
    assert adviser.advise(1.0)


def test_share_of_applied_samples_comes_from_the_sessions(stored, make_trainer):
    """Each trainer has computed 4 samples in each of 100 local steps; the second one missed the newest 16 steps."""
    for key, num_missed in ((b"a", 0), (b"b", 16)):
        session = make_trainer(key)
        session.status.begin_at(0)
        for step in range(1, 101):
            session.optimizer.num_computed += 4
            session.status.record_local_step()
            is_missed = step > 100 - num_missed
            record = StepRecord(step, Outcome.MISSED) if is_missed else StepRecord(step, Outcome.ALONE, 4)
            session.status.record_step(record)
        session.publish()
        session.status.close()
    records = {key: record.value for key, record in stored["run_trainers"].items()}
    counts = {name: records[b"b"][name] for name in ("rounds", "complete", "computed", "applied")}
    assert counts == {"rounds": 0, "complete": 0, "computed": 64 * 4, "applied": 48 * 4}
    assert parse_shares(records.values())["applied share"] == (64 + 48) / 128


@pytest.mark.parametrize(
    ("leaving", "is_due", "run_is_over"),
    [
        ([], False, False),
        ([True, False], False, False),
        ([True, True, False], True, False),
        ([True, True], True, True),
    ],
)
def test_last_checkpoint_is_saved_and_uploaded_when_trainers_leave(
    tmp_path, stored, make_trainer, leaving, is_due, run_is_over
):
    """A stranger that took no step and claims to leave has no effect."""
    for number, leaves in enumerate([*leaving, True, True, True]):
        session = make_trainer(b"%d" % number)
        if number < len(leaving):
            session.report(StepRecord(10, Outcome.AVERAGED, 8))
        session.publish(leaving=leaves)
        session.status.close()
    uploader = Mock()
    monitor = make_monitor(tmp_path, Mock(), MetricsAggregator(last_reported_step=9), uploader)
    monitor.keeper = Mock(saved_step=-1)
    monitor.refresh()
    monitor.keeper.update.assert_called_once_with(10 if leaving else 9, is_due)
    uploader.update.assert_called_once_with(None, run_is_over=run_is_over)


def test_monitor_shows_the_leaderboard_as_often_as_it_saves_checkpoints(tmp_path, stored, caplog):
    caplog.set_level("INFO")
    reporter = Mock()
    monitor = make_monitor(tmp_path, reporter, save_checkpoint_step_interval=2)
    for step in range(1, 5):
        publish(stored, step, b"[owner:a]", username="al\ni/<c>e", samples=8)
        monitor.refresh()
    key = short(monitor.contributors.top(1)[0].peer_id)
    columns = ("place", "name", "peer", "samples", "steps")  # trackio and wandb show the cells as plain text
    assert [call.args for call in reporter.report_table.call_args_list] == [
        ("contributors", columns, [(1, "al i/<c>e", key, 8, 1)], 1),
        ("contributors", columns, [(1, "al i/<c>e", key, 24, 3)], 3),
    ]
    assert caplog.text.count("Contributors, by samples: al i/<c>e") == 2
    assert json.loads((tmp_path / "contributors.json").read_text(encoding="utf-8"))["contributors"][0]["samples"] == 32


def test_late_report_without_samples_is_not_shown(tmp_path, stored, caplog):
    """Such as that of a trainer which has just joined."""
    caplog.set_level("INFO")
    monitor = make_monitor(tmp_path, Reporters(tmp_path, "run"), MetricsAggregator(settle_time=0.0))
    for step in (1, 2, 3):
        publish(stored, step, "one")
        if step != 2:
            publish(stored, step, "late", samples=0)
        monitor.refresh()
    assert "Step #3\t" in caplog.text and "reported late" not in caplog.text


def test_samples_that_are_reported_late_are_on_the_leaderboard(tmp_path, stored, caplog):
    caplog.set_level("INFO")
    monitor = make_monitor(tmp_path, Reporters(tmp_path, "run"), MetricsAggregator(settle_time=0.0))
    for step in (1, 2, 3):
        publish(stored, step, *(("one", "late") if step != 2 else ("one",)))
        monitor.refresh()
    assert [leader.samples for leader in monitor.contributors.top(2)] == [3 * 32, 3 * 32]
    assert caplog.messages.count("Step #2: 32 more samples of anonymous (late), reported late") == 1
    saved = json.loads((tmp_path / "contributors.json").read_text(encoding="utf-8"))["contributors"]
    assert [row["samples"] for row in saved] == [3 * 32, 3 * 32]


def test_repeated_steps_get_a_second_line(tmp_path, stored, caplog):
    aggregator = MetricsAggregator(settle_time=1.0)
    monitor = make_monitor(tmp_path, Reporters(tmp_path, "run"), aggregator)
    for key, steps in ((b"killed", range(1, 17)), (b"revived", range(15, 19))):
        for step in steps:
            publish(stored, step, key, first=steps[0])
            monitor.refresh()
        publish(stored, step, gone=(key,), first=steps[0])
        monitor.refresh()
    assert [record["step"] for record in read_jsonl(tmp_path / "metrics.jsonl")] == [*range(1, 17), *range(15, 19)]
    assert caplog.text.count("reporting from step #15 again") == 1
    assert [leader.samples for leader in monitor.contributors.top(2)] == [16 * 32, 4 * 32]


def test_sparse_compression_needs_local_updates():
    with pytest.raises(ArgumentsError, match="--gradient_compression topk also needs --local_updates"):
        make_settings(gradient_compression="topk")


class SimulatedTime:
    """Clock of the monitor's end: each sleep lets half a second pass, and then something may happen.

    :param events: second -> what happens then
    """

    def __init__(self, events: dict[float, Callable[[], None]]):
        self.now, self.events = 0.0, events
        self.monotonic = self.time = lambda: self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.events.pop(self.now, lambda: None)()


def publish(
    stored: dict,
    step: int,
    *trainers: Hashable,
    gone: Collection = (),
    first: int = 1,
    username: str = "",
    samples: int = 32,
) -> None:
    """Let trainers report that they are at a step, and others that they leave after it."""
    now, expires = run_time(), run_time() + 600
    for peer in (*trainers, *gone):
        rows = entries(*(metric(number, samples=samples) for number in range(first, step + 1)))
        beat = None if peer in gone else heartbeat(now, step)
        record = trainer_record(*rows, username=username)
        for key, value in (("trainers", record), ("training_progress", beat)):
            stored.setdefault(f"run_{key}", {})[peer] = ValueWithExpiration(value, expires)


@pytest.mark.parametrize("leaves_at", [None, 1.0, 2.5])
def test_last_report_has_all_steps(tmp_path, stored, monkeypatch, caplog, leaves_at):
    """All peers are stopped at once. A trainer says goodbye first, and publishes its last step seconds later."""
    caplog.set_level("INFO")
    reporter = Reporters(tmp_path, "run")
    monitor = make_monitor(tmp_path, reporter, MetricsAggregator(settle_time=30.0))
    publish(stored, 3, "one", "late")
    monitor.refresh()
    publish(stored, 5, "one")
    events = {} if leaves_at is None else {
        leaves_at: lambda: publish(stored, 5, gone=("one", "late")),
        leaves_at + 2.0: lambda: publish(stored, 6, gone=("one", "late")),
    }  # fmt: skip
    clock = SimulatedTime(events)
    monkeypatch.setattr(monitor_module, "time", clock)
    monitor.finish()
    newest = 5 if leaves_at is None else 6
    assert [record["step"] for record in read_jsonl(tmp_path / "metrics.jsonl")] == [*range(1, newest + 1)]
    assert clock.now < 12 and f"The monitor has stopped at step #{newest}" in caplog.messages


@pytest.mark.parametrize(("told_at", "contributors"), [(11.0, 2), (None, 1)])
def test_last_report_waits_for_a_slow_trainer(tmp_path, stored, monkeypatch, told_at, contributors):
    """It reports its last step at the end of its local step, if it comes to that."""
    monitor = make_monitor(tmp_path, Reporters(tmp_path, "run"), MetricsAggregator(settle_time=30.0))
    publish(stored, 3, "one", "slow")
    monitor.refresh()
    publish(stored, 4, gone=("one",))
    begun = heartbeat(run_time() + 1, 4, contributed=32)
    stored["run_training_progress"]["slow"] = ValueWithExpiration(begun, run_time() + 600)
    clock = SimulatedTime({} if told_at is None else {told_at: lambda: publish(stored, 4, gone=("slow",))})
    monkeypatch.setattr(monitor_module, "time", clock)
    monitor.finish()
    records = read_jsonl(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3, 4] and records[-1]["contributors"] == contributors
    assert clock.now <= (told_at or monitor_module.END_SECONDS) + 4


@pytest.mark.parametrize(("saved", "offered", "expected"), [(3, True, 5), (5, True, 5), (3, False, 3)])
def test_last_checkpoint_is_that_of_the_newest_state(tmp_path, stored, monkeypatch, caplog, saved, offered, expected):
    caplog.set_level("INFO")
    keeper = CheckpointKeeper(
        FakeAverager(step=5), Task(), torch.nn.Linear(2, 2), "run", TrainingMonitorArguments(output_dir=str(tmp_path))
    )
    keeper.saved_step = saved
    if not offered:
        keeper.averager.download_state = lambda min_step: None
    monitor = make_monitor(tmp_path, Mock(), MetricsAggregator())
    monitor.keeper = keeper
    publish(stored, 5, "one")
    monkeypatch.setattr(monitor_module, "time", SimulatedTime({}))
    monitor.finish()
    keeper.close()
    assert caplog.messages[-1] == f"The monitor has stopped at step #5; the newest checkpoint is checkpoint-{expected}"


def test_last_checkpoint_is_saved_once(tmp_path, caplog):
    """The monitor is stopped while it saves the newest state."""
    caplog.set_level("INFO")
    begun, goes_on = threading.Event(), threading.Event()
    averager = FakeAverager(step=5)
    download = averager.download_state
    averager.download_state = lambda min_step: (begun.set(), goes_on.wait(60), download(min_step))[-1]
    args = TrainingMonitorArguments(output_dir=str(tmp_path))
    keeper = CheckpointKeeper(averager, Task(), torch.nn.Linear(2, 2), "run", args)
    keeper.update(5, trainers_are_leaving=False)
    assert begun.wait(60)
    threading.Timer(0.2, goes_on.set).start()
    keeper.save_newest(5, seconds=60)
    keeper.close()
    assert [message for message in caplog.messages if "ave" in message] == [f"Saved {tmp_path / 'checkpoint-5'}"]


def test_last_leaderboard_and_the_samples_in_all_are_told(tmp_path, stored, make_trainer, monkeypatch, caplog):
    """A run of 7 steps shows the leaderboard of step 7, not only that of step 5."""
    caplog.set_level("INFO")
    reporter = Mock()
    monitor = make_monitor(
        tmp_path, reporter, MetricsAggregator(last_reported_step=0), save_checkpoint_step_interval=5
    )
    session = make_trainer(b"a")
    for step in range(1, 13):
        session.report(StepRecord(step, Outcome.AVERAGED, 100))
        if step in (5, 10, 12):
            monitor.refresh()
    session.status.close()
    monkeypatch.setattr(monitor_module, "time", SimulatedTime({}))
    monitor.finish()
    assert [call.args[-1] for call in reporter.report_table.call_args_list][-1] == 12
    lines = [record.getMessage() for record in caplog.records if "samples in all" in record.getMessage()]
    assert lines[-1].startswith("1,200 samples in all; step #125,000, the last of the schedule, in about ")
    assert lines[0] == "400 samples in all", "the pace is not known yet"
