"""Tests of the compressions: errors, sizes, what a sparse one selects, and buffers from hostile peers."""

import math
import zlib
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
from hivemind.compression import RoleAdaptiveCompression, TensorRole, deserialize_torch_tensor
from hivemind.proto import runtime_pb2
from hivemind.proto.runtime_pb2 import BLOCKWISE_8BIT
from hypothesis import example, given, settings

from peerstep.rounds.allreduce import cut_tensors
from peerstep.tensors.checks import TensorSpec, check_tensor
from peerstep.tensors.compression import (
    BLOCK,
    COMPRESSIONS,
    FRACTION,
    Blockwise4Bit,
    Blockwise8Bit,
    CodedCompression,
    TopK,
)

pytestmark = pytest.mark.usefixtures("patches")
CODED = [kind() for kind in COMPRESSIONS.values() if issubclass(kind, CodedCompression)]
formats = pytest.mark.parametrize("compression", [Blockwise8Bit(), Blockwise4Bit()], ids=["8 bits", "4 bits"])


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def heavy_tailed(size: int) -> torch.Tensor:
    """Return values of Student's t distribution with 3 degrees of freedom."""
    return normal(size) / normal(3, size, seed=1).square().mean(0).sqrt()


def spec(*shape: int) -> TensorSpec:
    return TensorSpec(shape, compressions={BLOCKWISE_8BIT})


def transmit(compression: CodedCompression, tensor: torch.Tensor) -> torch.Tensor:
    message = runtime_pb2.Tensor.FromString(compression.compress(tensor, None).SerializeToString())
    check_tensor(message, TensorSpec(tuple(tensor.shape), message.dtype, {BLOCKWISE_8BIT}))
    return deserialize_torch_tensor(message)


def relative_error(compression: CodedCompression, tensor: torch.Tensor) -> float:
    return float((transmit(compression, tensor).double() - tensor.double()).norm() / tensor.double().norm())


@pytest.mark.parametrize(
    ("compression", "bits", "error", "heavy_error"),
    [(Blockwise8Bit(), 8.07, 0.0072, 0.019), (Blockwise4Bit(), 4.26, 0.093, 0.130)],
    ids=["8 bits", "4 bits"],
)
def test_error_and_size(compression, bits, error, heavy_error):
    tensor = normal(2**18)
    assert 8 * len(compression.compress(tensor, None).buffer) / tensor.numel() < bits
    assert 0.9 * error < relative_error(compression, tensor) < error
    assert 0.9 * error < relative_error(compression, 1e-30 * tensor) < error
    assert 0.8 * heavy_error < relative_error(compression, heavy_tailed(2**18)) < heavy_error


@formats
@given(
    shape=st.lists(st.integers(1, 40), max_size=3),
    exponent=st.floats(-36, 36),
    power=st.sampled_from([1, 3, 9]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.float64]),
)
@settings(max_examples=100, deadline=None, derandomize=True)
@example(shape=[18, 20, 22], exponent=27.52734375, power=9, dtype=torch.float16)
def test_error_of_each_value_is_bounded_by_the_largest_of_its_block(compression, shape, exponent, power, dtype):
    tensor = (normal(*shape).double().pow(power) * 10**exponent).clamp(-1e37, 1e37).to(dtype)
    tensor.nan_to_num_(posinf=6e4, neginf=-6e4)
    restored = transmit(compression, tensor)
    assert restored.dtype == dtype and restored.shape == tensor.shape
    # Half of the widest gap between two levels, and the distance of the scale from the block's largest value
    step = 0.5 / 127 + 0.006 if compression.bits == 8 else 0.5 * 0.304 + 0.06
    smallest = 6e-8 if dtype == torch.float16 else 1e-37
    for block, other in zip(
        tensor.double().flatten().split(compression.block_size),
        restored.double().flatten().split(compression.block_size),
        strict=True,
    ):
        assert ((block - other).abs() <= step * block.abs().max() + smallest).all()


@formats
@pytest.mark.parametrize(
    "tensor",
    [normal(5000), heavy_tailed(5000), 1e-30 * normal(77), torch.tensor([1.0, *[0.08] * 63]), torch.full((99,), 0.1)],
    ids=["normal", "heavy-tailed", "small", "rounded up", "constant"],
)
def test_second_transfer_has_no_error_and_norms_do_not_grow(compression, tensor):
    """A bound on the norm of a contribution therefore holds for what its receiver sees."""
    once = transmit(compression, tensor)
    assert torch.equal(transmit(compression, once), once)
    assert once.double().norm() < 1.004 * tensor.double().norm()


@formats
@pytest.mark.parametrize("tensor", [torch.zeros(100), torch.zeros(0), torch.zeros(3, 0), torch.full((9,), 3e38)])
def test_zeros_and_the_largest_values(compression, tensor):
    restored = transmit(compression, tensor)
    assert torch.allclose(restored, tensor, rtol=0.004) and restored.shape == tensor.shape


@formats
def test_blocks_do_not_depend_on_the_parts_of_an_all_reduce(compression):
    """The peers cut a tensor as its bytes and their bandwidths demand."""
    tensor = normal(1_500_000)
    role, by_role = TensorRole.GRADIENT, RoleAdaptiveCompression(gradient=compression)
    members = cut_tensors(by_role, 2**19, 0, role, [tensor], [torch.zeros_like(tensor)], [0.3, 0.7])
    parts = [part.own for of_member in members for part in of_member]
    assert len(parts) > 1
    restored = torch.cat([transmit(compression, part) for part in parts])
    assert torch.equal(restored, transmit(compression, tensor))


@formats
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(compression, value):
    tensor = normal(500)
    tensor[3] = value
    with pytest.raises(ValueError, match="scale"):
        transmit(compression, tensor)


