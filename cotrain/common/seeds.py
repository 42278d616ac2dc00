"""Seeds that are equal on all peers, derived from names."""

import hashlib


def derive_seed(*parts: object) -> int:
    """Derive a 63-bit seed from the printed form of some values. Python's `hash` is salted in each process."""
    digest = hashlib.sha256("\n".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
