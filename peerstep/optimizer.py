"""The collaborative optimizer: hivemind.Optimizer with one averaging round per global step.

The main thread accumulates gradients. A second thread, the step thread, watches the progress of all peers. When a
global step is due, it takes the accumulated gradients, averages them with the other peers, and runs the optimizer on
the offloaded parameters. The main thread copies these to the model at its next local step. A peer with long local
steps therefore takes part in each round, with the gradients that it has.
"""

import math
import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import hivemind
import torch
from hivemind.utils import get_logger
from threadpoolctl import threadpool_limits

from peerstep.accumulators import GradientAccumulator, clip_norm
from peerstep.compression import COMPRESSIONS, build_state_compression
from peerstep.coordinator import Outcome, RoundCoordinator, StepRecord
from peerstep.history import add_mark, different_marks
from peerstep.local_updates import LocalTraining, LocalUpdates, step_builders
from peerstep.matchmaking import MAX_ABSENCES
from peerstep.optimizer_state import OptimizerBuilder, SchedulerBuilder, constant_schedule
from peerstep.pace import Pace
from peerstep.progress import WARN_SECONDS, ProgressTracker, TrackerOptions
from peerstep.progress_record import MAX_LAG, PeerProgress
from peerstep.rounds import RoundAverager, RoundResult
from peerstep.standing import EQUAL, LACKING
from peerstep.state import TrainingStateAverager
from peerstep.state_layout import all_finite
from peerstep.swarm import Swarm

logger = get_logger(__name__)

IDLE_SECONDS = 0.1  # polling interval for a due step
MAX_MISSED_UPDATES = 64  # steps that the other peers can have taken during a download or a sleep
# Consecutive steps without a round after which a peer says that it is away, or takes the step without the others.
# The trainer with the smallest peer ID goes first, the others only if it takes no step either.
MAX_FAILURES, MAX_FAILURES_OF_OTHERS = 3, 6
ROUND_RETRY_SECONDS = 1.0  # after a failed round, for a local step of a peer that computes nothing during rounds
MAX_FAILED_LOADS = 3  # before peers that claim a step without any offered state are ignored for a while


def use_one_core() -> None:
    """Limit the calling thread to one OpenMP thread.

    With more OpenMP threads than cores, GNU's library puts idle ones to sleep. Waking them for each operation of the
    main thread took 12 to 47 % of the speed of a trainer on two cores.
    """
    torch.get_num_threads()  # torch sets the limit of a thread at its first use
    threadpool_limits(1, user_api="openmp")


