"""Parsing of the records in the DHT. What its validators refuse is tested in tests/dht/test_run_records.py."""

import math

import pytest
from hivemind.utils.timed_storage import ValueWithExpiration

from cotrain.monitoring.parsing import (
    Heartbeat,
    PeerStep,
    parse_history,
    parse_metrics,
    parse_peers,
    parse_progress,
    parse_shares,
)
from tests.support.dht_records import entries, heartbeat, metric, steps_of


def test_reads_what_the_dht_returns():
    tagged = b"\x00[owner:ssh-rsa AAAA]tail"
    raw = {tagged: ValueWithExpiration(metric(3, loss=7.5), 99.0)}
    assert parse_metrics(raw) == [PeerStep(b"ssh-rsa AAAA", 3, 1.5, 32, 7.5, 2, 99.0)]

    assert steps_of(parse_history({tagged: entries(metric(1), metric(2))})) == [1, 2]
    info = {"username": "alice", "leaving": False}
    assert parse_peers({tagged: info}) == {b"ssh-rsa AAAA": info}

    alive = Heartbeat(peer=b"ssh-rsa AAAA", epoch=3, samples_per_second=2.5, reported_at=5.0)
    gone = Heartbeat(peer=b"gone", goodbye=True)
    assert parse_progress({tagged: heartbeat(5.0, 3), b"gone": None}) == [alive, gone]


def test_nothing_there():
    assert parse_metrics({}) == parse_history({}) == parse_progress({}) == [] and parse_shares({}) == {}


@pytest.mark.parametrize(
    "field, value",
    [
        ("client_mode", 1),
        ("epoch", -1),
        ("epoch", True),
        ("samples_accumulated", 10**9 + 1),
        ("samples_per_second", math.inf),
        ("reported_at", math.nan),
        ("reported_at", None),
    ],
)
def test_refused_heartbeats(field, value):
    assert parse_progress({b"peer": heartbeat(1.0, 1)}) and not parse_progress(
        {b"peer": heartbeat(1.0, 1) | {field: value}}
    )


def shares(*counts: tuple[object, object]) -> dict[bytes, dict]:
    """Return the records of trainers with these numbers of applied and computed samples."""
    return {
        str(number).encode(): {"rounds": 4, "complete": 2, "applied": applied, "computed": computed}
        for number, (applied, computed) in enumerate(counts)
    }


def test_share_of_applied_samples():
    assert parse_shares(shares((0, 0))) == {"complete rounds": 0.5}, "no samples yet"
    assert parse_shares(shares((90, 100))) == {"complete rounds": 0.5, "applied share": 0.9}
    unlike = shares((50, 50), (50, 100), (300, 300))
    assert parse_shares(unlike)["applied share"] == pytest.approx(200 / 250)
    older = {b"older": {"rounds": 8, "complete": 8}}
    assert parse_shares(older | shares((1, 2))) == {"complete rounds": 10 / 12, "applied share": 0.5}


@pytest.mark.parametrize(
    "lie", [(0, 10**9), (10**9, 10**9), (0, 100)], ids=["nothing of a lot", "all of a lot", "nothing of the usual"]
)
def test_claim_of_many_samples_has_the_weight_of_an_average_trainer(lie):
    honest = [(90, 100)] * 19
    share = parse_shares(shares(*honest, lie))["applied share"]
    assert abs(share - 0.9) <= 1 / 20


def test_more_than_all_samples_count_as_all():
    assert parse_shares(shares((200, 100), (50, 100)))["applied share"] == 0.75
