"""Tests of averagers: processes of real peers, and what they answer to parts that come at the wrong time."""

import asyncio
import signal
import threading
from types import SimpleNamespace
from typing import AsyncIterator  # noqa: UP035  hivemind does not recognize that of collections.abc

import pytest
import torch
from hivemind.averaging.control import AveragingStage
from hivemind.p2p import PeerID
from hivemind.proto.averaging_pb2 import AVERAGED_PART, BAD_GROUP_ID, AveragingData
from hivemind.utils import MPFuture
from hivemind.utils.asyncio import as_aiter

from peerstep.options import Options
from peerstep.peer.averager_process import SafeAverager
from peerstep.rounds.averager import RoundAverager
from peerstep.rounds.claims import Claims, deal
from peerstep.rounds.conduct import Conduct
from peerstep.rounds.own_rounds import OwnRounds
from peerstep.rounds.relay import RELAY_SECONDS
from peerstep.rounds.result import RoundResult
from tests.support.false_leader import FalseLeader
from tests.support.processes import Script, wait_until


def is_averaging(trainer) -> bool:
    control = trainer.optimizer.coordinator.control
    return control is not None and control.stage == AveragingStage.RUNNING_ALLREDUCE


async def be_slow(self, *args, **kwargs) -> None:
    await asyncio.sleep(10_000)


def test_optimizer_ends_in_the_middle_of_a_round(build_swarm, monkeypatch, capfd):
    """The first averager ends without its round being cancelled before, as an optimizer does."""
    monkeypatch.setattr(RoundAverager, "average_in_group", be_slow)
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)  # pytest's keeps what it prints
    swarm = build_swarm(averaging_timeout=1200.0)
    first, second = swarm.add_several(False, False)
    swarm.compute(6, 6)
    wait_until(lambda: is_averaging(first) and is_averaging(second), 60, "the round")
    first.averager.shutdown()
    assert not first.averager.is_alive()
    second.optimizer.shutdown()
    wait_until(lambda: not second.optimizer.steps.is_alive(), 120, "the end of the step thread")
    assert second.completed == 0
    assert "Traceback" not in capfd.readouterr().err


async def count_openmp_threads(self, future: MPFuture) -> None:
    """Runs in the averager's process."""
    in_a_thread = await asyncio.to_thread(torch.get_num_threads)
    future.set_result((torch.get_num_threads(), in_a_thread))


def test_averager_has_one_openmp_thread_per_thread_and_leaves_sigint_to_its_caller(build_swarm, monkeypatch):
    """hivemind ignores SIGINT in the process that starts an averager."""
    monkeypatch.setattr(SafeAverager, "count_openmp_threads", count_openmp_threads, raising=False)
    handler, num_threads = signal.signal(signal.SIGINT, signal.default_int_handler), torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        optimizer = build_swarm().add().optimizer
        for averager in optimizer.processes.values():
            averager._outer_pipe.send(("count_openmp_threads", [], {"future": (future := MPFuture())}))
            assert future.result(120) == (1, 1)
        assert torch.get_num_threads() == 4
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, handler)  # a shell ignores it for jobs in the background
        torch.set_num_threads(num_threads)


def test_foreign_trainer_is_ignored(build_swarm, tmp_path):
    """The trainer is plain hivemind with the same run ID. A round that waited for it would take 300 seconds."""
    swarm = build_swarm(matchmaking_time=300.0, averaging_timeout=1200.0)
    swarm.add_several(False, False)
    stranger = Script("tests/support/foreign_peer.py", "run", swarm.address, log=tmp_path / "stranger.log")
    swarm.stack.callback(stranger.kill_all)
    stranger.wait_for(r"is at step [2-9]")
    for sizes in ((4, 8), (5, 7), (6, 6)):
        before = stranger.output.count("is at step")
        wait_until(lambda before=before: stranger.output.count("is at step") > before + 3, 120, "its local steps")
        assert all(trainer.tracker.view().estimate[0] == 0 for trainer in swarm.trainers)
        swarm.global_step(*sizes)
        for trainer in swarm.trainers:
            assert trainer.entry["outcome"] == "averaged" and len(trainer.entry["group"]) == 2
            assert trainer.entry["missed"] == {} and len(trainer.tracker.view().others) == 1
    stranger.wait_for(r"is at step \d\d")
    newcomer = swarm.add()
    newcomer.tracker.refresh()
    wait_until(newcomer.optimizer.load_state_from_peers, 120, "the offer of a state")
    assert newcomer.completed == 3, "it loaded the state of the stranger"
    assert all(torch.equal(newcomer.parameters, trainer.parameters) for trainer in swarm.trainers)
    assert stranger.process.poll() is None, stranger.output


# Parts that arrive before a round begins or after it has ended


class StandInReducer:
    """Reducer that answers with one average."""

    async def answer(self, _sender, _stream):
        yield AveragingData(code=AVERAGED_PART)


