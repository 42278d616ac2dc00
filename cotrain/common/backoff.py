"""Exponential back-off between retries."""

import time


class Backoff:
    """Delay before the next attempt: doubles with each failure in a row, from `first` to `longest` seconds."""

    def __init__(self, first: float, longest: float):
        self.first, self.longest = first, longest
        self.reset()

    def reset(self) -> None:
        """Record a success."""
        self.pause, self.failures, self.fault = self.first, 0, ""  # of the failures in a row: number, newest reason
        self._until = float("-inf")

    def fail(self, fault: str = "") -> float:
        """Record a failure and its reason; return the seconds before the next attempt."""
        pause, self.failures, self.fault = self.pause, self.failures + 1, fault
        self._until = time.monotonic() + pause
        self.pause = min(2 * pause, self.longest)
        return pause

    @property
    def is_over(self) -> bool:
        """Whether the delay has elapsed."""
        return time.monotonic() >= self._until
