"""Whom a peer does not average with since they sent NaN or Inf: kept in shunned_peers.json across restarts.

Who has forgotten it and leads a group brings them together with those that know.
"""

import json
import time
from pathlib import Path

from hivemind.p2p import PeerID
from hivemind.utils import get_logger

from atomic import new_file
from errors import describe
from hivemind_fixes import Optimizer, SafeAverager

logger = get_logger(__name__)


class ShunnedPeers:
    """Keeps what an optimizer has found out about other peers in a file, and tells it again at the next start.

    :param folder: that of the peer
    """

    def __init__(self, folder: Path, optimizer: Optimizer):
        self.path, self.optimizer = folder / "shunned_peers.json", optimizer
        self._saved = self._load()
        optimizer.shun(self._saved)

    def save(self) -> None:
        """Write the file if somebody is new. Trouble with the disk is one warning: it matters after a restart only."""
        shunned = self.optimizer.shunned_peers()
        if shunned.items() <= self._saved.items():
            return
        self._saved = shunned
        content = {PeerID(peer_id).to_base58(): until for peer_id, until in shunned.items()}
        try:
            with new_file(self.path) as temporary:
                temporary.write_text(json.dumps(content, indent=1) + "\n")
        except OSError as error:
            logger.warning(f"Cannot write {self.path}: {describe(error)}")

    def _load(self) -> dict[bytes, float]:
        """Peer IDs and until when to shun them; nobody for longer than at first, whatever the clock did meanwhile."""
        if not self.path.exists():
            return {}
        latest = time.time() + SafeAverager.SHUN_SECONDS
        try:
            content = json.loads(self.path.read_text())
            return {PeerID.from_base58(name).to_bytes(): min(latest, float(content[name])) for name in content}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            logger.warning(f"Skipping {self.path}, which cannot be read: {error}")
            return {}
