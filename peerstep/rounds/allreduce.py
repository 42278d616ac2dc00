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
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import InitVar, dataclass, replace
from itertools import chain
from typing import AsyncIterator  # noqa: UP035  hivemind does not recognize that of collections.abc

import numpy as np
import torch
from hivemind.averaging.partition import AllreduceException
from hivemind.compression import CompressionInfo, RoleAdaptiveCompression, TensorRole, deserialize_torch_tensor
from hivemind.p2p import PeerID
from hivemind.p2p.servicer import StubBase
from hivemind.proto import averaging_pb2
from hivemind.utils import get_logger

from peerstep.rounds.bounds import ANSWERED_FACTOR, ANSWERED_NORM, MIN_WEIGHT, Bounds, norm_of
from peerstep.rounds.reducer import DIFFERENCE, Part, Reducer, answers_to
from peerstep.rounds.relative_bounds import REPORTED
from peerstep.tensors.checks import check_tensor

logger = get_logger(__name__)

# Fraction of the time of a round after which a reducer closes its parts. The rest is for sending the averages.
REDUCE_FRACTION = 0.9
PACED_SECONDS = 3.0  # a peer on a slow link paces its values if sending them takes longer


def cut_tensors(
    compression: RoleAdaptiveCompression,
    part_size_bytes: int,
    turn: int,
    role: TensorRole,
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    shares: Sequence[float],
    weight: float = MIN_WEIGHT,
    takers: Collection[PeerID] | None = None,
    drifts: bool = False,
) -> list[list[Part]]:
    """Cut this peer's tensors into the parts that each member reduces, in the order of the members.

    :param turn: differs in each round, so that what a member sends or receives too late is not always the same
    :param tensors: of any strides, as those of a model in `channels_last`
    :param outputs: contiguous; receive the averages. For gradients they may be `tensors`
    :param shares: of the members, of any sum; 0: the member reduces nothing
    :param weight, takers: see Part
    :param drifts: whether steps had several groups since `outputs`, the last averages. The slack of each part is then
      what it has moved: with local updates, groups of 2 of 9, and 16 steps in between honest members differed by less
    """
    ends = np.cumsum(shares) / np.sum(shares) * sum(tensor.numel() for tensor in tensors)
    parts: list[list[Part]] = [[] for _ in shares]
    begin = 0
    for key, (tensor, output) in enumerate(zip(tensors, outputs, strict=True)):
        if not tensor.numel():
            continue
        info = CompressionInfo.from_tensor(tensor, key=key, role=role)
        chosen = compression.choose_compression(info)
        size = int(part_size_bytes / tensor.element_size() / chosen.estimate_compression_ratio(info))
        pairs = zip(tensor.detach().reshape(-1).split(size), output.view(-1).split(size), strict=True)
        for number, (own, result) in enumerate(pairs):
            reducer = np.searchsorted(ends, begin + len(own) / 2)  # whose share has its middle
            part_info = info.get_part(number, size)
            slack = norm_of(own - result) if drifts else 0.0
            parts[reducer].append(Part(own, result, part_info, chosen, max(weight, MIN_WEIGHT), takers, slack))
            begin += len(own)
    starts = [turn % max(1, len(of_member)) for of_member in parts]
    return [of_member[start:] + of_member[:start] for start, of_member in zip(starts, parts, strict=True)]


@dataclass(eq=False)
class _Remote:
    """Another reducer: what this peer sends to it, and receives from it."""

    peer_id: PeerID
    parts: Sequence[Part]  # of which this peer sends its values
    answers: Sequence[Part]  # whose averages this peer receives, in this order
    most_energy: float  # bound on the sum of the squared norms of its averages of gradients
    energy: float = 0.0  # of those that have arrived
    num_opened: int = 0  # parts of which this peer has compressed its values
    num_closed: int = 0  # parts of those whose averages have arrived
    has_answered: bool = False
    averages_parameters: bool = False  # it has answered with parameters
    is_far: bool = False  # some of them were too far from this peer's


