"""Where the workarounds for hivemind 1.1.12 live, each with its reason. Everything else uses hivemind as documented.

`Optimizer` here is hivemind's, made safe for a run of strangers:

- a gradient that is not finite is dropped, at its source, at the peer that averages it, and where it is applied
  (in the bare library one micro-batch of NaN on one peer makes the parameters of every peer NaN, for good), and who
  sends one is left out of the next groups and not counted (see also `shunned.py`);
- a downloaded state is applied whole or not at all, and only if its shapes, optimizer and values fit (the bare library
  copies it in positionally, learning rate and weight decay included, and retries for ever if that raises);
- a peer that hears of its group later than the others, or finds later that the step is due, does not refuse what they
  send (in the bare library groups of three and more often lose a quarter of the averaging timeout, and part of the
  average);
- a peer that has downloaded a state does not take the next step at once, on what it knew before, and does not draw the
  others back to the step that it comes from;
- a peer looks early in a step whether it is out of sync, and takes the next one with the others, clients included, and
  looks often for others while it is alone;
- a peer that catches up does not keep the others waiting in a round that it signed up for;
- what a peer sends to a round that is over or called off is refused at once, and nobody waits there for who refused;
- peers that are a round apart do not wait for each other in different ones, see `Turns`; who is late for a round that
  long that it meets the others' next is at their step from then on; and a round of parameters is that of one step for
  all, see `_CurrentRound`;
- a peer that is told of a step that nobody has a state of keeps what it has accumulated;
- the last thing that a peer answers is not lost on the way;
- a round that is under way cannot be taken by the garbage collector, and does not fail the end of the averager;
- a peer offers its state only once it has been trained, and says which step it is of;
- building it leaves the signal handlers of the process alone.

`SafeDHT` goes on when a process that has called it dies, and `use_only_trusted_relays` makes a peer behind NAT
reachable in seconds instead of minutes.
"""

import asyncio
import concurrent.futures
import logging
import math
import multiprocessing
import random
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import AsyncIterator  # noqa: UP035  hivemind does not recognize that of collections.abc

import hivemind
import torch
from google.protobuf.message import Message
from hivemind.averaging import allreduce
from hivemind.averaging import averager as averager_module
from hivemind.averaging.averager import DecentralizedAverager
from hivemind.averaging.control import AveragingStage, StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.matchmaking import Matchmaking
from hivemind.averaging.partition import AllreduceException, BannedException, TensorPartReducer
from hivemind.compression import deserialize_torch_tensor
from hivemind.dht import DHT
from hivemind.dht import dht as dht_module
from hivemind.dht import node as dht_node
from hivemind.optim import grad_averager, progress_tracker, state_averager
from hivemind.p2p import P2P, P2PContext, PeerID, StubBase
from hivemind.proto import averaging_pb2
from hivemind.utils import (
    MPFuture,
    MSGPackSerializer,
    get_dht_time,
    get_logger,
    nested_flatten,
    nested_pack,
    switch_to_uvloop,
)
from hivemind.utils.asyncio import achain, aiter_with_timeout, as_aiter, azip
from hivemind.utils.streaming import combine_from_streaming
from hivemind.utils.timed_storage import ValueWithExpiration

logger = get_logger(__name__)

DHT_TIMEOUT = 30.0  # seconds for reading one key
MAX_EPOCH = 2**31  # more steps than any run makes; a peer that claims more is lying


class FiniteTensorPartReducer(TensorPartReducer):
    """Averages what finite peers send: one that sends NaN or Inf is left out of the rest of the round."""

    def __init__(self, *args, **kwargs):
        self.poisoners: set[int] = set()  # indices of those senders
        super().__init__(*args, **kwargs)

    async def accumulate_part(
        self, sender_index: int, part_index: int, tensor_part: torch.Tensor, weight: float = 1.0
    ) -> torch.Tensor:
        # The sum of a part is finite only if each element is (or if it overflows, which is no gradient either).
        if not (math.isfinite(weight) and weight >= 0 and tensor_part.sum().isfinite()):
            self.poisoners.add(sender_index)
            raise BannedException(f"sender {sender_index} sent values that are not finite")
        return await super().accumulate_part(sender_index, part_index, tensor_part, weight)


allreduce.TensorPartReducer = FiniteTensorPartReducer


