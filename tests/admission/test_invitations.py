"""Files of invitations and of the organiser: signer, peer, expiration, and revocations."""

import json
import re
import stat
import sys
from pathlib import Path

import pytest
from hivemind.p2p import PeerID
from hivemind.proto.auth_pb2 import AccessToken
from hivemind.utils import get_dht_time
from hivemind.utils.crypto import RSAPrivateKey

import invite as invite_script
from cotrain.admission.invitations import InvitationError, check_token, load_invitation, make_invitation
from cotrain.admission.revocations import Revocations, RevocationStore
from cotrain.common.errors import UserError, run_script
from invite import InvitationArguments, RevocationArguments
from peerstep.local_peer import write_private_key
from tests.support.peers import invite


@pytest.fixture(scope="module")
def authority() -> RSAPrivateKey:
    return RSAPrivateKey()


def test_revocation_list_is_the_organisers_and_never_an_older_one(tmp_path, authority):
    public_key = authority.get_public_key()
    alice, bob = (make_invitation(authority, name, days=1).peer_id for name in ("alice", "bob"))
    first = Revocations().extend({str(alice)}, authority)
    second = first.extend({str(bob)}, authority)
    store = RevocationStore(public_key, tmp_path / "revocations")
    store.writes = True
    store.adopt(second.content)
    store.adopt(first.content)
    assert alice in store.newest and bob in store.newest
    forged = second.extend({}, RSAPrivateKey())
    for content in (forged.content, first.content.replace(b"revoked", b"Revoked"), b"", b"\n{}"):
        with pytest.raises(InvitationError):
            store.adopt(content)
    assert store.newest == second
    restarted = RevocationStore(public_key, tmp_path / "revocations")
    restarted.refresh()
    assert restarted.newest == second
    with pytest.raises(InvitationError, match="too long"):
        first.extend({f"{alice}{number}" for number in range(25_000)}, authority)
    assert Revocations().extend({}, authority).serial >= int(get_dht_time() - 10), "newer than a list that was lost"


def test_token_of_another_authority_peer_or_time_is_not_valid(authority):
    def check(token: AccessToken, peer: PeerID) -> float:
        return check_token(token, authority.get_public_key(), peer)

    own, bob = make_invitation(authority, "alice", days=1), make_invitation(authority, "bob", days=1)
    assert check(bob.token, bob.peer_id) == bob.expiration_time
    foreign, late = make_invitation(RSAPrivateKey(), "bob", days=1), make_invitation(authority, "bob", days=-1)
    for token, peer, reason in (
        (foreign.token, foreign.peer_id, "not from the organiser"),
        (late.token, late.peer_id, "expired"),
        (own.token, bob.peer_id, "another peer's"),
    ):
        with pytest.raises(InvitationError, match=reason):
            check(token, peer)
    for field, value in (("username", "mallory"), ("expiration_time", str(get_dht_time() + 1e9)),
                         ("expiration_time", "never"), ("public_key", b"another"),
                         ("public_key", own.token.public_key)):  # fmt: skip
        token = AccessToken.FromString(bob.token.SerializeToString())
        setattr(token, field, value)
        with pytest.raises(InvitationError):
            check(token, own.peer_id if value == own.token.public_key else bob.peer_id)


def test_peer_id_is_the_one_that_libp2p_derives(tmp_path, authority):
    invitation = make_invitation(authority, "alice", days=1)
    write_private_key(invitation.private_key, tmp_path / "identity.key")
    assert invitation.peer_id == PeerID.from_identity((tmp_path / "identity.key").read_bytes())


