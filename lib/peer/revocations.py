"""The organiser's list of revoked invitations: signed, numbered, and passed on from peer to peer.

The list is one file: a line with the signature, then JSON. Every peer can verify it, so any peer may pass it on.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time, get_logger
from hivemind.utils.crypto import RSAPrivateKey, RSAPublicKey

from lib.common.atomic_files import new_file
from lib.common.errors import describe
from lib.peer.invitations import InvitationError

logger = get_logger(__name__)

MAX_BYTES = 2**20  # of a list: some 10,000 invitations; a message between peers has at most 4 MiB


@dataclass(frozen=True)
class Revocations:
    """A list of revoked invitations. Of two lists, the one with the higher serial number is valid."""

    serial: int = 0
    expirations: Mapping[str, float] = field(default_factory=dict)  # peer ID in base58 -> end of its invitation

    def __contains__(self, peer_id: PeerID) -> bool:
        return peer_id.to_base58() in self.expirations

    def extend(self, expirations: Mapping[str, float]) -> "Revocations":
        """Return the next list: this list and `expirations`, without invitations that have expired."""
        everything = {**self.expirations, **expirations}
        now = get_dht_time()
        current = {peer_id: end for peer_id, end in everything.items() if end > now}
        # At least the current time: an organiser that has lost the list can still issue a newer one.
        return Revocations(max(self.serial + 1, int(now)), current)

    def sign(self, authority: RSAPrivateKey) -> bytes:
        """Serialize and sign the list, as it is stored and sent.

        :raises ValueError: if the list is longer than MAX_BYTES
        """
        payload = json.dumps({"serial": self.serial, "revoked": dict(self.expirations)}, indent=1).encode()
        content = authority.sign(payload) + b"\n" + payload
        if len(content) > MAX_BYTES:
            raise ValueError(f"the list of {len(self.expirations)} revoked invitations is too long")
        return content

    @classmethod
    def parse(cls, content: bytes, authority: RSAPublicKey) -> "Revocations":
        """Verify and read a signed list.

        :raises InvitationError: if the list is too long or not signed by the authority
        """
        signature, _, payload = content.partition(b"\n")
        if len(content) > MAX_BYTES or not authority.verify(payload, signature):
            raise InvitationError("it is not a revocation list of this run's organiser")
        parsed = json.loads(payload)
        return cls(parsed["serial"], parsed["revoked"])


class RevocationStore:
    """The newest revocation list that this peer has received, in a file shared by the peer's processes.

    The DHT process writes the file, the averagers' processes read it. The list survives a restart.

    :param source: another file with the list, which the organiser may replace at any time
    """

    PERIOD = 1.0  # seconds between two checks of the files

    def __init__(self, authority: RSAPublicKey, path: Path, source: Path | None = None):
        self.authority, self.path, self.source = authority, path, source
        self.newest, self.content = Revocations(), b""
        self.writes = False  # whether this process writes the file
        self._versions: dict[Path, tuple[int, int]] = {}  # modification time and inode of the files read last
        self._next_look = float("-inf")

    def refresh(self) -> None:
        """Read the files again if they have changed. Checks once per PERIOD, so that frequent calls are cheap."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + self.PERIOD
        for path in filter(None, (self.path, self.source)):
            try:
                if (content := self._read_if_changed(path)) is not None:
                    self.adopt(content)
            except (OSError, InvitationError) as error:
                logger.warning(f"Ignoring the revocation list {path}: {error}")

    def _read_if_changed(self, path: Path) -> bytes | None:
        try:
            status = path.stat()
        except FileNotFoundError:
            return None
        version = (status.st_mtime_ns, status.st_ino)
        if self._versions.get(path) == version:
            return None
        self._versions[path] = version
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)

    def adopt(self, content: bytes) -> None:
        """Replace the list by a newer one; an older one is ignored.

        :raises InvitationError: if the new list is not from this run's organiser
        """
        if content == self.content:
            return
        revocations = Revocations.parse(content, self.authority)
        if revocations.serial <= self.newest.serial:
            return
        self.newest, self.content = revocations, content
        if not self.writes:
            return
        logger.info(f"{len(revocations.expirations)} invitations are revoked")
        try:
            with new_file(self.path) as temporary:
                temporary.write_bytes(content)
        except OSError as error:
            logger.warning(f"Cannot write {self.path}: {describe(error)}")
