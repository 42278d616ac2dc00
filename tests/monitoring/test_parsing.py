"""Parsing of the records in the DHT: invalid ones are refused and counted, whatever untrusted peers publish."""

import math
from collections import namedtuple

import pytest

from lib.common.metrics_schema import HISTORY_LENGTH
from lib.monitoring.parsing import (
    Heartbeat,
    PeerStep,
    parse_history,
    parse_metrics,
    parse_progress,
    parse_shares,
)
from tests.support.dht_records import entries, heartbeat, metric, steps_of

ValueWithExpiration = namedtuple("ValueWithExpiration", "value expiration_time")


def test_reads_what_the_dht_returns():
    tagged = b"\x00[owner:ssh-rsa AAAA]tail"
    raw = ValueWithExpiration({tagged: ValueWithExpiration(metric(3, loss=7.5), 99.0)}, 99.0)
    assert parse_metrics(raw) == ([PeerStep(b"ssh-rsa AAAA", 3, 1.5, 32, 7.5, 2, 99.0)], {})
    assert parse_metrics({tagged: metric(3)})[0] == [PeerStep(b"ssh-rsa AAAA", 3, 1.5, 32, 10.0, 2)]

    steps, refused = parse_history({tagged: entries(metric(1), metric(2))})
    assert steps_of(steps) == [1, 2] and not refused
    unread = {b"ssh-rsa AAAA": 1}
    steps, _ = parse_history({tagged: entries(metric(1), metric(2))}, lambda peer, step: unread[peer] == step)
    assert steps_of(steps) == [2]

    heartbeats, refused = parse_progress({tagged: heartbeat(5.0, 3), b"gone": None})
    assert heartbeats == [
        Heartbeat(b"ssh-rsa AAAA", 3, 0, 2.5, 5.0, False),
        Heartbeat(b"gone", goodbye=True),
    ]
    assert not refused
    assert parse_progress({tagged: heartbeat(5.0, 3) | {"auxiliary": True}}) == ([], {}), "it is no trainer"


def test_nothing_there():
    for parse in (parse_metrics, parse_history, parse_progress):
        assert parse(None) == parse({}) == ([], {})


@pytest.mark.parametrize(
    "value, reason",
    [
        (None, "not a dictionary"),
        ([1, 2.0, 3, 4.0, 5], "not a dictionary"),
        ({}, "wrong fields"),
        (metric(1) | {f"extra {number}": 1 for number in range(100)}, "wrong fields"),
        (metric(True), "not a whole number"),
        (metric(1.0), "not a whole number"),
        (metric("1"), "not a whole number"),
        (metric(-1), "out of bounds"),
        (metric(2**31), "out of bounds"),
        (metric(1, samples=10**9 + 1), "out of bounds"),
        (metric(1, mini_steps=-1), "out of bounds"),
        (metric(1, loss=math.nan), "NaN"),
        (metric(1, loss=math.inf), "out of bounds"),
        (metric(1, loss=-math.inf), "out of bounds"),
        (metric(1, loss=10**400), "out of bounds"),
        (metric(1, loss=True), "not a number"),
        (metric(1, speed=-1.0), "out of bounds"),
        (metric(1, speed=math.nan), "NaN"),
        (metric(1, speed=None), "not a number"),
    ],
)
def test_refused_metrics(value, reason):
    assert parse_metrics({b"peer": value, b"good": metric(1)}) == (
        [PeerStep(b"good", 1, 1.5, 32, 10.0, 2)],
        {reason: 1},
    )
    if isinstance(value, dict) and len(value) == 5:
        steps, refused = parse_history({b"peer": entries(value, metric(2))})
        assert steps_of(steps) == [2] and refused == {reason: 1}


def test_fields_of_newer_peers_are_left_out():
    record = metric(3) | {"gradient_norm": 0.5}
    assert parse_metrics({b"newer": record}) == ([PeerStep(b"newer", 3, 1.5, 32, 10.0, 2)], {})
    (row,) = entries(record)
    assert parse_history({b"newer": [[*row, 0.5, None]]}) == ([PeerStep(b"newer", 3, 1.5, 32, 10.0, 2)], {})
    assert parse_history({b"newer": [[*row, "text"]]}) == ([], {"not a number": 1})


@pytest.mark.parametrize("raw", [0, "text", b"bytes", [1], math.nan, object()])
def test_refused_dictionaries(raw):
    for parse in (parse_metrics, parse_history, parse_progress):
        assert parse(raw) == ([], {"not a dictionary": 1})


@pytest.mark.parametrize("subkey", ["text", 1, None, b"", ("a",)])
def test_refused_subkeys(subkey):
    assert parse_metrics({subkey: metric(1)}) == ([], {"bad subkey": 1})


@pytest.mark.parametrize(
    "value, reason",
    [
        (metric(1), "not a list"),
        (entries(metric(1)) * (HISTORY_LENGTH + 1), "history too long"),
        ([1, 2], "wrong fields"),
        ([[1, 2.0, 3]], "wrong fields"),
        ([None], "wrong fields"),
        ([[[], {}, None, b"", "x"]], "not a whole number"),
    ],
)
def test_refused_histories(value, reason):
    steps, refused = parse_history({b"peer": value})
    assert not steps and set(refused) == {reason}


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"client_mode": 1}, "wrong fields"),
        ({"epoch": -1}, "out of bounds"),
        ({"epoch": True}, "not a whole number"),
        ({"samples_per_second": math.inf}, "out of bounds"),
        ({"time": math.nan}, "NaN"),
        ({"time": math.inf}, "out of bounds"),
        ({"time": None}, "not a number"),
    ],
)
def test_refused_heartbeats(change, reason):
    assert parse_progress({b"peer": heartbeat(1.0, 1) | change}) == ([], {reason: 1})


def shares(*counts: tuple[object, object]) -> dict[bytes, dict]:
    """Return the records of trainers with these numbers of applied and computed samples."""
    return {
        str(number).encode(): {"rounds": 4, "complete": 2, "applied": applied, "computed": computed}
        for number, (applied, computed) in enumerate(counts)
    }


def test_share_of_applied_samples():
    assert parse_shares({}) == {}
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


@pytest.mark.parametrize(
    "record",
    [None, 7, {}, *shares((101, 100), (-1, 100), (1.0, 100), (0, 10**9 + 1), (True, 100), (None, 100)).values()],
)
def test_refused_numbers_of_samples(record):
    assert parse_shares({b"liar": record, **shares((3, 4))})["applied share"] == 0.75
