"""What a member of a round reduces: its parts of the tensors, averaged over all members, on time.

A part is closed once each sender has delivered it or is too late. All members then receive its average.
"""

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from typing import AsyncIterator  # noqa: UP035  hivemind does not recognize that of collections.abc

import torch
from hivemind.compression import CompressionBase, CompressionInfo, TensorRole, deserialize_torch_tensor
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils import get_logger

from peerstep.rounds.bounds import ANSWERED_FACTOR, MIN_WEIGHT, Bounds, ViolationError, norm_of
from peerstep.rounds.relative_bounds import REPORTED, NormFilter, cap_weights
from peerstep.tensors.checks import TensorSpec, check_tensor

logger = get_logger(__name__)

# A sender is late for a part after LATE_FACTOR times the median time of the senders, plus LATE_SECONDS. Later parts do
# not wait for it: if each one did, a round would take more than twice as long as without that sender. Who was late in
# the last round, while most were not, has SLOW_SECONDS instead: each step would wait for it, and all would take fewer.
LATE_FACTOR, LATE_SECONDS, SLOW_SECONDS = 2.0, 3.0, 0.2
DIFFERENCE = 1.0  # in the field `weight` of an answer: it is the difference from its receiver's values


@dataclass(frozen=True, eq=False)
class Part:
    """A slice of this peer's tensor, shape (elements,), and of the output, which receives the average."""

    own: torch.Tensor
    output: torch.Tensor
    info: CompressionInfo
    compression: CompressionBase
    weight: float  # averaging weight of this peer's values
    # None, or the only members that receive it: its reducer gives them its own values, and nobody sends any
    takers: Collection[PeerID] | None = None
    slack: float = 0.0  # norm by which the parameters of honest members may differ further than Bounds says

    @property
    def is_gradient(self) -> bool:
        return self.info.role == TensorRole.GRADIENT

    @property
    def is_given(self) -> bool:
        return self.takers is not None

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(tuple(self.own.shape), compressions={self.compression.compression_type})

    def compress(self, tensor: torch.Tensor) -> runtime_pb2.Tensor:
        return self.compression.compress(tensor, self.info)


def answers_to(peer_id: PeerID, parts: Sequence[Part]) -> list[tuple[int, Part]]:
    """Return those of a reducer's parts whose averages a member receives, with their numbers, in this order.

    What is given goes first: a member that lacks updates needs it more than the gradients.
    """
    answers = [(number, part) for number, part in enumerate(parts) if part.takers is None or peer_id in part.takers]
    return sorted(answers, key=lambda answer: not answer[1].is_given)


@dataclass
class Delivery:
    """How many members have received all averages of a reducer. It is complete some time after the round."""

    receivers: int
    failed: int = 0

    @property
    def is_poor(self) -> bool:
        """Whether most members have not received all of them."""
        return self.failed * 2 > self.receivers


@dataclass
class _Sender:
    """Another member that sends its values."""

    heard: float  # when its newest message has arrived, or the round has begun (`time.monotonic`)
    started: float = math.inf  # when its first message has arrived
    next_part: int = 0  # number of the next part that it may deliver
    is_late: bool = False  # a part was closed without it; no other part waits for it then
    is_slow: bool = False  # it was late in the last round


@dataclass
class _Sum:
    """Weighted sum of a part that is not closed yet."""

    total: torch.Tensor | None = None
    weight: float = 0.0
    # Member -> values and weight of a gradient, compared before they are added
    held: dict[PeerID, tuple[torch.Tensor, float]] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)  # seconds from the first message of a sender to its part

    def add(self, values: torch.Tensor, weight: float) -> None:
        self.total = torch.zeros_like(values) if self.total is None else self.total
        self.total.add_(values, alpha=weight)
        self.weight += weight


