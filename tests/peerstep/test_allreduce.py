"""Tests of an all-reduce: its averages, its bounds on what members send and answer, and that it ends on time."""

import asyncio
import math
import statistics
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from functools import partial
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from hivemind.compression import (
    CompressionInfo,
    Float16Compression,
    RoleAdaptiveCompression,
    TensorRole,
    deserialize_torch_tensor,
)
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2

from peerstep.rounds import allreduce, reducer
from peerstep.rounds.allreduce import AllReduce, cut_tensors
from peerstep.rounds.bounds import MAX_GRADIENT_NORM, MIN_WEIGHT, Bounds, ViolationError, norm_of
from peerstep.rounds.reducer import Part
from peerstep.step.accumulators import clip_norm
from peerstep.tensors.compression import COMPRESSIONS

OWN = torch.full((100,), 0.1)  # norm 1
BOUNDS = Bounds(max_weight=256.0, parameter_step=0.01)


def info(role: TensorRole) -> CompressionInfo:
    return CompressionInfo.from_tensor(OWN, key=0, role=role)


GRADIENT, PARAMETER = info(TensorRole.GRADIENT), info(TensorRole.PARAMETER)


def with_bad_values(value: float) -> torch.Tensor:
    part = OWN.clone()
    part[3:5] = value
    return part


@pytest.mark.parametrize("part_info", [GRADIENT, PARAMETER])
def test_only_parts_that_are_not_finite_are_violations(part_info):
    for value, weight in [*((value, 1.0) for value in (math.nan, math.inf, -math.inf)), (1.0, math.nan)]:
        with pytest.raises(ViolationError):
            BOUNDS.clip(part_info, with_bad_values(value), OWN, weight)


@pytest.mark.parametrize(
    ("part_info", "part", "weight", "norm", "reason"),
    [
        (GRADIENT, OWN, 256.0, None, None),
        (GRADIENT, 1e10 * OWN, 1.0, None, None),  # it is compared with the other members' in the round
        (GRADIENT, 0 * OWN, MIN_WEIGHT, None, None),
        (PARAMETER, 1.15 * OWN, 64.0, None, None),
        (PARAMETER, 100 * OWN, MIN_WEIGHT, None, None),  # a sender that missed updates, without weight in the average
        (GRADIENT, 1e20 * OWN, 1.0, MAX_GRADIENT_NORM, "gradient of norm"),
        (GRADIENT, with_bad_values(1e38), 1.0, MAX_GRADIENT_NORM, "gradient of norm"),
        *((PARAMETER, OWN + change, 1.0, 0.2, "parameters at") for change in (2 * OWN, -2 * OWN, 0.2, 1e22)),
        (PARAMETER, with_bad_values(1e38), 1.0, 0.2, "parameters at"),
        *((GRADIENT, OWN, weight, 1.0, "weight") for weight in (257.0, 1e30, -1.0, MIN_WEIGHT / 2)),
    ],
)
def test_larger_parts_and_weights_are_scaled_down_to_the_bounds(part_info, part, weight, norm, reason):
    clipped, kept, excess = BOUNDS.clip(part_info, part, OWN, weight)
    assert kept == min(max(weight, MIN_WEIGHT), 256.0)
    if norm is None:
        assert clipped is part and excess is None
        return
    reference = OWN if part_info is PARAMETER else 0 * OWN
    assert norm_of(clipped - reference) == pytest.approx(norm, rel=1e-3) and reason in excess


# Whole rounds, in memory

ELEMENTS = 4000  # of the gradient, and of the parameters
IDS = [PeerID(b"\x12\x20" + bytes([number] * 32)) for number in range(16)]


