"""Compression of tensors between peers: 8 or 4 bits for a value, or only the largest values of each block.

The buffer of a message in a format of this project begins with one byte, its code. hivemind's BLOCKWISE_8BIT needs
bitsandbytes and supports float32 only. Peers send these formats under its number, and never hivemind's.

A peer does not add the error of its contribution to the next one (error feedback). In simulations of local updates
with 4 peers it changed the final loss by less than 0.0002 with 8 bits, and by -0.0015 to +0.0020 with 4 bits.
"""

import math
import struct
import zlib
from collections.abc import Callable

import numpy as np
import torch
from hivemind.compression import (
    CompressionBase,
    CompressionInfo,
    Float16Compression,
    NoCompression,
    RoleAdaptiveCompression,
    ScaledFloat16Compression,
    SizeAdaptiveCompression,
)
from hivemind.proto import runtime_pb2

BLOCK, FRACTION = 4096, 64  # of TopK
_HEADER = struct.Struct("<BI")


class CodedCompression(CompressionBase):
    """Base class of this project's formats, which define what it only declares."""

    compression_type = runtime_pb2.BLOCKWISE_8BIT
    code: int
    bits: int  # of a value
    encode: Callable[[torch.Tensor], bytes]  # returns the buffer for values of float32, which begins with `code`
    # Restores as many values, or raises ValueError, at a cost bounded by their number
    decode: Callable[[bytes, int], torch.Tensor]

    def compress(self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False) -> runtime_pb2.Tensor:
        if not torch.is_floating_point(tensor):
            raise ValueError(f"{type(self).__name__} does not support {tensor.dtype} tensors")
        return runtime_pb2.Tensor(
            compression=self.compression_type,
            buffer=self.encode(tensor.detach().float().flatten()),
            size=tensor.shape,
            dtype=str(tensor.dtype).removeprefix("torch."),
            requires_grad=tensor.requires_grad,
        )

    def extract(self, serialized_tensor: runtime_pb2.Tensor) -> torch.Tensor:
        """Restore a tensor of any format of this project; ValueError if it is malformed."""
        shape, buffer = tuple(serialized_tensor.size), serialized_tensor.buffer
        if (decode := _DECODERS.get(buffer[:1])) is None:
            raise ValueError(f"a tensor has an unknown format: {buffer[:1]!r}")
        tensor = decode(buffer, math.prod(shape)).view(shape)
        tensor = tensor.to(getattr(torch, serialized_tensor.dtype))
        tensor.nan_to_num_(nan=math.nan)  # a scale that is rounded up may exceed the largest value of the type
        return tensor.requires_grad_(serialized_tensor.requires_grad)

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        """Return the ratio without the scales: it makes the size of parts a power of 2, a multiple of the blocks."""
        return self.bits / torch.finfo(info.descriptor.dtype).bits


