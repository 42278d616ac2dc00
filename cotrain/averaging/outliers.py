"""Bound on pseudo-gradients by those of the other peers: honest ones have norms of the same size.

The norm of a pseudo-gradient depends on model, data and learning rate, so that a fixed bound is loose. Published
forms of DiLoCo have none; templar (https://github.com/tplr-ai/templar) clips each peer to the median norm.
"""

import statistics
from collections import Counter

MIN_SENDERS = 3  # with samples: with two senders there is no majority
TOLERANCE = 4.0  # of a norm, relative to the median of the others
# An honest peer's part may exceed the tolerance: rare tokens that only its samples have move their rows of an
# embedding. It is clipped once it exceeds the tolerance in more than this fraction of its parts.
MAX_OUTLIER_FRACTION = 0.25
MAX_RATIO = 4.0  # of the samples of two senders


class OutlierFilter:
    """Compares the parts of a round and finds the senders whose parts are too large throughout."""

    def __init__(self):
        self.num_parts = 0
        self._num_outliers: Counter[int] = Counter()

    @property
    def senders(self) -> list[int]:
        """Senders whose parts were too large in more than MAX_OUTLIER_FRACTION of the parts."""
        limit = MAX_OUTLIER_FRACTION * self.num_parts
        return [sender for sender, number in self._num_outliers.items() if number > limit]

    def clip_factors(self, norms: dict[int, float], weights: dict[int, float]) -> dict[int, float]:
        """Compare the norms of the next part, sender -> norm. Return the factors of the parts to be scaled down."""
        bounds = {sender: _bound(sender, norms, weights) for sender in norms if len(norms) >= MIN_SENDERS}
        self.num_parts += 1
        self._num_outliers.update(sender for sender, bound in bounds.items() if norms[sender] > bound)
        return {sender: bounds[sender] / norms[sender] for sender in self.senders if norms[sender] > bounds[sender]}


def _bound(sender: int, norms: dict[int, float], weights: dict[int, float]) -> float:
    """Return the bound on a sender's part: TOLERANCE times the median norm of the others.

    The sum of n local updates has at most n times the norm of one. For a sender with more samples than another one,
    the other one's norm counts as larger by that ratio, up to MAX_RATIO: the samples are a claim.
    """
    ratios = {other: min(max(1.0, weights[sender] / weights[other]), MAX_RATIO) for other in norms}
    others = [norms[other] * ratios[other] for other in norms if other != sender]
    return TOLERANCE * statistics.median(others)
