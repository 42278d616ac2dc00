"""Aggregation in the monitor: each step is reported once, whatever records untrusted peers publish."""

import math
import statistics
from functools import partial
from random import Random

import pytest
from hivemind.utils.timed_storage import ValueWithExpiration
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cotrain.common.names import short
from cotrain.monitoring.aggregation import MAX_JUMP, MAX_PENDING_STEPS, MAX_STEPS_PER_SECOND, MetricsAggregator
from tests.support.dht_records import entries, heartbeat, metric, snapshot, steps_of

START = 1_700_000_000.0  # some DHT time
SETTLE = 30.0
ALIVE = 120.0


def update(aggregator, *view):
    return aggregator.update(*snapshot(*view))


def observe(aggregator, seconds, view):
    """Update at these seconds with what `view` returns: metrics, and perhaps histories and heartbeats."""
    return [report for second in seconds for report in update(aggregator, START + second, *view(second))]


def make_aggregator(**options):
    return MetricsAggregator(**({"alive_timeout": ALIVE, "settle_time": SETTLE} | options))


def past(first, last, **values):
    """Return the history of a trainer with these steps, as many as fit into its record."""
    return entries(*(metric(step, **values) for step in range(max(first, last - 54), last + 1)))


# Contents of a report


def test_loss_is_weighted_by_samples():
    metrics = {
        b"a": metric(1, loss=20.0, mini_steps=2, samples=100, speed=3.0),  # mean 10
        b"b": metric(1, loss=28.0, mini_steps=7, samples=300, speed=4.0),  # mean 4
    }
    (report,) = update(make_aggregator(), START, metrics)
    assert (report.step, report.samples, report.contributors, report.mini_steps) == (1, 400, 2, 9)
    assert report.loss == pytest.approx((100 * 10 + 300 * 4) / 400)
    assert (report.alive_peers, report.performance, report.time) == (2, 7.0, START)
    assert {record.peer for record in report.contributions} == {b"a", b"b"}


@pytest.mark.parametrize(
    ("invited", "stated", "counted"),
    [
        (False, (60, 40, 10**9), (60, 40, 100)),
        (False, (0, 0, 80, 90), (0, 0, 80, 90)),
        (False, (30, 20, 40, 10**9), (30, 20, 40, 60)),
        (True, (30, 20, 40, 10**9), (30, 20, 40, 100)),
    ],
    ids=["a claim is a target batch", "those without are no measure", "twice the median of three", "invited peers"],
)
def test_samples_count_as_in_the_round(invited, stated, counted):
    """Names of invited peers can be revoked: their claims are believed."""
    metrics = {peer: metric(1, loss=2.0 * peer, samples=samples) for peer, samples in enumerate(stated)}
    (report,) = update(make_aggregator(target_batch_size=100, believes_weights=invited), START, metrics)
    assert [(step.peer, step.samples) for step in report.contributions] == list(enumerate(counted))
    assert report.samples == sum(counted)
    assert report.loss == pytest.approx(sum(peer * samples for peer, samples in enumerate(counted)) / sum(counted))


# Live peers


