"""Invitations: signed access tokens for a closed run.

An invitation is a file with a key pair, which becomes the peer's identity, and a token: the organiser's signature
under the public key, a name, and an expiration time. libp2p derives the peer ID from the public key, and both ends of
a connection prove that they have their private key. A token therefore admits one peer ID and is not secret.
"""

import base64
import json
import time
from dataclasses import dataclass
from pathlib import Path

from hivemind.p2p import PeerID
from hivemind.proto.auth_pb2 import AccessToken
from hivemind.utils.crypto import RSAPrivateKey, RSAPublicKey

from cotrain.common.atomic_files import new_file
from cotrain.common.errors import UserError
from peerstep import local_peer
from peerstep.errors import PeerError
from peerstep.reports.records import peer_id_of


class InvitationError(Exception):
    """Raised for an invalid token or revocation list. The message is the reason."""


@dataclass
class Invitation:
    """What lets its holder into a run, and gives it the identity under which it trains."""

    authority: RSAPublicKey  # the organiser's
    private_key: RSAPrivateKey  # the invited peer's
    token: AccessToken

    @property
    def peer_id(self) -> PeerID:
        return peer_id_of(self.private_key.get_public_key())

    @property
    def expiration_time(self) -> float:
        return float(self.token.expiration_time)


def load_identity(path: Path, flag: str = "--identity_path") -> RSAPrivateKey:
    """Read or create a peer's private key, see peerstep/local_peer.py; a UserError names `flag`."""
    try:
        return local_peer.load_identity(path)
    except PeerError as error:
        raise UserError(str(error).replace("identity_path", flag, 1)) from None


def make_invitation(authority: RSAPrivateKey, username: str, days: float) -> Invitation:
    """Make an invitation with a new identity.

    :param authority: the key of the organiser, which signs it
    :param days: for which it holds
    """
    private_key = RSAPrivateKey()
    token = AccessToken(
        username=username,
        public_key=private_key.get_public_key().to_bytes(),
        expiration_time=str(time.time() + days * 86_400.0),
    )
    token.signature = authority.sign(_signed_part(token))
    return Invitation(authority.get_public_key(), private_key, token)


def _signed_part(token: AccessToken) -> bytes:
    return json.dumps([token.username, token.public_key.hex(), token.expiration_time]).encode()


def check_token(token: AccessToken, authority: RSAPublicKey, peer_id: PeerID) -> float:
    """Return when a token that the authority has signed for a peer expires (`time.time`), or raise InvitationError."""
    try:
        expiration_time = float(token.expiration_time)
        is_own = peer_id_of(RSAPublicKey.from_bytes(token.public_key)) == peer_id
    except Exception:  # cryptography raises various exceptions for untrusted bytes
        raise InvitationError("the invitation is malformed") from None
    if not authority.verify(_signed_part(token), token.signature):
        raise InvitationError("the invitation is not from the organiser of this run")
    if not expiration_time > time.time():  # also refuses NaN
        raise InvitationError("the invitation has expired")
    if not is_own:
        raise InvitationError("the invitation is another peer's")
    return expiration_time


def save_invitation(invitation: Invitation, path: Path) -> None:
    """Write an invitation, which is a secret: only the owner of the file may read it."""
    content = {
        "authority": invitation.authority.to_bytes().decode(),
        "private_key": base64.b64encode(invitation.private_key.to_bytes()).decode(),
        "token": base64.b64encode(invitation.token.SerializeToString()).decode(),
    }
    with new_file(path) as temporary:
        temporary.touch(mode=0o600)
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load_invitation(path: Path) -> Invitation:
    """Read an invitation; raise UserError if it is missing, not valid, or has expired."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
        invitation = Invitation(
            RSAPublicKey.from_bytes(content["authority"].encode()),
            local_peer.to_private_key(base64.b64decode(content["private_key"])),
            AccessToken.FromString(base64.b64decode(content["token"])),
        )
        check_token(invitation.token, invitation.authority, invitation.peer_id)
        return invitation
    except OSError as error:
        raise UserError(f"--invitation: '{path}': {error.strerror}; pass the file of the organiser") from None
    except Exception as error:
        reason = error if isinstance(error, InvitationError) else "this is not an invitation"
        raise UserError(f"--invitation: '{path}': {reason}; ask the organiser of the run for another") from None
