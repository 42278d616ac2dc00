"""What a trainer does beside computing gradients: reports metrics, watches for broken parameters, backs up and
restores."""

import itertools
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from hivemind.utils import get_logger
from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import utils
from arguments import CollaborationArguments
from lib.averaging.optimizer import Optimizer
from lib.averaging.state import StateLoadError, all_finite
from lib.common.errors import UserError
from lib.training.ban_list import BanList
from lib.training.checkpoints import TrainingState, load_training_state, save_training_state
from utils import HISTORY_LENGTH, ClientModeAlarm, LocalMetrics, Peer, PeerInfo

logger = get_logger(__name__)


class LossMeter:
    """Sums the losses of micro-batches on their device, without a synchronisation each; skips what is not finite."""

    def __init__(self):
        self._sum: torch.Tensor | float = 0.0
        self._count: torch.Tensor | int = 0

    def add(self, loss: torch.Tensor) -> None:
        """`loss`: the mean over a micro-batch, or one such mean for each device."""
        loss = loss.detach().float().mean()
        finite = loss.isfinite()
        self._sum = self._sum + torch.where(finite, loss, 0.0)
        self._count = self._count + finite.int()

    def pop(self) -> tuple[float, int]:
        """The sum of the losses and their number since the last call."""
        result = float(self._sum), int(self._count)
        self._sum, self._count = 0.0, 0
        return result


class BackupWriter:
    """Keeps the newest good training state in a file, written by a thread of its own."""

    def __init__(self, path: Path, run_id: str):
        self.path, self.run_id = path, run_id
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="BackupWriter")
        self._pending: Future | None = None

    def write(self, metadata: dict, tensors: list[torch.Tensor]) -> None:
        """Write in the background; skipped while the previous backup is still being written."""
        if self._pending is None or self._pending.done():
            self._pending = self._executor.submit(self._write, TrainingState(self.run_id, metadata, tensors))

    def _write(self, state: TrainingState) -> None:
        try:
            save_training_state(self.path, state)
        except Exception as error:
            logger.error(f"Could not write the backup {self.path} ({error}); the one before it stays")

    def read(self) -> TrainingState | None:
        """The backup, or None if there is none that can be read."""
        if self._pending is not None:
            self._pending.result()
        if not self.path.exists():
            return None
        try:
            return load_training_state(self.path, self.run_id)
        except ValueError as error:
            logger.warning(f"Skipping the backup: {error}")
            return None

    def close(self) -> None:
        self._executor.shutdown(wait=True)


class StepProgressBar:
    """How far all peers together are with the next global step; drawn on a terminal only."""

    def __init__(self, optimizer: Optimizer, disable: bool):
        self.tracker = optimizer.tracker
        is_terminal = sys.stderr.isatty()
        self._bar = tqdm(total=optimizer.target_batch_size, unit=" samples", disable=disable or not is_terminal)

    def update(self) -> None:
        progress = self.tracker.global_progress
        self._bar.set_description(f"Step #{progress.epoch + 1}", refresh=False)
        self._bar.set_postfix(peers=max(1, progress.num_peers), refresh=False)
        self._bar.n = min(progress.samples_accumulated, self._bar.total)
        self._bar.refresh()

    def close(self) -> None:
        self._bar.close()


