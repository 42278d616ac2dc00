"""Invitation-only runs: an invited peer takes part, and no service responds to any other peer."""

import asyncio
import shutil
import stat
import time
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import pytest
import torch
from hivemind.p2p import P2PHandlerError, PeerID
from hivemind.utils import MSGPackSerializer
from hivemind.utils.crypto import RSAPrivateKey

from cotrain.admission.admission import (
    Admission,
    InvitedDHT,
    NotAdmittedError,
    explain_refusal,
)
from cotrain.admission.invitations import InvitationError, load_invitation, make_invitation
from cotrain.admission.revocations import Revocations, revoke_invitations
from cotrain.common.errors import TemporaryError, UserError
from peerstep.local_peer import write_private_key
from tests.support.peers import invite, local_optimizer, local_peer, wait_until
from tests.support.visitor import call_services, list_answered, visit, visitor


@pytest.fixture(scope="module")
def authority() -> RSAPrivateKey:
    return RSAPrivateKey()


def is_refusal(outcome: str) -> bool:
    return "did not present a valid invitation" in outcome or "is revoked" in outcome


def is_closed_stream(outcome: str) -> bool:
    """Tell whether the reason was lost: libp2p may close a stream before the caller has read the whole error."""
    closed = {"StopAsyncIteration()", "BrokenPipeError(32, 'Broken pipe')"}
    return outcome in closed or outcome.startswith("IncompleteReadError('0 bytes read on a total of ")


def assert_refused(*strangers: dict[str, str]) -> None:
    """Assert that no service answered a stranger, and that each service told at least one of them the reason."""
    for outcomes in strangers:
        assert len(outcomes) == 9
        assert list_answered(outcomes) == []
        assert [text for text in outcomes.values() if not is_refusal(text) and not is_closed_stream(text)] == []
    for service in strangers[0]:
        assert any(is_refusal(outcomes[service]) for outcomes in strangers), (service, strangers)


@pytest.mark.peers
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
        assert stat.S_IMODE((tmp_path / "peer" / "invited.key").stat().st_mode) == 0o600
        invited = load_invitation(tmp_path / "organiser.invitation").private_key.get_public_key()
        assert invited.to_bytes() in peer.public_key
        address = str(peer.dht.get_visible_maddrs()[0])
        assert_refused(
            asyncio.run(visit(address)),
            asyncio.run(visit(address, expired.private_key, expired.token)),
            asyncio.run(visit(address, foreign.private_key, foreign.token)),
            asyncio.run(visit(address, RSAPrivateKey(), guest.token)),  # a token observed on the network
            asyncio.run(visit(address, is_silent=True)),
        )
        outcomes = asyncio.run(visit(address, guest.private_key, guest.token))
        assert len(list_answered(outcomes)) == 8, outcomes
        assert outcomes["round_averager.rpc_download_state"] == "StopAsyncIteration()"  # no training state to share


@pytest.mark.peers
def test_refused_peer_is_told_the_reason_at_once(tmp_path, authority):
    """The port answers: that nobody does, and a try again until the timeout, would mislead."""
    for name in ("organiser", "carol"):
        invite(authority, tmp_path / f"{name}.invitation")
    invite(RSAPrivateKey(), tmp_path / "foreign.invitation")
    write_private_key(authority, tmp_path / "authority.key")
    carol = str(tmp_path / "carol.invitation")

    def refusal(name: str, address: str, invitation: str | None) -> str:
        try:
            with local_peer(tmp_path / name, "run", (address,), bootstrap_timeout=3600, invitation=invitation):
                return ""
        except UserError as error:
            assert not isinstance(error, TemporaryError) and "\n" not in str(error)
            return str(error)

    with local_peer(tmp_path / "open", "run") as peer:
        assert "is in a run without invitations" in refusal("carol", str(peer.dht.get_visible_maddrs()[0]), carol)
    with local_peer(tmp_path / "monitor", "run", invitation=str(tmp_path / "organiser.invitation")) as peer:
        address = str(peer.dht.get_visible_maddrs()[0])
        assert "the run needs an --invitation" in refusal("bob", address, None)
        foreign = refusal("foreign", address, str(tmp_path / "foreign.invitation"))
        assert "the invitation is not from the organiser of this run; ask" in foreign
        revoked = {str(load_invitation(tmp_path / "carol.invitation").peer_id)}
        shutil.copy(
            revoke_invitations(revoked, authority, tmp_path / "authority.key"), tmp_path / "monitor/revocations"
        )
        wait_until(lambda: "the invitation is revoked; ask" in refusal("carol", address, carol), 120, "the revocation")


