"""Tests of ProgressTracker: how a peer uses the progress reports of other peers. No DHT, no processes."""

import functools
import math
import random
import sys
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hivemind.utils import MSGPackSerializer
from hivemind.utils.mpfuture import MPFuture
from hivemind.utils.timed_storage import ValueWithExpiration

from peerstep.options import Options
from peerstep.peer.clock import run_time
from peerstep.progress import other_trainers as others_module
from peerstep.progress import tracker as progress_module
from peerstep.progress import view as view_module
from peerstep.progress.tracker import ProgressTracker
from peerstep.progress.view import ALIVE_SECONDS, HEARTBEAT_SECONDS, View
from peerstep.reports.progress_report import PROTOCOL, PeerProgress, parse_progress, read_progress
from peerstep.reports.records import READ_TIMEOUT, is_readable, signer_of
from tests.support.simulated_network import make_subkey


@functools.cache
def subkey(number: int) -> bytes:
    """Return the subkey of the records of peer `number`."""
    return make_subkey(random.Random(number))


def peer_id(number: int) -> bytes:
    return signer_of(subkey(number)).to_bytes()


class FakeDHT:
    """One DHT key in memory."""

    peer_id, client_mode, is_open = signer_of(subkey(0)), False, True

    def __init__(self):
        self.records: dict[bytes, object] = {}
        self.answers = True

    def get(self, _key: str, **_options) -> MPFuture:
        future = MPFuture()
        if self.answers:
            values = {subkey: ValueWithExpiration(value, 1e12) for subkey, value in self.records.items()}
            future.set_result(ValueWithExpiration(values, 1e12))
        return future

    def store(self, _key: str, value: object, _expires: float, subkey: bytes, **_options) -> None:
        self.records[subkey] = value


@pytest.fixture(autouse=True)
def clock(monkeypatch) -> SimpleNamespace:
    """The clock of trackers and reports; tests set it."""
    clock = SimpleNamespace(now=1000.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr("hivemind.utils.performance_ema.time", SimpleNamespace(perf_counter=clock.monotonic))
    for module in (progress_module, others_module, sys.modules[__name__]):
        monkeypatch.setattr(module, "run_time", lambda: 1e9 + clock.now)
    monkeypatch.setattr(progress_module, "time", clock)
    return clock


def make_tracker(target: int = 100, **args) -> ProgressTracker:
    options = Options(batch_size_per_step=1, target_batch_size=target, **args)
    return ProgressTracker(FakeDHT(), "run", options, public_key=subkey(0))


def record(number: int, epoch: int = 0, samples: int = 0, rate: float = 0.0, age: float = 0.0, **fields) -> dict:
    """Build a progress report of peer `number`.

    :param age: seconds since the report
    """
    now = run_time()
    return {
        "protocol": PROTOCOL, "schema": "", "number": number, "epoch": epoch, "completed": epoch,
        "samples_accumulated": samples, "contributed": 0, "samples_per_second": rate, "time": now - age,
        "reported_at": now - age, "client_mode": False, "distance": 0.0, "away": False,
        "marks": [], **fields,
    }  # fmt: skip


def see(tracker: ProgressTracker, *records: object) -> ProgressTracker:
    """Let a tracker read the records of some peers."""
    numbers = [value.get("number", 9) if isinstance(value, dict) else 9 for value in records]
    tracker.dht.records = {subkey(number): value for number, value in zip(numbers, records, strict=True)}
    progress_module.time.now += 1e-6  # the read begins after what the tracker has done
    tracker.begin_read()
    assert tracker.finish_read()
    return tracker


def compute(tracker: ProgressTracker, samples: int) -> None:
    """Report so many samples for the next step."""
    tracker.report_samples(samples, tracker.local_progress.epoch)


# Valid and invalid reports


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": -1}, {"epoch": 2**31}, {"epoch": 1.0}, {"epoch": True}, {"completed": "1"}, {"completed": None},
        {"samples_accumulated": 10**9}, {"samples_accumulated": -1}, {"contributed": 10**12}, {"contributed": 0.5},
        {"samples_per_second": float("nan")}, {"samples_per_second": float("inf")}, {"samples_per_second": -1.0},
        {"time": float("inf")}, {"reported_at": float("nan")}, {"reported_at": "now"},
        {"client_mode": 1}, {"away": 0}, {"distance": -1.0}, {"distance": 1e7},
        {"marks": None}, {"marks": [[8, "00"]]}, {"marks": [[8, 12 * "0"], [8, 12 * "0"]]},
        {"marks": [[step, 12 * "0"] for step in range(9)]}, {"marks": [[-1, 12 * "0"]]}, {"marks": [8]},
        {"reported_at": None}, {"samples_accumulated": 10**9 + 1}, None, 5, [1], "text",
    ],
)  # fmt: skip
def test_invalid_reports_are_ignored(change):
    report = {**record(1, epoch=5), **change} if isinstance(change, dict) else change
    tracker = see(make_tracker(), report, record(2))
    assert [progress.peer_id for progress in tracker.view().others] == [peer_id(2)]


