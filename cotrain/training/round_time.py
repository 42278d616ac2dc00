"""How long a round takes on a link, and what it sends."""

from cotrain.options import CollaborationOptions

# Time of a round, fitted by benchmarks/home_lines.py to ALBERT-large (17.85 M parameters), 2 and 4 peers, 5 to
# 20 Mbit/s and no latency. Residuals: at most 7 % for 22 of 24 points, 9 and 12 % for two.
FIXED_SECONDS = 0.2  # of a round, whatever the connection. The search for the group begins before the step is due
SLOWDOWN = 1.22  # seconds of a round / seconds for its tensors at full rate. Plain TCP has 1.14 in both directions
LINKS = 5, 14.7, 100  # Mbit/s of upload: a slow link, the median of the world's fixed lines, and a fast one
# Bits of a number, by compression. With topk, the mean of a contribution and of the average of 8 peers
BITS = {"none": 32, "float16": 16, "scaled_float16": 16, "blockwise8": 8.06, "blockwise4": 4.25, "topk": 0.65}


def hourly_gigabytes(elements: int, peers: int, args: CollaborationOptions, steps_per_second: float) -> float:
    """Return what a peer's rounds send and receive in an hour, see `round_seconds`; downloads of others come to it."""
    bits = BITS[args.gradient_compression] + BITS[args.state_compression] / args.average_state_every
    return 3600 * steps_per_second * 2 * 2 * (peers - 1) / peers * elements * bits / 8e9


def round_seconds(elements: int, peers: int, bits: float, upload: float) -> float:
    """Return the seconds from a due global step to the averages.

    In butterfly all-reduce each of N equal peers reduces one part of the tensors: it sends every other part to the
    peer that reduces that part, and the average of its part to all other peers: 2 (N-1)/N copies of the tensors.

    :param elements: parameters of the model
    :param bits: bits for each element: those of its gradient, and in rounds with parameters those of the parameter
    :param upload: Mbit/s of the slowest peer
    """
    return FIXED_SECONDS + SLOWDOWN * 2 * (peers - 1) / peers * elements * bits * 1e-6 / upload
