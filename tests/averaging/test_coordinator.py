"""Tests of RoundCoordinator: the outcome of a step's round for each behaviour of the other peers. No processes."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from hivemind.averaging.control import AveragingStage

from cotrain.averaging import coordinator as coordinator_module
from cotrain.averaging.coordinator import Outcome, RoundCoordinator
from cotrain.averaging.round_log import RoundLog
from tests.support.peers import wait_until


class FakeControl:
    """Handle of a round that stays in matchmaking until the test changes its stage."""

    def __init__(self, number: int):
        self.number, self.stage = number, AveragingStage.LOOKING_FOR_GROUP
        self.weight = None
        self.is_called_off = self.has_group = self.began_allreduce = False
        self._finished, self._result = threading.Event(), None

    def allow_allreduce(self) -> None:
        self.is_triggered = True

    def finish(self, result: object) -> None:
        self._result = result
        self._finished.set()

    def done(self) -> bool:
        return self._finished.is_set() or self.is_called_off

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
        self.requested_number = SimpleNamespace(value=-1)

    def schedule_round(self, number: int, timeout: float, distance: float, is_settling: bool) -> FakeControl:
        self.controls.append(FakeControl(number))
        return self.controls[-1]

    def set_roster(self, entries, finished_number: int) -> None:
        self.rosters.append((tuple(entries), finished_number))


class FakeTracker:
    """Tracker that reports `others` trainers that have not completed the step, and `done` trainers that have."""

    def __init__(self):
        self.others, self.done, self.next_step, self.seconds_to_step = 2, 0, 5, 0.0
        self.rival, self.is_outranked, self.local_progress = None, False, SimpleNamespace(distance=0.0)
        self.num_looks = 0

    def num_expected(self, _step: int) -> int:
        return self.others

    def is_done_elsewhere(self, _step: int) -> bool:
        return self.done > self.others

    def roster(self, step: int) -> list:
        return [step, self.others]

    def refresh_in(self, _seconds: float) -> None:
        self.num_looks += 1


@pytest.fixture
def parts(monkeypatch):
    monkeypatch.setattr(coordinator_module, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr(coordinator_module, "LOOK_SECONDS", 0.1)
    tracker, averager = FakeTracker(), FakeAverager()
    coordinator = RoundCoordinator(tracker, averager, matchmaking_time=5.0, averaging_timeout=60.0)
    with ThreadPoolExecutor(1) as pool:
        yield coordinator, tracker, averager, pool
        coordinator.stop()


class Clock:
    """Clock that only `sleep` moves; each time it calls `go_on`."""

    def __init__(self):
        self.now, self.go_on = 0.0, lambda: None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.go_on()


@pytest.fixture
def clock(parts, monkeypatch) -> Clock:
    """The clock of a coordinator whose rounds run in the test's thread."""
    clock = Clock()
    monkeypatch.setattr(coordinator_module, "time", clock)
    return clock


def begin(parts, number: int = 5):
    """Begin the round of a step in a thread; return the future of its result, and the newest handle."""
    coordinator, _, averager, pool = parts
    future = pool.submit(coordinator.average, number, 8.0)
    wait_until(lambda: averager.controls or future.done(), 5, "a search")
    return future, averager.controls[-1] if averager.controls else None


@pytest.mark.parametrize(("done", "outcome"), [(2, Outcome.MISSED), (0, Outcome.ALONE)])
def test_search_ends_once_the_others_have_completed_the_step_or_left(parts, done, outcome):
    _, tracker, _, _ = parts
    future, control = begin(parts)
    tracker.others, tracker.done = 0, done
    started = time.monotonic()
    assert future.result(5)[0] == outcome
    assert time.monotonic() - started < 2 and control.is_called_off
    assert tracker.num_looks > 0, "it keeps looking at the reports"


def test_trainer_takes_no_step_alone_while_another_side_may_outrank_it(parts):
    _, tracker, averager, _ = parts
    tracker.others, tracker.is_outranked = 0, True
    future, control = begin(parts)
    tracker.rival = "a trainer of the other side"
    assert future.result(5)[0] == Outcome.MISSED and control.is_called_off
    tracker.rival, tracker.is_outranked, averager.requested_number.value = None, False, 5
    future, _ = begin(parts)
    averager.requested_number.value = -1  # the peer that has asked for the group has left
    assert future.result(5)[0] == Outcome.ALONE


def test_revoked_report_does_not_end_the_search(parts, clock):
    coordinator, tracker, averager, _ = parts

    def go_on() -> None:
        tracker.done = 3 if clock.now % 0.3 < 0.14 else 0  # GRACE_SECONDS is 0.2
        if clock.now > 2:
            averager.controls[-1].finish("result")

    clock.go_on = go_on
    assert coordinator.average(5, 8.0)[0] == Outcome.AVERAGED


def test_running_all_reduce_is_not_abandoned(parts):
    _, tracker, _, _ = parts
    future, control = begin(parts)
    assert (control.number, control.weight, control.is_triggered) == (5, 8.0, True)
    control.stage = AveragingStage.RUNNING_ALLREDUCE
    tracker.others, tracker.done = 0, 2
    time.sleep(0.5)
    assert not future.done()
    control.finish("result")
    assert future.result(5) == (Outcome.AVERAGED, "result")