def test_report_with_marks_passes_the_validators_and_is_read_by_others():
    tracker = make_tracker()
    tracker.report_position(8, 10, distance=0.5, marks=((8, 12 * "a"),))
    tracker.publish_report()
    ((key, value),) = tracker.dht.records.items()
    packed = MSGPackSerializer.dumps(value)
    assert is_readable(packed)
    assert parse_progress(signer_of(key).to_bytes(), MSGPackSerializer.loads(packed)).marks == ((8, 12 * "a"),)


def test_peers_that_train_otherwise_are_ignored_with_one_warning(monkeypatch):
    warnings = []
    monkeypatch.setattr(others_module.logger, "warning", warnings.append)
    tracker = make_tracker()
    for _ in range(3):
        reports = {**record(1, epoch=7, samples=10**6), "protocol": 1}, {"number": 2, "epoch": 9}
        see(tracker, *reports, {**record(3, epoch=7, samples=10**6), "schema": "other"})
    assert not tracker.view().others and tracker.view().seconds_to_step > 0
    assert len(warnings) == 3 and f"protocol 1, this trainer has {PROTOCOL}" in warnings[0] and "Update" in warnings[0]
    assert "another model" in warnings[2] and len(tracker.view().misfits) == 3


def test_observers_count_the_trainers_that_average_with_each_other():
    """The monitor and the evaluator have no rounds of their own: the schema of most trainers counts."""
    reports = {number: record(number, schema="run") for number in (1, 2, 3)}
    others = [record(4, protocol=3, schema="run"), record(5, schema="other"), record(6, epoch=-1), None, 7]
    assert read_progress(reports | dict(enumerate(others, 4))).keys() == reports.keys()
    assert read_progress({}) == {}
    strangers = {number: record(number, schema="other") for number in range(4, 9)}
    assert read_progress(reports | strangers).keys() == strangers.keys()
    assert read_progress(reports | strangers, proven=[2, 3, "away"]).keys() == reports.keys()


def test_members_of_the_last_rounds_are_asked_in_each_read(monkeypatch):
    """Those in client mode cannot be called."""
    tracker, asked = see(make_tracker(), record(1), {**record(2), "client_mode": True}), []
    monkeypatch.setattr(others_module, "MIN_MEMBERS", 2)
    monkeypatch.setattr(tracker.dht, "get", lambda _key, **options: asked.append(options["members"]))
    for members in ([], [1, 2], [3], [1], [4]):
        tracker.record_round([signer_of(subkey(number)) for number in members], (), ())
        tracker.begin_read()
    assert asked == [[], [peer_id(1)], [peer_id(1), peer_id(3)], [peer_id(3), peer_id(1)], [peer_id(1), peer_id(4)]]


@pytest.mark.parametrize(("number", "seconds"), [(16, 0.0), (132, 10.0)])
def test_waiting_trainers_of_a_large_run_read_rarely(clock, number, seconds):
    """With 256 trainers who waited for a round, each read all reports 7 times a minute."""
    tracker = see(make_tracker(), *(record(peer) for peer in range(1, 1 + number)))
    tracker.next_read_at = math.inf
    clock.now += 1.0
    tracker.refresh_in(0.0)
    assert tracker.next_read_at == pytest.approx(clock.now + max(0.0, seconds - 1.0), abs=0.01)
    clock.now += 2.0
    tracker.report_position(1, 0)  # the reports may be of before this step
    assert tracker.next_read_at <= clock.now + tracker.options.min_refresh_period


