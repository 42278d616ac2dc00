"""A run with invitations: who has one of its organiser takes part, others do not even read."""

import json
import stat
import subprocess
import sys

import pytest
from hivemind.utils import get_dht_time
from hivemind.utils.crypto import RSAPrivateKey

from admission import InvitationAuthorizer, load_invitation, make_invitation, save_invitation
from errors import UserError
from tests.peers import ROOT, local_peer, wait_until


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


@pytest.mark.peers
def test_identity_is_that_of_the_invitation(tmp_path, authority):
    path = invite(authority, tmp_path / "guest.invitation")
    for folder in ("home", "moved"):
        with local_peer(tmp_path / folder, "run", invitation=path) as peer:
            expected = load_invitation(tmp_path / "guest.invitation").private_key.get_public_key().to_bytes()
            assert expected in peer.public_key
            assert stat.S_IMODE((tmp_path / folder / "invited.key").stat().st_mode) == 0o600


def test_token_of_another_authority_or_time_is_not_valid(authority):
    own = make_invitation(authority, "alice", days=1)
    authorizer = InvitationAuthorizer(own)
    assert authorizer.is_token_valid(own.token)
    assert authorizer.is_token_valid(make_invitation(authority, "bob", days=1).token)
    assert not authorizer.is_token_valid(make_invitation(RSAPrivateKey(), "bob", days=1).token)
    assert not authorizer.is_token_valid(make_invitation(authority, "bob", days=-1).token)
    for field, value in (("username", "mallory"), ("expiration_time", str(get_dht_time() + 1e9)),
                         ("expiration_time", "never"), ("public_key", b"another")):  # fmt: skip
        token = make_invitation(authority, "bob", days=1).token
        setattr(token, field, value)
        assert not authorizer.is_token_valid(token), field


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
    assert InvitationAuthorizer(alice).is_token_valid(bob.token)
    assert alice.authority.to_bytes() == bob.authority.to_bytes()
    for name in ("authority.key", "alice.invitation"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    again = run("--username", "alice", "--output", "alice.invitation")
    assert again.returncode == 1 and "is there already" in again.stderr and "Traceback" not in again.stderr
