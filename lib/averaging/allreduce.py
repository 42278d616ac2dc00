"""All-reduce of gradients and parameters in a group whose members may be malicious, fail or leave.

Extends hivemind's runner, reducer and container (hivemind/averaging/allreduce.py, partition.py):

- Gradients and parameters have separate weights.
- Received parts are checked against bounds.
- The round does not wait for a peer that is known to be absent.
- All parts and answers have the compression of the round.
"""

import asyncio
import math
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import AsyncIterator  # noqa: UP035  hivemind does not recognize that of collections.abc

import numpy as np
import torch
from hivemind.averaging.allreduce import AllReduceRunner
from hivemind.averaging.partition import (
    AllreduceException,
    BannedException,
    TensorPartContainer,
    TensorPartReducer,
)
from hivemind.compression import CompressionBase, CompressionInfo, TensorRole, deserialize_torch_tensor
from hivemind.p2p import PeerID, StubBase
from hivemind.proto import averaging_pb2
from hivemind.utils.asyncio import aenumerate, amap_in_executor

from lib.averaging.outliers import TOLERANCE, OutlierFilter
from lib.averaging.wire import TensorSpec, check_tensor

# Weight of a peer without samples. Not 0: a part for which all senders have weight 0 would be 0/0.
MIN_WEIGHT = 1e-6
# Tolerance for the norm of a clipped gradient: compression adds up to some percent.
NORM_TOLERANCE = 1.1
MAX_GRADIENT_NORM = 1e12  # bound without clipping: the square must not overflow in the optimizer's statistics
# Tolerance for the norm of an averaged gradient, relative to the bound on a part. The part and the returned difference
# are both compressed, with errors below their norms.
AVERAGE_TOLERANCE = 4.0
MAX_RMS = 1e4  # of the elements of a parameter part; models of the supported families stay far below


def share_out(shares: Sequence[float], infos: Sequence[CompressionInfo], compression: CompressionBase) -> list[int]:
    """Divide the elements of all tensors among the peers so that each one's bytes are in proportion to its share.

    hivemind divides the elements by the shares. With 8-bit gradients before 16-bit parameters, half of the peers then
    reduce, receive and send twice the bytes of the others.

    :param shares: of each peer, in any unit; 0: reduces nothing
    :returns: number of elements of each peer, in the order of the tensors
    """
    sizes = [info.descriptor.numel() for info in infos]
    bytes_of_tensors = [
        size * info.descriptor.dtype.itemsize * compression.estimate_compression_ratio(info)
        for size, info in zip(sizes, infos, strict=True)
    ]
    elements, total = np.cumsum([0, *sizes]), np.cumsum([0.0, *bytes_of_tensors])
    ends = np.interp(np.cumsum(shares) / np.sum(shares) * total[-1], total, elements)
    return np.diff(np.rint(ends).astype(np.int64), prepend=0).tolist()


@dataclass(frozen=True)
class Bounds:
    """Bounds on the contribution of an honest peer to a round.

    :param weight: samples in one global step
    :param gradient_norm: norm of a whole contribution, and so of each part; 0: no bound
    :param compares_norms: whether a gradient is also bounded by those of the other senders, see outliers.py
    :param parameter_step: root mean square, per element, by which a parameter part may differ from this peer's own
      part, in addition to half of the own part's norm. None: this peer's parameters are no reference (auxiliary peer,
      peer that missed an update)
    """

    weight: float = math.inf
    gradient_norm: float = 0.0
    parameter_step: float | None = None
    compares_norms: bool = False

    def find_violation(
        self, info: CompressionInfo, part: torch.Tensor, own_part: torch.Tensor, weight: float
    ) -> str | None:
        """Describe how a part from another peer violates the bounds; None if it does not."""
        norm = _norm(part)
        if not math.isfinite(norm):
            return "values that are not finite"
        if not MIN_WEIGHT <= weight <= self.weight:
            return f"a weight of {weight:g}, the bound is {self.weight:g}"
        if info.role == TensorRole.GRADIENT:
            limit = NORM_TOLERANCE * self.gradient_norm + 1e-6 if self.gradient_norm else MAX_GRADIENT_NORM
            return f"a gradient of norm {norm:.3g}, the bound is {limit:.3g}" if norm > limit else None
        scale = math.sqrt(part.numel())
        if norm > MAX_RMS * scale:
            return f"parameters of norm {norm:.3g}"
        if self.parameter_step is not None and weight > MIN_WEIGHT:
            distance = _norm(part - own_part)
            bound = 0.5 * _norm(own_part) + self.parameter_step * scale
            if distance > bound:
                return f"parameters at a distance of {distance:.3g} from this peer's, the bound is {bound:.3g}"
        return None


