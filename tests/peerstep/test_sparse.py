"""Tests of the sparse compression: what is sent, its size, and buffers from hostile peers."""

import zlib

import hypothesis.strategies as st
import pytest
import torch
from hivemind.compression import deserialize_torch_tensor
from hypothesis import given, settings

from peerstep.blockwise import Blockwise4Bit
from peerstep.sparse import BLOCK, FRACTION, TopK

pytestmark = pytest.mark.usefixtures("patches")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def transmit(tensor: torch.Tensor) -> torch.Tensor:
    return deserialize_torch_tensor(TopK().compress(tensor, None))


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
    restored, values = transmit(selected), selected[selected != 0]
    assert restored.shape == selected.shape and not restored[selected == 0].any()
    assert torch.equal(restored[selected != 0], Blockwise4Bit().decode(Blockwise4Bit().encode(values), len(values)))


def test_zeros_take_a_thousandth():
    assert torch.equal(transmit(torch.zeros(10**5)), torch.zeros(10**5)) and bits_of(torch.zeros(10**5)) < 0.02


def test_bits_of_a_contribution_and_of_the_averages_of_8_and_16_members():
    """Members choose independent places here, the worst case."""
    contributions = [TopK().select(normal(2**18, seed=seed)) for seed in range(16)]
    assert bits_of(contributions[0]) < 0.24
    assert bits_of(torch.stack(contributions[:8]).mean(0)) < 1.1
    assert bits_of(torch.stack(contributions).mean(0)) < 1.73


def with_bitmap(content: bytes, values: bytes = Blockwise4Bit().encode(torch.zeros(0))) -> bytes:
    return bytes([1]) + len(content).to_bytes(4, "little") + content + values


def deflated(bitmap: bytes) -> bytes:
    return zlib.compress(bitmap, wbits=-zlib.MAX_WBITS)


@pytest.mark.parametrize(
    ("buffer", "reason"),
    [
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
    ],
)
def test_malformed_buffers_are_refused(buffer, reason):
    message = TopK().compress(torch.zeros(1000), None)
    message.buffer = buffer
    with pytest.raises(ValueError, match=reason):
        deserialize_torch_tensor(message)


@given(buffer=st.binary(max_size=300), numel=st.integers(0, 300))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_any_buffer_gives_the_expected_values_or_is_refused(buffer, numel):
    message = TopK().compress(torch.zeros(numel), None)
    message.buffer = b"\x01" + buffer
    try:
        restored = deserialize_torch_tensor(message)
    except ValueError:
        return
    assert restored.shape == (numel,) and not restored.isnan().any()
