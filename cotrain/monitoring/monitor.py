"""Training monitor: aggregates the trainers' records into one report per global step, and keeps checkpoints."""

import statistics
import time
from collections import deque
from collections.abc import Callable, Hashable, Set
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from hivemind.utils import get_logger

from cotrain.common.alerts import Alerts
from cotrain.common.backoff import Backoff
from cotrain.common.errors import TemporaryError, first_line
from cotrain.dht.run_records import MonitorStatus
from cotrain.monitoring.advice import Adviser, parse_shares
from cotrain.monitoring.aggregation import MAX_JUMP, MetricsAggregator, StepReport
from cotrain.monitoring.contributors import LEADERBOARD_COLUMNS, Contributors, build_leaderboard, format_leaderboard
from cotrain.monitoring.hub_upload import HubUploader
from cotrain.monitoring.progress_log import ProgressLog
from cotrain.monitoring.reporters import Reporters
from cotrain.status.client_mode import ClientModeAlarm
from cotrain.status.status import describe_last_step, format_duration
from cotrain.task import Task
from cotrain.training import checkpoints
from cotrain.training.checkpoints import SavedState
from peerstep.local_peer import LocalPeer
from peerstep.peer.clock import run_time
from peerstep.reports import records as dht_records
from peerstep.reports.marks import different_marks, parse_marks
from peerstep.state.averager import TrainingStateAverager

logger = get_logger(__name__)

END_PERIODS = 4  # of --refresh_period, without a trainer, after which a monitor ends whose run has ended
END_SECONDS = 20.0  # that the end of a monitor may take, half of them for a last checkpoint
QUIET_SECONDS = 3.0  # without a trainer that leaves or a new step, after which the end has come
# When the organiser is told
LONELY_SECONDS = 600.0  # without a trainer
LOSS_JUMP = 1.5  # times the median loss of the newest steps
MAX_FAILURES = 3  # attempts in a row to save or upload
FULL = 95.0  # per cent of the disk
MAX_SAVE_PAUSE = 300.0  # seconds between two attempts to save a checkpoint
# Steps that a downloaded state may be ahead of the reports, which lag by a refresh period and a download. The monitor
# offers a saved checkpoint permanently: all trainers would adopt the state of a fabricated step.
MAX_LEAD = MAX_JUMP


