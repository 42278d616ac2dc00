"""Tests of rounds between real peers: a swarm takes the same steps as one process with the same samples."""

import asyncio
import gc
import signal
import threading
import time
from collections import Counter
from types import SimpleNamespace
from typing import AsyncIterator  # noqa: UP035  hivemind does not recognize that of collections.abc

import pytest
import torch
from hivemind.averaging.control import AveragingStage
from hivemind.proto.averaging_pb2 import AVERAGED_PART, BAD_GROUP_ID, AveragingData
from hivemind.utils import MPFuture
from hivemind.utils.asyncio import as_aiter

from peerstep.base import SafeAverager
from peerstep.node import SafeDHT
from peerstep.rounds import RoundAverager
from tests.support.peers import wait_until
from tests.support.swarm import Replay


@pytest.mark.parametrize("are_delayed", [True, False], ids=["delayed", "not delayed"])
def test_unequal_peers_take_the_steps_of_one_process(build_swarm, are_delayed, monkeypatch):
    """Three trainers, one of them in client mode; the gradient of each step is clipped.

    After two steps one trainer restarts and another joins. As in a run with invitations: in an open one, what a peer
    adds beside three others has a bound, which would clip the larger ones.
    """
    monkeypatch.setattr(SafeDHT, "is_open", False)
    max_grad_norm = 0.5
    swarm = build_swarm(
        max_grad_norm=max_grad_norm, delay_grad_averaging=are_delayed, delay_optimizer_step=are_delayed
    )
    replay = Replay(max_grad_norm)
    swarm.add_several(False, True)
    leaving = swarm.add(identity="restarting")

    def take_step(*sizes: int) -> None:
        expected = replay.step(swarm.global_step(*sizes))
        for trainer in swarm.trainers:
            assert trainer.entry["outcome"] == "averaged" and trainer.entry["received"] == 1.0
            assert all(trainer.optimizer.pace.recent_rounds) and trainer.optimizer.pace.recent_rounds
            assert set(trainer.entry["group"]) == {t.name for t in swarm.trainers}
            assert (trainer.parameters - expected).abs().max() < 1e-6
        assert (expected - replay.parameters(-2)).abs().max() > 1e-3

    take_step(2, 3, 7)
    take_step(6, 5, 1)
    swarm.remove(leaving)
    swarm.add(identity="restarting").join()
    swarm.add().join()
    take_step(1, 2, 4, 5)
    take_step(3, 6, 2, 1)
    assert min(replay.norms) > max_grad_norm
    for trainer in swarm.trainers:
        trainer.optimizer.finish_pending_update()
        assert torch.equal(trainer.model_parameters, trainer.parameters)
    staying, *leaving = swarm.trainers
    for trainer in leaving:
        trainer.optimizer.say_goodbye()
    wait_until(lambda: not staying.tracker.other_trainers, 120, "the goodbyes")


# One round, from matchmaking to its end


async def collect_garbage(self) -> None:
    """Collect garbage in the averager's process."""
    gc.collect()


def test_rounds_that_wait_survive_the_garbage_collector(build_swarm, monkeypatch):
    """Garbage is collected while a follower waits for its leader, and while it waits for its trigger with a group."""
    monkeypatch.setattr(RoundAverager, "collect_garbage", collect_garbage, raising=False)
    swarm = build_swarm(target_batch_size=1000)
    trainers = swarm.add_several(False, False)
    leader, follower = swarm.schedule_rounds(step=1)

    def collect() -> None:
        for trainer in trainers:
            trainer.averager._outer_pipe.send(("collect_garbage", [], {}))

    collect()
    leader.allow_allreduce()
    wait_until(lambda: follower.has_group, 60, "the group")
    collect()
    follower.allow_allreduce()
    assert [len(control.result(120).members) for control in (leader, follower)] == [2, 2]