def _norm(tensor: torch.Tensor) -> float:
    """Compute the L2 norm in double precision: squares of untrusted values overflow in single precision."""
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


class SafeTensorPartReducer(TensorPartReducer):
    """Reducer that bans a sender for the rest of the round if its part violates the bounds."""

    def __init__(self, *args, **kwargs):
        self.violations: dict[int, str] = {}  # sender index -> violation
        self.weights: dict[int, float] = {}  # sender index -> weight of its gradients
        self._infos: Sequence[CompressionInfo] = ()
        self._own_parts: Sequence[torch.Tensor] = ()
        self._bounds, self._own_index = Bounds(), -1
        # Part index -> sender index -> part and weight, until the part is averaged
        self._gradient_parts: dict[int, dict[int, tuple[torch.Tensor, float]]] = {}
        self._outliers = OutlierFilter()
        super().__init__(*args, **kwargs)

    def check_parts(
        self, infos: Sequence[CompressionInfo], own_parts: Sequence[torch.Tensor], bounds: Bounds, own_index: int
    ) -> None:
        """Set the reference parts and bounds for other senders. Call it before the first part arrives."""
        self._infos, self._own_parts, self._bounds, self._own_index = infos, own_parts, bounds, own_index

    async def accumulate_part(
        self, sender_index: int, part_index: int, tensor_part: torch.Tensor, weight: float = 1.0
    ) -> torch.Tensor:
        if sender_index != self._own_index:
            info, own_part = self._infos[part_index], self._own_parts[part_index]
            if tensor_part.shape != own_part.shape:
                violation = f"a part of shape {tuple(tensor_part.shape)} instead of {tuple(own_part.shape)}"
            else:
                violation = self._bounds.find_violation(info, tensor_part, own_part, weight)
            if violation is not None:
                self.violations[sender_index] = violation
                raise BannedException(f"sender {sender_index} sent {violation}")
        if self._infos[part_index].role == TensorRole.GRADIENT:
            self.weights[sender_index] = weight
            if self._bounds.compares_norms and weight > MIN_WEIGHT:
                self._gradient_parts.setdefault(part_index, {})[sender_index] = tensor_part, weight
        return await super().accumulate_part(sender_index, part_index, tensor_part, weight)

    def check_current_part_finished(self) -> None:
        """Bound the parts of gradients by each other once all senders' parts have arrived."""
        is_finished = self.current_part_accumulated_from == self.num_current_senders
        if is_finished and (parts := self._gradient_parts.pop(self.current_part_index, None)):
            self._bound_by_each_other(parts)
        super().check_current_part_finished()

    def _bound_by_each_other(self, parts: dict[int, tuple[torch.Tensor, float]]) -> None:
        """Replace the sum of a part if some senders' values are too large.

        :param parts: sender index -> part and weight; parts of weight MIN_WEIGHT are left out, they change nothing
        """
        norms = {sender: _norm(part) for sender, (part, _) in parts.items()}
        factors = self._outliers.clip_factors(norms, {sender: weight for sender, (_, weight) in parts.items()})
        if factors:
            self.accumulator.zero_()
            for sender, (part, weight) in parts.items():
                self.accumulator.add_(part, alpha=weight * factors.get(sender, 1.0))

    def outliers(self) -> dict[int, str]:
        """Return the senders whose gradients are too large, compared with the others': sender index -> violation."""
        text = f"gradients of more than {TOLERANCE:g} times the norm of the other peers'"
        return {sender: text for sender in self._outliers.senders if sender != self._own_index}


