"""Where a peer is in the run: its step and history, and how far its parameters are from those of the others.

Each row of the table "One number: the distance" in docs/rounds.md is a method of Membership.
"""

import math
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from peerstep.reports.marks import Marks, add_mark
from peerstep.reports.progress_report import EQUAL, MAX_LAG

# Consecutive failures to take part in a round after which a peer says that it is away
MAX_FAILURES = 3
# Attempts at a step after which the first of the peers takes it without the others. The others follow that one, or
# take the step after more attempts.
MAX_ATTEMPTS, MAX_ATTEMPTS_OF_OTHERS = 3, 6


def shared(path: str) -> Any:
    """Return a property that reads and sets an attribute of a part of the object, such as "membership.step"."""
    part, _, name = path.rpartition(".")
    return property(attrgetter(path), lambda owner, value: setattr(attrgetter(part)(owner), name, value))


@dataclass
class Membership:
    """This peer's place in the run. Pure: the step thread changes it, other threads read single attributes."""

    step: int = 0  # newest global step that this peer has taken or passed over
    applied: int = 0  # newest step whose update the parameters have; it lags while an update runs
    marks: Marks = ()  # of the history of the parameters
    distance: float = 0.0  # updates that the parameters lack, or have with another gradient
    is_settling: bool = False  # whether the optimizer statistics lack updates that the parameters have
    has_kept: bool = False  # whether it kept its parameters in the newest round in which they were far from most
    failures: int = 0  # consecutive rounds in which this peer failed to take part
    attempts: int = 0  # rounds without a group since this peer, or another one, has taken a step
    vain: int = 0  # rounds without a group since one with others, or a step of theirs
    alone: int = 0  # consecutive marks of steps that this peer took alone
    is_paused: bool = False  # whether the caller has paused this peer

    # What became of a step

    def averaged(self, step: int, result: Any, *, is_marked: bool, keeps_own: bool) -> None:
        """Record a round with others.

        After a repair the parameters settle, without weight until one more round with parameters: the optimizer
        statistics lack gradients, which have faded by then (0.9^8 = 0.43).

        :param result: the RoundResult; its distance is that of this peer from the group
        :param is_marked: whether each complete round of the step is a mark, since it averages the parameters
        :param keeps_own: whether this peer is the one of the group that keeps parameters which are far from most
        """
        lost = 1 - result.received
        self.distance = result.distance + lost
        if result.received_parameters is not None and result.is_far:
            # If all are far from each other, one peer of the group keeps its parameters, and the others receive them
            # in the next round. If it is far again, they were equal and have not received them.
            self.has_kept = keeps_own and not self.has_kept
            self.distance = self.distance if self.has_kept else MAX_LAG
        elif result.received_parameters is not None:
            self.has_kept = False
            # As a norm: of 13 updates that 2 % of the elements lack, 1.8 are left.
            self.distance = result.distance * math.sqrt(1 - result.received_parameters) + lost
            self.is_settling = result.distance >= EQUAL
            if is_marked and result.is_complete:
                self._add_mark(step, result.group_id, is_alone=False)
        self.step, self.vain = step, 0
        self.failures = self.attempts = 0

    def took_alone(self, step: int, mark_id: bytes | None) -> None:
        """Record a step with nobody else there.

        :param mark_id: of a step in which the parameters are averaged
        """
        self.distance, self.is_settling = 0.0, False
        if mark_id is not None:
            self._add_mark(step, mark_id, is_alone=True)
        self.step = step
        self.failures = self.attempts = 0

    def missed(self, step: int) -> None:
        """Record a step that the others have taken without this peer."""
        self.failures += 1
        self.slept(step - self.step)

    def slept(self, missed: int) -> None:
        """Pass over steps that the others have taken. They give this peer the updates that it lacks."""
        self.step += missed
        self.distance += missed
        self.attempts = self.vain = 0

    def failed(self, is_unreached: bool = True) -> None:
        """Record an attempt at a step that can be repeated.

        :param is_unreached: whether no group was found; False if this peer itself is at fault
        """
        self.failures += 1
        self.attempts += is_unreached
        self.vain += is_unreached

    def loaded(self, missed: int) -> None:
        """Record a download, which has set step and marks, and during which the others have taken steps."""
        self.distance, self.is_settling = 0.0, missed > 0
        self.failures = self.vain = 0
        self.slept(missed)

    def joined_without_state(self, step: int) -> None:
        """Record that this peer takes part at a step of which it has nothing."""
        self.step, self.marks, self.distance = step, (), MAX_LAG

    def _add_mark(self, step: int, mark_id: bytes, is_alone: bool) -> None:
        self.marks = add_mark(self.marks, step, mark_id, self.alone)
        self.alone = self.alone + 1 if is_alone else 0

    # What this peer says of itself

    @property
    def is_away(self) -> bool:
        """Whether the others are not to wait for this peer."""
        return self.is_paused or self.failures >= MAX_FAILURES

    def gives_up(self, is_first: bool) -> bool:
        """Whether to take the step without the others.

        :param is_first: whether no trainer that may go on precedes this one
        """
        return self.attempts >= (MAX_ATTEMPTS if is_first else MAX_ATTEMPTS_OF_OTHERS)

    def report(self) -> dict[str, Any]:
        """Return the standing of this peer in its progress report."""
        return {"distance": min(self.distance, MAX_LAG), "marks": self.marks, "away": self.is_away}

    def claims(self) -> dict[str, Any]:
        """Return what this peer says of its parameters when it joins a group, see Claims."""
        mark = {"mark": bytes.fromhex(self.marks[-1][1])} if self.marks else {}
        return {"distance": min(self.distance, MAX_LAG), "is_settling": self.is_settling, **mark}
