"""When to try again what has failed."""

import time


class Backoff:
    """After each failure in a row the pause is twice as long, up to a bound.

    :param first: seconds of the first pause
    :param longest: seconds of the longest
    """

    def __init__(self, first: float, longest: float):
        self.first, self.longest = first, longest
        self.reset()

    def reset(self) -> None:
        """It has worked."""
        self.pause = self.first
        self._until = float("-inf")

    def fail(self) -> float:
        """It has failed.

        :returns: the seconds for which it is better left alone
        """
        pause = self.pause
        self._until = time.monotonic() + pause
        self.pause = min(2 * pause, self.longest)
        return pause

    @property
    def is_over(self) -> bool:
        """Whether to try (again)."""
        return time.monotonic() >= self._until
