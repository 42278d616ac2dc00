"""Tests of RoundCoordinator: the outcome of a step's round for each behaviour of the other peers. No processes."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from hivemind.averaging.control import AveragingStage

from peerstep import coordinator as coordinator_module
from peerstep.coordinator import GRACE_SECONDS, RoundCoordinator
from peerstep.rounds import Outcome, RoundResult

RESULT = RoundResult(Outcome.AVERAGED)


class FakeControl:
    """Handle of a round that stays in matchmaking until the test changes its stage."""

    def __init__(self, step: int):
        self.step, self.stage = step, AveragingStage.LOOKING_FOR_GROUP
        self.weight = None
        self.is_called_off = self.has_group = self.began_allreduce = False
        self._is_finished, self._result = False, None

    def allow_allreduce(self) -> None:
        self.is_triggered = True

    def finish(self, result: object) -> None:
        self._is_finished, self._result = True, result

    def done(self) -> bool:
        return self._is_finished or self.is_called_off

    def result(self, timeout: float):
        if isinstance(self._result, Exception):
            raise self._result
        return self._result

    def call_off(self) -> None:
        self.is_called_off = True


class FakeAverager:
    def __init__(self):
        self.controls: list[FakeControl] = []
        self.rosters: list[tuple] = []
        self.requested_step = SimpleNamespace(value=-1)

    def schedule_round(self, step: int, timeout: float, distance: float, is_settling: bool) -> FakeControl:
        self.controls.append(FakeControl(step))
        return self.controls[-1]

    def collect(self, control: FakeControl) -> RoundResult:
        return control.result(timeout=0)

    def set_roster(self, entries, finished_step: int) -> None:
        self.rosters.append((tuple(entries), finished_step))


class FakeTracker:
    """Tracker that reports `others` trainers that have not completed the step, and `done` trainers that have."""

    def __init__(self):
        self.others, self.done, self.next_step, self.seconds_to_step = 2, 0, 5, 0.0
        self.side_to_join, self.is_outranked, self.local_progress = None, False, SimpleNamespace(distance=0.0)
        self.num_looks = 0

    def num_expected(self, _step: int) -> int:
        return self.others

    def is_done_elsewhere(self, _step: int) -> bool:
        return self.done > self.others

    def roster(self, step: int) -> list:
        return [step, self.others]

    def refresh_in(self, _seconds: float) -> None:
        self.num_looks += 1


class Clock:
    """Clock that only `sleep` moves. What is planned with `at` happens meanwhile."""

    def __init__(self):
        self.now, self._plans = 0.0, []

    def at(self, seconds: float, action: Callable[[], object]) -> None:
        """Schedule an action in this number of seconds."""
        self._plans.append((self.now + seconds, action))

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for plan in [plan for plan in self._plans if plan[0] <= self.now]:
            self._plans.remove(plan)
            plan[1]()


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """The clock of the coordinator, whose rounds run in the test's thread."""
    clock = Clock()
    monkeypatch.setattr(coordinator_module, "time", clock)
    return clock


Parts = tuple[RoundCoordinator, FakeTracker, FakeAverager]


@pytest.fixture
def parts(clock) -> Parts:
    tracker, averager = FakeTracker(), FakeAverager()
    return RoundCoordinator(tracker, averager, matchmaking_time=5.0, averaging_timeout=60.0), tracker, averager


@pytest.mark.parametrize(("done", "outcome"), [(2, Outcome.MISSED), (0, Outcome.ALONE)])
def test_search_ends_once_the_others_have_completed_the_step_or_left(parts, clock, done, outcome):
    coordinator, tracker, averager = parts
    clock.at(1.0, lambda: vars(tracker).update(others=0, done=done))
    assert coordinator.average(5, 8.0).outcome == outcome
    (control,) = averager.controls
    assert 1 < clock.now < 2 + GRACE_SECONDS and control.is_called_off
    assert tracker.num_looks > 0, "it keeps looking at the reports"


def test_trainer_takes_no_step_alone_while_another_side_may_outrank_it(parts, clock):
    coordinator, tracker, averager = parts
    tracker.others, tracker.is_outranked = 0, True
    clock.at(20.0, lambda: setattr(tracker, "side_to_join", "a trainer of the other side"))
    assert coordinator.average(5, 8.0).outcome == Outcome.MISSED and averager.controls[0].is_called_off
    assert clock.now > 20
    tracker.side_to_join, tracker.is_outranked, averager.requested_step.value = None, False, 5
    clock.at(20.0, lambda: setattr(averager.requested_step, "value", -1))  # the peer that has asked has left
    assert coordinator.average(5, 8.0).outcome == Outcome.ALONE
    assert clock.now > 40


def test_revoked_report_does_not_end_the_search(parts, clock):
    coordinator, tracker, averager = parts

    def report() -> None:
        tracker.done = 0 if tracker.done else 3
        clock.at(0.7 * GRACE_SECONDS, report)

    clock.at(0.1, report)
    clock.at(10 * GRACE_SECONDS, lambda: averager.controls[-1].finish(RESULT))
    assert coordinator.average(5, 8.0).outcome == Outcome.AVERAGED


