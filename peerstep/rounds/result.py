"""What came of the round of a global step at this peer."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from hivemind.p2p import PeerID

COMPLETE = 0.95  # fraction of the elements after which the members count as equal


class Outcome(Enum):
    """Outcome of the round of a global step at this peer."""

    AVERAGED = "averaged"
    ALONE = "alone"  # there is no other trainer
    MISSED = "missed"  # the other trainers have completed the step without this peer
    FAILED = "failed"  # there are other trainers, but no round with them succeeded
    STOPPED = "stopped"
    CAUGHT_UP = "caught up"  # this peer has no round of the step: it has downloaded a state, or skipped steps


@dataclass(frozen=True)
class RoundResult:
    """What came of the round of a global step at this peer. Without an average, only its outcome and attempts."""

    outcome: Outcome
    members: Sequence[PeerID] = ()
    received: float = 0.0  # fraction of the gradients whose average arrived
    # Samples of the senders, known only if this peer reduces gradients
    weights: dict[PeerID, float] = field(default_factory=dict)
    weight: float = 0.0  # of this peer's samples
    missed: dict[PeerID, str] = field(default_factory=dict)  # peers of the roster outside of the group -> reason
    violations: dict[PeerID, str] = field(default_factory=dict)  # of the members that were banned for them
    seconds: dict[str, float] = field(default_factory=dict)  # of the phases: matchmaking, waiting, allreduce
    received_parameters: float | None = None  # fraction of the parameters that arrived; None: this peer received none
    distance: float = 0.0  # of this peer's parameters from the group's before the round, in updates
    group_id: bytes = b""
    was_late: bool = False  # whether a reducer closed a part without this peer's values
    silent: Collection[PeerID] = ()  # reducers that have answered nothing
    is_far: bool = False  # whether this peer's parameters are too far from those of most others
    gradients: Sequence[torch.Tensor] = ()  # the averages, until the next round begins
    parameters: list[torch.Tensor] | None = None  # likewise, if this peer received any
    num_attempts: int = 0
    error: str = ""  # of the last attempt that failed
    may_be_used: bool = False  # whether the members of a failed attempt may have used the contribution

    @property
    def is_complete(self) -> bool:
        """Whether enough has arrived for this peer to be equal to the other members."""
        return min(self.received, 1.0 if self.received_parameters is None else self.received_parameters) >= COMPLETE
