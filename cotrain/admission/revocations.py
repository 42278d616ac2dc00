"""The organiser's list of revoked invitations: signed, numbered, and passed on from peer to peer.

The list is one file: a line with the signature, then JSON. Every peer can verify it, so any peer may pass it on.
"""

import json
import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from hivemind.p2p import PeerID
from hivemind.utils import get_logger
from hivemind.utils.crypto import RSAPrivateKey, RSAPublicKey

from cotrain.admission.invitations import Invitation, InvitationError
from cotrain.common.atomic_files import new_file
from cotrain.common.errors import UserError, describe
from cotrain.common.json_file import read_records

logger = get_logger(__name__)

MAX_LIST_BYTES = 2**20  # of a list: some 20,000 invitations; a message between peers has at most 4 MiB
MAX_SIGNATURE_BYTES = 400  # it has 344; base64 allows any number of bytes that it skips, which would be passed on


@dataclass(frozen=True)
class Revocations:
    """A list of revoked invitations. Of two lists, the one with the higher serial number is valid."""

    serial: int = 0
    peers: frozenset[str] = frozenset()  # IDs in base58
    content: bytes = b""  # the signed list, as it is stored and sent

    def __contains__(self, peer_id: PeerID) -> bool:
        return peer_id.to_base58() in self.peers

    def extend(self, peers: Collection[str], authority: RSAPrivateKey) -> "Revocations":
        """Return the next list: this list and `peers`, signed; raise InvitationError if it is too long."""
        # At least the current time: an organiser that has lost the list can still issue a newer one.
        serial = max(self.serial + 1, int(time.time()))
        payload = json.dumps({"serial": serial, "revoked": sorted({*self.peers, *peers})}, indent=1).encode()
        return self.parse(authority.sign(payload) + b"\n" + payload, authority.get_public_key())

    @classmethod
    def parse(cls, content: bytes, authority: RSAPublicKey) -> "Revocations":
        """Read a list; raise InvitationError if it is too long or not signed by the authority."""
        signature, _, payload = content.partition(b"\n")
        if len(content) > MAX_LIST_BYTES or len(signature) > MAX_SIGNATURE_BYTES:
            raise InvitationError("the list of revoked invitations is too long")
        if not authority.verify(payload, signature):
            raise InvitationError("it is not a revocation list of this run's organiser")
        parsed = json.loads(payload)
        return cls(parsed["serial"], frozenset(parsed["revoked"]), content)


class RevocationStore:
    """The newest revocation list that this peer has received, in a file shared by the peer's processes.

    The DHT process writes the file, the averagers' processes read it. The list survives a restart. The organiser may
    replace the file by a newer list at any time.
    """

    CHECK_SECONDS = 1.0  # seconds between two checks of the file

    def __init__(self, authority: RSAPublicKey, path: Path):
        self.authority, self.path = authority, path
        self.newest = Revocations()
        self.writes = False  # whether this process writes the file
        self._read = b""  # content of the file
        self._next_look = float("-inf")

    def refresh(self) -> None:
        """Read the file once per CHECK_SECONDS, so that frequent calls are cheap."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + self.CHECK_SECONDS
        try:
            if self.path.exists() and (content := self.path.read_bytes()) != self._read:
                self._read = content
                self.adopt(content)
        except (OSError, InvitationError) as error:
            logger.warning(f"Ignoring the revocation list {self.path}: {getattr(error, 'strerror', None) or error}")

    def adopt(self, content: bytes) -> None:
        """Replace the list by a newer one; ignore an older one. Raises InvitationError as `Revocations.parse`."""
        revocations = Revocations.parse(content, self.authority)
        if revocations.serial <= self.newest.serial:
            return
        self.newest = revocations
        if not self.writes:
            return
        logger.info(f"{len(revocations.peers)} invitations are revoked")
        try:
            with new_file(self.path) as temporary:
                temporary.write_bytes(content)
        except OSError as error:
            logger.warning(f"Cannot write {self.path}: {describe(error)}")


# Files of the organiser beside `authority.key`, the private key that signs the invitations


def record_invitation(invitation: Invitation, authority_path: Path) -> None:
    """Add an invitation to the organiser's list, `authority.issued.jsonl`, so that it can be revoked by name."""
    record = {"username": invitation.token.username, "peer_id": invitation.peer_id.to_base58()}
    path = authority_path.with_suffix(".issued.jsonl")
    path.touch(mode=0o600)
    is_whole = (b"\n" + path.read_bytes()).endswith(b"\n")  # otherwise a process died in a write
    with path.open("ab", buffering=0) as file:
        file.write(b"\n" * (not is_whole) + json.dumps(record).encode() + b"\n")
        os.fsync(file.fileno())


def find_invitations(username: str, authority_path: Path) -> set[str]:
    """Return the peer IDs of a user's invitations, in base58; raise UserError if there is none."""
    path = authority_path.with_suffix(".issued.jsonl")
    found = {record["peer_id"] for record in read_records(path, "peer_id", str) if record.get("username") == username}
    if not found:
        raise UserError(f"--username: '{path}' has no invitation of '{username}'; pass its file with --invitation")
    return found


def revoke_invitations(peers: Collection[str], authority: RSAPrivateKey, authority_path: Path) -> Path:
    """Add peer IDs to the organiser's signed list, `authority.revoked`, and return its path.

    :raises UserError: if the file is not a list that the organiser has signed
    """
    path = authority_path.with_suffix(".revoked")
    try:
        revocations = Revocations()
        if path.exists():
            revocations = Revocations.parse(path.read_bytes(), authority.get_public_key())
        content = revocations.extend(peers, authority).content
    except InvitationError as error:
        raise UserError(f"'{path}': {error}; restore it from a backup, or make a new --authority") from None
    with new_file(path) as temporary:
        temporary.write_bytes(content)
    return path
