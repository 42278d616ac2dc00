"""Parsing of the records in the DHT. What its validators refuse is tested in tests/dht/test_run_records.py."""

import pytest

from cotrain.monitoring.advice import parse_shares
from cotrain.monitoring.aggregation import PeerStep, parse_steps
from tests.support.dht_records import entries, metric, trainer_record


def test_reads_a_history():
    one, two = parse_steps("peer", entries(metric(3, loss=7.5), metric(4), times=[17.5, 18.5]))
    assert one == PeerStep("peer", 3, 32, metric(3, loss=7.5) | {"time": 17.5}) and two.step == 4
    assert parse_steps("peer", entries(metric(3)))[0].metrics["time"] is None


def test_nothing_there():
    assert parse_steps("peer", []) == [] and parse_shares([]) == {}


def shares(*counts: tuple[int, int]) -> list[dict]:
    """Return the records of trainers with these numbers of applied and computed samples."""
    return [trainer_record(rounds=4, complete=2, applied=applied, computed=computed) for applied, computed in counts]


def test_share_of_applied_samples():
    assert parse_shares(shares((0, 0))) == {"complete rounds": 0.5}, "no samples yet"
    assert parse_shares(shares((90, 100))) == {"complete rounds": 0.5, "applied share": 0.9}
    unlike = shares((50, 50), (50, 100), (300, 300))
    assert parse_shares(unlike)["applied share"] == pytest.approx(200 / 250)
    idle = [trainer_record(rounds=8, complete=8)]
    assert parse_shares(idle + shares((1, 2))) == {"complete rounds": 10 / 12, "applied share": 0.5}


@pytest.mark.parametrize(
    "lie", [(0, 10**9), (10**9, 10**9), (0, 100)], ids=["nothing of a lot", "all of a lot", "nothing of the usual"]
)
def test_claim_of_many_samples_has_the_weight_of_an_average_trainer(lie):
    honest = [(90, 100)] * 19
    share = parse_shares(shares(*honest, lie))["applied share"]
    assert abs(share - 0.9) <= 1 / 20


def test_more_than_all_samples_count_as_all():
    assert parse_shares(shares((200, 100), (50, 100)))["applied share"] == 0.75