def test_lone_peer_skips_matchmaking(parts):
    coordinator, tracker, averager, _ = parts
    tracker.others = 0
    coordinator.look_ahead()
    assert coordinator.average(5, 8.0)[0] == Outcome.ALONE
    assert not averager.controls


def test_failed_round_is_retried_for_the_same_step(parts):
    coordinator, _, averager, _ = parts
    future, control = begin(parts)
    control.finish(RuntimeError("a member left"))
    wait_until(lambda: len(averager.controls) == 2, 5, "another search")
    assert averager.controls[1].number == 5
    averager.controls[1].finish("result")
    assert future.result(5) == (Outcome.AVERAGED, "result")
    assert coordinator.num_attempts == 2 and "a member left" in coordinator.last_error
    assert averager.controls[1].weight == 8.0 and not coordinator.has_sent, "no member has seen the contribution"


@pytest.mark.parametrize("fails", [True, False], ids=["failed", "called off as it begins"])
def test_contribution_that_members_may_have_used_counts_no_second_time(parts, fails):
    coordinator, tracker, averager, _ = parts
    future, control = begin(parts)
    control.began_allreduce = True
    if fails:
        control.finish(RuntimeError("out of memory"))
        wait_until(lambda: len(averager.controls) == 2, 5, "another search")
        wait_until(lambda: averager.controls[1].weight is not None, 5, "its weight")
        assert averager.controls[1].weight == 0.0
    tracker.others, tracker.done = 0, 2
    assert future.result(5)[0] == Outcome.MISSED and coordinator.has_sent


def test_timeout_halves_with_each_failed_step(parts, clock, monkeypatch):
    coordinator, *_ = parts

    def seconds_of_a_step() -> float:
        started = clock.now
        assert coordinator.average(5, 8.0)[0] == Outcome.FAILED
        return clock.now - started

    assert [round(seconds_of_a_step()) for _ in range(4)] == [60, 30, 15, 8], "the last is 1.5 matchmaking times"
    with monkeypatch.context() as patch:
        patch.setattr(FakeControl, "done", lambda _control: True)
        assert coordinator.average(5, 8.0)[0] == Outcome.AVERAGED
    assert round(seconds_of_a_step()) == 60, "a round has succeeded"


def test_stop_ends_a_round_at_once(parts):
    coordinator, *_ = parts
    future, control = begin(parts)
    coordinator.stop()
    assert future.result(2)[0] == Outcome.STOPPED and control.is_called_off


def test_matchmaking_begins_ahead_of_the_step(parts):
    coordinator, tracker, averager, _ = parts
    tracker.seconds_to_step = 6.0
    coordinator.look_ahead()
    assert not averager.controls, "too early"
    tracker.seconds_to_step = 4.0
    coordinator.look_ahead()
    coordinator.look_ahead()
    assert [control.number for control in averager.controls] == [5]
    assert not coordinator.has_group
    averager.controls[0].has_group = True
    assert coordinator.has_group
    future, control = begin(parts)
    assert control is averager.controls[0]
    control.finish("result")
    assert future.result(5)[0] == Outcome.AVERAGED


def test_search_for_an_outdated_step_is_cancelled(parts):
    coordinator, tracker, averager, _ = parts
    coordinator.look_ahead()
    tracker.next_step = 7
    coordinator.look_ahead()
    assert averager.controls[0].is_called_off
    assert [control.number for control in averager.controls] == [5, 7]


def test_search_may_be_stopped_by_another_thread_at_any_moment(parts, monkeypatch):
    coordinator, _, averager, _ = parts
    coordinator.look_ahead()
    (control,) = averager.controls
    monkeypatch.setattr(control, "done", lambda: bool(coordinator.stop()))  # stopped while `look_ahead` looks
    coordinator.look_ahead()
    assert len(averager.controls) == 1 and control.is_called_off


def test_request_of_another_peer_refreshes_the_reports(parts):
    coordinator, tracker, averager, _ = parts
    tracker.seconds_to_step = 100.0
    coordinator.look_ahead()
    assert tracker.num_looks == 0
    averager.requested_number.value = 5
    coordinator.look_ahead()
    assert tracker.num_looks == 1 and not averager.controls


def test_averager_receives_changed_rosters_only(parts):
    coordinator, tracker, averager, _ = parts
    for _ in range(3):
        coordinator.update_roster()
    assert averager.rosters == [((5, 2), 4)]
    tracker.others = 3
    coordinator.update_roster()
    assert len(averager.rosters) == 2


def test_log_has_a_line_for_each_round(tmp_path):
    path = tmp_path / "output" / "rounds.jsonl"
    for step in (1, 2):
        RoundLog(path.parent).write({"step": step, "outcome": Outcome.AVERAGED.value})
    assert [json.loads(line)["step"] for line in path.read_text(encoding="utf-8").splitlines()] == [1, 2]


def test_unwritable_log_is_ignored(tmp_path):
    (tmp_path / "rounds.jsonl").mkdir()
    RoundLog(tmp_path).write({"step": 1})