class _ClosingStub:
    """A peer's averager, whose answers to `rpc_aggregate_part` end with the last that a round expects of it."""

    def __init__(self, stub: StubBase, peer: PeerID, runner: "SafeAllReduceRunner"):
        self.stub, self.peer, self.runner = stub, peer, runner

    async def rpc_aggregate_part(
        self, inputs: AsyncIterator[averaging_pb2.AveragingData]
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        return self._receive(await self.stub.rpc_aggregate_part(inputs))

    async def _receive(
        self, stream: AsyncIterator[averaging_pb2.AveragingData]
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        num_received = 0
        async with aclosing(stream):
            async for message in stream:
                if message.code == averaging_pb2.BAD_GROUP_ID:
                    await self.runner.forget_absent(self.peer)
                yield message
                num_received += 1
                if num_received == self.runner.count_parts(self.peer):
                    return


class SafeAllReduceRunner(allreduce.AllReduceRunner):
    """One round, which waits for nobody who is known to take no part in it.

    The stream to a peer is closed once it has answered all, see SafeAverager._then_linger.
    """

    def __init__(self, *args, **kwargs):
        self._conversations: dict[PeerID, asyncio.Task] = {}
        super().__init__(*args, **kwargs)

    def count_parts(self, peer: PeerID) -> int:
        """The parts that a peer averages."""
        return self.tensor_part_container.num_parts_by_peer[self.ordered_peer_ids.index(peer)]

    def absent_peers(self) -> list[PeerID]:
        """Those of whom we wait for a first part."""
        if self.count_parts(self.peer_id) == 0:
            return []  # nobody sends us any
        return [peer for peer in self.sender_peer_ids if peer not in self.active_senders | self.banned_senders]

    async def forget_absent(self, peer: PeerID) -> None:
        """Do not wait for what a peer sends if it has not begun to. Call it if the peer does not know this round: it
        has ended there, or the peer has gone on."""
        if peer in self.absent_peers():
            await self._ban_sender(peer)

    async def give_up_on(self, peer: PeerID) -> None:
        """Wait neither for what a peer sends nor for what it averages."""
        await self.forget_absent(peer)
        if peer in self._conversations:
            self._conversations[peer].cancel()

    def _get_peer_stub(self, peer: PeerID) -> _ClosingStub:
        return _ClosingStub(super()._get_peer_stub(peer), peer, self)

    async def _communicate_with_peer(self, peer_id: PeerID) -> None:
        self._conversations[peer_id] = asyncio.current_task()
        await super()._communicate_with_peer(peer_id)


class SharedPeers:
    """A few peer IDs in memory that processes share. One writes, the others may see them a moment too late."""

    def __init__(self, capacity: int = 64):
        self._slots = multiprocessing.RawArray("Q", capacity)

    @staticmethod
    def _digest(peer: PeerID) -> int:
        return int.from_bytes(peer.to_bytes()[-8:], "big")  # of a hash

    def replace(self, peers: Iterable[PeerID]) -> None:
        digests = [self._digest(peer) for peer in peers][: len(self._slots)]
        self._slots[:] = digests + [0] * (len(self._slots) - len(digests))

    def __contains__(self, peer: PeerID) -> bool:
        return self._digest(peer) in self._slots[:]


class Turns:
    """Who is out of turn, as the gradient averager's process tells that of the state averager.

    Peers average the gradients of a step, then the parameters, then the gradients of the next. One that went without a
    round, since it was late or saw nobody, is in the next while the others are still in that one: each waits until its
    time-out for somebody who waits for it, then misses the other by a hair, and so from step to step. Hence the round
    of parameters gives way at once.
    """

    PATIENCE = 1.0  # seconds that a peer may be late for a round of gradients before it is out of turn

    def __init__(self):
        self.behind = SharedPeers()  # our round of gradients waits for them
        self.ahead = SharedPeers()  # they are in a round of gradients with us that we have not begun


class GroupStepControl(StepControl):
    """hivemind's handle of a round of averaging, which also tells which step the others of the group have it for."""

    _GROUP_EPOCH = slice(18, 26)  # after what hivemind keeps in the shared buffer

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        more = torch.zeros([8], dtype=torch.uint8)
        self._shared_buffer = torch.cat([self._shared_buffer, more]).share_memory_()
        self.group_epoch = -1

    @property
    def group_epoch(self) -> int:
        """The newest step that another peer of the group is at; -1: unknown."""
        return struct.unpack("q", self._shared_buffer[self._GROUP_EPOCH].numpy().data)[0]

    @group_epoch.setter
    def group_epoch(self, epoch: int) -> None:
        struct.pack_into("q", self._shared_buffer[self._GROUP_EPOCH].numpy().data, 0, epoch)

    @property
    def has_group(self) -> bool:
        """Whether matchmaking is over and it waits for its trigger."""
        return self.stage == AveragingStage.AWAITING_TRIGGER and not self.done()


averager_module.StepControl = GroupStepControl


class CautiousMatchmaking(Matchmaking):
    """Finds groups without the peers that have sent NaN or Inf, and knows of those whose round was called off.

    One that sends NaN without knowing also reduces its share of the tensors without these guards: as long as it takes
    part, that share is not averaged, and each round lasts until its time-out.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._shunned_until: dict[PeerID, float] = {}
        self._found: deque[tuple[bytes, StepControl]] = deque(maxlen=16)  # groups of ours and their rounds

    async def look_for_group(self, step: StepControl) -> GroupInfo | None:
        """The peers of a round, as in hivemind."""
        group = await super().look_for_group(step)
        if group is not None:
            self._found.append((group.group_id, step))
            step.group_epoch = max(self._read_epochs(group), default=-1)
        return group

    def _read_epochs(self, group: GroupInfo) -> list[int]:
        """The steps that the others of a group have it for; what is none is left out, and auxiliary peers are."""
        epochs = []
        for peer_id, gathered in zip(group.peer_ids, group.gathered, strict=True):
            with suppress(Exception):  # of strangers
                _, mode, data = MSGPackSerializer.loads(gathered)
                epoch = MSGPackSerializer.loads(data)
                if peer_id == self._p2p.peer_id or mode == allreduce.AveragingMode.AUX.value:
                    continue
                if type(epoch) is int and 0 <= epoch < MAX_EPOCH:
                    epochs.append(epoch)
        return epochs

    def is_called_off(self, group_id: bytes) -> bool:
        """Whether our round of a group has ended, maybe without having begun."""
        return any(found == group_id and step.done() for found, step in self._found)

    def shun(self, peer_id: PeerID, until: float) -> None:
        """Form no group with a peer until then, in the time of `time.time`."""
        self._shunned_until[peer_id] = until

    def _is_shunned(self, peer_id: PeerID) -> bool:
        return time.time() < self._shunned_until.get(peer_id, -math.inf)

    def _check_reasons_to_reject(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> averaging_pb2.MessageFromLeader | None:
        if self._is_shunned(context.remote_id):
            return averaging_pb2.MessageFromLeader(code=averaging_pb2.PROTOCOL_VIOLATION)
        return super()._check_reasons_to_reject(request, context)

    async def _request_join_group(self, leader: PeerID) -> GroupInfo | None:
        return None if self._is_shunned(leader) else await super()._request_join_group(leader)


averager_module.Matchmaking = CautiousMatchmaking


class RelayedP2P(P2P):
    """libp2p's daemon, with the relays that it is given and no others."""

    @staticmethod
    def _make_process_args(*args, **kwargs) -> list[str]:
        if "trustedRelays" in kwargs:
            kwargs["relayDiscovery"] = False
        return P2P._make_process_args(*args, **kwargs)


def use_only_trusted_relays() -> None:
    """Let DHTs that are built from now on use their `trusted_relays` at once.

    hivemind lets libp2p look for others, too, and then libp2p takes none before it knows four or has waited for three
    minutes.
    """
    dht_node.P2P = RelayedP2P


class _Inbox:
    """The end of a pipe at which a DHT receives its calls; skips those of processes that have died since.

    Averagers call it to the last, and a call names the socket at which its sender waits for the answer.
    """

    def __init__(self, pipe: Connection):
        self.pipe = pipe
        self.fileno, self.poll = pipe.fileno, pipe.poll

    def recv(self) -> tuple[str, list, dict]:
        """The name of a method and its arguments."""
        message = self.pipe.recv_bytes()
        try:
            return ForkingPickler.loads(message)
        except (OSError, EOFError, RuntimeError):
            return "skip_call", [], {}


class SafeDHT(DHT):
    """hivemind's, which ends with a traceback or is deaf for three seconds if a process dies that has called it."""

    def run(self) -> None:
        self._inner_pipe = _Inbox(self._inner_pipe)
        super().run()

    async def skip_call(self) -> None:
        pass


def _switch_to_uvloop() -> asyncio.AbstractEventLoop:
    """hivemind's event loop, which keeps its tasks until they are done.

    asyncio itself knows them only as long as somebody else does, and of a round that waits for its trigger nobody
    does: once the garbage collector has taken it, this peer finds no group until it is started again.
    """
    loop, tasks = switch_to_uvloop(), set()

    def create_task(loop: asyncio.AbstractEventLoop, coroutine: Coroutine, **kwargs) -> asyncio.Task:
        task = asyncio.Task(coroutine, loop=loop, **kwargs)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    loop.set_task_factory(create_task)
    return loop


averager_module.switch_to_uvloop = dht_module.switch_to_uvloop = _switch_to_uvloop


class SafeAverager(DecentralizedAverager):
    """What both averagers have in common.

    :param turns: the same for both
    """

    SHUN_SECONDS = 600.0  # how long we average with nobody who sent NaN or Inf; its machine may be mended one day
    LINGER_SECONDS = 5.0  # how long after our last answer we wait for the caller to close the stream

    def __init__(self, *args, turns: Turns | None = None, **kwargs):
        self._finished_groups: deque[bytes] = deque(maxlen=64)
        self._refused: deque[tuple[bytes, PeerID]] = deque(maxlen=256)  # groups and whose part we have refused there
        self._shunned: dict[bytes, float] = {}  # peer ID -> until when; in the main process, which hears of it here:
        self._newly_shunned, self._lock_shunned = multiprocessing.SimpleQueue(), threading.Lock()
        self.turns = Turns() if turns is None else turns
        super().__init__(*args, **kwargs)

    def run_in_background(self, await_ready: bool = True, timeout: float | None = None) -> None:
        """Start the process. hivemind also ignores SIGINT from here on, in the process of the caller."""
        self.start()
        if await_ready:
            self.wait_until_ready(timeout)

    async def _then_linger(self, messages: AsyncIterator[Message]) -> AsyncIterator[Message]:
        """Give a caller all messages, and the time to close the stream itself.

        When a handler ends, libp2p's daemon closes its stream for reading and for writing. The first wakes what reads
        there, which takes it for an error and may reset the stream before the second is done; the caller's daemon then
        discards what it has not passed on yet. One round of averaging in some 700 lost its results so, or the news
        that its group is complete, for which both peers then wait in vain.
        """
        has_sent = False
        async for message in messages:
            yield message
            has_sent = True
        if has_sent:
            await asyncio.sleep(self.LINGER_SECONDS)  # is cancelled when the caller closes the stream

    async def rpc_join_group(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        """A peer asks to average with us, as in hivemind."""
        async for message in self._then_linger(super().rpc_join_group(request, context)):
            yield message

    async def rpc_download_state(
        self, request: averaging_pb2.DownloadRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        """A peer asks for our state, as in hivemind."""
        async for message in self._then_linger(super().rpc_download_state(request, context)):
            yield message

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        """A peer of our group sends its part of the tensors, maybe before our own round has begun.

        A round begins with its trigger: when we find that the step is due, which may be many seconds after the first
        peer did. hivemind waits for any round of ours to begin or end: one that ends while the next is being prepared
        makes it refuse the part, and the whole group then waits for a quarter of the averaging timeout.
        """
        async for message in self._then_linger(self._answer_part(stream, context)):
            yield message

    async def _answer_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        request = await anext(stream)
        if await self._will_begin(request.group_id, context.remote_id):
            async for message in super().rpc_aggregate_part(achain(as_aiter(request), stream), context):
                yield message
        else:
            self._refused.append((request.group_id, context.remote_id))
            yield averaging_pb2.AveragingData(code=averaging_pb2.BAD_GROUP_ID)

    async def _will_begin(self, group_id: bytes, sender: PeerID) -> bool:
        """Wait until our round of a group begins; False if it has ended, or if it is not worth while."""
        deadline = time.monotonic() + (self.allreduce_kwargs["reducer_timeout"] or 0.0)  # the sender waits no longer
        while group_id not in self._running_groups:
            has_ended = group_id in self._finished_groups or self._matchmaking.is_called_off(group_id)
            if has_ended or self._is_out_of_turn(sender) or time.monotonic() >= deadline:
                return False
            await asyncio.sleep(0.05)
        return True

    def _is_out_of_turn(self, sender: PeerID) -> bool:
        return False

    async def _watch(self, runner: SafeAllReduceRunner) -> None:
        """Runs beside a round of ours until it ends."""

    @contextmanager
    def _register_allreduce_group(self, group_info: GroupInfo) -> Iterator[None]:
        try:
            with super()._register_allreduce_group(group_info):
                yield
        finally:
            self._finished_groups.append(group_info.group_id)

    async def _run_allreduce_inplace_(
        self, tensors: Sequence[torch.Tensor], group_info, group_id: bytes | None = None, **kwargs
    ):
        """One round of all-reduce, as in hivemind; an update that is not finite is not applied."""
        group_id = group_info.group_id if group_id is None else group_id
        runner = SafeAllReduceRunner(
            p2p=self._p2p,
            servicer_type=type(self),
            prefix=self.prefix,
            tensors=tensors,
            group_id=group_id,
            ordered_peer_ids=group_info.peer_ids,
            **kwargs,
        )
        self._running_groups[group_id].set_result(runner)
        for refused_group, sender in self._refused:
            if refused_group == group_id:
                await runner.forget_absent(sender)  # it does not come twice
        watch = asyncio.create_task(self._watch(runner))
        try:
            if runner.modes[group_info.peer_ids.index(self.peer_id)] == allreduce.AveragingMode.AUX:
                async for _ in runner:
                    raise ValueError("auxiliary peers should not receive averaged tensors")
            else:
                await self._apply_updates(tensors, runner)
        finally:
            watch.cancel()
            for index in runner.tensor_part_reducer.poisoners:
                if (sender := runner.sender_peer_ids[index]) != self.peer_id:
                    logger.warning(f"{sender} sent values that are not finite: not averaging with it for a while")
                    until = time.time() + self.SHUN_SECONDS
                    self._matchmaking.shun(sender, until)
                    self._newly_shunned.put((sender.to_bytes(), until))

    def shunned_peers(self) -> dict[bytes, float]:
        """IDs of the peers that this averager forms no group with, and until when. For the main process."""
        with self._lock_shunned:
            while not self._newly_shunned.empty():
                peer_id, until = self._newly_shunned.get()
                self._shunned[peer_id] = until
            return {peer_id: until for peer_id, until in self._shunned.items() if time.time() < until}

    def shun(self, peers: dict[bytes, float]) -> None:
        """Form no group with peers, given as `shunned_peers` does. For the main process."""
        if new := peers.items() - self.shunned_peers().items():
            with self._lock_shunned:
                self._shunned.update(new)
            self._outer_pipe.send(("_shun", [dict(new)], {}))

    async def _shun(self, peers: dict[bytes, float]) -> None:
        """Runs in the averager process."""
        for peer_id, until in peers.items():
            self._matchmaking.shun(PeerID(peer_id), until)

    async def _apply_updates(self, tensors: Sequence[torch.Tensor], runner: allreduce.AllReduceRunner) -> None:
        num_refused = 0
        async for tensor, update in azip(as_aiter(*tensors), runner):
            if not update.sum().isfinite():
                num_refused += 1
                update = torch.nan_to_num(update, nan=0.0, posinf=0.0, neginf=0.0)
            tensor.add_(update, alpha=self._averaging_alpha)
            self.last_updated = get_dht_time()
            self._state_updated.set()
        if num_refused:
            logger.warning(f"The others' average of {num_refused} tensors is not finite: kept our own values there")

    async def _shutdown(self, _timeout: float | None) -> None:
        """Answer no more peers, and break off the rounds under way; hivemind's raises if there is one."""
        if not self.client_mode:
            await self.remove_p2p_handlers(self._p2p, namespace=self.prefix)
        for round_of_ours in self._running_groups.values():
            if round_of_ours.done() and not round_of_ours.cancelled():
                round_of_ours.result().finalize(cancel=True)


class GradientAverager(SafeAverager, grad_averager.GradientAverager):
    """Averages gradients; bounds the norm of what this peer contributes.

    :param max_grad_norm: bound on the norm of this peer's mean gradient, 0: none. transformers' Trainer would clip
      each micro-batch instead, which biases their mean.
    """

    def __init__(self, *args, max_grad_norm: float = 0.0, **kwargs):
        self.max_grad_norm = max_grad_norm
        self.next_epoch = 0  # the step that the next round leads to
        self._waiting: set[PeerID] = set()  # they have begun a round with us that we have not begun
        super().__init__(*args, allow_state_sharing=False, **kwargs)  # the gradients of others are of no use to anyone

    async def _will_begin(self, group_id: bytes, sender: PeerID) -> bool:
        announcement = asyncio.get_running_loop().call_later(Turns.PATIENCE, self._announce, sender)
        try:
            return await super()._will_begin(group_id, sender)
        finally:
            announcement.cancel()
            self._waiting.discard(sender)
            self.turns.ahead.replace(self._waiting)

    def _announce(self, sender: PeerID) -> None:
        self._waiting.add(sender)
        self.turns.ahead.replace(self._waiting)

    async def _watch(self, runner: SafeAllReduceRunner) -> None:
        try:
            while True:
                await asyncio.sleep(Turns.PATIENCE)
                self.turns.behind.replace(runner.absent_peers())
        finally:
            self.turns.behind.replace([])

    def schedule_step(self, scheduled_time: float | None = None, **kwargs) -> StepControl:
        """As in hivemind, and tell the group which step the round leads to; auxiliary peers take no step."""
        next_epoch = None if self.mode == allreduce.AveragingMode.AUX else self.next_epoch
        return super().schedule_step(scheduled_time, gather=next_epoch, **kwargs)

    @torch.no_grad()
    def load_accumulators_into_averager_(self):
        super().load_accumulators_into_averager_()
        if self.max_grad_norm > 0:
            with self.get_tensors() as gradients:
                norm = torch.nn.utils.get_total_norm(gradients)
                torch.nn.utils.clip_grads_with_norm_(_as_parameters(gradients), self.max_grad_norm, norm)


def _as_parameters(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors that carry the given gradients, for torch's clipping, which looks for them in `.grad`."""
    carriers = [torch.empty_like(gradient) for gradient in gradients]
    for carrier, gradient in zip(carriers, gradients, strict=True):
        carrier.grad = gradient
    return carriers


class StateLoadError(Exception):
    """A state was offered, but could not be used."""


class _CurrentRound:
    """The round that an update in the background waits for, whichever that is by then; hivemind keeps to the first.

    If it turns out to be that of the others' next step, it begins when we are there: they will not come before, and
    will have averaged without us if we come to theirs of this step.
    """

    def __init__(self, averager: "TrainingStateAverager"):
        self.averager = averager

    def __getattr__(self, name: str):
        return getattr(self.averager.current_round, name)

    def allow_allreduce(self) -> None:
        """Begin as soon as there is a group, unless it is too early for it."""
        control = self.averager.current_round
        while control.stage.value <= AveragingStage.LOOKING_FOR_GROUP.value and not control.done():
            time.sleep(0.05)
        if not self._is_early() and not control.done():
            control.allow_allreduce()

    def result(self, timeout: float | None):
        """As in hivemind; raises if it has not begun, since it is too early."""
        if self._is_early() and not self.triggered:
            raise AllreduceException("the others average the parameters of the next step")
        return self.averager.current_round.result(timeout)

    def _is_early(self) -> bool:
        return self.has_group and self.group_epoch == self.averager.local_epoch + 1


# hivemind addresses a peer's averager by the name of its class, hence the same name.
class TrainingStateAverager(SafeAverager, state_averager.TrainingStateAverager):
    """Averages, offers and downloads the training state.

    :param download_timeout: seconds that a download may take in all
    :param donor_timeout: seconds that a donor may be silent. It answers only after a round of averaging that it is in
    """

    WEIGHT_BEHIND = 1e-6  # in the average, of who lacks an update. Not 0: a group of such peers would have none at all
    MAX_ATTEMPTS = 3  # to get a state from those that offer one; who gave up too early would begin a second run

    def __init__(self, *args, download_timeout: float = 600.0, donor_timeout: float = 60.0, **kwargs):
        self.download_timeout, self.donor_timeout = download_timeout, donor_timeout
        self.current_round: GroupStepControl | None = None
        self.is_behind = False  # whether our parameters lack an update that those of the others have
        self._downloads: set[asyncio.Task] = set()
        super().__init__(*args, **kwargs)

    def _is_out_of_turn(self, sender: PeerID) -> bool:
        return sender in self.turns.behind

    async def _watch(self, runner: SafeAllReduceRunner) -> None:
        while True:
            for peer in runner.absent_peers():
                if peer in self.turns.ahead:
                    await runner.give_up_on(peer)
            await asyncio.sleep(0.2)

    @property
    def applied_epoch(self) -> int:
        """The step whose update the parameters have. `local_epoch` is ahead while an update is in the background."""
        return self.scheduler._step_count - 1 if self.scheduler is not None else self.local_epoch

    def get_current_state(self):
        """What a peer gets that asks for our state. While an update is in the background, it is of the step before.

        Waiting for the update instead would block both: it waits for the averaging round that the other is to join.
        """
        with self.lock_optimizer:  # its step and the scheduler's are both done, or neither
            metadata, tensors, infos = super().get_current_state()
            metadata["epoch"] = min(self.applied_epoch, self.local_epoch)
        return metadata, tensors, infos

    def _do(self, wait_for_trigger, optimizer_step: bool, zero_grad: bool, averaging_round: bool,
            averaging_control: StepControl | None, *args, timeout: float | None = None, **kwargs) -> None:  # fmt: skip
        """The update in the background, as in hivemind; tells of the round that it waits for.

        A state that is downloaded while its donor averages gradients is of the step before. Its parameters take the
        average of the others' and do not count in it: each newcomer would take half an update back from everybody.
        """
        if averaging_round and (averaging_control is None or averaging_control.triggered or averaging_control.done()):
            averaging_control = self._take_early_round()
            if averaging_control is None:
                with suppress(Exception):  # hivemind tries again, and reports it
                    averaging_control = self.schedule_step(gather=self.local_epoch, timeout=timeout, **kwargs)
        self.leave_early_round()
        self.current_round = averaging_control
        if self.is_behind and averaging_control is not None:
            averaging_control.weight = self.WEIGHT_BEHIND
        control = None if averaging_control is None else _CurrentRound(self)
        super()._do(wait_for_trigger, optimizer_step, zero_grad, averaging_round, control, *args,
                    timeout=timeout, **kwargs)  # fmt: skip
        if control is not None and control.weight == self.WEIGHT_BEHIND and control.done():
            self.is_behind = control.cancelled() or control.exception() is not None

    def renew_round(self, timeout: float) -> None:
        """Look for another group for the update in the background if the others of ours have averaged already."""
        control = self.current_round
        if control is None or control.done() or control.triggered:
            return
        if control.has_group and control.group_epoch < self.local_epoch:
            _call_off(control)
            self.current_round = control = self.schedule_step(gather=self.local_epoch, timeout=timeout)
        control.weight = self.WEIGHT_BEHIND

    def _take_early_round(self) -> GroupStepControl | None:
        """The round that the update before this one was too early for, if there is one."""
        control = self.current_round
        if control is None or control.triggered or not control.has_group or control.group_epoch != self.local_epoch:
            return None
        self.current_round = None
        return control

    def leave_early_round(self) -> None:
        """Keep nobody waiting in a round that we were too early for. Call it between two updates."""
        if self.current_round is not None and not self.current_round.triggered:
            _call_off(self.current_round)

    def load_state_from_peers(self, **_kwargs) -> bool:
        """Download the newest state that a peer offers and that fits, and apply it.

        :returns: whether there was one. If not, ours is as it was.
        """
        downloaded = self.download_state(min_epoch=self.local_epoch)
        if downloaded is None:
            return False
        donor, metadata, tensors = downloaded
        self.restore(metadata, tensors)
        logger.info(f"Loaded the state of step #{self.local_epoch} from {donor}")
        return True

    def download_state(
        self, min_epoch: int = 0, only_metadata: bool = False
    ) -> tuple[str, dict, list[torch.Tensor]] | None:
        """Ask the peers that offer their state, one after the other, for one of step `min_epoch` or later that fits.

        :param only_metadata: do not wait for the tensors, nor check whether it fits; ask once, `donor_timeout` in all
        :returns: the donor's peer ID, metadata and tensors, all checked; None if there is none in `download_timeout`
        """
        timeout = self.donor_timeout if only_metadata else self.download_timeout
        limits = {
            "min_epoch": min_epoch,
            "only_metadata": only_metadata,
            "max_bytes": 2 * sum(t.numel() * t.element_size() for t in self._expected_tensors()) + 2**20,
            "deadline": time.monotonic() + timeout,
        }
        future = MPFuture()
        self._outer_pipe.send(("_download_state", [], {"future": future, **limits}))
        try:
            return future.result(timeout=timeout + self.donor_timeout)
        except Exception as error:
            logger.warning(f"Could not download the state from peers: {error!r}")
            return None

    async def _download_state(self, future: MPFuture, **limits) -> None:
        """Runs in the averager process: try the donors, highest priority first."""
        result = None
        self._downloads.add(asyncio.current_task())
        try:
            for attempt in range(1 if limits["only_metadata"] else self.MAX_ATTEMPTS):
                await asyncio.sleep(attempt)
                result, broke_off = await self._try_donors(**limits)
                if result is not None or not broke_off:
                    break
        finally:
            self._downloads.discard(asyncio.current_task())
            future.set_result(result)

    async def _shutdown(self, timeout: float | None) -> None:
        """Break off what a thread of the main process may be waiting for."""
        for download in self._downloads:
            download.cancel()
        await asyncio.gather(*self._downloads, return_exceptions=True)
        await super()._shutdown(timeout)

    async def _try_donors(self, only_metadata: bool, deadline: float, **limits) -> tuple[tuple | None, bool]:
        """Ask each donor once.

        :returns: what `download_state` does, and whether a connection broke off, which need not happen again
        """
        offers = self.dht.get(f"{self.prefix}.all_averagers", latest=True, return_future=True)
        found = await asyncio.wait_for(offers, DHT_TIMEOUT)
        broke_off = False
        for donor in _rank_donors(found.value if found is not None else None):
            if donor == self.peer_id or time.monotonic() > deadline:
                continue
            try:
                if not only_metadata:
                    logger.info(f"Downloading the state from {donor}")
                metadata, tensors = await self._download_from(donor, only_metadata, deadline, **limits)
                if not only_metadata:
                    self.check_state(metadata, tensors)
                return (str(donor), metadata, tensors), broke_off
            except StateLoadError as error:
                logger.warning(f"Refused the state that {donor} offers: {error}")
            except Exception as error:
                logger.warning(f"Could not download the state from {donor}: {error!r}")
                broke_off |= not isinstance(error, TimeoutError)
        return None, broke_off

    async def _download_from(
        self, donor: PeerID, only_metadata: bool, deadline: float, min_epoch: int, max_bytes: int
    ) -> tuple[dict, list[torch.Tensor]]:
        """Receive a donor's state; raises if it is too old, silent for too long, sends too much, or ends too early."""
        stub = self.get_stub(self._p2p, donor, namespace=self.prefix)
        stream = await asyncio.wait_for(stub.rpc_download_state(averaging_pb2.DownloadRequest()), self.donor_timeout)
        metadata, tensors, parts, num_bytes, num_expected = None, [], [], 0, math.inf
        async with aclosing(stream):
            async for message in aiter_with_timeout(stream, timeout=self.donor_timeout):
                num_bytes += len(message.tensor_part.buffer) + len(message.metadata)
                if num_bytes > max_bytes:
                    raise StateLoadError("it is larger than ours")
                if time.monotonic() > deadline:
                    raise TimeoutError("it takes too long")
                if message.metadata:
                    metadata = self.serializer.loads(message.metadata)
                    _check_epoch(metadata, min_epoch)  # comes first: the rest need not be sent
                    if only_metadata:
                        return metadata, []
                    num_expected = len(self._parameters_and_extras()) + _count_statistics(metadata)
                parts.append(message.tensor_part)
                if len(parts) >= parts[0].chunks:
                    tensors.append(deserialize_torch_tensor(combine_from_streaming(parts)))
                    parts = []
                    if len(tensors) == num_expected:
                        break
        if not isinstance(metadata, dict):
            raise StateLoadError("it has none to offer")
        if len(tensors) < num_expected:
            raise ConnectionError(f"it broke off after {len(tensors)} of {num_expected} tensors")
        return metadata, tensors

    def _optimized_parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _expected_tensors(self) -> list[torch.Tensor]:
        """Our own state in the order in which a donor sends it: parameters, then the optimizer's tensors."""
        statistics = state_averager.dump_optimizer_state(self.optimizer)[1]
        return [*self._parameters_and_extras(), *statistics]

    def _parameters_and_extras(self) -> list[torch.Tensor]:
        return [*self._optimized_parameters(), *self.extra_tensors]

    def check_state(self, metadata: dict, tensors: Sequence[torch.Tensor]) -> dict:
        """Raise StateLoadError unless a state has a step, our shapes, our optimizer, and finite values.

        :returns: its optimizer state, in the structure of ours
        """
        _check_epoch(metadata)
        own = self._parameters_and_extras()
        if [t.shape for t in tensors[: len(own)]] != [t.shape for t in own]:
            raise StateLoadError("its parameters have other shapes: another model, or cut off")
        if not all_finite(tensors[: len(own)]):
            raise StateLoadError("its parameters are not finite")
        return self._match_optimizer_state(metadata.get("optimizer_metadata"), tensors[len(own) :])

    def restore(self, metadata: dict, tensors: Sequence[torch.Tensor]) -> None:
        """Go to a state, which may be an older one than ours.

        :raises StateLoadError: if it does not fit; ours is then as it was
        """
        optimizer_state = self.check_state(metadata, tensors)
        with torch.no_grad(), self.lock_averaged_tensors:
            self.optimizer.load_state_dict(optimizer_state)
            for own_tensor, tensor in zip(self._parameters_and_extras(), tensors, strict=False):
                own_tensor.copy_(tensor)
        if self.offload_optimizer:
            self._apply_optimizer_parameters_()
        if not self.reuse_tensors:
            self._load_local_tensors_into_averager_()
        self.local_epoch = metadata["epoch"]
        self._update_scheduler()

    def _match_optimizer_state(self, metadata, tensors: Sequence[torch.Tensor]) -> dict:
        """The donor's optimizer statistics in the structure of our optimizer; its hyper-parameters stay ours."""
        own = self.optimizer.state_dict()
        own_values = list(nested_flatten(own))
        if not isinstance(metadata, list) or len(metadata) != len(own_values):
            raise StateLoadError("its optimizer is another one")
        values = []
        for entry, own_value in zip(metadata, own_values, strict=True):
            if not isinstance(entry, dict):
                raise StateLoadError("its optimizer state is malformed")
            if entry.get("type") == "tensor":
                index = entry.get("index")
                if type(index) is not int or not 0 <= index < len(tensors):
                    raise StateLoadError("its optimizer state was cut off")
                value = tensors[index]
            else:
                value = entry.get("value")
            values.append(value)
            _check_statistic(value, own_value)
        return {**nested_pack(values, own), "param_groups": own["param_groups"]}

    def snapshot(self) -> tuple[dict, list[torch.Tensor]]:
        """A copy of the state as it would be sent to a peer: metadata and tensors."""
        with self.lock_optimizer, torch.no_grad(), self.lock_averaged_tensors:
            optimizer_metadata, statistics = state_averager.dump_optimizer_state(self.optimizer)
            tensors = [*self._parameters_and_extras(), *statistics]
            copies = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
            epoch = min(self.applied_epoch, self.local_epoch)
        return {"epoch": epoch, "optimizer_metadata": optimizer_metadata}, copies

    def sync_with_main_parameters(self, epoch: int) -> None:
        """Take over parameters that were loaded into the model from outside, and their step.

        An offloaded optimizer has its own copy of the weights, which would undo them at the next step.
        """
        with torch.no_grad(), self.lock_averaged_tensors:
            for main_parameter, parameter in zip(self.main_parameters, self._optimized_parameters(), strict=True):
                if main_parameter is not parameter:
                    parameter.copy_(main_parameter)
        self.local_epoch = epoch
        self._update_scheduler()


def _rank_donors(offers: object) -> list[PeerID]:
    """The peers that offer their state, highest priority (their step) first; malformed offers are left out."""
    priorities = {}
    for peer_id, offer in offers.items() if isinstance(offers, dict) else ():
        priority = offer.value if isinstance(offer, ValueWithExpiration) else None
        if isinstance(peer_id, bytes) and isinstance(priority, int | float) and 0 <= priority < MAX_EPOCH:
            priorities[PeerID(peer_id)] = (priority, random.random())
    return sorted(priorities, key=priorities.get, reverse=True)


def _check_epoch(metadata: object, min_epoch: int = 0) -> None:
    epoch = metadata.get("epoch") if isinstance(metadata, dict) else None
    if type(epoch) is not int or not 0 <= epoch < MAX_EPOCH:
        raise StateLoadError("it has no step number")
    if epoch < min_epoch:
        raise StateLoadError(f"it is of step #{epoch}, before #{min_epoch}")


def _count_statistics(metadata: dict) -> int:
    """The tensors of a state's optimizer. Not as many as ours: LAMB has numbers, too, where a norm was zero."""
    entries = metadata.get("optimizer_metadata")
    if not isinstance(entries, list):
        raise StateLoadError("its optimizer state is malformed")
    return sum(isinstance(entry, dict) and entry.get("type") == "tensor" for entry in entries)


def _check_statistic(value, own_value) -> None:
    """A donor's optimizer statistic must be of our shape and finite; scalars may be tensors or numbers."""
    if isinstance(own_value, torch.Tensor) and own_value.ndim > 0:
        if not isinstance(value, torch.Tensor) or value.shape != own_value.shape:
            raise StateLoadError("its optimizer statistics have other shapes")
        if not all_finite([value]):
            raise StateLoadError("its optimizer statistics are not finite")
    elif isinstance(value, torch.Tensor) and value.ndim > 0:
        raise StateLoadError("its optimizer statistics have other shapes")
    elif isinstance(value, torch.Tensor | float) and not math.isfinite(value):
        raise StateLoadError("its optimizer statistics are not finite")


def all_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether no tensor has a NaN or an Inf. One fused norm, one synchronisation with the device."""
    floating = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    if not floating:
        return True
    return bool(torch.nn.utils.get_total_norm([t.float() for t in floating], norm_type=float("inf")).isfinite())


def _call_off(control: StepControl) -> None:
    """Cancel a round, if it has not ended or been cancelled, be it just now: hivemind raises then."""
    if not control.done():
        with suppress(concurrent.futures.InvalidStateError):
            control.cancel()


class AdamW(torch.optim.AdamW):
    """torch's, whose state tells the number of steps as a number.

    torch keeps it in a tensor of float32, which hivemind would compress like the others when it sends the state: in
    float16 steps above 2048 come out wrong and those above 65519 as infinity. torch takes numbers back.
    """

    def state_dict(self) -> dict:
        state_dict = super().state_dict()
        for index, statistics in state_dict["state"].items():
            state_dict["state"][index] = {**statistics, "step": int(statistics["step"])}
        return state_dict


class ProgressTracker(progress_tracker.ProgressTracker):
    """hivemind's tracker, which believes any peer's claim to be ahead, and reckons that it goes on for as long as its
    report lasts. Here a claim that no state backs is ignored, and one that is old does not grow.

    A peer that sends NaN is not counted: as it finds nobody to wait for, it would soon be a step ahead, and all others
    would try to catch up.
    """

    def __init__(self, *args, **kwargs):
        self._distrusted: dict[bytes, float] = {}  # subkey of a peer -> until when
        self.shunned_peers: Callable[[], dict[bytes, float]] = dict  # the optimizer's, once it has averagers
        super().__init__(*args, **kwargs)

    def run(self) -> None:
        """hivemind leaves a task of its event loop pending, which asyncio complains about as an error at exit."""
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        loop.run_until_complete(asyncio.gather(self._progress_reporter(), self._progress_fetcher()))
        self.shutdown_complete.set()
        loop.run_until_complete(asyncio.gather(*asyncio.all_tasks(loop), return_exceptions=True))

    @property
    def ready_to_update_epoch(self) -> bool:
        """As in hivemind, unless what we know of the others is of a step before ours."""
        return self.global_epoch >= self.local_progress.epoch and super().ready_to_update_epoch

    def update_epoch(self, new_epoch: int | None = None) -> int:
        """Go to the next step, as in hivemind, and look soon at what the others do in it.

        hivemind checks at the first look in a step whether this peer is out of sync. Up to `max_refresh_period` later,
        the others may have begun the next step: the peer then dropped its share of this one to download a state,
        while they waited for it.
        """
        epoch = super().update_epoch(new_epoch)
        self.look_in(self.min_refresh_period)
        return epoch

    def forget_others(self, epoch: int) -> None:
        """Ask again what the others have accumulated. Call it after a download, with the updates paused.

        hivemind goes on with what it knew before, by which the step has long been due: each newcomer took one at once,
        with its own first samples and what the others happened to have.
        """
        progress = self.global_progress
        progress.epoch = max(progress.epoch, epoch)
        progress.samples_accumulated, progress.eta_next_epoch = 0, math.inf
        self.fetched_global_progress_this_epoch.clear()
        self.look_in(0.0)

    def look_in(self, seconds: float) -> None:
        """Ask for the others' progress then, whenever it was due."""
        self.global_progress.next_fetch_time = get_dht_time() + seconds
        self.global_state_updated.set()

    def distrust_claims_above(self, epoch: int, seconds: float = 600.0) -> int:
        """Ignore peers that claim to be past `epoch`, for a while. Call it when no state backs them.

        :returns: the number of peers
        """
        found = self.dht.get(self.training_progress_key, latest=True, return_future=True).result(timeout=10)
        records = found.value if found is not None and isinstance(found.value, dict) else {}
        liars = [
            subkey
            for subkey, record in records.items()
            if isinstance(record.value, dict) and record.value.get("epoch", 0) > epoch
        ]
        until = get_dht_time() + seconds
        self._distrusted.update(dict.fromkeys(liars, until))
        return len(liars)

    def _parse_swarm_progress_data(self, metadata):
        now = get_dht_time()
        self._distrusted = {subkey: until for subkey, until in self._distrusted.items() if until > now}
        if isinstance(metadata, ValueWithExpiration):  # what hivemind passes at the start, where it finds no one then
            metadata = metadata.value
        if not isinstance(metadata, dict):
            return super()._parse_swarm_progress_data(metadata)
        shunned = self.shunned_peers()
        records = {
            subkey: self._limit_age(record, now)
            for subkey, record in metadata.items()
            if record.value is not None
            and subkey not in self._distrusted
            and _is_plausible(record.value, now)
            and record.value["peer_id"] not in shunned
        }
        progress = super()._parse_swarm_progress_data(self._let_clients_lead(records))
        progress.num_clients = sum(record.value["client_mode"] for record in records.values())
        if progress.num_peers <= 1:
            # The estimate is that of the first, slow steps: who begins beside us would not be seen before our step.
            progress.next_fetch_time = min(progress.next_fetch_time, now + self.default_refresh_period)
        return progress

    def _let_clients_lead(self, records: dict[bytes, ValueWithExpiration]) -> dict[bytes, ValueWithExpiration]:
        """Have all follow a client that is the first to begin the next step, as if it accepted connections.

        hivemind has only those lead that do. For them, the samples of a client that is some seconds early are of
        another step: they do them once more, while it waits for them in vain. Further ahead, its state would be
        needed, which nobody can ask it for.
        """
        leaders = [record.value["epoch"] for record in records.values() if not record.value["client_mode"]]
        next_epoch = max([self.local_progress.epoch, *leaders]) + 1
        return {
            subkey: ValueWithExpiration({**record.value, "client_mode": False}, record.expiration_time)
            if record.value["epoch"] == next_epoch
            else record
            for subkey, record in records.items()
        }

    def _limit_age(self, record: ValueWithExpiration, now: float) -> ValueWithExpiration:
        """A peer's report, such that no more than `max_refresh_period` seconds are reckoned to have been worked since.

        A peer that lives reports after each local step. One that was killed would go on contributing until its report
        expires, and the others would take steps with a fraction of the batch.
        """
        newest = max(record.value["time"], now - self.max_refresh_period)
        return ValueWithExpiration({**record.value, "time": newest}, record.expiration_time)


def _is_plausible(progress: dict, now: float) -> bool:
    """Whether a peer's report can be counted: its schema was checked, its values were not."""
    return (
        progress["epoch"] < MAX_EPOCH
        and progress["samples_accumulated"] < 10**9
        and math.isfinite(progress["samples_per_second"])
        and progress["samples_per_second"] < 1e9
        and math.isfinite(progress["time"])
        and progress["time"] < now + 60
    )


class Optimizer(hivemind.Optimizer):
    """hivemind.Optimizer with the guards that the module's docstring lists.

    :param max_grad_norm: see GradientAverager
    :param private_key: signs this peer's progress reports; must be the key that the DHT's validator has
    """

    def __init__(self, *, dht: DHT, max_grad_norm: float, private_key, client_mode: bool, tracker_opts: dict,
                 grad_averager_opts: dict, state_averager_opts: dict, **kwargs):  # fmt: skip
        self._state_averager_opts = state_averager_opts
        self._private_key = private_key
        self.num_dropped_gradients = 0
        self.last_group_size = 0
        self.last_completed_step = 0  # the newest global step that this peer took part in, and
        self.last_contribution = 0  # the samples that it gave, until they are reported
        self._failed_loads = 0
        self._gradient_round: StepControl | None = None  # the one that the update in the background waits for,
        self._gradient_round_epoch = 0  # and the step that it leads to
        self._turns = Turns()
        super().__init__(
            dht=dht,
            client_mode=client_mode,
            grad_averager_factory=partial(
                GradientAverager, max_grad_norm=max_grad_norm, turns=self._turns, **grad_averager_opts
            ),
            tracker_opts=tracker_opts,
            **kwargs,
        )
        self.client_mode = client_mode  # hivemind leaves None here, and raises at the first step of a client
        self.tracker.shunned_peers = self.shunned_peers

    def _make_progress_tracker(self, target_batch_size: int, **kwargs) -> ProgressTracker:
        return ProgressTracker(
            dht=self.dht,
            prefix=self.run_id,
            target_batch_size=target_batch_size,
            client_mode=self.dht.client_mode,
            status_loglevel=logging.DEBUG,
            private_key=self._private_key,
            start=True,
            **kwargs,
        )

    def _make_state_averager(self, **kwargs) -> TrainingStateAverager:
        return TrainingStateAverager(
            dht=self.dht,
            prefix=f"{self.run_id}_state_averager",
            min_matchmaking_time=self.matchmaking_time,
            allreduce_timeout=self.allreduce_timeout,
            shutdown_timeout=self.shutdown_timeout,
            offload_optimizer=self.offload_optimizer,
            custom_gradients=self.offload_optimizer,
            status_loglevel=self.status_loglevel,
            next_chunk_timeout=self.next_chunk_timeout,
            client_mode=self.dht.client_mode,
            auxiliary=self.auxiliary,
            allow_state_sharing=False,  # until there is a trained state to share, see share_state
            start=True,
            turns=self._turns,
            **self._state_averager_opts,
            **kwargs,
        )

    def finish_pending_update(self) -> None:
        """Wait for the update in the background, if there is one, and apply it to the model."""
        self.state_averager.step(wait_for_delayed_updates=True)

    def break_off_rounds(self) -> None:
        """Wait for no round of averaging any more."""
        rounds = (self.scheduled_grads, self.scheduled_state, self._gradient_round, self.state_averager.current_round)
        for control in rounds:
            if control is not None:
                _call_off(control)

    def shutdown(self) -> None:
        """As in hivemind, which raises if a round has been called off just before."""
        self.say_goodbye()
        self.finish_pending_update()
        self._leave_scheduled_rounds()
        self.state_averager.leave_early_round()
        super().shutdown()

    def say_goodbye(self) -> None:
        """Let the others reckon without us from now on: the rounds that we are in may take longer than we have."""
        self.tracker.shutdown(self.shutdown_timeout)

    def share_state(self) -> None:
        """Offer our state to peers that join, from now on. Call it once it has been trained or downloaded."""
        averager = self.state_averager
        if not (averager.client_mode or self.auxiliary or averager.allow_state_sharing):
            averager.state_sharing_priority = self.local_epoch
            averager.allow_state_sharing = True

    def _check_and_accumulate_gradients(self, batch_size: int, grad_scaler) -> bool:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not all_finite(gradients):
            self.num_dropped_gradients += 1
            if self.num_dropped_gradients == 1 or self.num_dropped_gradients % 100 == 0:
                logger.warning(f"Dropped a gradient that is not finite ({self.num_dropped_gradients} so far)")
            return False
        return super()._check_and_accumulate_gradients(batch_size, grad_scaler)

    def _average_gradients_and_load_into_optimizer(self, maybe_step_control: StepControl | None):
        """Wait for the round of averaging. If it fails, the averager still has our own gradients, which it was given
        at the start; hivemind would take the accumulators instead, which hold those of the next step by now."""
        epochs = {}
        try:
            epochs = maybe_step_control.result(self.averaging_timeout)
            self.last_group_size = len(epochs)
            logger.info(f"Averaged gradients with {len(epochs)} peers")
        except BaseException as error:
            logger.warning(f"Averaging gradients failed with {error!r}. Proceeding with local gradients")
            if maybe_step_control is not None:
                _call_off(maybe_step_control)
        self._share_shunned_peers()
        self._load_averaged_gradients_into_optimizer_()
        self._keep_up_with([epoch for peer, epoch in epochs.items() if peer != self.dht.peer_id])

    def _keep_up_with(self, epochs: Sequence[object]) -> None:
        """Our round has met the others' next one: it was their step that we took part in.

        A peer that is late for a round waits in it until the others look for their next. It would begin that one as
        soon as this is over, with nothing to contribute, wait in it for their next but one, and stay late for ever.
        One that says so is enough, as it is in the progress that peers report: all others follow it there.

        :param epochs: the steps that the round leads to, as the others of the group say
        """
        if self._gradient_round_epoch + 1 not in epochs:
            return
        averager = self.state_averager
        averager.local_epoch += 1
        averager.is_behind = True  # by the update that we were late for, until we have averaged parameters
        averager.renew_round(self.averaging_timeout)
        self.last_completed_step = averager.local_epoch
        self.tracker.look_in(0.0)
        logger.info(f"Late for step #{self._gradient_round_epoch}: took part in #{self._gradient_round_epoch + 1}")

    def shunned_peers(self) -> dict[bytes, float]:
        """IDs of the peers that have sent NaN or Inf, and until when we average with none of them (`time.time`)."""
        return self.grad_averager.shunned_peers() | self.state_averager.shunned_peers()

    def shun(self, peers: dict[bytes, float]) -> None:
        """Do not average with peers, given as `shunned_peers` does, and do not count them."""
        for averager in (self.grad_averager, self.state_averager):
            averager.shun(peers)

    def _share_shunned_peers(self) -> None:
        """Whom one averager has found to send NaN, the other need not find out."""
        self.shun(self.shunned_peers())

    def _maybe_schedule_gradient_averaging(self) -> None:
        self._share_shunned_peers()
        self.grad_averager.next_epoch = self.local_epoch + 1
        super()._maybe_schedule_gradient_averaging()

    def _begin_averaging_gradients(self, grad_scaler) -> bool:
        self._gradient_round_epoch = self.grad_averager.next_epoch = self.local_epoch + 1
        began = super()._begin_averaging_gradients(grad_scaler)
        self._gradient_round = self.scheduled_grads if began else None
        return began

    def _update_global_epoch(self, grad_scaler) -> None:
        epoch = self.local_epoch
        with self.tracker.pause_updates():  # the time is not one of training
            self.finish_pending_update()
        if self.local_epoch > epoch:  # that was the step that is due, see _keep_up_with
            self.tracker.report_local_progress(self.local_epoch, self.grad_averager.local_samples_accumulated)
            return
        self.last_contribution = self.grad_averager.local_samples_accumulated
        super()._update_global_epoch(grad_scaler)
        self.last_completed_step = self.local_epoch
        self.share_state()

    def load_state_from_peers(self, **_kwargs) -> bool:
        """Download the newest state from peers, if any offers one that fits.

        :returns: whether the state was loaded. If not, training goes on with ours.
        """
        claimed = self.tracker.global_epoch
        if claimed > self.local_epoch + 1 > 1 and not self._is_offered(self.local_epoch + 1):
            self._doubt(claimed)
            return False
        self._leave_scheduled_rounds()
        self.finish_pending_update()
        self.state_averager.leave_early_round()
        with self.tracker.pause_updates():
            loaded = self.state_averager.load_state_from_peers()
            claimed = self.tracker.global_epoch
            if loaded:
                self.state_averager.is_behind = self.local_epoch == claimed - 1
                if self.state_averager.is_behind:
                    logger.info(f"Catching up with collaboration step {claimed}")
                    self.state_averager.local_epoch = claimed
            self.forget_progress()
            self.tracker.forget_others(self.local_epoch)
            if loaded:
                self.share_state()
                if not self.state_averager.client_mode:
                    self.state_averager.state_sharing_priority = self.local_epoch
        if self.local_epoch < claimed - 1:
            self._doubt(claimed)
        elif loaded:
            self._failed_loads = 0
        return loaded

    def _is_offered(self, epoch: int) -> bool:
        """Whether somebody offers a state of step `epoch` or later."""
        return self.state_averager.download_state(min_epoch=epoch, only_metadata=True) is not None

    def _leave_scheduled_rounds(self) -> None:
        """Do not keep the others waiting in the rounds of averaging that we have signed up for.

        hivemind forgets about that of the parameters: theirs takes a quarter of the averaging timeout and is a partial
        one, while ours of the next step waits for them.
        """
        controls = (self.scheduled_grads, self.scheduled_state)
        self.scheduled_grads = self.scheduled_state = None
        for control in controls:
            if control is None or control.done():
                continue
            if control.stage == AveragingStage.LOOKING_FOR_GROUP:
                _call_off(control)
            else:
                with suppress(concurrent.futures.InvalidStateError):  # hivemind calls it off in the end
                    self._tag_along_with_zero_weight(control)

    def forget_progress(self) -> None:
        """Drop the gradients accumulated so far: they belong to other parameters than the ones we have now."""
        self.grad_averager.reset_accumulated_grads_()
        self.tracker.report_local_progress(local_epoch=self.local_epoch, samples_accumulated=0)

    def _doubt(self, claimed: int) -> None:
        """Somebody claims to be at a later step, but nobody offers its state: go on as if nobody did, for a while."""
        self._failed_loads += 1
        tracker = self.tracker
        with tracker.pause_updates():
            tracker.global_progress.epoch = self.local_epoch
            tracker.forget_others(self.local_epoch)
            if self._failed_loads < 3:
                tracker.look_in(tracker.default_refresh_period)
                return
            self._failed_loads = 0
            number = tracker.distrust_claims_above(self.local_epoch + 1)
        logger.warning(f"Ignoring {number} peers that claim step #{claimed}: no state of it is offered")
