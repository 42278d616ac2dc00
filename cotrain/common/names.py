"""Names of peers that have chosen none."""


def derive_name(peer_id: str) -> str:
    """Return the name of a peer that has chosen none, such as peer-B7RiXZG, from the end of its peer ID in base58."""
    return f"peer-{peer_id[-7:]}"
