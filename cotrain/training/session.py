"""A trainer's part in the collaboration, independent of its training loop."""

import contextlib
import itertools
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass, field
from pathlib import Path

import torch
from hivemind.utils import MPFuture, get_logger

from cotrain.common.errors import TemporaryError, UserError, first_line
from cotrain.common.flags import parse_size
from cotrain.common.json_file import JsonLinesFile
from cotrain.common.names import label, short
from cotrain.common.run_folder import claim_folder
from cotrain.common.signals import StopSignal
from cotrain.data.sampler import PeerSampler
from cotrain.dht.metrics_schema import StepMetrics, history_length
from cotrain.dht.run_records import MAX_MEMBERS, TrainerRecord
from cotrain.models.model import supports_bf16
from cotrain.options import TrainerOptions
from cotrain.peer.addresses import log_visible_maddrs, peer_id_in
from cotrain.peer.run_config import RunConfigRelay
from cotrain.status.client_mode import ClientModeAlarm
from cotrain.status.loss_meter import LossMeter
from cotrain.status.status import describe_contribution, describe_end, describe_last_step
from cotrain.status.status_keeper import StatusKeeper
from cotrain.task import Task
from cotrain.training import checkpoints
from cotrain.training.checkpoints import SavedState
from cotrain.training.device_errors import is_device_error
from cotrain.training.hf_trainer import autocast_dtype
from cotrain.training.start import LAST_STEP_SECONDS
from peerstep import records as dht_records
from peerstep.clock import run_time
from peerstep.coordinator import Outcome, StepRecord
from peerstep.optimizer import CollaborativeOptimizer
from peerstep.processes import Watchdog
from peerstep.records import signer_of
from peerstep.state_layout import StateLoadError, all_finite
from peerstep.swarm import Swarm, supervise

logger = get_logger(__name__)

SKIPPED_STEPS = 50  # local steps without finite gradients, after which a peer says what to do; GradScaler says nothing


