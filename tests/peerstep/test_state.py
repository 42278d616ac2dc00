"""Tests of the training state: schedule, updates, snapshots, and states that do not fit."""

import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from multiprocessing import get_context
from types import SimpleNamespace

import pytest
import torch
from hivemind.proto.averaging_pb2 import DownloadData
from hivemind.utils import MSGPackSerializer

from peerstep.state.averager import TrainingStateAverager, set_schedule
from peerstep.state.layout import StateLoadError, all_finite
from tests.support.engine import Hyperparameters
from tests.support.offline import offline_averager
from tests.support.state import (
    fill_parameters,
    flat,
    learning_rates,
    receive,
    snapshot,
    update,
)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


# Schedule


def build_schedule():
    chosen = Hyperparameters(warmup_steps=10, total_steps=50)
    return chosen.build_scheduler(chosen.build_optimizer(chosen.build_groups(torch.nn.Linear(2, 2))))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_value_that_is_not_finite_is_found(device, dtype, value):
    tensors = [tensor.to(device) for tensor in (torch.zeros(100, dtype=dtype), torch.ones(3, 50, dtype=dtype))]
    tensors += [torch.tensor([7], device=device), torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)]
    tensors += [-tensors[-1], torch.empty(0, dtype=dtype)]
    assert all_finite(tensors) and all_finite([])
    tensors[1][2, 49] = value
    assert not all_finite(tensors)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_schedule_is_that_of_stepping_to_the_same_step():
    direct = build_schedule()
    for epoch in (50, 0, 1, 60, 9, 10, 11, 49):  # forwards and backwards
        stepped = build_schedule()
        for _ in range(epoch):
            stepped.step()
        set_schedule(direct, epoch)
        assert direct.state_dict() == stepped.state_dict() and direct.last_epoch == epoch
        assert learning_rates(direct.optimizer) == learning_rates(stepped.optimizer)
        assert direct.get_last_lr() == stepped.get_last_lr() == learning_rates(direct.optimizer)
    direct.step()
    assert learning_rates(direct.optimizer) == [0.0, 0.0]


def test_step_number_of_a_state_costs_no_time_and_may_be_lower():
    averager = offline_averager()
    metadata, tensors = snapshot(averager)
    averager.scheduler.step = lambda: pytest.fail("it takes each step of the schedule")
    averager.restore({**metadata, "epoch": 10**6}, tensors)
    assert averager.local_epoch == 10**6
    assert learning_rates(averager.optimizer) == [0.0, 0.0]
    for go_back in (lambda: averager.restore({**metadata, "epoch": 500}, tensors),
                    lambda: averager.sync_with_main_parameters(500)):  # fmt: skip
        averager.restore({**metadata, "epoch": 900}, tensors)
        go_back()
        assert averager.local_epoch == averager.applied_step == snapshot(averager)[0]["epoch"] == 500
        assert learning_rates(averager.optimizer) == pytest.approx([0.005, 0.005])


# Updates


def test_update_has_the_learning_rate_of_the_previous_step():
    averager = offline_averager(hyperparameters=Hyperparameters(warmup_steps=0, total_steps=10))
    used = []
    step = averager.optimizer.step
    averager.optimizer.step = lambda: (used.extend(learning_rates(averager.optimizer)[:1]), step())
    for epoch in (1, 5, 3):  # 5: after steps without this peer; 3: after a rollback
        update(averager, epoch)
    assert used == pytest.approx([0.010, 0.006, 0.008])
    assert learning_rates(averager.optimizer) == pytest.approx([0.007, 0.007])


@pytest.mark.parametrize("change_state", ["apply_update", "restore"])
def test_nobody_reads_the_state_in_the_middle_of_an_update_or_a_download(pool, change_state, monkeypatch):
    averager = offline_averager()
    is_in_the_middle, may_end = threading.Event(), threading.Event()

    def be_interrupted(epoch: int) -> None:
        is_in_the_middle.set()
        may_end.wait(60)
        fill_parameters(averager, 2.0)
        averager.applied_step = epoch

    monkeypatch.setattr("peerstep.state.averager.set_schedule", lambda _scheduler, step: be_interrupted(step))
    averaged = [torch.full_like(parameter, 2.0) for parameter in averager.layout.parameters]
    averager.copy_state()  # keeps a copy of the state before the update
    metadata, tensors = snapshot(averager)
    if change_state == "apply_update":
        change = pool.submit(update, averager, 1, parameters=averaged)
    else:
        change = pool.submit(averager.restore, {**metadata, "epoch": 1}, [*averaged, *tensors[len(averaged) :]])
    assert is_in_the_middle.wait(60)
    readers = [pool.submit(snapshot, averager), pool.submit(averager.copy_state),
               pool.submit(averager.copy_to_model)]  # fmt: skip
    assert not wait(readers, timeout=0.5).done
    may_end.set()
    change.result(60)
    for metadata, tensors in (readers[0].result(60), receive(readers[1].result(60), averager)):
        assert metadata["epoch"] == 1
        assert all((tensor == 2.0).all() for tensor in [*tensors][: len(averaged)])
    readers[2].result(60)
    assert all((parameter == 2.0).all() for parameter in averager.main_parameters)


