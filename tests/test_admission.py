"""A run with invitations: a peer that has one takes part, and no service answers any other."""

import asyncio
import json
import re
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from hivemind.averaging.averager import DecentralizedAverager
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time
from hivemind.utils.crypto import RSAPrivateKey

import invite as invite_script
from arguments import InvitationArguments, RevocationArguments
from errors import UserError
from lib.peer.admission import Admission
from lib.peer.invitations import (
    SECONDS_A_DAY,
    InvitationError,
    check_token,
    load_invitation,
    make_invitation,
    save_invitation,
    write_private_key,
)
from lib.peer.organiser import revoke_invitations
from lib.peer.revocations import Revocations, RevocationStore
from tests.peers import LOCAL, LONG_STEPS, ROOT, Script, join_together, local_optimizer, local_peer, wait_until
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


def list_answered(outcomes: dict[str, str]) -> list[str]:
    return [service for service, outcome in outcomes.items() if outcome.startswith("answered")]


def assert_refused(outcomes: dict[str, str]) -> None:
    """Each service has said that the caller lacks an invitation: none has answered, and none was left out."""
    assert len(outcomes) == 9
    assert list_answered(outcomes) == []
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
        assert len(list_answered(outcomes)) == 8, outcomes
        assert outcomes["grad_averager.rpc_download_state"] == "StopAsyncIteration()"  # it has nothing to share


def test_invitation_that_expires_ends_the_membership(tmp_path, authority):
    organiser = invite(authority, tmp_path / "organiser.invitation")
    guest = make_invitation(authority, "guest", days=20 / SECONDS_A_DAY)

    async def stay(address: str) -> dict[str, str]:
        async with visitor(address, guest.private_key, guest.token) as p2p:
            assert "rpc_ping" in list_answered(await call_services(p2p, address, "run", timeout=5))
            assert get_dht_time() < guest.expiration_time
            await asyncio.sleep(guest.expiration_time - get_dht_time() + 0.1)
            return await call_services(p2p, address, "run")

    with (
        local_peer(tmp_path / "peer", "run", invitation=organiser) as peer,
        local_optimizer(torch.nn.Linear(2, 2), peer, 4, run_id="run", target_batch_size=8),
    ):
        assert_refused(asyncio.run(stay(str(peer.dht.get_visible_maddrs()[0]))))


def test_peers_pass_on_that_an_invitation_is_revoked(tmp_path, authority, monkeypatch):
    """Within a period of the exchange, those that are connected already included; it is known after a restart, too."""
    monkeypatch.setattr(Admission, "REFRESH_PERIOD", 1.0)
    write_private_key(authority, tmp_path / "authority.key")
    organiser = invite(authority, tmp_path / "organiser.invitation")
    member = invite(authority, tmp_path / "member.invitation")
    guest, other = (make_invitation(authority, name, days=1) for name in ("guest", "other"))

    async def stay(address: str) -> None:
        async with (
            visitor(address, guest.private_key, guest.token) as p2p,
            visitor(address, other.private_key, other.token) as neighbour,
        ):
            assert "rpc_ping" in list_answered(await call_services(p2p, address, "run", timeout=5))
            revoke_invitations(
                {guest.peer_id.to_base58(): guest.expiration_time}, authority, tmp_path / "authority.key"
            )
            deadline = time.monotonic() + 60
            while list_answered(outcomes := await call_services(p2p, address, "run", timeout=5)):
                assert time.monotonic() < deadline
            assert_refused(outcomes)
            assert "rpc_ping" in list_answered(await call_services(neighbour, address, "run", timeout=5))

    with local_peer(
        tmp_path / "first", "run", invitation=organiser, revocations=str(tmp_path / "authority.revoked")
    ) as first:
        address = str(first.dht.get_visible_maddrs()[0])
        with (
            local_peer(tmp_path / "second", "run", (address,), invitation=member) as second,
            local_optimizer(torch.nn.Linear(2, 2), second, 4, run_id="run", target_batch_size=8),
        ):
            asyncio.run(stay(str(second.dht.get_visible_maddrs()[0])))
    with local_peer(tmp_path / "second", "run", invitation=member) as second:
        outcomes = asyncio.run(visit(str(second.dht.get_visible_maddrs()[0]), guest.private_key, guest.token))
        assert "revoked" in outcomes["rpc_ping"]


def test_revocation_list_is_the_organisers_and_never_an_older_one(tmp_path, authority):
    public_key, one_day = authority.get_public_key(), get_dht_time() + SECONDS_A_DAY
    alice, bob = (make_invitation(authority, name, days=1).peer_id for name in ("alice", "bob"))
    first = Revocations().extend({alice.to_base58(): one_day})
    second = first.extend({bob.to_base58(): one_day})
    store = RevocationStore(public_key, tmp_path / "revocations")
    store.writes = True
    store.adopt(second.sign(authority))
    store.adopt(first.sign(authority))
    assert alice in store.newest and bob in store.newest
    forged = second.extend({})
    for content in (forged.sign(RSAPrivateKey()), first.sign(authority).replace(b"revoked", b"Revoked"), b"", b"\n{}"):
        with pytest.raises(InvitationError):
            store.adopt(content)
    assert store.newest == second
    restarted = RevocationStore(public_key, tmp_path / "revocations")
    restarted.refresh()
    assert restarted.newest == second
    with pytest.raises(ValueError, match="too long"):
        first.extend({f"{alice}{number}": one_day for number in range(15_000)}).sign(authority)
    assert alice not in first.extend({alice.to_base58(): get_dht_time() - 1})  # it has expired by itself


