"""Admission: in an invitation-only run, each service of a peer communicates with invited peers only.

`InvitedP2P` checks the other end of each call, in both directions, below the DHT and the averagers. hivemind's
authorizer covers the DHT only (https://github.com/learning-at-home/hivemind/issues/253). libp2p authenticates the
remote peer ID; the first call between a process and a peer requests its token, see `cotrain.admission.invitations`.
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from pathlib import Path

from google.protobuf.message import Message
from hivemind.p2p import P2P, P2PContext, P2PDaemonError, PeerID
from hivemind.proto.auth_pb2 import AccessToken
from hivemind.proto.p2pd_pb2 import RPCError
from hivemind.utils import MSGPackSerializer, get_logger

from cotrain.admission.invitations import Invitation, InvitationError, check_token
from cotrain.admission.revocations import RevocationStore
from cotrain.common.errors import UserError
from peerstep.peer.clock import run_time
from peerstep.peer.node import RelayedP2P, SafeDHT

logger = get_logger(__name__)


class NotAdmittedError(P2PDaemonError):
    """Raised if the other end of a call has no valid invitation. hivemind treats it as a peer that does not answer."""


class Admission:
    """Record of the peers that have shown a valid invitation. Each process of a peer has a separate copy."""

    HANDSHAKE = "collaboration.exchange_invitations.v1"
    TIMEOUT = 10.0  # seconds for the answer
    PAUSE = 1.0  # seconds for which calls of a peer are refused at once after the peer has failed to answer
    REFRESH_PERIOD = 30.0  # seconds after which a peer is asked again, in the background, for its revocation list
    MAX_REQUEST = 4096  # bytes; a token has some 800
    MAX_PAUSED = 1000  # peers; bounded because peer IDs cost nothing

    def __init__(self, invitation: Invitation, revocations: Path):
        """Admit the peers whose tokens the authority of this peer's invitation has signed.

        :param revocations: file of the newest revocation list that this peer has received
        """
        self.invitation = invitation
        self.revocations = RevocationStore(invitation.authority, revocations)
        # Of peers that have shown a valid token, so bounded by the number of invitations:
        self.admitted: dict[PeerID, float] = {}  # end of the invitation (time.time)
        self.usernames: dict[PeerID, str] = {}  # names of the invitations
        self._ask_at: dict[PeerID, float] = {}  # when to ask again (time.monotonic)
        self.paused: dict[PeerID, tuple[float, str]] = {}  # end (time.monotonic), and the reason
        self.questions: dict[PeerID, asyncio.Task] = {}
        self._is_dht_process = False

    async def serve(self, p2p: P2P) -> None:
        """Answer peers that request this peer's token. The DHT process does so for all processes of the peer."""
        self._is_dht_process = self.revocations.writes = True
        self.revocations.refresh()
        await p2p._client.add_unary_handler(self.HANDSHAKE, self.answer)

    async def check(self, p2p: P2P, peer_id: PeerID, is_callee: bool) -> None:
        """Raise NotAdmittedError if a caller or (`is_callee`) a peer about to be called has no valid invitation."""
        if time.time() >= self.admitted.get(peer_id, 0.0):
            until, reason = self.paused.get(peer_id, (float("-inf"), None))
            if is_callee or time.monotonic() >= until:
                reason = await asyncio.shield(self.ask(p2p, peer_id))
            if reason is not None:
                raise NotAdmittedError(reason)
        # A peer that has only asked this one may have a newer revocation list.
        elif self._is_dht_process and time.monotonic() > self._ask_at.get(peer_id, 0.0):
            self.ask(p2p, peer_id)
        self.revocations.refresh()
        if peer_id in self.revocations.newest:
            raise NotAdmittedError(f"the invitation of {peer_id} is revoked")

    def ask(self, p2p: P2P, peer_id: PeerID) -> asyncio.Task:
        """Exchange tokens with a peer, at most once at a time. The task returns a reason not to admit it, or None."""
        if peer_id not in self.questions:
            if peer_id in self.admitted:
                self._ask_at[peer_id] = time.monotonic() + self.REFRESH_PERIOD
            task = self.questions[peer_id] = asyncio.create_task(self.exchange(p2p, peer_id))
            task.add_done_callback(lambda _: self.questions.pop(peer_id))
        return self.questions[peer_id]

    async def exchange(self, p2p: P2P, peer_id: PeerID) -> str | None:
        request = MSGPackSerializer.dumps([self.invitation.token.SerializeToString(), self.revocations.newest.serial])
        try:
            call = p2p._client.call_unary_handler(peer_id, self.HANDSHAKE, request)
            token, revocations = self._unpack(await asyncio.wait_for(call, self.TIMEOUT), bytes, bytes)
            if revocations:
                with suppress(InvitationError):  # an invited peer may send an invalid list
                    self.revocations.adopt(revocations)
            self.admit(token, peer_id)
            self._ask_at[peer_id] = time.monotonic() + self.REFRESH_PERIOD
        except Exception as error:
            reason = f"{peer_id} did not present a valid invitation: {error!r}"
            logger.debug(reason)
            self._pause(peer_id, reason)
            return reason
        return None

    async def answer(self, request: bytes, peer_id: PeerID) -> bytes:
        """Answer a peer that shows its token and requests this peer's token."""
        if len(request) > self.MAX_REQUEST:
            raise InvitationError("the request is too long")
        token, known_serial = self._unpack(request, bytes, int)
        self.revocations.refresh()
        newest = self.revocations.newest.content if self.revocations.newest.serial > known_serial else b""
        if peer_id in self.revocations.newest:
            if newest:
                return MSGPackSerializer.dumps([b"", newest])  # which tells the peer, signed by the organiser
            raise InvitationError("the invitation is revoked")
        self.admit(token, peer_id)
        return MSGPackSerializer.dumps([self.invitation.token.SerializeToString(), newest])

    def admit(self, token: bytes, peer_id: PeerID) -> None:
        parsed = AccessToken.FromString(token)
        self.admitted[peer_id] = check_token(parsed, self.invitation.authority, peer_id)
        self.usernames[peer_id] = parsed.username

    def _pause(self, peer_id: PeerID, reason: str) -> None:
        self.paused.pop(peer_id, None)
        if len(self.paused) >= self.MAX_PAUSED:
            self.paused.pop(next(iter(self.paused)))  # the oldest
        self.paused[peer_id] = (time.monotonic() + self.PAUSE, reason)

    @staticmethod
    def _unpack(message: bytes, *types: type) -> list:
        values = MSGPackSerializer.loads(message)
        if not isinstance(values, list) or [type(value) for value in values] != list(types):
            raise InvitationError("malformed message")
        return values