class SafeTensorPartContainer(TensorPartContainer):
    """Container that keeps this peer's values where a reducer's answer violates the bounds."""

    def __init__(self, *args, **kwargs):
        self.violations: dict[int, str] = {}  # reducer index -> violation
        self.bounds, self.own_index = Bounds(), -1
        super().__init__(*args, **kwargs)

    def register_processed_part(self, peer_index: int, part_index: int, part: torch.Tensor) -> None:
        """Accept the difference between the average of a part and this peer's own part.

        :raises AllreduceException: if the average exceeds what honest senders can produce
        """
        if peer_index != self.own_index:
            own_part, info = self._input_parts_by_peer[peer_index][part_index]
            if part.shape != own_part.shape:
                violation = f"a part of shape {tuple(part.shape)} instead of {tuple(own_part.shape)}"
            elif part.any():
                violation = self.bounds.find_violation(info, own_part + part, own_part, weight=1.0)
            else:  # zeros: hivemind registers them for a reducer that has failed
                violation = None
            if violation is not None:
                self.violations[peer_index] = violation
                raise AllreduceException(f"reducer {peer_index} answered {violation}")
        super().register_processed_part(peer_index, part_index, part)


class _ClosingStub:
    """Stub of a peer's averager that closes the stream of `rpc_aggregate_part` after the last expected answer."""

    def __init__(self, stub: StubBase, peer: PeerID, runner: "SafeAllReduceRunner"):
        self.stub, self.peer, self.runner = stub, peer, runner

    async def rpc_aggregate_part(
        self, inputs: AsyncIterator[averaging_pb2.AveragingData]
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        return self._receive(await self.stub.rpc_aggregate_part(inputs))

    async def _receive(
        self, stream: AsyncIterator[averaging_pb2.AveragingData]
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        num_received, specs = 0, self.runner.part_specs(self.peer)
        async with aclosing(stream):
            async for message in stream:
                if message.code == averaging_pb2.BAD_GROUP_ID:
                    await self.runner.drop_unstarted_sender(self.peer)
                elif message.code == averaging_pb2.AVERAGED_PART:
                    check_tensor(message.tensor_part, specs[num_received])
                yield message
                num_received += 1
                if num_received == len(specs):
                    return


class SafeAllReduceRunner(AllReduceRunner):
    """Runner of one round of all-reduce.

    The stream to a peer is closed once the peer has sent all answers, see `SafeAverager._keep_stream_open`.

    :param weight: averaging weight of this peer's gradients: its samples
    :param parameter_weight: averaging weight of this peer's parameters; lower if they lack an update
    :param bounds: bounds on the parts of other senders
    :param compression: a compression for each role
    """

    def __init__(self, *args, parameter_weight: float, bounds: Bounds, **kwargs):
        self.parameter_weight = max(parameter_weight, MIN_WEIGHT)
        super().__init__(*args, **kwargs)
        self.weight = max(self.weight, MIN_WEIGHT)
        own_index = self.sender_peer_ids.index(self.peer_id) if self.peer_id in self.sender_peer_ids else -1
        self._own_infos = self._part_infos(self.ordered_peer_ids.index(self.peer_id))
        self._own_specs = self.part_specs(self.peer_id)
        self.tensor_part_reducer.check_parts(self._own_infos, self.parts_for_local_averaging, bounds, own_index)
        self.tensor_part_container.bounds = replace(bounds, gradient_norm=AVERAGE_TOLERANCE * bounds.gradient_norm)
        self.tensor_part_container.own_index = self.ordered_peer_ids.index(self.peer_id)

    def _part_infos(self, peer_index: int) -> list[CompressionInfo]:
        return [info for _, info in self.tensor_part_container._input_parts_by_peer[peer_index]]

    def _weight_of(self, info: CompressionInfo) -> float:
        return self.weight if info.role == TensorRole.GRADIENT else self.parameter_weight

    def part_specs(self, peer: PeerID) -> list[TensorSpec]:
        """Return the specs of the parts that a peer reduces. They hold for the parts sent and for the answers."""
        parts = self.tensor_part_container._input_parts_by_peer[self.ordered_peer_ids.index(peer)]
        return [
            TensorSpec(tuple(part.shape), compressions={self._compression_of(info).compression_type})
            for part, info in parts
        ]

    def _compression_of(self, info: CompressionInfo) -> CompressionBase:
        return self.tensor_part_container.compression.choose_compression(info)

    @property
    def received_fraction(self) -> float:
        """Fraction of the elements whose average arrived; the other elements kept this peer's values."""
        container = self.tensor_part_container
        return 1.0 - container.failed_size / max(1, container.total_size)

    def sender_weights(self) -> dict[PeerID, float]:
        """Return the gradient weights of the senders, known only if this peer reduces a gradient part."""
        return {self.sender_peer_ids[index]: weight for index, weight in self.tensor_part_reducer.weights.items()}

    def violations(self) -> dict[PeerID, str]:
        """Return the members that sent or answered values out of bounds, with the violation."""
        reducer = self.tensor_part_reducer
        sent = {self.sender_peer_ids[i]: text for i, text in (reducer.outliers() | reducer.violations).items()}
        answered = {self.ordered_peer_ids[i]: text for i, text in self.tensor_part_container.violations.items()}
        return sent | answered

    async def drop_unstarted_sender(self, peer: PeerID) -> None:
        """Stop waiting for a sender that has not started: its round has ended or was cancelled."""
        waits_for_it = peer in self.sender_peer_ids and peer not in self.active_senders | self.banned_senders
        if waits_for_it and self.part_specs(self.peer_id):
            await self._ban_sender(peer)

    def _get_peer_stub(self, peer: PeerID) -> _ClosingStub:
        return _ClosingStub(super()._get_peer_stub(peer), peer, self)

    async def _accumulate_parts_streaming(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], sender_index: int
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        """Average the parts of a sender with those of the others, and answer with the differences.

        hivemind compresses the answers by the number that the sender gives, which two formats share.
        """
        loop, reducer, index = asyncio.get_running_loop(), self.tensor_part_reducer, 0
        try:
            async for part, weight in amap_in_executor(
                lambda message: (deserialize_torch_tensor(message.tensor_part), message.weight),
                self._check_parts(stream, sender_index),
                max_prefetch=self.tensor_part_container.prefetch,
            ):
                info = self._own_infos[index]
                try:
                    average = await reducer.accumulate_part(sender_index, index, part, weight=weight)
                except BannedException:
                    break
                index += 1
                compress = self._compression_of(info).compress
                answer = await loop.run_in_executor(None, compress, average - part, info)
                yield averaging_pb2.AveragingData(code=averaging_pb2.AVERAGED_PART, tensor_part=answer)
        finally:
            if index != reducer.num_parts:
                await self._ban_sender(self.sender_peer_ids[sender_index])

    async def _check_parts(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], sender_index: int
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        """Forward the messages of a sender, each checked before it is deserialized.

        :raises ValueError: if a message is not the next part that this peer reduces
        """
        specs = self._own_specs
        async for index, message in aenumerate(stream):
            try:
                if index == len(specs):
                    raise ValueError("more parts than expected")
                check_tensor(message.tensor_part, specs[index])
            except ValueError as error:
                self.tensor_part_reducer.violations[sender_index] = str(error)
                raise
            yield message

    async def _communicate_with_peer(self, peer_id: PeerID) -> None:
        if peer_id != self.peer_id:
            return await super()._communicate_with_peer(peer_id)
        peer_index = self.ordered_peer_ids.index(peer_id)
        sender_index = self.sender_peer_ids.index(peer_id)
        for part_index, info in enumerate(self._part_infos(peer_index)):
            own_part = self.parts_for_local_averaging[part_index]
            averaged = await self.tensor_part_reducer.accumulate_part(
                sender_index, part_index, own_part, weight=self._weight_of(info)
            )
            self.tensor_part_container.register_processed_part(peer_index, part_index, averaged - own_part)

    async def _generate_input_for_peer(self, peer_index: int) -> AsyncIterator[averaging_pb2.AveragingData]:
        weights = [self._weight_of(info) for info in self._part_infos(peer_index)]
        parts = self.tensor_part_container.iterate_input_parts_for(peer_index)
        async for index, part in aenumerate(parts):
            group = {"code": averaging_pb2.PART_FOR_AVERAGING, "group_id": self.group_id} if index == 0 else {}
            yield averaging_pb2.AveragingData(tensor_part=part, weight=weights[index], **group)
