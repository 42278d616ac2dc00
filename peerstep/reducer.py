"""What a member of a round reduces: its parts of the tensors, averaged over all members, on time.

A part is closed once each sender has delivered it or is too late. All members then receive its average.
"""

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass, field

import torch
from hivemind.compression import CompressionBase, CompressionInfo, TensorRole, deserialize_torch_tensor
from hivemind.p2p import PeerID
from hivemind.proto import runtime_pb2

from peerstep.bounds import MIN_WEIGHT, Bounds, ViolationError, norm_of
from peerstep.neighbours import REPORTED, NormFilter, cap_weights
from peerstep.wire import TensorSpec

# A sender is late for a part after LATE_FACTOR times the median time of the senders, plus LATE_SECONDS. Later parts do
# not wait for it: if each one did, a round would take more than twice as long as without that sender. Who was late in
# the last round, while most were not, has SLOW_SECONDS instead: each step would wait for it, and all would take fewer.
LATE_FACTOR, LATE_SECONDS, SLOW_SECONDS = 2.0, 3.0, 0.2


@dataclass(frozen=True, eq=False)
class Part:
    """A slice of this peer's tensor, shape (elements,), and of the output, which receives the average.

    :param is_given: whether the reducer's own values are the answer, and nobody sends any
    """

    own: torch.Tensor
    output: torch.Tensor
    info: CompressionInfo
    compression: CompressionBase
    is_given: bool = False

    @property
    def is_gradient(self) -> bool:
        return self.info.role == TensorRole.GRADIENT

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(tuple(self.own.shape), compressions={self.compression.compression_type})

    def compress(self, tensor: torch.Tensor) -> runtime_pb2.Tensor:
        return self.compression.compress(tensor, self.info)


@dataclass
class _Sender:
    """Another member that sends its values."""

    started: float | None = None  # when its first message has arrived (`time.monotonic`)
    next: float = 0  # number of the next part that it may deliver; infinite if it has left
    is_late: bool = False  # a part was closed without it; no other part waits for it then
    is_slow: bool = False  # it was late in the last round


@dataclass
class Average:
    """Average of a part: `message` of a gradient, `values` of parameters, or nothing if the round has ended before.

    A gradient's is sent to all members in the same bytes. Of parameters a member receives the difference from its
    values, which is more accurate, unless these are late.
    """

    message: runtime_pb2.Tensor | None = None
    values: torch.Tensor | None = None


@dataclass
class _Sum:
    """Weighted sum of a part that is not closed yet."""

    total: torch.Tensor | None = None
    weight: float = 0.0
    # Sender -> values and weight of a gradient, compared before they are added; None: this peer's
    held: dict[PeerID | None, tuple[torch.Tensor, float]] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)  # seconds from the first message of a sender to its part

    def add(self, values: torch.Tensor, weight: float) -> None:
        self.total = torch.zeros_like(values) if self.total is None else self.total
        self.total.add_(values, alpha=weight)
        self.weight += weight


