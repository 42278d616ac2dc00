"""All-reduce of gradients and parameters in a group whose members may be slow, malicious, fail or leave.

As in hivemind/averaging/allreduce.py, each member reduces some parts of the tensors. All members send it their values
of these parts and receive the averages. The wire format is hivemind's, the rules are not:

- A round ends on time with what has arrived, see reducer.py and `AllReduce.run`.
- The average of a gradient is compressed once. All members, the reducer included, use the same bytes.
- Gradients and parameters have separate weights and compressions.
- Everything that is received is checked, before it is deserialized and against bounds.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import aclosing, suppress
from dataclasses import InitVar, dataclass, replace
from itertools import chain
from typing import AsyncIterator  # noqa: UP035  hivemind does not recognize that of collections.abc

import numpy as np
import torch
from hivemind.averaging.partition import AllreduceException
from hivemind.compression import CompressionBase, CompressionInfo, TensorRole, deserialize_torch_tensor
from hivemind.p2p import P2P, P2PContext, PeerID, ServicerBase
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils import get_logger
from hivemind.utils.asyncio import amap_in_executor

from peerstep.bounds import ANSWERED_FACTOR, ANSWERED_NORM, MIN_WEIGHT, Bounds, ViolationError, norm_of
from peerstep.neighbours import REPORTED
from peerstep.reducer import Part, Reducer
from peerstep.wire import check_tensor

logger = get_logger(__name__)

# What an answer is, in its field `weight`: values, or the difference from those of its receiver
VALUES, DIFFERENCE = 0.0, 1.0
# Fraction of the time of a round after which a reducer closes its parts. The rest is for sending the averages.
REDUCE_FRACTION = 0.9
PACED_SECONDS = 3.0  # a peer on a slow link paces its values if sending them takes longer


@dataclass(frozen=True)
class Block:
    """Tensors of one role that are cut into shares, each reduced by one member."""

    tensors: Sequence[torch.Tensor]  # this peer's
    outputs: Sequence[torch.Tensor]  # receive the averages; for gradients they may be `tensors`
    infos: Sequence[CompressionInfo]
    shares: Sequence[float]  # of the members, of any sum; 0: the member reduces nothing
    # None, or the only members that receive something: each reducer gives them its own values, and nobody sends any
    takers: Collection[PeerID] | None = None

    def cut(self, compression: CompressionBase, part_size_bytes: int, turn: int = 0) -> list[list[Part]]:
        """Cut the tensors into the parts that each member reduces, in the order of the members.

        :param turn: differs in each round, so that what a member sends or receives too late is not always the same
        """
        ends = np.cumsum(self.shares) / np.sum(self.shares) * sum(tensor.numel() for tensor in self.tensors)
        parts: list[list[Part]] = [[] for _ in self.shares]
        begin = 0
        for tensor, output, info in zip(self.tensors, self.outputs, self.infos, strict=True):
            chosen = compression.choose_compression(info)
            size = int(part_size_bytes / tensor.element_size() / chosen.estimate_compression_ratio(info))
            pairs = zip(tensor.detach().view(-1).split(size), output.view(-1).split(size), strict=True)
            for number, (own, result) in enumerate(pairs):
                reducer = np.searchsorted(ends, begin + len(own) / 2)  # whose share has its middle
                part_info = info.get_part(number, size)
                parts[reducer].append(Part(own, result, part_info, chosen, self.takers is not None))
                begin += len(own)
        starts = [turn % max(1, len(of_member)) for of_member in parts]
        return [of_member[start:] + of_member[:start] for start, of_member in zip(starts, parts, strict=True)]


@dataclass
class Delivery:
    """How many members have received all averages of a reducer. It is complete some time after the round."""

    receivers: int
    failed: int = 0

    @property
    def is_poor(self) -> bool:
        return self.failed * 2 > self.receivers


@dataclass(eq=False, kw_only=True)
class AllReduce:
    """One round of all-reduce at one member."""

    p2p: P2P
    servicer_type: type[ServicerBase]
    prefix: str
    group_id: bytes
    peer_ids: Sequence[PeerID]
    blocks: InitVar[Sequence[Block]]  # the gradients, and the parameters if they are averaged or given in this round
    weight: float  # averaging weight of this peer's gradients, which is its samples
    parameter_weight: float  # averaging weight of its parameters
    bounds: InitVar[Bounds]
    compression: InitVar[CompressionBase]  # a compression for each role
    part_size_bytes: InitVar[int]
    sender_timeout: float  # seconds between two messages of a sender, and before its first one
    reducer_timeout: float  # seconds between two answers of a reducer
    timeout: float  # seconds for the whole round
    # Bytes per second at which this peer sends its values, if its link is slow. They would fill the send buffers
    # otherwise, in which the acknowledgements of what it receives wait, too
    upload: float = math.inf
    slow: InitVar[Collection[PeerID]] = ()  # see Reducer

    def __post_init__(
        self,
        blocks: Sequence[Block],
        bounds: Bounds,
        compression: CompressionBase,
        part_size_bytes: int,
        slow: Collection[PeerID],
    ):
        self.peer_id, peer_ids = self.p2p.peer_id, self.peer_ids
        self._others = [peer_id for peer_id in peer_ids if peer_id != self.peer_id]
        self.weight, self.parameter_weight = max(self.weight, MIN_WEIGHT), max(self.parameter_weight, MIN_WEIGHT)
        self._answer_bounds = replace(bounds, parameter_change=ANSWERED_FACTOR * bounds.parameter_change)
        cuts = [block.cut(compression, part_size_bytes, int.from_bytes(self.group_id, "big")) for block in blocks]
        parts = {peer_id: list(chain(*of_peer)) for peer_id, *of_peer in zip(peer_ids, *cuts, strict=True)}
        self._takers = {peer_id for block in blocks for peer_id in block.takers or ()}
        self._parts = parts  # of each reducer; those that are given come last
        sent = [part for peer_id in self._others for part in parts[peer_id] if not part.is_given]
        num_bytes = sum(part.own.nbytes * part.compression.estimate_compression_ratio(part.info) for part in sent)
        self._upload = self.upload if num_bytes > PACED_SECONDS * self.upload else math.inf
        self._may_send_at = 0.0
        # The parts whose averages this peer receives from each reducer
        self._answers = {
            peer_id: [part for _, part in self._answers_for(self.peer_id, parts[peer_id])] for peer_id in peer_ids
        }
        self.delivery = Delivery(len(self._others))
        self.was_late = False  # whether a reducer has closed a part without this peer's values
        self.violations: dict[PeerID, str] = {}  # members that have sent what no honest peer sends, and what it was
        self._excesses: dict[PeerID, str] = {}  # of answers
        # Squared norms of the averages of gradients of each reducer: of those that have arrived, and their bound
        self._energy, owns = dict.fromkeys(peer_ids, 0.0), self._measure(parts)
        self._most_energy = {
            peer_id: ANSWERED_NORM**2 * own if bounds.has_gradient else math.inf for peer_id, own in owns.items()
        }
        timeouts, own_norm = (self.sender_timeout, REDUCE_FRACTION * self.timeout), math.sqrt(owns[self.peer_id])
        self.reducer = Reducer(parts[self.peer_id], self._others, self._weight_of, bounds, *timeouts, slow, own_norm)
        self._answered: set[PeerID] = set()  # reducers of which an answer has arrived
        # Those that have answered with parameters, and those whose parameters were too far from this peer's
        self._averaging, self._far = set[PeerID](), set[PeerID]()
        # Parts of a reducer of which this peer has compressed its values, and those whose averages have arrived
        self._num_opened, self._num_answered = dict.fromkeys(peer_ids, 0), dict.fromkeys(peer_ids, 0)
        # Elements that this peer receives, and those that it has received
        self._totals, self._received = Counter[TensorRole](), Counter[TensorRole]()
        for part in chain(*self._answers.values()):
            self._totals[part.info.role] += part.own.numel()
        self._averaged: set[Part] = set()  # parts of gradients of the other reducers that have their average
        for part in chain(*parts.values()):  # without an average, parameters stay
            if not part.is_gradient:
                part.output.copy_(part.own)

    def _measure(self, parts: dict[PeerID, list[Part]]) -> dict[PeerID, float]:
        """Return the squared norm of the own gradients at each reducer: at least its share, if they are 0 there."""
        gradients = {peer_id: [part.own for part in of_peer if part.is_gradient] for peer_id, of_peer in parts.items()}
        energies = {peer_id: sum(norm_of(own) ** 2 for own in owns) for peer_id, owns in gradients.items()}
        sizes = {peer_id: sum(own.numel() for own in owns) for peer_id, owns in gradients.items()}
        density = sum(energies.values()) / max(1, sum(sizes.values()))
        return {peer_id: max(energies[peer_id], density * sizes[peer_id]) for peer_id in parts}

    def _answers_for(self, peer_id: PeerID, parts: Sequence[Part]) -> list[tuple[int, Part]]:
        """Return those of a reducer's parts whose averages a member receives, with their numbers, in this order.

        What is given goes first: a member that lacks updates needs it more than the gradients.
        """
        awaited = [(number, part) for number, part in enumerate(parts) if not part.is_given]
        given = [(number, part) for number, part in enumerate(parts) if part.is_given and peer_id in self._takers]
        return given + awaited

    def _weight_of(self, part: Part) -> float:
        return self.weight if part.is_gradient else self.parameter_weight

    def received_fraction(self, role: TensorRole) -> float | None:
        """Return the fraction of the elements whose average has arrived; None if the round has none."""
        return self._received[role] / self._totals[role] if self._totals[role] else None

    def weights(self) -> dict[PeerID, float]:
        """Return the gradient weights of the members, known only if this peer reduces a gradient part."""
        return {self.peer_id if sender is None else sender: weight for sender, weight in self.reducer.weights.items()}

    def silent_reducers(self) -> set[PeerID]:
        """Return the other reducers that have answered nothing; none if nobody has: it may be this peer's link."""
        asked = {peer_id for peer_id in self._others if self._answers[peer_id]}
        return asked - self._answered if self._answered else set()

    @property
    def is_far(self) -> bool:
        """Whether the parameters of most other reducers are too far from this peer's."""
        return len(self._far) * 2 > len(self._averaging)

    def excesses(self) -> dict[PeerID, str]:
        """Return the members that have sent what exceeds the bounds, and what it was."""
        return self.reducer.excesses() | self._excesses

    async def run(self) -> None:
        """Average. Returns once all averages have arrived and this reducer has closed its parts, or at the timeout."""
        exchanges = [self._exchange(peer_id) for peer_id in self._others if self._answers[peer_id]]
        tasks = [asyncio.create_task(work) for work in (self._reduce(), *exchanges)]
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.timeout):
                    await asyncio.gather(*tasks)
        finally:
            self.reducer.stop()
            for task in tasks:  # if one has failed, the others run
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        own = zip(self.reducer.parts, self.reducer.averages, strict=True)
        self._averaged |= {part for part, average in own if average.result().message is not None}
        for part in chain(*self._parts.values()):  # without an average, a gradient is 0
            if part.is_gradient and part not in self._averaged:
                part.output.zero_()

    async def _reduce(self) -> None:
        await self.reducer.run()
        for part in self._answers[self.peer_id]:
            self._received[part.info.role] += part.own.numel()

    # With the other reducers

    async def _exchange(self, peer_id: PeerID) -> None:
        """Send this peer's values to a member that reduces them, and receive the averages."""
        try:
            stub = self.servicer_type.get_stub(self.p2p, peer_id, namespace=self.prefix)
            async with asyncio.timeout(self.reducer_timeout):
                stream = await stub.rpc_aggregate_part(self._outgoing(peer_id))
            async with aclosing(stream):  # see SafeAverager._keep_stream_open
                for part in self._answers[peer_id]:
                    async with asyncio.timeout(self.reducer_timeout):
                        message = await anext(stream)
                    if message.code == averaging_pb2.BAD_GROUP_ID:
                        self.drop_unstarted_sender(peer_id)
                    if message.code != averaging_pb2.AVERAGED_PART:
                        raise AllreduceException(averaging_pb2.MessageCode.Name(message.code))
                    await self._accept(peer_id, part, message)
        except Exception as error:
            logger.debug(f"{peer_id} did not send all averages: {error!r}")

    async def _outgoing(self, peer_id: PeerID) -> AsyncIterator[averaging_pb2.AveragingData]:
        """Compress this peer's values for a reducer. The number of a part is in the field `chunks`.

        The first message has none: on a slow link the reducer knows of its sender before the first part has arrived.
        """
        yield averaging_pb2.AveragingData(code=averaging_pb2.PART_FOR_AVERAGING, group_id=self.group_id)
        parts = self._parts[peer_id]

        def compress(index: int) -> averaging_pb2.AveragingData:
            tensor = parts[index].compress(parts[index].own)
            tensor.chunks = index
            return averaging_pb2.AveragingData(
                code=averaging_pb2.PART_FOR_AVERAGING,
                group_id=self.group_id,
                tensor_part=tensor,
                weight=self._weight_of(parts[index]),
            )

        async for message in amap_in_executor(compress, self._open_parts(peer_id)):
            yield message
            now = time.monotonic()
            self._may_send_at = max(now, self._may_send_at) + len(message.tensor_part.buffer) / self._upload
            await asyncio.sleep(self._may_send_at - now)

    async def _open_parts(self, peer_id: PeerID) -> AsyncIterator[int]:
        """Iterate over the parts that a reducer has not closed.

        After a part that was closed without it, this peer continues with one that it can deliver in time: halfway.
        """
        index, number = 0, sum(not part.is_given for part in self._parts[peer_id])
        while index < number:
            self._num_opened[peer_id] = index + 1
            yield index
            index, answered = index + 1, self._num_answered[peer_id]
            if index < answered:
                index = (answered + number) // 2

    async def _accept(self, peer_id: PeerID, part: Part, message: averaging_pb2.AveragingData) -> None:
        """Accept the average of a part. Parameters too far from this peer's are not, gradients are scaled down.

        :raises ValueError: if it is malformed or not finite
        """
        try:
            check_tensor(message.tensor_part, part.spec)
            loop = asyncio.get_running_loop()
            average = await loop.run_in_executor(None, deserialize_torch_tensor, message.tensor_part)
            if message.weight == DIFFERENCE:
                average = part.own + average
            average, _, excess = self._answer_bounds.clip(part.info, average, part.own, weight=1.0)
            if part.is_gradient:
                average, excess = self._bound_average(peer_id, average)
        except ValueError as error:
            self.violations[peer_id] = str(error)
            raise
        self._answered.add(peer_id)
        if excess is not None:
            self._excesses[peer_id] = excess
        if not part.is_gradient:
            self._averaging.add(peer_id)
            if excess is not None:
                self._far.add(peer_id)
        if excess is None or part.is_gradient:
            part.output.copy_(average)
            self._averaged.add(part)
            self._received[part.info.role] += part.own.numel()
        self._num_answered[peer_id] += not part.is_given
        self.was_late |= self._num_answered[peer_id] > self._num_opened[peer_id]

    def _bound_average(self, peer_id: PeerID, average: torch.Tensor) -> tuple[torch.Tensor, str | None]:
        """Scale an average down if a reducer's averages are larger than the gradients of this peer explain."""
        energy, before, most = norm_of(average) ** 2, self._energy[peer_id], self._most_energy[peer_id]
        self._energy[peer_id] += energy
        if energy == 0 or before + energy <= most:
            return average, None
        excess = f"averages of more than {REPORTED:g} times the bound by this peer's gradients"
        factor = math.sqrt(max(0.0, most - before) / energy)
        return average * factor, excess if before + energy > REPORTED**2 * most else None

    # As a reducer

    def drop_unstarted_sender(self, peer_id: PeerID) -> None:
        """Do not wait for a sender that has not started: its round has ended or was cancelled."""
        if peer_id in self._others and not self.reducer.has_started(peer_id):
            self.reducer.leave(peer_id)

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        """Receive a member's values, and answer with the averages."""
        sender, _ = context.remote_id, await anext(stream)
        if sender not in self._others or self.reducer.has_started(sender):
            yield averaging_pb2.AveragingData(code=averaging_pb2.PROTOCOL_VIOLATION)
            return
        self.reducer.start(sender)
        loop, parts = asyncio.get_running_loop(), self.reducer.parts
        arrived: dict[int, runtime_pb2.Tensor] = {}  # parts of parameters
        reader = asyncio.create_task(self._read(sender, stream, arrived))
        self.delivery.failed += 1
        try:
            for index, part in self._answers_for(sender, parts):
                average = await asyncio.shield(self.reducer.averages[index])
                answer, kind = average.message, VALUES
                if average.values is not None:
                    values, message = average.values, arrived.pop(index, None)
                    if message is not None:
                        values = values - await loop.run_in_executor(None, deserialize_torch_tensor, message)
                        kind = DIFFERENCE
                    answer = await loop.run_in_executor(None, part.compress, values)
                if answer is None:
                    return
                yield averaging_pb2.AveragingData(code=averaging_pb2.AVERAGED_PART, tensor_part=answer, weight=kind)
            self.delivery.failed -= 1
        finally:
            reader.cancel()

    async def _read(
        self,
        sender: PeerID,
        stream: AsyncIterator[averaging_pb2.AveragingData],
        arrived: dict[int, runtime_pb2.Tensor],
    ) -> None:
        """Read a sender's values. `arrived` receives the messages of the parts of parameters."""
        parts, loop = self.reducer.parts, asyncio.get_running_loop()
        pending: asyncio.Future = loop.create_future()
        try:
            while self.reducer.awaits(sender):
                pending = asyncio.ensure_future(anext(stream))
                await asyncio.wait({pending}, timeout=self.sender_timeout)
                if not pending.done():
                    self.reducer.mark_late(sender)
                message = await pending
                tensor = message.tensor_part
                if not 0 <= tensor.chunks < self.reducer.num_awaited:
                    raise ViolationError("more parts than expected")
                check_tensor(tensor, parts[tensor.chunks].spec)
                values = await loop.run_in_executor(None, deserialize_torch_tensor, tensor)
                self.reducer.add(sender, tensor.chunks, values, message.weight)
                if not (parts[tensor.chunks].is_gradient or self.reducer.averages[tensor.chunks].done()):
                    arrived[tensor.chunks] = tensor
        except ValueError as error:
            self.violations[sender] = str(error)
        except Exception as error:
            logger.debug(f"{sender} did not send all parts: {error!r}")
        finally:
            pending.cancel()
            self.reducer.leave(sender)
