"""Marks of a run's history, and which of two histories a trainer follows.

Trainers that were apart, as during the outage of a link, have taken different steps under the same numbers. The ID of
a complete round that averaged the parameters is a mark: its members were equal after it. Each progress report, state
and checkpoint carries the newest marks.
"""

import itertools
from contextlib import suppress
from dataclasses import dataclass

from lib.common.metrics_schema import MAX_STEP

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
    """Check marks that another peer has sent; ValueError if they are malformed."""
    if not isinstance(value, list | tuple) or len(value) > NUM_MARKS:
        raise ValueError("wrong marks")
    marks = tuple(tuple(mark) if isinstance(mark, list | tuple) else () for mark in value)
    for mark in marks:
        if (
            [type(part) for part in mark] != [int, str]
            or not 0 <= mark[0] <= MAX_STEP
            or len(mark[1]) != 2 * MARK_BYTES
        ):
            raise ValueError("wrong marks")
    if any(mark[0] >= following[0] for mark, following in itertools.pairwise(marks)):
        raise ValueError("wrong marks")
    return marks


def read_marks(metadata: dict) -> Marks:
    """Return the marks in the metadata of a state; none if it has none, as in earlier versions, or malformed ones."""
    with suppress(ValueError):
        return parse_marks(metadata.get("marks", ()))
    return ()


def different_marks(own: Marks, other: Marks) -> list[tuple[str, str]] | None:
    """Return both IDs for each step for which two histories have different marks; None without a common step."""
    ids = dict(own)
    common = [(ids[step], mark_id) for step, mark_id in other if step in ids]
    return [pair for pair in common if pair[0] != pair[1]] if common else None


@dataclass(frozen=True)
class Side:
    """What decides between trainers that are apart.

    :param step: the newest global step that a trainer has begun
    :param size: number of trainers on its side: itself, and those that it averages with
    """

    step: int
    size: int
    marks: Marks


def outranks(other: Side, own: Side) -> bool | None:
    """Decide which of two trainers joins the other one's side. Both come to the same decision.

    Trainers are apart if their steps differ by more than one, or their marks by more than MAX_DIFFERENT. The smaller
    side then joins the larger one. Without a common mark nothing is known of the two histories, and the lower step
    joins the higher one: it may be a newcomer.

    :returns: whether the other side is to be joined; None if the two are not apart
    """
    different = different_marks(own.marks, other.marks)
    if abs(own.step - other.step) <= 1 and len(different or ()) <= MAX_DIFFERENT:
        return None
    if different is None:
        return other.step > own.step
    if different:  # the IDs of one step, which no longer changes
        own_id, other_id = different[-1]
        return (other.size, other_id) > (own.size, own_id)
    return (other.size, other.step) > (own.size, own.step)
