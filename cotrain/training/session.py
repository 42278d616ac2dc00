"""A trainer's part in the collaboration, independent of its training loop."""

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sized
from pathlib import Path

import torch
from hivemind.utils import get_logger

from cotrain.common.errors import TemporaryError, UserError
from cotrain.common.flags import parse_size
from cotrain.common.names import label, short
from cotrain.common.run_folder import claim_folder
from cotrain.common.signals import StopSignal
from cotrain.data.sampler import PeerSampler
from cotrain.dht.metrics_schema import StepMetrics
from cotrain.options import TrainerOptions
from cotrain.peer.addresses import log_visible_maddrs, peer_id_in
from cotrain.peer.relay import RunConfigRelay
from cotrain.status.client_mode import ClientModeAlarm
from cotrain.status.loss_meter import LossMeter
from cotrain.status.pause import PauseRule
from cotrain.status.status import describe_contribution, describe_end, describe_last_step
from cotrain.status.status_keeper import StatusKeeper
from cotrain.task import Task
from cotrain.training.device_errors import is_device_error
from cotrain.training.gpu_programs import GpuPrograms
from cotrain.training.hf_trainer import autocast_dtype
from cotrain.training.own_loss import OwnLoss
from cotrain.training.publisher import Publisher
from cotrain.training.recovery import Recovery
from cotrain.training.start import LAST_STEP_SECONDS
from peerstep.local_peer import LocalPeer, supervise
from peerstep.optimizer import CollaborativeOptimizer
from peerstep.peer.processes import Watchdog
from peerstep.reports import records as dht_records
from peerstep.reports.records import signer_of
from peerstep.step.coordinator import Outcome

logger = get_logger(__name__)

PAUSED_SECONDS = 60.0  # between two records of a paused trainer, which expire after --statistics_expiration


