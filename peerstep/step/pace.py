"""How long local steps and rounds take, and how long one of them may wait for the other."""

import math
import statistics
import time
from collections import deque

from peerstep.reports.progress_report import MAX_ROUNDS

# Fraction of a global step that local steps and rounds may wait for each other, also with delays
SHORT = 0.05
NUM_TIMED = 16  # newest rounds whose times count


class Pace:
    """Measures the local steps of the main thread, and the rounds with other trainers, of the step thread."""

    def __init__(self):
        # Of each round: its end (`time.monotonic`), its seconds, and whether it was complete
        self.rounds: deque[tuple[float, float, bool]] = deque(maxlen=MAX_ROUNDS)
        # Seconds of the newest local step, and `time.monotonic` at which the main thread began the present one
        self.local_seconds, self.local_since = math.inf, -math.inf

    def begin_local_step(self) -> None:
        """Call it in the main thread as it begins to compute."""
        self.local_since = time.monotonic()

    def end_local_step(self) -> None:
        """Call it once the gradients are computed."""
        self.local_seconds = time.monotonic() - self.local_since

    def _times(self) -> list[tuple[float, float, bool]]:
        return list(self.rounds)[-NUM_TIMED:]  # the step thread adds to it

    @property
    def recent_rounds(self) -> list[bool]:
        """Whether the newest rounds with other trainers averaged everything with every trainer of their step."""
        return [is_complete for *_, is_complete in list(self.rounds)]

    @property
    def step_seconds(self) -> float:
        """Mean time between the ends of the last rounds; 0 before the third one."""
        ends = [end for end, *_ in self._times()]
        return (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 2 else 0.0

    @property
    def averaging_share(self) -> float | None:
        """Fraction of the time for which rounds ran lately; None before the third round."""
        _, *times = self._times() or [(0.0, 0.0, True)]
        seconds = self.step_seconds
        return min(1.0, statistics.fmean(of_round for _, of_round, _ in times) / seconds) if seconds else None

    def patience(self) -> float:
        """Return the seconds for which a local step waits for a round: 0 if that costs more than SHORT."""
        if not self.step_seconds:
            return 0.0
        seconds, local = statistics.fmean(of_round for _, of_round, _ in self._times()), self.local_seconds
        # A local step that began before a round hides a part of it: on average all of it, or half of a local step.
        idle = seconds**2 / (2 * local) if seconds < local else seconds - local / 2
        return 2 * seconds if idle <= SHORT * self.step_seconds else 0.0

    def ends_soon(self) -> bool:
        """Whether the present local step is a short one, which a round that is due may wait for."""
        is_short = self.local_seconds <= SHORT * self.step_seconds
        return is_short and time.monotonic() < self.local_since + 2 * self.local_seconds