class BlockwiseCompression(CodedCompression):
    """Base class of the formats with a scale for each block. A value is restored as its scale times a level.

    After the code, a buffer has the scales (bfloat16, which has the range of float32: float16 would round the scales
    of small gradients to 0) and the indices of the levels. Two of 4 bits share a byte, the first in the low half.

    Blocks do not depend on how an all-reduce cuts a tensor: parts begin at multiples of the block size. A tensor that
    was restored is compressed again without an error. Its norm is not above the original's, but for rounded scales.
    """

    block_size: int
    # Returns the indices, uint8, of the levels closest to values in [-1, 1]
    _quantize: Callable[[torch.Tensor], torch.Tensor]
    _levels: Callable[[torch.Tensor], torch.Tensor]  # returns the levels of indices, float32

    def num_bytes(self, numel: int) -> int:
        return 1 + 2 * math.ceil(numel / self.block_size) + math.ceil(numel * self.bits / 8)

    def encode(self, values: torch.Tensor) -> bytes:
        blocks = torch.nn.functional.pad(values, (0, -len(values) % self.block_size)).view(-1, self.block_size)
        largest = torch.linalg.vector_norm(blocks, math.inf, dim=1, keepdim=True).bfloat16().float()
        blocks = blocks / largest.masked_fill(largest == 0, 1.0)
        indices = self._quantize(blocks)
        # The scale with the least squared error for these indices. The restored block is then a projection.
        levels = self._levels(indices)
        factors = (levels * blocks).sum(1) / levels.square().sum(1).clamp_min_(1.0)
        scales, indices = (largest.squeeze(1) * factors).bfloat16(), indices.flatten()[: len(values)]
        if self.bits == 4:
            indices = torch.nn.functional.pad(indices, (0, len(indices) % 2))
            indices = indices[::2] | indices[1::2] << 4
        return bytes([self.code]) + scales.view(torch.int16).numpy().tobytes() + indices.numpy().tobytes()

    def decode(self, buffer: bytes, numel: int) -> torch.Tensor:
        if len(buffer) != self.num_bytes(numel):
            raise ValueError(f"a tensor has {len(buffer)} bytes instead of {self.num_bytes(numel)}")
        num_blocks = math.ceil(numel / self.block_size)
        begin = 1 + 2 * num_blocks
        scales = torch.as_tensor(np.frombuffer(buffer[1:begin], dtype=np.int16).copy()).view(torch.bfloat16)
        if not (scales.isfinite() & (scales >= 0)).all():
            raise ValueError("a block has a scale that is negative or not finite")
        indices = torch.as_tensor(np.frombuffer(buffer[begin:], dtype=np.uint8).copy())
        if self.bits == 4:
            indices = torch.stack([indices & 15, indices >> 4], dim=1).flatten()[:numel]
        indices = torch.nn.functional.pad(indices, (0, num_blocks * self.block_size - numel))
        levels = self._levels(indices.view(num_blocks, self.block_size))
        return levels.mul_(scales.float().unsqueeze(1)).flatten()[:numel]


class Blockwise8Bit(BlockwiseCompression):
    """255 equidistant levels, 8.06 bits for a value.

    The error on normal values is 0.7 % of their norm, on values with heavy tails (Student's t, 3 degrees) 1.7 %.
    hivemind's UNIFORM_8BIT has errors of 1.6 % and 29 %.
    """

    code = bits = 8
    block_size = 256

    def _quantize(self, values: torch.Tensor) -> torch.Tensor:
        return (values * 127.0).round_().clamp_(-127.0, 127.0).add_(128.0).nan_to_num_(0.0).to(torch.uint8)

    def _levels(self, indices: torch.Tensor) -> torch.Tensor:
        return indices.float().sub_(128.0).div_(127.0)


class Blockwise4Bit(BlockwiseCompression):
    """The 16 levels of NormalFloat (QLoRA, arXiv 2305.14314), 4.25 bits for a value.

    The error is 9 % of the norm on normal values and on pseudo-gradients, 12 % with heavy tails. Equidistant levels
    have errors of 11 % and 18 % (from -7 to 7), or of 9 % and 13 % at 4.5 bits (from the least to the largest value).
    """

    code = bits = 4
    block_size = 64
    LEVELS = torch.tensor([
        -1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0,
        0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.5626170, 0.72295684, 1.0,
    ])  # fmt: skip
    # The index of each multiple of 1/512 from -1 to 1: six times as fast as a search for the closest level
    INDICES = torch.bucketize(torch.arange(-512, 513) / 512, (LEVELS[1:] + LEVELS[:-1]) / 2).to(torch.uint8)

    def _quantize(self, values: torch.Tensor) -> torch.Tensor:
        multiple = (values * 512.0).add_(512.5).nan_to_num_(0.0).clamp_(0.0, 1024.0).int()
        return self.INDICES.index_select(0, multiple.flatten()).view(values.shape)

    def _levels(self, indices: torch.Tensor) -> torch.Tensor:
        return self.LEVELS.index_select(0, indices.flatten().int()).view(indices.shape)