class CheckpointKeeper:
    """Downloads the training state from trainers, writes checkpoints, and offers the newest one to joining trainers.

    Trainers download the state of the highest step offered: so a run survives a night without trainers.

    :param interval: steps between two checkpoints
    :param keep: numbers of checkpoints to keep: of the newest, and of the first ones of an hour
    :param pause: seconds after a failed attempt, before the next
    :param on_saved: called in the thread with the step of each saved checkpoint, while the model has its parameters
    """

    def __init__(
        self,
        averager: TrainingStateAverager,
        task: Task,
        model: torch.nn.Module,
        run_id: str,
        folder: Path,
        interval: int,
        keep: tuple[int, int],
        pause: float,
        on_saved: Callable[[int], object] = bool,  # does nothing
    ):
        self.averager, self.task, self.model, self.run_id = averager, task, model, run_id
        self.folder, self.interval, self.keep, self.on_saved = folder, interval, keep, on_saved
        self.saved_step = self._reported_step = -1
        self._has_gone_back = False  # the run went back to a step before the saved one, which is not saved yet
        averager.credible_step = lambda: self._reported_step if self._reported_step >= 0 else None
        averager.must_agree = True  # what it saves is offered to all, and uploaded
        # A fabricated step has no state, and each attempt costs the trainers bandwidth.
        self.backoff = Backoff(first=pause, longest=MAX_SAVE_PAUSE)
        self._trainers: Set[Hashable] = frozenset()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="CheckpointKeeper")
        self.pending: Future | None = None

    def restore(self) -> None:
        """Load the newest readable checkpoint and offer it."""
        state = checkpoints.restore_newest(self.folder, self.run_id, self.averager)
        if state is not None:
            self._offer(state.step)
            logger.info(f"Offering the checkpoint of step #{state.step} to trainers that join")

    def _offer(self, step: int) -> None:
        self.saved_step = step
        # The priority of a donor is its step. At the same step peers ask a trainer first: its connection is faster.
        self.averager.offer(priority=step - 0.5)

    def update(self, step: int, trainers_are_leaving: bool, trainers: Set[Hashable]) -> None:
        """Start a download in a thread if a checkpoint is due.

        :param step: the newest reported one, -1 without any
        :param trainers: those that are there. Without any there is nothing to download, and who joins may offer more
        """
        if trainers - self._trainers:
            self.backoff.reset()
        self._trainers = trainers
        self._has_gone_back |= step < min(self._reported_step, self.saved_step)
        self._reported_step = step
        interval = 1 if trainers_are_leaving else self.interval
        next_step = 1 if self._has_gone_back else max(self.saved_step, 0) + interval
        if step >= next_step and not self.is_running and trainers and self.backoff.is_over:
            # The minimum is not `step`: reported steps are untrusted, and a revived run is behind the reported step.
            self.pending = self._executor.submit(self.save, next_step, step + MAX_LEAD)

    def save(self, min_step: int, max_step: int) -> None:
        try:
            downloaded = self.averager.download_state(min_step=min_step)
            if downloaded is None:
                raise TemporaryError("No trainer offers its state yet, or most of the others have another one")
            donor, metadata, tensors = downloaded
            if metadata["epoch"] > max_step:
                raise TemporaryError(f"{donor} offers step #{metadata['epoch']}, which no trainer has reported")
            # Trainers that have found no offer and began anew do not replace it.
            if self._has_gone_back and different_marks(self.averager.marks, parse_marks(metadata["marks"])) is None:
                self._has_gone_back = False
                raise TemporaryError(f"{donor} is at step #{metadata['epoch']} of a run that has begun anew")
            self.averager.restore(metadata, tensors)
            info = {"time": time.time(), "donor": donor}
            with self.averager.frozen_state() as content:
                state = SavedState(self.run_id, *content)
                path = checkpoints.save_checkpoint(self.folder, self.task, self.model, state, info)
            self._offer(state.step)
            self._has_gone_back = False
            logger.info(f"Saved {path}")
            checkpoints.rotate_checkpoints(path, *self.keep)
            self.backoff.reset()
            self.on_saved(state.step)
        except Exception as error:
            fault = getattr(error, "strerror", None) or first_line(error)  # without a temporary file's name
            if fault != self.backoff.fault:
                logger.warning(f"Could not save step #{min_step} or later. {fault}; trying again later")
            self.backoff.fail(fault)

    @property
    def is_running(self) -> bool:
        return self.pending is not None and not self.pending.done()

    def save_newest(self, step: int, seconds: float) -> None:
        """Save a state that a trainer still offers, if it is newer than the saved one. Wait at most `seconds`."""
        self._reported_step, deadline = step, time.monotonic() + seconds
        if self.pending is not None:
            wait([self.pending], seconds)
        if step > self.saved_step or self._has_gone_back:
            self.pending = self._executor.submit(self.save, max(1, self.saved_step + 1), step + MAX_LEAD)
            wait([self.pending], deadline - time.monotonic())

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


