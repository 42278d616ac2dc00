"""Whose gradients and parameters count in a round, who reduces how much, and who gives parameters.

All members of a group know what each of them has signed, and so come to the same decisions. No claim of another member
makes one lack updates that it does not claim to lack.
"""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from peerstep.reports.progress_report import EQUAL, LACKING
from peerstep.rounds.claims import Claims

MAX_RATIO = 4.0  # of a claimed bandwidth to the median of the reducers, and of the median to a claim
MAX_SHARE = 2.0  # of a member that reduces, in equal shares, if there are three or more


@dataclass(frozen=True)
class Standing:
    """The members of a group by the distances of their parameters, in the order of the group.

    Only differences from the (lower) median count: if most members lack the same updates, these lack none, and no
    single claim decides.
    """

    claims: Sequence[Claims]

    @cached_property
    def distances(self) -> list[float]:
        """Distance of each member from the median; 0 for those that lack less."""
        base = statistics.median_low(c.distance for c in self.claims)
        return [max(0.0, c.distance - base) for c in self.claims]

    @cached_property
    def lacking(self) -> list[bool]:
        """Whether each member lacks parameters: its gradients, of other parameters, have no weight."""
        return [distance > LACKING for distance in self.distances]

    @cached_property
    def trusted(self) -> list[bool]:
        """Whether the parameters of each member have weight; those of settling members do if there are no others."""
        near = [distance < EQUAL for distance in self.distances]
        settled = [is_near and not c.is_settling for is_near, c in zip(near, self.claims, strict=True)]
        return settled if any(settled) else near

    def shares_to_give(self, shares: Sequence[float]) -> list[float]:
        """Return the shares of the parameters that each member gives to those that lack them; all 0 if none gives.

        Only members with the same newest mark give: parts of two histories would make a model that nobody has trained.

        :param shares: of the gradients that each member reduces; 0 for clients
        """
        if not any(self.lacking):
            return [0.0] * len(shares)
        given = [share if is_trusted else 0.0 for is_trusted, share in zip(self.trusted, shares, strict=True)]
        marks = [c.mark for c in self.claims]
        votes = Counter(mark for mark, is_trusted in zip(marks, self.trusted, strict=True) if is_trusted)
        offered = {mark for mark, share in zip(marks, given, strict=True) if share}
        chosen = max(offered, key=lambda mark: (votes[mark], mark), default=None)
        return [share if mark == chosen else 0.0 for mark, share in zip(marks, given, strict=True)]


def divide(bandwidths: Sequence[float]) -> list[int]:
    """Return the shares of the tensors that members reduce, in millionths. They depend on nothing else.

    A member sends its values of what the others reduce, and the averages of its share to all. That takes all members
    the same time; those that need longer without a share have none.

    :param bandwidths: what each member claims; 0: a client
    """
    claimed = [bandwidth for bandwidth in bandwidths if bandwidth > 0]
    median = statistics.median(claimed)
    rates = [min(max(b, median / MAX_RATIO), median * MAX_RATIO) / median if b > 0 else 0.0 for b in bandwidths]
    largest = MAX_SHARE / len(claimed) if len(claimed) > 2 else 1.0
    shares, low, high = [], 0.0, MAX_RATIO * len(rates)
    while high - low > 1e-9:
        middle = (low + high) / 2  # the time, in that of the median member for all of its values
        shares = [min(largest, max(0.0, middle * rate - 1) / max(1, len(rates) - 2)) for rate in rates]
        low, high = (low, middle) if sum(shares) >= 1 else (middle, high)
    return [round(1e6 * share) for share in shares]
