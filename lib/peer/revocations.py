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
from lib.common.errors import UserError, describe
from lib.peer.invitations import Invitation, InvitationError

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
        self._read: dict[Path, bytes | None] = {}  # contents of the files
        self._next_look = float("-inf")

    def refresh(self) -> None:
        """Read the files once per PERIOD, so that frequent calls are cheap."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + self.PERIOD
        for path in filter(None, (self.path, self.source)):
            try:
                content = path.read_bytes() if path.exists() else None
                if content != self._read.get(path):
                    self._read[path] = content
                    self.adopt(content or b"")
            except (OSError, InvitationError) as error:
                logger.warning(f"Ignoring the revocation list {path}: {error}")

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


# Files of the organiser beside `authority.key`, the private key that signs the invitations


def record_invitation(invitation: Invitation, authority_path: Path) -> None:
    """Add an invitation to the organiser's list, `authority.issued.jsonl`, so that it can be revoked by name."""
    record = {
        "username": invitation.token.username,
        "peer_id": invitation.peer_id.to_base58(),
        "expiration_time": invitation.expiration_time,
    }
    with authority_path.with_suffix(".issued.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def find_invitations(username: str, authority_path: Path) -> dict[str, float]:
    """Return the invitations of a user that have not expired: peer ID in base58 -> expiration time.

    :raises UserError: if there is none, or the list is damaged
    """
    path = authority_path.with_suffix(".issued.jsonl")
    try:
        records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        found = {
            record["peer_id"]: record["expiration_time"]
            for record in records
            if record["username"] == username and record["expiration_time"] > get_dht_time()
        }
    except (ValueError, KeyError, TypeError):
        raise UserError(f"'{path}' is damaged; pass the file of the invitation with --invitation") from None
    if not found:
        raise UserError(
            f"--username: '{path}' has no valid invitation of '{username}'; pass the file of the "
            "invitation with --invitation"
        )
    return found


def revoke_invitations(expirations: Mapping[str, float], authority: RSAPrivateKey, authority_path: Path) -> Path:
    """Add invitations to the organiser's signed list, `authority.revoked`, and return its path.

    :raises UserError: if the list is not valid, or would be too long
    """
    path = authority_path.with_suffix(".revoked")
    try:
        revocations = Revocations()
        if path.exists():
            revocations = Revocations.parse(path.read_bytes(), authority.get_public_key())
        content = revocations.extend(expirations).sign(authority)
    except InvitationError as error:
        raise UserError(f"'{path}': {error}; restore the file from a backup") from None
    except ValueError as error:
        raise UserError(f"{error}; make a new --authority and invite all peers again") from None
    with new_file(path) as temporary:
        temporary.write_bytes(content)
    return path