def test_who_waits_for_a_read_of_a_large_run_has_it_at_once(clock):
    """Otherwise it continued with old reports after READ_TIMEOUT."""
    tracker = see(make_tracker(), *(record(peer) for peer in range(1, 513)))
    clock.now += 1.0
    tracker.refresh(timeout=0.0)
    assert tracker.next_read_at <= clock.now


def test_samples_are_extrapolated_until_the_next_read_of_a_large_run(clock):
    """Reads of 128 trainers are 26 s apart, and a report is up to 5 s old when it is read."""
    tracker = see(make_tracker(10_000), *(record(peer, rate=1.0) for peer in range(1, 129)))
    clock.now += 20.0
    before = tracker.view().seconds_to_step
    clock.now += 14.0
    assert tracker.view().seconds_to_step == pytest.approx(before - 14.0, abs=0.1)


def test_estimates_are_doubted_where_reads_are_rare(clock):
    tracker = see(make_tracker(), record(1))
    assert tracker.view().doubt == 0.0
    clock.now += 30.0
    assert tracker.view().doubt == pytest.approx(5.0)


def test_banned_and_ignored_peers_do_not_count():
    tracker = see(make_tracker(), record(1, epoch=1), record(2, epoch=3))
    members = {signer_of(subkey(number)) for number in (1, 2)}
    tracker.record_round(members, {signer_of(subkey(2)): "NaN"}, ())
    assert [progress.epoch for progress in tracker.view().others] == [1]
    assert tracker.ignore(p for p in tracker.view().live if p.epoch == 1) == 1
    assert not tracker.view().others
    tracker.record_round(members - {signer_of(subkey(2))}, {}, ())
    assert [progress.epoch for progress in tracker.view().others] == [1], "this peer has averaged with it"


def test_silence_is_ignored_for_a_short_time_that_grows_until_the_peer_is_reached(clock):
    """A lie is ignored for ten minutes."""
    tracker, lifetimes = make_tracker(), []
    members = [signer_of(subkey(1))]
    for reached in (None, None, None, None, tracker.hear_all, lambda: tracker.record_round(members, (), ()), None):
        see(tracker, record(1), record(2))
        assert tracker.ignore(p for p in tracker.view().live if p.peer_id == peer_id(1)) == 1
        since = clock.now
        if reached is not None:
            reached()
            assert len(tracker.view().others) == 2
        while len(see(tracker, record(1), record(2)).view().others) < 2:
            clock.now += 5
        lifetimes.append(round(clock.now - since))
        clock.now += 5
    assert lifetimes == [30, 60, 120, 120, 0, 0, 30]
    tracker.record_round(members, members, ())
    clock.now += 590
    assert len(see(tracker, record(1), record(2)).view().others) == 1


def test_trainer_that_is_not_heard_is_not_ignored(clock):
    """It counts for nothing anyway, and at once when it is back, as after a sleep."""
    tracker = see(make_tracker(), old := record(1))
    clock.now += ALIVE_SECONDS
    assert see(tracker, old).ignore(tracker.view().live) == 0
    assert len(see(tracker, record(1)).view().live) == 1


def test_report_speaks_for_its_signer_only():
    """With a report in the name of each other trainer, one peer made all believe that they were alone."""
    tracker = make_tracker()
    tracker.report_position(4, 0)
    tracker.dht.records = {subkey(number): record(number, epoch=4, samples=10) for number in (1, 2)}
    tracker.dht.records |= {b"x" + subkey(3): record(3), b"id": record(4), subkey(0): record(0)}
    tracker.dht.records[subkey(5)] = {**record(1, epoch=5), "peer_id": peer_id(1)}
    tracker.begin_read()
    assert tracker.finish_read()
    assert {progress.peer_id: progress.epoch for progress in tracker.view().others} == {
        peer_id(1): 4, peer_id(2): 4, peer_id(5): 5,
    }  # fmt: skip
    assert tracker.view().num_expected(5) == 2


# When a step is due