class Group:
    """Members of a round whose messages pass links in memory. Each has its own class of RPCs and its own tensors.

    :param rates: of the uplinks, bytes per second
    :param alter: (sender of the message, message) -> changes the message in place
    :param silent: members whose round never begins
    :param takers: the only members that receive parameters, which the other members give
    :param counting: the members whose parameters count; default: all
    :param options: of AllReduce
    """

    def __init__(
        self,
        rates: Sequence[float],
        weights: Sequence[float] | None = None,
        shares: Sequence[float] | None = None,
        compression: str = "none",
        alter: Callable[[int, averaging_pb2.AveragingData], None] = lambda sender, message: None,
        silent: Collection[int] = (),
        bounds: Bounds | None = None,
        tensors: Callable[[int], list[torch.Tensor]] | None = None,
        takers: Collection[int] | None = None,
        counting: Collection[int] | None = None,
        part_size_bytes: int = 512,
        **options,
    ):
        self.ids = IDS[: len(rates)]
        self.rates, self.alter, self.silent = rates, alter, silent
        self.links_free_at = [0.0] * len(rates)
        role_compression = RoleAdaptiveCompression(
            gradient=COMPRESSIONS[compression](), parameter=COMPRESSIONS["none"]()
        )
        self.inputs = [(tensors or make_tensors)(number) for number in range(len(rates))]
        self.outputs = [  # averages replace the gradients: a trainer has one copy for both
            [gradient.clone(), *(torch.full(tensor.shape, math.nan) for tensor in rest)]
            for gradient, *rest in self.inputs
        ]
        shares = shares or [1.0] * len(rates)
        given = [0.0 if takers and number in takers else share for number, share in enumerate(shares)]
        taking = None if takers is None else {self.ids[number] for number in takers}

        def cut(number: int) -> dict[PeerID, list[Part]]:
            blocks = (
                (TensorRole.GRADIENT, shares, (weights or [1.0] * len(rates))[number], None),
                (TensorRole.PARAMETER, given, float(counting is None or number in counting), taking),
            )
            owns = [self.outputs[number][0], *self.inputs[number][1:]]
            cuts = [
                cut_tensors(role_compression, part_size_bytes, 7, role, [own], [output], *rest)
                for own, output, (role, *rest) in zip(owns, self.outputs[number], blocks, strict=False)
            ]
            return {peer_id: list(chain(*of_peer)) for peer_id, *of_peer in zip(self.ids, *cuts, strict=True)}

        self.members = [
            AllReduce(
                peer_id=peer_id, get_stub=partial(self._get_stub, number), group_id=b"group", parts=cut(number),
                bounds=bounds or Bounds(max_weight=100.0, parameter_step=1.0, has_gradient=True),
                **{"sender_timeout": 2.0, "reducer_timeout": 4.0, "timeout": 6.0, **options},
            )
            for number, peer_id in enumerate(self.ids)
        ]  # fmt: skip

    def _get_stub(self, sender: int, peer_id: PeerID) -> SimpleNamespace:
        return SimpleNamespace(rpc_aggregate_part=partial(self.open, sender, self.ids.index(peer_id)))

    async def open(self, sender: int, reducer: int, parts: AsyncIterator) -> AsyncIterator:
        if reducer in self.silent:
            await asyncio.sleep(60)
        carried = self._carry(sender, parts)
        await anext(carried)  # it names the group
        return self._carry(reducer, self.members[reducer].reducer.answer(self.ids[sender], carried))

    async def _carry(self, sender: int, messages: AsyncIterator) -> AsyncIterator:
        """Carry messages over the sender's link while the receiver is busy, as a network does."""
        queue = asyncio.Queue()

        async def pump() -> None:
            try:
                async for message in messages:
                    self.alter(sender, message)
                    now = asyncio.get_running_loop().time()
                    until = max(self.links_free_at[sender], now)
                    until += len(message.tensor_part.buffer) / self.rates[sender]
                    self.links_free_at[sender] = until
                    await asyncio.sleep(until - now)
                    queue.put_nowait(message)
            finally:
                queue.put_nowait(None)

        task = asyncio.create_task(pump())
        try:
            while (message := await queue.get()) is not None:
                yield message
        finally:
            task.cancel()

    async def run(self) -> list[float]:
        """Run the round at all members; return the simulated seconds that it took each."""

        async def measure(number: int) -> float:
            now = asyncio.get_running_loop().time
            started = now()
            if number not in self.silent:
                await self.members[number].run()
            return now() - started

        return await asyncio.wait_for(asyncio.gather(*map(measure, range(len(self.members)))), 60)