class TopK(CodedCompression):
    """Sends the values of a tensor that are not 0, such as one in FRACTION of each block of a pseudo-gradient.

    As in SparseLoCo (https://arxiv.org/abs/2508.15706), these are the values with the largest magnitudes. The rest
    stays in the model of the peer, see LocalTraining. An average has all places to which a member has sent a value.

    After the code, a buffer has the size of the next item (4 bytes), a bitmap of the values that are not 0, compressed
    by DEFLATE, and these values in the format of Blockwise4Bit. Bits for each value of the tensor: 0.23 in a
    contribution, at most 1.1 in the average of 8 members, 1.7 in that of 16.
    """

    code, bits = 1, 4

    def __init__(self):
        self._values = Blockwise4Bit()

    def select(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the largest values of each block of a tensor, and 0 elsewhere."""
        values = tensor.detach().flatten()
        blocks = torch.nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
        places = blocks.abs().topk(BLOCK // FRACTION, dim=1).indices
        selected = torch.zeros_like(blocks).scatter_(1, places, blocks.gather(1, places))
        return selected.flatten()[: len(values)].view_as(tensor)

    def project(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what the other peers receive of a tensor."""
        return self.decode(self.encode(self.select(tensor).flatten()), tensor.numel()).view_as(tensor)

    def encode(self, values: torch.Tensor) -> bytes:
        is_sent = values != 0
        # Z_RLE takes 1 ms for a million places; the default strategy 30 to 100 ms for 0 to 6 % fewer bytes.
        deflate = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL, zlib.Z_RLE)
        bitmap = deflate.compress(np.packbits(is_sent.numpy()).tobytes()) + deflate.flush()
        return _HEADER.pack(self.code, len(bitmap)) + bitmap + self._values.encode(values[is_sent])

    def decode(self, buffer: bytes, numel: int) -> torch.Tensor:
        if len(buffer) < _HEADER.size:
            raise ValueError("a sparse tensor has no header")
        end = _HEADER.size + _HEADER.unpack_from(buffer)[1]
        is_sent = self._read_bitmap(buffer[_HEADER.size : end], numel)
        values = torch.zeros(numel)
        values[is_sent] = self._values.decode(buffer[end:], int(is_sent.sum()))
        return values

    @staticmethod
    def _read_bitmap(content: bytes, numel: int) -> torch.Tensor:
        size = -(-numel // 8)
        inflate = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            bitmap = inflate.decompress(content, size + 1)
        except zlib.error as error:
            raise ValueError(f"a sparse tensor has a bitmap that cannot be read: {error}") from None
        if len(bitmap) != size or not inflate.eof or inflate.unused_data:
            raise ValueError("a sparse tensor has a bitmap of another size")
        bits = np.unpackbits(np.frombuffer(bitmap, dtype=np.uint8), count=numel)
        return torch.from_numpy(bits).bool()


# By the names that the options give them
COMPRESSIONS: dict[str, type[CompressionBase]] = {
    "none": NoCompression,
    "float16": Float16Compression,
    "scaled_float16": ScaledFloat16Compression,
    "blockwise8": Blockwise8Bit,
    "blockwise4": Blockwise4Bit,
    "topk": TopK,
}
_CODED = [kind() for kind in COMPRESSIONS.values() if issubclass(kind, CodedCompression)]
_DECODERS = {bytes([format_.code]): format_.decode for format_ in _CODED}


def build_state_compression(name: str) -> CompressionBase:
    """Build the compression of the training state for peers that download it.

    Single numbers are not compressed: hivemind's scaled_float16 cannot compress them. Optimizer statistics are sent in
    float16 at least: 8 bits, and 16 bits scaled to a tensor's deviation, have no values for small second moments.
    """
    compression = COMPRESSIONS[name]()
    statistics = compression if name == "none" else Float16Compression()
    by_role = RoleAdaptiveCompression(optimizer=statistics, default=compression)
    return SizeAdaptiveCompression(threshold=2, less=NoCompression(), greater_equal=by_role)
