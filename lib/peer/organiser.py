"""Files of the organiser beside `authority.key`, the private key that signs the invitations.

`authority.issued.jsonl` has one line per invitation. `authority.revoked` is the signed revocation list.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from hivemind.utils import get_dht_time
from hivemind.utils.crypto import RSAPrivateKey

from lib.common.atomic_files import new_file
from lib.common.errors import UserError
from lib.peer.invitations import Invitation, InvitationError
from lib.peer.revocations import Revocations


def note_invitation(invitation: Invitation, authority_path: Path) -> None:
    """Add an invitation to the organiser's list, so that it can be revoked without its file."""
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
    """Add invitations to the signed revocation list.

    :returns: the path of the list
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
        raise UserError(f"{error}; make a new --authority and invite everybody again") from None
    with new_file(path) as temporary:
        temporary.write_bytes(content)
    return path
