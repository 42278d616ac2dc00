"""A run with invitations: a peer that has one takes part, and no service answers any other."""

import asyncio
import json
import stat
import subprocess
import sys

import pytest
import torch
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time
from hivemind.utils.crypto import RSAPrivateKey

from errors import UserError
from lib.peer.invitations import (
    InvitationError,
    check_token,
    load_invitation,
    make_invitation,
    save_invitation,
    write_private_key,
)
from tests.peers import ROOT, local_optimizer, local_peer, wait_until
from tests.visitor import call_services, visitor


@pytest.fixture(scope="module")
def authority() -> RSAPrivateKey:
    return RSAPrivateKey()


def invite(authority, path, days: float = 1.0) -> str:
    save_invitation(make_invitation(authority, "alice", days), path)
    return str(path)


@pytest.mark.peers
def test_invited_peers_share_records_and_nobody_else_does(tmp_path, authority):
    organiser = invite(authority, tmp_path / "organiser.invitation")
    guest = invite(authority, tmp_path / "guest.invitation")
    stranger = invite(RSAPrivateKey(), tmp_path / "stranger.invitation")
    with local_peer(tmp_path / "one", "run", invitation=organiser) as first:
        address = str(first.dht.get_visible_maddrs()[0])
        with local_peer(tmp_path / "two", "run", (address,), invitation=guest) as second:
            assert second.dht.store("run_note", "hello", get_dht_time() + 60, subkey=b"second")
            records = wait_until(lambda: first.dht.get("run_note", latest=True), 120, "the record").value
            assert records[b"second"].value == "hello"
        for number, invitation in enumerate((None, stranger)):
            with (
                pytest.raises(UserError, match="that you pass the --invitation of the run if it needs one"),
                local_peer(tmp_path / f"other{number}", "run", (address,), invitation=invitation, bootstrap_timeout=6),
            ):
                pass


async def visit(address: str, *args, **kwargs) -> dict[str, str]:
    async with visitor(address, *args, **kwargs) as p2p:
        return await call_services(p2p, address, "run")


def assert_refused(outcomes: dict[str, str]) -> None:
    """Each service has said that the caller lacks an invitation: none has answered, and none was left out."""
    assert len(outcomes) == 9
    for service, outcome in outcomes.items():
        assert "has not shown a valid invitation" in outcome or "is revoked" in outcome, (service, outcome)


def test_no_service_answers_a_peer_without_a_valid_invitation(tmp_path, authority):
    organiser = invite(authority, tmp_path / "organiser.invitation")
    guest, expired = make_invitation(authority, "guest", days=1), make_invitation(authority, "late", days=-1)
    foreign = make_invitation(RSAPrivateKey(), "foreign", days=1)
    options = {"run_id": "run", "target_batch_size": 8, "averaging_timeout": 8.0}
    with (
        local_peer(tmp_path / "peer", "run", invitation=organiser) as peer,
        local_optimizer(torch.nn.Linear(2, 2), peer, 4, **options) as optimizer,
    ):
        optimizer.share_state()
        address = str(peer.dht.get_visible_maddrs()[0])
        assert_refused(asyncio.run(visit(address)))
        assert_refused(asyncio.run(visit(address, expired.private_key, expired.token)))
        assert_refused(asyncio.run(visit(address, foreign.private_key, foreign.token)))
        assert_refused(asyncio.run(visit(address, RSAPrivateKey(), guest.token)))  # seen on the wire
        assert_refused(asyncio.run(visit(address, is_silent=True)))
        outcomes = asyncio.run(visit(address, guest.private_key, guest.token))
        assert outcomes.pop("grad_averager.rpc_download_state") == "StopAsyncIteration()"  # it has nothing to share
        assert all(outcome.startswith("answered") for outcome in outcomes.values()), outcomes


def test_identity_is_that_of_the_invitation(tmp_path, authority):
    path = invite(authority, tmp_path / "guest.invitation")
    for folder in ("home", "moved"):
        with local_peer(tmp_path / folder, "run", invitation=path) as peer:
            expected = load_invitation(tmp_path / "guest.invitation").private_key.get_public_key().to_bytes()
            assert expected in peer.public_key
            assert stat.S_IMODE((tmp_path / folder / "invited.key").stat().st_mode) == 0o600


def test_token_of_another_authority_or_time_is_not_valid(authority):
    public_key = authority.get_public_key()
    own, bob = make_invitation(authority, "alice", days=1), make_invitation(authority, "bob", days=1)
    assert check_token(own.token, public_key) == (own.peer_id, own.expiration_time)
    assert check_token(bob.token, public_key) == (bob.peer_id, bob.expiration_time)
    with pytest.raises(InvitationError, match="not from the organiser"):
        check_token(make_invitation(RSAPrivateKey(), "bob", days=1).token, public_key)
    with pytest.raises(InvitationError, match="expired"):
        check_token(make_invitation(authority, "bob", days=-1).token, public_key)
    for field, value in (("username", "mallory"), ("expiration_time", str(get_dht_time() + 1e9)),
                         ("expiration_time", "never"), ("public_key", b"another"),
                         ("public_key", own.token.public_key)):  # fmt: skip
        token = make_invitation(authority, "bob", days=1).token
        setattr(token, field, value)
        with pytest.raises(InvitationError):
            check_token(token, public_key)


def test_peer_id_is_the_one_that_libp2p_derives(tmp_path, authority):
    invitation = make_invitation(authority, "alice", days=1)
    write_private_key(invitation.private_key, tmp_path / "identity.key")
    assert invitation.peer_id == PeerID.from_identity((tmp_path / "identity.key").read_bytes())


def test_files_that_are_no_invitation(tmp_path, authority):
    path = tmp_path / "guest.invitation"
    with pytest.raises(UserError, match="there is no file"):
        load_invitation(path)
    for content in ("", "{}", "[1]", '{"authority": 1}', "\x00"):
        path.write_text(content)
        with pytest.raises(UserError, match="is no invitation"):
            load_invitation(path)
    invite(authority, path)
    other = json.loads((tmp_path / "guest.invitation").read_text())
    invite(authority, path)
    path.write_text(json.dumps({**other, "token": json.loads(path.read_text())["token"]}))
    with pytest.raises(UserError, match="was changed"):
        load_invitation(path)
    invite(authority, path, days=-2)
    with pytest.raises(UserError, match=r"ended 2\.0 days ago"):
        load_invitation(path)


def test_script(tmp_path):
    def run(*args):
        command = [sys.executable, str(ROOT / "invite.py"), *args]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    first = run("--username", "alice", "--output", "alice.invitation")
    assert first.returncode == 0 and "Made authority.key" in first.stdout and "Invited alice" in first.stdout
    second = run("--username", "bob", "--output", "bob.invitation", "--days", "7")
    assert second.returncode == 0 and "Made" not in second.stdout
    alice, bob = (load_invitation(tmp_path / f"{name}.invitation") for name in ("alice", "bob"))
    assert check_token(bob.token, alice.authority) == (bob.peer_id, bob.expiration_time)
    assert alice.authority.to_bytes() == bob.authority.to_bytes()
    for name in ("authority.key", "alice.invitation"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    again = run("--username", "alice", "--output", "alice.invitation")
    assert again.returncode == 1 and "is there already" in again.stderr and "Traceback" not in again.stderr
