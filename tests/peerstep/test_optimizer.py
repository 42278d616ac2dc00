"""Tests of CollaborativeOptimizer: what each outcome of a round does to one peer. No network, no processes."""

import io
import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import Queue
from threading import Event
from types import SimpleNamespace

import pytest
import torch
from hivemind.p2p import PeerID

from peerstep.optimizer import CollaborativeOptimizer
from peerstep.options import Options
from peerstep.progress.view import View
from peerstep.reports.progress_report import MAX_LAG
from peerstep.state.membership import MAX_ATTEMPTS
from peerstep.step.coordinator import Outcome
from peerstep.step.joining import MAX_MISSED_UPDATES
from peerstep.step.local_updates import INNER_WARMUP_STEPS
from tests.support.offline import PEER, offline_optimizer
from tests.support.processes import wait_until
from tests.support.state import snapshot

pytestmark = pytest.mark.usefixtures("offline")
FLAGS = {
    "optimizer": "adamw", "learning_rate": 0.01, "warmup_steps": 0, "weight_decay": 0.0, "max_grad_norm": 1.0,
    "target_batch_size": 64, "delay_grad_averaging": True, "delay_optimizer_step": True,
}  # fmt: skip


def build(**flags) -> CollaborativeOptimizer:
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.constant_(model.weight, 3.0)
    return offline_optimizer(model, **{**FLAGS, **flags})


def compute(optimizer: CollaborativeOptimizer, value: float, samples: int = 4) -> None:
    """Take a local step with a gradient of equal elements."""
    (parameter,) = optimizer.state_averager.main_parameters
    parameter.grad = torch.full_like(parameter, value)
    optimizer.accumulate(samples)


def take(optimizer: CollaborativeOptimizer, outcome: Outcome = Outcome.AVERAGED, **averages) -> None:
    """Take the next global step, whose round has this outcome.

    :param averages: attributes of `Rounds`
    """
    vars(optimizer.coordinator).update(outcome=outcome, **averages)
    optimizer.steps.take_step(optimizer.local_epoch + 1)


def value_of(tensors) -> float:
    """Return the value that all elements have."""
    (tensor,) = tensors
    assert (tensor == tensor[0, 0]).all()
    return tensor[0, 0].item()


def parameters_of(optimizer: CollaborativeOptimizer) -> list[torch.Tensor]:
    """Return the parameters of the last global step."""
    return optimizer.state_averager.layout.parameters


def gradient_of(optimizer: CollaborativeOptimizer) -> float:
    """Return the value that all elements of the newest step's gradient have."""
    return value_of([parameter.grad for parameter in parameters_of(optimizer)])


def test_weight_of_a_contribution_is_bounded():
    """A fast peer in a slow round: it counts for one whole step at most, and the others would scale it down."""
    optimizer = build()
    compute(optimizer, 0.1, samples=10**5)
    take(optimizer)
    assert optimizer.coordinator.weights == [64.0] and samples_of(optimizer) == [(1, 64)]
    assert optimizer.grad_averager.max_weight == build(batch_size_lead=16).grad_averager.max_weight == 64.0


def test_group_has_peers_of_the_same_rounds_only():
    """Peers with another schema hash are refused."""
    options = ({"gradient_compression": "blockwise8"}, {"gradient_compression": "blockwise4"},
               {"state_compression": "none"}, {"average_state_every": 2}, {"local_updates": True}, {})  # fmt: skip
    hashes = {build(**flags).grad_averager.schema_hash for flags in options}
    assert len(hashes) == len(options)
    assert build(learning_rate=0.5, bandwidth=10.0).grad_averager.schema_hash in hashes


def test_contribution_is_the_mean_over_samples():
    optimizer = build()
    compute(optimizer, 0.1, samples=2)
    compute(optimizer, 0.4, samples=4)
    compute(optimizer, float("nan"))
    take(optimizer)
    assert value_of(optimizer.coordinator.contribution) == pytest.approx(0.3)
    assert optimizer.coordinator.weights == [6.0] and optimizer.num_dropped_gradients == 1
    compute(optimizer, 100.0)
    take(optimizer)
    assert value_of(optimizer.coordinator.contribution) == 100.0, "the average is clipped"


