"""Checks of serialized tensors from other peers, made before they are deserialized.

hivemind takes dtype, shape and compression from the sender. A dtype of "U50000" turns a message of 4 KB into 406 MB.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from hivemind.compression import deserialize_torch_tensor
from hivemind.proto import runtime_pb2
from hivemind.proto.runtime_pb2 import BLOCKWISE_8BIT, FLOAT16, MEANSTD_16BIT, NONE

# Of the training state. A round accepts its own compression only.
COMPRESSIONS = frozenset({NONE, FLOAT16, MEANSTD_16BIT})
_ITEM_SIZES = {"float16": 2, "float32": 4, "float64": 8}  # of each dtype


@dataclass(frozen=True)
class TensorSpec:
    """Specification of a tensor that a peer is expected to send."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    compressions: Collection[int] = COMPRESSIONS  # values of hivemind's CompressionType

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def expected_num_bytes(header: runtime_pb2.Tensor, spec: TensorSpec) -> int | None:
    """Check everything but the buffer of a serialized tensor, or of its first chunk.

    :returns: the number of bytes that its whole buffer must have; None if only the format's decoder can tell
    :raises ValueError: if the tensor is not the expected one
    """
    if tuple(header.size) != tuple(spec.shape):
        raise ValueError(f"a tensor has shape {list(header.size)[:8]} instead of {list(spec.shape)}")
    if header.dtype != spec.dtype:
        raise ValueError(f"a tensor has dtype {header.dtype[:20]!r} instead of {spec.dtype}")
    if header.compression not in spec.compressions:
        raise ValueError(f"a tensor has compression {header.compression}, which is not expected")
    if header.compression == NONE:
        return spec.numel * _ITEM_SIZES[header.dtype]
    if header.compression == FLOAT16:
        return spec.numel * 2
    if header.compression == MEANSTD_16BIT and spec.shape:  # hivemind's has an IndexError for scalars
        return spec.numel * 2 + math.prod(spec.shape[:-1]) * 2 * 4  # one mean and one deviation per row, float32
    if header.compression == BLOCKWISE_8BIT:
        return None
    raise ValueError(f"a tensor has compression {header.compression}, which is not supported")


def check_tensor(message: runtime_pb2.Tensor, spec: TensorSpec) -> None:
    """Check a whole serialized tensor: deserializing it has a bounded cost. ValueError if it is not as expected."""
    expected = expected_num_bytes(message, spec)
    if expected is not None and len(message.buffer) != expected:
        raise ValueError(f"a tensor has {len(message.buffer)} bytes instead of {expected}")
    if message.requires_grad:
        raise ValueError("a tensor requires a gradient")  # the sum that it is added to would, too


class TensorAssembler:
    """Assembles tensors from streamed chunks. Holds no more bytes than the expected tensors have."""

    def __init__(self, specs: Iterable[TensorSpec]):
        self.specs: Sequence[TensorSpec] = list(specs)
        self.tensors: list[torch.Tensor] = []
        self._num_elements = max(1, sum(spec.numel for spec in self.specs))
        self._num_complete = 0  # elements
        self._header: runtime_pb2.Tensor | None = None  # of the tensor being received
        self.buffer, self._expected = bytearray(), 0

    @property
    def is_complete(self) -> bool:
        return len(self.tensors) == len(self.specs)

    @property
    def fraction(self) -> float:
        """Fraction of all elements that has arrived."""
        elements = self._num_complete
        if self._header is not None and self._expected:
            elements += len(self.buffer) / self._expected * self.specs[len(self.tensors)].numel
        return elements / self._num_elements

    def add(self, chunk: runtime_pb2.Tensor) -> None:
        """Add the next chunk; ValueError if it does not belong to the expected tensors."""
        if self.is_complete:
            raise ValueError("more tensors than expected")
        if self._header is None:
            self._expected = expected_num_bytes(chunk, self.specs[len(self.tensors)]) or 0
            self._header = runtime_pb2.Tensor(size=chunk.size, dtype=chunk.dtype, compression=chunk.compression)
        elif not chunk.buffer:
            raise ValueError("an empty chunk")
        if len(self.buffer) + len(chunk.buffer) > self._expected:
            raise ValueError(f"a tensor has more than {self._expected} bytes")
        self.buffer += chunk.buffer
        if len(self.buffer) == self._expected:
            self._header.buffer = bytes(self.buffer)
            # In shared memory at once, through which they leave this process: what is freed would stay in the heap.
            self.tensors.append(deserialize_torch_tensor(self._header).share_memory_())
            self._num_complete += self.specs[len(self.tensors) - 1].numel
            self._header, self.buffer = None, bytearray()
