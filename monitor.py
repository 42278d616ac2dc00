"""What the training monitor does: turns the trainers' records into one report a step, and keeps checkpoints."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from hivemind.utils import get_dht_time, get_logger
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import checkpoints
import utils
from arguments import TrainingMonitorArguments
from checkpoints import TrainingState
from hivemind_fixes import StateLoadError, TrainingStateAverager
from metrics import MetricsAggregator, StepReport
from reporting import Reporter
from utils import MonitorStatus, Peer

logger = get_logger(__name__)


class CheckpointKeeper:
    """Downloads the state from trainers, writes checkpoints, and hands the newest to a run that has lost its trainers.

    Downloads take as long as the network does, so they run in a thread.
    """

    def __init__(
        self,
        averager: TrainingStateAverager,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        run_id: str,
        args: TrainingMonitorArguments,
    ):
        self.averager, self.model, self.tokenizer = averager, model, tokenizer
        self.run_id, self.args = run_id, args
        self.folder = Path(args.output_dir)
        self.saved_step = -1
        self._retry_after = 0.0
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="CheckpointKeeper")
        self._pending: Future | None = None

    def restore(self) -> None:
        """Load the newest checkpoint that can be read, and offer it to trainers until they have a newer state."""
        for state in checkpoints.iterate_training_states(self.folder, self.run_id):
            try:
                self.averager.restore(state.metadata, state.tensors)
            except StateLoadError as error:
                logger.warning(f"Skipping the checkpoint of step #{state.step}, which does not fit the model: {error}")
                continue
            self.saved_step = state.step
            self.averager.state_sharing_priority = state.step
            self.averager.allow_state_sharing = True
            logger.info(f"Offering the checkpoint of step #{state.step} to trainers that join")
            return

    def update(self, step: int, trainers_are_leaving: bool) -> None:
        """Called after each look at the metrics: `step` is the newest that trainers reported, -1 if none."""
        if self.averager.allow_state_sharing and step > self.averager.local_epoch:
            self.averager.allow_state_sharing = False
            logger.info(f"Trainers have gone on to step #{step}: no longer offering a checkpoint")
        is_due = step - max(self.saved_step, 0) >= self.args.save_checkpoint_step_interval
        is_due |= trainers_are_leaving and step > self.saved_step
        is_idle = self._pending is None or self._pending.done()
        if is_due and is_idle and time.monotonic() >= self._retry_after:
            self._pending = self._executor.submit(self._save, step)

    def _save(self, step: int) -> None:
        try:
            downloaded = self.averager.download_state(min_epoch=step)
            if downloaded is None:
                self._retry_after = time.monotonic() + self.args.refresh_period
                logger.warning(f"No trainer offers the state of step #{step} yet; trying again")
                return
            donor, metadata, tensors = downloaded
            self.averager.restore(metadata, tensors)
            state = TrainingState(self.run_id, *self.averager.snapshot())
            info = {"time": time.time(), "donor": donor}
            path = checkpoints.save_checkpoint(self.folder, self.model, self.tokenizer, state, info)
            self.saved_step = state.step
            logger.info(f"Saved {path}")
            checkpoints.remove_old_checkpoints(self.folder, keep=self.args.save_total_limit)
        except Exception as error:
            self._retry_after = time.monotonic() + self.args.refresh_period
            logger.error(f"Could not save a checkpoint of step #{step} ({error}); trying again later")

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


class TrainingMonitor:
    """Watches a run: one report for each global step.

    :param keeper: keeps checkpoints, None to keep none
    """

    def __init__(
        self,
        peer: Peer,
        run_id: str,
        aggregator: MetricsAggregator,
        reporter: Reporter,
        keeper: CheckpointKeeper | None,
        args: TrainingMonitorArguments,
    ):
        self.peer, self.run_id, self.aggregator, self.reporter = peer, run_id, aggregator, reporter
        self.keeper, self.args = keeper, args
        self._refused_logged_at = float("-inf")

    def refresh(self) -> None:
        """Look at the DHT once: report the steps that are complete, and see to the checkpoints."""
        views = [self._read(name) for name in ("metrics", "history", "progress")]
        self._report(self.aggregator.update(get_dht_time(), *views))
        self._log_refused()
        if self.keeper is not None:
            leaving = any(info.value["leaving"] for info in self._read("peers").values())
            self.keeper.update(self.aggregator.last_reported_step, leaving)
        self._publish_status()

    def flush(self) -> None:
        """Report what is still incomplete, before the monitor ends."""
        self._report(self.aggregator.flush(get_dht_time()))

    def _read(self, name: str) -> dict:
        return utils.get_dictionary(self.peer.dht, f"{self.run_id}_{name}")

    def _report(self, reports: list[StepReport]) -> None:
        for report in reports:
            loss = "unknown" if report.loss is None else f"{report.loss:.5f}"
            logger.info(
                f"Step #{report.step}\tloss = {loss}\talive peers = {report.alive_peers}\t"
                f"samples = {report.samples}\tperformance = {report.performance:.2f} samples/s"
            )
            self.reporter.report(report)

    def _log_refused(self) -> None:
        """Say what was refused, at most once a minute: anybody can write to the DHT."""
        now = time.monotonic()
        if self.aggregator.refused and now >= self._refused_logged_at + 60:
            self._refused_logged_at = now
            reasons = ", ".join(f"{number} x {reason}" for reason, number in self.aggregator.refused.most_common(5))
            logger.warning(f"Refused records: {reasons}")

    def _publish_status(self) -> None:
        status = MonitorStatus(
            stores_checkpoints=self.keeper is not None,
            checkpoint_step=-1 if self.keeper is None else self.keeper.saved_step,
        )
        lifetime = 4 * self.args.refresh_period + 60
        utils.store_record(
            self.peer.dht, f"{self.run_id}_monitor", self.peer.public_key, status.dict(), lifetime=lifetime
        )