@dataclass(eq=False)
class Reducer:
    """Averages this peer's parts over all senders of a round."""

    peer_id: PeerID
    parts: Sequence[Part]  # those that are given are the last ones
    senders: InitVar[Sequence[PeerID]]  # the other members that send their values
    bounds: Bounds
    sender_timeout: float  # seconds between two messages of a sender, and before its first one
    timeout: InitVar[float]  # seconds after which all parts are closed with what has arrived
    slow: InitVar[Collection[PeerID]] = ()  # senders that were late for a part of the last round
    own_norm: float = 0.0  # of this peer's gradients in all parts

    def __post_init__(self, senders: Sequence[PeerID], timeout: float, slow: Collection[PeerID]):
        loop, self._begun = asyncio.get_running_loop(), time.monotonic()
        self._deadline = self._begun + timeout
        self.num_awaited = sum(not part.is_given for part in self.parts)
        # Of each part: the message for all members of a gradient, the values of parameters, or None if the round has
        # ended before, or no parameters that count have come. Of parameters a member receives the difference from its
        # values, which is more accurate, unless these are late.
        self.averages: list[asyncio.Future[runtime_pb2.Tensor | torch.Tensor | None]] = [
            loop.create_future() for _ in self.parts
        ]
        self.weights: dict[PeerID, float] = {}  # member -> weight of its gradients
        are_few = 2 * sum(sender in slow for sender in senders) < len(senders)
        self._senders = {sender: _Sender(self._begun, is_slow=are_few and sender in slow) for sender in senders}
        self.late: set[PeerID] = set()  # senders without whose values a part was closed
        self._sums: dict[int, _Sum] = defaultdict(_Sum)
        self._filter = NormFilter(len(senders), self.bounds.believes_weights or self.bounds.are_updates)
        self.violations: dict[PeerID, str] = {}  # senders of what no honest peer sends, and what it was
        self.excesses: dict[PeerID, str] = {}  # senders of values that were scaled down, and what was wrong
        # Senders whose parameters count, and those of them that are as far from this peer's as no honest answer is
        self.compared, self.far = set[PeerID](), set[PeerID]()
        self.delivery = Delivery(len(senders))
        self._changed = asyncio.Event()

    # What arrives

    async def answer(
        self, sender: PeerID, stream: AsyncIterator[averaging_pb2.AveragingData]
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        """Receive a member's values, from the second message of its stream on, and answer with the averages."""
        state = self._senders.get(sender)
        if state is None or state.started < math.inf:
            yield averaging_pb2.AveragingData(code=averaging_pb2.PROTOCOL_VIOLATION)
            return
        self.start(sender)
        loop, arrived = asyncio.get_running_loop(), dict[int, runtime_pb2.Tensor]()
        reader = asyncio.create_task(self._read(sender, stream, arrived))
        self.delivery.failed += 1
        try:
            for index, part in answers_to(sender, self.parts):
                answer, kind = await asyncio.shield(self.averages[index]), 0.0
                if answer is None:
                    return
                if isinstance(answer, torch.Tensor):
                    if (message := arrived.pop(index, None)) is not None:
                        answer = answer - await loop.run_in_executor(None, deserialize_torch_tensor, message)
                        kind = DIFFERENCE
                    answer = await loop.run_in_executor(None, part.compress, answer)
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
        state, loop = self._senders[sender], asyncio.get_running_loop()
        try:
            while state.next_part < self.num_awaited:
                message = await anext(stream)
                state.heard = time.monotonic()
                tensor = message.tensor_part
                if not 0 <= tensor.chunks < self.num_awaited:
                    raise ViolationError("more parts than expected")
                check_tensor(tensor, self.parts[tensor.chunks].spec)
                values = await loop.run_in_executor(None, deserialize_torch_tensor, tensor)
                self.add(sender, tensor.chunks, values, message.weight)
                if not (self.parts[tensor.chunks].is_gradient or self.averages[tensor.chunks].done()):
                    arrived[tensor.chunks] = tensor
        except ValueError as error:
            self.violations[sender] = str(error)
        except Exception as error:
            logger.debug(f"{sender} did not send all parts: {error!r}")
        finally:
            self._drop(sender)

    def start(self, sender: PeerID) -> None:
        """Record the first message of a sender."""
        self._senders[sender].started = self._senders[sender].heard = time.monotonic()

    @property
    def started(self) -> set[PeerID]:
        """The senders whose first message has arrived."""
        return {sender for sender, state in self._senders.items() if state.started < math.inf}

    def drop_unstarted(self, sender: PeerID) -> None:
        """Do not wait for a sender that has not started: its round has ended or was cancelled."""
        if sender in self._senders and self._senders[sender].started == math.inf:
            self._drop(sender)

    def _drop(self, sender: PeerID) -> None:
        self._senders[sender].next_part = self.num_awaited
        self._changed.set()

    def add(self, sender: PeerID, index: int, values: torch.Tensor, weight: float) -> None:
        """Add a sender's values of a part, scaled down to the bounds, unless the part is closed.

        :raises ViolationError: if the part is not a later one than the last, or not finite
        """
        state, part, sums = self._senders[sender], self.parts[index], self._sums[index]
        if index < state.next_part:
            raise ViolationError("a part again")
        sent = values
        values, weight, excess = self.bounds.clip(part.info, sent, part.own, weight, part.slack)
        if excess is not None:
            self.excesses[sender] = excess
        if not part.is_gradient and weight > MIN_WEIGHT:
            self.compared.add(sender)
            if excess is not None and norm_of(sent - part.own) > ANSWERED_FACTOR * norm_of(values - part.own):
                self.far.add(sender)
        state.next_part = index + 1
        if self.averages[index].done():
            return
        sums.times.append(time.monotonic() - state.started)
        if weight > MIN_WEIGHT and part.is_gradient:
            sums.held[sender] = values, weight
        elif weight > MIN_WEIGHT:
            sums.add(values, weight)
        self._changed.set()

    # What leaves

    async def run(self) -> None:
        """Close each part in turn."""
        for index in range(self.num_awaited, len(self.parts)):
            self.averages[index].set_result(self.parts[index].own)
        for index in range(self.num_awaited):
            while (seconds := self._patience(index)) > 0:
                self._changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await self._changed.wait()
            for sender, state in self._senders.items():
                if state.next_part <= index:
                    state.is_late = True
                    self.late.add(sender)
            average = await self._average(index)
            if not self.averages[index].done():  # the round may have ended meanwhile
                self.averages[index].set_result(average)

    def stop(self) -> None:
        """Close the other parts without an average."""
        for average in self.averages:
            if not average.done():
                average.set_result(None)

    def _patience(self, index: int) -> float:
        """Return the seconds for which a part still waits for its senders."""
        awaited = [sender for sender in self._senders.values() if sender.next_part <= index and not sender.is_late]
        if not awaited:
            return 0.0
        times = sorted(self._sums[index].times)
        middle = (len(awaited) + len(times) - 1) // 2
        # With a single other sender there is no median: it has all the time.
        median = times[middle] if middle < len(times) and len(awaited) + len(times) > 1 else math.inf
        ends = []
        for sender in awaited:
            begun, seconds = sender.started, SLOW_SECONDS if sender.is_slow else LATE_SECONDS
            if begun == math.inf and sender.is_slow:  # it may have been held up by something else than its link
                begun, seconds = self._begun, LATE_SECONDS
            ends.append(min(begun + LATE_FACTOR * median + seconds, sender.heard + self.sender_timeout))
        return min(max(ends), self._deadline) - time.monotonic()

    async def _average(self, index: int) -> runtime_pb2.Tensor | torch.Tensor | None:
        """Return the average of a part, see `averages`; None if no parameters that count have come."""
        part, sums, loop = self.parts[index], self._sums.pop(index, _Sum()), asyncio.get_running_loop()
        if part.weight > MIN_WEIGHT and part.is_gradient:
            sums.held[self.peer_id] = part.own, part.weight
        elif sums.total is None and part.weight <= MIN_WEIGHT and not part.is_gradient:
            return None  # the parameters of this peer do not count, and no others have come
        elif sums.total is None or part.weight > MIN_WEIGHT:
            sums.add(part.own, part.weight)
        self.add_held(sums)
        values = sums.total.div_(sums.weight)  # pyright: ignore[reportOptionalMemberAccess]
        if not part.is_gradient:
            return part.output.copy_(values)  # a view: the values of all parts are as large as it
        message = await loop.run_in_executor(None, part.compress, values)
        part.output.copy_(await loop.run_in_executor(None, deserialize_torch_tensor, message))
        return message

    def add_held(self, sums: _Sum) -> None:
        """Add the gradients, scaled down where weight or norm is too large compared with the others'."""
        if not sums.held:
            return
        weights = {sender: weight for sender, (_, weight) in sums.held.items()}
        if not self.bounds.believes_weights:
            weights = cap_weights(weights, len(self._senders))
        self.weights |= weights
        if self.bounds.weighs_equally:
            weights = dict.fromkeys(weights, 1.0)
        norms = {sender: norm_of(values) for sender, (values, _) in sums.held.items()}
        own_norm = self.own_norm * weights.get(self.peer_id, 0.0)
        factors = self._filter.factors(norms, weights, self.peer_id, own_norm)
        for sender, (values, _) in sums.held.items():
            sums.add(values * factors[sender] if sender in factors else values, weights[sender])
        text = f"gradients of more than {REPORTED:g} times the bound by the other peers' norms"
        self.excesses |= dict.fromkeys(self._filter.excessive, text)
