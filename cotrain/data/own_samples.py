"""Samples of a trainer's own text, alone or mixed with the run's."""

from typing import Any

from datasets import Dataset


class OwnSamples:
    """Samples of which a fraction is a trainer's own. In a pass, those of the part that lasts longer come once.

    :param common: the run's samples; None: there are none
    """

    def __init__(self, own: Dataset, common: Dataset | None = None, share: float = 1.0):
        self.own, self.common, self.share = own, common, share
        length = len(own) if common is None else max(len(own) / share, len(common) / (1 - share))
        self._num_own, self._num_common = round(length * share), round(length * (1 - share))

    def __len__(self) -> int:
        return self._num_own + self._num_common

    def __getitem__(self, number: int) -> dict[str, Any]:
        if self.common is None or number < self._num_own:
            return self.own[number % len(self.own)]
        return self.common[(number - self._num_own) % len(self.common)]

    def describe(self, num_samples: float) -> str:
        """Return one line about the own samples, and how often each comes among `num_samples` of this trainer."""
        part, times = f"{self.share:.0%} of what it takes", num_samples * self.share / len(self.own)
        return f"{len(self.own):,} of this trainer's own samples, {part}, each {times:,.1f} times"