def make_tensors(number: int) -> list[torch.Tensor]:
    """Return the gradient and the parameters of a member, with its number in each element."""
    return [torch.full((ELEMENTS,), 1e-3 * (number + 1)), torch.full((ELEMENTS,), 1.0 + 0.01 * number)]


def similar_tensors(number: int) -> list[torch.Tensor]:
    """Return the same with gradients of similar norms."""
    return [torch.full((ELEMENTS,), 1e-3 + 1e-4 * number), *make_tensors(number)[1:]]


def received(member: AllReduce) -> float:
    """Return the fraction of all elements whose average has arrived."""
    fractions = [member.received_fraction(role) for role in (TensorRole.GRADIENT, TensorRole.PARAMETER)]
    return statistics.fmean(fraction for fraction in fractions if fraction is not None)


def average(*args, **options) -> tuple[Group, list[float]]:
    """Run the round of a group; the arguments are those of Group."""

    async def run() -> tuple[Group, list[float]]:
        group = Group(*args, **options)
        return group, await group.run()

    return asyncio.run(run())


FAST = 2e6  # bytes per second

pytestmark = pytest.mark.usefixtures("patches", "clock")


def test_round_averages_gradients_and_parameters_by_their_weights():
    """The second member is slow, the third a client."""
    group, _ = average([FAST, FAST / 20, FAST], [1.0, 3.0, 2.0], [1.0, 1.0, 0.0])
    for gradient, parameters in group.outputs:
        assert torch.allclose(gradient, torch.tensor((1 + 3 * 2 + 2 * 3) / 6 * 1e-3))
        assert torch.allclose(parameters, torch.tensor(1.01))
        assert torch.equal(gradient, group.outputs[0][0])
    assert [received(member) for member in group.members] == [1.0] * 3
    assert not any(member.violations | member.excesses for member in group.members)
    first, second, third = group.ids
    assert group.members[0].reducer.weights == {first: 1.0, second: 3.0, third: 2.0}


SHAPES = {  # -> a tensor of other strides with the same elements
    "channels_last": lambda tensor: tensor.view(10, 4, 10, 10).contiguous(memory_format=torch.channels_last),
    "transposed": lambda tensor: tensor.view(80, 50).t().contiguous().t(),
    "expanded": lambda tensor: tensor[:50].expand(80, 50),
    "strided": lambda tensor: torch.stack([tensor, tensor], dim=1)[:, 0],
}


@pytest.mark.parametrize("to_strides", SHAPES.values(), ids=SHAPES)
def test_parameters_of_any_strides_are_averaged_element_by_element(to_strides):
    """The first member's have other strides than those of the others."""

    def make_parameters(number: int) -> list[torch.Tensor]:
        gradient, parameters = make_tensors(number)
        parameters = parameters + 1e-4 * (torch.arange(ELEMENTS) % 50)
        return [gradient, to_strides(parameters) if number == 0 else parameters.view(to_strides(parameters).shape)]

    group, _ = average([FAST, FAST / 20, FAST], tensors=make_parameters)
    expected = (1.01 + 1e-4 * (torch.arange(ELEMENTS) % 50)).view(group.inputs[1][1].shape)
    for _, parameters in group.outputs:
        assert torch.allclose(parameters, expected)


def test_tensors_of_one_element_and_of_none_are_cut():
    """An empty one at the end is nobody's, also if sums of the shares are rounded."""
    tensors = [torch.zeros(0, 3), torch.tensor(1.0), torch.ones(7), torch.zeros(2, 0)]
    compression = RoleAdaptiveCompression(default=COMPRESSIONS["none"]())
    for shares in ([1.0], [0.0, 1.0, 0.0], [0.1] * 7, [1 / 3] * 3):
        cut = cut_tensors(compression, 512, 7, TensorRole.PARAMETER, tensors, [t.clone() for t in tensors], shares)
        assert sum(len(part.own) for part in chain(*cut)) == 8
        assert all(len(part.own) for part in chain(*cut))