def test_overflow_costs_its_local_step_alone():
    """Each peer has another loss scale, as with float16."""
    optimizer, scaler = build(), torch.amp.GradScaler("cpu", init_scale=2.0**16)
    (parameter,) = optimizer.state_averager.main_parameters
    for factor in (math.inf, 0.3, 0.5):
        optimizer.zero_grad()
        scaler.scale((parameter * factor).sum()).backward()
        scaler.step(optimizer, batch_size=4)
        scaler.update()
    optimizer.stop_averaging()
    take(optimizer)
    assert optimizer.coordinator.weights == [8.0] and scaler.get_scale() == 2.0**15
    assert value_of(optimizer.coordinator.contribution) == pytest.approx(0.4)


def samples_of(optimizer: CollaborativeOptimizer) -> list[tuple[int, int | None]]:
    """Return the global steps since the last call, with the samples of this peer that each used."""
    return [(record.step, record.samples) for record in optimizer.pop_records() if record.outcome != Outcome.FAILED]


def test_it_is_an_optimizer_of_torch():
    """A reader of torch saves its state, loads it, and clears gradients."""
    one, other = build(), build()
    compute(one, 0.2)
    take(one, gradients=0.2)
    saved = io.BytesIO()
    torch.save(one.state_dict(), saved)
    saved.seek(0)
    other.load_state_dict(torch.load(saved, weights_only=True))
    assert isinstance(other, torch.optim.Optimizer) and other.local_epoch == 1
    (first,), (second,) = (list(optimizer.state_averager.optimizer.state.values()) for optimizer in (one, other))
    assert torch.equal(first["exp_avg"], second["exp_avg"]) and second["exp_avg"].any()
    (parameter,) = (parameter for group in other.param_groups for parameter in group["params"])
    assert parameter is other.state_averager.main_parameters[0]
    compute(other, 0.2)
    other.zero_grad()
    assert parameter.grad is None


def test_what_torch_and_hivemind_offer_works_or_says_so():
    optimizer = build()
    (parameter,) = optimizer.state_averager.main_parameters
    optimizer.stop_averaging()

    def closure() -> float:
        parameter.grad = torch.full_like(parameter, 0.5)
        return 2.5

    assert optimizer.step(closure, batch_size=4) == 2.5 and optimizer.accumulator.num_samples == 4
    assert optimizer.step(batch_size=0) is None and optimizer.num_computed == 4, "no samples are no step"
    with pytest.raises(ValueError, match="at least 0, and is -1"):
        optimizer.step(batch_size=-1)
    assert optimizer.is_synchronized_with_peers() and optimizer.local_progress.samples_accumulated == 4
    assert not optimizer.use_local_updates and build_local().use_local_updates
    assert optimizer.defaults["betas"] and repr(optimizer) and optimizer.state["local_epoch"] == 0
    with pytest.raises(NotImplementedError, match="no hooks"):
        optimizer.register_step_post_hook(print)
    with pytest.raises(ValueError, match="does not support calling add_param_group"):
        optimizer.add_param_group({})
    for params in ([], [{"params": []}], iter(())):
        with pytest.raises(ValueError, match="empty parameter list"):
            CollaborativeOptimizer(params, torch.optim.AdamW, PEER, Options(batch_size_per_step=1))


def test_loaded_state_is_the_step_that_others_are_told_and_the_parameters_of_the_model():
    one, other = build(), build()
    compute(one, 0.2)
    take(one, gradients=0.2)
    saved = one.state_dict()
    (parameter,) = other.state_averager.main_parameters
    compute(other, 0.2)
    take(other)
    parameter.data.fill_(1.5)
    other.load_state_dict(saved)
    other.finish_pending_update()
    assert saved["state"]["local_epoch"] == 1, "it is the caller's"
    assert value_of(parameters_of(other)) == value_of([parameter]) == 1.5
    assert other.local_epoch == other.state_averager.applied_step == other.tracker.local_progress.completed == 1


@pytest.mark.parametrize("may_be_used", [False, True])
def test_exception_in_a_round_is_a_failed_attempt_that_keeps_the_samples(may_be_used):
    optimizer = build()
    compute(optimizer, 0.2, samples=40)
    optimizer.coordinator.may_be_used = may_be_used
    optimizer.coordinator.during = lambda: 1 / 0
    take(optimizer)
    assert optimizer.accumulator.num_samples == (0 if may_be_used else 40), "other members may have used them"
    assert [record.outcome for record in optimizer.pop_records()] == [Outcome.FAILED]
    take(optimizer)
    take(optimizer)
    assert optimizer.tracker.local_progress.away and optimizer.local_epoch == 0
    optimizer.coordinator.during = lambda: None
    take(optimizer)
    assert optimizer.local_epoch == 1 and not optimizer.tracker.local_progress.away


