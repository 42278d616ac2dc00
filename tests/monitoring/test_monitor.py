"""The records that trainers publish and the monitor reads."""

import json
from types import SimpleNamespace

import pytest
from hivemind.utils import get_dht_time
from hivemind.utils.timed_storage import ValueWithExpiration

import utils
from lib.monitoring.aggregation import MetricsAggregator
from lib.monitoring.contributors import Contributors
from lib.monitoring.monitor import TrainingMonitor
from lib.monitoring.parsing import parse_shares
from lib.monitoring.reporters import build_reporters
from run_training_monitor import TrainingMonitorArguments
from tests.support.dht_records import metric
from tests.support.fakes import make_session

ARGS = TrainingMonitorArguments()


@pytest.fixture
def stored(monkeypatch) -> dict:
    """Return the content of a fake DHT: key -> subkey -> record."""
    records = {}

    def store(_dht, key, public_key, value, lifetime) -> None:
        records.setdefault(key, {})[public_key] = ValueWithExpiration(value, get_dht_time() + lifetime)

    monkeypatch.setattr(utils, "store_record", store)
    monkeypatch.setattr(utils, "get_dictionary", lambda _dht, key, timeout=10.0: records.get(key, {}))
    return records


def test_share_of_complete_rounds_is_over_the_rounds_of_all_trainers(tmp_path, stored):
    """Records come from the trainers' own code. Who has had no round yet does not count."""
    for key, rounds in ((b"a", [True, True, False]), (b"b", [True]), (b"c", [])):
        session = make_session(tmp_path / key.decode(), offered=None)
        session.peer = SimpleNamespace(dht=None, public_key=key)
        session.optimizer.recent_rounds = rounds
        session.optimizer.local_progress = SimpleNamespace(samples_per_second=1.0)
        session.optimizer.is_synchronized_with_peers = lambda: True
        session.report(step=10, samples=8)
        session.close()
    extras = []
    monitor = TrainingMonitor(
        SimpleNamespace(dht=None, public_key=b"monitor"), "run", MetricsAggregator(last_reported_step=9),
        SimpleNamespace(report=lambda report, extra: extras.append(extra)), Contributors(tmp_path, "run"),
        keeper=None, uploader=None, args=TrainingMonitorArguments(save_checkpoint_step_interval=100),
    )  # fmt: skip
    monitor.refresh()
    assert extras == [{"complete rounds": 0.75}]


def test_share_of_applied_samples_comes_from_the_sessions(tmp_path, stored):
    """Each trainer has computed 4 samples in each of 100 local steps; the second one missed the newest 16 steps."""
    for key, num_missed in ((b"a", 0), (b"b", 16)):
        session = make_session(tmp_path / key.decode(), offered=None)
        session.peer = SimpleNamespace(dht=None, public_key=key)
        session.optimizer.local_progress = SimpleNamespace(samples_per_second=1.0)
        session.optimizer.is_synchronized_with_peers = lambda: True
        session.status.begin_at(0)
        for step in range(1, 101):
            session.optimizer.num_computed += 4
            session.status.record_local_step()
            outcome = "failed" if step > 100 - num_missed else "alone"
            session.optimizer.round_log.write(
                {"step": step, "outcome": outcome, "samples": 4, "error": "", "weights": {}}
            )
            session.report(step=step, samples=4)
        session.close()
    assert stored["run_rounds"][b"b"].value == {"rounds": 0, "complete": 0, "computed": 64 * 4, "applied": 48 * 4}
    records = {key: record.value for key, record in stored["run_rounds"].items()}
    assert parse_shares(records)["applied share"] == (64 + 48) / 128


@pytest.mark.parametrize(("leaving", "run_is_over"), [([], False), ([True, False], False), ([True, True], True)])
def test_last_checkpoint_is_uploaded_when_all_trainers_leave(tmp_path, stored, leaving, run_is_over):
    for number, leaves in enumerate(leaving):
        session = make_session(tmp_path / str(number), offered=None)
        session.peer = SimpleNamespace(dht=None, public_key=b"%d" % number)
        session.introduce(leaving=leaves)
        session.close()
    updates, peer = [], SimpleNamespace(dht=None, public_key=b"monitor")
    uploader = SimpleNamespace(update=lambda page, run_is_over: updates.append(run_is_over))
    reporter, contributors = SimpleNamespace(), Contributors(tmp_path, "run")
    monitor = TrainingMonitor(peer, "run", MetricsAggregator(), reporter, contributors, None, uploader, ARGS)
    monitor.refresh()
    assert updates == [run_is_over]


def test_repeated_steps_get_a_second_line(tmp_path, stored, caplog):
    reporters = build_reporters(tmp_path, "run")
    aggregator = MetricsAggregator(settle_time=1.0)
    peer = SimpleNamespace(dht=None, public_key=b"monitor")
    monitor = TrainingMonitor(peer, "run", aggregator, reporters, Contributors(tmp_path, "run"), None, None, ARGS)
    for key, steps in ((b"killed", range(1, 17)), (b"revived", range(15, 19))):
        for step in steps:
            stored["run_metrics"] = {key: ValueWithExpiration(metric(step), 0.0)}
            monitor.refresh()
        aggregator.live_peers[0].has_left = True
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [*range(1, 17), *range(15, 19)]
    assert caplog.text.count("reporting from step #15 again") == 1
    assert [leader.samples for leader in monitor.contributors.top(2)] == [16 * 32, 4 * 32]