@dataclass
class TrainingMonitor:
    """Monitors a run: one report for each global step."""

    peer: LocalPeer
    aggregator: MetricsAggregator
    reporter: Reporters
    contributors: Contributors
    keeper: CheckpointKeeper | None  # None: keep no checkpoints
    uploader: HubUploader | None  # None: upload none
    adviser: Adviser
    refresh_period: float  # seconds between two calls of `refresh`
    leaders_interval: int  # steps between two lists of the contributors
    last_step: int | None = None  # the last one of the schedule, if the run ends there
    alerts: Alerts = field(default_factory=Alerts)

    def __post_init__(self):
        self._trained_at = time.monotonic()
        self._losses: deque[float] = deque(maxlen=16)  # of the newest steps
        self._quiet_since: float | None = None  # since the run has ended
        self._paused: set[str] = set()  # IDs of trainers that pause
        self._client_mode_alarm = ClientModeAlarm()
        self._progress_log = ProgressLog(self.aggregator.target_batch_size, self.contributors.find_name)
        self._newest_step = self.aggregator.last_reported_step
        self._leaders_shown_at = self.contributors.step

    def refresh(self, page: str | None = None, downloads: bool = True) -> None:
        """Read the DHT once: report the completed steps, and update checkpoints, uploads and the monitor's status.

        :param downloads: whether checkpoints and uploads may begin
        """
        records, progress = (
            dht_records.get_records(self.peer.dht, f"{self.peer.run_id}_{name}")
            for name in ("trainers", "training_progress")
        )
        published = {peer: record.value for peer, record in records.items()}
        self.contributors.record_names({peer: value["username"] for peer, value in published.items()})
        self.contributors.record_losses(published)
        reports = self.aggregator.update(run_time(), records, progress)
        trainers = self.aggregator.live_peers
        paused = {x.key for x in trainers if x.key in published and published[x.key].get("paused")}
        self._paused = set(map(str, paused))
        checkpoint_step = -1 if self.keeper is None else self.keeper.saved_step
        if self._quiet_since is None:  # the run has not ended
            self._progress_log.update(time.monotonic(), trainers, bool(reports), checkpoint_step, paused)
        if len(trainers) > len(paused) or self._quiet_since is not None:
            self._trained_at = time.monotonic()
        self._report(reports, parse_shares(published.values()))
        if self.alerts.is_on:
            self._alert(reports)
        self._client_mode_alarm.check([trainer.heartbeat.client_mode for trainer in trainers])
        # Of the trainers that took the newest step: anybody may claim to leave, and each download costs a trainer.
        leaving = [peer in published and published[peer]["leaving"] for peer in self.aggregator.contributors]
        if self.keeper is not None and downloads:
            # The last one waits alone: the others have seen it, and left.
            are_leaving = 2 * sum(leaving) > len(leaving) or (not trainers and any(leaving))
            step = self.aggregator.last_reported_step
            # Trainers that leave have said goodbye, and wait until their last step is saved.
            there = {trainer.key for trainer in trainers}.union(self.aggregator.contributors if are_leaving else ())
            self.keeper.update(step, are_leaving, there)
        if self.uploader is not None and downloads:
            self.uploader.update(page, run_is_over=bool(leaving) and all(leaving))
        status = MonitorStatus(stores_checkpoints=self.keeper is not None, checkpoint_step=checkpoint_step)
        lifetime = 4 * self.refresh_period + 60
        dht_records.store_record(
            self.peer.dht, f"{self.peer.run_id}_monitor", self.peer.public_key, status.dict(), lifetime
        )

    def has_ended(self) -> bool:
        """Whether the last step of the schedule is done, and nobody has needed this monitor for some time.

        A trainer that joins in that time gets the last state, learns from its step that the run has ended, and ends.
        """
        saved = -1 if self.keeper is None else self.keeper.saved_step
        if self.last_step is None or max(saved, self.aggregator.last_reported_step) < self.last_step:
            return False
        now = time.monotonic()
        patience = END_PERIODS * self.refresh_period
        if self._quiet_since is None:
            self._quiet_since = now
            wait = f"The monitor ends {format_duration(patience)} after the last trainer has left"
            logger.info(f"{describe_last_step(self.last_step)} Thank you, all! {wait}")
        if self.aggregator.live_peers or any(part and part.is_running for part in (self.keeper, self.uploader)):
            self._quiet_since = now
        return now >= self._quiet_since + patience

    def finish(self) -> None:
        """Report the last steps and contributors, and save the newest state. Takes END_SECONDS at most.

        Trainers that are stopped at the same time publish their last step after their last local step and checkpoint.
        """
        deadline = quiet_at = time.monotonic() + END_SECONDS
        self.aggregator.settle_time, seen = 0.0, None
        while (now := time.monotonic()) < deadline and (now < quiet_at or self.aggregator.is_waiting):
            self.refresh(downloads=False)
            if seen is None and self.keeper is not None and self.aggregator.live_peers:
                self.keeper.save_newest(self.aggregator.last_reported_step, END_SECONDS / 2)
            state = len(self.aggregator.live_peers), self.aggregator.last_reported_step
            if state != seen:
                seen, quiet_at = state, time.monotonic() + QUIET_SECONDS
            time.sleep(0.5)
        self.aggregator.late_time = 0.0
        self.refresh(downloads=False)
        self._show_leaderboard(self.contributors.step, interval=1)
        step, saved = self.aggregator.last_reported_step, -1 if self.keeper is None else self.keeper.saved_step
        newest = f"at step #{step}" if step >= 0 else "before the first step"
        checkpoint = f"; the newest checkpoint is checkpoint-{saved}" if saved >= 0 else "; it has no whole checkpoint"
        logger.info(f"The monitor has stopped {newest}{checkpoint if self.keeper is not None else ''}")

    def _report(self, reports: list[StepReport], shares: dict[str, float]) -> None:
        """:param shares: see `parse_shares`"""
        more = {name: round(share, 4) for name, share in shares.items()} | {"paused peers": len(self._paused)}
        if reports and (advice := self.adviser.advise(shares.get("averaging"))) is not None:
            logger.warning(advice)
        for report in reports:
            if report.step <= self._newest_step:
                logger.warning(
                    f"The trainers continue from an earlier state: reporting from step #{report.step} again"
                )
                self._leaders_shown_at = min(self._leaders_shown_at, report.step)
            self._newest_step = report.step
            self.adviser.record_step(report.step, report.time)
            loss = "unknown" if report.loss is None else f"{report.loss:.5f}"
            logger.info(
                f"Step #{report.step}\tloss = {loss}\talive peers = {report.alive_peers}\t"
                f"samples = {report.samples}\tperformance = {report.performance:.2f} samples/s"
            )
            self.contributors.add(report)
            self.reporter.report(report, more)
            self._show_leaderboard(report.step, self.leaders_interval)
        for late in self.aggregator.late:
            name = self.contributors.find_name(late.peer)
            logger.info(f"Step #{late.step}: {late.samples} more samples of {name}, reported late")
            self._leaders_shown_at = min(self._leaders_shown_at, self.contributors.step - 1)  # show them at the end
        self.contributors.count(self.aggregator.late)
        if reports or self.aggregator.late:
            self.contributors.save()

    def _alert(self, reports: list[StepReport]) -> None:
        """Tell the organiser what needs a person."""
        send = self.alerts.send
        if time.monotonic() >= self._trained_at + LONELY_SECONDS:
            send("trainers", f"the run has had no trainer for {LONELY_SECONDS / 60:.0f} minutes")
        for report in reports:
            if report.loss is None and report.samples:
                send("loss", f"the loss of step #{report.step} is unknown: NaN or Inf at the trainers")
            if report.loss is None:
                continue
            usual = statistics.median([*self._losses, report.loss])
            if report.loss > LOSS_JUMP * usual > 0 and len(self._losses) >= 4:
                send("loss", f"the loss has jumped to {report.loss:.3f} at step #{report.step}, from {usual:.3f}")
            self._losses.append(report.loss)
        for part, what in ((self.keeper, "save a checkpoint"), (self.uploader, "upload a checkpoint")):
            if part is not None and part.backoff.failures >= MAX_FAILURES:
                send(what, f"could not {what}, {part.backoff.failures} times in a row: {part.backoff.fault}")
        if self.keeper is not None and (used := psutil.disk_usage(str(self.keeper.folder)).percent) >= FULL:
            send("disk", f"the disk of {self.keeper.folder} is nearly full: {used:.0f} %")

    def _show_leaderboard(self, step: int, interval: int) -> None:
        """Log who has contributed most, as often as checkpoints are saved, and at the end."""
        leaders = self.contributors.leaders
        if step < self._leaders_shown_at + interval or not leaders:
            return
        self._leaders_shown_at = step
        samples = sum(leader.samples for leader in leaders)
        logger.info(f"{samples:,} samples in all{self.adviser.estimate_end()}")
        logger.info(format_leaderboard(self.contributors, self._paused))
        rows = build_leaderboard(self.contributors, self._paused)
        self.reporter.report_table("contributors", LEADERBOARD_COLUMNS, rows, step)