def test_exception_of_the_caller_leaves_no_step_unreported(caplog):
    optimizer = build()
    optimizer.on_round = lambda entry: 1 / 0
    compute(optimizer, 0.2)
    take(optimizer)
    assert optimizer.local_epoch == optimizer.tracker.local_progress.completed == 1
    assert optimizer.state_averager.allow_state_sharing and "Could not log the round of step #1" in caplog.text


@pytest.mark.parametrize("outcome", [Outcome.AVERAGED, Outcome.ALONE])
def test_step_uses_the_average_or_without_one_the_own_gradient(outcome):
    optimizer = build()
    compute(optimizer, 0.2)
    assert not optimizer.state_averager.allow_state_sharing, "there is no trained state"
    take(optimizer, outcome, gradients=-0.2)
    expected = -0.2 if outcome == Outcome.AVERAGED else 0.2
    assert gradient_of(optimizer) == pytest.approx(expected)
    moved = value_of(parameters_of(optimizer)) - 3.0
    assert moved == pytest.approx(-0.01 if expected > 0 else 0.01, rel=1e-3)  # AdamW's first step
    assert (optimizer.local_epoch, optimizer.accumulator.num_samples) == (1, 0)
    assert optimizer.state_averager.allow_state_sharing
    assert samples_of(optimizer) == [(1, 4)]


def test_local_steps_wait_neither_for_a_round_nor_for_an_update(monkeypatch):
    """A GPU computes a target batch in about the time of a round."""
    optimizer, begun, may_end = build(target_batch_size=4), Queue(), Queue()

    def pause(stage: str) -> None:
        begun.put(stage)
        may_end.get(timeout=240)

    optimizer.coordinator.during = lambda: pause("round")
    update = optimizer.state_averager.apply_update
    monkeypatch.setattr(optimizer.state_averager, "apply_update", lambda *args: (pause("update"), update(*args)))
    (parameter,) = optimizer.state_averager.main_parameters
    parameter.grad = torch.ones_like(parameter)
    optimizer.step(batch_size=4)
    for stage in ("round", "update"):
        assert begun.get(timeout=120) == stage
        optimizer.step(batch_size=1)
        assert optimizer.local_epoch == 0 and optimizer.steps.phase.value == stage
        may_end.put(stage)
    wait_until(lambda: optimizer.local_epoch == 1, 120, "the step")
    optimizer.stop_averaging()
    assert optimizer.accumulator.num_samples == 2


def test_global_steps_leave_the_cores_to_the_local_steps(monkeypatch):
    optimizer, numbers, before = build(), [], torch.get_num_threads()

    def compute() -> None:
        torch.ones(1_000_000).add_(1)
        numbers.append(torch.get_num_threads())

    monkeypatch.setattr(optimizer.steps, "advance", compute)
    try:
        torch.set_num_threads(2)
        optimizer.steps.start()
        wait_until(lambda: numbers, 120, "the step thread")
        optimizer.stop_averaging()
        assert (numbers[0], torch.get_num_threads()) == (1, 2)
    finally:
        torch.set_num_threads(before)


def test_missed_contribution_counts_once_more_unless_the_next_step_is_missed_too():
    optimizer = build()
    compute(optimizer, 0.2, samples=12)
    take(optimizer, Outcome.MISSED)
    compute(optimizer, 0.6, samples=4)
    assert optimizer.accumulator.num_samples == 16
    take(optimizer, Outcome.MISSED)
    assert value_of(optimizer.coordinator.contribution) == pytest.approx(0.3)
    take(optimizer, Outcome.MISSED)
    assert optimizer.accumulator.num_samples == 0 and optimizer.distance == 3
    assert value_of(parameters_of(optimizer)) == 3.0
    assert not optimizer.state_averager.allow_state_sharing, "its state lacks three updates"
    assert samples_of(optimizer) == [(1, None), (2, None), (3, None)]
    report = optimizer.tracker.local_progress
    assert report.away and report.distance == 3 and optimizer.local_epoch == 3


def test_peer_on_a_slow_link_is_told_what_to_do(caplog):
    optimizer = build()
    for was_late in (False, True, True):
        take(optimizer, was_late=was_late)
    (record,) = [record for record in caplog.records if "too late" in record.message]
    assert "step #2" in record.message


