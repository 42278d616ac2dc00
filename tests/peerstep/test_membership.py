"""Tests of Membership: the table "One number: the distance" of docs/rounds.md."""

from types import SimpleNamespace

import pytest

from peerstep.reports.progress_report import MAX_LAG
from peerstep.state.membership import MAX_ATTEMPTS, MAX_ATTEMPTS_OF_OTHERS, MAX_FAILURES, Membership


def result(received=1.0, parameters=None, distance=0.0, is_far=False) -> SimpleNamespace:
    least = min(received, 1.0 if parameters is None else parameters)
    return SimpleNamespace(
        received=received, received_parameters=parameters, distance=distance, is_far=is_far, group_id=bytes(20),
        is_complete=least >= 0.95,
    )  # fmt: skip


def average(peer: Membership, is_marked=False, keeps_own=False, **values) -> None:
    """Take the next step in a round, with the distance of this peer unless the test gives another."""
    found = result(**{"distance": peer.distance, **values})
    peer.averaged(peer.step + 1, found, is_marked=is_marked, keeps_own=keeps_own)


# Event, what it does to a peer at step 10 that lacks 4 updates, and the step, distance and settling after it
TABLE = [
    ("all gradients", lambda peer: average(peer), (11, 4.0, False)),
    ("a part of the gradients", lambda peer: average(peer, received=0.75), (11, 4.25, False)),
    ("a part of both", lambda peer: average(peer, received=0.75, parameters=0.75), (11, 2.25, True)),
    ("all parameters", lambda peer: average(peer, parameters=1.0), (11, 0.0, True)),
    ("all lack the same", lambda peer: average(peer, distance=0.0), (11, 0.0, False)),
    ("far from most", lambda peer: average(peer, parameters=1.0, is_far=True), (11, MAX_LAG, False)),
    (
        "far from most, and the first of the group",
        lambda peer: average(peer, parameters=1.0, is_far=True, keeps_own=True),
        (11, 4.0, False),
    ),
    ("a step without it", lambda peer: peer.missed(11), (11, 5.0, False)),
    ("asleep for three steps", lambda peer: peer.slept(3), (13, 7.0, False)),
    ("a failed attempt", lambda peer: peer.failed(), (10, 4.0, False)),
    ("a download during two steps", lambda peer: peer.loaded(2), (12, 2.0, True)),
    ("a download", lambda peer: peer.loaded(0), (10, 0.0, False)),
    ("alone", lambda peer: peer.took_alone(11, None), (11, 0.0, False)),
    ("joined clients", lambda peer: peer.joined_without_state(40), (40, MAX_LAG, False)),
]


@pytest.mark.parametrize(("event", "after"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_each_event_changes_the_distance_as_documented(event, after):
    peer = Membership(step=10, distance=4.0)
    event(peer)
    assert (peer.step, peer.distance, peer.is_settling) == after
    assert peer.report()["distance"] == peer.claims()["distance"] == after[1]
    assert peer.claims()["is_settling"] == after[2], "a leader is told the same"


def test_parameters_settle_until_the_next_round_that_averages_them():
    peer = Membership(step=6, distance=5.0)
    average(peer, parameters=1.0)
    average(peer)
    assert peer.is_settling and peer.step == 8
    average(peer, parameters=1.0, is_marked=True)
    assert not peer.is_settling


def test_complete_rounds_with_parameters_are_marks_and_few_of_those_that_it_took_alone():
    peer = Membership(step=7)
    average(peer, parameters=1.0, is_marked=True)
    average(peer, parameters=0.5, is_marked=True)
    average(peer, is_marked=True, received=0.5)
    average(peer, parameters=1.0)
    assert [step for step, _ in peer.marks] == [8]
    for step in range(12, 20):
        peer.took_alone(step, bytes([step] * 16))
    assert [step for step, _ in peer.marks] == [8, 17, 18, 19], "as many as show that the histories differ"
    assert peer.report()["marks"] == peer.marks


def test_peer_that_keeps_its_parameters_and_is_far_again_lacks_all():
    """It has the smallest peer ID, and the others are equal: none of them received its parameters."""
    peer = Membership(step=7)
    for far, distance in ((True, 0), (False, 0), (True, 0), (True, MAX_LAG), (False, 0), (True, 0)):
        average(peer, parameters=1.0, is_far=far, keeps_own=True)
        assert peer.distance == distance


def test_nobody_waits_for_a_peer_that_failed_three_times_until_it_is_in_a_round_or_has_downloaded():
    for event in (lambda peer: average(peer), lambda peer: peer.loaded(1), lambda peer: peer.took_alone(9, None)):
        peer = Membership(step=5)
        for fail in (peer.failed, lambda: peer.failed(is_unreached=False), lambda: peer.missed(peer.step + 1)):  # noqa: B023
            assert not peer.is_away
            fail()
        assert peer.is_away and peer.report()["away"] and peer.failures == MAX_FAILURES
        peer.slept(2)
        assert peer.is_away
        event(peer)
        assert not peer.is_away


def test_only_a_peer_that_reached_nobody_goes_on_alone_and_steps_of_others_begin_its_count_again():
    for is_first, attempts in ((True, MAX_ATTEMPTS), (False, MAX_ATTEMPTS_OF_OTHERS)):
        for event in (lambda peer: average(peer), lambda peer: peer.loaded(1), lambda peer: peer.slept(1),
                      lambda peer: peer.missed(6), lambda peer: peer.took_alone(6, None)):  # fmt: skip
            peer = Membership(step=5)
            for _ in range(attempts):
                assert not peer.gives_up(is_first)
                peer.failed(is_unreached=False)
                assert not peer.gives_up(is_first), "it is at fault itself"
                peer.failed()
            assert peer.gives_up(is_first)
            event(peer)
            assert not peer.gives_up(is_first)
