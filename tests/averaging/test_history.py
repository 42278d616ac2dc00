"""Tests of marks, and of which side of a divided run the other one joins."""

import itertools

import pytest

from lib.averaging.history import MARK_BYTES, NUM_MARKS, Marks, Side, add_mark, outranks, parse_marks, read_marks


def marks(history: str, steps: range = range(8, 72, 8)) -> Marks:
    """Return the marks of a history: one character for each round with parameters."""
    return tuple((step, 2 * MARK_BYTES * letter) for step, letter in zip(steps, history, strict=False))


@pytest.mark.parametrize(
    ("own", "other", "expected"),
    [
        (Side(30, 2, marks("aaa")), Side(30, 2, marks("aaa")), None),
        (Side(31, 2, marks("aaa")), Side(30, 2, marks("aaa")), None),
        (Side(30, 2, marks("aaa")), Side(32, 2, marks("aaa")), True),  # too far away for a common round
        (Side(30, 2, marks("abb")), Side(30, 9, marks("acc")), None),  # a young fork: averaged
        (Side(40, 2, marks("abbb")), Side(40, 3, marks("accc")), True),  # the larger side
        (Side(40, 2, marks("abbb")), Side(41, 2, marks("accc")), True),  # as many: by the IDs, not by the steps
        (Side(41, 2, marks("abbb")), Side(40, 2, marks("accc")), True),
        (Side(30, 2, marks("aaa")), Side(40, 2, marks("aaaa")), True),  # it has slept
        (Side(30, 2, marks("aaa")), Side(40, 1, marks("aaab")), False),  # it was alone
        (Side(30, 9, ()), Side(40, 1, marks("aaaa")), True),  # nothing is known
    ],
)
def test_both_sides_come_to_the_same_decision(own, other, expected):
    assert outranks(other, own) is expected
    assert outranks(own, other) is (None if expected is None else not expected)


def test_marks_are_the_newest_of_one_history():
    newest = ()
    for step in range(8, 90, 8):
        newest = add_mark(newest, step, bytes([step] * 20))
    assert len(newest) == NUM_MARKS and newest[-1] == (88, "58" * MARK_BYTES)
    assert parse_marks([list(mark) for mark in newest]) == newest == read_marks({"marks": newest})
    back = add_mark(newest, 40, b"other ID")
    assert [step for step, _ in back] == [32, 40]
    alone = newest
    for number in range(100):
        alone = add_mark(alone, 96 + 8 * number, b"alone", num_alone=number)
    assert [step for step, _ in alone] == [56, 64, 72, 80, 88, 872, 880, 888], "it knows where it has left the others"
    assert outranks(Side(90, 3, newest), Side(890, 1, alone))
    assert all(a < b for a, b in itertools.pairwise(back))
    assert read_marks({}) == read_marks({"marks": [["8", "x"]]}) == ()