def test_running_all_reduce_is_not_abandoned(parts, clock):
    coordinator, tracker, averager = parts

    def begin() -> None:
        (control,) = averager.controls
        assert (control.step, control.weight, control.is_triggered) == (5, 8.0, True)
        control.stage = AveragingStage.RUNNING_ALLREDUCE
        tracker.others, tracker.done = 0, 2

    clock.at(1.0, begin)
    clock.at(50.0, lambda: averager.controls[0].finish(RESULT))
    assert coordinator.average(5, 8.0).outcome == Outcome.AVERAGED and clock.now >= 50


def test_lone_peer_skips_matchmaking(parts):
    coordinator, tracker, averager = parts
    tracker.others = 0
    coordinator.look_ahead()
    assert coordinator.average(5, 8.0).outcome == Outcome.ALONE
    assert not averager.controls


def test_failed_round_is_retried_for_the_same_step(parts, clock):
    coordinator, _, averager = parts
    clock.at(1.0, lambda: averager.controls[0].finish(RuntimeError("a member left")))
    clock.at(2.0, lambda: averager.controls[1].finish(RESULT))
    result = coordinator.average(5, 8.0)
    assert result.outcome == Outcome.AVERAGED and not result.may_be_used, "no member has seen the contribution"
    assert [control.step for control in averager.controls] == [5, 5]
    assert result.num_attempts == 2 and "a member left" in result.error and averager.controls[1].weight == 8.0


@pytest.mark.parametrize("fails", [True, False], ids=["failed", "called off as it begins"])
def test_contribution_that_members_may_have_used_counts_no_second_time(parts, clock, fails):
    coordinator, tracker, averager = parts

    def begin() -> None:
        averager.controls[0].began_allreduce = True
        if fails:
            averager.controls[0].finish(RuntimeError("out of memory"))

    clock.at(1.0, begin)
    clock.at(2.0, lambda: vars(tracker).update(others=0, done=2))
    result = coordinator.average(5, 8.0)
    assert result.outcome == Outcome.MISSED and result.may_be_used
    assert [control.weight for control in averager.controls] == ([8.0, 0.0] if fails else [8.0])


def test_timeout_halves_with_each_failed_step(parts, clock, monkeypatch):
    coordinator, *_ = parts

    def seconds_of_a_step() -> float:
        started = clock.now
        assert coordinator.average(5, 8.0).outcome == Outcome.FAILED
        return clock.now - started - GRACE_SECONDS

    assert [round(seconds_of_a_step()) for _ in range(4)] == [60, 30, 15, 8], "the last is 1.5 matchmaking times"
    with monkeypatch.context() as patch:
        patch.setattr(FakeControl, "done", lambda control: control.finish(RESULT) or True)
        assert coordinator.average(5, 8.0).outcome == Outcome.AVERAGED
    assert round(seconds_of_a_step()) == 60, "a round has succeeded"


def test_stop_ends_a_round_at_once(parts, clock):
    coordinator, _, averager = parts
    clock.at(1.0, coordinator.stop)
    assert coordinator.average(5, 8.0).outcome == Outcome.STOPPED and averager.controls[0].is_called_off
    assert clock.now < 1.5


def test_matchmaking_begins_ahead_of_the_step(parts, clock):
    coordinator, tracker, averager = parts
    tracker.seconds_to_step = 6.0
    coordinator.look_ahead()
    assert not averager.controls, "too early"
    tracker.seconds_to_step = 4.0
    coordinator.look_ahead()
    coordinator.look_ahead()
    assert [control.step for control in averager.controls] == [5]
    assert not coordinator.has_group
    averager.controls[0].has_group = True
    assert coordinator.has_group
    clock.at(1.0, lambda: averager.controls[0].finish(RESULT))
    assert coordinator.average(5, 8.0).outcome == Outcome.AVERAGED and len(averager.controls) == 1


def test_search_for_an_outdated_step_is_cancelled(parts):
    coordinator, tracker, averager = parts
    coordinator.look_ahead()
    tracker.next_step = 7
    coordinator.look_ahead()
    assert averager.controls[0].is_called_off
    assert [control.step for control in averager.controls] == [5, 7]


def test_search_may_be_stopped_by_another_thread_at_any_moment(parts, monkeypatch):
    coordinator, _, averager = parts
    coordinator.look_ahead()
    (control,) = averager.controls
    monkeypatch.setattr(control, "done", lambda: bool(coordinator.stop()))  # stopped while `look_ahead` looks
    coordinator.look_ahead()
    assert len(averager.controls) == 1 and control.is_called_off


def test_request_of_another_peer_refreshes_the_reports(parts):
    coordinator, tracker, averager = parts
    tracker.seconds_to_step = 100.0
    coordinator.look_ahead()
    assert tracker.num_looks == 0
    averager.requested_step.value = 5
    coordinator.look_ahead()
    assert tracker.num_looks == 1 and not averager.controls