@dataclass(eq=False, kw_only=True)
class AllReduce:
    """One round of all-reduce at one member."""

    peer_id: PeerID
    group_id: bytes
    parts: Mapping[PeerID, Sequence[Part]]  # of each member as a reducer; those that are given come last
    get_stub: Callable[[PeerID], StubBase]  # returns that of another member's averager
    bounds: InitVar[Bounds]
    sender_timeout: InitVar[float]  # seconds between two messages of a sender, and before its first one
    reducer_timeout: float  # seconds between two answers of a reducer
    timeout: float  # seconds for the whole round
    # Bytes per second at which this peer sends its values, if its link is slow. They would fill the send buffers
    # otherwise, in which the acknowledgements of what it receives wait, too
    upload: float = math.inf
    slow: InitVar[Collection[PeerID]] = ()  # see Reducer

    def __post_init__(self, bounds: Bounds, sender_timeout: float, slow: Collection[PeerID]):
        self._answer_bounds = replace(bounds, parameter_change=ANSWERED_FACTOR * bounds.parameter_change)
        energies = self._measure()
        self._own_answers = [part for _, part in answers_to(self.peer_id, self.parts[self.peer_id])]
        self._remotes = [
            _Remote(
                peer_id,
                parts=[part for part in parts if not part.is_given],
                answers=[part for _, part in answers_to(self.peer_id, parts)],
                most_energy=ANSWERED_NORM**2 * energies[peer_id] if bounds.has_gradient else math.inf,
            )
            for peer_id, parts in self.parts.items()
            if peer_id != self.peer_id
        ]
        sent = chain(*(remote.parts for remote in self._remotes))
        num_bytes = sum(part.own.nbytes * part.compression.estimate_compression_ratio(part.info) for part in sent)
        self._upload = self.upload if num_bytes > PACED_SECONDS * self.upload else math.inf
        self._may_send_at = 0.0
        self.refusing: set[PeerID] = set()  # members that do not know the group
        self.was_late = False  # whether a reducer has closed a part without this peer's values
        self.reducer = Reducer(
            self.peer_id,
            self.parts[self.peer_id],
            [remote.peer_id for remote in self._remotes],
            bounds,
            sender_timeout,
            REDUCE_FRACTION * self.timeout,
            slow,
            math.sqrt(energies[self.peer_id]),
        )
        # Members that have sent what no honest peer sends, or what exceeds the bounds, and what it was
        self.violations, self.excesses = self.reducer.violations, self.reducer.excesses
        self._arrived: set[Part] = set()  # parts that have their average
        for part in chain(*self.parts.values()):  # without an average, parameters that this peer takes stay
            if not part.is_gradient and (part.takers is None or self.peer_id in part.takers):
                part.output.copy_(part.own)

    def _measure(self) -> dict[PeerID, float]:
        """Return the squared norm of the own gradients at each reducer: at least its share, if they are 0 there."""
        energies, sizes = dict.fromkeys(self.parts, 0.0), Counter[PeerID]()
        for peer_id, parts in self.parts.items():
            for part in parts:
                if part.is_gradient:
                    energies[peer_id] += norm_of(part.own) ** 2
                    sizes[peer_id] += part.own.numel()
        density = sum(energies.values()) / max(1, sizes.total())
        return {peer_id: max(energies[peer_id], density * sizes[peer_id]) for peer_id in self.parts}

    # What came of it

    def received_fraction(self, role: TensorRole) -> float | None:
        """Return the fraction of the elements whose average has arrived; None if the round has none."""
        answers = chain(self._own_answers, *(remote.answers for remote in self._remotes))
        sizes = {part: part.own.numel() for part in answers if part.info.role == role}
        return sum(sizes[part] for part in sizes.keys() & self._arrived) / sum(sizes.values()) if sizes else None

    def silent_reducers(self) -> set[PeerID]:
        """Return the other reducers that have answered nothing; none if nobody has: it may be this peer's link."""
        silent = {remote.peer_id for remote in self._remotes if remote.answers and not remote.has_answered}
        return silent if any(remote.has_answered for remote in self._remotes) else set()

    @property
    def confirming(self) -> set[PeerID]:
        """The other members that have sent something in this group."""
        return self.reducer.started | self.answering

    @property
    def answering(self) -> set[PeerID]:
        """The other reducers that have answered."""
        return {remote.peer_id for remote in self._remotes if remote.has_answered}

    @property
    def is_far(self) -> bool:
        """Whether the parameters of most others, those they send or average, are too far from this peer's.

        A peer that differs only in what it reduces itself receives no such average, but such values from all. Those of
        one sender alone say nothing: it may be the one that is far.
        """
        senders = self.reducer.far if len(self.reducer.far) > 1 else set[PeerID]()
        far = senders | {remote.peer_id for remote in self._remotes if remote.is_far}
        compared = self.reducer.compared | {r.peer_id for r in self._remotes if r.averages_parameters}
        return 2 * len(far) > len(compared)

    async def run(self) -> None:
        """Average. Returns once all averages have arrived and this reducer has closed its parts, or at the timeout."""
        exchanges = [self._exchange(remote) for remote in self._remotes if remote.answers]
        tasks = [asyncio.create_task(work) for work in (self.reducer.run(), *exchanges)]
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
        self._arrived |= {part for part, average in own if average.result() is not None}
        for part in chain(*self.parts.values()):  # without an average, a gradient is 0
            if part.is_gradient and part not in self._arrived:
                part.output.zero_()

    async def _exchange(self, remote: _Remote) -> None:
        """Send this peer's values to a member that reduces them, and receive the averages."""
        try:
            async with asyncio.timeout(self.reducer_timeout):
                stream = await self.get_stub(remote.peer_id).rpc_aggregate_part(self.outgoing(remote))
            async with aclosing(stream):  # see SafeAverager._keep_stream_open
                for part in remote.answers:
                    async with asyncio.timeout(self.reducer_timeout):
                        message = await anext(stream)
                    if message.code == averaging_pb2.BAD_GROUP_ID:
                        self.reducer.drop_unstarted(remote.peer_id)
                        self.refusing.add(remote.peer_id)
                    if message.code != averaging_pb2.AVERAGED_PART:
                        raise AllreduceException(averaging_pb2.MessageCode.Name(message.code))
                    await self._accept(remote, part, message)
        except Exception as error:
            logger.debug(f"{remote.peer_id} did not send all averages: {error!r}")

    async def outgoing(self, remote: _Remote) -> AsyncIterator[averaging_pb2.AveragingData]:
        """Compress this peer's values for a reducer. The number of a part is in the field `chunks`.

        The first message has none: on a slow link the reducer knows of its sender before the first part has arrived.
        After a part that was closed without it, this peer continues with one that it can deliver in time: halfway.
        """
        kind = {"code": averaging_pb2.PART_FOR_AVERAGING, "group_id": self.group_id}
        yield averaging_pb2.AveragingData(**kind)
        loop, index = asyncio.get_running_loop(), 0
        compressed: dict[int, asyncio.Future] = {}
        while index < len(remote.parts):
            for number in range(index, min(index + 2, len(remote.parts))):  # the next part while this one is sent
                if number not in compressed:
                    part = remote.parts[number]
                    compressed[number] = loop.run_in_executor(None, part.compress, part.own)
            remote.num_opened = index + 1
            tensor = await compressed.pop(index)
            tensor.chunks = index
            weight = remote.parts[index].weight
            yield averaging_pb2.AveragingData(**kind, tensor_part=tensor, weight=weight)
            now = time.monotonic()
            self._may_send_at = max(now, self._may_send_at) + len(tensor.buffer) / self._upload
            await asyncio.sleep(self._may_send_at - now)
            index += 1
            if index < remote.num_closed:
                index = (remote.num_closed + len(remote.parts)) // 2

    async def _accept(self, remote: _Remote, part: Part, message: averaging_pb2.AveragingData) -> None:
        """Accept the average of a part, scaled down to the bounds.

        Parameters beyond the bounds count as not received; far beyond, this peer's stay. If they always stayed, a peer
        that differs from the others in one part would refuse it in each round.

        :raises ValueError: if it is malformed or not finite
        """
        try:
            check_tensor(message.tensor_part, part.spec)
            loop = asyncio.get_running_loop()
            average = await loop.run_in_executor(None, deserialize_torch_tensor, message.tensor_part)
            if message.weight == DIFFERENCE:
                average = part.own + average
            answered = average
            average, _, excess = self._answer_bounds.clip(part.info, answered, part.own, 1.0, part.slack)
        except ValueError as error:
            self.violations[remote.peer_id] = str(error)
            raise
        remote.has_answered = True
        if part.is_gradient:
            average, excess = self._bound_average(remote, average)
        else:
            remote.averages_parameters = True
            remote.is_far |= excess is not None
        if excess is not None:
            self.excesses[remote.peer_id] = excess
        is_within = excess is None or part.is_gradient
        if is_within or norm_of(answered - part.own) <= REPORTED * norm_of(average - part.own):
            part.output.copy_(average)
        if is_within:
            self._arrived.add(part)
        remote.num_closed += not part.is_given
        self.was_late |= remote.num_closed > remote.num_opened

    def _bound_average(self, remote: _Remote, average: torch.Tensor) -> tuple[torch.Tensor, str | None]:
        """Scale an average down if a reducer's averages are larger than the gradients of this peer explain."""
        energy, before, most = norm_of(average) ** 2, remote.energy, remote.most_energy
        remote.energy += energy
        if energy == 0 or before + energy <= most:
            return average, None
        excess = f"averages of more than {REPORTED:g} times the bound by this peer's gradients"
        factor = math.sqrt(max(0.0, most - before) / energy)
        return average * factor, excess if before + energy > REPORTED**2 * most else None