@dataclass(eq=False)
class Reducer:
    """Averages this peer's parts over all senders of a round."""

    parts: Sequence[Part]
    senders: InitVar[Sequence[PeerID]]  # the other members that send their values
    own_weight: Callable[[Part], float]  # returns the weight of this peer's values in a part
    bounds: Bounds
    sender_timeout: InitVar[float]  # seconds for the first message of a sender
    timeout: InitVar[float]  # seconds after which all parts are closed with what has arrived
    slow: InitVar[Collection[PeerID]] = ()  # senders that were late for a part of the last round
    own_norm: float = 0.0  # of this peer's gradients in all parts

    def __post_init__(
        self, senders: Sequence[PeerID], sender_timeout: float, timeout: float, slow: Collection[PeerID]
    ):
        loop, self._begun = asyncio.get_running_loop(), time.monotonic()
        self.num_awaited = sum(not part.is_given for part in self.parts)  # those that are given are the last ones
        self.averages: list[asyncio.Future[Average]] = [loop.create_future() for _ in self.parts]
        self.weights: dict[PeerID | None, float] = {}  # sender -> weight of its gradients; None: this peer
        are_few = 2 * sum(sender in slow for sender in senders) < len(senders)
        self._senders = {sender: _Sender(is_slow=are_few and sender in slow) for sender in senders}
        self.late: set[PeerID] = set()  # senders without whose values a part was closed
        self._sums: dict[int, _Sum] = defaultdict(_Sum)
        self._filter = NormFilter(len(senders), self.bounds.believes_weights or self.bounds.are_updates)
        self._excesses: dict[PeerID, str] = {}
        self._changed = asyncio.Event()
        self._first_message_by, self._deadline = self._begun + sender_timeout, self._begun + timeout

    # What arrives

    def has_started(self, sender: PeerID) -> bool:
        return self._senders[sender].started is not None

    def start(self, sender: PeerID) -> None:
        self._senders[sender].started = time.monotonic()

    def awaits(self, sender: PeerID) -> bool:
        """Whether a sender may still deliver a part."""
        return self._senders[sender].next < self.num_awaited

    def leave(self, sender: PeerID) -> None:
        """Expect no part of a sender any longer."""
        if sender in self._senders:
            self._senders[sender].next = math.inf
            self._changed.set()

    def mark_late(self, sender: PeerID) -> None:
        """Do not wait for a sender any longer."""
        self._senders[sender].is_late = True
        self._changed.set()

    def add(self, sender: PeerID, index: int, values: torch.Tensor, weight: float) -> None:
        """Add a sender's values of a part, scaled down to the bounds, unless the part is closed.

        :raises ViolationError: if the part is not a later one than the last, or not finite
        """
        state, part, sums = self._senders[sender], self.parts[index], self._sums[index]
        if index < state.next:
            raise ViolationError("a part again")
        values, weight, excess = self.bounds.clip(part.info, values, part.own, weight)
        if excess is not None:
            self._excesses[sender] = excess
        state.next = index + 1
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
            self.averages[index].set_result(Average(values=self.parts[index].own))
        for index in range(self.num_awaited):
            while (seconds := self._patience(index)) > 0:
                self._changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await self._changed.wait()
            for sender, state in self._senders.items():
                if state.next <= index:
                    state.is_late = True
                    self.late.add(sender)
            average = await self._average(index)
            if not self.averages[index].done():  # the round may have ended meanwhile
                self.averages[index].set_result(average)

    def stop(self) -> None:
        """Close the other parts without an average."""
        for average in self.averages:
            if not average.done():
                average.set_result(Average())

    def _awaited(self, index: int) -> list[_Sender]:
        return [sender for sender in self._senders.values() if sender.next <= index and not sender.is_late]

    def _patience(self, index: int) -> float:
        """Return the seconds for which a part still waits for its senders."""
        awaited = self._awaited(index)
        if not awaited:
            return 0.0
        times = sorted(self._sums[index].times)
        middle = (len(awaited) + len(times) - 1) // 2
        # With a single other sender there is no median: it has all the time.
        median = times[middle] if middle < len(times) and len(awaited) + len(times) > 1 else math.inf
        ends = []
        for sender in awaited:
            if sender.started is not None:
                seconds = SLOW_SECONDS if sender.is_slow else LATE_SECONDS
                ends.append(sender.started + LATE_FACTOR * median + seconds)
            elif sender.is_slow:  # it may have been held up by something else than its link
                ends.append(self._begun + LATE_FACTOR * median + LATE_SECONDS)
            else:
                ends.append(self._first_message_by)
        return min(max(ends), self._deadline) - time.monotonic()

    async def _average(self, index: int) -> Average:
        part, sums, loop = self.parts[index], self._sums.pop(index, _Sum()), asyncio.get_running_loop()
        own, weight = part.own, self.own_weight(part)
        if weight > MIN_WEIGHT and part.is_gradient:
            sums.held[None] = own, weight
        elif sums.total is None or weight > MIN_WEIGHT:
            sums.add(own, weight)
        self._add_held(sums)
        values = sums.total.div_(sums.weight)
        if not part.is_gradient:
            return Average(values=part.output.copy_(values))  # a view: the values of all parts are as large as it
        message = await loop.run_in_executor(None, part.compress, values)
        part.output.copy_(await loop.run_in_executor(None, deserialize_torch_tensor, message))
        return Average(message)

    def _add_held(self, sums: _Sum) -> None:
        """Add the gradients, scaled down where weight or norm is too large compared with the others'."""
        if not sums.held:
            return
        weights = {sender: weight for sender, (_, weight) in sums.held.items()}
        if not self.bounds.believes_weights:
            weights = cap_weights(weights, len(self._senders))
        norms = {sender: norm_of(values) for sender, (values, _) in sums.held.items()}
        factors = self._filter.factors(norms, weights, None, self.own_norm * weights.get(None, 0.0))
        for sender, (values, _) in sums.held.items():
            sums.add(values * factors[sender] if sender in factors else values, weights[sender])
        self.weights |= weights

    def excesses(self) -> dict[PeerID, str]:
        """Return the senders of values that were scaled down, and what was wrong."""
        text = f"gradients of more than {REPORTED:g} times the bound by the other peers' norms"
        return self._excesses | dict.fromkeys(self._filter.excessive, text)
