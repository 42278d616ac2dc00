"""Tests of the blockwise compressions: their errors, their sizes, and buffers from hostile peers."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hivemind.averaging.partition import TensorPartContainer
from hivemind.compression import CompressionInfo, TensorRole, deserialize_torch_tensor
from hivemind.proto import runtime_pb2
from hivemind.proto.runtime_pb2 import BLOCKWISE_8BIT
from hypothesis import example, given, settings

from peerstep.blockwise import Blockwise4Bit, Blockwise8Bit, BlockwiseCompression
from peerstep.wire import TensorSpec, check_tensor

pytestmark = pytest.mark.usefixtures("patches")
formats = pytest.mark.parametrize("compression", [Blockwise8Bit(), Blockwise4Bit()], ids=["8 bits", "4 bits"])


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def heavy_tailed(size: int) -> torch.Tensor:
    """Return values of Student's t distribution with 3 degrees of freedom."""
    return normal(size) / normal(3, size, seed=1).square().mean(0).sqrt()


def spec(*shape: int) -> TensorSpec:
    return TensorSpec(shape, compressions={BLOCKWISE_8BIT})


def transmit(compression: BlockwiseCompression, tensor: torch.Tensor) -> torch.Tensor:
    message = runtime_pb2.Tensor.FromString(compression.compress(tensor, None).SerializeToString())
    check_tensor(message, TensorSpec(tuple(tensor.shape), message.dtype, {BLOCKWISE_8BIT}))
    return deserialize_torch_tensor(message)


def relative_error(compression: BlockwiseCompression, tensor: torch.Tensor) -> float:
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
    info = CompressionInfo.from_tensor(tensor, key=0, role=TensorRole.GRADIENT)
    container = TensorPartContainer([tensor], [0.3, 0.7], compression, tensor_infos=[info])
    parts = [part for peer in container._input_parts_by_peer for part, _ in peer]
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


@formats
@pytest.mark.parametrize(
    ("change", "reason"),
    [
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
    ],
)
def test_malformed_buffers_are_refused(compression, change, reason):
    message = compression.compress(normal(1001), None)
    check_tensor(message, spec(1001))
    message.buffer = change(message.buffer)
    with pytest.raises(ValueError, match=reason):
        deserialize_torch_tensor(message)


@formats
@given(buffer=st.binary(max_size=300), numel=st.integers(0, 300))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_any_buffer_gives_the_expected_values_or_is_refused(compression, buffer, numel):
    padded = bytes([compression.code]) + (buffer + bytes(700))[: compression.num_bytes(numel) - 1]
    for candidate in (buffer, padded):
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
