"""Requests of other peers to join this peer's group. Each is held until the group is formed, or has another leader."""

import asyncio
import time
from dataclasses import dataclass
from typing import AsyncIterator  # noqa: UP035  hivemind does not recognize that of collections.abc

from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import TimedStorage

from peerstep.peer.clock import run_time
from peerstep.rounds.claims import KEY_BYTES, SIGNATURE_BYTES, TAG_BYTES, parse_claims
from peerstep.rounds.conduct import Conduct
from peerstep.rounds.known_peers import KNOWN_SECONDS, MAX_HELD_REQUESTS, MAX_STRANGERS, STALE_SECONDS, KnownPeers
from peerstep.rounds.relay import DIGEST_BYTES, Relay

MAX_REQUEST_BYTES = 1024  # of 1,024 that are held
STRANGER_SECONDS = 5.0  # for which a stranger's requests count, from the first one; its report is read meanwhile
MAX_STEP_DIGITS = 18  # of a step in a request


@dataclass
class Request:
    """Request of another peer to join this peer's group."""

    step: int
    entry: bytes  # signed claims, which `refuse` has checked
    answer: asyncio.Future  # of what the leader tells it, of the leader to ask instead, or of None (no group)
    due: asyncio.Future  # set once the step is due at this peer, which leads


def parse_step(key: str) -> int | None:
    """Return the global step that a request names as its group's key; None if it names none."""
    return int(key) if len(key) <= MAX_STEP_DIGITS and key.isascii() and key.isdigit() else None


class JoinRequests:
    """Holds and answers the requests of other peers."""

    def __init__(self, schema_hash: bytes, client_mode: bool, known: KnownPeers, conduct: Conduct):
        self._schema_hash, self._client_mode, self.known, self.conduct = schema_hash, client_mode, known, conduct
        self.relay = Relay()
        self.finished_step = -1  # newest step for which this peer searches no group any more
        self.following: tuple[int, PeerID] | None = None  # step, and the leader that has accepted this peer
        self.held: dict[PeerID, Request] = {}
        # Times of the first requests of peers, for KNOWN_SECONDS
        self._first_asked: TimedStorage[PeerID, float] = TimedStorage(maxsize=MAX_HELD_REQUESTS)

    def finish(self, step: int) -> None:
        """Refuse requests for step `step` and earlier steps from now on. `step` may be lower than before."""
        self.finished_step = step
        for request in self.held.values():
            if request.step <= step and not request.answer.done():
                request.answer.set_result(None)

    @property
    def next_step(self) -> int:
        """The next step for which another peer asks this one for a group; -1 if none does.

        A stranger is a peer of which this one has read no report. It holds up a lone trainer for STRANGER_SECONDS.
        """
        now = time.monotonic()
        new = {peer_id for peer_id, asked in self._first_asked.items() if now < asked.value + STRANGER_SECONDS}
        counted = self.held.keys() & {*new, *self.known.public_keys}
        return min((self.held[peer_id].step for peer_id in counted), default=-1)

    def for_step(self, step: int) -> dict[PeerID, Request]:
        """Return the requests for a step. Those of strangers wait until this peer has read their report."""
        joined = {}
        for peer_id, request in self.held.items():
            if request.step != step or request.answer.done() or self.conduct.is_banned(peer_id):
                continue
            asked_at = parse_claims(request.entry[:-SIGNATURE_BYTES]).asked_at
            # Half of the time: the members' clocks may differ from this one
            is_fresh = self.known.is_fresh(self.known.peer_id, peer_id, asked_at, STALE_SECONDS / 2)
            if is_fresh and peer_id in self.known.public_keys:
                joined[peer_id] = request
        return joined

    def refuse(self, request: averaging_pb2.JoinRequest, peer_id: PeerID) -> int | None:
        """Return the code to refuse a request with; None to accept it."""
        step = parse_step(request.group_key)
        if step is None:
            return averaging_pb2.BAD_GROUP_KEY
        if request.schema_hash != self._schema_hash:
            return averaging_pb2.BAD_SCHEMA_HASH
        is_large = request.ByteSize() > MAX_REQUEST_BYTES  # with unknown fields; it is kept while it waits
        if is_large or self.conduct.is_banned(peer_id) or self._client_mode or peer_id == self.known.peer_id:
            return averaging_pb2.PROTOCOL_VIOLATION
        entry, key = request.gather[:-KEY_BYTES], request.gather[-KEY_BYTES:]
        try:
            parse_claims(entry[:-SIGNATURE_BYTES])
        except ValueError:
            return averaging_pb2.PROTOCOL_VIOLATION  # it would make the round fail at all members
        if step <= self.finished_step:
            return averaging_pb2.NOT_LOOKING_FOR_GROUP
        if not self.known.has_signed(peer_id, step, self.known.peer_id, entry, key):
            return averaging_pb2.PROTOCOL_VIOLATION
        is_known = peer_id in self.held or peer_id in self.known.public_keys
        if len(self.held) >= MAX_HELD_REQUESTS and not is_known:
            return averaging_pb2.GROUP_IS_FULL
        return None

    async def answer(
        self, request: averaging_pb2.JoinRequest, peer_id: PeerID
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        """Answer a request to join the group of a step: with the group, or with the leader that this peer follows.

        A request with a digest is one for the list of a group: this peer may have to wait for it, too. With tags of
        members, it is one for their keys.
        """
        is_small = request.ByteSize() <= MAX_REQUEST_BYTES  # it is kept while it waits
        is_for_list = DIGEST_BYTES <= len(request.gather) <= DIGEST_BYTES + MAX_STRANGERS * TAG_BYTES
        if is_for_list and is_small and peer_id in self.known.public_keys:
            yield averaging_pb2.MessageFromLeader(code=averaging_pb2.ACCEPTED)
            yield await self.relay.answer(request.gather, peer_id)
            return
        code = self.refuse(request, peer_id)
        if code is not None:
            yield averaging_pb2.MessageFromLeader(code=code)
            return
        step = int(request.group_key)  # as `refuse` has checked
        loop = asyncio.get_running_loop()
        entry = Request(step, request.gather[:-KEY_BYTES], loop.create_future(), loop.create_future())
        if (before := self.held.get(peer_id)) is not None and not before.answer.done():
            before.answer.set_result(None)
        self.held[peer_id] = entry
        if peer_id not in self._first_asked:
            self._first_asked.store(peer_id, time.monotonic(), run_time() + KNOWN_SECONDS)
        if self.following is not None and self.following[0] == step:
            entry.answer.set_result(self.following[1])
        try:
            if not entry.answer.done():
                yield averaging_pb2.MessageFromLeader(code=averaging_pb2.ACCEPTED)
            await asyncio.wait({entry.answer, entry.due}, return_when=asyncio.FIRST_COMPLETED)
            if not entry.answer.done():
                yield averaging_pb2.MessageFromLeader(code=averaging_pb2.ACCEPTED)
            answer = await entry.answer
            if isinstance(answer, averaging_pb2.MessageFromLeader):
                yield answer
            else:
                code = averaging_pb2.NOT_A_LEADER if answer else averaging_pb2.GROUP_DISBANDED
                suggested = answer.to_bytes() if answer else b""
                yield averaging_pb2.MessageFromLeader(code=code, suggested_leader=suggested)
        finally:
            if self.held.get(peer_id) is entry:
                del self.held[peer_id]
