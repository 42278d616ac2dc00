"""Tests of RoundCoordinator: the outcome of a step's round for each behaviour of the other peers. No processes."""

from collections.abc import Callable

import pytest
from hivemind.averaging.control import AveragingStage

from peerstep.options import Options
from peerstep.rounds.result import Outcome, RoundResult
from peerstep.state.membership import Membership
from peerstep.step import coordinator as coordinator_module
from peerstep.step.coordinator import GRACE_SECONDS, RoundCoordinator

RESULT = RoundResult(Outcome.AVERAGED)


class FakeControl:
    """Handle of a round that stays in matchmaking until the test changes its stage."""

    def __init__(self, step: int):
        self.step, self.stage, self.weight = step, AveragingStage.LOOKING_FOR_GROUP, None
        self.is_called_off = self.has_group = self.began_allreduce = self.is_triggered = False
        self.outcome: object = None  # a result or an error, once the round has ended

    def allow_allreduce(self) -> None:
        self.is_triggered = True

    def finish(self, outcome: object) -> None:
        self.outcome = outcome

    def done(self) -> bool:
        return self.outcome is not None or self.is_called_off

    def call_off(self) -> None:
        self.is_called_off = True


class World:
    """Clock, averager and progress tracker of a coordinator. Only `sleep` moves the clock.

    `others` trainers have not completed the step, and `num_done` trainers have.
    """

    def __init__(self):
        self.now, self._plans = 0.0, []
        self.controls: list[FakeControl] = []
        self.rosters: list[tuple] = []
        self.requested_step = -1
        self.others, self.num_done, self.next_step, self.seconds_to_step, self.num_looks = 2, 0, 5, 0.0, 0
        self.side_to_join = self.outranking = None
        self.doubt = 0.0
        self.membership = Membership()

    @property
    def control(self) -> FakeControl:
        """The only round so far."""
        (control,) = self.controls
        return control

    # The clock

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

    # The averager

    def schedule(self, step: int, timeout: float, distance: float, is_settling: bool) -> FakeControl:
        self.controls.append(FakeControl(step))
        return self.controls[-1]

    def collect(self, control: FakeControl) -> RoundResult:
        if isinstance(control.outcome, Exception):
            raise control.outcome
        return control.outcome

    def set_roster(self, entries, finished_step: int) -> None:
        self.rosters.append((tuple(entries), finished_step))

    # The tracker, and its view

    def view(self) -> "World":
        return self

    def num_expected(self, _step: int) -> int:
        return self.others

    def most_have_completed(self, _step: int) -> bool:
        return self.num_done > self.others

    def roster(self, step: int) -> list:
        return [step, self.others]

    def hear_all(self) -> None:
        self.has_heard = True

    def refresh_in(self, _seconds: float) -> None:
        self.num_looks += 1


@pytest.fixture
def world(monkeypatch) -> World:
    monkeypatch.setattr(coordinator_module, "time", world := World())
    return world


@pytest.fixture
def coordinator(world) -> RoundCoordinator:
    return RoundCoordinator(world, world, world.membership, Options(batch_size_per_step=4))


@pytest.mark.parametrize(("done", "outcome"), [(2, Outcome.MISSED), (0, Outcome.ALONE)])
def test_search_ends_once_the_others_have_completed_the_step_or_left(coordinator, world, done, outcome):
    world.at(1.0, lambda: vars(world).update(others=0, num_done=done))
    assert coordinator.average(5, 8.0).outcome == outcome
    assert 1 < world.now < 2 + GRACE_SECONDS and world.control.is_called_off
    assert world.num_looks > 0, "it keeps looking at the reports"


def test_trainer_takes_no_step_alone_while_another_side_may_outrank_it(coordinator, world):
    world.others, world.outranking = 0, "a trainer of the other side"
    world.at(20.0, lambda: setattr(world, "side_to_join", "a trainer of the other side"))
    assert coordinator.average(5, 8.0).outcome == Outcome.MISSED and world.controls[0].is_called_off
    assert world.now > 20
    world.side_to_join, world.outranking, world.requested_step = None, None, 5
    world.at(20.0, lambda: setattr(world, "requested_step", -1))  # the peer that has asked has left
    assert coordinator.average(5, 8.0).outcome == Outcome.ALONE
    assert world.now > 40


def test_revoked_report_does_not_end_the_search(coordinator, world):
    def report() -> None:
        world.num_done = 0 if world.num_done else 3
        world.at(0.7 * GRACE_SECONDS, report)

    world.at(0.1, report)
    world.at(10 * GRACE_SECONDS, lambda: world.controls[-1].finish(RESULT))
    assert coordinator.average(5, 8.0).outcome == Outcome.AVERAGED


