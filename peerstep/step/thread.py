"""The step thread: from a due global step to its outcome."""

import math
import os
import threading
import time
from enum import Enum

import torch
from hivemind.utils import get_logger
from threadpoolctl import threadpool_limits

from peerstep.progress.view import View
from peerstep.reports.progress_report import LACKING
from peerstep.rounds.averager import RoundAverager
from peerstep.rounds.matchmaking import MAX_ABSENCES
from peerstep.rounds.result import Outcome, RoundResult
from peerstep.state.layout import all_finite
from peerstep.state.membership import MAX_FAILURES, shared
from peerstep.step.accumulators import clip_norm
from peerstep.step.coordinator import RoundCoordinator, StepRecord
from peerstep.step.joining import Joining, is_out_of_sync, num_skippable
from peerstep.step.log import StepLog
from peerstep.step.shared_model import SharedModel

logger = get_logger(__name__)

IDLE_SECONDS = 0.1  # polling interval for a due step
ROUND_RETRY_SECONDS = 1.0  # after a failed round, for a local step of a peer that computes nothing during rounds


def use_one_core() -> None:
    """Limit the calling thread to one OpenMP thread.

    With more OpenMP threads than cores, GNU's library puts idle ones to sleep. Waking them for each operation of the
    main thread took 12 to 47 % of the speed of a trainer on two cores.
    """
    torch.get_num_threads()  # torch sets the limit of a thread at its first use
    threadpool_limits(1, user_api="openmp")


class Phase(Enum):
    """What the step thread does."""

    IDLE = "idle"
    ROUND = "round"
    UPDATE = "update"