def with_scale(buffer: bytes, value: float) -> bytes:
    scale = torch.tensor(value).bfloat16().view(torch.int16).numpy().tobytes()
    return buffer[:3] + scale + buffer[5:]


def with_bitmap(content: bytes, values: bytes = Blockwise4Bit().encode(torch.zeros(0))) -> bytes:
    return bytes([1]) + len(content).to_bytes(4, "little") + content + values


def deflated(bitmap: bytes) -> bytes:
    return zlib.compress(bitmap, wbits=-zlib.MAX_WBITS)


BLOCKWISE_CHANGES: list[tuple[Callable[[bytes], bytes], str]] = [
    (lambda buffer: b"", "format"),
    (lambda buffer: b"\x00" + buffer[1:], "format"),
    (lambda buffer: b"\xff" + buffer[1:], "format"),
    (lambda buffer: buffer[:1], "bytes"),
    (lambda buffer: buffer[:-1], "bytes"),
    (lambda buffer: buffer + b"\x00", "bytes"),
    (lambda buffer: b"\x04\x08"[buffer[0] == 4 :][:1] + buffer[1:], "bytes"),  # the other format
    (lambda buffer: buffer + bytes(10**7), "bytes"),
    (lambda buffer: with_scale(buffer, math.nan), "scale"),
    (lambda buffer: with_scale(buffer, math.inf), "scale"),
    (lambda buffer: with_scale(buffer, -1.0), "scale"),
]
SPARSE_BUFFERS = [
    (b"\x01", "header"),
    (with_bitmap(b"\xff" * 9), "bitmap"),
    (with_bitmap(deflated(bytes(124))), "bitmap of another size"),
    (with_bitmap(deflated(bytes(126))), "bitmap of another size"),
    (with_bitmap(deflated(bytes(10**8))), "bitmap of another size"),  # 100 MB from 100 KB
    (with_bitmap(deflated(bytes(125))[:-1]), "bitmap of another size"),
    (with_bitmap(deflated(bytes(125)) + b"\x00"), "bitmap of another size"),
    (with_bitmap(deflated(b"\xff" * 125)), "bytes"),  # a thousand values are missing
    (with_bitmap(deflated(bytes(125)), Blockwise4Bit().encode(torch.ones(1))), "bytes"),
    (b"\x01\xff\xff\xff\xff" + deflated(bytes(125)), "bytes"),
]


@pytest.mark.parametrize(
    ("compression", "change", "reason"),
    [(compression, *change) for compression in (Blockwise8Bit(), Blockwise4Bit()) for change in BLOCKWISE_CHANGES]
    + [(TopK(), lambda _, buffer=buffer: buffer, reason) for buffer, reason in SPARSE_BUFFERS],
)
def test_malformed_buffers_are_refused(compression, change, reason):
    message = compression.compress(normal(1000), None)
    check_tensor(message, spec(1000))
    message.buffer = change(message.buffer)
    with pytest.raises(ValueError, match=reason):
        deserialize_torch_tensor(message)


@pytest.mark.parametrize("compression", CODED, ids=lambda compression: type(compression).__name__)
@given(buffer=st.binary(max_size=300), numel=st.integers(0, 300))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_any_buffer_gives_the_expected_values_or_is_refused(compression, buffer, numel):
    size = len(compression.encode(torch.zeros(numel)))
    coded = bytes([compression.code]) + buffer
    for candidate in (buffer, coded, (coded + bytes(700))[:size]):
        message = runtime_pb2.Tensor(buffer=candidate, size=[numel], dtype="float32", compression=BLOCKWISE_8BIT)
        check_tensor(message, spec(numel))
        try:
            restored = deserialize_torch_tensor(message)
        except ValueError:
            continue
        assert restored.shape == (numel,) and not restored.isnan().any()


def test_integers_have_no_levels():
    with pytest.raises(ValueError, match="int64"):
        Blockwise8Bit().compress(torch.arange(5), None)


# The largest values only


def bits_of(tensor: torch.Tensor) -> float:
    return 8 * len(TopK().encode(tensor)) / tensor.numel()


def test_largest_values_of_each_block_are_selected():
    tensor = normal(3 * BLOCK + 77)
    selected = TopK().select(tensor)
    number = BLOCK // FRACTION
    for block, chosen in zip(tensor.split(BLOCK), selected.split(BLOCK), strict=True):
        largest = block.abs().topk(min(number, len(block))).values
        assert torch.equal(chosen.abs().sort(descending=True).values[: len(largest)], largest)
        assert torch.equal(chosen, block * (chosen != 0))
        assert (chosen != 0).sum() == len(largest)


@pytest.mark.parametrize("shape", [(5,), (3, 7), (0,), (BLOCK,), (70, 100)])
def test_places_are_exact_and_values_those_of_4_bits(shape):
    selected = TopK().select(normal(*shape))
    restored, values = transmit(TopK(), selected), selected[selected != 0]
    assert restored.shape == selected.shape and not restored[selected == 0].any()
    assert torch.equal(restored[selected != 0], Blockwise4Bit().decode(Blockwise4Bit().encode(values), len(values)))


def test_zeros_take_a_thousandth():
    assert torch.equal(transmit(TopK(), torch.zeros(10**5)), torch.zeros(10**5)) and bits_of(torch.zeros(10**5)) < 0.02


def test_bits_of_a_contribution_and_of_the_averages_of_8_and_16_members():
    """Members choose independent places here, the worst case."""
    contributions = [TopK().select(normal(2**18, seed=seed)) for seed in range(16)]
    assert bits_of(contributions[0]) < 0.24
    assert bits_of(torch.stack(contributions[:8]).mean(0)) < 1.1
    assert bits_of(torch.stack(contributions).mean(0)) < 1.73
