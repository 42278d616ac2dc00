"""Tests of the 8-bit compressions against hivemind's."""

import multiprocessing
import os
import warnings

import hypothesis.strategies as st
import pytest
import torch
from hivemind.compression import (
    Quantile8BitQuantization,
    Uniform8BitQuantization,
    deserialize_torch_tensor,
    serialization,
)
from hivemind.proto.runtime_pb2 import UNIFORM_8BIT
from hypothesis import given, settings

from lib.averaging.compression import COMPRESSIONS, Quantile8Bit, Uniform8Bit

PAIRS = [(Uniform8Bit(), Uniform8BitQuantization()), (Quantile8Bit(), Quantile8BitQuantization())]
both = pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=["uniform8", "quantile8"])
ignores_deprecation = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::RuntimeWarning"
)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def check_equal(ours, theirs, tensor: torch.Tensor) -> None:
    """Check that two compressions give the same bytes and restore the same tensor from each other's."""
    message, expected = ours.compress(tensor, None), theirs.compress(tensor, None)
    assert message == expected or message.SerializeToString() == expected.SerializeToString()  # a NaN differs from it
    restored = [compression.extract(message) for compression in (ours, theirs)]
    assert restored[0].dtype == restored[1].dtype == tensor.dtype and restored[0].shape == tensor.shape
    assert torch.equal(*(tensor.nan_to_num(nan=12345.0) for tensor in restored))


@both
@pytest.mark.parametrize(
    "tensor",
    [
        normal(1000),
        normal(101, 77),
        normal(3, 5, 7),
        normal(262_147),
        normal(3000).pow(5),
        normal(4001) * 1e-3 + 5,
        normal(1000) * 1e30,  # the square of a value overflows
        normal(1000) * 1e-30,  # and here it underflows
        normal(1000) * 1e-42,
        torch.full((1000,), 0.1),
        torch.full((7,), 3.0),
        torch.zeros(12, 3),
        torch.ones(1),
        torch.tensor([1.0, -2.0]),
        torch.tensor([1.0] + [0.0] * 500),
        normal(1000).half(),
        normal(999).half() * 1e-7,
        normal(1000).double(),
        torch.tensor([1.0, float("nan"), 2.0]),
        torch.tensor([1.0, float("inf"), 2.0]),
        torch.tensor([1.0, -float("inf"), 2.0]),
        normal(77).requires_grad_(),
    ],
)
@ignores_deprecation
def test_bytes_and_values_are_hiveminds(ours, theirs, tensor):
    check_equal(ours, theirs, tensor)


@both
@given(
    size=st.integers(1, 600),
    seed=st.integers(0, 2**31),
    exponent=st.floats(-44, 37),
    power=st.sampled_from([1, 3, 9]),
    shift=st.sampled_from([0.0, 1.0, -1e3]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.float64]),
)
@settings(max_examples=150, deadline=None, derandomize=True)
@ignores_deprecation
def test_bytes_and_values_are_hiveminds_for_any_tensor(ours, theirs, size, seed, exponent, power, shift, dtype):
    check_equal(ours, theirs, ((normal(size, seed=seed) ** power + shift) * 10**exponent).to(dtype))


def test_uniform8_may_change_its_input_as_hiveminds_does():
    tensor = normal(1000)
    inputs = tensor.clone(), tensor.clone()
    codes = Uniform8Bit().quantize(inputs[0], allow_inplace=True)
    with warnings.catch_warnings(action="ignore"):
        expected = Uniform8BitQuantization().quantize(inputs[1], allow_inplace=True)
    assert torch.equal(*inputs) and all((a == b).all() for a, b in zip(codes, expected, strict=True))


@both
@ignores_deprecation
def test_tensor_without_elements_cannot_be_quantized(ours, theirs):
    kinds = set()
    for compression in (ours, theirs):
        with pytest.raises((ValueError, IndexError)) as caught:
            compression.compress(torch.zeros(0), None)
        kinds.add(caught.type)
    assert len(kinds) == 1


@pytest.mark.usefixtures("patches")
@pytest.mark.parametrize("name", COMPRESSIONS)
def test_transfer_calls_nothing_that_will_be_removed(name):
    """torch removes quantize_per_tensor, and numpy 2.4 the conversion of an array with one element to a number."""
    tensor = normal(1000)
    with warnings.catch_warnings(action="error"):
        deserialize_torch_tensor(COMPRESSIONS[name]().compress(tensor, None))
        serialization.serialize_torch_tensor(tensor, UNIFORM_8BIT)


@pytest.mark.parametrize("compression", [Uniform8Bit(), Quantile8Bit()], ids=["uniform8", "quantile8"])
@pytest.mark.parametrize("size", [-1, 0, 255, 257, 2**62])
def test_codebook_of_another_size_is_refused(compression, size):
    message = compression.compress(normal(1000), None)
    message.buffer = size.to_bytes(8, "little", signed=True) + message.buffer[8:]
    with pytest.raises(ValueError, match="codebook"):
        compression.extract(message)


def compress_and_exit() -> None:
    Quantile8Bit().compress(normal(1000), None)
    os._exit(0)


@pytest.mark.usefixtures("patches")
def test_a_forked_process_compresses_after_its_parent():
    Quantile8Bit().compress(normal(1000), None)
    child = multiprocessing.get_context("fork").Process(target=compress_and_exit, daemon=True)
    child.start()
    child.join(60)
    is_stuck = child.is_alive()
    child.kill()
    assert not is_stuck and child.exitcode == 0