def test_offers_and_snapshots_carry_the_applied_step():
    averager = offline_averager()
    averager.sync_with_main_parameters(5)
    averager.local_epoch = 6  # the update to step 6 is still running in the background
    assert averager.applied_step == snapshot(averager)[0]["epoch"] == 5
    assert receive(averager.copy_state(), averager)[0]["epoch"] == 5


# Copies of the state


def test_downloads_of_one_state_share_an_unchanging_copy():
    averager = offline_averager()
    update(averager, 1, seed=1)
    first = averager.copy_state()
    assert averager.copy_state() is first
    before = list(first)
    update(averager, 2)
    assert list(first) == before
    third = averager.copy_state()
    assert list(third) != before
    averager.restore(*snapshot(averager))
    assert averager.copy_state() is not third


def test_steps_do_not_wait_while_a_copy_is_written(pool):
    """A request of 100 bytes made each trainer wait for its disk, at each step."""
    averager = offline_averager()
    update(averager, 1, seed=1)
    before, serialize, may_continue = flat(snapshot(averager)[1]).clone(), averager.to_messages, threading.Event()
    averager.to_messages = lambda *state: (message for message in serialize(*state) if may_continue.wait(60))
    copy = pool.submit(averager.copy_state)
    for step in (2, 3):
        pool.submit(update, averager, step).result(60)
    may_continue.set()
    metadata, tensors = receive(copy.result(60), averager)
    assert metadata["epoch"] == 1 and torch.allclose(flat(tensors), before, atol=1e-6)
    assert receive(averager.copy_state(), averager)[0]["epoch"] == 3


def test_copies_take_a_small_share_of_the_time(monkeypatch):
    """Here one takes 4 seconds, and a step ten. Meanwhile downloads get the older copy, with its own step."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("peerstep.state.averager.time", SimpleNamespace(monotonic=lambda: clock.now))
    averager, steps = offline_averager(), []
    serialize = averager.to_messages

    def write_slowly(*state):
        clock.now += 4.0
        yield from serialize(*state)

    averager.to_messages = write_slowly
    for step in range(1, 40):
        update(averager, step)
        first = DownloadData.FromString(next(iter(averager.copy_state())))
        steps.append(MSGPackSerializer.loads(first.metadata)["epoch"])
        clock.now += 10.0
    num_copies = len(set(steps))
    assert num_copies >= 2 and 4.0 * num_copies <= 1.1 * averager.COPY_SHARE * clock.now + 4.0
    assert max(step - taken for step, taken in enumerate(steps, 1)) <= 4.0 / averager.COPY_SHARE / 10.0 + 1
    averager.restore({**snapshot(averager)[0], "epoch": 7}, snapshot(averager)[1])
    assert receive(averager.copy_state(), averager)[0]["epoch"] == 7, "the copy before was of another history"


@pytest.mark.parametrize("optimizer", ["lamb", "adamw"])
def test_restored_tensors_are_copied_and_statistics_restored_in_place(optimizer):
    """torch's optimizers would keep and update the tensors that they are given."""
    averager = offline_averager(hyperparameters=Hyperparameters(optimizer=optimizer))
    update(averager, 1)
    state = snapshot(averager)
    before, places = flat(state[1]).clone(), [value.data_ptr() for value in statistics_of(averager)]
    update(averager, 2)
    averager.restore(*state)
    assert [value.data_ptr() for value in statistics_of(averager)] == places
    assert torch.equal(flat(snapshot(averager)[1]), before)
    update(averager, 2)
    assert torch.equal(flat(state[1]), before)


def statistics_of(averager: TrainingStateAverager) -> list[torch.Tensor]:
    values = (value for values in averager.optimizer.state.values() for value in values.values())
    return [value for value in values if isinstance(value, torch.Tensor) and value.ndim]


def test_state_is_saved_without_a_copy(pool):
    averager = offline_averager()
    with averager.frozen_state() as (_, tensors):
        live = [*averager.layout.parameters, *statistics_of(averager)]
        assert [tensor.data_ptr() for tensor in tensors if tensor.ndim] == [tensor.data_ptr() for tensor in live]
        before, change = flat(tensors).clone(), pool.submit(update, averager, 1)
        assert not wait([change], timeout=0.3).done and torch.equal(flat(tensors), before)
    change.result(60)


def test_copies_are_as_they_are_sent():
    averager = offline_averager(compression="float16")
    live = flat(snapshot(averager)[1]).clone()
    num_values = sum(tensor.numel() for tensor in snapshot(averager)[1])
    assert 2 * num_values < sum(map(len, averager.copy_state())) < 2.2 * num_values
    assert torch.equal(flat(snapshot(averager)[1]), live)


def test_peer_without_space_for_a_copy_says_so(tmp_path):
    averager = offline_averager(folder=tmp_path / "missing")
    with pytest.raises(OSError, match=r"^A peer cannot download the state: .*missing"):
        averager.get_current_state()


