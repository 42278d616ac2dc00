"""Tests of the bounds in an all-reduce: on the parts that a reducer accepts, and on its answers to the senders."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import hivemind
import pytest
import torch
from hivemind.averaging.allreduce import AveragingMode
from hivemind.averaging.partition import AllreduceException, BannedException
from hivemind.compression import (
    CompressionInfo,
    Float16Compression,
    RoleAdaptiveCompression,
    TensorRole,
    deserialize_torch_tensor,
)
from hivemind.p2p import PeerID, ServicerBase
from hivemind.proto import averaging_pb2

from lib.averaging import allreduce
from lib.averaging.accumulators import clip_norm
from lib.averaging.allreduce import (
    AVERAGE_TOLERANCE,
    MAX_RMS,
    MIN_WEIGHT,
    Bounds,
    SafeAllReduceRunner,
    SafeTensorPartContainer,
    SafeTensorPartReducer,
    share_out,
)
from lib.averaging.compression import COMPRESSIONS
from lib.averaging.outliers import TOLERANCE

OWN = torch.full((100,), 0.1)  # norm 1
BOUNDS = Bounds(weight=256.0, gradient_norm=1.0, parameter_step=0.01)


def info(role: TensorRole) -> CompressionInfo:
    return CompressionInfo.from_tensor(OWN, key=0, role=role)


GRADIENT, PARAMETER = info(TensorRole.GRADIENT), info(TensorRole.PARAMETER)


def with_bad_values(value: float) -> torch.Tensor:
    part = OWN.clone()
    part[3:5] = value
    return part


@pytest.mark.parametrize(
    ("part_info", "part", "weight"),
    [
        (GRADIENT, OWN, 256.0),
        (GRADIENT, -OWN, 1.0),
        (GRADIENT, 1.05 * OWN, 1.0),  # error of compression
        (GRADIENT, 0 * OWN, MIN_WEIGHT),
        (PARAMETER, OWN, 64.0),
        (PARAMETER, 1.4 * OWN, 64.0),
        (PARAMETER, 100 * OWN, MIN_WEIGHT),  # a sender that missed updates, without weight in the average
    ],
)
def test_honest_parts_are_accepted(part_info, part, weight):
    assert BOUNDS.find_violation(part_info, part, OWN, weight) is None


@pytest.mark.parametrize(
    ("part_info", "part", "weight", "reason"),
    [
        *((GRADIENT, with_bad_values(value), 1.0, "") for value in (math.nan, math.inf, -math.inf, 1e38)),
        *((PARAMETER, with_bad_values(value), 1.0, "") for value in (math.nan, math.inf, -math.inf, 1e38)),
        *((GRADIENT, OWN, weight, "weight") for weight in (257.0, 1e30, math.inf, math.nan, -1.0, MIN_WEIGHT / 2)),
        *((GRADIENT, scale * OWN, 1.0, "gradient of norm") for scale in (1.2, 1e10, 1e20)),
        *((PARAMETER, part, 1.0, "parameters") for part in (3 * OWN, -OWN, OWN + 0.2, 1e22 * OWN)),
    ],
)
def test_parts_out_of_bounds_are_refused(part_info, part, weight, reason):
    assert reason in BOUNDS.find_violation(part_info, part, OWN, weight)


def test_parts_are_bounded_without_clipping_and_without_parameters_of_this_peer():
    bounds = Bounds(weight=256.0)
    for part_info, part, is_refused in [
        (GRADIENT, 1e10 * OWN, False),
        (GRADIENT, 1e20 * OWN, True),
        (PARAMETER, 100 * OWN, False),
        (PARAMETER, torch.full((100,), 2 * MAX_RMS), True),
    ]:
        assert (bounds.find_violation(part_info, part, OWN, 1.0) is not None) == is_refused


def make_reducer(roles: list[TensorRole], num_senders: int) -> SafeTensorPartReducer:
    """Build the reducer of the peer with sender index 0."""
    reducer = SafeTensorPartReducer([OWN.shape] * len(roles), num_senders)
    reducer.check_parts([info(role) for role in roles], [OWN] * len(roles), BOUNDS, own_index=0)
    return reducer


@pytest.mark.parametrize(("part", "reason"), [(1e20 * OWN, "norm"), (torch.zeros(99), "shape")])
async def test_sender_that_violates_the_bounds_is_left_out_of_the_round(part, reason):
    reducer = make_reducer([TensorRole.GRADIENT, TensorRole.PARAMETER], 3)

    async def honest(sender: int, value: float) -> list[torch.Tensor]:
        return [await reducer.accumulate_part(sender, index, torch.full((100,), value), 2.0) for index in range(2)]

    async def lying() -> None:
        with pytest.raises(BannedException, match=reason):
            await reducer.accumulate_part(1, 0, part, 2.0)
        reducer.on_sender_failed(1)  # the runner calls this after a ban

    results = await asyncio.wait_for(asyncio.gather(honest(0, 0.1), honest(2, 0.08), lying()), 5)
    for averages in results[:2]:
        for average in averages:
            assert torch.allclose(average, torch.full((100,), 0.09))
    assert list(reducer.violations) == [1] and reducer.weights == {0: 2.0, 2: 2.0}


async def test_reducer_bounds_pseudo_gradients_by_each_other():
    """A newcomer without samples is no reference, and changes nothing."""
    reducer = make_reducer([TensorRole.GRADIENT, TensorRole.GRADIENT, TensorRole.PARAMETER], 4)
    reducer._bounds = replace(Bounds(weight=256.0), compares_norms=True)

    async def send(sender: int, scale: float, weight: float) -> list[torch.Tensor]:
        return [
            (await reducer.accumulate_part(sender, part, scale * OWN if part < 2 else OWN, weight)).clone()
            for part in range(3)
        ]

    results = await asyncio.gather(send(0, 1.0, 2.0), send(1, 1.0, 2.0), send(2, 1e6, 4.0), send(3, 0, MIN_WEIGHT))
    bound = TOLERANCE * 2  # the liar has twice the samples
    for averages in results:
        for gradient in averages[:2]:
            assert torch.allclose(gradient, (2 + 2 + 4 * bound) / 8 * OWN, rtol=1e-4)
        assert torch.allclose(averages[2], OWN, rtol=1e-4)
    assert list(reducer.outliers()) == [2] and not reducer.violations


def make_container(tensor: torch.Tensor = OWN) -> SafeTensorPartContainer:
    """Build the container of peer 1, which reduces the second of two gradients."""
    infos = [CompressionInfo.from_tensor(tensor, key=key, role=TensorRole.GRADIENT) for key in range(2)]
    container = SafeTensorPartContainer([tensor, tensor], [0.5, 0.5], tensor_infos=infos)
    container.bounds, container.own_index = replace(BOUNDS, gradient_norm=AVERAGE_TOLERANCE), 1
    return container


NOT_FINITE = torch.full((100,), float("nan"))


@pytest.mark.parametrize(
    "difference", [NOT_FINITE, 1e20 * OWN, 3.7 * OWN, torch.zeros(99)], ids=["nan", "1e20", "average 4.7", "shape"]
)
async def test_average_that_violates_the_bounds_is_refused_and_its_reducer_has_failed(difference):
    container = make_container()
    container.register_processed_part(1, 0, NOT_FINITE)  # our own average is checked by the other peers
    with pytest.raises(AllreduceException):
        container.register_processed_part(0, 0, difference)
    container.register_failed_reducer(0)
    assert list(container.violations) == [0] and container.failed_size == 100
    averages = [average async for average in container.iterate_output_tensors()]
    assert not averages[0].any(), "our own values stay"


async def test_failed_reducer_violates_no_bounds():
    container = make_container(1e20 * OWN)
    container.register_failed_reducer(0)
    assert container.failed_size == 100 and not container.violations


@pytest.mark.usefixtures("patches")
@pytest.mark.parametrize("name", COMPRESSIONS)
async def test_honest_average_is_accepted_with_every_compression(name):
    """The part is dominated by one element, where the error of 8-bit compression is largest."""
    compression = COMPRESSIONS[name]()
    own = torch.cat([torch.full((1,), 1000.0), torch.randn(1000, generator=torch.Generator().manual_seed(0))])
    own /= own.norm()

    def transmit(tensor: torch.Tensor) -> torch.Tensor:
        info = CompressionInfo.from_tensor(tensor, key=0, role=TensorRole.GRADIENT)
        return deserialize_torch_tensor(compression.compress(tensor, info))

    container = make_container(own)
    sent = transmit(own)
    container.register_processed_part(0, 0, transmit((own + sent) / 2 - sent))
    assert container.violations == {}


# Whole rounds, in memory


IDS = [PeerID(b"\x12\x20" + bytes([number] * 32)) for number in range(3)]


class Servicer(ServicerBase):
    @classmethod
    def get_stub(cls, p2p, peer: PeerID, namespace: str | None = None) -> SimpleNamespace:
        return SimpleNamespace(rpc_aggregate_part=partial(p2p.round.send_parts, p2p.peer_id, peer))


VALUES = torch.linspace(0.5, 1.5, 40)


class Round:
    """Runners of the three peers of a round, whose messages one of them, the third, may alter.

    Each has a gradient of 40 and parameters of 20 elements, in parts of 10 elements.

    :param compression: of gradients and parameters
    :param alter: changes a message of the third peer in place
    :param kind: of the messages that it alters: "part" or "answer"
    """

    def __init__(
        self,
        compression: str = "none",
        kind: str = "",
        alter: Callable[[averaging_pb2.AveragingData], None] = lambda message: None,
    ):
        self.kind, self.alter = kind, alter
        infos = [
            CompressionInfo.from_tensor(torch.zeros(40), key=0, role=TensorRole.GRADIENT),
            CompressionInfo.from_tensor(torch.zeros(20), key=0, role=TensorRole.PARAMETER),
        ]
        self.runners = [
            SafeAllReduceRunner(
                p2p=SimpleNamespace(peer_id=IDS[number], round=self), servicer_type=Servicer, prefix="run",
                group_id=b"group", tensors=[value * VALUES, value * VALUES[:20]], tensor_infos=infos,
                ordered_peer_ids=IDS, peer_fractions=[20, 20, 20], modes=[AveragingMode.NODE] * 3, weight=weight,
                parameter_weight=4.0 - weight, bounds=Bounds(weight=4.0, gradient_norm=1.0, parameter_step=1.0),
                compression=RoleAdaptiveCompression(
                    gradient=COMPRESSIONS[compression](), parameter=COMPRESSIONS[compression]()
                ),
                part_size_bytes=40, sender_timeout=1.0, reducer_timeout=2.0,
            )
            for number, (value, weight) in enumerate([(0.01, 1.0), (0.03, 3.0), (0.02, 2.0)])
        ]  # fmt: skip

    async def send_parts(self, sender: PeerID, reducer: PeerID, parts) -> AsyncIterator[averaging_pb2.AveragingData]:
        """Return the reducer's answers."""
        parts, runner = self._pass_on("part", sender, parts), self.runners[IDS.index(reducer)]
        answers = runner.rpc_aggregate_part(parts, SimpleNamespace(remote_id=sender))
        return self._pass_on("answer", reducer, answers)

    async def _pass_on(self, kind: str, sender: PeerID, messages) -> AsyncIterator[averaging_pb2.AveragingData]:
        async for message in messages:
            if (kind, sender) == (self.kind, IDS[2]):
                self.alter(message)
            yield message

    async def run(self, number: int) -> list[torch.Tensor]:
        """Return this peer's differences between the averages and its own tensors."""
        return [difference async for difference in self.runners[number]]