@pytest.mark.parametrize(
    ("own", "reports", "total", "is_due"),
    [
        (20, [{"samples": 40}, {"samples": 30}], 90, False),
        (30, [{"samples": 40}, {"samples": 30}], 100, True),
        (0, [{"samples": 10**9 - 1}, {"samples": 30}], 130, True),  # a claim counts for one step at most
        # Otherwise the step would no longer be due for slower peers as soon as the first peer has begun it
        (10, [{"epoch": 1, "completed": 0, "contributed": 40}, {"samples": 30}, {"samples": 20}], 100, True),
        (50, [{"samples": 50, "rate": 5.0}, {}, {}, {}], 100, True),  # newcomers make nobody count for less
    ],
)
def test_step_is_due_with_enough_samples_in_total(own, reports, total, is_due, clock):
    tracker = see(make_tracker(target=100), *(record(number, **report) for number, report in enumerate(reports, 1)))
    clock.now += 10.0  # at a higher rate, the missing samples would be expected at once
    compute(tracker, own)
    assert tracker.view().estimate[0] == total and (tracker.view().seconds_to_step == 0) == is_due


def test_samples_of_other_steps_do_not_count():
    tracker = see(make_tracker(target=100), record(1, epoch=1, samples=80), record(2, epoch=0, samples=50))
    tracker.begin_step(3, 0)
    assert tracker.view().estimate[0] == 0


@pytest.mark.parametrize(("invited", "seconds"), [(False, 60.0), (True, 0.0)])
@pytest.mark.parametrize("number", [3, 15])
@pytest.mark.parametrize("age", [0.0, 61.0])
def test_claim_of_a_target_batch_does_not_make_a_step_due(number, invited, seconds, age):
    """One of the others claims it right after a step; in a run with invitations such claims are believed."""
    tracker = make_tracker(target=(number + 1) * 1000)
    tracker.dht.is_open = not invited
    honest = [record(peer + 1, samples=8, rate=8.0) for peer in range(number)]
    see(tracker, *honest, record(99, samples=10**6, rate=10**6, time=run_time() - age))
    compute(tracker, 8)
    assert tracker.view().seconds_to_step >= seconds and (tracker.view().seconds_to_step == 0) == invited
    assert invited or tracker.view().estimate[0] <= 0.02 * tracker.options.target_batch_size


def test_trainers_that_are_stuck_make_nobody_count_for_less(clock):
    """They report, and compute nothing: otherwise the others' samples would make no step due any more."""
    tracker = make_tracker(target=100)
    for _ in range(15):
        clock.now += HEARTBEAT_SECONDS
        stuck = [record(number, reported_at=run_time(), time=run_time() - clock.now) for number in (2, 3, 4)]
        see(tracker, record(1, samples=60, rate=1.0), *stuck)
    compute(tracker, 50)
    assert tracker.view().seconds_to_step == 0


@pytest.mark.parametrize(
    ("epochs", "is_due"), [([1], True), ([1, 0], True), ([1, 0, 0], False), ([1, 1, 0], True), ([0, 0], False)]
)
def test_step_is_due_when_half_of_the_others_have_begun_it(epochs, is_due):
    reports = [record(number + 1, epoch=epoch) for number, epoch in enumerate(epochs)]
    assert (see(make_tracker(target=10**6), *reports).view().seconds_to_step == 0) == is_due


@pytest.mark.parametrize(("age", "reported", "samples"), [(14.0, 14.0, 250.0), (100.0, 0.0, 3000.0)])
def test_samples_are_extrapolated_for_one_heartbeat_after_the_report_and_a_minute_after_the_samples(
    age, reported, samples
):
    now = run_time()
    tracker = see(make_tracker(target=10_000), record(1, rate=50.0, time=now - age, reported_at=now - reported))
    assert tracker.view().seconds_to_step == pytest.approx((10_000 - samples) / 50, abs=1.0)


def test_reads_of_many_reports_are_rarer_and_samples_extrapolated_until_the_next(monkeypatch, clock):
    """Each read of 100 peers costs them 0.7 MB. The step is due in the meantime."""
    tracker = see(make_tracker(target=1000), record(1, rate=25.0), record(2, rate=25.0))
    assert tracker.refresh_period() < 15.0
    for module in (progress_module, view_module):
        monkeypatch.setattr(module, "SECONDS_PER_PEER", 10.0)
    assert tracker.refresh_period() == 30.0
    clock.now += 15.0
    assert tracker.view().seconds_to_step == pytest.approx(5.0, abs=0.5)
    clock.now += 5.5
    assert tracker.view().seconds_to_step == pytest.approx(0.0, abs=0.1)


