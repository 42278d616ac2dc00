"""Names of peers."""

SHORT = 7  # characters


def short(peer_id: object) -> str:
    """Return the end of a peer ID, which tells the peers of a run apart. The beginning is the same for all."""
    return str(peer_id)[-SHORT:]


def label(name: str, peer_id: object) -> str:
    """Return a peer's name, which others may have, too, with the end of its ID."""
    return name if name.endswith(short(peer_id)) else f"{name} ({short(peer_id)})"
