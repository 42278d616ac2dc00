"""Tests of the checks of received tensors before they are deserialized."""

import pytest
import torch
from hivemind.compression import deserialize_torch_tensor
from hivemind.proto import runtime_pb2
from hivemind.proto.runtime_pb2 import BLOCKWISE_8BIT, NONE
from hivemind.utils.streaming import split_for_streaming

from peerstep.tensors.checks import TensorAssembler, TensorSpec, check_tensor
from peerstep.tensors.compression import COMPRESSIONS


def serialize(tensor: torch.Tensor, compression: str = "none") -> runtime_pb2.Tensor:
    return COMPRESSIONS[compression]().compress(tensor, info=None)


def changed(message: runtime_pb2.Tensor, **fields) -> runtime_pb2.Tensor:
    copy = runtime_pb2.Tensor()
    copy.CopyFrom(message)
    for name, value in fields.items():
        if name == "size":
            del copy.size[:]
            copy.size.extend(value)
        else:
            setattr(copy, name, value)
    return copy


@pytest.mark.usefixtures("patches")
@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("shape", [(0,), (3, 0), (5,), (300, 7), (2, 3, 4)])
def test_honest_tensors_pass(compression, shape):
    message = serialize(torch.randn(shape), compression)
    check_tensor(message, TensorSpec(shape, compressions={message.compression}))
    assert deserialize_torch_tensor(message).shape == shape


@pytest.mark.parametrize("compression", ["none", "float16"])
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        *(({"dtype": dtype}, "dtype") for dtype in ("U50000", "float64", "bfloat16", "", "V" * 10_000_000)),
        *(({"size": size}, "shape") for size in ((20, 50), (1000, 1000), (), (2**32 - 1,) * 4)),
        *(({"compression": compression}, "compression") for compression in (BLOCKWISE_8BIT, 77)),
        *(({"buffer": buffer}, "bytes") for buffer in (b"", b"1" * 5000)),
    ],
)
def test_other_tensors_than_expected_are_refused(compression, fields, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        check_tensor(changed(serialize(torch.ones(50, 20), compression), **fields), TensorSpec((50, 20)))
    assert len(str(caught.value)) < 200


TENSORS = [torch.randn(300, 200), torch.tensor(2.5), torch.zeros(0), torch.randn(5)]
SPECS = [TensorSpec((300, 200)), TensorSpec(()), TensorSpec((0,)), TensorSpec((5,))]


def chunks(tensor: torch.Tensor) -> list[runtime_pb2.Tensor]:
    return list(split_for_streaming(serialize(tensor)))


def test_chunks_are_assembled():
    assembler, fractions = TensorAssembler(SPECS), [0.0]
    for chunk in (chunk for tensor in TENSORS for chunk in chunks(tensor)):
        assert not assembler.is_complete
        assembler.add(chunk)
        fractions.append(assembler.fraction)
    assert assembler.is_complete and assembler.fraction == 1.0
    assert fractions == sorted(fractions) and len(fractions) > 6
    assert all(torch.equal(*pair) for pair in zip(assembler.tensors, TENSORS, strict=True))
    assert all(tensor.is_shared() for tensor in assembler.tensors), "they leave this process without another copy"
    with pytest.raises(ValueError, match="more tensors"):
        assembler.add(chunks(TENSORS[0])[0])


def test_size_of_the_assembler_is_bounded():
    first, second, *_ = chunks(TENSORS[0])
    assembler = TensorAssembler(SPECS)
    with pytest.raises(ValueError, match="dtype"):
        assembler.add(changed(first, dtype="U50000"))
    assembler.add(first)
    with pytest.raises(ValueError, match="empty"):
        assembler.add(runtime_pb2.Tensor())
    with pytest.raises(ValueError, match="more than 240000 bytes"):
        for _ in range(10):
            assembler.add(second)
    assert len(assembler.buffer) <= 240_000 and not assembler.tensors


def test_dtype_of_a_later_chunk_is_ignored():
    first, *rest = chunks(TENSORS[0])
    assembler = TensorAssembler(SPECS[:1])
    for chunk in (first, *(changed(chunk, dtype="U50000", compression=NONE, size=(9,)) for chunk in rest)):
        assembler.add(chunk)
    assert torch.equal(assembler.tensors[0], TENSORS[0])