def test_step_is_not_due_before_new_reports_are_read():
    tracker = see(make_tracker(target=100), record(1, samples=90))
    tracker.report_position(1, 0)
    compute(tracker, 100)
    assert tracker.view().seconds_to_step > 0, "the other may be at this step by now"
    see(tracker, record(1, epoch=1, samples=10))
    assert tracker.view().seconds_to_step == 0


def test_read_that_began_before_the_last_step_says_nothing_about_the_next(clock):
    """It may be ten seconds under way. Neither is the step due, nor another side confirmed."""
    tracker = see(make_tracker(target=100), record(1, samples=90))
    tracker.dht.records = {subkey(1): record(1, samples=95), subkey(2): record(2, epoch=40, marks=OLD)}
    tracker.begin_read()
    clock.now += 5
    tracker.report_position(1, 0)
    compute(tracker, 100)
    assert tracker.finish_read() and tracker.view().seconds_to_step > 0 and tracker.view().num_reads_apart == 0
    assert tracker.next_read_at <= clock.now + tracker.options.min_refresh_period
    see(tracker, record(1, epoch=1))
    assert tracker.view().seconds_to_step == 0


def test_trainers_that_bring_no_round_through_count_for_nothing(clock):
    """Whatever they report: two of four do not join, or send nothing. Their parameters lack what they missed."""
    tracker = make_tracker(target=100)
    tracker.report_position(4, 90)
    ids = [signer_of(subkey(number)) for number in range(4)]

    def read(**failing: object) -> View:
        clock.now += 10
        others = (record(number, epoch=5, completed=4, contributed=20, **failing) for number in (2, 3))
        return see(tracker, record(1, epoch=4), *others).view()

    for fruitless, members in ((ids[2:], ids[:2]), (ids[2:], ids)):  # outside of the group, and silent in it
        assert read(distance=1.0).seconds_to_step == 0, "half have begun"
        tracker.record_round(members, (), fruitless)
    view = read(distance=1.0)
    assert view.seconds_to_step > 0 and [p.peer_id for p in view.contributing] == [peer_id(1)]
    assert [entry.is_away for entry in view.roster(5)] == [False, False, True, True], "they do not lead"
    assert read(distance=0.0).seconds_to_step == 0, "they are as many, in rounds of their own"
    tracker.record_round(ids, (), ())
    assert read(distance=1.0).seconds_to_step == 0


def test_trainer_waits_for_those_behind_for_some_steps_at_most(clock):
    tracker = make_tracker()
    for step, seconds in ((1, 3.0), (2, 3.0)):
        clock.now += seconds
        tracker.report_position(step, 0)
    compute(tracker, 1000)
    for age, is_due in ((11.0, False), (2.0, True)):
        clock.now += age
        view = see(tracker, record(1, epoch=1), record(2, epoch=1)).view()
        assert (view.seconds_to_step == 0) == is_due


def test_lone_peer_needs_all_samples_for_its_step(clock):
    """The step of a lone peer is not due before that, whatever its rate predicts."""
    tracker = make_tracker(target=100)
    for samples in range(10, 100, 10):
        clock.now += 1.0
        compute(tracker, samples)
    clock.now += 10.0
    assert tracker.view().seconds_to_step > 0
    compute(tracker, 100)
    assert tracker.view().seconds_to_step == 0


def test_waiting_does_not_count_as_slow_training(clock):
    tracker = make_tracker()
    for samples in (10, 20):
        clock.now += 1.0
        compute(tracker, samples)
        with tracker.pause_updates():
            clock.now += 100.0
    assert tracker.local_progress.samples_per_second == pytest.approx(10.0)


# Roster


def roster(tracker: ProgressTracker, step: int) -> dict[int, tuple[bool, bool]]:
    """Return the roster of a step: number of a peer -> (is_client, is_established)."""
    numbers = {peer_id(number): number for number in range(10)}
    return {
        numbers[entry.peer_id.to_bytes()]: (entry.is_client, entry.is_established)
        for entry in tracker.view().roster(step)
    }


