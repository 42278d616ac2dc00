"""The compressions of tensors between peers, by the names that the flags give them.

Workarounds for hivemind 1.1.12, with the same bytes: `uniform8` quantizes by a function that torch is about to remove,
and both 8-bit compressions read the size of their codebook in a way that numpy 2.4 refuses.
"""

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from hivemind.compression import (
    CompressionBase,
    Float16Compression,
    NoCompression,
    Quantile8BitQuantization,
    ScaledFloat16Compression,
    Uniform8BitQuantization,
    quantization,
)
from hivemind.compression.quantization import Quantization, average_buckets
from hivemind.proto import runtime_pb2

from lib.averaging.blockwise import Blockwise4Bit, Blockwise8Bit


class CodebookQuantization(Quantization):
    """8-bit codes, and a codebook with a value for each: the size of the codebook (int64), the codebook, the codes."""

    def extract(self, serialized_tensor: runtime_pb2.Tensor) -> torch.Tensor:
        """Restore a tensor.

        :raises ValueError: if the codebook has another size than the codes need
        """
        buffer = serialized_tensor.buffer
        (codebook_size,) = np.frombuffer(buffer, count=1, dtype=np.int64)
        if codebook_size != self.n_bins:
            raise ValueError(f"a codebook has {codebook_size} values instead of {self.n_bins}")
        codebook = np.frombuffer(buffer, offset=8, count=self.n_bins, dtype=self.codebook_dtype)
        codes = np.frombuffer(buffer, offset=8 + codebook.nbytes, dtype=self.indices_dtype)
        codes = torch.as_tensor(codes, dtype=torch.int64).reshape(tuple(serialized_tensor.size))
        codebook = torch.as_tensor(codebook).to(dtype=getattr(torch, serialized_tensor.dtype))
        return codebook[codes].requires_grad_(serialized_tensor.requires_grad)


class Uniform8Bit(CodebookQuantization, Uniform8BitQuantization):
    """hivemind's `uniform8` without `torch.quantize_per_tensor`: 256 equal intervals over 6 standard deviations."""

    def quantize(self, tensor: torch.Tensor, allow_inplace: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Return the codes, uint8 of the shape of `tensor`, and the mean of the values of each code, float32."""
        shift = tensor.mean()
        tensor = tensor.to(dtype=torch.float32, copy=not allow_inplace)
        centered = tensor.sub_(shift) if allow_inplace else tensor - shift
        deviation = centered.norm() / math.sqrt(centered.numel() - 1)
        scale = self.RANGE_IN_SIGMAS * deviation / self.n_bins
        # torch's kernel rounds once, after a fused multiply-add: two roundings differ in one of 10^5 codes.
        codes = (centered.double() * (1.0 / scale)).add_(self.n_bins // 2).float().round_()
        # Equal values have the scale 0, and 0 * inf is NaN. The kernel gives them the last code.
        codes = codes.nan_to_num_(nan=math.inf).clamp_(0, self.n_bins - 1).to(torch.uint8)
        codebook = average_buckets(tensor, codes, self.n_bins)
        return codes.numpy(), codebook.numpy()


class Quantile8Bit(CodebookQuantization, Quantile8BitQuantization):
    """hivemind's `quantile8`: 256 intervals with equally many values."""


def renew_threads() -> None:
    """Replace hivemind's thread pool in a forked process: it has no threads there, and waits for them for ever."""
    quantization.EXECUTOR = ThreadPoolExecutor(max_workers=quantization.EXECUTOR._max_workers)


COMPRESSIONS: dict[str, type[CompressionBase]] = {
    "none": NoCompression,
    "float16": Float16Compression,
    "scaled_float16": ScaledFloat16Compression,
    "uniform8": Uniform8Bit,
    "quantile8": Quantile8Bit,
    "blockwise8": Blockwise8Bit,
    "blockwise4": Blockwise4Bit,
}

# hivemind's name of a compression -> the compression that restores its tensors, where it is not hivemind's
REPLACEMENTS: dict[str, CompressionBase] = {
    "UNIFORM_8BIT": Uniform8Bit(),
    "QUANTILE_8BIT": Quantile8Bit(),
    "BLOCKWISE_8BIT": Blockwise8Bit(),  # restores both blockwise formats
}


def name_of(compression: CompressionBase) -> str:
    """Return the name of a compression in COMPRESSIONS."""
    return next(name for name, cls in COMPRESSIONS.items() if type(compression) is cls)
