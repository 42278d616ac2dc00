"""What a monitor logs between two global steps: not a word too few while something happens, few while nothing does."""

import logging

import pytest

from cotrain.monitoring.aggregation import MetricsAggregator
from cotrain.monitoring.progress_log import ProgressLog
from tests.support.dht_records import heartbeat, metric, snapshot

START = 1_700_000_000.0


@pytest.fixture
def lines(caplog) -> list[str]:
    """Return a function that reads the DHT and returns the new lines of the log."""
    caplog.set_level(logging.INFO)
    aggregator = MetricsAggregator(alive_timeout=120.0, target_batch_size=4096)
    log = ProgressLog(4096, lambda key: key.decode())

    def lines(seconds: float, progress: dict, metrics: dict | None = None, checkpoint: int = -1) -> list[str]:
        caplog.clear()
        reports = aggregator.update(*snapshot(START + seconds, metrics or {}, {}, progress))
        log.update(seconds, aggregator.live_peers, bool(reports), checkpoint)
        return [record.getMessage() for record in caplog.records]

    return lines


def beat(seconds: float, samples: int, epoch: int = 0) -> dict:
    return heartbeat(START + seconds, epoch, samples=samples)  # 2.5 samples per second


def test_first_step_of_a_run_with_unlike_trainers(lines):
    assert lines(0, {}) == ["Waiting for trainers"]
    assert [lines(second, {}) for second in (30, 60, 270)] == [[], [], []]
    assert lines(300, {}) == ["Waiting for trainers"]
    joined, progress = lines(330, {b"fast": beat(328, 400), b"slow": beat(325, 48)})
    assert joined == "fast, slow joined; now 2 trainers"
    assert progress == "Accumulated 448 of 4,096 samples for step #1 from 2 trainers; ETA 12 min"
    assert lines(340, {b"fast": beat(338, 500), b"slow": beat(335, 48)}) == [], "rate-limited"
    assert lines(360, {b"fast": beat(358, 5000), b"slow": beat(355, 96)}) == [
        "Accumulated 4,192 of 4,096 samples for step #1 from 2 trainers; averaging"
    ]
    progress = {b"fast": beat(390, 0, epoch=1), b"slow": beat(390, 0, epoch=1)}
    assert lines(390, progress, {b"fast": metric(1), b"slow": metric(1)}) == [], "the step has a line"
    assert lines(410, {b"fast": beat(410, 100, epoch=1), b"slow": None}) == ["slow left; now 1 trainer"]


def test_flood_of_trainers_is_one_line_and_a_false_claim_counts_as_one_step(lines):
    claims = {b"%04d" % number: beat(0, 10**9 - 1 if number == 0 else 1) for number in range(1000)}
    joined, progress = lines(0, claims)
    assert joined.startswith("0000, 0001, ") and joined.endswith("0004, 995 more joined; now 1,000 trainers")
    assert progress.startswith("Accumulated 5,095 of 4,096 samples")
