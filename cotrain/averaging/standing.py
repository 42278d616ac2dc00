"""Whose gradients and parameters count in a round, and who gives parameters to members that lack updates.

All members of a group know what each of them claims, and so come to the same decisions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hivemind.averaging.allreduce import AveragingMode

from cotrain.averaging.matchmaking import Claims

LACKING = 2.0  # updates; a peer whose parameters lack more contributes no gradients and receives parameters
EQUAL = 0.5  # updates; parameters that lack less have weight


@dataclass(frozen=True)
class Standing:
    """The members of a group by the distances of their parameters, in the order of the group.

    Only differences between the distances count: if all members lack the same updates, none lacks any.
    """

    claims: Sequence[Claims]

    @cached_property
    def distances(self) -> list[float]:
        """Distance of each member from the trainer with the smallest one; 0 for an auxiliary peer."""
        base = min((c.distance for c in self.claims if c.mode != AveragingMode.AUX), default=0.0)
        return [max(0.0, c.distance - base) if c.mode != AveragingMode.AUX else 0.0 for c in self.claims]

    @cached_property
    def lacking(self) -> list[bool]:
        """Whether each member lacks parameters: its gradients, of other parameters, have no weight."""
        return [distance > LACKING for distance in self.distances]

    @cached_property
    def counting(self) -> list[bool]:
        """Whether the parameters of each member have weight; if none has, those of the smallest distance have."""
        trainers = [c.mode != AveragingMode.AUX for c in self.claims]
        near = [trainer and distance < EQUAL for trainer, distance in zip(trainers, self.distances, strict=True)]
        settled = [is_near and not c.is_settling for is_near, c in zip(near, self.claims, strict=True)]
        return settled if any(settled) else near

    def shares_to_give(self, shares: Sequence[float]) -> list[float]:
        """Return the shares of the parameters that each member gives to those that lack them; all 0 if none gives.

        :param shares: of the gradients that each member reduces; 0 for clients
        """
        if not any(self.lacking):
            return [0.0] * len(shares)
        givers = zip(self.counting, self.claims, shares, strict=True)
        return [share if counts and c.mode == AveragingMode.NODE else 0.0 for counts, c, share in givers]