@pytest.mark.parametrize("outcome", [Outcome.MISSED, Outcome.FAILED, Outcome.AVERAGED])
@pytest.mark.parametrize("local", [False, True])
def test_samples_that_other_members_may_have_used_are_not_sent_again(outcome, local):
    """The member was cut off after it had sent all its parts: no average has arrived."""
    optimizer = build_local() if local else build()
    compute(optimizer, 0.2, samples=12)
    take(optimizer, outcome, may_be_used=outcome != Outcome.AVERAGED, received=0.0)
    assert optimizer.accumulator.num_samples == optimizer.tracker.local_progress.samples_accumulated == 0
    (parameter,) = optimizer.state_averager.main_parameters
    before = parameter[0, 0].item()
    compute(optimizer, 0.0, samples=4)
    moved = before - parameter[0, 0].item()  # by the inner optimizer's momentum
    take(optimizer)
    assert optimizer.coordinator.weights == [12.0, 4.0]
    assert value_of(optimizer.coordinator.contribution) == pytest.approx(moved, abs=1e-6)


def test_failed_round_is_repeated_with_its_samples_and_at_last_without_the_others():
    optimizer = build(average_state_every=1)
    ignored = []
    optimizer.tracker.ignore = lambda silent: ignored.append(silent) or 1
    for attempt in range(MAX_ATTEMPTS):
        assert not ignored
        compute(optimizer, 0.2)
        take(optimizer, Outcome.FAILED)
        assert optimizer.accumulator.num_samples == 4 * (attempt + 1) and optimizer.local_epoch == 0
        assert not optimizer.steps.is_due(optimizer.tracker.view()), "a local step comes first"
    assert len(ignored) == 1, "no other trainer is known: this peer has the smallest ID"
    take(optimizer, Outcome.ALONE)
    assert samples_of(optimizer) == [(1, 12)] and [step for step, _ in optimizer.state_averager.marks] == [1]


@pytest.mark.parametrize(
    ("client", "others", "attempts"),
    [
        (False, [], 3),
        (False, [{}], 6),  # a public trainer with a smaller ID
        (False, [{"client_mode": True}], 3),
        (True, [{"client_mode": True}], 6),
        (True, [{}], None),
        (True, [{"marks": ((8, 12 * "1"), (16, 12 * "2"), (24, 12 * "3"))}], 3),
    ],
)
def test_who_goes_on_without_the_others(client, others, attempts, monkeypatch):
    """A client does not while it hears a public trainer of its history: nobody could download its fork."""
    optimizer = build(average_state_every=1)
    tracker, now = optimizer.tracker, time.monotonic()
    optimizer.state_averager.marks = tuple((step, 12 * "a") for step in (8, 16, 24))
    optimizer.joining.report()
    tracker.own.progress = replace(tracker.local_progress, client_mode=client)
    heard = [
        replace(tracker.local_progress, **{"client_mode": False, "reported_here": now, **other}) for other in others
    ]
    tracker.others.reports = {number: replace(other, peer_id=bytes([number])) for number, other in enumerate(heard)}
    tracker.others.read_at = now
    found = []
    tracker.ignore = lambda _silent: found.append(len(optimizer.coordinator.weights)) or 1
    for _ in range(9):
        take(optimizer, Outcome.FAILED)
    assert (found[0] if found else None) == attempts
    optimizer.membership.attempts = 2
    optimizer.joining.skip(1)
    found.clear()
    take(optimizer, Outcome.FAILED)
    assert not found, "another trainer has taken a step"


@pytest.mark.parametrize(("seconds", "waits"), [(1.0, True), (20.0, False)])
def test_local_step_waits_for_short_rounds(seconds, waits):
    """The next one then begins with the new parameters. Of 100 seconds, the last rounds have taken 1 or 20."""
    optimizer, begun, ended = build(), Event(), Event()
    optimizer.pace.begin_local_step()
    optimizer.pace.rounds.extend((time.monotonic() - age, seconds, True) for age in (300.0, 200.0, 100.0))
    optimizer.coordinator.gradients = 1.0
    is_waiting = []

    def run_round() -> None:
        begun.set()
        if waits:
            wait_until(lambda: optimizer.steps.is_awaited, 60, "the local step")
        is_waiting.append(optimizer.steps.is_awaited or not ended.wait(60))

    optimizer.coordinator.during = run_round
    optimizer.state_averager.main_parameters[0].grad = torch.ones(1, 2)
    optimizer.step(batch_size=64)
    is_new = value_of(optimizer.state_averager.main_parameters) != 3.0
    assert begun.wait(60)
    ended.set()
    optimizer.stop_averaging()
    assert is_new == waits and is_waiting == [waits]