def test_only_the_signed_list_ends_a_peer(two_admissions, authority, monkeypatch):
    """A peer that claims that an invitation is revoked is one that does not answer."""
    alice, bob = two_admissions
    own, dht = alice.invitation.peer_id, SimpleNamespace(admission=alice)

    async def lie(_request: bytes, _peer: PeerID) -> bytes:
        raise P2PHandlerError("InvitationError('the invitation is revoked')")

    async def exchange(answer) -> None:
        await asyncio.gather(alice.ask(Exchange(own, answer), bob.invitation.peer_id))

    asyncio.run(exchange(lie))
    InvitedDHT.check_invitation(dht)
    forged = Revocations().extend({str(own)}, RSAPrivateKey()).content
    asyncio.run(exchange(AsyncMock(return_value=MSGPackSerializer.dumps([b"", forged]))))
    InvitedDHT.check_invitation(dht)
    bob.revocations.adopt(Revocations().extend({str(own)}, authority).content)
    asyncio.run(exchange(bob.answer))
    with pytest.raises(UserError, match="the invitation is revoked; ask the organiser"):
        InvitedDHT.check_invitation(dht)
    monkeypatch.setattr("cotrain.admission.admission.run_time", lambda: bob.invitation.expiration_time)
    with pytest.raises(UserError, match="the invitation has expired; ask the organiser"):
        InvitedDHT.check_invitation(SimpleNamespace(admission=bob))


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("Qm1 did not present a valid invitation: TimeoutError()", None),
        (
            "NotAdmittedError('Qm2 did not present a valid invitation: P2PHandlerError(the invitation has expired)')",
            None,
        ),
        ("NotAdmittedError('Qm2 did not present a valid invitation: protocols not supported')", None),
        (
            "Qm1 did not present a valid invitation: P2PHandlerError('the invitation has expired\x1b[31m')",
            "has expired;",
        ),
    ],
    ids=["no answer in time", "the other's invitation", "another start of this peer", "control characters"],
)
def test_only_what_a_peer_says_of_this_peers_invitation_is_a_refusal(error, reason):
    found = explain_refusal(error, is_invited=True)
    assert found is None if reason is None else reason in found and found.isprintable()


@pytest.mark.peers
def test_peers_pass_on_that_an_invitation_is_revoked(tmp_path, authority, monkeypatch):
    """Revocations spread within one exchange period, also to connected peers, and survive a restart."""
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
            path = revoke_invitations({guest.peer_id.to_base58()}, authority, tmp_path / "authority.key")
            shutil.copy(path, tmp_path / "first" / "revocations")
            deadline = time.monotonic() + 60
            outcomes = {}
            while not outcomes or not all(map(is_refusal, outcomes.values())):
                assert time.monotonic() < deadline, outcomes
                outcomes = await call_services(p2p, address, "run", timeout=5)
            assert_refused(outcomes)
            assert "rpc_ping" in list_answered(await call_services(neighbour, address, "run", timeout=5))

    with local_peer(tmp_path / "first", "run", invitation=organiser) as first:
        address = str(first.dht.get_visible_maddrs()[0])
        with (
            local_peer(tmp_path / "second", "run", (address,), invitation=member) as second,
            local_optimizer(torch.nn.Linear(2, 2), second, 4, run_id="run", target_batch_size=8),
        ):
            asyncio.run(stay(str(second.dht.get_visible_maddrs()[0])))
    with local_peer(tmp_path / "second", "run", invitation=member) as second:
        outcomes = asyncio.run(visit(str(second.dht.get_visible_maddrs()[0]), guest.private_key, guest.token))
        assert "revoked" in outcomes["rpc_ping"]


class Exchange:
    """Fake P2P: passes a request to the Admission of the other process, and counts it."""

    def __init__(self, caller: PeerID, answer):
        self.caller, self.answer, self.num_calls = caller, answer, 0
        self._client = self

    async def call_unary_handler(self, _peer: PeerID, _protocol: str, request: bytes) -> bytes:
        self.num_calls += 1
        await asyncio.sleep(0.01)
        return await self.answer(request, self.caller)


