"""Tests of marks, and of which side of a divided run the other one joins."""

import itertools

import pytest

from peerstep.reports.marks import MARK_BYTES, NUM_MARKS, Marks, Position, Side, add_mark, parse_marks


def marks(history: str, steps: range = range(8, 72, 8)) -> Marks:
    """Return the marks of a history: one character for each round with parameters."""
    return tuple((step, 2 * MARK_BYTES * letter) for step, letter in zip(steps, history, strict=False))


@pytest.mark.parametrize(
    ("own", "own_size", "other", "other_size", "expected"),
    [
        (Position(30, marks("aaa")), 2, Position(31, marks("aaa")), 2, None),
        (Position(30, marks("aaa")), 2, Position(32, marks("aaa")), 2, True),  # too far away for a common round
        (Position(30, marks("abb")), 2, Position(30, marks("acc")), 9, None),  # a young fork: averaged
        (Position(40, marks("abbb")), 2, Position(40, marks("accc")), 3, True),  # the larger side
        (Position(40, marks("abbb")), 2, Position(41, marks("accc")), 2, True),  # as many: by the IDs
        (Position(41, marks("abbb")), 2, Position(40, marks("accc")), 2, True),
        (Position(30, marks("aaa")), 2, Position(40, marks("aaaa")), 2, True),  # it has slept
        (Position(30, marks("aaa")), 2, Position(40, marks("aaab")), 1, False),  # it was alone
        (Position(0, ()), 9, Position(40, marks("aaaa")), 1, True),  # newcomers
        (Position(0, ()), 9, Position(40, ()), 1, True),
        (Position(30, ()), 9, Position(40, marks("aaaa")), 1, False),  # one key may state any marks
        (Position(30, ()), 1, Position(40, marks("aaaa")), 1, True),  # a run without a mark is a new one
        (Position(30, marks("aaa")), 9, Position(30_000, ()), 1, False),
        (Position(30, ()), 9, Position(40, ()), 1, False),
        (Position(30, ()), 1, Position(40, ()), 1, True),  # nothing is known
        (Position(90, marks("aaa")), 3, Position(2**30, marks("lie", range(2**30 - 24, 2**30, 8))), 1, False),
    ],
)
def test_both_sides_come_to_the_same_decision(own, own_size, other, other_size, expected):
    assert own.is_apart_from(other) == other.is_apart_from(own) == (expected is not None)
    if expected is not None:
        own_side, other_side = Side(own, own_size), Side(other, other_size)
        assert other_side.outranks(own_side) is expected
        assert own_side.outranks(other_side) is not expected


@pytest.mark.parametrize("public", [Position(30, marks("aaa")), Position(40, marks("abbb"))])
def test_client_joins_the_public_trainer_whatever_it_has_done_alone(public):
    """Nobody can download its state: a public trainer at a lower step asked for it for ever."""
    client = Position(40, marks("accc"))
    sides = [Side(public, 1), Side(client, 1, is_offered=False)]
    assert sides[0].outranks(sides[1]) and not sides[1].outranks(sides[0])
    assert Side(client, 2, is_offered=False).outranks(sides[0]), "one public key moves no two clients"


def test_marks_are_the_newest_of_one_history():
    newest = ()
    for step in range(8, 90, 8):
        newest = add_mark(newest, step, bytes([step] * 20))
    assert len(newest) == NUM_MARKS and newest[-1] == (88, "58" * MARK_BYTES)
    assert parse_marks([list(mark) for mark in newest]) == newest
    back = add_mark(newest, 40, b"other ID")
    assert [step for step, _ in back] == [32, 40]
    alone = newest
    for number in range(100):
        alone = add_mark(alone, 96 + 8 * number, b"alone", num_alone=number)
    assert [step for step, _ in alone] == [56, 64, 72, 80, 88, 872, 880, 888], "it knows where it has left the others"
    assert Side(Position(90, newest), 3).outranks(Side(Position(890, alone), 1))
    assert all(a < b for a, b in itertools.pairwise(back))
    for malformed in (None, [["8", "x"]]):
        with pytest.raises(ValueError, match="wrong marks"):
            parse_marks(malformed)