def test_roster_has_the_live_peers_of_the_step():
    tracker = make_tracker()
    assert roster(see(tracker, record(1)), 1) == {0: (False, False), 1: (False, False)}, "nobody is established"
    tracker.report_position(4, 0)
    see(
        tracker,
        record(1, epoch=4),
        record(2, epoch=5, completed=4, client_mode=True),
        record(3, epoch=5, completed=5),
        record(4, epoch=3),
        record(5, epoch=6),
        record(8, epoch=4, completed=0),
    )
    assert roster(tracker, 5) == {0: (False, True), 1: (False, True), 2: (True, True), 8: (False, False)}
    assert tracker.view().num_expected(5) == 4, "the one that is a step behind, too"


@pytest.mark.parametrize(
    ("completed", "is_done"), [([5], True), ([4], False), ([5, 4], False), ([5, 5, 4], True), ([], False)]
)
def test_step_is_done_elsewhere_if_most_peers_report_it(completed, is_done):
    """One false report among several does not end the round of this peer."""
    reports = [record(number + 1, epoch=5, completed=value) for number, value in enumerate(completed)]
    tracker = make_tracker()
    tracker.report_position(4, 0)
    assert see(tracker, *reports).view().most_have_completed(5) == is_done


OLD = [[8, 12 * "1"]]


@pytest.mark.parametrize(
    ("own_step", "others", "joins"),
    [
        (11, [(11, OLD)], None),  # the same side
        (11, [(12, OLD)], None),
        (11, [(40, OLD)], 40),  # one at each side
        (11, [(11, OLD), (11, OLD), (40, OLD)], None),  # the larger side stays
        (40, [(11, OLD), (11, OLD), (11, OLD)], 11),
        (11, [(30_000, [])], None),  # who has no mark knows no history
        (0, [(40, []), (40, []), (1, [])], 40),  # nothing is known of the histories
        (40, [(0, []), (0, []), (0, [])], None),  # newcomers
    ],
)
def test_smaller_side_joins_the_larger_one(own_step, others, joins, clock):
    tracker = make_tracker()
    tracker.report_position(own_step, 0, marks=tuple(map(tuple, OLD if own_step else [])))
    for _ in range(2):
        assert tracker.view().side_to_join is None, "one answer may be old"
        see(tracker, *(record(number + 1, epoch=step, marks=marks) for number, (step, marks) in enumerate(others)))
        clock.now += 1
    assert (tracker.view().side_to_join and tracker.view().side_to_join.epoch) == joins
    assert (tracker.view().outranking is not None) == (joins is not None)
    if joins == 40:
        tracker.report_position(own_step := own_step + 1, 0)
        assert tracker.view().side_to_join, "it has passed one of many steps that are over"
    tracker.report_position(own_step, 0)
    assert tracker.view().side_to_join is None, "the reports that are known may be of the step before"


def test_trainer_that_is_ahead_waits_for_most_of_the_others(clock):
    tracker = make_tracker()
    tracker.report_position(11, 0)
    compute(tracker, 1000)
    see(tracker, *(record(number, epoch=10, samples=1) for number in range(1, 4)))
    assert tracker.view().num_expected(12) == 3 and tracker.view().seconds_to_step > 0
    see(tracker, record(1, epoch=10), record(2, epoch=11), record(3, epoch=11))
    assert tracker.view().seconds_to_step == 0


def test_peers_that_lack_updates_or_are_away_make_no_step_due(clock):
    tracker = make_tracker()
    clock.now += 10
    compute(tracker, 10)
    see(tracker, record(1, samples=500, distance=3.0), record(2, samples=500, away=True))
    assert tracker.view().seconds_to_step > 0
    assert tracker.view().num_expected(1) == 1, "the group may repair the first one; nobody waits for the second"
    see(tracker, record(1, samples=500, distance=2.0))
    assert tracker.view().seconds_to_step == 0
    tracker.report_position(0, 10, distance=3.0)
    clock.now += 20
    see(tracker, record(1, samples=500, distance=2.0))
    assert tracker.view().num_lacking == 1.0
    see(tracker, record(1, samples=500, distance=3.0))
    assert tracker.view().seconds_to_step == 0 and tracker.view().num_lacking == 0, "all lack the same"