class TrainingSession:
    """A trainer's part in the collaboration: join, take part in each global step, leave.

    A training loop calls `join` first, `loss_meter.add` with the loss of each micro-batch, `after_local_step` after
    each local step, and `leave` at the end. `CollaborativeCallback` makes these calls for transformers' Trainer.

    :param should_stop: whether training is to end; called after each local step
    :param watchdog: learns of each local step
    :param relay: publishes the settings of the run
    """

    MAX_JOIN_ATTEMPTS = 3  # downloads to try if only one trainer reports a later step
    MAX_STORE_SECONDS = 5.0  # for the record of the last step
    MEETING_SECONDS = 30.0  # within which trainers that join at the same time read each other's first report

    def __init__(
        self, peer: LocalPeer, optimizer: CollaborativeOptimizer, task: Task, model: torch.nn.Module,
        arguments: TrainerOptions, should_stop: Callable[[], bool], watchdog: Watchdog, relay: RunConfigRelay,
    ):  # fmt: skip
        self.peer, self.optimizer, self.model = peer, optimizer, model
        self.arguments, self.args = arguments, arguments.collaboration
        self.should_stop, self.watchdog = should_stop, watchdog
        name = self.args.username or f"peer-{short(peer.dht.peer_id)}"
        shown = label(name, peer.dht.peer_id)
        self.recovery = Recovery(optimizer, task, model, arguments)
        self.loss_meter = LossMeter()
        self.status = StatusKeeper(self.recovery.folder, optimizer, self.args, shown, self.loss_meter, should_stop)
        self.publisher = Publisher(name, peer, relay, self.status)
        data = arguments.dataset
        if data is not None and data.own_data and data.own_validation and len(task.load_samples("validation")):
            dtype = autocast_dtype(arguments.training, next(model.parameters()).device)
            self.publisher.own_loss = OwnLoss(task, model, optimizer, dtype)
        self.on_report: Callable[[StepMetrics], object] = bool  # called with the metrics of each global step
        self.joined_at = -math.inf
        self.client_mode_alarm = ClientModeAlarm()
        find_program = GpuPrograms(next(model.parameters()).device).find if self.args.pause_when_busy else str
        self.pause_rule = PauseRule(self.recovery.folder, self.args.only_between, find_program)

    def open_sampler(self, samples: Sized, batch_size_per_step: int) -> PeerSampler:
        """Return this peer's order of the samples, which continues after a restart and is part of the status."""
        path, own_id = self.recovery.folder / "samples.json", str(self.peer.dht.peer_id)
        sampler = PeerSampler(
            samples, own_id, self.arguments.training.seed, batch_size_per_step, path, self.should_stop
        )
        self.status.describe_data = sampler.describe
        return sampler

    def join(self) -> None:
        """Start from the newest training state: the other peers', or the resumed checkpoint's if that is newer.

        :raises TemporaryError: if several trainers are at a later step, but no state can be downloaded
        :raises UserError: if all other trainers average something else, and one of them is an initial peer
        """
        self.publisher.measure_own_loss()  # of the initial weights
        unsent = self.recovery.resume()
        optimizer, own_step = self.optimizer, self.optimizer.local_epoch
        optimizer.last_step = self.last_step
        self.status.start()
        logger.info(f"This peer is {label(self.publisher.name, self.peer.dht.peer_id)}")
        if self.args.page is not None:
            logger.info(f"Curves of the run: {self.args.page}")
        if self.args.ends_at is not None:
            logger.info(f"The run ends {describe_end(self.args.end_time)}")
        if own_step > 0:
            optimizer.begin_at(own_step, unsent)
            optimizer.share_state()
            logger.info(f"Resumed from a checkpoint at step #{own_step}")
        if self.load_newest_state():
            logger.info(f"Joined the collaboration at step #{optimizer.local_epoch}")
        elif own_step == 0:
            logger.info("No peer offers a trained state: starting with the initial weights")
        optimizer.pop_records()
        self.joined_at = time.monotonic()
        self.status.begin_at(optimizer.local_epoch)
        self.publisher.publish()
        if not self._pause():
            raise SystemExit(0)  # nothing is trained, and the model is on the CPU

    def load_newest_state(self) -> bool:
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
            f"the {len(misfits)} trainers of this run have another model or tokenizer, other initial weights, another "
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
        counts = self.status.record_local_step()
        if counts:
            self.watchdog.record_work()
        self.recovery.record_local_step(counts)
        if self.recovery.is_needed():
            self.loss_meter.pop()
            if self.recovery.roll_back():
                self.status.begin_at(self.optimizer.local_epoch)
            return not self.should_stop()
        if time.monotonic() < self.joined_at + self.MEETING_SECONDS:
            self._refuse_misfits()
        self.report_steps()
        view = self.optimizer.tracker.view()
        trainers = *view.others, view.own
        self.client_mode_alarm.check([trainer.client_mode for trainer in trainers])
        may_continue = self._pause()
        if self._traffic_is_used_up():
            return False
        if self.should_stop():
            self.optimizer.say_goodbye()
            self.optimizer.stop_averaging()  # a round may outlast the shutdown grace period
            return False
        return may_continue and not self._is_over()

    def _pause(self) -> bool:
        """Wait while there is a reason to pause, with the device free for other programs.

        :returns: False if training ends meanwhile. The model stays on the CPU then: the device may be full
        """
        if not (reason := self.pause_rule.find_reason(time.time())):
            return True
        optimizer, device = self.optimizer, next(self.model.parameters()).device
        optimizer.pause(self.model)
        publish_at = -math.inf
        with optimizer.tracker.pause_updates():
            while reason and not (self.should_stop() or self._is_over()):
                if reason != self.status.paused:
                    logger.info(f"Paused: {reason}")
                    self.status.record_pause(reason)
                if time.monotonic() >= publish_at:
                    publish_at = time.monotonic() + PAUSED_SECONDS
                    self.publisher.publish()
                    if self.last_step is not None and self.last_step <= max(self._saved_steps(), default=-1):
                        logger.info(describe_last_step(self.last_step))
                        return False
                if optimizer.local_epoch > 0:
                    optimizer.share_state()
                self.peer.dht.check_invitation()
                self.watchdog.record_work()
                time.sleep(1.0)
                reason = self.pause_rule.find_reason(time.time())
        if not reason:
            optimizer.resume(self.model, device)
            self.status.record_pause("")
            self.publisher.publish()
            logger.info("Continuing after a pause")
        return not reason

    def report_steps(self) -> None:
        for record in self.optimizer.pop_records():
            self.status.record_step(record)
            if record.samples is not None:
                self.on_report(self.publisher.report(record))
                self.recovery.attempts = 0
                if record.step % self.args.backup_every_steps == 0:
                    self.recovery.save_checkpoint()
            elif record.outcome != Outcome.FAILED:
                logger.info(f"Caught up with the collaboration at step #{record.step}")
                if self.optimizer.accumulator.num_samples == 0:
                    self.loss_meter.pop()  # the losses of dropped samples

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

    def _is_over(self) -> bool:
        """Whether the run has reached its last step or its end date."""
        last_step = self.last_step
        return (last_step is not None and self.optimizer.local_epoch >= last_step) or time.time() >= self.args.end_time

    def leave(self) -> None:
        """Report the last steps. Wait until the organiser's monitors have saved the newest one if nobody else has it.

        That is so after the last step of the run, and if all trainers leave at the same time.
        """
        self.optimizer.finish_pending_update()
        self.optimizer.stop_averaging()
        self.report_steps()
        self.status.should_stop = lambda: True  # no more lines about the next step
        step, is_over = self.optimizer.local_epoch, self._is_over()
        if step >= (self.arguments.training.last_step or math.inf):
            path = self.recovery.folder / f"checkpoint-{step}"
            logger.info(describe_last_step(step) + (f" The model is in '{path}'" if path.is_dir() else ""))
        if (status := self.status.update()).computed or not is_over:  # not a late one, which found a finished run
            logger.info(describe_contribution(status))
        is_last = is_over or (step > 0 and not self._others_train())
        with contextlib.suppress(Exception):  # hivemind's, if nobody answers any more
            # While all peers leave, the DHT takes seconds, and this peer less.
            self.publisher.publish(leaving=is_last).result(timeout=self.MAX_STORE_SECONDS)
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
        while time.monotonic() < deadline and (is_asked or not self.should_stop()):
            self.watchdog.record_work()
            if all(saved >= step for saved in self._saved_steps()):
                return
            time.sleep(0.5)
        logger.warning(f"No monitor has saved step #{step} yet: leaving anyway")

    def _saved_steps(self) -> list[int]:
        """Return the newest step that each of the organiser's monitors has saved, of those that save steps."""
        config = self.publisher.relay.config
        # Anybody may claim to be a monitor that has not saved the step.
        monitors = {*map(peer_id_in, self.args.initial_peers), config and config.organiser}
        records = dht_records.get_dictionary(self.peer.dht, f"{self.args.run_id}_monitor").items()
        statuses = [record.value for subkey, record in records if signer_of(subkey) in monitors]
        return [status["checkpoint_step"] for status in statuses if status["stores_checkpoints"]]


@contextlib.contextmanager
def open_session(
    peer: LocalPeer, optimizer: CollaborativeOptimizer, task: Task, model: torch.nn.Module, args: TrainerOptions,
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