def noisy_tensors(number: int) -> list[torch.Tensor]:
    """Return a gradient whose noise is three times its signal, and no parameters."""
    signal, noise = (torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(seed)) for seed in (0, number + 1))
    return [0.001 * (signal + 3 * noise)]


@pytest.mark.parametrize(
    ("compression", "tolerance"), [("blockwise4", 0.12), ("blockwise8", 0.012), ("float16", 1e-3)]
)
@pytest.mark.parametrize("number", [4, 16])
def test_gradients_are_the_same_bytes_at_all_members(number, compression, tolerance):
    """Differences to the members' own gradients would differ, by 30 % with 16 members and 4 bits."""
    rates = [FAST / 10, *[FAST] * (number - 1)]
    group, _ = average(rates, compression=compression, tensors=noisy_tensors, part_size_bytes=256)
    exact = sum(values for (values,) in group.inputs) / number
    first = group.outputs[0][0]
    assert all(torch.equal(first, gradient) for (gradient,) in group.outputs)
    assert float((first - exact).norm() / exact.norm()) < tolerance


def bytes_sent(number: int) -> float:
    """Bytes of a member that sends its values to all others, and of a gradient and parameters without compression."""
    return 8.0 * ELEMENTS * number


@pytest.mark.parametrize("shares", [[1, 1, 1, 0], [1, 1, 1, 1]], ids=["reduces nothing", "reduces a quarter"])
def test_slow_link_delays_nobody_for_long(shares, monkeypatch):
    """One of four needs twice the time of a round for its values alone."""
    monkeypatch.setattr(reducer, "LATE_SECONDS", 0.3)
    slow = bytes_sent(1) / 6.0
    group, seconds = average([FAST, FAST, FAST, slow], shares=shares, timeout=3.0)
    fast = group.members[:3]
    if shares[3]:  # most of what the slow one reduces is lost, nothing else
        assert all(received(member) > 0.75 for member in fast) and max(seconds) < 4.0
        return
    assert all(received(member) == 1.0 for member in fast) and max(seconds[:3]) < 2.5  # the slow one needs 6
    assert received(group.members[3]) == 1.0 and seconds[3] < 2.9, "its values came too late"
    assert [member.was_late for member in group.members] == [False, False, False, True]
    for average_of_all, values in zip(zip(*group.outputs, strict=True), group.inputs[0], strict=True):
        assert all(torch.allclose(average_of_all[0], average, atol=1e-5) for average in average_of_all)
        assert not torch.equal(average_of_all[0], values)
    share = (group.outputs[0][0] - 2e-3).abs() > 1e-6
    assert 0 < share.float().mean() < 0.5, "the slow one's values count where they came in time"


@pytest.mark.parametrize(
    ("rate", "slow", "late", "least", "most"),
    [
        (1 / 60, [], [3], 3.0, 3.9),  # the first round waits for it
        (1 / 60, [3], [3], 0.0, 0.7),  # the next one does not
        (1.0, [3], [], 0.0, 0.5),  # one that is as fast again is waited for in the one after
        (1 / 60, [1, 2, 3], [3], 3.0, 3.9),  # if most were late, it is not their links
    ],
)
def test_who_was_late_in_the_last_round_is_waited_for_less(rate, slow, late, least, most):
    """A round of four takes 0.02 seconds without the slow one, whose values alone take 2."""
    rates, slow = [FAST, FAST, FAST, FAST * rate / 10], [IDS[number] for number in slow]
    group, seconds = average(rates, shares=[1, 1, 1, 0], tensors=similar_tensors, slow=slow, timeout=10.0)
    for member in group.members[:3]:
        assert member.reducer.late == {group.ids[number] for number in late}
    assert least <= max(seconds[:3]) <= most


