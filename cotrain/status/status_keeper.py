"""Keeps the status of a trainer, writes it to its output folder, and logs the progress."""

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from hivemind.utils import get_logger

from cotrain.common.alerts import Alerts
from cotrain.dht.metrics_schema import MAX_COUNT
from cotrain.options import CollaborationOptions
from cotrain.status.loss_meter import LossMeter
from cotrain.status.status import TrainerStatus, describe_progress, write_status
from cotrain.status.traffic import TrafficMeter
from peerstep.optimizer import CollaborativeOptimizer
from peerstep.peer.threads import PeriodicThread
from peerstep.reports.progress_report import MAX_ROUNDS
from peerstep.step.coordinator import Outcome, StepRecord

logger = get_logger(__name__)

WRITE_SECONDS = 5.0  # between two writes of the file
LOG_SECONDS = 30.0  # between two lines about the progress
ALERT_SECONDS = 1800.0  # without a round with others, after which the owner is told
MAX_SECONDS_TO_STEP = 30 * 86400.0  # longer estimates are those of trainers without a known speed
MAX_REASON = 100  # characters
REASONS = {
    Outcome.AVERAGED: "an update before it was missed, too: the gradient was too old",
    Outcome.FAILED: "no group in time",
    Outcome.MISSED: "the other trainers averaged without this one",
    Outcome.CAUGHT_UP: "this trainer was too far behind",
}


class StatusKeeper(PeriodicThread):
    """Thread that writes the status, and logs the progress until `should_stop`. The training thread only counts."""

    def __init__(
        self,
        folder: Path,
        optimizer: CollaborativeOptimizer,
        args: CollaborationOptions,
        name: str,
        loss_meter: LossMeter,
        should_stop: Callable[[], bool] = bool,
    ):
        super().__init__(WRITE_SECONDS)
        self.folder, self.optimizer, self.args = folder, optimizer, args
        self.loss_meter, self.should_stop = loss_meter, should_stop
        self.describe_data: Callable[[], str] = str
        self.traffic = TrafficMeter(folder)
        end_time = None if args.ends_at is None else args.end_time
        run = args.run_id, optimizer.target_batch_size, args.page, end_time
        self._status = TrainerStatus(name, *run, started_at=time.time())
        self._begun_at = 0  # step after which each one is joined or missed
        self._computed, self.speed = 0, 0.0  # the speed is that of the newest step's line and record
        self._totals = deque([(0, 0)], maxlen=MAX_ROUNDS + 1)  # samples computed and applied, by global step
        self.log_at = time.monotonic() + LOG_SECONDS
        self._averaged_at = time.monotonic()
        self.alerts = Alerts(args.webhook_file, f"Trainer {name} of run {args.run_id}")

    def start(self) -> None:
        self.write()  # the status of an earlier trainer in this folder is over
        super().start()

    def begin_at(self, step: int) -> None:
        """Count the global steps after this one, which the peer has downloaded or gone back to."""
        self._begun_at = step - self._status.joined

    def record_step(self, record: StepRecord) -> None:
        """Count a global step, or a failed attempt at one. What the step thread has done since then does not count."""
        own = self.optimizer.tracker.local_progress
        in_round = own.contributed if own.epoch > own.completed else 0
        self._status.computed = max(0, self._computed - own.samples_accumulated - in_round)
        if record.samples is not None:
            self._status.joined += 1
            if record.outcome == Outcome.AVERAGED:
                self._averaged_at = time.monotonic()
            self._status.applied += record.samples
        else:
            error = " ".join(record.error.split())[:MAX_REASON]
            self._status.last_miss = record.step, error or REASONS[record.outcome]
        if record.outcome != Outcome.FAILED:
            self._totals.append((self._status.computed, self._status.applied))
            self._status.missed = max(0, record.step - self._begun_at - self._status.joined)

    @property
    def applied(self) -> int:
        """Samples of this peer that counted in global steps since it joined."""
        return self._status.applied

    def record_local_step(self) -> bool:
        """Count a local step unless its gradient was dropped or GradScaler skipped it; return whether it counts."""
        counts = self.optimizer.num_computed != self._computed
        if counts:
            self._computed, self._status.worked_at = self.optimizer.num_computed, time.time()
        return counts

    @property
    def paused(self) -> str:
        """Why the trainer pauses; empty if it does not."""
        return self._status.paused

    def record_pause(self, reason: str) -> None:
        self._status.paused, self._averaged_at = reason, time.monotonic()
        self.write()

    def record_loss(self, loss: float) -> None:
        self._status.loss = loss
        if self._status.first_loss is None:
            self._status.first_loss = loss

    def record_own_loss(self, base: float, newest: float) -> None:
        self._status.own_loss = base, newest

    def recent_samples(self) -> tuple[int, int]:
        """Return the samples computed and applied for the newest MAX_ROUNDS steps."""
        computed, applied = (newest - first for newest, first in zip(self._totals[-1], self._totals[0], strict=True))
        computed = min(max(0, computed), MAX_COUNT)
        return computed, min(max(0, applied), computed)  # the two are not counted at the same moment

    def work(self) -> None:
        now = time.monotonic()
        if now >= self.log_at:
            self.log_at = now + LOG_SECONDS
            if not (self.should_stop() or self._status.paused):
                logger.info(describe_progress(self.update(), self.loss_meter.mean()))
                if now >= self._averaged_at + ALERT_SECONDS:
                    minutes = f"{ALERT_SECONDS / 60:.0f} minutes"
                    self.alerts.send("averaging", f"has not averaged with others for {minutes}")
        self.write()

    def write(self) -> None:
        self.traffic.update()
        write_status(self.folder, self.update())

    def update(self) -> TrainerStatus:
        """Return the status after an update from the tracker. It takes some ten microseconds for each peer."""
        status, view = self._status, self.optimizer.tracker.view()
        own, others = view.own, view.live
        rate, seconds = own.samples_per_second, view.seconds_to_step
        status.time = time.time()
        status.data, status.traffic = self.describe_data(), self.traffic.describe()
        status.step, status.next_step = own.completed, own.epoch + 1
        # While it trains, the others may have begun the next round before this trainer
        is_late = (view.credible_step or 0) > own.epoch + (status.worked_at is not None)
        status.later_step = view.credible_step if is_late else None
        status.seconds_to_next = seconds if seconds < MAX_SECONDS_TO_STEP else None
        status.all_samples = view.estimate[0]  # with at most one target batch of each trainer
        status.own_samples = min(own.samples_accumulated, status.all_samples)
        if status.loss is None and (loss := self.loss_meter.mean()) is not None:
            self.record_loss(loss)
        status.num_trainers, status.samples_per_second = 1 + len(others), self.speed or rate
        status.rank = 1 + sum(peer.samples_per_second > rate for peer in others) if rate else None
        return status

    def close(self) -> None:
        """End the thread and write that the trainer has ended."""
        self.stop()
        if self.ident is not None:
            self.join()
            self._status.ended_at = time.time()
            self.write()
