"""Marks of a run's history, and which of two histories a trainer follows.

The ID of a complete round that averaged the parameters is a mark: its members were equal after it. Each progress
report, state and checkpoint carries the newest marks.
"""

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

MAX_STEP = 2**31 - 1  # more global steps than any run makes
NUM_MARKS = 8
MARK_BYTES = 6  # of an ID
# Trainers whose histories differ in this many marks are averaged, as in local SGD. Beyond, one side yields.
MAX_DIFFERENT = 2

Marks = tuple[tuple[int, str], ...]  # (global step, ID in hexadecimal digits), oldest first


def add_mark(marks: Marks, step: int, mark_id: bytes, num_alone: int = 0) -> Marks:
    """Add the mark of a step. Marks of later steps, from before a rollback, are dropped.

    :param num_alone: how many of the newest marks are of steps that this peer took alone. A few of them show that the
      histories differ; more of them would displace those that it has in common with the others
    """
    kept = tuple(mark for mark in marks if mark[0] < step)
    if num_alone > MAX_DIFFERENT:
        kept = kept[: -MAX_DIFFERENT - 1] + kept[-MAX_DIFFERENT:]
    return (*kept, (step, mark_id[:MARK_BYTES].hex()))[-NUM_MARKS:]


def parse_marks(value: object) -> Marks:
    """Check the marks of another peer, or of a state; ValueError if they are malformed."""
    if not isinstance(value, list | tuple) or len(value) > NUM_MARKS:
        raise ValueError("wrong marks")
    marks = tuple(tuple(mark if isinstance(mark, list | tuple) else []) for mark in value)
    if any([type(part) for part in mark] != [int, str] or len(mark[1]) != 2 * MARK_BYTES for mark in marks):
        raise ValueError("wrong marks")
    steps = [-1, *(step for step, _ in marks), MAX_STEP + 1]
    if any(step >= following for step, following in itertools.pairwise(steps)):
        raise ValueError("wrong marks")
    return marks


def different_marks(own: Marks, other: Marks) -> list[tuple[str, str]] | None:
    """Return both IDs for each step for which two histories have different marks; None without a common step."""
    ids = dict(own)
    common = [(ids[step], mark_id) for step, mark_id in other if step in ids]
    return [pair for pair in common if pair[0] != pair[1]] if common else None


def is_forked(own: Marks, other: Marks) -> bool:
    """Whether two histories differ in more than MAX_DIFFERENT marks. Those that do not are averaged: one side."""
    return len(different_marks(own, other) or ()) > MAX_DIFFERENT


def common_marks(histories: Iterable[Marks]) -> Marks:
    """Return the newest marks of a side: for each step the one that most of its trainers have."""
    found = Counter(itertools.chain.from_iterable(histories))
    by_step = dict(mark for mark, _ in reversed(found.most_common()))
    return tuple(sorted(by_step.items()))[-NUM_MARKS:]


@dataclass(frozen=True)
class Position:
    """Where a trainer is."""

    step: int  # the newest global step that it has begun
    marks: Marks

    def is_apart_from(self, other: "Position") -> bool:
        """Whether the steps differ by more than one, or the marks by more than MAX_DIFFERENT."""
        return abs(self.step - other.step) > 1 or is_forked(self.marks, other.marks)


@dataclass(frozen=True)
class Side:
    """Trainers that are not apart from each other."""

    position: Position
    size: int  # number of trainers
    is_offered: bool = True  # whether one of them is public: nobody can download a state from the others

    def outranks(self, other: "Side") -> bool:
        """Whether the trainers of another side, which is apart, join this one. Both come to the same decision.

        The smaller side joins the larger one, whatever steps and marks it claims; of two sides of one size that of
        clients joins. Who has taken no step joins anybody who has. Without a common mark, of two sides of one size
        that without marks joins, or the lower step.
        """
        own, others = self.position, other.position
        different = different_marks(own.marks, others.marks)
        if different is None and not (own.marks and others.marks):
            mine, theirs = (own.step > 0, self.size), (others.step > 0, other.size)
            return (*mine, bool(own.marks), own.step) > (*theirs, bool(others.marks), others.step)
        if different:  # the IDs of one step, which no longer changes
            own_id, other_id = different[-1]
            return (self.size, self.is_offered, own_id) > (other.size, other.is_offered, other_id)
        return (self.size, self.is_offered, own.step) > (other.size, other.is_offered, others.step)