SEQUENCES = {
    # name: (newest step reported before, updates); an update: (second, newest steps in the metrics, heartbeats in
    # which None is a goodbye, reported steps, live peers)
    "goodbye counts at once, and the same identity may start again": (0, [
        (0, {"a": 1, "b": 1}, {"a": (0, 1), "b": (0, 1)}, [1], 2),
        (5, {"a": 2, "b": 1}, {"a": (5, 2), "b": None}, [2], 1),
        (10, {"a": 2, "b": 2}, {"a": (5, 2), "b": None}, [], 1),  # its last metrics, found late
        (20, {"a": 2, "b": 2}, {"a": (20, 2), "b": (20, 2)}, [], 2),
    ]),
    "last step of a peer that left is reported": (0, [
        (0, {"a": 1}, {"a": (0, 1)}, [1], 1), (5, {"a": 2}, {"a": None}, [2], 0),
    ]),
    "peer that left and came back votes once": (0, [
        (0, {"a": 2, "b": 1}, {"a": (0, 2), "b": (0, 1)}, [1], 2),
        (1, {"a": 2, "b": 1}, {"a": None, "b": (0, 1)}, [], 1),
        *((second, {"a": 1, "b": 1}, {"a": (second, 1), "b": (second, 1)}, [], 2) for second in range(5, 300, 5)),
    ]),
    "silent peer is gone after the timeout": (0, [
        (0, {"a": 1}, {"a": (0, 1)}, [1], 1), (ALIVE, {"a": 1}, {"a": (0, 1)}, [], 1),
        (ALIVE + 1, {"a": 1}, {"a": (0, 1)}, [], 0),
    ]),
    "heartbeat from the future expires on time": (0, [
        (0, {}, {"a": (10**6, 1)}, [], 1), (ALIVE + 1, {}, {"a": (10**6, 1)}, [], 0),
    ]),
    "peer whose clock is late is alive while its heartbeat changes": (0, [
        (second, {"a": 1}, {"a": (second - 110, 1)}, [] if second else [1], 1) for second in range(0, 600, 30)
    ]),
    "records of the dead do not count after a restart of the monitor": (9, [
        (0, {"dead": 8, "a": 10}, {"a": (0, 10)}, [10], 1),
    ]),
    "stragglers are waited for, but not for ever": (0, [
        (0, {"a": 1, "b": 1, "c": 1}, {}, [1], 3),
        (10, {"a": 2, "b": 2, "c": 1}, {}, [], 3),
        (10 + SETTLE - 1, {"a": 2, "b": 2, "c": 1}, {}, [], 3),
        (10 + SETTLE, {"a": 2, "b": 2, "c": 1}, {}, [2], 3),
        (50, {"a": 2, "b": 2, "c": 2}, {}, [], 3),  # too late, and not repeated
        (60, {"a": 3, "b": 3, "c": 3}, {}, [3], 3),
    ]),
    "peers that left after a step vote for it; the slowest one, alone at the end, may never take it": (0, [
        (0, {"a": 1, "b": 1, "slow": 1}, {"a": (0, 1), "b": (0, 1), "slow": (0, 1)}, [1], 3),
        (5, {"a": 2, "b": 2, "slow": 1}, {"a": None, "b": None, "slow": (5, 1)}, [], 1),
        (5 + SETTLE, {"a": 2, "b": 2, "slow": 1}, {"a": None, "b": None, "slow": (35, 1)}, [2], 1),
    ]),
    "one of two peers does not hold up the other": (0, [
        (0, {"a": 1, "b": 1}, {}, [1], 2), (1, {"a": 2, "b": 1}, {}, [], 2), (31, {"a": 2, "b": 1}, {}, [2], 2),
    ]),
    "monitor catches up after a day, once the jump has been visible": (900, [
        (0, {"a": 5000, "b": 5000, "c": 4999}, {}, [], 3),
        (SETTLE, {"a": 5000, "b": 5000, "c": 4999}, {}, [4999, 5000], 3),
    ]),
    "peer without metrics yet may be about to report the step": (0, [
        (0, {"a": 1, "b": 1}, {"a": (0, 1), "b": (0, 1), "joined": (0, 1)}, [], 3),
        (SETTLE, {"a": 1, "b": 1}, {"a": (0, 1), "b": (0, 1), "joined": (0, 1)}, [1], 3),
    ]),
    "nobody waits for a peer that is away": (0, [
        (0, {"a": 1, "b": 1}, {"a": (0, 1), "b": (0, 1)}, [1], 2),
        (5, {"a": 2, "b": 1}, {"a": (5, 2), "b": (5, 1, {"away": True})}, [2], 2),
    ]),
    "peers of another protocol or model do not count": (0, [
        (0, {"a": 1, "b": 1}, {"a": (0, 1), "b": (0, 1), "old": (0, 7, {"protocol": 3}),
                               "misfit": (0, 7, {"schema": "another model"})}, [1], 2),
    ]),
    "restarted monitor repeats nothing": (20, [(0, {"a": 20}, {}, [], 1)]),
}  # fmt: skip


@pytest.mark.parametrize(("last_reported_step", "updates"), SEQUENCES.values(), ids=SEQUENCES)
def test_sequence(last_reported_step, updates):
    aggregator = make_aggregator(last_reported_step=last_reported_step)
    for second, metrics, heartbeats, expected_steps, num_alive in updates:
        progress = {}
        for key, beat in heartbeats.items():
            at, step, *fields = beat or (0, 0)
            value = heartbeat(START + at, step, samples=int(at) + 110, **(fields[0] if fields else {}))
            progress[key.encode()] = value if beat else None
        view = {key.encode(): metric(step) for key, step in metrics.items()}
        reports = update(aggregator, START + second, view, {}, progress)
        assert steps_of(reports) == expected_steps and len(aggregator.live_peers) == num_alive, f"second {second}"


