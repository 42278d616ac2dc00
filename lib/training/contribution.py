"""What a trainer has contributed: its part in the global steps, and its loss over the last hour."""

from collections import deque

from lib.averaging.coordinator import Outcome
from lib.common.metrics_schema import MAX_COUNT, MAX_ROUNDS

HOUR = 3600.0
BUCKET_SECONDS = 60.0
MAX_REASON = 100  # characters


class RoundTally:
    """Counts the global steps that a peer has joined and missed, from the entries of its round log.

    :param peer_id: in base58, as in the round log
    :param target_batch_size: samples of a global step
    """

    def __init__(self, peer_id: str, target_batch_size: int):
        self.peer_id, self.target_batch_size = peer_id, target_batch_size
        self.joined = self.missed = 0
        self.applied = 0  # samples that counted in a global step
        self.last_miss: tuple[int, str] | None = None  # step and reason
        self.step: int | None = None  # the newest one that is counted
        self.fraction: float | None = None  # this peer's part of its samples; None: missed
        self.has_news = False  # whether that step was counted since this was last set to False

    def begin_at(self, step: int) -> None:
        """Count the global steps after this one, which the peer has joined or gone back to."""
        self.step = step

    def note_round(self, entry: dict) -> None:
        """Count the round of a global step.

        :param entry: its entry in the round log
        """
        step, samples, outcome = entry["step"], entry["samples"], Outcome(entry["outcome"])
        self.note_step(step - 1)
        weights = entry["weights"]
        own_weight = weights.get(self.peer_id, samples)
        if outcome == Outcome.ALONE or (outcome == Outcome.AVERAGED and own_weight >= 1):
            self.joined += 1
            self.applied += samples
            # Only peers that reduce gradients know the weights of the others.
            total = sum(weights.values()) or max(samples, self.target_batch_size)
            self.fraction = 1.0 if outcome == Outcome.ALONE else own_weight / total
        elif outcome == Outcome.AVERAGED:
            self._note_miss(step, "an update before it was missed, too: the gradient was too old")
        elif outcome == Outcome.FAILED:
            self._note_miss(step, " ".join(entry["error"].split())[:MAX_REASON] or "no group in time")
        elif outcome == Outcome.MISSED:
            is_counted = step == self.step  # by `note_step`
            self._note_miss(step, "the other trainers averaged without this one", number=0 if is_counted else 1)
        self.step, self.has_news = step, True

    def note_step(self, step: int) -> None:
        """Count the steps up to this one that had no round at this peer: it was behind, and downloaded the state."""
        if self.step is not None and step > self.step:
            self._note_miss(step, "this trainer was too far behind", number=step - self.step)
            self.step, self.has_news = step, True

    def _note_miss(self, step: int, reason: str, number: int = 1) -> None:
        self.missed += number
        self.fraction = None
        self.last_miss = step, reason


class SampleWindow:
    """Samples that a trainer has computed and that were applied, over its newest MAX_ROUNDS global steps."""

    def __init__(self):
        self._totals = deque([(0, 0)], maxlen=MAX_ROUNDS + 1)  # computed, applied since the trainer joined

    def add(self, computed: int, applied: int) -> tuple[int, int]:
        """Add a global step.

        :param computed, applied: samples since the trainer joined
        :returns: the samples of the window. No more of them are applied than computed, although the two are not
            counted at the same moment
        """
        self._totals.append((computed, applied))
        first = self._totals[0]
        computed = min(max(0, computed - first[0]), MAX_COUNT)
        return computed, min(max(0, applied - first[1]), computed)


class LossHistory:
    """Mean of the local loss by minute, for the last hour."""

    def __init__(self):
        self._buckets: deque[tuple[float, float, int]] = deque()  # time of the first loss, sum, number of losses

    def add(self, loss: float, number: int, now: float) -> None:
        """Add the sum of a number of losses.

        :param now: seconds, on any clock
        """
        if not number:
            return
        if self._buckets and now < self._buckets[-1][0] + BUCKET_SECONDS:
            begun_at, previous, count = self._buckets[-1]
            self._buckets[-1] = begun_at, previous + loss, count + number
        else:
            self._buckets.append((now, loss, number))
        while len(self._buckets) > 2 and self._buckets[1][0] <= now - HOUR:
            self._buckets.popleft()

    def newest(self) -> float | None:
        """Return the mean of the newest minute; None before the first loss."""
        if not self._buckets:
            return None
        _, loss, number = self._buckets[-1]
        return loss / number

    def earlier(self, now: float) -> tuple[float | None, float]:
        """Return the mean of the minute an hour ago (in the first hour: of the first minute) and its age in seconds.

        The mean is None if there is no minute before the newest one.
        """
        if len(self._buckets) < 2:
            return None, 0.0
        begun_at, loss, number = self._buckets[0]
        return loss / number, now - begun_at