@pytest.mark.parametrize("first", [0, 1], ids=["leader first", "follower first"])
def test_peers_that_find_the_step_due_seconds_apart_average_all_the_same(build_swarm, first):
    swarm = build_swarm(target_batch_size=1000, matchmaking_time=3.1, averaging_timeout=400.0)
    swarm.add_several(False, False)
    rounds, trainers = swarm.schedule_rounds(step=1), swarm.in_order(step=1)
    for value, trainer in enumerate(trainers, 1):
        for gradient in trainer.averager.gradients:
            gradient.fill_(value)
    rounds[first].allow_allreduce()
    time.sleep(7.0)  # less than a quarter of the timeout, more than the matchmaking time
    rounds[1 - first].allow_allreduce()
    for trainer, control in zip(trainers, rounds, strict=True):
        assert control.result(120).received == 1.0
        assert all((gradient == 1.5).all() for gradient in trainer.averager.gradients)


def test_round_that_is_called_off_keeps_nobody_waiting(build_swarm):
    swarm = build_swarm(target_batch_size=1000, averaging_timeout=1200.0)
    swarm.add_several(False, False)
    leader, follower = swarm.schedule_rounds(step=1)
    leader.allow_allreduce()
    wait_until(lambda: follower.has_group, 60, "the group")
    follower.call_off()
    leader.result(120)  # the timeout for a silent peer is 300 seconds


def is_averaging(trainer) -> bool:
    control = trainer.optimizer.coordinator._control
    return control is not None and control.stage == AveragingStage.RUNNING_ALLREDUCE


async def be_slow(self, *args, **kwargs) -> None:
    await asyncio.sleep(10_000)


def test_optimizer_ends_in_the_middle_of_a_round(build_swarm, monkeypatch, capfd):
    """The first averager ends without its round being cancelled before, as an optimizer does."""
    monkeypatch.setattr(RoundAverager, "_average_in_group", be_slow)
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)  # pytest's keeps what it prints
    swarm = build_swarm(averaging_timeout=1200.0)
    first, second = swarm.add_several(False, False)
    swarm.compute(6, 6)
    wait_until(lambda: is_averaging(first) and is_averaging(second), 60, "the round")
    first.averager.shutdown()
    assert not first.averager.is_alive()
    second.optimizer.shutdown()
    wait_until(lambda: not second.optimizer._thread.is_alive(), 120, "the end of the step thread")
    assert second.completed == 0
    assert "Traceback" not in capfd.readouterr().err


def test_building_an_optimizer_leaves_sigint_to_its_caller(build_swarm):
    """hivemind ignores SIGINT in the process that starts an averager."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for jobs in the background
    try:
        build_swarm().add()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


async def count_openmp_threads(self, future: MPFuture) -> None:
    """Runs in the averager's process."""
    in_a_thread = await asyncio.to_thread(torch.get_num_threads)
    future.set_result((torch.get_num_threads(), in_a_thread))