def test_what_comes_too_late_is_not_the_same_in_each_round():
    """All members cut alike, but begin at another part of each share."""
    own, compression = torch.zeros(ELEMENTS), RoleAdaptiveCompression(default=COMPRESSIONS["none"]())

    def first_parts(turn: int) -> list[int]:
        cut = cut_tensors(compression, 512, turn, TensorRole.GRADIENT, [own], [own], [1.0] * 3)
        return [parts[0].own.storage_offset() for parts in cut]

    rounds = [first_parts(turn) for turn in range(12)]
    assert first_parts(3) == rounds[3] and all(len(set(starts)) > 8 for starts in zip(*rounds, strict=True))


def test_reducer_on_a_link_that_has_become_slow_knows_it():
    """It has an equal share, and a link that carries a tenth of it in time. The others have delivered."""
    group, _ = average([FAST, FAST, FAST, bytes_sent(1) / 60.0], timeout=2.0, reducer_timeout=2.0)
    assert [member.reducer.delivery.is_poor for member in group.members] == [False, False, False, True]
    group, _ = average([FAST, FAST / 10, FAST])
    assert not any(member.reducer.delivery.is_poor for member in group.members)


def test_single_other_sender_has_all_the_time(monkeypatch):
    monkeypatch.setattr(reducer, "LATE_SECONDS", 0.1)
    group, _ = average([FAST, bytes_sent(1) / 1.5])
    assert [received(member) for member in group.members] == [1.0, 1.0]
    assert torch.allclose(group.outputs[1][0], torch.tensor(1.5e-3))


def test_member_that_is_frozen_costs_its_share_and_the_time_for_its_first_message():
    rates = [FAST, FAST / 20, FAST]
    group, seconds = average(rates, silent={0}, sender_timeout=0.5, reducer_timeout=1.0)
    assert [received(member) for member in group.members[1:]] == pytest.approx([2 / 3] * 2, abs=0.05)
    assert max(seconds[1:]) < 3.0
    for own, (gradient, parameters) in zip(group.inputs[1:], group.outputs[1:], strict=True):
        assert not gradient[:1200].any(), "without an average a gradient is 0"
        assert torch.equal(parameters[:1200], own[1][:1200]), "without an average parameters stay"
        assert torch.allclose(gradient[-1200:], torch.tensor(2.5e-3))
        assert torch.allclose(parameters[-1200:], torch.tensor(1.015))


def test_parameters_of_which_none_count_are_not_received():
    """Two members lack updates, and the third one's parameters, which alone count, do not come in time."""
    silence = {"silent": {2}, "sender_timeout": 0.5, "reducer_timeout": 1.0}
    group, _ = average([FAST, FAST / 20, FAST], shares=[1, 1, 0], counting={2}, **silence)
    for member, own, outputs in list(zip(group.members, group.inputs, group.outputs, strict=True))[:2]:
        assert member.received_fraction(TensorRole.GRADIENT) == 1
        assert member.received_fraction(TensorRole.PARAMETER) == 0 and torch.equal(outputs[1], own[1])


async def test_round_that_fails_leaves_nothing_running(monkeypatch):
    group = Group([FAST, FAST / 20, FAST])
    monkeypatch.setattr(group.members[0].reducer, "run", _fail)
    others = [asyncio.create_task(member.run()) for member in group.members[1:]]
    with pytest.raises(RuntimeError):
        await group.members[0].run()
    before = [output.clone() for output in group.outputs[0]]
    await asyncio.gather(*others)
    for then, now in zip(before, group.outputs[0], strict=True):
        assert torch.allclose(then, now, rtol=0, atol=0, equal_nan=True)


async def _fail() -> None:
    await asyncio.sleep(0.05)
    raise RuntimeError


def test_refused_sender_is_not_waited_for():
    async def scenario() -> list[float]:
        group = Group([FAST, FAST / 20, FAST], silent={2}, shares=[1, 1, 0])
        for member in group.members[:2]:
            member.reducer.drop_unstarted(group.ids[2])
        return await group.run()

    assert max(asyncio.run(scenario())[:2]) < 1.5