class CollaborativeOptimizer(hivemind.Optimizer):
    """A torch.optim.Optimizer whose steps all peers of a run take together, in one averaging round each.

    `step` adds a local step to the next global step. Once all peers together have `target_batch_size` samples, they
    average their gradients, and each takes the same step as one process with all samples would. hivemind.Optimizer
    gives `state_dict`, `param_groups` and `zero_grad`. Build it in the main thread, and call `shutdown` at the end.

    :param params: parameters of the model, which is on its device already, or groups of them
    :param optimizer: builds the optimizer for copies of them on the CPU. A float as `lr`
    :param swarm: this peer of the run
    :param target_batch_size: samples of a global step, of all peers together
    :param batch_size_per_step: samples of a local step; `step` may be told others
    :param scheduler: builds the schedule of the learning rate over global steps; default: constant
    :param local_updates: average what each peer has changed by local steps (DiLoCo) instead of gradients
    :param max_grad_norm: norm to which the average is clipped, or with `local_updates` the gradient of a local step
    :param gradient_compression, parameter_compression: of rounds, keys of COMPRESSIONS, the same at all peers
    :param state_compression: of the state that newcomers download from this peer
    :param average_parameters_every: global steps from one average of the parameters to the next
    :param target_group_size: peers of a group at most
    :param bandwidth: upload in Mbit/s; default: measured in rounds
    :param delay_grad_averaging: compute the next gradients during a round
    :param delay_optimizer_step: compute the next gradients while the step is taken. Set both or the first to False
    :param batch_size_lead: samples before the target at which the search for a group begins at the latest
    :param matchmaking_time: seconds before a step is due at which the search for its group starts, and for which a
      group waits for a late peer; hivemind needs more than 3
    :param averaging_timeout: seconds after which a round ends with what has arrived, and for which a donor of a state
      may be silent. A peer that is silent for a quarter of them is left out of the round
    :param load_state_timeout: seconds for the download of a state
    :param folder: on a disk, for the copies that others download; default: that for temporary files
    """

    def __init__(
        self,
        params: Iterable,
        optimizer: OptimizerBuilder,
        swarm: Swarm,
        *,
        target_batch_size: int,
        batch_size_per_step: int,
        scheduler: SchedulerBuilder = constant_schedule,
        local_updates: LocalUpdates | None = None,
        max_grad_norm: float = 1.0,
        gradient_compression: str = "float16",
        parameter_compression: str = "float16",
        state_compression: str = "float16",
        average_parameters_every: int = 8,
        target_group_size: int = 256,
        bandwidth: float | None = None,
        delay_grad_averaging: bool = True,
        delay_optimizer_step: bool = True,
        batch_size_lead: int = 0,
        matchmaking_time: float = 5.0,
        averaging_timeout: float = 60.0,
        load_state_timeout: float = 600.0,
        tracker_options: TrackerOptions = TrackerOptions(),  # noqa: B008  frozen
        folder: Path | None = None,
    ):
        if delay_grad_averaging and not delay_optimizer_step:
            raise ValueError("delay_grad_averaging needs delay_optimizer_step")
        # hivemind's `__init__` builds its own tracker and averagers. Its other methods need these attributes:
        dht, groups = swarm.dht, list(params)
        self.dht, self.run_id, self.shutdown_timeout = dht, swarm.run_id, 5.0
        self.target_batch_size, self.batch_size_per_step = target_batch_size, batch_size_per_step
        self.delay_grad_averaging, self.delay_optimizer_step = delay_grad_averaging, delay_optimizer_step
        if not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        self.num_dropped_gradients = 0
        self.num_computed = 0  # samples of the local steps, without those whose gradients were dropped
        self._records: deque[StepRecord] = deque(maxlen=64)  # see pop_records
        # Updates that this peer's parameters lack, or have with another gradient, compared with those of its group
        self.distance = 0.0
        self._num_failures = 0  # consecutive rounds that this peer has failed to take part in
        self._num_stuck = 0  # those since another trainer, or this peer, has taken a step
        self._num_alone = 0  # consecutive marks of steps that this peer took alone
        self._retry_at = self._warn_at = 0.0  # `time.monotonic`
        self.last_step: int | None = None  # no step beyond this one is taken
        self.on_round: Callable[[dict], None] | None = None  # takes what came of each round, as JSON
        self.pace = Pace()  # how the newest rounds went, too
        self._failed_loads = 0
        self._has_update = False  # whether the offloaded parameters are newer than the model's
        self._is_broken = False  # whether the offloaded parameters are not finite
        self._waits_for_step = False  # whether the main thread waits in `step`
        self._in_round = self._in_step = False
        self._step_lock = threading.RLock()  # held by the step thread from the start of a step to its end
        self._update_lock = threading.RLock()  # held while parameters and statistics change or are copied
        self._wake, self._progressed, self._stopped = threading.Event(), threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self.state_averager = TrainingStateAverager(
            dht=dht,
            public_key=swarm.public_key,
            prefix=f"{swarm.run_id}_state_averager",
            params=groups,
            **step_builders(optimizer, scheduler, local_updates),
            initialize_optimizer=False,  # see build_with_statistics
            offload_optimizer=True,
            state_compression=build_state_compression(state_compression),
            allow_state_sharing=False,  # until there is a trained state to share, see share_state
            credible_step=lambda: self.tracker.credible_step(),
            download_timeout=load_state_timeout,
            donor_timeout=averaging_timeout,
            folder=folder,
            start=True,
        )
        compression = COMPRESSIONS[gradient_compression]()
        self.grad_averager = RoundAverager(
            self._offloaded_parameters(),
            dht=dht,
            prefix=f"{swarm.run_id}_round_averager",
            private_key=swarm.private_key,
            local_updates=local_updates is not None,
            learning_rate=max(group["lr"] for group in optimizer([dict(group) for group in groups]).param_groups),
            max_weight=float(target_batch_size),  # a peer counts for a whole step at most
            gradient_compression=compression,
            parameter_compression=COMPRESSIONS[parameter_compression](),
            average_parameters_every=average_parameters_every,
            target_group_size=target_group_size,
            bandwidth=bandwidth,
            min_matchmaking_time=matchmaking_time,
            allreduce_timeout=averaging_timeout,
            # Seconds of silence after which a peer is excluded from a round. hivemind's default is
            # `matchmaking_time`, which busy machines and slow connections exceed.
            next_chunk_timeout=max(matchmaking_time, averaging_timeout / 4),
        )
        tensors = self.state_averager.main_parameters, self._offloaded_parameters(), self.grad_averager.gradients
        if local_updates is None:
            self.accumulator = GradientAccumulator(*tensors, max_norm=max_grad_norm)
        else:
            bound, project = local_updates.max_norm, getattr(compression, "project", None)
            self.accumulator = LocalTraining(
                groups, optimizer, scheduler, max_grad_norm, *tensors, max_norm=bound, project=project
            )
        schema = self.grad_averager.schema_id
        self.tracker = ProgressTracker(
            dht, swarm.run_id, target_batch_size, tracker_options, public_key=swarm.public_key, schema=schema
        )
        self.coordinator = RoundCoordinator(
            self.tracker, self.grad_averager, matchmaking_time, averaging_timeout, batch_size_lead
        )
        self.tracker.start()

    @property
    def param_groups(self) -> list[dict]:
        """Groups of the model's parameters, with local updates those of the inner optimizer."""
        inner = self.accumulator.inner
        return list(super().param_groups) if inner is None else inner.param_groups

    def _offloaded_parameters(self) -> list[torch.Tensor]:
        return self.state_averager.layout.parameters

    @property
    def processes(self) -> dict[str, multiprocessing.Process]:
        """The averagers' processes, by name. Training cannot continue without them."""
        return {"state averager": self.state_averager, "round averager": self.grad_averager}

    # Local steps, in the main thread

    def step(self, closure: None = None, batch_size: int | None = None, grad_scaler=None) -> None:
        """Record a local step. Waits for the global step if the step is due and not delayed.

        :param batch_size: samples of this local step; default: `batch_size_per_step`
        :raises ValueError: for hivemind's GradScaler, which gives wrong steps here; torch's works
        """
        if grad_scaler is not None:
            raise ValueError("use torch.amp.GradScaler, not hivemind's")
        self._start_thread()
        self.pace.end_local_step()
        self._apply_update()
        if self._is_out_of_sync():
            logger.info("Out of sync with the collaboration")
            self.load_state_from_peers()
        elif self._accumulate(batch_size or self.batch_size_per_step or 0):
            self._wait_for_step(self._patience())
        self.pace.begin_local_step()

    def _accumulate(self, num_samples: int) -> bool:
        """Accumulate the gradients of the model; False if one has NaN or Inf."""
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not all_finite(gradients):
            self.num_dropped_gradients += 1
            if self.num_dropped_gradients == 1 or self.num_dropped_gradients % 100 == 0:
                logger.warning(f"Dropped a gradient that is not finite ({self.num_dropped_gradients} so far)")
            return False
        self.num_computed += num_samples
        step = self.tracker.local_progress.epoch
        self.tracker.report_samples(self.accumulator.add(num_samples, self.local_epoch), step)
        return True

    def _patience(self) -> float:
        """Return the seconds for which a local step waits for a global step that is due or runs.

        With delays it waits for short rounds, too. Gradients of old parameters make a step worth less, see
        docs/tuning.md. Local updates are not of the parameters of a step, and lose nothing.
        """
        if not self.delay_grad_averaging:
            return math.inf
        return self.pace.patience() if self.accumulator.ages else 0.0

    def _wait_for_step(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        waits_for_update = self.delay_grad_averaging or not self.delay_optimizer_step
        with self.tracker.pause_updates():
            self._waits_for_step = seconds > 0
            self._wake.set()
            try:
                while (
                    time.monotonic() < until
                    and self._may_begin_step()
                    and not (self._is_over or self._is_interrupted())
                ):
                    # The order matters: a step that begins in between is marked as busy before it stops being due.
                    is_due = self._is_due()
                    is_busy = self._in_step if waits_for_update else self._in_round
                    if not (is_due or is_busy):
                        break
                    self._progressed.wait(IDLE_SECONDS)
                    self._progressed.clear()
            finally:
                self._waits_for_step = False
        self._apply_update()

    def _is_due(self) -> bool:
        """Whether to take the next step now; not at once after a failed round."""
        is_due = self.tracker.seconds_to_step <= 0 or self.coordinator.has_group
        return is_due and time.monotonic() >= self._retry_at

    @property
    def _is_over(self) -> bool:
        return self.last_step is not None and self.local_epoch >= self.last_step

    def _is_interrupted(self) -> bool:
        """Whether training ends, or this peer must recover or download a state before its next step."""
        return self._stopped.is_set() or self._is_broken or self._is_out_of_sync()

    def _may_begin_step(self) -> bool:
        """Whether the contribution may be loaded now: without delays, gradients only between two local steps."""
        return self.delay_grad_averaging or self._waits_for_step or not self.accumulator.ages

    def _apply_update(self) -> None:
        """Copy the offloaded parameters to the model, if they are newer."""
        if self._has_update:
            with self._update_lock:
                self._has_update = False
                self.accumulator.rebase()

    def finish_pending_update(self) -> None:
        """Wait for the running step, if there is one, and copy its parameters to the model."""
        with self.frozen_state():
            pass

    @contextmanager
    def frozen_state(self) -> Iterator[None]:
        """Keep model, parameters and optimizer statistics at one step, with no step running."""
        with self._step_lock, self._update_lock:
            self._apply_update()
            yield

    @contextmanager
    def saved_state(self) -> Iterator[list[torch.Tensor] | None]:
        """Give the model the parameters of the last global step, and keep the state there, for writing a checkpoint.

        A round may run: it changes none of them before it ends. Yields `unsent` of `begin_at`.
        """
        with self._update_lock:
            self._apply_update()
            with self.accumulator.set_aside() as unsent:
                yield unsent

    # Global steps, in the step thread

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="GlobalSteps", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        if self.state_averager.main_parameters[0].device.type == "cpu":
            use_one_core()  # the others are for the local steps
        while not self._stopped.is_set():
            self._wake.wait(IDLE_SECONDS)
            self._wake.clear()
            try:
                with self._step_lock:
                    self._advance()
            except Exception as error:
                logger.warning(f"Step #{self.local_epoch + 1} failed ({error!r}); trying again", exc_info=True)
                self._report_step()
                self._stopped.wait(1.0)
            finally:
                self._in_step = self._in_round = False
                self._progressed.set()

    def _advance(self) -> None:
        """Search for the group of the next step ahead of time; take the step if it is due."""
        if (missed := self._num_skippable()) > 0:
            self._skip(missed)
        if self._is_interrupted():
            self.coordinator.call_off()
            return
        if self._is_over or not self._may_begin_step():
            return
        is_alone = not self.tracker.num_expected(self.local_epoch + 1)
        if is_alone and self._has_update and not self._waits_for_step:
            return  # the main thread has not reported the previous step yet, and no peer waits for this one
        self.coordinator.look_ahead()
        awaits_local_step = not self._waits_for_step and 0 < self._patience() < math.inf and self.pace.ends_soon()
        if self._is_due() and not awaits_local_step:
            self._take_step(self.local_epoch + 1)

    def _take_step(self, step: int) -> None:
        self._in_step = self._in_round = True
        started = time.monotonic()
        if not all_finite(self._offloaded_parameters()):
            self._is_broken = self._has_update = True  # the main thread finds the values in the model and recovers
            return
        samples = self.accumulator.load()
        logger.info(f"Beginning optimizer step #{step}")
        self.tracker.begin_step(step, samples)
        loaded = time.monotonic()
        # A fast peer computes more samples than the bound in a slow round: they are the mean of more than they count.
        weight = min(float(samples), self.grad_averager.max_weight)
        self.grad_averager.learning_rate.value = self.param_groups[0]["lr"]
        result = self.coordinator.average(step, weight)
        averaged = time.monotonic()
        self._in_round = False
        self._progressed.set()
        if result.outcome == Outcome.STOPPED:
            return
        with self._update_lock:
            used = self._apply_outcome(step, samples, result)
            error = result.error if result.outcome == Outcome.FAILED else ""
            self._records.append(StepRecord(step, result.outcome, used, error))
        seconds = {"load": loaded - started, "round": averaged - loaded, "update": time.monotonic() - averaged}
        if result.outcome != Outcome.ALONE:
            self.pace.rounds.append((averaged, averaged - loaded, result.received == 1 and not result.missed))
        self._log_round(step, samples, result, seconds)
        self._report_step()
        if result.outcome != Outcome.FAILED:
            self.share_state()
        if self._num_failures >= MAX_ABSENCES and self.tracker.is_begun_elsewhere(self.local_epoch + 1):
            self._skip(1)  # nobody waits for this peer: it would be late for each round, but can ask ahead of one

    def _report_step(self) -> None:
        """Report the step that this peer is at, the samples for the next one, and its standing."""
        is_away = self._num_failures >= MAX_FAILURES
        standing = {"distance": min(self.distance, MAX_LAG), "marks": self.state_averager.marks, "away": is_away}
        self.tracker.report_position(self.local_epoch, self.accumulator.num_samples, **standing)

    def _apply_outcome(self, step: int, samples: int, result: RoundResult) -> int | None:
        """Bring the training state to a step. Return this peer's samples in it, see StepRecord."""
        if result.outcome == Outcome.FAILED:
            self._keep_samples(step, samples, result)
            return None
        if result.outcome == Outcome.MISSED:
            self._carry_over(step, samples, result)
            return None
        self.accumulator.confirm()
        self._num_failures = self._num_stuck = 0
        used = round(min(samples, self.grad_averager.max_weight))
        gradients, parameters, kind = result.gradients, None, self.accumulator.name
        if result.outcome == Outcome.AVERAGED:
            self.tracker.record_members(result.members, result.violations)
            used = round(result.weight) if result.distance <= LACKING else None
            parameters = self._take_parameters(step, result)
            logger.info(f"Averaged {kind} with {len(result.members)} peers")
            if result.received < 1:
                silent = "".join(f"; {peer_id} answered nothing" for peer_id in result.silent)
                logger.warning(f"The round of step #{step} was partial: received {result.received:.1%} of it{silent}")
            if result.was_late and time.monotonic() >= self._warn_at:
                self._warn_at = time.monotonic() + WARN_SECONDS
                logger.warning(
                    f"Some gradients of this peer came too late for step #{step}. If its link is slower than the "
                    "others', fewer bits help, or rounds that are rarer"
                )
        else:
            gradients = self.accumulator.contribution
            self.distance, self.coordinator.is_settling = 0.0, False
            if self.grad_averager.includes_parameters(step):
                self._add_mark(step, os.urandom(16), is_alone=True)
            logger.info(f"Nobody else is at step #{step}: proceeding with local {kind}")
        # The norm is that of the average, the same at all peers, as in one process with the samples of all.
        clip_norm(gradients, self.accumulator.bound())
        self.state_averager.apply_update(step, gradients, parameters)
        self.state_averager.local_epoch = step
        self._has_update = True
        return used

    def _keep_samples(self, step: int, samples: int, result: RoundResult) -> None:
        """Try a step again later, for which no group was found."""
        self._num_failures, self._num_stuck = self._num_failures + 1, self._num_stuck + 1
        self._retry_at = time.monotonic() + ROUND_RETRY_SECONDS
        own_id = self.tracker.local_progress.peer_id
        is_first = all(own_id < progress.peer_id for progress in self.tracker.contributing)
        if self._num_stuck >= (MAX_FAILURES if is_first else MAX_FAILURES_OF_OTHERS):
            number = self.tracker.ignore(lambda progress: progress.completed < step)
            logger.warning(
                f"No group for step #{step}, {self._num_stuck} times: taking it without the trainers that this peer "
                f"does not reach ({number})"
            )
            self._num_failures = self._num_stuck = 0
        else:
            logger.warning(f"No group for step #{step} in time: keeping its samples for another try")
        self._take_back(samples, result)

    def _carry_over(self, step: int, samples: int, result: RoundResult) -> None:
        """Count the contribution to a missed step in the next one.

        Gradients of parameters that lack more updates are too old. Local updates are kept.
        """
        self.state_averager.local_epoch = step
        self._num_failures, self._num_stuck = self._num_failures + 1, 0
        self.distance += 1
        if self._num_failures == MAX_FAILURES:
            logger.warning(
                f"This peer has missed {MAX_FAILURES} rounds in a row: it is too late, or reaches no trainer that "
                "leads one. See docs/networking.md. It keeps trying, and the others do not wait for it"
            )
        if self.distance > LACKING and self.accumulator.ages:
            logger.warning(f"Missed the round of step #{step} as well: dropped {samples} samples that are too old")
            return
        logger.info(f"Missed the round of step #{step}: carrying {samples} samples over into the next")
        self._take_back(samples, result)

    def _take_back(self, samples: int, result: RoundResult) -> None:
        """Count the contribution in the next step, unless the members of a round may have used it."""
        if result.may_be_used:
            self.accumulator.confirm()
        else:
            self.accumulator.take_back(samples)

    def _take_parameters(self, step: int, result: RoundResult) -> list[torch.Tensor] | None:
        """Return the averaged parameters and update `distance`; None if the round had none, or they are too far.

        After a repair, the optimizer statistics lack gradients: the parameters settle, without weight until one more
        round with parameters. By then the gradients have faded (0.9^8 = 0.43).
        """
        distance, self.distance = result.distance, result.distance + 1 - result.received
        if result.received_parameters is None:
            return None
        if result.is_far:
            logger.warning(f"The parameters of most peers in the round of step #{step} are far from this peer's")
            # One peer of the group keeps its parameters, and the others receive them in the next round.
            if self.dht.peer_id != min(result.members):
                self.distance = MAX_LAG
            return None
        # As a norm: of 13 updates that 2 % of the elements lack, 1.8 are left.
        self.distance = distance * math.sqrt(1 - result.received_parameters) + 1 - result.received
        self.coordinator.is_settling = distance >= EQUAL
        if self.grad_averager.includes_parameters(step) and result.is_complete:
            self._add_mark(step, result.group_id, is_alone=False)
        return result.parameters

    def _add_mark(self, step: int, mark_id: bytes, is_alone: bool) -> None:
        self.state_averager.marks = add_mark(self.state_averager.marks, step, mark_id, self._num_alone)
        self._num_alone = self._num_alone + 1 if is_alone else 0

    def _log_round(self, step: int, samples: int, result: RoundResult, seconds: dict[str, float]) -> None:
        if self.on_round is None:
            return
        entry = {
            "time": time.time(),
            "step": step,
            "outcome": result.outcome.value,
            "samples": samples,
            "attempts": result.num_attempts,
            "error": result.error,
            "distance": round(self.distance, 3),
            "group": list(map(str, result.members)),
            "received": round(result.received, 4),
            "seconds": {name: round(value, 3) for name, value in {**result.seconds, **seconds}.items()},
        }
        for name in ("weights", "missed", "violations"):
            entry[name] = {str(peer_id): value for peer_id, value in getattr(result, name).items()}
        self.on_round(entry)

    def pop_records(self) -> list[StepRecord]:
        """Return what came of the global steps since the last call."""
        return [self._records.popleft() for _ in range(len(self._records))]

    # Joining and catching up

    def _is_out_of_sync(self) -> bool:
        """Whether the other trainers, the larger side, have another history, or are too far ahead."""
        return not self._in_step and self.tracker.side_to_join is not None and self._num_skippable() <= 0

    def _num_skippable(self) -> int:
        """Return by how many steps the larger side is ahead in this peer's history; 0 if this peer needs its state."""
        other = self.tracker.side_to_join
        if other is None or different_marks(self.state_averager.marks, other.marks) != []:
            return 0
        missed = other.completed - self.local_epoch
        return missed if missed <= MAX_MISSED_UPDATES else 0

    def _skip(self, missed: int) -> None:
        """Continue at the step of the others, as after a sleep."""
        self.coordinator.call_off()
        self._catch_up(missed)
        logger.info(f"Missed {missed} steps: receiving the parameters in the round of step #{self.local_epoch + 1}")

    def _catch_up(self, missed: int) -> None:
        """Pass over steps that the others have taken. They give this peer the updates that it lacks, see Standing."""
        self.state_averager.local_epoch += missed
        self.distance += missed
        self._records.append(StepRecord(self.local_epoch, Outcome.CAUGHT_UP))
        self._report_step()
        self.share_state()

    def load_state_from_peers(self, **_kwargs) -> bool:
        """Download the newest state that a peer offers and that fits; without one, continue with this peer's state.

        If this peer is out of sync, only a state of the other side is used, also one of a lower step.
        """
        self.coordinator.call_off()
        with self._step_lock, self.tracker.pause_updates():
            other, averager, query = self.tracker.side_to_join, self.state_averager, {}
            if other is not None:
                # Offers lag by a step, but a state of this peer's own step is not what it lacks.
                least = max(0, other.completed - (other.completed != self.local_epoch + 1))
                query = {"min_step": least, "credible_step": other.epoch, "marks": other.marks}
            self.tracker.set_away(True)
            with self._update_lock:
                loaded = averager.load_state_from_peers(**query)
            self.tracker.set_away(False)
            if loaded:
                self._has_update = self._is_broken = False
                self.tracker.report_position(self.local_epoch, 0, marks=averager.marks)
                self.tracker.refresh()
                # The other trainers have taken steps during the download. This peer takes part in their current or
                # next round.
                missed = max(0, self.tracker.agreed_step - self.local_epoch)
                missed = missed if missed <= MAX_MISSED_UPDATES else 0
                self.distance, self.coordinator.is_settling = 0.0, missed > 0
                self.accumulator.drop()
                self._catch_up(missed)
                self._failed_loads = 0
            elif other is not None:
                return self._follow_clients(other) or self._ignore_unbacked_claim(other)
        return loaded

    def begin_at(self, step: int, unsent: Sequence[torch.Tensor] | None = None) -> None:
        """Start at global step `step` with the model of a checkpoint, and its local updates that were not sent."""
        self.state_averager.sync_with_main_parameters(step)
        self.distance = 0.0
        self.forget_progress()
        if unsent is not None and isinstance(self.accumulator, LocalTraining):  # a state that is loaded drops them
            clip_norm(unsent, self.accumulator.bound())
            self.accumulator.rebase(unsent)

    def restore(self, metadata: dict, tensors: list[torch.Tensor]) -> None:
        """Replace the training state, as the state averager does, and drop the accumulated gradients."""
        with self._step_lock, self._update_lock:
            self.state_averager.restore(metadata, tensors)
            self._has_update, self.distance = False, 0.0
            self._records.clear()
            self.forget_progress()
            self.accumulator.reset()

    def discard_local_updates(self) -> bool:
        """Return to the finite parameters of the last global step; False if the model has them already."""
        with self.frozen_state():
            if not self.accumulator.can_reset():
                return False
            self.forget_progress()
            self.accumulator.reset()
            return True

    def _follow_clients(self, other: PeerProgress) -> bool:
        """Join trainers that are all in client mode and thus offer no state; False if one is not.

        Only a newcomer does, which has nothing to lose by a lie. It receives their parameters in their rounds.
        """
        others = [other, *self.tracker.live_trainers]
        if self.local_epoch > 0 or not all(progress.client_mode for progress in others):
            return False
        logger.warning(
            "All other trainers are in client mode, and nobody can download a state from them: joining without their "
            "optimizer statistics. Let one trainer have a public address"
        )
        self.state_averager.local_epoch, self.state_averager.marks = other.completed, ()
        self.distance = MAX_LAG
        self.forget_progress()
        self._records.append(StepRecord(other.completed, Outcome.CAUGHT_UP))
        return True

    def _ignore_unbacked_claim(self, other: PeerProgress) -> bool:
        """Record a claim of a step without an offer, and ignore such claims after MAX_FAILED_LOADS. Return False."""
        self._failed_loads += 1
        if self._failed_loads < MAX_FAILED_LOADS:
            self._stopped.wait(1.0)
            self.tracker.refresh()
            return False
        self._failed_loads = 0
        number = self.tracker.ignore(lambda progress: abs(progress.epoch - other.epoch) <= 1)
        logger.warning(f"Ignoring the peers that claim step #{other.epoch} ({number}): nobody offers a state of it")
        return False

    def forget_progress(self) -> None:
        """Drop the accumulated gradients, which belong to previous parameters."""
        self._is_broken = False
        self.accumulator.drop()
        self._report_step()

    def share_state(self) -> None:
        """Offer this peer's state to joining peers, unless it lacks an update. Call it once there is a trained state.

        Only updates that another trainer has count: if all lack the same ones, their states are all there is.
        """
        averager = self.state_averager
        if self.tracker.num_lacking >= 1:
            averager.allow_state_sharing = False
        elif not averager.client_mode:
            averager.offer(priority=averager.applied_step)

    # Shutdown

    def say_goodbye(self) -> None:
        """Announce departure now; pending rounds may outlast the shutdown grace period."""
        self.tracker.shutdown(self.shutdown_timeout)

    def stop_averaging(self) -> None:
        """Cancel the running round and end the step thread."""
        self._stopped.set()
        self._wake.set()
        self.coordinator.stop()
        if self._thread is not None:
            self._thread.join(self.shutdown_timeout)

    def __del__(self) -> None:  # hivemind's shuts down, also what `__init__` has not built
        pass

    def shutdown(self) -> None:
        self.say_goodbye()
        self.stop_averaging()
        self._apply_update()
        self.state_averager.shutdown()
        self.grad_averager.shutdown()
