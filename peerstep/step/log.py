"""What came of the global steps, for the caller."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from hivemind.utils import get_logger

from peerstep.progress.other_trainers import WARN_SECONDS
from peerstep.rounds.result import RoundResult
from peerstep.step.coordinator import StepRecord
from peerstep.step.pace import Pace

logger = get_logger(__name__)


class StepLog:
    """Keeps the newest records of steps, and hands each round to the caller."""

    def __init__(self):
        self.on_round: Callable[[dict], object] | None = None  # takes what came of each round, as JSON
        self.pace = Pace()  # how the newest rounds went, too
        self._records: deque[StepRecord] = deque(maxlen=64)
        self._warn_at = 0.0  # `time.monotonic`

    def add(self, record: StepRecord) -> None:
        self._records.append(record)

    def pop(self) -> list[StepRecord]:
        """Return what came of the global steps since the last call."""
        return [self._records.popleft() for _ in range(len(self._records))]

    def clear(self) -> None:
        self._records.clear()

    def warn_about(self, step: int, result: RoundResult) -> None:
        """Warn about a round that was partial, or for which this peer's link was too slow."""
        if result.received < 1:
            silent = "".join(f"; {peer_id} answered nothing" for peer_id in result.silent)
            logger.warning(f"The round of step #{step} was partial: received {result.received:.1%} of it{silent}")
        if result.was_late and time.monotonic() >= self._warn_at:
            self._warn_at = time.monotonic() + WARN_SECONDS
            logger.warning(
                f"Some gradients of this peer came too late for step #{step}. If its link is slower than the others', "
                "fewer bits help, or rounds that are rarer"
            )

    def write_round(
        self, step: int, samples: int, distance: float, result: RoundResult, seconds: dict[str, float]
    ) -> None:
        """Hand a round to the caller. Its exceptions do not reach the step thread: the step is taken."""
        if self.on_round is None:
            return
        entry: dict[str, Any] = {
            "time": time.time(),
            "step": step,
            "outcome": result.outcome.value,
            "samples": samples,
            "attempts": result.num_attempts,
            "error": result.error,
            "distance": round(distance, 3),
            "group": list(map(str, result.members)),
            "received": round(result.received, 4),
            "seconds": {name: round(value, 3) for name, value in {**result.seconds, **seconds}.items()},
        }
        for name in ("weights", "missed", "violations"):
            entry[name] = {str(peer_id): value for peer_id, value in getattr(result, name).items()}
        try:
            self.on_round(entry)
        except Exception as error:
            logger.warning(f"Could not log the round of step #{step}: {error!r}. The step is taken")