class StepThread(threading.Thread):
    """Takes the global steps. The main thread wakes it after each local step, and may wait for it."""

    accumulator = shared("model.accumulator")
    membership = shared("joining.membership")
    pace = shared("log.pace")

    def __init__(
        self,
        averager: RoundAverager,
        coordinator: RoundCoordinator,
        model: SharedModel,
        joining: Joining,
        log: StepLog,
    ):
        super().__init__(name="GlobalSteps", daemon=True)
        self.averager, self.coordinator, self.model = averager, coordinator, model
        self.joining, self.log = joining, log
        self.state_averager, self.tracker = joining.state_averager, joining.tracker
        self.options = coordinator.options
        self.last_step: int | None = None  # no step beyond this one is taken
        self.phase = Phase.IDLE
        self.device_error: torch.AcceleratorError | None = None  # has ended this thread
        self.is_awaited = False  # whether the main thread waits in `wait_for_step`
        self._wake, self._progressed = threading.Event(), threading.Event()
        self._retry_at = 0.0  # `time.monotonic`

    # For the main thread

    def wait_for_step(self) -> None:
        """Wait for a global step that is due or runs: until it ends without delays, and for short rounds with them."""
        seconds = self._patience()
        until = time.monotonic() + seconds
        with self.tracker.pause_updates():
            self.is_awaited = seconds > 0
            self._wake.set()
            try:
                while time.monotonic() < until and self.may_begin_step() and self._has_step():
                    self._progressed.wait(IDLE_SECONDS)
                    self._progressed.clear()
            finally:
                self.is_awaited = False

    def _has_step(self) -> bool:
        """Whether a step is due, or runs, for which the main thread waits."""
        view = self.tracker.view()
        if self._is_over or self.is_interrupted(view):
            return False
        # The order matters: a step that begins in between is marked as busy before it stops being due.
        waits_for_update = self.options.delay_grad_averaging or not self.options.delay_optimizer_step
        return self.is_due(view) or self.phase in ((Phase.ROUND, Phase.UPDATE) if waits_for_update else (Phase.ROUND,))

    def _patience(self) -> float:
        """Return the seconds for which a local step waits for a global step that is due or runs.

        With delays it waits for short rounds, too. Gradients of old parameters make a step worth less, see
        docs/tuning.md. Local updates are not of the parameters of a step, and lose nothing.
        """
        if not self.options.delay_grad_averaging:
            return math.inf
        return self.pace.patience() if self.accumulator.ages else 0.0

    def stop(self, timeout: float) -> None:
        """Cancel the running round and end the thread."""
        self.coordinator.stop()
        self._wake.set()
        if self.ident is not None:
            self.join(timeout)

    # Whether to take a step

    def is_due(self, view: View) -> bool:
        """Whether to take the next step now; not at once after a failed round."""
        is_due = view.seconds_to_step <= 0 or self.coordinator.has_group(view.next_step)
        return is_due and time.monotonic() >= self._retry_at

    @property
    def _is_over(self) -> bool:
        return self.last_step is not None and self.membership.step >= self.last_step

    def is_interrupted(self, view: View) -> bool:
        """Whether training ends, or this peer must recover or download a state before its next step."""
        return self.coordinator.stopped.is_set() or self.model.is_broken or self.needs_state(view)

    def needs_state(self, view: View) -> bool:
        """Whether this peer must download a state, unless a step runs."""
        return self.phase == Phase.IDLE and is_out_of_sync(view, self.membership)

    def may_begin_step(self) -> bool:
        """Whether the contribution may be loaded now: without delays, gradients only between two local steps."""
        return self.options.delay_grad_averaging or self.is_awaited or not self.accumulator.ages

    def run(self) -> None:
        if self.state_averager.main_parameters[0].device.type == "cpu":
            use_one_core()  # the others are for the local steps
        while not self.coordinator.stopped.is_set():
            self._wake.wait(IDLE_SECONDS)
            self._wake.clear()
            try:
                with self.model.step_lock:
                    self.advance()
            except torch.AcceleratorError as error:  # no later call on the device works
                self.device_error = error
                self.coordinator.stopped.set()
            except Exception as error:
                step = self.membership.step + 1
                logger.warning(f"Step #{step} failed at this peer ({error!r}); trying again")
                logger.debug("The step failed at this peer", exc_info=True)
                self.membership.failed(is_unreached=False)
                self.joining.report()
                self.coordinator.stopped.wait(ROUND_RETRY_SECONDS)
            finally:
                self.phase = Phase.IDLE
                self._progressed.set()

    def advance(self) -> None:
        """Search for the group of the next step ahead of time; take the step if it is due."""
        if self.membership.is_paused:
            return self.coordinator.call_off()
        view = self.tracker.view()
        if (missed := num_skippable(view, self.membership)) > 0:
            self._skip(missed)
            view = self.tracker.view()
        if self.is_interrupted(view):
            self.coordinator.call_off()
            return
        if self._is_over:
            return
        is_alone = not view.num_expected(self.membership.step + 1)
        if is_alone and self.model.has_update and not self.is_awaited:
            return  # the main thread has not reported the previous step yet, and no peer waits for this one
        self.coordinator.look_ahead(view)  # also during a local step: with a long one, it would ask too late after it
        awaits_local_step = not self.is_awaited and 0 < self._patience() < math.inf and self.pace.ends_soon()
        if self.may_begin_step() and self.is_due(view) and not awaits_local_step:
            self.take_step(self.membership.step + 1)

    def _skip(self, missed: int) -> None:
        self.coordinator.call_off()
        self.joining.skip(missed)

    # A step

    def take_step(self, step: int) -> None:
        self.phase, started = Phase.ROUND, time.monotonic()
        if not all_finite(self.state_averager.layout.parameters):
            # The main thread finds the values in the model and recovers.
            self.model.is_broken = self.model.has_update = True
            return
        samples = self.accumulator.load()
        logger.info(f"Beginning optimizer step #{step}")
        self.tracker.begin_step(step, samples)
        loaded = time.monotonic()
        result = self._average(step, samples)
        averaged = time.monotonic()
        self.phase = Phase.UPDATE
        self._progressed.set()
        if result.outcome == Outcome.STOPPED:
            return
        with self.model.update_lock:
            used = self.apply_outcome(step, samples, result)
            error = result.error if result.outcome == Outcome.FAILED else ""
            seconds = {"load": loaded - started, "round": averaged - loaded, "update": time.monotonic() - averaged}
            # Before the record: what the caller publishes of a step names the members of its round.
            self.log.write_round(step, samples, self.membership.distance, result, seconds)
            self.log.add(StepRecord(step, result.outcome, used, error))
        if result.outcome != Outcome.ALONE:
            self.pace.rounds.append((averaged, averaged - loaded, result.received == 1 and not result.missed))
        self.joining.report()
        if result.outcome != Outcome.FAILED:
            self.joining.share_state()
        is_late = result.outcome == Outcome.MISSED and self.membership.failures >= MAX_ABSENCES
        if is_late and self.tracker.view().half_have_begun(self.membership.step + 1):
            self._skip(1)  # nobody waits for this peer: it would be late for each round, but can ask ahead of one

    def _average(self, step: int, samples: int) -> RoundResult:
        # In a slow round a fast peer computes more samples than the bound: their mean then counts for fewer samples.
        weight = min(float(samples), self.averager.max_weight)
        optimizer = self.accumulator.inner or self.state_averager.optimizer
        self.averager.learning_rate.value = optimizer.param_groups[0]["lr"]
        try:
            return self.coordinator.average(step, weight)
        except Exception as error:
            logger.warning(f"The round of step #{step} failed at this peer ({error!r})")
            return RoundResult(Outcome.FAILED, error=repr(error), may_be_used=self.coordinator.may_be_used)

    def apply_outcome(self, step: int, samples: int, result: RoundResult) -> int | None:
        """Bring the training state to a step. Return this peer's samples in it, see StepRecord."""
        if result.outcome == Outcome.FAILED:
            self._keep_samples(step, samples, result)
            return None
        if result.outcome == Outcome.MISSED:
            self._carry_over(step, samples, result)
            return None
        self.accumulator.confirm()
        used, name = round(min(samples, self.averager.max_weight)), self.accumulator.name
        includes_parameters = self.averager.includes_parameters(step)
        if result.outcome == Outcome.AVERAGED:
            self.tracker.record_round(result.members, result.violations, [*result.missed, *result.silent])
            used = round(result.weight) if result.distance <= LACKING else None
            if result.is_far and result.received_parameters is not None:
                logger.warning(f"The parameters of most peers in the round of step #{step} are far from this peer's")
            parameters = None if result.is_far else result.parameters
            logger.info(f"Averaged {name} with {len(result.members)} peers")
            self.log.warn_about(step, result)
            self._update(step, result.gradients, parameters)
            keeps_own = self.averager.dht.peer_id == min(result.members)
            self.membership.averaged(step, result, is_marked=includes_parameters, keeps_own=keeps_own)
        else:
            logger.info(f"Nobody else is at step #{step}: proceeding with local {name}")
            self._update(step, self.accumulator.contribution, None)
            self.membership.took_alone(step, os.urandom(16) if includes_parameters else None)
        self.model.has_update = True
        return used

    def _update(self, step: int, gradients, parameters) -> None:
        # The norm is that of the average, the same at all peers, as in one process with the samples of all.
        clip_norm(gradients, self.accumulator.bound())
        self.state_averager.apply_update(step, gradients, parameters)

    def _keep_samples(self, step: int, samples: int, result: RoundResult) -> None:
        """Try a step again later, for which no group was found."""
        is_unreached = result.num_attempts > 0
        self.membership.failed(is_unreached)
        self._retry_at = time.monotonic() + ROUND_RETRY_SECONDS
        self._take_back(samples, result)
        view = self.tracker.view()
        if not is_unreached or view.is_dependent or not self.membership.gives_up(view.is_first):
            logger.warning(f"No group for step #{step} in time: keeping its samples for another try")
            return
        number = self.tracker.ignore(progress for progress in view.live if progress.completed < step)
        logger.warning(
            f"No group for step #{step}, {self.membership.attempts} times: taking it without the trainers that this "
            f"peer does not reach ({number})"
        )
        self.membership.failures = self.membership.attempts = 0

    def _carry_over(self, step: int, samples: int, result: RoundResult) -> None:
        """Count the contribution to a missed step in the next one.

        Gradients of parameters that lack more updates are too old. Local updates are kept.
        """
        self.membership.missed(step)
        if self.membership.failures == MAX_FAILURES:
            logger.warning(
                f"This peer has missed {MAX_FAILURES} rounds in a row: it is too late, or reaches no trainer that "
                "leads one. See docs/networking.md. It keeps trying, and the others do not wait for it"
            )
        if self.membership.distance > LACKING and self.accumulator.ages:
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