def test_averager_has_one_openmp_thread_per_thread(build_swarm, monkeypatch):
    monkeypatch.setattr(SafeAverager, "count_openmp_threads", count_openmp_threads, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        optimizer = build_swarm().add().optimizer
        for averager in optimizer.processes.values():
            averager._outer_pipe.send(("count_openmp_threads", [], {"future": (future := MPFuture())}))
            assert future.result(120) == (1, 1)
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


async def count_streams(self, future: MPFuture) -> None:
    """Count the open streams of other peers. Runs in the averager's process."""
    names = [getattr(task.get_coro(), "__name__", "") for task in asyncio.all_tasks()]
    future.set_result(names.count("_process_stream"))


def has_open_streams(trainer) -> bool:
    future = MPFuture()
    trainer.averager._outer_pipe.send(("count_streams", [], {"future": future}))
    return future.result(120) > 0


def test_callers_close_the_stream_once_they_have_all(build_swarm, monkeypatch):
    """Otherwise each side would wait for the other to close its stream, and open streams would pile up over rounds."""
    monkeypatch.setattr(SafeAverager, "LINGER_SECONDS", 10_000.0)
    monkeypatch.setattr(RoundAverager, "count_streams", count_streams, raising=False)
    swarm = build_swarm(averaging_timeout=1200.0)
    swarm.add_several(False, True)
    for _ in range(2):
        swarm.global_step(6, 6)
        for trainer in swarm.trainers:
            assert trainer.entry["outcome"] == "averaged"
    for trainer in swarm.trainers:
        wait_until(lambda trainer=trainer: not has_open_streams(trainer), 120, "the end of the streams")


# Parts that arrive before a round begins or after it has ended


class StandInReducer:
    """Reducer that answers with one average."""

    async def answer(self, _sender, _stream):
        yield AveragingData(code=AVERAGED_PART)


class LateAverager(RoundAverager):
    """Averager without a process."""

    def __init__(self):
        self._refused, self._waiting = [], Counter()
        known = b"called off", b"known, but never triggered", b"group"
        self._rounds = {b"finished": None, **{group: asyncio.get_running_loop().create_future() for group in known}}
        self._rounds[b"called off"].set_result(None)
        self._matchmaking = SimpleNamespace(request_timeout=0.5)
        self.allreduce_kwargs = {"reducer_timeout": 5.0}

    async def answer(self, group_id: bytes = b"group") -> AsyncIterator[AveragingData]:
        """Answer a part of a round that begins 0.3 seconds later."""
        loop, begins = asyncio.get_running_loop(), self._rounds[b"group"]
        loop.call_later(0.3, begins.set_result, SimpleNamespace(reducer=StandInReducer()))
        return self.rpc_aggregate_part(as_aiter(AveragingData(group_id=group_id)), SimpleNamespace(remote_id=None))

    async def first_answer(self, group_id: bytes = b"group") -> AveragingData:
        return await anext(await self.answer(group_id))

    async def ends_by_itself(self, seconds: float) -> bool:
        """Whether the answers end within `seconds` after the last one although the caller keeps the stream open."""
        answers = await self.answer()
        await anext(answers)
        try:
            await asyncio.wait_for(anext(answers), seconds)
        except StopAsyncIteration:
            return True
        except TimeoutError:
            return False


@pytest.mark.parametrize(
    ("group_id", "reducer_timeout", "seconds"),
    [(b"finished", 5.0, 1), (b"called off", 5.0, 1), (b"unknown", 5.0, 4), (b"known, but never triggered", 0.5, 4)],
)
async def test_part_for_a_round_that_has_ended_is_refused_at_once(clock, group_id, reducer_timeout, seconds):
    averager = LateAverager()
    averager.allreduce_kwargs = {"reducer_timeout": reducer_timeout}
    async with asyncio.timeout(seconds):
        assert (await averager.first_answer(group_id)).code == BAD_GROUP_ID
    assert averager._refused == [(group_id, None)]


async def test_first_message_that_is_large_is_not_kept(clock):
    averager = LateAverager()
    request = AveragingData(group_id=b"group")
    request.tensor_part.buffer = bytes(1000)
    async with asyncio.timeout(0.2):
        answers = averager.rpc_aggregate_part(as_aiter(request), SimpleNamespace(remote_id=None))
        assert (await anext(answers)).code == BAD_GROUP_ID


async def test_number_of_waiting_parts_of_unknown_groups_is_bounded_for_each_peer(clock, monkeypatch):
    monkeypatch.setattr("peerstep.rounds.MAX_WAITING_STREAMS", 0)
    averager = LateAverager()
    async with asyncio.timeout(0.4):
        assert (await averager.first_answer(b"unknown")).code == BAD_GROUP_ID
    assert (await averager.first_answer()).code == AVERAGED_PART, "that of a known group waits"
    assert not averager._waiting.total()


async def test_part_for_a_round_that_begins_later_is_taken(clock):
    assert (await LateAverager().first_answer()).code == AVERAGED_PART


async def test_stream_is_closed_by_the_caller_and_not_at_once_by_the_one_that_answers(clock):
    """If the answering peer closes the stream first, libp2p's daemon may discard data that it has not delivered."""
    assert not await LateAverager().ends_by_itself(SafeAverager.LINGER_SECONDS - 1.0)
    assert await LateAverager().ends_by_itself(SafeAverager.LINGER_SECONDS + 1.0)
