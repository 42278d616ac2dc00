"""The compressions of tensors between peers, by the names that the flags give them."""

from hivemind.compression import CompressionBase, Float16Compression, NoCompression, ScaledFloat16Compression

from cotrain.averaging.blockwise import Blockwise4Bit, Blockwise8Bit

COMPRESSIONS: dict[str, type[CompressionBase]] = {
    "none": NoCompression,
    "float16": Float16Compression,
    "scaled_float16": ScaledFloat16Compression,
    "blockwise8": Blockwise8Bit,
    "blockwise4": Blockwise4Bit,
}


def name_of(compression: CompressionBase) -> str:
    """Return the name of a compression in COMPRESSIONS."""
    return next(name for name, cls in COMPRESSIONS.items() if type(compression) is cls)
