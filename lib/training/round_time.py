"""Time that a round takes on connections as at home."""

# Fitted by benchmarks/home_lines.py to ALBERT-large (17.85 M parameters), 2 and 4 peers, 5 to 20 Mbit/s and no
# latency. Residuals: at most 7 % for 22 of 24 points, 9 and 12 % for two.
FIXED_SECONDS = 0.2  # of a round, whatever the connection. The search for the group begins before the step is due
SLOWDOWN = 1.22  # seconds of a round / seconds for its tensors at full rate. Plain TCP has 1.14 in both directions

# Bits of a number, by compression
BITS = {
    "none": 32, "float16": 16, "scaled_float16": 16,
    "blockwise8": 8.06, "blockwise4": 4.25,
}  # fmt: skip


def tensor_bytes(elements: int, peers: int, bits: float) -> float:
    """Return the bytes that each of N equal peers sends, and receives, in a round: 2 (N-1)/N copies of the tensors.

    Butterfly all-reduce: each peer reduces one part of the tensors. It sends every other part to the peer that reduces
    that part, and the average of its part to all other peers.

    :param elements: parameters of the model
    :param bits: bits for each element: those of its gradient, and in rounds with parameters those of the parameter
    """
    return 2 * (peers - 1) / peers * elements * bits / 8


def round_seconds(elements: int, peers: int, bits: float, upload: float) -> float:
    """Return the seconds from a due global step to the averages; 0 for one peer.

    The peers are equal and accept incoming connections. The slowest connection of a run determines its rounds.

    :param elements, bits: as in `tensor_bytes`
    :param upload: Mbit/s of a peer, or its download if that is slower
    """
    return FIXED_SECONDS + SLOWDOWN * tensor_bytes(elements, peers, bits) * 8e-6 / upload if peers > 1 else 0.0
