"""The persistent ban list of a peer: peers that sent values out of bounds, in banned_peers.json across restarts.

A peer that has forgotten a ban and leads a group would bring the banned peer together with those that remember.
"""

import json
import time
from pathlib import Path
from typing import Protocol

from hivemind.p2p import PeerID
from hivemind.utils import get_logger

from lib.averaging.rounds import BAN_SECONDS
from lib.common.atomic_files import new_file
from lib.common.errors import describe

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
        self.path, self.bans = folder / "banned_peers.json", bans
        self._saved = self._load()
        bans.ban(self._saved)

    def save(self) -> None:
        """Write the file if a ban is new. A full disk is one warning: the file matters after a restart only."""
        banned = self.bans.banned_peers()
        if banned.items() <= self._saved.items():
            return
        self._saved = banned
        content = {PeerID(peer_id).to_base58(): until for peer_id, until in banned.items()}
        try:
            with new_file(self.path) as temporary:
                temporary.write_text(json.dumps(content, indent=1) + "\n")
        except OSError as error:
            logger.warning(f"Cannot write {self.path}: {describe(error)}")

    def _load(self) -> dict[bytes, float]:
        """Peer IDs and the end of their bans; no ban is longer than a new one, whatever the clock did meanwhile."""
        if not self.path.exists():
            return {}
        latest = time.time() + BAN_SECONDS
        try:
            content = json.loads(self.path.read_text())
            return {PeerID.from_base58(name).to_bytes(): min(latest, float(content[name])) for name in content}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            logger.warning(f"Skipping {self.path}, which cannot be read: {error}")
            return {}