@pytest.mark.parametrize("reason", ["away", "lacks updates"])
def test_trainer_that_does_not_count_sees_a_step_due_when_the_others_do(clock, reason):
    """It counted its own samples alone: its search was over before the others', and it was in no round for good.

    With local updates, one that returned from a pause of ten minutes missed three rounds.
    """
    tracker = make_tracker()
    if reason == "away":
        tracker.set_away(True)
    else:
        tracker.report_position(0, 0, distance=14.0)
    see(tracker, record(1, samples=80))
    compute(tracker, 60)
    assert tracker.view().estimate[0] == 80 and tracker.view().seconds_to_step > 0
    clock.now += 60.0
    see(tracker)  # nobody is there: it has to take its steps alone
    assert tracker.view().estimate[0] == 60


def test_one_claim_to_lack_nothing_leaves_the_others_counting(clock):
    """Three trainers have missed three rounds. One key that claimed 0 made the others count for nothing."""
    tracker = make_tracker()
    tracker.report_position(0, 10, distance=3.0)
    clock.now += 10
    see(tracker, record(1, distance=3.0), record(2, distance=3.0), record(3, distance=0.0))
    assert len(tracker.view().contributing) == 3 and tracker.view().num_lacking == 0
    see(tracker, *(record(number, distance=0.0) for number in (1, 2)))
    assert tracker.view().num_lacking == 3.0, "most others lack nothing"


def test_answer_without_a_peer_does_not_erase_it(clock):
    tracker = see(make_tracker(), record(1), record(2))
    assert see(tracker, record(1)).view().num_expected(1) == 2
    tracker.dht.records[subkey(2)] = None
    tracker.begin_read()
    assert tracker.finish_read() and tracker.view().num_expected(1) == 1, "it has said goodbye"
    clock.now += ALIVE_SECONDS
    assert see(tracker).view().num_expected(1) == 0


def test_samples_of_a_step_that_began_meanwhile_are_not_counted_twice():
    tracker = make_tracker()
    tracker.begin_step(1, 96)
    tracker.report_samples(96, step=0)
    assert tracker.local_progress.samples_accumulated == 0


@pytest.mark.parametrize(
    ("epochs", "completed", "agreed", "credible"),
    [
        ([], [], 0, None),
        ([5], [5], 5, 5),
        ([5, 10**6], [5, 10**6], 10**6, 5),
        ([5, 5, 10**6], [5, 5, 10**6], 5, 5),
        ([8, 8], [7, 7], 7, 8),  # a newcomer that reported step 8 as completed would be left without its update
    ],
)
def test_step_of_the_run(epochs, completed, agreed, credible):
    reports = zip(epochs, completed, strict=True)
    tracker = see(make_tracker(), *(record(n + 1, epoch=e, completed=c) for n, (e, c) in enumerate(reports)))
    assert (tracker.view().agreed_step, tracker.view().credible_step) == (agreed, credible)


# Background thread


def test_reports_are_rate_limited_except_for_new_steps(clock):
    tracker = make_tracker()
    compute(tracker, 1)
    assert tracker.own.report_at <= clock.now
    tracker.publish_report()
    clock.now += 0.1
    compute(tracker, 2)
    assert tracker.own.report_at == pytest.approx(1000.5), "fast local steps do not flood the DHT"
    tracker.begin_step(1, 2)
    assert tracker.own.report_at <= clock.now
    (stored,) = tracker.dht.records.values()
    assert isinstance(parse_progress(peer_id(0), stored), PeerProgress)


def test_reports_become_frequent_when_the_step_is_near(clock):
    tracker = make_tracker(target=200)
    reported_at = []
    for samples in range(200):
        clock.now += 0.1
        compute(tracker, samples + 1)
        if clock.now >= tracker.own.report_at:
            tracker.publish_report()
            reported_at.append(clock.now - 1000.0)
    gaps = [after - before for before, after in pairwise(reported_at)]
    assert reported_at[0] <= 0.1 + 1e-6 and gaps[0] <= 0.6, "the rate of a new peer is known soon"
    assert max(gaps) <= HEARTBEAT_SECONDS + 0.1 and max(gaps[-3:]) <= 0.6
    assert len(gaps) <= 20, "one report every 0.5 s would be 40"