async def average_with(**options) -> tuple[Round, list[list[torch.Tensor]]]:
    """Run a round, see Round.

    :returns: the round, and the averages at the first two peers, gradient and parameters, as multiples of VALUES
    """
    group = Round(**options)
    async with asyncio.timeout(20):
        differences = await asyncio.gather(*(group.run(number) for number in range(3)), return_exceptions=True)
    return group, [
        [own + tensor / VALUES[: len(tensor)] for tensor in differences[i]] for i, own in enumerate((0.01, 0.03))
    ]


@pytest.mark.usefixtures("patches")
@pytest.mark.parametrize(
    ("compression", "tolerance"),
    [("none", 1e-5), ("float16", 1e-3), ("scaled_float16", 1e-3), ("blockwise8", 0.01), ("blockwise4", 0.1)],
)
async def test_round_averages_gradients_and_parameters_by_their_weights(compression, tolerance):
    group, averages = await average_with(compression=compression)
    for gradient, parameters in averages:
        for average, expected in ((gradient, 0.01 + 3 * 0.03 + 2 * 0.02), (parameters, 3 * 0.01 + 0.03 + 2 * 0.02)):
            assert (6 * average - expected).abs().mean() < tolerance * expected
    assert [runner.received_fraction for runner in group.runners] == [1.0] * 3
    assert not any(runner.violations() for runner in group.runners)
    assert group.runners[0].sender_weights() == {IDS[0]: 1.0, IDS[1]: 3.0, IDS[2]: 2.0}


