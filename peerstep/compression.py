"""The compressions of tensors between peers, by the names that the flags give them."""

import torch
from hivemind.compression import CompressionBase, Float16Compression, NoCompression, ScaledFloat16Compression
from hivemind.proto import runtime_pb2

from peerstep.blockwise import Blockwise4Bit, Blockwise8Bit, CodedCompression
from peerstep.sparse import TopK

COMPRESSIONS: dict[str, type[CompressionBase]] = {
    "none": NoCompression,
    "float16": Float16Compression,
    "scaled_float16": ScaledFloat16Compression,
    "blockwise8": Blockwise8Bit,
    "blockwise4": Blockwise4Bit,
    "topk": TopK,
}
_FORMATS: dict[int, CodedCompression] = {
    compression.code: compression for compression in (Blockwise8Bit(), Blockwise4Bit(), TopK())
}


class AnyFormat(CodedCompression):
    """Restores a tensor of any of this project's formats, which share a number of hivemind."""

    def extract(self, serialized_tensor: runtime_pb2.Tensor) -> torch.Tensor:
        code = serialized_tensor.buffer[:1]
        if not code or code[0] not in _FORMATS:
            raise ValueError(f"a tensor has an unknown format: {code!r}")
        return _FORMATS[code[0]].extract(serialized_tensor)
