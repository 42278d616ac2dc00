"""The persistent ban list of a peer: peers that sent values out of bounds, in banned_peers.json across restarts.

A peer that has forgotten a ban and leads a group would bring the banned peer together with those that remember.
"""

import time
from pathlib import Path
from typing import Protocol

from hivemind.p2p import PeerID
from hivemind.utils import get_logger

from lib.averaging.rounds import BAN_SECONDS
from lib.common.errors import describe
from lib.common.json_file import JsonFile

logger = get_logger(__name__)


class Bans(Protocol):
    """What keeps bans while it runs: a RoundAverager or an Optimizer. Peer ID -> until when (`time.time`)."""

    def banned_peers(self) -> dict[bytes, float]: ...

    def ban(self, peers: dict[bytes, float]) -> None: ...


class BanList:
    """Keeps bans in a file, and restores them at the next start.

    :param folder: the folder of the peer
    """

    def __init__(self, folder: Path, bans: Bans):
        self._file, self.bans = JsonFile(folder / "banned_peers.json"), bans
        self._saved = self._load()
        bans.ban(self._saved)

    def save(self) -> None:
        """Write the file if a ban is new."""
        banned = self.bans.banned_peers()
        if banned.items() <= self._saved.items():
            return
        self._saved = banned
        self._file.save({PeerID(peer_id).to_base58(): until for peer_id, until in banned.items()})

    def _load(self) -> dict[bytes, float]:
        """Peer IDs and the end of their bans."""
        try:
            return self._file.load(_parse) or {}
        except OSError as error:
            logger.warning(f"Starting without the ban list: {describe(error)}")
            return {}


def _parse(content: dict[str, float]) -> dict[bytes, float]:
    """No ban is longer than a new one, whatever the clock did meanwhile."""
    latest = time.time() + BAN_SECONDS
    return {PeerID.from_base58(name).to_bytes(): min(latest, float(until)) for name, until in content.items()}