class EmptyStreams(Group):
    """Member 2 sends the others nothing after its first message, and answers them nothing."""

    async def open(self, sender: int, reducer: int, parts: AsyncIterator) -> AsyncIterator:
        if reducer == 2:
            return self._end()
        if sender == 2:
            return self._carry(reducer, self.members[reducer].reducer.answer(self.ids[2], self._end()))
        return await super().open(sender, reducer, parts)

    async def _end(self) -> AsyncIterator:
        for part in ():
            yield part


def test_streams_that_end_at_once_cost_their_member_alone(caplog):
    async def run() -> EmptyStreams:
        loop, group = asyncio.get_running_loop(), EmptyStreams([FAST] * 3)
        loop.set_exception_handler(lambda _, context: errors.append(context))
        await group.run()
        return group

    errors = []
    group = asyncio.run(run())
    assert not errors and not [record for record in caplog.records if record.exc_info]
    assert [round(received(member), 1) for member in group.members[:2]] == [0.7, 0.7]
    assert all(member.silent_reducers() == {group.ids[2]} for member in group.members[:2])
    assert not any(member.violations or member.reducer.violations for member in group.members)


# What members must not send


def set_tensor(**fields: object) -> Callable[[averaging_pb2.AveragingData], None]:
    return lambda message: [setattr(message.tensor_part, name, value) for name, value in fields.items()]


expand, demand_gradient = set_tensor(dtype="U50000"), set_tensor(requires_grad=True)
renumber, repeat = set_tensor(chunks=10**6), set_tensor(chunks=0)


def enlarge(message: averaging_pb2.AveragingData) -> None:
    message.tensor_part.size[0], message.tensor_part.buffer = 10**4, bytes(4 * 10**4)


def recompress(message: averaging_pb2.AveragingData) -> None:
    part = Float16Compression().compress(torch.zeros(message.tensor_part.size[0]), GRADIENT)
    part.chunks = message.tensor_part.chunks
    message.tensor_part.CopyFrom(part)


def overweight(message: averaging_pb2.AveragingData) -> None:
    message.weight = 1e6


def fill(value: float) -> Callable[[averaging_pb2.AveragingData], None]:
    def change(message: averaging_pb2.AveragingData) -> None:
        number = message.tensor_part.size[0]
        message.tensor_part.buffer = torch.full((number,), value).numpy().tobytes()

    return change


def of_kind(code: int, change: Callable, sender: int = 2) -> Callable[[int, averaging_pb2.AveragingData], None]:
    """Return what changes those messages of a sender that have a part."""

    def alter(by: int, message: averaging_pb2.AveragingData) -> None:
        if by == sender and message.code == code and message.tensor_part.buffer:
            change(message)

    return alter


def average_with(alter: Callable, monkeypatch) -> tuple[Group, set]:
    """Run a round of three in which the third one's messages are altered; return what was deserialized, too."""
    deserialized = set()

    def deserialize(message):
        deserialized.add((message.dtype, len(message.buffer), message.compression))
        return deserialize_torch_tensor(message)

    for module in (allreduce, reducer):
        monkeypatch.setattr(module, "deserialize_torch_tensor", deserialize)
    group, _ = average([FAST, FAST / 20, FAST], [1.0, 3.0, 2.0], alter=alter, reducer_timeout=2.0)
    return group, deserialized


@pytest.mark.parametrize("change", [expand, enlarge, recompress, demand_gradient, renumber, repeat, fill(math.nan)])
def test_sender_of_what_no_honest_peer_sends_is_left_out(change, monkeypatch):
    group, deserialized = average_with(of_kind(averaging_pb2.PART_FOR_AVERAGING, change), monkeypatch)
    assert {entry[::2] for entry in deserialized} == {("float32", 0)}
    for member, (gradient, parameters) in list(zip(group.members, group.outputs, strict=True))[:2]:
        assert list(member.violations) == [group.ids[2]] and received(member) > 0.65
        first_of_reducer = change is repeat  # its first part is as it should be
        assert first_of_reducer or torch.allclose(gradient[:100], torch.tensor((1 + 3 * 2) / 4 * 1e-3))
        assert parameters.isfinite().all() and parameters.min() >= 1.0 and parameters.max() <= 1.02