def test_children_keep_no_copies_of_the_statistics():
    """They see what this process writes after the fork."""
    statistics = statistics_of(offline_averager())
    fork = get_context("fork")
    ours, theirs = fork.Pipe()
    child = fork.Process(target=lambda: theirs.send(theirs.recv() and all((x == 2.0).all() for x in statistics)))
    child.start()
    for value in statistics:
        value.fill_(2.0)
    ours.send("changed")
    assert ours.poll(60) and ours.recv()
    child.join(60)


# Second moments


def build_rmsprop(groups: list[dict]) -> torch.optim.Optimizer:
    optimizer = torch.optim.RMSprop(groups, lr=0.01, momentum=0.9)
    optimizer.second_moments = ("square_avg",)
    return optimizer


def transfer(donor: TrainingStateAverager, newcomer: TrainingStateAverager) -> None:
    """Restore the state of a donor as it arrives at a newcomer."""
    newcomer.restore(*receive(donor.copy_state(), newcomer))


@pytest.mark.parametrize("compression", ["none", "float16", "scaled_float16"])
@pytest.mark.parametrize(
    ("optimizer", "second_moment", "momentum"),
    [(None, "exp_avg_sq", "exp_avg"), (build_rmsprop, "square_avg", "momentum_buffer")],
)
def test_small_second_moments_survive_the_transfer(optimizer, second_moment, momentum, compression):
    """The update divides by the root of the second moment. Values below 6e-8 would be 0 in float16."""
    donor, newcomer = (offline_averager(optimizer=optimizer, compression=compression) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    for values in donor.optimizer.state.values():
        values[momentum].fill_(-(2.0**-21))  # gradients could have made it
        shape = values[second_moment].shape
        values[second_moment].copy_(10 ** (-14 + 8 * torch.rand(shape, generator=generator)))  # from 1e-14 to 1e-6
    transfer(donor, newcomer)
    sent, received = (
        flat([values[second_moment] for values in averager.optimizer.state.values()]) for averager in (donor, newcomer)
    )
    assert (received >= 0).all()
    divisors = [moment.sqrt() + Hyperparameters.adam_epsilon for moment in (sent, received)]
    error = (divisors[1] / divisors[0] - 1).abs()
    assert error.max() < (1e-4 if compression == "none" else 0.05)
    assert error.mean() < 0.005
    assert all((values[momentum] == -(2.0**-21)).all() for values in newcomer.optimizer.state.values())


# Invalid states


def test_states_that_do_not_fit_are_refused_whole():
    averager = offline_averager()
    metadata, tensors = snapshot(averager)
    names = metadata["statistics"]
    before = flat(averager.main_parameters)
    first, step = len(tensors) - len(names), names.index("step")

    def refuse(match: str, changed_metadata=metadata, changed_tensors=tensors):
        with pytest.raises(StateLoadError, match=match):
            averager.restore(changed_metadata, changed_tensors)

    def with_value(index: int, value: float) -> list[torch.Tensor]:
        return [*tensors[:index], torch.full_like(tensors[index], value), *tensors[index + 1 :]]

    refuse("step number", {**metadata, "epoch": "5"})
    refuse("step number", {**metadata, "epoch": 10**18})
    refuse("step number", {**metadata, "epoch": True})
    refuse("other shapes", changed_tensors=[tensors[0][:-1], *tensors[1:]])
    refuse("other shapes", changed_tensors=tensors[:3])
    refuse("other shapes", changed_tensors=tensors[:-1])
    refuse("other shapes", changed_tensors=[*tensors[:-1], torch.zeros(2)])
    for statistics in (names[:-1], [*names[1:], names[0]], [1] * len(names), None):
        refuse("another optimizer", {**metadata, "statistics": statistics})
    refuse("another optimizer", {"epoch": 1, "marks": []})
    for index in (0, first, first + step):
        refuse("not finite", changed_tensors=with_value(index, float("nan")))
        refuse("not finite", changed_tensors=with_value(index, float("inf")))
    for index in (first + step, first + names.index("exp_avg_sq")):
        refuse("negative", changed_tensors=with_value(index, -5))
    refuse("impossible step count", changed_tensors=with_value(first + step, 2**63 - 1))
    assert averager.local_epoch == averager.applied_step == 0
    assert torch.equal(before, flat(averager.main_parameters))

    changed = [tensor + 1 for tensor in tensors]
    learning_rate = averager.optimizer.param_groups[0]["lr"]
    averager.restore({**metadata, "epoch": 7}, changed)
    assert averager.local_epoch == averager.applied_step == 7
    assert averager.optimizer.param_groups[0]["lr"] == pytest.approx(learning_rate * 993 / 1000)
    assert averager.optimizer.param_groups[0]["weight_decay"] == 0.01
    assert torch.equal(flat(averager.main_parameters), flat(changed[: len(averager.main_parameters)]))
    assert torch.equal(flat(snapshot(averager)[1]), flat(changed))
    assert {type(values["step"]) for values in averager.optimizer.state.values()} == {int}