@pytest.fixture
def two_admissions(tmp_path, authority) -> list[Admission]:
    admissions = []
    for name in ("alice", "bob"):
        invite(authority, tmp_path / name)
        (tmp_path / f"{name}-folder").mkdir()
        admissions.append(Admission(load_invitation(tmp_path / name), tmp_path / f"{name}-folder" / "revocations"))
    return admissions


def test_peer_is_asked_once_and_strangers_once_a_second(two_admissions):
    alice, bob = two_admissions

    async def run() -> None:
        to_bob = Exchange(alice.invitation.peer_id, bob.answer)
        await asyncio.gather(*(alice.check(to_bob, bob.invitation.peer_id, is_callee=False) for _ in range(10)))
        await alice.check(to_bob, bob.invitation.peer_id, is_callee=True)
        assert to_bob.num_calls == 1
        stranger = PeerID.from_base58("QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N")
        for _ in range(10):
            with pytest.raises(NotAdmittedError, match="another peer's"):
                await alice.check(to_bob, stranger, is_callee=False)  # presents bob's token
        assert to_bob.num_calls == 2

    asyncio.run(run())


def test_admission_ends_with_the_invitation(two_admissions, monkeypatch):
    alice, bob = two_admissions
    guest = bob.invitation.peer_id
    alice.admit(bob.invitation.token.SerializeToString(), guest)
    asyncio.run(alice.check(None, guest, is_callee=False))
    monkeypatch.setattr("cotrain.admission.admission.time.time", lambda: bob.invitation.expiration_time)
    with pytest.raises(NotAdmittedError):
        asyncio.run(alice.check(None, guest, is_callee=False))


def test_strangers_take_bounded_memory(two_admissions, monkeypatch):
    alice, bob = two_admissions
    with pytest.raises(InvitationError, match="too long"):
        asyncio.run(alice.answer(bytes(Admission.MAX_REQUEST + 1), bob.invitation.peer_id))
    monkeypatch.setattr(Admission, "MAX_PAUSED", 3)
    failing = Exchange(alice.invitation.peer_id, AsyncMock(side_effect=OSError))

    async def refuse_strangers() -> None:
        for number in range(9):
            with pytest.raises(NotAdmittedError):
                await alice.check(failing, PeerID(bytes([number])), is_callee=False)

    asyncio.run(refuse_strangers())
    assert list(alice.paused) == [PeerID(bytes([number])) for number in (6, 7, 8)]


def test_peer_that_is_asked_asks_back_for_the_list(two_admissions, authority):
    """Otherwise two peers that ask each other equally often may never exchange the list in the needed direction."""
    alice, bob = two_admissions
    revoked = make_invitation(authority, "mallory", days=1)
    mallory = revoked.peer_id

    async def run() -> None:
        for admission in two_admissions:
            await admission.serve(Mock(_client=AsyncMock()))
        alice.revocations.adopt(Revocations().extend({str(mallory)}, authority).content)
        to_bob, to_alice = (
            Exchange(caller.invitation.peer_id, callee.answer) for caller, callee in ((alice, bob), (bob, alice))
        )
        await alice.check(to_bob, bob.invitation.peer_id, is_callee=True)
        assert mallory not in bob.revocations.newest
        await bob.check(to_alice, alice.invitation.peer_id, is_callee=False)
        await asyncio.gather(*bob.questions.values())
        assert mallory in bob.revocations.newest
        with pytest.raises(NotAdmittedError, match="is revoked"):
            bob.admitted[mallory] = bob.admitted[alice.invitation.peer_id]
            await bob.check(to_alice, mallory, is_callee=False)
        token, newest = revoked.token.SerializeToString(), bob.revocations.newest
        assert await bob.answer(MSGPackSerializer.dumps([token, 0]), mallory) == MSGPackSerializer.dumps(
            [b"", newest.content]
        )
        with pytest.raises(InvitationError, match="is revoked"):
            await bob.answer(MSGPackSerializer.dumps([token, newest.serial]), mallory)

    asyncio.run(run())