class LateAverager(SafeAverager):
    """Averager without a process, with some rounds."""

    def __init__(self, reducer_timeout: float = 5.0):
        self.rounds = OwnRounds(reducer_timeout)
        for group_id in (b"finished", b"called off", b"known, but never triggered", b"group"):
            self.rounds.expect(group_id)
        for group_id in (b"finished", b"called off"):
            self.rounds.end(group_id)

    async def answer(self, group_id: bytes = b"group", size: int = 0) -> AsyncIterator[AveragingData]:
        """Answer a part of a round that begins 0.3 seconds later.

        :param size: of the part in the first message, in bytes
        """
        loop, request = asyncio.get_running_loop(), AveragingData(group_id=group_id)
        request.tensor_part.buffer = bytes(size)
        loop.call_later(0.3, self.rounds.begin, SimpleNamespace(group_id=b"group", reducer=StandInReducer()))
        return self._keep_stream_open(self.rounds.answer(as_aiter(request), None))

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
    ("group_id", "size", "reducer_timeout", "seconds"),
    [
        (b"finished", 0, 5.0, 0.2),
        (b"called off", 0, 5.0, 0.2),
        (b"unknown", 0, 5.0, 4),
        (b"known, but never triggered", 0, 0.5, 4),
        (b"group", 1000, 5.0, 0.2),  # it would have to be kept
    ],
)
async def test_part_for_a_round_that_has_ended_or_is_large_is_refused(clock, group_id, size, reducer_timeout, seconds):
    averager = LateAverager(reducer_timeout)
    async with asyncio.timeout(seconds):
        assert (await anext(await averager.answer(group_id, size))).code == BAD_GROUP_ID
    assert list(averager.rounds.refused) == [(group_id, None)]


async def test_part_waits_for_a_list_that_another_member_passes_on(clock):
    """One that passes nothing on delays the list by RELAY_SECONDS, at some members of a large group."""
    averager, known_at = LateAverager(), clock.now + 2 * RELAY_SECONDS
    averager.rounds._awaits_list = lambda: clock.now < known_at
    asyncio.get_running_loop().call_later(2 * RELAY_SECONDS - 0.1, averager.rounds.expect, b"late")
    begun = SimpleNamespace(group_id=b"late", reducer=StandInReducer())
    asyncio.get_running_loop().call_later(2 * RELAY_SECONDS, averager.rounds.begin, begun)
    assert (await anext(await averager.answer(b"late"))).code == AVERAGED_PART


async def test_number_of_waiting_parts_of_unknown_groups_is_bounded_for_each_peer(clock, monkeypatch):
    monkeypatch.setattr("peerstep.rounds.own_rounds.MAX_WAITING_STREAMS", 0)
    averager = LateAverager()
    async with asyncio.timeout(0.4):
        assert (await anext(await averager.answer(b"unknown"))).code == BAD_GROUP_ID
    averager = LateAverager()
    assert (await anext(await averager.answer())).code == AVERAGED_PART, "that of a round that begins later waits"
    assert not averager.rounds.waiting.total()


async def test_stream_is_closed_by_the_caller_and_not_at_once_by_the_one_that_answers(clock):
    """If the answering peer closes the stream first, libp2p's daemon may discard data that it has not delivered."""
    assert not await LateAverager().ends_by_itself(SafeAverager.LINGER_SECONDS - 1.0)
    assert await LateAverager().ends_by_itself(SafeAverager.LINGER_SECONDS + 1.0)


# What the claims of the others do to a member


VICTIM, EVIL = (PeerID(b"\x12\x20" + bytes([number] * 32)) for number in range(2))


def build_averager(peer_id: PeerID) -> RoundAverager:
    """Build an averager without its process."""
    torch.manual_seed(0)
    dht = SimpleNamespace(peer_id=peer_id, client_mode=False, is_open=True)
    names = {"prefix": "run_round_averager", "private_key": None, "learning_rate": 1e-3}
    return RoundAverager([torch.randn(4000)], Options(batch_size_per_step=4), dht=dht, **names)


async def average_in_false_group(
    averager: RoundAverager, claims: dict[PeerID, Claims], conduct: Conduct
) -> RoundResult:
    """Let the victim average in a group that the evil one has formed."""
    averager._p2p, averager._matchmaking = None, SimpleNamespace(conduct=conduct)
    (group,) = deal(3, claims, None)
    leader = FalseLeader(build_averager(EVIL), SimpleNamespace(peer_id=EVIL), "groups of two")
    leader.groups[group.group_id] = 3, group

    async def answer(stream):
        return leader.answer(await anext(stream), VICTIM)

    averager.get_stub = lambda *_args, **_options: SimpleNamespace(rpc_aggregate_part=answer)
    averager.own_rounds.expect(group.group_id)
    return await averager.average_in_group(SimpleNamespace(step=3, weight=64.0), group, EVIL)


@pytest.mark.parametrize(("distance", "takes"), [(0.0, False), (1.0, False), (2000.0, True)])
async def test_only_who_claims_to_lack_updates_takes_parameters_in_other_rounds(offline, clock, distance, takes):
    """The other member is the only reducer, and claims that it lacks a thousand updates itself."""
    averager, claims = build_averager(VICTIM), {VICTIM: Claims(0.0, distance), EVIL: Claims(20.0, 1000.0)}
    result = await average_in_false_group(averager, claims, Conduct(VICTIM))
    assert (result.received_parameters is not None) == takes
    assert not result.is_far or takes


@pytest.mark.parametrize(("group_id", "may_lead"), [(b"another", False), (b"ended", True)])
async def test_members_that_ask_for_another_group_do_not_know_this_one(offline, clock, group_id, may_lead):
    """They reduce nothing, so they refuse nothing. A leader kept three of four trainers as followers in this way."""
    others = [PeerID(b"\x12\x20" + bytes([number] * 32)) for number in (2, 3, 4)]
    averager = build_averager(VICTIM)
    averager._matchmaking = SimpleNamespace(awaits_list=False)
    averager.own_rounds.expect(b"ended")
    averager.own_rounds.end(b"ended")
    for sender in others:
        request = as_aiter(AveragingData(group_id=group_id))
        assert [answer.code async for answer in averager.own_rounds.answer(request, sender)] == [BAD_GROUP_ID]
    conduct, clients = Conduct(VICTIM), dict.fromkeys([VICTIM, *others], Claims(0.0))
    await average_in_false_group(averager, {EVIL: Claims(20.0)} | clients, conduct)
    assert conduct.may_lead(EVIL) == may_lead