@pytest.mark.parametrize("change", [overweight, fill(1e20), fill(-100.0)])
def test_sender_of_too_large_values_moves_nobody_far_and_is_not_banned(change, monkeypatch):
    """Others could bring about that its values are too large beside theirs."""
    group, _ = average_with(of_kind(averaging_pb2.PART_FOR_AVERAGING, change), monkeypatch)
    for member, (gradient, parameters) in list(zip(group.members, group.outputs, strict=True))[:2]:
        assert not member.violations and list(member.excesses) == [group.ids[2]] and received(member) == 1
        assert gradient.norm() < 2.5 and (parameters - 1).abs().max() < 0.5
        if change is overweight:  # it counts for the 100 samples of the bound
            assert torch.allclose(gradient[:100], torch.tensor((1 + 3 * 2 + 100 * 3) / 104 * 1e-3))


@pytest.mark.parametrize("value", [1e20, 10.0, 1.5, 0.1075])
def test_reducer_of_too_large_values_moves_nobody_far_and_is_not_banned(value, monkeypatch):
    group, _ = average_with(of_kind(averaging_pb2.AVERAGED_PART, fill(value)), monkeypatch)
    for member, own, (gradient, parameters) in list(zip(group.members, group.inputs, group.outputs, strict=True))[:2]:
        assert not member.violations and list(member.excesses) == [group.ids[2]]
        assert torch.allclose(gradient[:100], torch.tensor((1 + 3 * 2 + 2 * 3) / 6 * 1e-3))
        assert gradient.norm() < 4.5
        if value > 1:
            moved = (parameters[-100:] - own[1][-100:]).mean()
            assert 1.1 < moved < 1.3 if value == 1.5 else moved == 0, "what it reduces stays, or goes to the bound"
            assert received(member) == pytest.approx(5 / 6, abs=0.05)


@pytest.mark.parametrize(
    ("number", "begin", "far"),
    [(3, 0, [2]), (2, 0, [0, 1]), (4, 3000, [3])],
    ids=["of three", "of two", "only in what it reduces itself"],
)
def test_member_whose_parameters_are_far_from_those_of_most_knows_it(number, begin, far):
    def tensors(member: int) -> list[torch.Tensor]:
        gradient, parameters = make_tensors(0)
        if member == number - 1:
            parameters[begin:] *= 2.0
        return [gradient, parameters]

    bounds = Bounds(max_weight=100.0, parameter_step=0.001)
    group, _ = average([FAST, FAST / 20, FAST, FAST][:number], tensors=tensors, bounds=bounds)
    assert [member for member in range(number) if group.members[member].is_far] == far
    assert not any(member.violations for member in group.members)


@pytest.mark.parametrize("change", [expand, enlarge, recompress, demand_gradient, fill(math.nan)])
def test_reducer_that_answers_what_no_honest_peer_answers_has_failed(change, monkeypatch):
    group, deserialized = average_with(of_kind(averaging_pb2.AVERAGED_PART, change), monkeypatch)
    assert {entry[::2] for entry in deserialized} == {("float32", 0)}
    for member, own, outputs in list(zip(group.members, group.inputs, group.outputs, strict=True))[:2]:
        assert received(member) == pytest.approx(2 / 3, abs=0.05)
        gradient, parameters = outputs
        assert torch.allclose(gradient[:100], torch.tensor((1 + 3 * 2 + 2 * 3) / 6 * 1e-3))
        assert torch.equal(parameters[-100:], own[1][-100:]), "what it reduces stays"
        assert list(member.violations) == [group.ids[2]]


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_honest_average_is_accepted_with_every_compression(name):
    """The gradient is dominated by one element, where the error of 8-bit compression is largest, and is clipped."""

    def tensors(number: int) -> list[torch.Tensor]:
        values = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(0))
        values[0] = 1000.0
        clip_norm([values], 1.0)
        return [values]

    group, _ = average([FAST, FAST / 20, FAST], compression=name, tensors=tensors, part_size_bytes=20000)
    assert not any(member.violations | member.excesses for member in group.members)
    assert [received(member) for member in group.members] == [1.0] * 3