@pytest.mark.parametrize(
    ("local_seconds", "round_seconds", "age", "flags", "waits"),
    [
        (4.0, 1.0, 2.0, {}, True),
        (4.0, 1.0, 9.0, {}, False),  # the main thread is busy with something else, such as a checkpoint
        (6.0, 1.0, 2.0, {}, False),
        (4.0, 8.0, 2.0, {}, False),
        (4.0, 1.0, 2.0, {"delay_grad_averaging": False}, False),  # it begins no step during a local step anyway
        (4.0, 1.0, 2.0, {"local_updates": True}, False),
    ],
)
def test_due_step_waits_for_the_end_of_a_short_local_step(local_seconds, round_seconds, age, flags, waits):
    """Its samples count in the step then. Global steps take 100 seconds."""
    optimizer = build_local() if "local_updates" in flags else build(**flags)
    now = time.monotonic()
    optimizer.pace.rounds.extend((now - ago, round_seconds, True) for ago in (300.0, 200.0, 100.0))
    optimizer.pace.local_seconds, optimizer.pace.local_since = local_seconds, now - age
    compute(optimizer, 0.1, samples=64)
    optimizer.steps.advance()
    may_begin = flags.get("delay_grad_averaging", True)
    assert optimizer.local_epoch == (not waits and may_begin)
    optimizer.steps.is_awaited = True
    optimizer.steps.advance()
    assert optimizer.local_epoch == 1


