"""Tests of the figures of benchmarks/rounds.py and benchmarks/swarm.py, with synthetic records."""

import json

import pytest

from benchmarks.round_records import (
    PeerRecords,
    Round,
    read_local_records,
    read_log_lines,
    read_round_log,
    summarize,
    summarize_newcomers,
)


def make_peer(name: str, steps: dict[int, Round]) -> PeerRecords:
    """Build the records of a trainer with the peer ID `id-NAME` and a local step of 10 samples each second."""
    local_steps = [(float(second), 10, 0.25) for second in range(1, 100)]
    return PeerRecords(name, peer_id=f"id-{name}", rounds=steps, local_steps=local_steps)


def make_round(step: int, begin: float, *members: str, **values) -> Round:
    values = {"outcome": "averaged", "samples": 100, "received": 1.0, **values}
    ids = frozenset(f"id-{member}" for member in members)
    return Round(step, begin=begin, end=begin + 2, size=len(ids), members=ids, **values)


def test_round_is_complete_if_all_live_trainers_are_in_one_group():
    one = make_peer("one", {step: make_round(step, 10.0 * step, "one", "two") for step in (1, 2, 3)})
    two = make_peer("two", {step: make_round(step, 10.0 * step + 1, "one", "two") for step in (1, 2)})
    two.rounds[3] = make_round(3, 31.0, "two", "three")
    summary = summarize([one, two], begin=0.0, end=100.0)
    assert [step.is_complete for step in summary.steps] == [True, True, False]
    assert summary.durations == [10.0, 10.0]
    assert summary.latencies == [2.0, 2.0, 2.0, 3.0, 3.0, 3.0]
    # Between the first and the last global step: 20 local steps of each trainer, and the rounds of steps 2 and 3
    assert (summary.computed, summary.applied, summary.applied_fraction) == (400, 400, 1.0)
    assert summary.seconds_waited == 10.0


def test_frozen_and_downloading_trainers_are_not_missed():
    one = make_peer("one", {step: make_round(step, 10.0 * step, "one") for step in (1, 2, 3)})
    two = make_peer("two", {})
    two.absences.append((5.0, 15.0))
    two.downloads.append((18.0, 22.0))
    summary = summarize([one, two], begin=0.0, end=100.0)
    assert [step.is_complete for step in summary.steps] == [True, True, False]
    assert summary.steps[2].details == "one: in a group of 1, two: no round"
    assert summary.peers[1].outcomes == {"absent": 1}
    assert summary.peers[1].seconds_downloading == 4.0


def test_newcomers_are_told_from_others():
    steps = (1, 2, 3, 4)
    one = make_peer("one", {step: make_round(step, 10.0 * step, "one", "two") for step in steps})
    two = make_peer("two", {3: make_round(3, 30.0, outcome="missed"), 4: make_round(4, 40.0, "one", "two")})
    two.local_steps = [local for local in two.local_steps if local[0] > 15]
    two.rounds[2] = make_round(2, 20.0, "one", "two")
    summary = summarize_newcomers([one, two], summarize([one, two], 5.0, 100.0).steps, begin=5.0, first_steps=2)
    assert (summary.newcomers, summary.others) == ((1, 2), (5, 5))
    assert (summary.with_newcomers, summary.without) == ((1, 2), (2, 2))


def test_missed_and_partial_rounds():
    one = make_peer("one", {1: make_round(1, 10.0, "one", "two"), 2: make_round(2, 20.0, "one", "two")})
    two = make_peer("two", {1: make_round(1, 10.0, "one", "two", received=0.5)})
    two.rounds[2] = make_round(2, 20.0, outcome="missed")
    summary = summarize([one, two], begin=0.0, end=100.0)
    assert (summary.complete_fraction, summary.whole_fraction) == (0.5, 0.0)
    assert summary.applied == 100


def test_nothing_to_summarize():
    assert summarize([], begin=0.0, end=1.0).steps == []
    assert summarize([make_peer("one", {})], begin=0.0, end=1.0).applied == 0


def test_read_round_log(tmp_path):
    seconds = {"matchmaking": 3.0, "waiting": 0.0, "allreduce": 0.5, "load": 0.1, "round": 1.0, "update": 0.4}
    entry = {"time": 100.0, "step": 7, "outcome": "averaged", "samples": 64, "group": ["a", "b"], "received": 0.9,
             "missed": {"c": "did not ask to join"}, "error": "", "seconds": seconds}  # fmt: skip
    (tmp_path / "rounds.jsonl").write_text(json.dumps(entry) + '\n{"time": 1')  # the last line is being written
    peer = PeerRecords("one")
    read_round_log(peer, tmp_path / "rounds.jsonl")
    assert list(peer.rounds) == [7]
    assert peer.rounds[7].begin == pytest.approx(98.5)
    assert peer.rounds[7].end == pytest.approx(99.6)
    assert (peer.rounds[7].samples, peer.rounds[7].size, peer.rounds[7].received) == (64, 2, 0.9)


def test_read_log_lines(tmp_path):
    (tmp_path / "one.log").write_text(
        "Nov 22 02:00:00.000 [INFO] Beginning optimizer step #0\n"
        "Nov 22 02:00:01.000 [INFO] Step #1\n"
        "Nov 22 02:00:01.000 [INFO] Your current contribution: 100 samples\n"
        "Nov 22 02:00:02.500 [INFO] Averaged gradients with 3 peers\n"
        "Nov 22 02:00:10.000 [INFO] Beginning optimizer step #1\n"
        "Nov 22 02:00:11.000 [INFO] Step #2\n"
        "Nov 22 02:00:11.000 [INFO] Your current contribution: 140 samples\n"
        "Nov 22 02:00:12.500 [WARN] [optimizer.step:1] Averaging gradients failed with TimeoutError()\n"
        "Nov 22 02:00:20.000 [INFO] Beginning optimizer step #2\n"
        "Nov 22 02:00:25.000 [INFO] Averaged gradients with 2 peers\n"
        "Nov 22 02:00:25.000 [INFO] Late for step #3: took part in #4\n"
    )
    peer = PeerRecords("one")
    read_log_lines(peer, tmp_path / "one.log")
    rounds = {step: (r.outcome, r.samples, r.size, r.end - r.begin) for step, r in peer.rounds.items()}
    assert rounds == {
        1: ("averaged", 100, 3, pytest.approx(2.5)),
        2: ("failed", 40, 0, pytest.approx(2.5)),
        4: ("averaged", 0, 2, pytest.approx(5.0)),
    }


def test_read_local_records(tmp_path):
    lines = [
        {"event": "download", "time": 9.0, "began": 5.0, "found": True},
        {"event": "local step", "time": 10.0, "samples": 8, "waited": 0.5},
    ]
    (tmp_path / "local.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    peer = PeerRecords("one")
    read_local_records(peer, tmp_path / "local.jsonl")
    assert peer.downloads == [(5.0, 9.0)]
    assert peer.local_steps == [(10.0, 8, 0.5)]
    assert not peer.is_alive(9.5)
    assert peer.is_alive(10.0)
