"""Who may join: a run whose organiser gives out invitations talks to nobody else.

An invitation is a file with a key pair, which becomes the peer's identity, and a token in which the organiser's key
says who it is for and how long it holds. hivemind shows the token with each request to the DHT, and asks for the
other's (https://github.com/learning-at-home/hivemind/issues/253): without one, nobody reads or writes a record of the
run, and so nobody finds a group to average with.
"""

import base64
import json
import os
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from hivemind.proto import crypto_pb2
from hivemind.proto.auth_pb2 import AccessToken
from hivemind.utils import get_dht_time
from hivemind.utils.auth import TokenAuthorizerBase
from hivemind.utils.crypto import RSAPrivateKey, RSAPublicKey

from atomic import new_file
from errors import UserError

SECONDS_A_DAY = 86_400.0


@dataclass
class Invitation:
    """What an invited peer has."""

    authority: RSAPublicKey  # the organiser's
    private_key: RSAPrivateKey  # the peer's own
    token: AccessToken


def read_private_key(path: Path) -> RSAPrivateKey:
    """Read a private key as libp2p keeps it.

    :raises ValueError: if the file holds none
    """
    message = crypto_pb2.PrivateKey.FromString(path.read_bytes())
    return _to_private_key(message.data)


def _to_private_key(der: bytes) -> RSAPrivateKey:
    key = RSAPrivateKey.__new__(RSAPrivateKey)
    key._private_key = serialization.load_der_private_key(der, password=None)
    key.get_public_key().to_bytes()  # raises for other kinds of keys
    return key


def write_private_key(key: RSAPrivateKey, path: Path) -> None:
    """Write a private key as libp2p wants it, readable by its owner alone."""
    content = crypto_pb2.PrivateKey(key_type=crypto_pb2.KeyType.RSA, data=key.to_bytes()).SerializeToString()
    _write_secret(path, content)


def _write_secret(path: Path, content: bytes) -> None:
    with new_file(path) as temporary, open(os.open(temporary, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
        file.write(content)


def make_invitation(authority: RSAPrivateKey, username: str, days: float) -> Invitation:
    """Invite somebody, for some days from now."""
    private_key = RSAPrivateKey()
    token = AccessToken(
        username=username,
        public_key=private_key.get_public_key().to_bytes(),
        expiration_time=str(get_dht_time() + days * SECONDS_A_DAY),
    )
    token.signature = authority.sign(_signed_part(token))
    return Invitation(authority.get_public_key(), private_key, token)


def _signed_part(token: AccessToken) -> bytes:
    return json.dumps([token.username, token.public_key.hex(), token.expiration_time]).encode()


def save_invitation(invitation: Invitation, path: Path) -> None:
    content = {
        "authority": invitation.authority.to_bytes().decode(),
        "private_key": base64.b64encode(invitation.private_key.to_bytes()).decode(),
        "token": base64.b64encode(invitation.token.SerializeToString()).decode(),
    }
    _write_secret(path, json.dumps(content, indent=2).encode() + b"\n")


def load_invitation(path: Path) -> Invitation:
    """Read an invitation and check it.

    :raises UserError: if it is none, or no longer holds
    """
    try:
        content = json.loads(path.read_text())
        invitation = Invitation(
            RSAPublicKey.from_bytes(content["authority"].encode()),
            _to_private_key(base64.b64decode(content["private_key"])),
            AccessToken.FromString(base64.b64decode(content["token"])),
        )
        is_genuine = invitation.authority.verify(_signed_part(invitation.token), invitation.token.signature)
        is_own = invitation.token.public_key == invitation.private_key.get_public_key().to_bytes()
        days_left = (float(invitation.token.expiration_time) - get_dht_time()) / SECONDS_A_DAY
    except FileNotFoundError:
        raise UserError(f"--invitation: there is no file '{path}'; ask the organiser of the run for one") from None
    except OSError:
        raise
    except Exception:
        raise UserError(f"--invitation: '{path}' is no invitation; ask the organiser of the run for another") from None
    if not (is_genuine and is_own):
        raise UserError(f"--invitation: '{path}' was changed after it was made; ask the organiser for another")
    if days_left <= 0:
        raise UserError(f"--invitation: '{path}' ended {-days_left:.1f} days ago; ask the organiser for another")
    return invitation


class InvitationAuthorizer(TokenAuthorizerBase):
    """Shows our invitation to others and asks for theirs."""

    def __init__(self, invitation: Invitation):
        super().__init__(invitation.private_key)
        self.invitation = invitation

    async def get_token(self) -> AccessToken:
        return self.invitation.token

    def is_token_valid(self, access_token: AccessToken) -> bool:
        try:
            is_current = float(access_token.expiration_time) > get_dht_time()
        except ValueError:
            return False
        return is_current and self.invitation.authority.verify(_signed_part(access_token), access_token.signature)

    def does_token_need_refreshing(self, access_token: AccessToken) -> bool:
        return False