@pytest.mark.parametrize(("late", "counts"), [(60.0, True), (110.0, True), (130.0, False)])
def test_contribution_of_a_slow_trainer_is_waited_for(late, counts):
    """It reports a step at the end of its local step, which takes longer than `settle_time`."""
    aggregator = make_aggregator()
    metrics = {b"a": metric(1), b"b": metric(1), b"slow": metric(1)}
    update(aggregator, START, metrics, {}, {peer: heartbeat(START, 1) for peer in metrics})
    found = []
    for second in range(5, 200, 5):
        now = START + second
        progress = {peer: heartbeat(now, 2, contributed=32) for peer in metrics} | {b"none": heartbeat(now, 2)}
        view = metrics | {b"a": metric(2), b"b": metric(2)} | ({b"slow": metric(2)} if second >= late else {})
        found += [(second, report) for report in update(aggregator, now, view, {}, progress)]
        assert aggregator.is_waiting == (not found)
    ((second, report),) = found
    assert (second, report.contributors, report.samples) == ((late, 3, 96) if counts else (125, 2, 64))


@pytest.mark.parametrize("restarts", [False, True])
def test_steps_that_a_peer_took_alone_count_once_when_they_are_found(restarts):
    """Its line failed for two steps. The monitor restarts before, and finds it only after the first report."""
    aggregator, peers = make_aggregator(last_reported_step=0), (b"a", b"b", b"alone")
    for second, step in ((0, 1), (5, 2)):
        metrics = {peer: metric(step) for peer in peers}
        beats = {peer: heartbeat(START + second, step) for peer in peers}
        update(aggregator, START + second, metrics, {}, beats)
    if restarts:
        aggregator = make_aggregator(last_reported_step=2)
        metrics, beats = ({peer: part[peer] for peer in (b"a", b"b")} for part in (metrics, beats))
    for second, step in ((100, 3), (105, 4)):
        metrics |= {b"a": metric(step), b"b": metric(step)}
        beats |= {peer: heartbeat(START + second, step) for peer in (b"a", b"b")}
        assert steps_of(update(aggregator, START + second, metrics, {}, beats)) == [step] and not aggregator.late
    history = {b"alone": entries(*(metric(step, samples=100 * step) for step in range(1, 6)))}
    metrics |= {peer: metric(5, samples=500) for peer in peers}
    beats |= {peer: heartbeat(START + 110, 5) for peer in peers}
    (report,) = update(aggregator, START + 110, metrics, history, beats)
    assert (report.step, report.contributors) == (5, 3)
    assert [(late.peer, late.step, late.samples) for late in aggregator.late] == [
        (b"alone", 3, 300), (b"alone", 4, 400)
    ]  # fmt: skip
    assert not update(aggregator, START + 115, metrics, history, beats) and not aggregator.late


def test_record_that_is_stored_again_is_no_restart():
    """A trainer does so when it leaves."""
    aggregator, history = make_aggregator(), {b"a": past(1, 3)}
    for seconds in (0.0, 5.0, 10.0):
        metrics = {b"a": ValueWithExpiration(metric(3), START + 600 + seconds)}
        reports = update(aggregator, START + seconds, metrics, history, {b"a": heartbeat(START + seconds, 3)})
        assert steps_of(reports) == ([] if seconds else [1, 2, 3]) and not aggregator.late


def test_values_of_a_step_are_those_of_the_step_whenever_it_is_read():
    """Three peers: one leaves after step 2, one joins at step 3, the clock of the third is an hour ahead."""
    ends = {1: 10.0, 2: 14.0, 3: 34.0, 4: 36.0}  # seconds after the start
    took = {"leaves": (1, 2), "joins": (3, 4), "stays": (1, 2, 3, 4), "ahead": (1, 2, 3, 4)}
    history = {
        peer: entries(
            *(metric(step, samples=20) for step in steps),
            times=[START + ends[step] + 3600 * (peer == "ahead") for step in steps],
        )
        for peer, steps in took.items()
    }
    metrics = {peer: metric(steps[-1], samples=20) for peer, steps in took.items()}
    reports = update(make_aggregator(settle_time=0.0), START + 900, metrics, history, dict.fromkeys(took))
    assert [(report.step, report.alive_peers, report.contributors) for report in reports] == [
        (1, 3, 3), (2, 3, 3), (3, 3, 3), (4, 3, 3)
    ]  # fmt: skip
    assert [report.time - START for report in reports] == [10.0, 14.0, 34.0, 36.0]
    assert [report.performance for report in reports[1:]] == [60 / 4, 60 / 20, 60 / 2]
    assert reports[0].performance == 3 * 1.5, "the time of the step before is not known: what the peers state"