@pytest.mark.parametrize("shares", [[1, 1, 1, 1], [1, 1, 0, 1, 1, 0], [5, 1, 2], [1, 1, 0, 0], [0, 0, 1]])
def test_elements_are_divided_by_the_shares(shares):
    tensors = [torch.zeros(1000 + 2000 * (key % 3)) for key in range(20)]
    compression = RoleAdaptiveCompression(default=COMPRESSIONS["float16"]())
    parts_of_members = cut_tensors(compression, 256, 0, TensorRole.GRADIENT, tensors, tensors, shares)
    found = [sum(part.own.numel() for part in parts) for parts in parts_of_members]
    assert found == pytest.approx([share / sum(shares) * sum(map(torch.numel, tensors)) for share in shares], rel=0.01)


@pytest.mark.parametrize("silent", [(), (1,)])
def test_members_that_lack_parameters_receive_them_from_the_others(silent):
    """The first member is slow and lacks updates."""
    options = {"silent": silent, "tensors": equal_but_first}
    group, _ = average([FAST / 20, FAST, FAST], [MIN_WEIGHT, 1.0, 3.0], takers=[0], **options)
    lacking, *others = group.members
    expected = group.inputs[1][1]
    if silent:
        assert lacking.received_fraction(TensorRole.PARAMETER) == pytest.approx(0.5, abs=0.05)
        assert torch.equal(group.outputs[0][1][-1900:], expected[-1900:])
    else:
        assert torch.equal(group.outputs[0][1], expected) and lacking.received_fraction(TensorRole.PARAMETER) == 1
    assert all(member.received_fraction(TensorRole.PARAMETER) is None for member in others)
    for _, parameters in group.outputs[1:]:
        assert parameters.isnan().all(), "what they have averaged before stays: they receive none, and use none"
    assert not any(member.violations | member.excesses for member in group.members)


def equal_but_first(number: int) -> list[torch.Tensor]:
    """Return the tensors of a member; only the first one has other parameters."""
    gradient, parameters = make_tensors(number)
    return [gradient, torch.linspace(1, 2, ELEMENTS) if number else parameters]


@pytest.mark.parametrize(("seconds", "is_paced"), [(2.0, False), (3.0, True)])
def test_values_that_take_long_are_sent_at_the_rate_of_the_link(monkeypatch, seconds, is_paced):
    """What a moment can carry says nothing of a link: pacing would slow small rounds on fast links."""
    monkeypatch.setattr(allreduce, "PACED_SECONDS", 2.5)

    async def run() -> float:
        group = Group([math.inf, math.inf], upload=4 * ELEMENTS / seconds)  # a member sends half of two tensors
        longest = max(await group.run())
        assert all(received(member) == 1 for member in group.members)
        return longest

    assert (asyncio.run(run()) > 0.8 * seconds) == is_paced


def test_parts_whose_members_were_in_several_groups_may_differ_by_as_much_as_they_have_moved():
    """The second member has moved the other way, and then too far."""
    before = torch.ones(ELEMENTS)
    compression = RoleAdaptiveCompression(default=COMPRESSIONS["none"]())
    for drifts, change, is_clipped in ((True, -0.05, False), (True, -0.5, True), (False, -0.05, True)):
        own, other = before + 0.1, before + change
        cut = cut_tensors(compression, 512, 7, TensorRole.PARAMETER, [own], [before.clone()], [1.0], drifts=drifts)
        bounds = Bounds(parameter_step=0.01, parameter_change=0.05)
        for part in cut[0]:
            values = other[: len(part.own)]
            clipped, _, excess = bounds.clip(part.info, values, part.own, 1.0, part.slack)
            assert (excess is not None) == is_clipped
            assert norm_of(clipped - part.own) <= norm_of(values - part.own)