class CollaborativeCallback(TrainerCallback):
    """Tells the collaboration of this peer's work and keeps its parameters sound.

    :param folder: for the backup and what else is kept across restarts
    :param should_stop: asked after each local step
    """

    MAX_RECOVERIES = 3  # without a global step in between
    MAX_JOIN_ATTEMPTS = 3  # to download the state of a run that a single trainer reports

    def __init__(
        self,
        peer: Peer,
        optimizer: Optimizer,
        model: torch.nn.Module,
        args: CollaborationArguments,
        folder: Path,
        should_stop: Callable[[], bool],
        disable_tqdm: bool = False,
    ):
        self.peer, self.optimizer, self.model, self.args = peer, optimizer, model, args
        self.should_stop = should_stop
        self.loss_meter = LossMeter()
        self.backup = BackupWriter(folder / "backup.pt", args.run_id)
        self.bans = BanList(folder, optimizer)
        self.history: deque[LocalMetrics] = deque(maxlen=HISTORY_LENGTH)
        self.last_reported_step = 0
        self.total_samples_processed = 0
        self.num_recoveries = 0
        self.client_mode_alarm = ClientModeAlarm()
        self.progress_bar = StepProgressBar(optimizer, disable_tqdm)

    # The Trainer's events. A training loop of one's own calls `join` at the start and `after_local_step`.

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        self.join()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        if not self.after_local_step():
            control.should_training_stop = control.should_save = True
        return control

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs=None, **kwargs):
        if logs and "loss" in logs:
            logger.info(f"Local step {state.global_step}: loss = {logs['loss']:.5f}")

    def join(self) -> None:
        """Begin at the newest state: the peers', or our own checkpoint's if the model was resumed from a newer one.

        :raises UserError: if several trainers are at a later step, but nobody's state can be downloaded
        """
        optimizer, own_step = self.optimizer, self.optimizer.local_epoch
        optimizer.last_step = self.args.max_global_steps
        if own_step > 0:
            optimizer.begin_at(own_step)
            optimizer.share_state()
            logger.info(f"Resumed from a checkpoint at step #{own_step}")
        if self._load_newest_state():
            logger.info(f"Joined the collaboration at step #{optimizer.local_epoch}")
        elif own_step == 0:
            logger.info("No peer offers a trained state: starting with the initial weights")
        self.last_reported_step = optimizer.local_epoch
        self.introduce(leaving=False)

    def _load_newest_state(self) -> bool:
        """Download the newest state; while reports show a run that is ahead of us, try again.

        One trainer that is ahead without a state to show may be a liar: it bars nobody for long.

        :returns: whether a state was loaded
        """
        tracker = self.optimizer.tracker
        deadline = time.monotonic() + self.args.load_state_timeout
        tracker.refresh()
        for attempt in itertools.count(1):
            if self.optimizer.load_state_from_peers():
                return True
            ahead = [
                peer for peer in tracker.alive(tracker.other_trainers) if peer.epoch > self.optimizer.local_epoch + 1
            ]
            if not ahead or self.should_stop():
                return False
            if len(ahead) == 1 and attempt >= self.MAX_JOIN_ATTEMPTS:
                logger.warning("One trainer is ahead, but no state of it can be downloaded: starting without it")
                return False
            if time.monotonic() > deadline:
                step = min(peer.epoch for peer in ahead)
                raise UserError(
                    f"{len(ahead)} trainers of this run are at step #{step} or later, but no state "
                    f"could be downloaded within --load_state_timeout {self.args.load_state_timeout:.0f} "
                    f"seconds. Check that they can be reached from here, and that model and optimizer are theirs"
                )
            time.sleep(min(5.0, tracker.default_refresh_period))
            tracker.refresh()

    def after_local_step(self) -> bool:
        """Report and check after a local step.

        :returns: whether training goes on
        :raises UserError: if the parameters broke and nothing is left to return to
        """
        if not all_finite([parameter.detach() for parameter in self.model.parameters()]):
            self.recover()
            return not self.should_stop()
        step = self.optimizer.local_epoch
        if step != self.last_reported_step and step != self.optimizer.last_completed_step:
            logger.info(f"Caught up with the collaboration at step #{step}")
            self.last_reported_step = step
            if self.optimizer.grad_averager.local_samples_accumulated == 0:
                self.loss_meter.pop()  # of samples that were dropped
        elif step != self.last_reported_step:
            self.report(step)
            if step % self.args.backup_every_steps == 0:
                self.backup.write(*self.optimizer.state_averager.snapshot())
            self.num_recoveries = 0
        self.bans.save()
        self.progress_bar.update()
        progress = self.optimizer.tracker.global_progress
        self.client_mode_alarm.check(progress.num_peers, progress.num_clients)
        if self.should_stop():
            self.optimizer.say_goodbye()
            self.optimizer.stop_averaging()  # a round may outlast the grace period
            return False
        return self.args.max_global_steps is None or step < self.args.max_global_steps

    def report(self, step: int) -> None:
        """Log the global step and publish this peer's part in it."""
        self.last_reported_step = step
        samples, self.optimizer.last_contribution = self.optimizer.last_contribution, 0
        self.total_samples_processed += samples
        loss, mini_steps = self.loss_meter.pop()
        samples_per_second = float(self.optimizer.local_progress.samples_per_second)
        logger.info(f"Step #{step}")
        logger.info(f"Your current contribution: {self.total_samples_processed} samples")
        logger.info(f"Performance: {samples_per_second:.3f} samples/sec")
        if mini_steps:
            logger.info(f"Local loss: {loss / mini_steps:.5f}")
        if self.optimizer.is_synchronized_with_peers():
            self.publish(
                LocalMetrics(
                    step=step,
                    samples_per_second=samples_per_second,
                    samples_accumulated=samples,
                    loss=loss,
                    mini_steps=mini_steps,
                )
            )
            self.introduce(leaving=False)  # the record expires: a monitor that was away would not know our name

    def publish(self, metrics: LocalMetrics) -> None:
        """Store signed records: the newest step for everybody, the last ones for a monitor that missed some."""
        self.history.append(metrics)
        history = [list(entry.dict().values()) for entry in self.history]
        for name, value in (("metrics", metrics.dict()), ("history", history)):
            key = f"{self.args.run_id}_{name}"
            utils.store_record(self.peer.dht, key, self.peer.public_key, value, self.args.statistics_expiration)

    def recover(self) -> None:
        """The parameters are not finite: go to the peers' state or to the last backup, whichever is newer.

        :raises UserError: if there is neither, or if it keeps happening
        """
        self.num_recoveries += 1
        self.loss_meter.pop()
        logger.error("The parameters are not finite")
        with self.optimizer.frozen_state():
            backup = self.backup.read()
            downloaded = self.optimizer.state_averager.download_state(min_epoch=0 if backup is None else backup.step)
            if self.num_recoveries > self.MAX_RECOVERIES or (downloaded is None and backup is None):
                raise UserError(
                    "the parameters are not finite and there is no sound state to return to: lower --learning_rate or "
                    "--max_grad_norm, remove the checkpoints in --output_dir, and start again"
                )
            try:
                if downloaded is not None:
                    donor, metadata, tensors = downloaded
                    self.optimizer.restore(metadata, tensors)
                    logger.info(f"Went back to the state of step #{self.optimizer.local_epoch} from {donor}")
                else:
                    self.optimizer.restore(backup.metadata, backup.tensors)
                    logger.info(f"Went back to the backup of step #{self.optimizer.local_epoch}")
            except StateLoadError as error:
                raise UserError(f"the backup {self.backup.path} does not fit this model: {error}; remove it") from None
        self.last_reported_step = self.optimizer.local_epoch

    def introduce(self, leaving: bool) -> None:
        """Publish who we are."""
        info = PeerInfo(username=self.args.username, leaving=leaving, target_batch_size=self.args.target_batch_size)
        key = f"{self.args.run_id}_peers"
        utils.store_record(self.peer.dht, key, self.peer.public_key, info.dict(), self.args.statistics_expiration)

    def leave(self) -> None:
        """After the last step: stay until a monitor that keeps checkpoints has it, or `leave_timeout` has passed."""
        self.optimizer.finish_pending_update()
        self.optimizer.stop_averaging()
        step = self.optimizer.local_epoch
        if self.args.max_global_steps is None or step < self.args.max_global_steps:
            return
        deadline = time.monotonic() + self.args.leave_timeout
        self.introduce(leaving=True)
        while time.monotonic() < deadline and not self.should_stop():
            records = utils.get_dictionary(self.peer.dht, f"{self.args.run_id}_monitor").values()
            monitors = [record.value for record in records if record.value["stores_checkpoints"]]
            if all(monitor["checkpoint_step"] >= step for monitor in monitors):
                return
            time.sleep(0.5)
        logger.warning(f"No monitor has saved step #{step}: leaving all the same")

    def close(self) -> None:
        self.progress_bar.close()
        self.backup.close()