def test_reads_soon_while_other_trainers_are_in_the_round_that_this_one_has_left(clock):
    """Trainers that wait for a round report hardly any samples per second, and would be read 30 s later."""
    tracker = see(make_tracker(target=100))
    assert tracker.refresh_period() == tracker.options.default_refresh_period, "it is alone"
    tracker.report_position(3, 0)
    assert tracker.next_read_at < clock.now + 1, "other trainers may have completed it, too"
    see(tracker, record(1), record(2))
    clock.now += 60.0
    see(tracker, record(1, epoch=3, completed=2, rate=0.1), record(2, epoch=3, rate=0.1))
    assert tracker.refresh_period() == progress_module.ROUND_END_SECONDS
    see(tracker, record(1, epoch=3, rate=0.1), record(2, epoch=3, rate=0.1))
    assert tracker.refresh_period() == tracker.options.max_refresh_period


def test_reported_rate_falls_during_a_long_local_step(clock):
    """Otherwise a peer whose first batch was ready at once would make other peers' steps due early."""
    tracker = make_tracker()
    rates = []
    for seconds in (0.1, 0.1, 5.0, 15.0):
        clock.now += seconds
        if seconds < 1:
            compute(tracker, tracker.local_progress.samples_accumulated + 32)
        tracker.publish_report()
        (stored,) = tracker.dht.records.values()
        rates.append(stored["samples_per_second"])
    assert rates == [0.0, pytest.approx(320.0), pytest.approx(32 / 5), pytest.approx(32 / 20)]


def test_slow_dht_neither_silences_this_peer_nor_declares_the_others_dead(clock):
    tracker = see(make_tracker(), report := record(1))
    tracker.dht.answers = False
    tracker.begin_read()
    clock.now += READ_TIMEOUT - 1
    assert not tracker.finish_read()
    clock.now += ALIVE_SECONDS
    assert tracker.view().num_expected(1) == 1, "its report was fresh when it was read"
    with pytest.raises(TimeoutError):
        tracker.finish_read()
    tracker.dht.answers = True
    see(tracker, report)
    assert tracker.view().num_expected(1) == 0


@pytest.mark.parametrize("error", [-600.0, -20.0, 5.0, 600.0])
def test_peer_with_a_wrong_clock_is_alive_while_its_reports_change(clock, error):
    """The clocks of the other three are right, and the first of them dies."""
    tracker = make_tracker(target=2000)
    for _ in range(3):
        reports = [record(number, rate=25.0, samples=50) for number in (2, 3)]
        see(tracker, record(4, rate=50.0, samples=100, age=-error), dead := record(1), *reports)
        assert tracker.view().num_expected(1) == 4
        clock.now += HEARTBEAT_SECONDS
    for _ in range(3):
        reports = [record(number, rate=25.0, samples=50) for number in (2, 3)]
        see(tracker, record(4, rate=50.0, samples=100, age=-error), dead, *reports)
        clock.now += HEARTBEAT_SECONDS
    assert tracker.view().num_expected(1) == 3
    # Between 200 of 2000 samples as reported and those of one heartbeat more
    assert (2000 - 200 - 100 * 2 * HEARTBEAT_SECONDS) / 100 < tracker.view().seconds_to_step <= (2000 - 200) / 100


def test_peer_whose_first_report_is_old_is_not_waited_for_long(clock):
    tracker = see(make_tracker(target=1000), report := record(1, samples=100, rate=50.0, age=60.0))
    clock.now += others_module.PROBATION_SECONDS
    see(tracker, report)
    assert tracker.view().num_expected(1) == 0 and tracker.view().seconds_to_step > 600, (
        "it does not contribute any more"
    )


def test_thread_survives_a_silent_dht(monkeypatch):
    monkeypatch.setattr(progress_module, "time", time)
    monkeypatch.setattr(progress_module, "READ_TIMEOUT", 0.1)
    tracker = make_tracker(default_refresh_period=0.1)
    tracker.dht.answers = False
    tracker.start()
    assert not tracker.refresh(timeout=0.5)
    tracker.dht.answers = True
    assert tracker.refresh(timeout=120.0)
    compute(tracker, 5)
    tracker.shutdown(120.0)
    assert not tracker.is_alive()
    assert list(tracker.dht.records.values()) == [None], "its goodbye"