@dataclass
class TrainingSession:
    """A trainer's part in the collaboration: join, report global steps, recover from NaN and Inf, leave.

    A training loop calls `join` first, `loss_meter.add` with the loss of each micro-batch, `after_local_step` after
    each local step, and `leave` at the end. `CollaborativeCallback` makes these calls for transformers' Trainer.
    """

    peer: Swarm
    optimizer: CollaborativeOptimizer
    task: Task
    model: torch.nn.Module
    arguments: TrainerOptions
    should_stop: Callable[[], bool]  # whether training is to end; called after each local step
    watchdog: Watchdog = field(default_factory=lambda: Watchdog({}))  # learns of each local step
    relay: RunConfigRelay | None = None  # publishes the settings of the run

    MAX_RECOVERIES = 3  # rollbacks without a global step in between
    MAX_JOIN_ATTEMPTS = 3  # downloads to try if only one trainer reports a later step
    MAX_STORE_SECONDS = 5.0  # for the record of the last step
    NAMED_ROUNDS = 16  # whose members this peer names in its record
    MEETING_SECONDS = 30.0  # within which trainers that join at the same time read each other's first report

    def __post_init__(self):
        self.args, training = self.arguments.collaboration, self.arguments.training
        self.folder, self.num_checkpoints = Path(training.output_dir), training.save_total_limit
        self.relay = self.relay or RunConfigRelay(self.peer, None, lifetime=0.0)
        self.name = self.args.username or f"peer-{short(self.peer.dht.peer_id)}"
        shown = label(self.name, self.peer.dht.peer_id)
        self.loss_meter = LossMeter()
        self.status = StatusKeeper(self.folder, self.optimizer, self.args, shown, self.loss_meter, self.should_stop)
        self._rounds = JsonLinesFile(self.folder / "rounds.jsonl", max_bytes=16 * 2**20)
        self._members: deque[list[str]] = deque(maxlen=self.NAMED_ROUNDS)  # of the newest rounds, for the monitor
        self.optimizer.on_round = self._record_round
        self.history: deque[StepMetrics] = deque(maxlen=history_length())
        self.on_report: Callable[[StepMetrics], object] = bool  # called with the metrics of each global step
        self.num_recoveries = 0
        self.joined_at = -math.inf
        self.client_mode_alarm = ClientModeAlarm()
        self._trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._versions: list[int] = []  # of their values, as torch counts changes
        self._num_skipped = 0  # local steps since the last one that counts

    def open_sampler(self, samples: Sized, batch_size_per_step: int) -> PeerSampler:
        """Return this peer's order of the samples, which continues after a restart and is part of the status."""
        options = self.arguments.training.seed, batch_size_per_step, self.folder / "samples.json", self.should_stop
        sampler = PeerSampler(samples, str(self.peer.dht.peer_id), *options)
        self.status.describe_data = sampler.describe
        return sampler

    def join(self) -> None:
        """Start from the newest training state: the other peers', or the resumed checkpoint's if that is newer.

        :raises TemporaryError: if several trainers are at a later step, but no state can be downloaded
        :raises UserError: if all other trainers average something else, and one of them is an initial peer
        """
        unsent = getattr(self.restore_checkpoint(), "unsent", None)  # a download needs the memory of the state
        optimizer, own_step = self.optimizer, self.optimizer.local_epoch
        optimizer.last_step = self.last_step
        self.status.start()
        logger.info(f"This peer is {label(self.name, self.peer.dht.peer_id)}")
        if self.args.page is not None:
            logger.info(f"Curves of the run: {self.args.page}")
        if self.args.ends_at is not None:
            logger.info(f"The run ends {describe_end(self.args.end_time)}")
        if own_step > 0:
            optimizer.begin_at(own_step, unsent)
            optimizer.share_state()
            logger.info(f"Resumed from a checkpoint at step #{own_step}")
        if self._load_newest_state():
            logger.info(f"Joined the collaboration at step #{optimizer.local_epoch}")
        elif own_step == 0:
            logger.info("No peer offers a trained state: starting with the initial weights")
        optimizer.pop_records()
        self.joined_at = time.monotonic()
        self.status.begin_at(optimizer.local_epoch)
        self.publish()

    def _load_newest_state(self) -> bool:
        """Download the newest state; retry while trainers report a later step. Return whether a state was loaded.

        A single trainer that reports a later step may be lying. It is not waited for after MAX_JOIN_ATTEMPTS.
        """
        tracker = self.optimizer.tracker
        deadline = time.monotonic() + self.args.load_state_timeout
        for attempt in itertools.count(1):
            tracker.refresh()
            has_misfits_only = self._refuse_misfits()
            if self.optimizer.load_state_from_peers():
                return True
            if has_misfits_only and attempt < self.MAX_JOIN_ATTEMPTS:
                time.sleep(tracker.options.default_refresh_period)
                continue
            ahead = [peer for peer in tracker.view().live if peer.epoch > self.optimizer.local_epoch + 1]
            if not ahead or self.should_stop():
                return False
            if len(ahead) == 1 and attempt >= self.MAX_JOIN_ATTEMPTS:
                logger.warning(
                    "One trainer reports a later step, but its state cannot be downloaded: starting without it"
                )
                return False
            if time.monotonic() > deadline:
                step = min(peer.epoch for peer in ahead)
                raise TemporaryError(
                    f"{len(ahead)} trainers of this run are at step #{step} or later, but no state could be "
                    f"downloaded within --load_state_timeout {self.args.load_state_timeout:.0f} seconds. Check that "
                    "they are reachable from this machine and use the same model and optimizer"
                )
            time.sleep(min(5.0, tracker.options.default_refresh_period))

    def _refuse_misfits(self) -> bool:
        """Return whether all other trainers average something else. UserError if one of them is an initial peer.

        Anybody may report another model: the report of a stranger delays the start, and ends no trainer.
        """
        view = self.optimizer.tracker.view()
        misfits = view.misfits
        if not misfits or view.others:
            return False
        fault = (
            f"the {len(misfits)} trainers of this run have another model, other initial weights, another "
            "base model, other flags or another version (see the warning above), and would not average with this "
            "one: take theirs, or pass another --run_id for a run of your own"
        )
        if misfits & {peer_id_in(maddr).to_bytes() for maddr in self.args.initial_peers}:
            raise UserError(fault)
        if self.joined_at == -math.inf:
            logger.warning(f"{fault[0].upper()}{fault[1:]}. None of them is an initial peer: starting without them")
        return True

    def after_local_step(self) -> bool:
        """Check the parameters and report new global steps.

        :returns: whether training continues
        :raises UserError: if the parameters are NaN or Inf and there is no state to return to, or this peer's
            invitation no longer holds
        """
        self.peer.dht.check_invitation()
        self._record_local_step()
        if self._have_changed() and not all_finite(self._trained):
            self.recover()
            return not self.should_stop()
        if time.monotonic() < self.joined_at + self.MEETING_SECONDS:
            self._refuse_misfits()
        self._report_steps()
        view = self.optimizer.tracker.view()
        trainers = *view.others, view.own
        self.client_mode_alarm.check([trainer.client_mode for trainer in trainers])
        if self._traffic_is_used_up():
            return False
        if self.should_stop():
            self.optimizer.say_goodbye()
            self.optimizer.stop_averaging()  # a round may outlast the shutdown grace period
            return False
        return not self._is_over()

    @property
    def last_step(self) -> int | None:
        """The global step at which this peer leaves: --max_global_steps, or the last one of the schedule."""
        steps = self.args.max_global_steps, self.arguments.training.last_step
        return min((step for step in steps if step is not None), default=None)

    def _traffic_is_used_up(self) -> bool:
        """Whether --max_traffic is reached; logs it."""
        limit = self.args.max_traffic
        if limit is None or not self.status.traffic.is_used_up(parse_size("--max_traffic", limit)):
            return False
        logger.info(f"Leaving before --max_traffic {limit} a month is passed: {self.status.traffic.describe()}")
        return True

    def _record_local_step(self) -> None:
        """Count a local step; warn if none counts because the gradients overflow."""
        if self.status.record_local_step():
            self.watchdog.record_work()
            self._num_skipped = 0
            return
        self._num_skipped += 1
        if self._num_skipped % SKIPPED_STEPS == 0:
            device = self._trained[0].device
            is_half = autocast_dtype(self.arguments.training, device) == torch.float16
            remedy = "check the data, and lower --learning_rate on all peers"
            if is_half:
                remedy = "they overflow in fp16. Pass " + ("--bf16" if supports_bf16(device) else "--fp32")
            logger.warning(
                f"None of the last {self._num_skipped} local steps had finite gradients: {remedy}. This peer "
                "contributes nothing until then"
            )

    def _have_changed(self) -> bool:
        """Whether the parameters have changed since the last call: reading them waits for the GPU."""
        versions, last = [parameter._version for parameter in self._trained], self._versions  # noqa: SLF001
        self._versions = versions
        return versions != last

    def _is_over(self) -> bool:
        """Whether the run has reached its last step or its end date."""
        last_step = self.last_step
        return (last_step is not None and self.optimizer.local_epoch >= last_step) or time.time() >= self.args.end_time

    def _report_steps(self) -> None:
        for record in self.optimizer.pop_records():
            self.status.record_step(record)
            if record.samples is not None:
                self.report(record)
                self.num_recoveries = 0
                if record.step % self.args.backup_every_steps == 0:
                    self.save_checkpoint()
            elif record.outcome != Outcome.FAILED:
                logger.info(f"Caught up with the collaboration at step #{record.step}")
                if self.optimizer.accumulator.num_samples == 0:
                    self.loss_meter.pop()  # the losses of dropped samples

    def _record_round(self, entry: dict) -> None:
        """Log a round, and keep who gave samples in it; of a peer that reduced nothing, the whole group."""
        names = [name for name, samples in entry["weights"].items() if samples >= 1] or entry["group"]
        self._members.append(random.sample(names, len(names)))
        self._rounds.write(entry)

    def report(self, record: StepRecord) -> None:
        """Log a global step and publish this peer's metrics for it.

        If two global steps complete within one local step, the first one has all of the loss.
        """
        loss, mini_steps = self.loss_meter.pop()
        samples_per_second = self.status.speed = float(self.optimizer.local_progress.samples_per_second)
        logger.info(f"Step #{record.step}")
        logger.info(f"Your current contribution: {self.status.applied} samples")
        logger.info(f"Performance: {samples_per_second:.3f} samples/sec")
        if mini_steps:
            logger.info(f"Local loss: {loss / mini_steps:.5f}")
            self.status.record_loss(loss / mini_steps)
        values = {"samples_accumulated": record.samples, "loss": loss, "mini_steps": mini_steps}
        values |= {"step": record.step, "samples_per_second": samples_per_second, "time": record.time}
        self.history.append(StepMetrics(**values))
        self.publish()
        self.on_report(self.history[-1])

    def publish(self, leaving: bool = False) -> MPFuture:
        """Publish this peer's record, and the settings of the run. Does not wait for the result.

        :param leaving: whether this peer waits for a monitor to save the last step
        """
        rounds = self.optimizer.pace.recent_rounds
        computed, applied = self.status.recent_samples()
        members = dict.fromkeys(map(short, itertools.chain(*reversed(self._members.copy()))))
        record = TrainerRecord(
            username=self.name,
            leaving=leaving,
            history=[entry.to_row() for entry in self.history],  # for monitors that missed steps
            rounds=len(rounds),
            complete=sum(rounds),
            computed=computed,
            applied=applied,
            averaging=self.optimizer.pace.averaging_share,
            members=list(members)[:MAX_MEMBERS],
        )
        self.relay.publish()
        key, end = f"{self.args.run_id}_trainers", run_time() + self.args.statistics_expiration
        return self.peer.dht.store(key, record.dict(), end, subkey=self.peer.public_key, return_future=True)

    def recover(self) -> None:
        """Roll back NaN or Inf parameters to the peers' state or to the last checkpoint, whichever is newer.

        :raises UserError: if there is neither, or after MAX_RECOVERIES rollbacks without a global step
        """
        self.num_recoveries += 1
        self.loss_meter.pop()
        logger.error("The parameters are not finite")
        if self.num_recoveries <= self.MAX_RECOVERIES and self.optimizer.discard_local_updates():
            logger.info(f"Went back to the parameters of step #{self.optimizer.local_epoch}")
            return
        with self.optimizer.frozen_state():
            own = self.restore_checkpoint()
            newest = self.optimizer.state_averager.download_state(min_step=0 if own is None else own.step)
            if newest is None and own is not None:
                newest = "the last checkpoint", own.metadata, own.tensors
            if newest is None or self.num_recoveries > self.MAX_RECOVERIES:
                raise UserError(
                    "the parameters are not finite and there is no valid state to roll back to: lower "
                    "--learning_rate or --max_grad_norm, remove the checkpoints in --output_dir, and start again"
                )
            source, metadata, tensors = newest
            try:
                self.optimizer.restore(metadata, tensors)
            except StateLoadError as error:
                raise UserError(f"the state from {source} does not fit this model: {error}") from None
        logger.info(f"Rolled back to the state of step #{self.optimizer.local_epoch} from {source}")
        self.status.begin_at(self.optimizer.local_epoch)

    def leave(self) -> None:
        """Report the last steps. Wait until the organiser's monitors have saved the newest one if nobody else has it.

        That is so after the last step of the run, and if all trainers leave at the same time.
        """
        self.optimizer.finish_pending_update()
        self.optimizer.stop_averaging()
        self._report_steps()
        self.status.should_stop = lambda: True  # no more lines about the next step
        step, is_over = self.optimizer.local_epoch, self._is_over()
        if step >= (self.arguments.training.last_step or math.inf):
            path = self.folder / f"checkpoint-{step}"
            logger.info(describe_last_step(step) + (f" The model is in '{path}'" if path.is_dir() else ""))
        if (status := self.status.update()).computed or not is_over:  # not a late one, which found a finished run
            logger.info(describe_contribution(status))
        is_last = is_over or (step > 0 and not self._others_train())
        with contextlib.suppress(Exception):  # hivemind's, if nobody answers any more
            # While all peers leave, the DHT takes seconds, and this peer less.
            self.publish(leaving=is_last).result(timeout=self.MAX_STORE_SECONDS)
        if is_last:
            self._await_monitors(step, self.args.leave_timeout if is_over else LAST_STEP_SECONDS)

    def _others_train(self) -> bool:
        """Whether another trainer of the run is there: its report has not been replaced by a goodbye."""
        records = dht_records.get_dictionary(self.peer.dht, f"{self.args.run_id}_training_progress")
        own = self.peer.public_key
        return any(record.value is not None for subkey, record in records.items() if subkey != own)

    def _await_monitors(self, step: int, seconds: float) -> None:
        """Wait until the organiser's monitors have saved a step, at most some seconds."""
        deadline, is_asked = time.monotonic() + seconds, self.should_stop()
        config = self.relay.config
        # Anybody may claim to be a monitor that has not saved the step.
        monitors = {*map(peer_id_in, self.args.initial_peers), config and config.organiser}
        while time.monotonic() < deadline and (is_asked or not self.should_stop()):
            self.watchdog.record_work()
            records = dht_records.get_dictionary(self.peer.dht, f"{self.args.run_id}_monitor").items()
            statuses = [record.value for subkey, record in records if signer_of(subkey) in monitors]
            if all(status["checkpoint_step"] >= step for status in statuses if status["stores_checkpoints"]):
                return
            time.sleep(0.5)
        logger.warning(f"No monitor has saved step #{step} yet: leaving anyway")

    def restore_checkpoint(self) -> SavedState | None:
        return checkpoints.restore_newest(self.folder, self.args.run_id, self.optimizer.state_averager)

    def save_checkpoint(self) -> None:
        """Write a checkpoint of the current global step; log an error if that fails."""
        with self.optimizer.saved_state() as unsent, self.optimizer.state_averager.frozen_state() as content:
            state = SavedState(self.args.run_id, *content, unsent)
            try:
                info = {"time": time.time(), "last_step": self.arguments.training.last_step}
                path = checkpoints.save_checkpoint(self.folder, self.task, self.model, state, info)
                checkpoints.rotate_checkpoints(path, self.num_checkpoints)
            except Exception as error:  # on a full disk, torch and safetensors raise errors of their own
                logger.error(
                    f"Could not save a checkpoint: {first_line(error)}. Training continues, keeping the previous "
                    "checkpoint"
                )


@contextlib.contextmanager
def open_session(
    peer: Swarm, optimizer: CollaborativeOptimizer, task: Task, model: torch.nn.Module, args: TrainerOptions,
    stop: StopSignal,
) -> Iterator[TrainingSession]:  # fmt: skip
    """Open a trainer's session. The process ends if a child process dies or if no local step is completed for long."""
    claim_folder(Path(args.training.output_dir), args.collaboration.run_id)
    relay = RunConfigRelay.of_run(peer, args)
    relay.publish()  # before anybody knows the address
    if not args.collaboration.client_mode:
        log_visible_maddrs(peer.dht.get_visible_maddrs(), only_p2p=args.collaboration.use_ipfs)
    children = {"DHT": peer.dht, **optimizer.processes}
    with supervise(children, 15.0, exit_code=1, longest_wait=args.collaboration.longest_wait) as watchdog:
        session = TrainingSession(peer, optimizer, task, model, args, stop.is_set, watchdog, relay)
        with contextlib.closing(session.status):
            try:
                yield session
            except RuntimeError as error:
                # The size fits, since local steps were completed: a game, or a reset of the driver
                error.retryable = is_device_error(error) and optimizer.num_computed > 0
                raise
