"""Coordination of a peer's rounds: from a due global step to the outcome of its round, whatever other peers do."""

import math
import threading
import time
from dataclasses import dataclass, field, replace

from hivemind.averaging.control import AveragingStage
from hivemind.utils import get_logger

from peerstep.options import Options
from peerstep.peer.clock import run_time
from peerstep.progress.tracker import ProgressTracker
from peerstep.progress.view import View
from peerstep.rounds.client import RoundClient
from peerstep.rounds.matchmaking import LEADER_MARGIN, POLL_SECONDS, SMALL_SECONDS, RoundControl
from peerstep.rounds.result import Outcome, RoundResult
from peerstep.state.membership import Membership

logger = get_logger(__name__)

# Interval between two reads of the progress reports while a round waits for other peers: doubled after each read, up
# to the maximum.
LOOK_SECONDS, MAX_LOOK_SECONDS = 0.5, 2.0
# Time for which the reports must give the same reason before a search is abandoned.
GRACE_SECONDS = 1.0


@dataclass(frozen=True)
class StepRecord:
    """What came of a global step, or of an attempt at it, at this peer."""

    step: int
    outcome: Outcome
    samples: int | None = None  # of this peer, as its reducers have weighted them; None: the step is without this peer
    error: str = ""  # of a failed round, on any number of lines
    time: float = field(default_factory=run_time)  # at its end


@dataclass
class RoundCoordinator:
    """Searches for a group ahead of time, averages in it, and gives up when the progress reports say so."""

    tracker: ProgressTracker
    rounds: RoundClient
    membership: Membership
    options: Options

    def __post_init__(self):
        self.stopped = threading.Event()
        self.control: RoundControl | None = None
        self._step: int | None = None  # step of the running round
        self._num_attempts, self._error = 0, ""  # of that round, see RoundResult
        self.may_be_used = False  # the same of the newest round
        self._told: tuple | None = None  # roster and finished step that the averager's process has received last
        self._lock = threading.Lock()
        self.tracker.on_refresh = self.update_roster

    def update_roster(self) -> None:
        """Send the roster of the next round to the averager's process. The tracker calls it after each refresh."""
        with self._lock:
            view = self.tracker.view()
            step = view.next_step if self._step is None else self._step
            told = view.roster(step), step - 1
            if told != self._told:
                self._told = told
                self.rounds.set_roster(*told)

    def has_group(self, step: int) -> bool:
        """Whether the group of a step is formed and waits for this peer."""
        control = self.control
        return control is not None and control.has_group and control.step == step

    def look_ahead(self, view: View) -> None:
        """Start the search for the group of the next step if the step is due soon and other trainers are there."""
        step = view.next_step
        control = self.control  # `stop` may reset it in another thread
        if control is not None and (control.done() or control.step != step):
            self.call_off()
        if self.control is not None or self.stopped.is_set():
            return
        is_soon = view.seconds_to_step <= self.options.matchmaking_time + view.doubt
        if self.options.batch_size_lead and not is_soon:
            is_soon = view.estimate[0] >= view.target_batch_size - self.options.batch_size_lead
        if 0 <= self.rounds.requested_step - step <= 1:  # another peer already searches for the group
            self.tracker.hear_all()
            if not is_soon:
                self.tracker.refresh_in(LOOK_SECONDS)
        if is_soon and view.num_expected(step):
            self._schedule(step, self.options.matchmaking_time + self.options.averaging_timeout)

    def _schedule(self, step: int, timeout: float) -> RoundControl:
        self.update_roster()
        self.control = self.rounds.schedule(step, timeout, **self.membership.claims())
        return self.control

    def call_off(self) -> None:
        """Leave the group of the next step, or cancel the search for it."""
        control, self.control = self.control, None
        if control is not None:
            control.call_off()

    def average(self, step: int, weight: float) -> RoundResult:
        """Run the round of a step, after `tracker.begin_step`."""
        self._step, self._num_attempts, self._error, self.may_be_used = step, 0, "", False
        self.update_roster()
        deadline = time.monotonic() + self.timeout
        try:
            while (result := self._attempt(step, weight, deadline)) is None:
                time.sleep(POLL_SECONDS)
        finally:
            self._step, control = None, self.control
            self.call_off()
            self.may_be_used |= control is not None and control.began_allreduce
        return replace(result, num_attempts=self._num_attempts, error=self._error, may_be_used=self.may_be_used)

    @property
    def timeout(self) -> float:
        """Seconds for the next round: fewer after rounds in vain, since the other peers may be unreachable.

        The least is enough for a group of less than two thirds, which a leader begins late. With 1.5 times the
        matchmaking time three of five trainers formed no group for 30 s: a late one and a false leader did not join.
        """
        seconds = math.ldexp(self.options.averaging_timeout, -self.membership.vain)
        return max(seconds, self.options.matchmaking_time + SMALL_SECONDS + 2 * LEADER_MARGIN)

    def _attempt(self, step: int, weight: float, deadline: float) -> RoundResult | None:
        """Search for a group and average in it; None if the attempt failed and can be repeated."""
        self._num_attempts += 1
        control = self.control
        if control is None or control.done() or control.step != step:
            if (reason := self._reason_to_give_up(step, deadline)) is not None:
                return RoundResult(reason)
            control = self._schedule(step, max(1.0, deadline - time.monotonic()))
        control.weight = 0.0 if self.may_be_used else weight
        control.allow_allreduce()
        reason, since, look_at, look_seconds = None, 0.0, time.monotonic(), LOOK_SECONDS
        while not (control.done() or self.stopped.is_set()):
            now = time.monotonic()
            if now >= look_at + look_seconds:
                look_at, look_seconds = now, min(2 * look_seconds, MAX_LOOK_SECONDS)
                self.tracker.refresh_in(0.0)
            if control.stage != AveragingStage.RUNNING_ALLREDUCE:
                before, reason = reason, self._reason_to_give_up(step, deadline)
                since = since if reason == before else now
                if reason is not None and now >= since + GRACE_SECONDS:
                    return RoundResult(reason)
            time.sleep(POLL_SECONDS)
        if self.stopped.is_set():
            return RoundResult(Outcome.STOPPED)
        self.control = None
        try:
            return self.rounds.collect(control)
        except BaseException as error:
            self.may_be_used |= control.began_allreduce
            self._error = str(error) or type(error).__name__
            logger.warning(f"The round of step #{step} failed: {self._error}")
            return None

    def _reason_to_give_up(self, step: int, deadline: float) -> Outcome | None:
        if self.stopped.is_set():
            return Outcome.STOPPED
        view = self.tracker.view()
        if view.side_to_join is not None or view.most_have_completed(step):
            return Outcome.MISSED
        is_asked = self.rounds.requested_step == step
        if not (is_asked or view.num_expected(step) or view.outranking is not None):
            return Outcome.ALONE
        return Outcome.FAILED if time.monotonic() >= deadline else None

    def stop(self) -> None:
        """Cancel the running round and start no other."""
        self.stopped.set()
        self.call_off()
