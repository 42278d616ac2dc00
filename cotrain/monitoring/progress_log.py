"""Log lines of a monitor between two global steps: who joined, who left, and the progress towards the next step."""

import statistics
from collections.abc import Callable, Hashable, Sequence, Set

from hivemind.utils import get_logger

from cotrain.monitoring.aggregation import FRESH_SECONDS, TrackedPeer
from cotrain.status.status import format_duration, plural
from peerstep.rounds.relative_bounds import cap_weights

logger = get_logger(__name__)

MAX_NAMED = 5  # trainers in one line
# Seconds between a line about progress and the one before, or the newest step
LINE_SECONDS, IDLE_LINE_SECONDS = 30.0, 300.0  # while there is progress, and while there is none


class ProgressLog:
    """Logs one line each for the trainers that join, those that leave, and the progress."""

    def __init__(self, target_batch_size: int, find_name: Callable[[Hashable], str]):
        self.target_batch_size, self.find_name = target_batch_size, find_name
        self._present: Set[Hashable] = set()
        self._paused: Set[Hashable] = set()
        self._newest: tuple[int, int] | None = None  # step, and samples for the next one
        self._logged: tuple[int, int] | None = None  # the same in the newest line
        self._changed_at = self._logged_at = float("-inf")

    def update(
        self,
        now: float,
        peers: Sequence[TrackedPeer],
        shows_step: bool,
        checkpoint_step: int = -1,
        paused: Set[Hashable] = frozenset(),
    ) -> None:
        """Log what is due.

        :param peers: the live trainers
        :param shows_step: whether the log shows a new step, too, and needs no line about progress
        :param checkpoint_step: of the checkpoint that joining trainers get, -1 if there is none
        :param paused: keys of those that pause
        """
        present = {peer.key for peer in peers}
        state = f", {len(paused)} of them paused" if paused else ""
        for keys, verb in (
            (present - self._present, "joined"),
            (self._present - present, "left"),
            (paused - self._paused, "paused"),
            (self._paused & present - paused, "continued"),
        ):
            if keys:
                names = sorted(map(self.find_name, keys))
                shown = names[:MAX_NAMED] + [f"{len(names) - MAX_NAMED:,} more"] * (len(names) > MAX_NAMED)
                logger.info(f"{', '.join(shown)} {verb}; now {plural(len(present), 'trainer')}{state}")
        self._present, self._paused = present, paused
        peers = [peer for peer in peers if peer.key not in paused]
        step = statistics.median_low(peer.step for peer in peers) if peers else -1
        heartbeats = [peer.heartbeat for peer in peers if peer.heartbeat is not None and peer.step == step]
        # A false claim of one trainer counts as one target batch at most.
        samples = sum(min(heartbeat.samples_accumulated, self.target_batch_size) for heartbeat in heartbeats)
        if (step, samples) != self._newest:
            self._newest, self._changed_at = (step, samples), now
        if shows_step:
            self._logged_at = now
        if now - self._logged_at < (IDLE_LINE_SECONDS if self._logged == self._newest else LINE_SECONDS):
            return
        self._logged_at, self._logged = now, self._newest
        if not peers:
            origin = f"; the run continues from the checkpoint of step #{checkpoint_step}"
            logger.info(f"Waiting for trainers{origin if checkpoint_step >= 0 else ''}")
            return
        rates = dict(enumerate(heartbeat.samples_per_second for heartbeat in heartbeats))
        rate = sum(cap_weights(rates, len(rates) - 1).values())
        if now - self._changed_at > FRESH_SECONDS:
            outlook = f"no new ones for {format_duration(now - self._changed_at)}"
        elif samples >= self.target_batch_size:
            outlook = "averaging"
        else:
            seconds = (self.target_batch_size - samples) / max(rate, 1e-9)
            outlook = f"ETA {format_duration(seconds)}" if rate else "ETA unknown"
        logger.info(
            f"Accumulated {samples:,} of {self.target_batch_size:,} samples for step #{step + 1} from "
            f"{plural(len(peers), 'trainer')}; {outlook}"
        )
