"""Bounds by the other members of a round: a claim has no more weight than the work of its neighbours.

In an open run a sender counts for a few times the median weight of the others, and what it adds to the sum of a
round, weight times gradient, has at most a few times the median norm. Both hold whatever it claims, and honest peers
are below them: in trials with equal peers 1 % of the contributions were scaled down. A machine that is more than twice
as fast as most others counts for less than it computes. In a run with invitations the claimed weights are believed.
"""

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import Generic, TypeVar

# Others of a sender from which on there is a majority: of three members, one could call both others too small.
MIN_OTHERS = 3
REPORTED = 4.0  # excess of the norm of gradients, relative to its bound, that is reported
LOOSE_RATIO = 4.0  # of norms of as many samples, where only mistakes are bounded: a gradient that explodes
Peer = TypeVar("Peer", bound=Hashable)


def weight_ratio(num_others: int) -> float:
    """Return the largest weight of a sender, in medians of the others'.

    2 beside three others: minus their mean with that weight leaves a fifth of the mean, and its direction.
    """
    return min(4.0, max(2.0, num_others / 3)) if num_others >= MIN_OTHERS else math.inf


def norm_ratio(num_others: int) -> float:
    """Return the largest norm of what a sender adds, in medians of the others'.

    1.5 beside three others: minus their mean at this bound keeps the direction as long as the norm of one gradient is
    at most twice that of the mean, 3 / 1.5. The final loss of a small classifier was 2 % higher, with 2.0 65 %.
    """
    return min(4.0, max(1.5, num_others / 4))


def medians_of_others(values: Mapping[Peer, float], senders: Iterable[Peer]) -> dict[Peer, float]:
    """Return for each sender the median of the others' values; infinity if there are none."""
    ordered = sorted(values.values())

    def median(sender: Peer) -> float:
        rest = ordered.copy()
        if sender in values:
            del rest[bisect_left(rest, values[sender])]
        last = len(rest) - 1
        return (rest[last // 2] + rest[(last + 1) // 2]) / 2 if rest else math.inf

    return {sender: median(sender) for sender in senders}


def cap_weights(weights: Mapping[Peer, float], num_others: int, stuck: Collection[Peer] = ()) -> dict[Peer, float]:
    """Cap each weight, in samples, at `weight_ratio` times the median of the others' that are above 0.

    :param num_others: of a member, also without those that have sent nothing
    :param stuck: senders whose weights say nothing of the others'
    """
    counted = {sender: weight for sender, weight in weights.items() if weight > 0 and sender not in stuck}
    ratio, medians = weight_ratio(num_others), medians_of_others(counted, weights)
    return {sender: min(weight, ratio * medians[sender]) for sender, weight in weights.items()}


class NormFilter(Generic[Peer]):
    """Bounds the norm of all that each sender adds to the parts of one reducer, over the parts so far.

    One part may have any norm within that: rare tokens that only one peer's samples have move their rows of an
    embedding, and nobody else's.

    :param num_others: of a member, also without those that send nothing
    :param is_loose: bound only mistakes. For believed weights, and for local updates, which grow with their number
    """

    def __init__(self, num_others: int, is_loose: bool = False):
        self.is_loose = is_loose or num_others < MIN_OTHERS
        self._ratio = LOOSE_RATIO if self.is_loose else norm_ratio(num_others)
        self._sent: Counter[Peer] = Counter()  # squared norms of the parts so far
        self._used: defaultdict[Peer, float] = defaultdict(float)  # the same after scaling
        self.excessive: set[Peer] = set()  # senders far above their bound

    def factors(
        self, norms: Mapping[Peer, float], weights: Mapping[Peer, float], own: Peer, own_norm: float
    ) -> dict[Peer, float]:
        """Return the factors of those values of the next part that are to be scaled down.

        :param norms, weights: of each sender's values
        :param own: the reducer, which believes itself
        :param own_norm: of its weighted values in all of its parts. Others may have as much, so that keys which send
          nothing make no honest peer an outlier
        """
        factors = {}
        self._sent.update({sender: (weights[sender] * norm) ** 2 for sender, norm in norms.items()})
        medians = medians_of_others({sender: self._sent[sender] for sender in norms}, norms)
        weight_medians = medians_of_others({sender: weights[sender] for sender in norms}, norms)
        for sender, norm in norms.items():
            added = (weights[sender] * norm) ** 2
            bound = self._ratio**2 * max(medians[sender], own_norm**2)
            if self.is_loose:  # as if the others had as many samples
                bound *= max(1.0, weights[sender] / weight_medians[sender]) ** 2
            if sender != own and bound > 0 and added > (rest := max(0.0, bound - self._used[sender])):
                factors[sender] = math.sqrt(rest / added)
                added = rest
                if self._sent[sender] > REPORTED**2 * bound:
                    self.excessive.add(sender)
            self._used[sender] += added
        return factors