# The global step of the run


@pytest.mark.parametrize("step, at_once", [(0, True), (1, True), (40, False), (4000, False)])
def test_lone_peer_is_believed(step, at_once):
    aggregator = make_aggregator()
    assert steps_of(update(aggregator, START, {b"a": metric(step)})) == ([step] if at_once else [])
    assert update(aggregator, START + SETTLE - 1, {b"a": metric(step)}) == [], "a jump must be visible for a while"
    assert steps_of(update(aggregator, START + SETTLE, {b"a": metric(step)})) == ([] if at_once else [step])
    assert steps_of(update(aggregator, START + SETTLE + 5, {b"a": metric(step + 1)})) == [step + 1]


@pytest.mark.parametrize("honest", [1, 2, 3])
@pytest.mark.parametrize("claim", [10**9, 51 + MAX_JUMP])
@pytest.mark.parametrize("last_reported_step", [-1, 48])
def test_lone_outlier_neither_moves_nor_stops_the_run(honest, claim, last_reported_step):
    def view(second):
        metrics = {b"honest%d" % peer: metric(50 + second // 50) for peer in range(honest)}
        lies = [metric(claim + second - back, loss=-1e9) for back in range(40)]
        return metrics | {b"liar": lies[0]}, {b"liar": entries(*lies)}

    reports = observe(make_aggregator(last_reported_step=last_reported_step), range(0, 2000, 10), view)
    assert steps_of(reports) == list(range(50, 90)) and all(report.loss == 5.0 for report in reports)


def test_liar_that_stays_when_the_others_leave_advances_the_run_at_a_bounded_rate():
    aggregator, liar = make_aggregator(last_reported_step=6), {b"liar": metric(10**6)}

    def view(second, step=7, leave=True):
        beat = None if leave else heartbeat(START + second, step)
        honest = dict.fromkeys((b"a", b"b"), metric(step))
        return honest | liar, {}, dict.fromkeys(honest, beat) | {b"liar": heartbeat(START + second, 10**6)}

    update(aggregator, START, *view(0, leave=False))
    assert observe(aggregator, range(10, int(10**6 / MAX_STEPS_PER_SECOND) - 100, 1000), view) == []
    assert steps_of(update(aggregator, START + 10**5, *view(10**5, step=8, leave=False))) == [8]


@pytest.mark.parametrize("last_reported_step", [-1, 4999])
def test_peer_in_a_run_of_its_own_is_ignored(last_reported_step):
    """A trainer that could not load the training state starts at step 0 and continues alone."""

    def view(second):
        step = 5000 + second // 10
        metrics = {b"a": metric(step), b"b": metric(step), b"alone": metric(second // 10)}
        shown = [b"a"] if second < 100 else [b"a", b"alone"] if second > 500 else list(metrics)
        return {peer: metrics[peer] for peer in shown}, {b"a": past(5000, step)}

    reports = observe(make_aggregator(last_reported_step=last_reported_step), range(0, 1000, 10), view)
    assert steps_of(reports) == list(range(5000, 5100))


@pytest.mark.parametrize("honest, claim", [(1, 10**6), (1, MAX_JUMP + 2), (2, 10**6), (5, 10**6)])
@pytest.mark.parametrize("seconds_per_step", [20, 10**6])
@pytest.mark.parametrize("last_reported_step, first_step", [(-1, 1), (-1, 3000), (48, 49)])
def test_byzantine_first_peer_does_not_end_the_reports(
    honest, claim, seconds_per_step, last_reported_step, first_step
):
    """It stays at its step or, like an honest peer, takes steps."""
    aggregator = make_aggregator(last_reported_step=last_reported_step)
    claim += first_step

    def view(second):
        step, samples = claim + second // seconds_per_step, second * seconds_per_step // 10**6
        metrics, history, step_of_honest = {b"liar": metric(step, loss=1e9, samples=samples)}, {}, first_step
        if second >= 300:
            step_of_honest += (second - 300) // 20
            history = {b"honest%d" % peer: past(first_step, step_of_honest) for peer in range(honest)}
            metrics |= dict.fromkeys(history, metric(step_of_honest))
        return metrics, history

    observe(aggregator, range(0, 300, 10), view)
    assert aggregator.last_reported_step >= claim, "there is nobody to contradict"
    back_at, reports = 290, []
    while aggregator.last_reported_step >= claim:
        back_at += 10
        reports = observe(aggregator, [back_at], view)
    reports += observe(aggregator, range(back_at + 10, 900, 10), view)
    assert steps_of(reports) == list(range(first_step, first_step + 30)), "none is lost"
    assert back_at <= 300 + 2 * 20 + SETTLE + 20


def test_restarted_run_is_followed():
    def view(second):
        step = 4900 + second // 10
        return dict.fromkeys((b"a", b"b"), metric(step)), dict.fromkeys((b"a", b"b"), past(0, step))

    reports = observe(make_aggregator(last_reported_step=5000), range(0, 300, 10), view)
    assert steps_of(reports) == list(range(4900, 4930)), "not the steps before, which the other monitor may have told"


def revive(lost: int, number: int, pace: float, refresh: int, keys: str) -> list[tuple[int, int]]:
    """Simulate a run whose trainers are all killed at step 100; others continue `lost` steps earlier.

    The three trainers that are killed are unlike: the first has reported step 101, too.

    :param pace: seconds per step of the `number` new trainers
    :param refresh: seconds between two refreshes of the monitor
    :param keys: "old" if the new trainers have the identities of the killed ones
    :returns: for each report: seconds since the end of the first three trainers, and the step
    """
    aggregator, first = make_aggregator(last_reported_step=99), 101 - lost
    killed = {b"old0": metric(101), b"old1": metric(100), b"old2": metric(100)}
    killed_history = {key: past(46, value["step"]) for key, value in killed.items()}
    last_heartbeats = {key: heartbeat(START - 1, value["step"], samples=1) for key, value in killed.items()}
    before = {key: heartbeat(START - refresh, 100) for key in killed}
    assert steps_of(update(aggregator, START - refresh, dict.fromkeys(killed, metric(100)), {}, before)) == [100]

    def view(second):
        progress = last_heartbeats if second < ALIVE else {}
        if second < 20:
            return killed, killed_history, progress
        step = first + int((second - 20) / pace)
        new = [b"%s%d" % (keys.encode(), peer) for peer in range(number)]
        progress = progress | {key: heartbeat(START + second, step, samples=second) for key in new}
        metrics, history = metric(step, loss=9.0), past(first, step, loss=9.0)
        return killed | dict.fromkeys(new, metrics), killed_history | dict.fromkeys(new, history), progress

    seconds = range(refresh // 2, 3000, refresh)
    return [(second, report.step) for second in seconds for report in observe(aggregator, [second], view)]


@pytest.mark.parametrize("refresh", [5, 30])
@pytest.mark.parametrize("lost", [0, 1, 3, 40])
@pytest.mark.parametrize(
    ("number", "pace", "keys"), [(1, 0.85, "new"), (3, 20, "new"), (2, 120, "new"), (3, 40, "old")]
)
def test_revived_run_is_reported_from_its_first_step(refresh, lost, number, pace, keys):
    """With 0.85 seconds per step a trainer takes 70 steps in a minute."""
    reported = revive(lost, number, pace, refresh, keys)
    steps = [step for _, step in reported]
    first = 1 if lost == 0 and steps[1] == 101 else 0  # the killed trainers' step 101 may be reported, too
    assert steps[first:] == list(range(101 - lost, steps[-1] + 1)), "every step of the revived run, in order"
    assert steps[-1] >= 101 - lost + int((3000 - 20 - refresh) / pace) - 1
    assert reported[0][0] <= 20 + refresh + 20


def test_revived_run_is_not_mixed_with_the_one_before():
    """The killed trainers' newest step was not reported yet; among the new ones is one with a false step."""
    aggregator = make_aggregator(last_reported_step=15)
    killed = {b"old0": metric(17, loss=1e9), b"old1": metric(16), b"old2": metric(16)}
    last_heartbeats = {key: heartbeat(START, value["step"]) for key, value in killed.items()}
    update(aggregator, START, killed, {}, last_heartbeats)

    def view(second):
        steps = {b"new0": 14 + second // 30, b"new1": 14 + second // 30, b"liar": 3}
        progress = {key: heartbeat(START + second, step, samples=second) for key, step in steps.items()}
        metrics, history = ({key: of(step) for key, step in steps.items()} for of in (metric, partial(past, 15)))
        return killed | metrics, history, last_heartbeats | progress

    reports = observe(aggregator, range(30, 300, 30), view)
    assert steps_of(reports) == list(range(15, 24)) and all(report.loss == 5.0 for report in reports)


def test_outdated_copies_in_the_dht_change_nothing():
    """A node that was away may answer with an older record than the one that was read before."""

    def view(second):
        is_outdated = second % 120 == 90  # every fourth answer
        step = 4 + second // 60 - 3 * is_outdated
        metrics = {b"a": ValueWithExpiration(metric(step), START + 600 + 60 * step)}
        return metrics, {b"a": past(0, step)}, {b"a": heartbeat(START + second - 100 * is_outdated, step, second)}

    assert steps_of(observe(make_aggregator(), range(0, 1200, 30), view)) == list(range(24))


def test_stragglers_do_not_pull_the_run_back():
    """One of two peers falls behind for a while; newcomers are at step 0 while they load the training state."""

    def view(second):
        steps = {b"a": 100 + second // 10, b"b": 80 + second // 10}
        epochs = steps | {b"new%d" % number: 0 for number in range(5)}
        progress = {key: heartbeat(START + second, epoch) for key, epoch in epochs.items()}
        return {key: metric(step) for key, step in steps.items()}, {}, progress

    reports = observe(make_aggregator(last_reported_step=99), range(0, 1000, 10), view)
    assert steps_of(reports) == list(range(100, 200))


def test_memory_does_not_grow_over_a_long_run():
    """A volunteer joins, stays for ten steps, and leaves without a goodbye, for which the monitor waits."""
    aggregator = make_aggregator()
    observe(aggregator, range(0, 15000, 5), lambda s: (dict.fromkeys(("stays", s // 50), metric(s // 5)),))
    assert aggregator.last_reported_step > 2990
    assert len(aggregator.peers) < 20 and len(aggregator.reached) < 20
    assert sum(len(peer.pending) for peer in aggregator.peers.values()) < 20


def test_unreported_steps_of_a_peer_are_bounded():
    aggregator, peers = make_aggregator(), dict.fromkeys((b"a", b"b", b"liar"), metric(2000))
    for step in range(100, 1000):  # a new step each time, none ahead of the run
        update(aggregator, START, peers, {b"liar": entries(metric(step))})
    assert len(aggregator.peers[b"liar"].pending) == MAX_PENDING_STEPS


# Property tests

metrics = st.builds(
    metric,
    step=st.integers(0, 120) | st.just(10**9),
    loss=st.floats(-1e9, 1e9),
    mini_steps=st.integers(0, 5),
    samples=st.integers(0, 10**9),
    speed=st.floats(0, 1e9),
)
histories = st.lists(metrics, max_size=4).map(lambda records: entries(*records)) | st.lists(
    st.tuples(metrics, st.floats(0, 1e12)), max_size=4
).map(lambda rows: entries(*(record for record, _ in rows), times=[time for _, time in rows]))
heartbeats = st.none() | st.builds(heartbeat, st.floats(0, 1000), st.integers(0, 120), st.integers(0, 9))
keys = st.sampled_from(["a", "b", "c"])
views = st.tuples(st.floats(-10, 400), *(st.dictionaries(keys, values) for values in (metrics, histories, heartbeats)))


@settings(max_examples=200, deadline=None)
@given(st.lists(views, max_size=8), st.integers(-1, 50))
def test_any_records(sequence, last_reported_step):
    aggregator = make_aggregator(last_reported_step=last_reported_step, target_batch_size=10**9)
    reports, now = [], 0.0
    for elapsed, *records in sequence:
        now += elapsed
        new_reports = update(aggregator, now, *records)
        assert steps_of(new_reports) == sorted(set(steps_of(new_reports)))
        reports += new_reports
    for report in reports:
        means = [
            c.metrics["loss"] / c.metrics["mini_steps"]
            for c in report.contributions
            if c.metrics["mini_steps"] and c.samples
        ]
        assert (report.loss is None) == (not means)
        if means:
            assert min(means) <= report.loss <= max(means)
        assert all(record.step == report.step for record in report.contributions)
        assert math.isfinite(report.performance) and report.alive_peers <= 3 and report.samples >= 0


@settings(max_examples=100, deadline=None)
@example(seed=512, honest=2, has_liar=False, first_step=1, refresh=1)  # with losses from 0 to 1 one was far by chance
@given(
    seed=st.integers(0, 2**32),
    honest=st.integers(1, 4),
    has_liar=st.booleans(),
    first_step=st.sampled_from([1, 3000]),
    refresh=st.integers(1, 60),
)
def test_honest_swarm_loses_no_step_and_no_contribution(seed, honest, has_liar, first_step, refresh):
    """Peers publish each step within `settle_time`; the monitor refreshes at any time. A minority is Byzantine."""
    random = Random(seed)
    steps, has_liar = 20, has_liar and honest >= 2
    peers = [b"p%d" % number for number in range(honest)]
    published = [
        (START + 40 * index + random.uniform(0, SETTLE - 1), peer, metric(first_step + index, 10.0 + random.random()))
        for index in range(steps)
        for peer in peers
    ]
    aggregator, now, reports = make_aggregator(), START, []
    while now < START + 40 * steps + 3 * (refresh + SETTLE):
        known = {peer: [record for at, owner, record in published if owner == peer and at <= now] for peer in peers}
        metrics = {peer: records[-1] for peer, records in known.items() if records}
        history = {peer: entries(*records) for peer, records in known.items() if records}
        progress = {
            peer: heartbeat(now, records[-1]["step"] if records else first_step - 1, samples=int(now - START))
            for peer, records in known.items()
        }
        if has_liar:
            claim = random.choice([0, max(0, first_step + random.randint(-5, 40)), 10**9])
            metrics[b"liar"], progress[b"liar"] = metric(claim, loss=1e9), heartbeat(now, claim)
        reports += update(aggregator, now, metrics, history, progress)
        now += refresh
    expected = list(range(first_step, first_step + steps))
    if not has_liar:
        assert steps_of(reports) == expected
        for report in reports:  # no step mixes two
            losses = [record["loss"] / 2 for _, _, record in published if record["step"] == report.step]
            assert report.loss == pytest.approx(statistics.fmean(losses))
    reports = [report for report in reports if report.step in expected]
    assert steps_of(reports) == expected
    assert all({record.peer for record in report.contributions} >= set(peers) for report in reports)


# One peer about itself

HONEST = tuple(b"honest%d" % number for number in range(4))
FALSE_LOSSES = (1e9, -1e9, 0.0, 30.0)


def lie(aggregator, steps, liar, honest=HONEST, unlike=False, keys=(b"liar",), is_member=True):
    """Return the reports and the samples by peer of a run; `liar(step)` returns the history that a liar publishes.

    The `keys` of the liar name each other. The honest ones name each other, and the keys if `is_member`. Of the honest
    ones, the first is late by a refresh if it is `unlike`, and the second has half of the samples.
    """
    samples, reports, sizes = {}, [], [1024, 512 if unlike else 1024, 1024, 1024]
    names = ("step", "samples_per_second", "samples_accumulated", "loss", "mini_steps")
    for step in range(1, steps + 1):
        now = START + 30 * step
        rows = {peer: range(1, step + 1 - (unlike and peer == honest[0])) for peer in honest}
        history = {
            peer: entries(*(metric(s, loss=10.0 + 0.1 * number, samples=sizes[number]) for s in rows[peer]))[-30:]
            for number, peer in enumerate(honest)
        }
        history |= {key: entries(*liar(step))[-30:] for key in keys}
        members = {key: [short(peer) for peer in history] for key in history}
        if not is_member:
            members |= {peer: [short(other) for other in honest] for peer in honest}
        found = {peer: dict(zip(names, part[-1], strict=True)) for peer, part in history.items() if part}
        beats = {peer: heartbeat(now, step, contributed=int(peer in honest)) for peer in history}
        new = aggregator.update(*snapshot(now, found, history, beats, members))
        reports += new
        for record in [*(record for report in new for record in report.contributions), *aggregator.late]:
            samples[record.peer] = samples.get(record.peer, 0) + record.samples
    return reports, samples


def late(step):
    """Report the first steps in time with a sample, each later one after the others, with as many as can be stated."""
    last = step if step <= 3 else max(3, step - 3)
    return [metric(s, loss=1e9, samples=1 if s <= 3 else 10**9) for s in range(1, last + 1)]


def in_time(step):
    return [metric(s, loss=1e9, samples=10**9) for s in range(1, step + 1)]


def again(step):
    """Report old steps again and again: each other time as if restarted, with another record of the step before."""
    if step % 2:
        return [metric(s, samples=10**9, loss=20.0) for s in range(1, step + 1)]
    return [metric(s, samples=10**8 + step, loss=20.0) for s in range(1, step)]


@pytest.mark.parametrize("unlike", [False, True])
@pytest.mark.parametrize("liar", [late, in_time, again])
def test_liar_has_no_more_samples_than_a_round_would_give_it(liar, unlike):
    """Twice the median of the others, whatever it reports, and when."""
    reports, samples = lie(make_aggregator(target_batch_size=4096, settle_time=10), 40, liar, unlike=unlike)
    assert len(reports) > 30
    most = max(samples[peer] for peer in HONEST)
    assert most > 35 * 1024 and samples.get(b"liar", 0) <= 2 * 40 * 1024


@pytest.mark.parametrize("unlike", [False, True])
@pytest.mark.parametrize("liar", [late, in_time, again])
@pytest.mark.parametrize(("number", "keys", "invited"), [(4, 1, False), (4, 2, True), (3, 1, False), (2, 1, False)])
def test_key_in_no_round_has_no_samples(liar, unlike, number, keys, invited):
    """It had 110,595 beside 60,416 of the honest ones in 60 steps, whose rounds did not have it."""
    aggregator = make_aggregator(target_batch_size=4096, settle_time=10, believes_weights=invited)
    liars = [b"liar%d" % key for key in range(keys)]
    reports, samples = lie(aggregator, 60, liar, HONEST[:number], unlike, liars, is_member=False)
    assert len(reports) > 50 and not samples.keys() & set(liars)
    assert all(samples[peer] >= 55 * 512 for peer in HONEST[:number]), "the first of them is late"
    assert all(4.9 < report.loss < 5.3 and report.contributors >= number - unlike for report in reports)


@pytest.mark.parametrize("invited", [False, True])
def test_peer_counts_once_in_each_step(invited):
    """Also in a run that believes the numbers of its peers."""
    aggregator = make_aggregator(target_batch_size=4096, settle_time=10, believes_weights=invited)
    _, samples = lie(aggregator, 30, again)
    assert samples[b"liar"] <= 30 * (4096 if invited else 2048)


@pytest.mark.parametrize("loss", FALSE_LOSSES)
@pytest.mark.parametrize(("number", "unlike"), [(2, False), (3, False), (4, False), (4, True)])
def test_false_loss_is_not_that_of_the_run(number, loss, unlike):
    """20 steps. A liar beside two or three honest trainers is known by the steps before; beside four at once."""

    def liar(step):
        begins = 1 if number == 4 else 4
        return [metric(s, loss=loss, samples=1024) for s in range(begins, step + 1)]

    honest = HONEST[:number]
    aggregator = make_aggregator(settle_time=10)
    reports, _ = lie(aggregator, 20, liar, honest, unlike)
    means = [5.0 + 0.05 * position for position in range(number)]
    assert len(reports) >= 18
    assert all(min(means) <= report.loss <= max(means) for report in reports)


def test_trainers_count_that_have_not_averaged_and_those_of_other_groups():
    """Of 12, groups of four name each other only: as often as others. Two that name nobody yet count, too."""
    peers = [b"%07d" % number for number in range(12)]
    groups = {peer: [short(other) for other in peers[4 * (n // 4) : 4 * (n // 4) + 4]] for n, peer in enumerate(peers)}
    for run, members in ((peers, groups), (peers[:2], {}), (peers[:1], {})):
        metrics = {peer: metric(1) for peer in run}
        (report,) = make_aggregator().update(*snapshot(START, metrics, members=members))
        assert report.contributors == len(run)


def test_loss_of_a_run_that_diverges_is_reported():
    """All trainers jump: nobody is left out."""
    aggregator, reports = make_aggregator(), []
    for step in range(1, 11):
        loss = 10.0 if step < 6 else 500.0
        metrics = {peer: metric(step, loss=loss + number) for number, peer in enumerate(HONEST)}
        reports += update(aggregator, START + 30 * step, metrics)
    assert [round(report.loss) for report in reports] == [6] * 5 + [251] * 5


def test_false_speed_and_false_numbers_of_batches_are_bounded():
    metrics = {peer: metric(1) for peer in HONEST} | {b"liar": metric(1, speed=1e9, mini_steps=10**9)}
    (report,) = update(make_aggregator(), START, metrics)
    assert (report.performance, report.mini_steps) == (4 * 1.5 + 2 * 1.5, 4 * 2 + 2 * 2)