def test_averaging_share_is_the_time_in_rounds(monkeypatch):
    optimizer, now = build(), [100.0]
    monkeypatch.setattr("peerstep.step.thread.time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    optimizer.coordinator.during = lambda: now.append(now.pop() + 2.0)
    for number, expected in enumerate((None, None, None, 0.25, 0.25)):
        assert optimizer.pace.averaging_share == expected, f"after {number} rounds"
        take(optimizer)
        now[0] += 6.0


def test_distance_grows_by_what_is_missed_and_shrinks_by_the_parameters_received():
    optimizer = build(average_state_every=2)
    take(optimizer, Outcome.MISSED)
    left = 0.1**0.5 + 0.1  # of the parameters, and the gradients
    for received, distance in ((0.9, left), (1.0, left), (1.0, 0.0)):  # steps 2, 3 and 4
        take(optimizer, received=received, parameters=2.9)
        assert optimizer.distance == pytest.approx(distance)
        assert optimizer.pace.recent_rounds[-1] == (received == 1)
        assert value_of(parameters_of(optimizer)) == pytest.approx(2.9, abs=0.02)
        assert optimizer.membership.is_settling == (optimizer.local_epoch < 4), "its statistics lack a gradient"
    assert [step for step, _ in optimizer.state_averager.marks] == [4], "the round of step 2 was not complete"


def test_peer_that_lacks_updates_receives_parameters_on_demand():
    optimizer = build(average_state_every=8)
    optimizer.distance = 40.0
    take(optimizer, is_given=True, parameters=1.5)
    assert optimizer.distance == 0 and optimizer.membership.is_settling
    assert value_of(parameters_of(optimizer)) == pytest.approx(1.5, abs=0.02)
    assert samples_of(optimizer) == [(1, None)], "its gradients had no weight"
    assert optimizer.state_averager.allow_state_sharing and optimizer.state_averager.marks == ()


@pytest.mark.parametrize(
    ("is_far", "other", "after"),
    [(False, PeerID(bytes(34)), 0), (True, PeerID(bytes(34)), MAX_LAG), (True, None, 0)],
)
def test_peer_whose_parameters_are_far_from_those_of_most_receives_theirs(is_far, other, after):
    """One peer of the group, with the smallest peer ID, keeps its own: else nobody would give any."""
    optimizer = build(average_state_every=1)
    optimizer.coordinator.other = other
    take(optimizer, parameters=2.5, is_far=is_far)
    assert value_of(parameters_of(optimizer)) == pytest.approx(3.0 if is_far else 2.5, abs=0.02)
    assert optimizer.distance == after


@pytest.mark.parametrize("invited", [False, True])
@pytest.mark.parametrize("distance", [0.0, 3.0])
def test_bounds_of_a_round(distance, invited, monkeypatch):
    """Those on parameters follow the present learning rate, and what this peer lacks."""
    monkeypatch.setattr(PEER.dht, "is_open", not invited, raising=False)
    optimizer = build(learning_rate=0.5, warmup_steps=10, total_steps=20)
    take(optimizer, gradients=1.0)
    take(optimizer, gradients=1.0)
    bounds = optimizer.grad_averager.make_bounds(weight=8.0, distance=distance, counts=distance < 0.5)
    step, change = (2 * 0.1, 0.1) if distance < 0.5 else (2 * 0.5 * 4, 0.4)
    assert bounds.parameter_step == pytest.approx(step) and bounds.parameter_change == pytest.approx(change)
    assert bounds.believes_weights == invited and bounds.max_weight == 64.0 and bounds.has_gradient
    assert not optimizer.grad_averager.make_bounds(0.0, distance, True).has_gradient


def test_step_without_finite_parameters_is_not_taken():
    optimizer = build()
    parameters_of(optimizer)[0].data.fill_(float("inf"))
    take(optimizer)
    assert (
        optimizer.steps.is_interrupted(optimizer.tracker.view())
        and optimizer.local_epoch == 0
        and not optimizer.coordinator.weights
    )


@pytest.mark.parametrize(("agreed", "missed"), [(9, 0), (10, 0), (12, 2), (10 + MAX_MISSED_UPDATES + 1, 0)])
def test_steps_that_the_others_took_during_a_download_are_missed_updates(agreed, missed, monkeypatch):
    optimizer = build()
    compute(optimizer, 0.2)
    monkeypatch.setattr(View, "agreed_step", agreed)
    monkeypatch.setattr(optimizer.tracker, "refresh", bool)
    monkeypatch.setattr(
        optimizer.state_averager, "load_state_from_peers",
        lambda **_query: optimizer.state_averager.sync_with_main_parameters(10) or True,
    )  # fmt: skip
    assert optimizer.load_state_from_peers()
    assert optimizer.coordinator.is_called_off, "its group would wait for it"
    assert (optimizer.local_epoch, optimizer.distance) == (10 + missed, missed)
    assert optimizer.tracker.local_progress.completed == 10 + missed
    assert optimizer.state_averager.allow_state_sharing
    assert optimizer.accumulator.num_samples == 0 and samples_of(optimizer) == [(10 + missed, None)]


@pytest.mark.parametrize(("completed", "least"), [(8, 7), (10, 9), (11, 11), (12, 11)])
def test_only_a_state_of_another_step_is_downloaded(completed, least, monkeypatch):
    optimizer = build()
    optimizer.state_averager.local_epoch = 10
    other = replace(optimizer.tracker.local_progress, epoch=12, completed=completed)
    monkeypatch.setattr(View, "side_to_join", other)
    monkeypatch.setattr(optimizer.coordinator.stopped, "wait", bool)
    monkeypatch.setattr(optimizer.tracker, "refresh", bool)
    queries = []
    monkeypatch.setattr(optimizer.state_averager, "download_state", lambda **query: queries.append(query))
    optimizer.load_state_from_peers()
    assert queries[0]["min_step"] == least


@pytest.mark.parametrize(("others", "loads"), [(0, 3), (2, 1)])
def test_claim_of_a_step_that_nobody_offers_costs_no_gradients(monkeypatch, others, loads):
    """Two keys that claimed later steps at the beginning of a run held up four trainers for three downloads each."""
    optimizer = build()
    compute(optimizer, 0.2)
    optimizer.state_averager.local_epoch = 5
    other = replace(optimizer.tracker.local_progress, epoch=30_000, completed=30_000)
    monkeypatch.setattr(View, "side_to_join", other)
    monkeypatch.setattr(optimizer.tracker, "refresh", bool)
    monkeypatch.setattr(optimizer.coordinator.stopped, "wait", bool)
    monkeypatch.setattr(optimizer.state_averager, "download_state", lambda *_, **_options: None)
    own_side = [replace(optimizer.tracker.local_progress, peer_id=bytes([number])) for number in range(others)]
    monkeypatch.setattr(View, "live", [other, replace(other, epoch=6), *own_side])
    ignored = []
    monkeypatch.setattr(optimizer.tracker, "ignore", lambda silent: ignored.append(list(silent)) or 1)
    assert optimizer.steps.needs_state(optimizer.tracker.view())
    assert not any(optimizer.load_state_from_peers() for _ in range(loads))
    assert ignored == [[other]] and optimizer.accumulator.num_samples == 4


# Local updates


def build_local(**flags) -> CollaborativeOptimizer:
    return build(local_updates=True, outer_learning_rate=0.5, outer_momentum=0.5, **{"learning_rate": 0.1, **flags})


def test_learning_rate_of_local_steps_rises_and_is_that_of_the_step_that_is_computed():
    optimizer = build_local(warmup_steps=4)
    (parameter,) = optimizer.state_averager.main_parameters
    for step, epoch in ((1, 0), (2, 0), (INNER_WARMUP_STEPS, 1)):
        optimizer.accumulator.num_inner_steps, optimizer.state_averager.local_epoch = step - 1, epoch
        compute(optimizer, 0.2)
        expected = 0.1 * (epoch + 1) / 4 * step / INNER_WARMUP_STEPS
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected)
    assert parameter[0, 0] < 3.0


