"""Sparse compression of pseudo-gradients: the largest values of each block, and a map of their places.

Of each block of BLOCK values a peer sends one in FRACTION, those with the largest magnitudes, as in SparseLoCo
(https://arxiv.org/abs/2508.15706). The rest stays in its model, see UpdateAccumulator. An average has all places to
which a member has sent a value. The buffer of a message is

- one byte: 1, the code of the format, and four bytes: the size of the next item,
- a bitmap of the values that are not 0, compressed by DEFLATE,
- these values in the format of Blockwise4Bit.

Bits for each value of the tensor: 0.23 in a contribution, at most 1.1 in the average of 8 members, 1.7 in that of 16.
"""

import struct
import zlib

import numpy as np
import torch

from peerstep.blockwise import Blockwise4Bit, CodedCompression

BLOCK, FRACTION = 4096, 64
_HEADER = struct.Struct("<BI")


class TopK(CodedCompression):
    """Sends the values of a tensor that are not 0. `select` chooses those of a contribution."""

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