def test_running_all_reduce_is_not_abandoned(coordinator, world):
    def begin() -> None:
        control = world.control
        assert (control.step, control.weight, control.is_triggered) == (5, 8.0, True)
        control.stage = AveragingStage.RUNNING_ALLREDUCE
        world.others, world.num_done = 0, 2

    world.at(1.0, begin)
    world.at(50.0, lambda: world.controls[0].finish(RESULT))
    assert coordinator.average(5, 8.0).outcome == Outcome.AVERAGED and world.now >= 50


def test_lone_peer_skips_matchmaking(coordinator, world):
    world.others = 0
    coordinator.look_ahead(world)
    assert coordinator.average(5, 8.0).outcome == Outcome.ALONE
    assert not world.controls


def test_failed_round_is_retried_for_the_same_step(coordinator, world):
    world.at(1.0, lambda: world.controls[0].finish(RuntimeError("a member left")))
    world.at(2.0, lambda: world.controls[1].finish(RESULT))
    result = coordinator.average(5, 8.0)
    assert result.outcome == Outcome.AVERAGED and not result.may_be_used, "no member has seen the contribution"
    assert [control.step for control in world.controls] == [5, 5]
    assert result.num_attempts == 2 and "a member left" in result.error and world.controls[1].weight == 8.0


@pytest.mark.parametrize("fails", [True, False], ids=["failed", "called off as it begins"])
def test_contribution_that_members_may_have_used_counts_no_second_time(coordinator, world, fails):
    def begin() -> None:
        world.controls[0].began_allreduce = True
        if fails:
            world.controls[0].finish(RuntimeError("out of memory"))

    world.at(1.0, begin)
    world.at(2.0, lambda: vars(world).update(others=0, num_done=2))
    result = coordinator.average(5, 8.0)
    assert result.outcome == Outcome.MISSED and result.may_be_used
    assert [control.weight for control in world.controls] == ([8.0, 0.0] if fails else [8.0])


def test_timeout_halves_with_each_failed_step(coordinator, world):
    def seconds_of_a_step() -> float:
        started = world.now
        assert coordinator.average(5, 8.0).outcome == Outcome.FAILED
        world.membership.failed()
        return world.now - started - GRACE_SECONDS

    assert [round(seconds_of_a_step()) for _ in range(4)] == [60, 30, 15, 13], "the last is enough for a small group"
    world.membership.loaded(0)
    assert round(seconds_of_a_step()) == 60, "it has joined the others"


def test_stop_ends_a_round_at_once(coordinator, world):
    world.at(1.0, coordinator.stop)
    assert coordinator.average(5, 8.0).outcome == Outcome.STOPPED and world.controls[0].is_called_off
    assert world.now < 1.5


def test_matchmaking_begins_ahead_of_the_step(coordinator, world):
    world.seconds_to_step = 6.0
    coordinator.look_ahead(world)
    assert not world.controls, "too early"
    world.doubt = 2.0
    coordinator.look_ahead(world)
    assert world.controls.pop(), "the last read is long ago"
    coordinator.call_off()
    world.seconds_to_step, world.doubt = 4.0, 0.0
    coordinator.look_ahead(world)
    coordinator.look_ahead(world)
    assert world.control.step == 5 and not coordinator.has_group(5)
    assert world.rosters == [((5, 2), 4)], "a roster is sent when it has changed"
    world.controls[0].has_group = True
    assert coordinator.has_group(5) and not coordinator.has_group(6)
    world.at(1.0, lambda: world.controls[0].finish(RESULT))
    assert coordinator.average(5, 8.0).outcome == Outcome.AVERAGED and len(world.controls) == 1


def test_search_for_an_outdated_step_is_cancelled(coordinator, world):
    coordinator.look_ahead(world)
    world.next_step = 7
    coordinator.look_ahead(world)
    assert world.controls[0].is_called_off
    assert [control.step for control in world.controls] == [5, 7]


def test_search_may_be_stopped_by_another_thread_at_any_moment(coordinator, world, monkeypatch):
    coordinator.look_ahead(world)
    control = world.control
    monkeypatch.setattr(control, "done", lambda: bool(coordinator.stop()))  # stopped while `look_ahead` looks
    coordinator.look_ahead(world)
    assert len(world.controls) == 1 and control.is_called_off


def test_request_of_another_peer_refreshes_the_reports(coordinator, world):
    world.seconds_to_step = 100.0
    coordinator.look_ahead(world)
    assert world.num_looks == 0
    world.requested_step = 5
    coordinator.look_ahead(world)
    assert world.num_looks == 1 and not world.controls and world.has_heard, "it reaches this one"