def test_peer_that_missed_a_round_keeps_its_local_updates_for_the_next():
    optimizer = build_local()
    for missed in (1, 2, 3):
        compute(optimizer, 0.2, samples=12)
        take(optimizer, Outcome.MISSED)
        assert optimizer.accumulator.num_samples == 12 * missed and optimizer.steps.may_begin_step()
    change = value_of(optimizer.state_averager.main_parameters) - 3.0
    assert value_of(optimizer.accumulator.local_changes()) == pytest.approx(change)
    take(optimizer, is_given=True, parameters=2.0)
    optimizer.finish_pending_update()
    assert value_of(optimizer.state_averager.main_parameters) == pytest.approx(2.0)


def test_local_updates_are_bounded_by_the_parameters():
    optimizer = build_local(max_update_norm=0.5)
    assert optimizer.accumulator.bound() == pytest.approx(0.5 * 3.0 * 2**0.5) and build().accumulator.bound() == 1.0
    bounds = optimizer.grad_averager.make_bounds(8.0, 0.0, True)
    assert not bounds.has_gradient, "a slow peer's are smaller than the mean"


def test_local_updates_of_other_parameters_are_dropped(monkeypatch):
    optimizer = build_local()
    optimizer.begin_at(5, [torch.full((1, 2), 0.5)])
    compute(optimizer, 0.2)

    def load(**_query) -> bool:
        parameters_of(optimizer)[0].data.fill_(7.0)
        optimizer.state_averager.local_epoch = 8
        return True

    monkeypatch.setattr(optimizer.state_averager, "load_state_from_peers", load)
    monkeypatch.setattr(optimizer.tracker, "refresh", bool)
    assert optimizer.load_state_from_peers()
    assert value_of(optimizer.state_averager.main_parameters) == pytest.approx(7.0)
    assert optimizer.accumulator.num_samples == 0


def test_inner_optimizer_begins_again_with_a_restored_state():
    optimizer = build_local()
    compute(optimizer, 0.2)
    assert any(value["exp_avg"].any() for value in optimizer.accumulator.inner.state.values())
    optimizer.restore(*snapshot(optimizer.state_averager))
    assert not any(value["exp_avg"].any() for value in optimizer.accumulator.inner.state.values())


def test_local_updates_that_diverge_are_sent_to_nobody_and_dropped():
    optimizer = build_local()
    compute(optimizer, 0.2)
    assert not optimizer.discard_local_updates(), "they are finite"
    optimizer.state_averager.main_parameters[0].data[0, 0] = float("nan")
    take(optimizer)
    assert optimizer.coordinator.weights == [0.0] and value_of(optimizer.coordinator.contribution) == 0.0
    assert optimizer.discard_local_updates()
    assert torch.equal(*optimizer.state_averager.main_parameters, *parameters_of(optimizer))


def test_checkpoint_has_the_parameters_of_the_last_step():
    optimizer = build_local()
    (parameter,) = optimizer.state_averager.main_parameters
    compute(optimizer, 0.2)
    before = parameter.detach().clone()
    with optimizer.saved_state():
        assert torch.equal(parameter, parameters_of(optimizer)[0]) and not torch.equal(parameter, before)
    assert torch.allclose(parameter, before)


