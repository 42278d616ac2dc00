"""Persistent ban list of peers that sent values out of bounds (`banned_peers.json`).

A group leader that lost its ban list in a restart would put a banned peer into a group with peers that still ban it.
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
    """The bans in memory, held by a RoundAverager or an Optimizer: peer ID -> end of the ban (`time.time`)."""

    def banned_peers(self) -> dict[bytes, float]: ...

    def ban(self, peers: dict[bytes, float]) -> None: ...


class BanList:
    """Saves bans to a file and restores them at the next start.

    :param folder: the peer's output folder
    :param bans: the object that enforces the bans; receives the saved ones
    """

    def __init__(self, folder: Path, bans: Bans):
        self._file, self.bans = JsonFile(folder / "banned_peers.json"), bans
        self._saved = self._load()
        bans.ban(self._saved)

    def save(self) -> None:
        """Write the file if there is a ban that it lacks."""
        banned = self.bans.banned_peers()
        if banned.items() <= self._saved.items():
            return
        self._saved = banned
        self._file.save({PeerID(peer_id).to_base58(): until for peer_id, until in banned.items()})

    def _load(self) -> dict[bytes, float]:
        """Read peer IDs and the ends of their bans; empty if the file is absent or not usable."""
        try:
            return self._file.load(_parse) or {}
        except OSError as error:
            logger.warning(f"Starting without the ban list: {describe(error)}")
            return {}


def _parse(content: dict[str, float]) -> dict[bytes, float]:
    """Decode the file's content. A ban ends at most BAN_SECONDS from now: the clock may have been set back."""
    latest = time.time() + BAN_SECONDS
    return {PeerID.from_base58(name).to_bytes(): min(latest, float(until)) for name, until in content.items()}
