"""The largest micro-batch that fits into the memory of a GPU."""

import math

MAX_BATCH_SIZE = 64  # a micro-batch of half a second on the largest GPUs


def fit_batch_size(free: float, fixed: float, per_sample: float) -> int:
    """Return the largest power of two of samples that fits, at least 1 and at most MAX_BATCH_SIZE.

    :param free: bytes of memory
    :param fixed: bytes that are needed for any number of samples
    :param per_sample: bytes for each sample more
    """
    return min(MAX_BATCH_SIZE, 2 ** int(math.log2(max(1.0, (free - fixed) / per_sample))))