@pytest.mark.parametrize(("unsent", "resumed"), [(0.25, 0.25), (-8.0, -1.0)])
def test_what_sparse_rounds_have_not_taken_is_resumed_within_the_bound_on_a_contribution(unsent, resumed):
    optimizer = build_local(gradient_compression="topk", max_update_norm=0.5)
    optimizer.state_averager.main_parameters[0].data.fill_(2.0)
    optimizer.begin_at(5, [torch.full((1, 2), unsent).bfloat16()])
    assert value_of(optimizer.state_averager.main_parameters) == pytest.approx(2.0 + resumed)
    assert value_of(parameters_of(optimizer)) == 2.0 and optimizer.accumulator.num_samples == 0
    with optimizer.saved_state() as saved:
        assert value_of(saved) == pytest.approx(resumed)
    take(optimizer)
    assert value_of(optimizer.coordinator.contribution) == pytest.approx(-resumed, rel=0.1), "it is sent"


def test_only_sparse_rounds_leave_something_for_a_checkpoint():
    for other in (build(), build_local(), build_local(gradient_compression="blockwise4")):
        compute(other, 0.2)
        with other.saved_state() as saved:
            assert saved is None


@pytest.mark.parametrize("make", [build, build_local])
def test_checkpoint_during_a_hanging_round_waits_for_nothing_and_has_one_step(make):
    """A round takes up to --averaging_timeout, during which a local step cannot begin either."""
    optimizer, begun, may_end = make(), Event(), Event()
    (parameter,) = optimizer.state_averager.main_parameters
    compute(optimizer, 0.2)
    take(optimizer)
    compute(optimizer, 0.2)
    optimizer.coordinator.during = lambda: begun.set() or may_end.wait(240)

    def take_next() -> None:
        with optimizer.model.step_lock:
            optimizer.steps.take_step(2)

    def save() -> None:
        with optimizer.saved_state():
            metadata, (copy, *_) = snapshot(optimizer.state_averager)
            assert metadata["epoch"] == 1 and torch.equal(copy, parameter)
            may_end.set()  # the step cannot change the state before the context is closed
            time.sleep(0.2)
            assert torch.equal(copy, parameters_of(optimizer)[0]) and torch.equal(copy, parameter)

    with ThreadPoolExecutor(2) as pool:
        step = pool.submit(take_next)
        assert begun.wait(120)
        try:
            pool.submit(save).result(120)  # otherwise it has waited for the round
        finally:
            may_end.set()
        step.result(120)
    assert optimizer.local_epoch == optimizer.state_averager.applied_step == 2
    assert not optimizer.accumulator.num_samples
    optimizer.finish_pending_update()
    assert torch.allclose(parameter, parameters_of(optimizer)[0]), "the local updates are in the step"


def test_samples_of_a_missing_micro_batch_are_not_counted():
    optimizer = build()
    compute(optimizer, 0.1, samples=2)
    for lost in (6, 3):
        optimizer.num_lost = lost
        compute(optimizer, 0.4 if lost == 3 else 7.0, samples=6)
    take(optimizer)
    assert value_of(optimizer.coordinator.contribution) == pytest.approx((2 * 0.1 + 3 * 0.4) / 5)
    assert optimizer.num_computed == 5 and optimizer.num_lost == 0


def test_error_of_the_device_in_the_step_thread_ends_training(monkeypatch):
    """No later call on the device works. It logged a traceback each second until the main thread met it, too."""
    optimizer, failures = build(), []

    def fail() -> None:
        failures.append(True)
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(optimizer.steps, "advance", fail)
    optimizer.steps.start()
    optimizer.steps.join(20)
    assert not optimizer.steps.is_alive() and len(failures) == 1
    with pytest.raises(torch.AcceleratorError, match="launch failure"):
        optimizer.step()


def test_broken_device_neither_hides_its_first_error_nor_keeps_averagers_running(monkeypatch, caplog):
    optimizer, ended = build(), []
    monkeypatch.setattr(optimizer, "say_goodbye", lambda: None)
    for averager in (optimizer.state_averager, optimizer.grad_averager):
        monkeypatch.setattr(averager, "shutdown", lambda averager=averager: ended.append(averager))

    def fail() -> None:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(optimizer.accumulator, "rebase", fail)
    optimizer.model.has_update = True
    optimizer.shutdown()
    assert len(ended) == 2 and "lacks the newest step" in caplog.text