def expand(message: averaging_pb2.AveragingData) -> None:
    message.tensor_part.dtype = "U50000"


def enlarge(message: averaging_pb2.AveragingData) -> None:
    message.tensor_part.size[0], message.tensor_part.buffer = 10**6, bytes(4 * 10**6)


def poison(message: averaging_pb2.AveragingData) -> None:
    message.tensor_part.buffer = NOT_FINITE[:10].numpy().tobytes()


def recompress(message: averaging_pb2.AveragingData) -> None:
    part = Float16Compression().compress(torch.zeros(10), GRADIENT)
    message.tensor_part.CopyFrom(part)


@pytest.mark.usefixtures("patches")
@pytest.mark.parametrize("alter", [expand, enlarge, poison, recompress])
@pytest.mark.parametrize("kind", ["part", "answer"])
async def test_invalid_message_is_refused_and_a_malformed_one_before_it_is_deserialized(kind, alter, monkeypatch):
    deserialized = []

    def deserialize(message):
        deserialized.append((message.dtype, len(message.buffer), message.compression))
        return deserialize_torch_tensor(message)

    monkeypatch.setattr(allreduce, "deserialize_torch_tensor", deserialize)
    monkeypatch.setattr(hivemind.averaging.allreduce, "deserialize_torch_tensor", deserialize)
    group, averages = await average_with(kind=kind, alter=alter)
    assert set(deserialized) == {("float32", 40, 0)}
    honest = group.runners[:2]
    if kind == "part":
        assert all(list(runner.violations()) == [IDS[2]] for runner in honest)
    else:  # its part, the last third, keeps the own values
        assert [runner.received_fraction for runner in honest] == [pytest.approx(2 / 3)] * 2
    for gradient, _ in averages:
        expected = (0.01 + 3 * 0.03) / 4 if kind == "part" else (0.01 + 3 * 0.03 + 2 * 0.02) / 6
        assert torch.allclose(gradient, torch.tensor(expected))
        assert kind == "part" or torch.allclose(averages[0][1], torch.tensor(0.01))