def test_rounds_are_not_delayed_by_strangers(tmp_path, authority):
    """A round that waited for a stranger, one of which never answers, would take `Admission.TIMEOUT` or longer."""
    files = [invite(authority, tmp_path / f"{number}.invitation") for number in range(2)]
    with ExitStack() as stack:
        first = stack.enter_context(local_peer(tmp_path / "first", "run", invitation=files[0]))
        address = str(first.dht.get_visible_maddrs()[0])
        second = stack.enter_context(local_peer(tmp_path / "second", "run", (address,), invitation=files[1]))
        options = {"run_id": "run", "target_batch_size": 8}
        averagers = [
            stack.enter_context(local_optimizer(torch.nn.Linear(2, 2), peer, 4, **options)).state_averager
            for peer in (first, second)
        ]
        strangers = Script("tests/visitor.py", "run", address, log=tmp_path / "log", env={"PYTHONPATH": str(ROOT)})
        stack.callback(strangers.kill_all)
        strangers.wait_for("one lap of calls")
        executor = stack.enter_context(ThreadPoolExecutor(2))
        for _ in range(3):
            rounds = [
                executor.submit(DecentralizedAverager.step, averager, timeout=Admission.TIMEOUT, allow_retries=False)
                for averager in averagers
            ]
            assert [len(finished.result()) for finished in rounds] == [2, 2]
        assert set(re.findall("one lap of calls, answered: (.*)", strangers.output)) == {"[]"}


def test_scripts_average_while_strangers_call(scripts, authority):
    """The monitor, its assistant, a trainer and one in client mode, while others call all services of two of them."""
    names = ("monitor", "assistant", "public", "client")
    files = {name: invite(authority, scripts.folder / f"{name}.invitation") for name in names}
    together = ("--target_group_size", 3, "--matchmaking_time", 10, "--averaging_timeout", 60)
    monitor = scripts.monitor(
        "--invitation", files["monitor"], "--assist_in_averaging", "--assistant_maddrs", LOCAL,
        "--assistant_invitation", files["assistant"], *LONG_STEPS[:2], *together, "--run_id", "run",
    )  # fmt: skip
    common = ("--initial_peers", monitor.address, "--run_id", "run", *LONG_STEPS, *together)
    public = scripts.trainer("public", *common, "--invitation", files["public"])
    client = scripts.trainer("client", *common, "--client_mode", "--invitation", files["client"])
    strangers = [
        scripts.start("tests/visitor.py", "run", script.address, log=f"at-{name}", env={"PYTHONPATH": str(ROOT)})
        for name, script in (("monitor", monitor), ("trainer", public))
    ]
    join_together(public, client)
    for script in (public, client, monitor):
        script.wait_for("Averaged gradients with 3 peers", 300)
    for stranger in strangers:
        stranger.wait_for("one lap of calls")
        assert set(re.findall("one lap of calls, answered: (.*)", stranger.output)) == {"[]"}
    for script in (public, client, monitor):
        assert script.stop() == 0, script.output
        assert "Traceback" not in script.output, script.output


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
    revoked = run("revoke", "--username", "alice")
    assert revoked.returncode == 0 and "Revoked 1 invitations: authority.revoked" in revoked.stdout, revoked.stderr
    revocations = Revocations.parse((tmp_path / "authority.revoked").read_bytes(), alice.authority)
    assert alice.peer_id in revocations and bob.peer_id not in revocations
    again = run("--username", "alice", "--output", "alice.invitation")
    assert again.returncode == 1 and "is there already" in again.stderr and "Traceback" not in again.stderr


def test_invitations_are_revoked_by_name_or_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("alice-1", "alice-2", "bob"):
        invite_script.invite(InvitationArguments(username=name[:5], output=f"{name}.invitation"))
    alice_1, alice_2, bob = (load_invitation(Path(f"{name}.invitation")) for name in ("alice-1", "alice-2", "bob"))
    invite_script.revoke(RevocationArguments(invitation="alice-1.invitation"))
    first = Revocations.parse(Path("authority.revoked").read_bytes(), bob.authority)
    assert set(first.expirations) == {str(alice_1.peer_id)}
    invite_script.revoke(RevocationArguments(username="alice"))
    second = Revocations.parse(Path("authority.revoked").read_bytes(), bob.authority)
    assert set(second.expirations) == {str(alice_1.peer_id), str(alice_2.peer_id)} and second.serial > first.serial
    with pytest.raises(UserError, match="no valid invitation of 'mallory'"):
        invite_script.revoke(RevocationArguments(username="mallory"))
    invite(RSAPrivateKey(), tmp_path / "foreign.invitation")
    with pytest.raises(UserError, match=r"not signed by 'authority\.key'"):
        invite_script.revoke(RevocationArguments(invitation="foreign.invitation"))
    with pytest.raises(UserError, match="there is no file"):
        invite_script.revoke(RevocationArguments(username="alice", authority="none.key"))