def explain_refusal(error: str, is_invited: bool) -> str | None:
    """Return what the error of a call says of this peer's invitation, if it has one, and what to do."""
    if not is_invited:
        is_closed = "did not present a valid invitation" in error
        return "the run needs an --invitation: ask its organiser for one" if is_closed else None
    if re.match(r"\w+ did not present .* protocols not supported", error):
        return "it is in a run without invitations: drop --invitation, or ask for the address of your run"
    found = re.match(r"\w+ did not present .* P2PHandlerError\(.*(the invitation [a-z ]+)", error)
    return found and f"{found[1]}; ask the organiser of the run for another --invitation"


class InvitedP2P(RelayedP2P):
    """hivemind's P2P, restricted to calls from and to invited peers."""

    admission: Admission

    @classmethod
    async def create(cls, *args, admission: Admission | None = None, **kwargs) -> "InvitedP2P":
        """Start a libp2p daemon, as in hivemind, and show this peer's invitation on request."""
        p2p = await super().create(*args, **kwargs)
        if admission is not None:  # the daemon with which hivemind checks an identity has none, and makes no calls
            p2p.admission = admission
            await admission.serve(p2p)
        return p2p

    async def _add_protobuf_unary_handler(
        self, handle_name: str, handler: Callable[[Message, P2PContext], Awaitable[Message]], *args, **kwargs
    ) -> None:
        async def handle(request: Message, context: P2PContext) -> Message:
            await self.admission.check(self, context.remote_id, is_callee=False)
            return await handler(request, context)

        await super()._add_protobuf_unary_handler(handle_name, handle, *args, **kwargs)

    async def add_binary_stream_handler(self, name: str, handler: Callable, *args, **kwargs) -> None:
        """Register a handler, or a protobuf handler that takes or returns a stream."""

        async def handle(info, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await self.admission.check(self, info.peer_id, is_callee=False)
            except NotAdmittedError as error:
                with closing(writer), suppress(OSError):
                    await P2P.send_protobuf(RPCError(message=str(error)), writer)
                return
            await handler(info, reader, writer)

        await super().add_binary_stream_handler(name, handle, *args, **kwargs)

    async def _call_unary_protobuf_handler(self, peer_id: PeerID, *args) -> Message:
        await self.admission.check(self, peer_id, is_callee=True)
        return await super()._call_unary_protobuf_handler(peer_id, *args)

    async def call_binary_stream_handler(self, peer_id: PeerID, handler_name: str):
        """Call a handler, or a protobuf handler that takes or returns a stream."""
        await self.admission.check(self, peer_id, is_callee=True)
        return await super().call_binary_stream_handler(peer_id, handler_name)


class InvitedDHT(SafeDHT):
    """DHT peer whose P2P, with its replicas in other processes, communicates with invited peers only."""

    p2p_class, is_open = InvitedP2P, False

    def __init__(self, *args, admission: Admission, **kwargs):
        self.admission = admission
        super().__init__(*args, admission=admission, **kwargs)  # passed on to InvitedP2P.create

    def check_invitation(self) -> None:
        """Raise UserError if this peer's invitation has expired, or the organiser has signed that it is revoked."""
        self.admission.revocations.refresh()
        is_revoked = self.admission.invitation.peer_id in self.admission.revocations.newest
        if is_revoked or self.admission.invitation.expiration_time <= run_time():
            fault = "is revoked" if is_revoked else "has expired"
            raise UserError(f"--invitation: the invitation {fault}; ask the organiser of the run for another")

    def describe(self, peer_id: PeerID) -> str:
        """Return a peer's ID with the name of its invitation, which can be revoked."""
        name = self.admission.usernames.get(peer_id)
        return str(peer_id) if name is None else f"{name!r} ({peer_id})"

    async def replicate_p2p(self) -> InvitedP2P:
        p2p = await super().replicate_p2p()
        p2p.admission = self.admission
        return p2p