@pytest.mark.parametrize(("max_norm", "after"), [(0.5, 0.5), (10.0, 5.0), (0.0, 5.0)])
def test_norm_is_over_all_tensors(max_norm, after):
    tensors = [torch.tensor([3.0]), torch.tensor([[0.0, 4.0]])]
    assert clip_norm(tensors, max_norm) == pytest.approx(5.0)
    assert float(torch.nn.utils.get_total_norm(tensors)) == pytest.approx(after, rel=1e-4)


# How much each peer reduces


def count_bytes(shares: list[float], gradient: str, parameter: str) -> list[float]:
    """Return the bytes that each peer reduces of 20 tensors of gradients and as many of parameters."""
    compression = RoleAdaptiveCompression(gradient=COMPRESSIONS[gradient](), parameter=COMPRESSIONS[parameter]())
    tensors = [torch.zeros(1000 + 2000 * (key % 3)) for key in range(20)] * 2
    infos = [
        CompressionInfo.from_tensor(tensor, key=key, role=TensorRole.GRADIENT if key < 20 else TensorRole.PARAMETER)
        for key, tensor in enumerate(tensors)
    ]
    container = SafeTensorPartContainer(
        tensors, share_out(shares, infos, compression), compression, part_size_bytes=256, tensor_infos=infos
    )
    return [
        sum(4 * part.numel() * compression.estimate_compression_ratio(part_info) for part, part_info in parts)
        for parts in container._input_parts_by_peer
    ]


@pytest.mark.parametrize("shares", [[1, 1, 1, 1], [1, 1, 0, 1, 1, 0], [5, 1, 2], [1, 1, 0, 0], [0, 0, 1]])
@pytest.mark.parametrize("gradient", ["float16", "blockwise8"])
def test_bytes_are_divided_by_the_shares(gradient, shares):
    """With 8-bit gradients, hivemind gives two of four peers a third of the bytes and the others two thirds."""
    found = count_bytes(shares, gradient, "float16")
    for share, number in zip(shares, found, strict=True):
        assert number == pytest.approx(share / sum(shares) * sum(found), rel=0.1)