def test_files_that_are_no_invitation(tmp_path, authority):
    path = tmp_path / "guest.invitation"
    with pytest.raises(UserError, match=r"guest.invitation.: No such file or directory; pass"):
        load_invitation(path)
    for content in ("", "{}", "[1]", '{"authority": 1}', "\x00"):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(UserError, match="not an invitation"):
            load_invitation(path)
    invite(authority, path)
    content, own = path.read_bytes(), load_invitation(path).peer_id
    path.write_bytes(b"\xef\xbb\xbf" + content)  # as an editor of Windows saves it
    assert load_invitation(path).peer_id == own
    path.write_bytes(content)
    other = json.loads((tmp_path / "guest.invitation").read_text(encoding="utf-8"))
    invite(authority, path)
    path.write_text(
        json.dumps({**other, "token": json.loads(path.read_text(encoding="utf-8"))["token"]}), encoding="utf-8"
    )
    with pytest.raises(UserError, match="another peer's"):
        load_invitation(path)
    invite(authority, path, days=-2)
    with pytest.raises(UserError, match="the invitation has expired"):
        load_invitation(path)


def test_script(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)

    def run(*args: str) -> str:
        """Run the script's main function in this process: hivemind's import takes seconds."""
        monkeypatch.setattr(sys, "argv", ["invite.py", *args])
        run_script(invite_script.main)
        return capfd.readouterr().out

    def refusal(*args: str) -> str:
        with pytest.raises(SystemExit, match="1"):
            run(*args)
        return capfd.readouterr().err

    def revoke(*args: str) -> Revocations:
        assert re.match(r"Revoked \d invitations: authority\.revoked", run("revoke", *args))
        return Revocations.parse(Path("authority.revoked").read_bytes(), bob.authority)

    first = run("--username", " alice ", "--output", "alice-1.invitation")  # no other name, which looks the same
    with pytest.raises(SystemExit, match="2"):
        run("--username", "al\nice", "--output", "x")
    assert "without control characters" in capfd.readouterr().err
    assert "Created authority.key" in first and "Invited alice" in first
    assert "Created" not in run("--username", "bob", "--output", "bob.invitation", "--days", "7")
    run("--username", "alice", "--output", "alice-2.invitation")
    alice_1, alice_2, bob = (load_invitation(Path(f"{name}.invitation")) for name in ("alice-1", "alice-2", "bob"))
    assert check_token(bob.token, alice_1.authority, bob.peer_id) == bob.expiration_time
    for name in ("authority.key", "authority.issued.jsonl", "bob.invitation"):
        assert stat.S_IMODE(Path(name).stat().st_mode) == 0o600
    assert "already exists" in refusal("--username", "alice", "--output", "bob.invitation")

    of_one, of_alice = revoke("--invitation", "alice-1.invitation"), revoke("--username", "alice")
    assert of_one.peers == {str(alice_1.peer_id)} and of_alice.serial > of_one.serial
    assert of_alice.peers == {str(alice_1.peer_id), str(alice_2.peer_id)}
    invite(RSAPrivateKey(), tmp_path / "foreign.invitation")
    assert "no invitation of 'mallory'" in refusal("revoke", "--username", "mallory")
    assert "not signed by 'authority.key'" in refusal("revoke", "--invitation", "foreign.invitation")
    assert "there is no file" in refusal("revoke", "--username", "alice", "--authority", "none.key")


def test_revocation_list_with_bytes_that_base64_skips_is_refused(authority):
    """Each peer would keep the list, and pass it on to all others, with as much of them as a message may have."""
    content = Revocations().extend({"x"}, authority).content
    assert Revocations.parse(content, authority.get_public_key()).content == content
    with pytest.raises(InvitationError):
        Revocations.parse(b"~" * 10**5 + content, authority.get_public_key())


@pytest.mark.parametrize("missing", [1, 20])
def test_invitation_whose_line_is_damaged_costs_no_other(tmp_path, monkeypatch, missing):
    """A write was cut off, with or without the whole record. The next record was added to the damaged line."""
    monkeypatch.chdir(tmp_path)
    issued = Path("authority.issued.jsonl")
    for name in ("alice", "bob"):
        invite_script.invite(InvitationArguments(username=name, output=f"{name}.invitation"))
        if name == "alice":
            issued.write_bytes(issued.read_bytes()[:-missing])
    invite_script.revoke(RevocationArguments(username="bob"))
    bob = load_invitation(Path("bob.invitation"))
    assert Revocations.parse(Path("authority.revoked").read_bytes(), bob.authority).peers == {str(bob.peer_id)}
    if missing == 1:
        invite_script.revoke(RevocationArguments(username="alice"))
