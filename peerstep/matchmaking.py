"""Matchmaking for the round of a global step. Each step has one leader, derived from the progress reports.

Every peer ranks the roster of a step in the same order. The peer asks the first candidate to join its group, and asks
the next one only if the first cannot be reached. Each step has a separate key, so peers of different steps never meet.
A peer that is asked before it has reached the step holds the request until then. The leader begins when the step is
due and all peers of the roster have asked, or `min_matchmaking_time` after the step was due.
hivemind/averaging/matchmaking.py knows neither the step nor the peers.
"""

import asyncio
import hashlib
import itertools
import math
import os
import struct
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import AsyncIterator  # noqa: UP035  hivemind does not recognize that of collections.abc

from hivemind.averaging.control import AveragingStage, StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.matchmaking import Matchmaking
from hivemind.p2p import P2PContext, P2PDaemonError, P2PHandlerError, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MSGPackSerializer, TimedStorage, get_logger

from peerstep.clock import run_time
from peerstep.progress_record import MAX_LAG

logger = get_logger(__name__)

_CLAIMS = struct.Struct("<dd?")
MAX_HELD_REQUESTS, MAX_REQUEST_BYTES = 1024, 1024  # 1 MiB in all; the ID of a run has at most 400 bytes
LEADER_MARGIN = 2.0  # seconds after which a leader that should have begun is abandoned
RETRY_SECONDS = 1.0  # before an unreachable leader is asked again
POLL_SECONDS = 0.05  # between two looks at who has asked, whether the step is due, or an answer has come
KNOWN_SECONDS = 180.0  # for which a peer that was in a roster is no stranger; its report lives as long
MAX_ABSENCES = 2  # consecutive rounds that a peer may miss before leaders stop waiting for it
MAX_SILENCES, SPARE_SECONDS = 2, 600.0  # rounds after which a silent reducer gets no share, and for how long
MAX_BANDWIDTH = 1e9  # bound on a member's claim; only ratios matter
MAX_STEP_DIGITS = 18  # of a step in a request
NONCE_BYTES = 8  # of the ID of a group


class RoundControl(StepControl):
    """Handle of the round of a global step. The averager's process receives a copy, and `step` beside it."""

    step: int  # hivemind pickles a handle without further attributes

    @property
    def triggered(self) -> bool:
        """Whether the averager may begin. hivemind's `__del__` raises for a round that no averager has accepted."""
        return self._trigger is None or super().triggered

    @property
    def has_group(self) -> bool:
        """Whether matchmaking is done and the round waits for its trigger."""
        return self.stage == AveragingStage.AWAITING_TRIGGER and not self.done()

    def call_off(self) -> None:
        """Cancel the round unless it has ended. hivemind's error if it ends at the same moment is suppressed."""
        with suppress(Exception):
            if not self.done():
                self.cancel()
            elif self._trigger is not None and not self._trigger.done():
                self._trigger.cancel()  # it has timed out: hivemind would warn that other peers may wait for it


@dataclass(frozen=True)
class Claims:
    """What a peer says of itself when it joins a group."""

    bandwidth: float  # Mbit/s; 0: it reduces nothing, as a peer in client mode
    distance: float = 0.0  # updates that its parameters lack, see CollaborativeOptimizer
    is_settling: bool = False  # whether its optimizer statistics lack updates that its parameters have

    def pack(self) -> bytes:
        """Return the 17 bytes of a request, see `parse_claims`."""
        return _CLAIMS.pack(self.bandwidth, self.distance, self.is_settling)


@dataclass(frozen=True)
class RosterEntry:
    """A peer that may take part in the round of a step."""

    peer_id: PeerID
    is_client: bool  # it accepts no connections, and so cannot lead
    is_established: bool  # it has completed a step of the run, so that other peers know it
    is_away: bool = False  # it says that nobody is to wait for it; it may ask nevertheless


@dataclass
class Search:
    """State of this peer's search for the group of one step."""

    control: RoundControl
    leader: PeerID | None = None  # that has accepted this peer
    failures: dict[PeerID, tuple[float, str]] = field(default_factory=dict)  # leader -> time (`monotonic`) and reason
    given_up: set[PeerID] = field(default_factory=set)  # leaders that accepted this peer and did not begin
    due_since: float = math.inf  # `time.monotonic`

    def seconds_due(self) -> float:
        """Return the seconds since the step is due at this peer, as this search has noticed; -inf before."""
        if self.control.triggered:
            self.due_since = min(self.due_since, time.monotonic())
        return time.monotonic() - self.due_since


@dataclass
class _Request:
    """Request of another peer to join this peer's group."""

    step: int
    claims: Claims
    answer: asyncio.Future  # of the group, of the leader to ask instead, or of None (no group)


def rank(step: int, peer_id: PeerID) -> bytes:
    """Return the sort key of a peer as leader of a step: the same at all peers, different for each step."""
    return hashlib.sha256(struct.pack("q", step) + peer_id.to_bytes()).digest()


def parse_step(key: str) -> int | None:
    """Return the global step that a request names as its group's key; None if it names none."""
    return int(key) if len(key) <= MAX_STEP_DIGITS and key.isascii() and key.isdigit() else None


def make_group_id(nonce: bytes, step: int, peer_ids: Sequence[PeerID], gathered: Sequence[bytes]) -> bytes:
    """Return the ID of a group, which differs if the leader sends two members different lists or claims."""
    content = [nonce, step, *(peer_id.to_bytes() for peer_id in peer_ids), *gathered]
    return nonce + hashlib.sha256(MSGPackSerializer.dumps(content)).digest()


def parse_claims(gathered: bytes) -> Claims:
    """Return what a member claims; ValueError if it is malformed."""
    try:
        claims = Claims(*_CLAIMS.unpack(gathered))
    except struct.error as error:
        raise ValueError(f"malformed claims: {error}") from None
    if not (0 <= claims.bandwidth <= MAX_BANDWIDTH and 0 <= claims.distance <= MAX_LAG):
        raise ValueError("claims out of range")
    return claims


def _read_peer_id(content: bytes) -> PeerID | None:
    """Return a peer ID that another peer has sent; None if it has no possible length, see patches.py."""
    with suppress(ValueError):
        return PeerID(content) if content else None


class StepMatchmaking(Matchmaking):
    """Finds the group of a global step. Runs in the averager's process."""

    peer_id: PeerID

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.roster: dict[PeerID, RosterEntry] = {}
        self.finished_step = -1  # newest step for which this peer searches no group any more
        self.missed: dict[PeerID, str] = {}  # peers of the roster that are not in the last group, and why
        self._known: dict[PeerID, float] = {}  # peers of the rosters of KNOWN_SECONDS -> time.monotonic
        self._absences: Counter[PeerID] = Counter()  # consecutive rounds that a peer has missed
        self._requests: dict[PeerID, _Request] = {}
        self._search: Search | None = None
        self._banned: TimedStorage[PeerID, None] = TimedStorage()
        self._silences: Counter[PeerID] = Counter()  # consecutive rounds in which a reducer answered nothing
        self._spared: TimedStorage[PeerID, None] = TimedStorage()  # silent members

    # Input from the main process

    def set_roster(self, entries: Iterable[RosterEntry]) -> None:
        """Replace the peers that may take part in the next round, including this peer."""
        now, before = time.monotonic(), self.roster
        self.roster = {entry.peer_id: entry for entry in entries}
        self._known |= dict.fromkeys([*before, *self.roster], now)
        self._known = {peer_id: seen for peer_id, seen in self._known.items() if now < seen + KNOWN_SECONDS}
        self._absences = Counter({peer_id: n for peer_id, n in self._absences.items() if peer_id in self._known})

    def finish(self, step: int) -> None:
        """Refuse requests for step `step` and earlier steps from now on. `step` may be lower than before."""
        self.finished_step = step
        for request in self._requests.values():
            if request.step <= step and not request.answer.done():
                request.answer.set_result(None)

    def ban(self, peer_id: PeerID, until: float) -> None:
        """Form no group with a peer before `until` (`run_time`)."""
        self._banned.store(peer_id, None, until)

    def record_silence(self, silent: Collection[PeerID], members: Collection[PeerID]) -> None:
        """Record the reducers of a round that have answered nothing.

        For a while, this peer does not follow those that were silent repeatedly, and as a leader gives them no share.
        """
        for peer_id in members:
            self._silences[peer_id] = self._silences[peer_id] + 1 if peer_id in silent else 0
            if self._silences[peer_id] >= MAX_SILENCES:
                self._spared.store(peer_id, None, run_time() + SPARE_SECONDS)
        self._silences += Counter()  # drops those of 0

    @property
    def requested_step(self) -> int:
        """The next step for which another peer asks this one for a group; -1 if none does."""
        return min((request.step for request in self._requests.values()), default=-1)

    # Search for a group

    async def look_for_group(self, control: RoundControl) -> GroupInfo:
        """Find the group of a step. Runs until a group is found; cancel it to give up."""
        async with self.lock_looking_for_group:
            search = self._search = Search(control)
            try:
                while True:
                    leader, group = self._choose_leader(search), None
                    if leader == self.peer_id:
                        group = self._lead(search)
                    elif leader is not None:
                        group = await self._follow(search, leader)
                    if group is not None:
                        self._on_group(group, search)
                        return group
                    await asyncio.sleep(POLL_SECONDS)
            finally:
                self._search = None

    def _on_group(self, group: GroupInfo, search: Search) -> None:
        present = {peer_id for peer_id, entry in self.roster.items() if not entry.is_away}
        missed = present - {*group.peer_ids, self.peer_id}
        reasons = {peer_id: reason for peer_id, (_, reason) in search.failures.items()}
        reasons |= {peer_id: "banned" for peer_id in missed if peer_id in self._banned}
        self.missed = {peer_id: reasons.get(peer_id, "did not ask to join") for peer_id in missed}
        self._absences.update(missed)
        for peer_id in group.peer_ids:
            self._absences.pop(peer_id, None)

    def _candidates(self, search: Search) -> list[PeerID]:
        """Return the peers that may lead, best first. Peers new to the run may lead only if there are no others."""
        nodes = [
            entry
            for entry in self.roster.values()
            if not (entry.is_client or entry.peer_id in self._banned or entry.peer_id in self._spared)
        ]
        established = [entry for entry in nodes if entry.is_established and not entry.is_away]
        step = search.control.step
        return sorted((entry.peer_id for entry in established or nodes), key=lambda peer_id: rank(step, peer_id))

    def _choose_leader(self, search: Search) -> PeerID | None:
        """Return the best candidate that has not failed to answer; None if there is none at the moment.

        Candidates that have failed are asked again after RETRY_SECONDS, unless other peers wait for this one to begin.
        A leader that no peer has joined asks the other candidates: they may have formed a group without it.
        """
        joined = self._joined(search)
        candidates = self._candidates(search)
        candidates = [peer_id for peer_id in candidates if peer_id not in search.given_up] or candidates
        if search.seconds_due() >= RETRY_SECONDS and not joined and self.peer_id in candidates:
            candidates.remove(self.peer_id)
        better = list(itertools.takewhile(lambda peer_id: peer_id != self.peer_id, candidates))
        for peer_id in better:
            if peer_id not in search.failures:
                return peer_id
        failed = min(better, key=lambda peer_id: search.failures[peer_id], default=None)
        if failed is not None and not joined and time.monotonic() >= search.failures[failed][0] + RETRY_SECONDS:
            return failed
        return None if self.client_mode else self.peer_id

    def _lead(self, search: Search) -> GroupInfo | None:
        """Form the group if the step is due, and all have asked or had the time for it; None if not."""
        joined = self._joined(search)
        is_complete = not self._expected(search) - joined.keys()
        seconds = 0.0 if is_complete else self.min_matchmaking_time
        return self._assemble(search, joined) if joined and search.seconds_due() >= seconds else None

    def _joined(self, search: Search) -> dict[PeerID, _Request]:
        return {
            peer_id: request
            for peer_id, request in self._requests.items()
            if request.step == search.control.step and not request.answer.done() and peer_id not in self._banned
        }

    def _expected(self, search: Search) -> set[PeerID]:
        """Return the peers of the roster that the leader waits for."""
        return {
            peer_id
            for peer_id, entry in self.roster.items()
            if peer_id != self.peer_id
            and not entry.is_away
            and peer_id not in self._banned
            and peer_id not in search.failures
            and self._absences[peer_id] < MAX_ABSENCES
        }

    def _assemble(self, search: Search, joined: dict[PeerID, _Request]) -> GroupInfo:
        """Form groups of equal size, of at most `target_group_size` peers, and return this peer's."""
        step = search.control.step
        # Strangers, whose report this peer has not read, are let in only if nobody else has asked: keys cost nothing.
        if known := self._known.keys() & joined.keys():
            for stranger in joined.keys() - known:
                joined.pop(stranger).answer.set_result(None)
        claims = {peer_id: request.claims for peer_id, request in joined.items()}
        claims |= {peer_id: replace(claims[peer_id], bandwidth=0.0) for peer_id in joined if peer_id in self._spared}
        claims[self.peer_id] = parse_claims(search.control.data_for_gather)
        # Those that reduce nothing, such as clients, come last: each group has a peer that does
        dealt = sorted(claims, key=lambda peer_id: (claims[peer_id].bandwidth == 0, rank(step, peer_id)))
        num_reducers = sum(of_peer.bandwidth > 0 for of_peer in claims.values())
        num_groups = min(num_reducers, math.ceil(len(dealt) / (self.target_group_size or len(dealt))))
        groups, nonce = [], os.urandom(NONCE_BYTES)  # the IDs begin alike: one mark of the step's history
        for index in range(num_groups):
            members = tuple(dealt[index::num_groups])
            gathered = tuple(claims[peer_id].pack() for peer_id in members)
            group = GroupInfo(make_group_id(nonce, step, members, gathered), members, gathered)
            for peer_id in members:
                if peer_id != self.peer_id:
                    joined[peer_id].answer.set_result(group)
            groups.append(group)
        return next(group for group in groups if self.peer_id in group)

    async def _follow(self, search: Search, leader: PeerID, redirected: bool = False) -> GroupInfo | None:
        """Ask a peer to lead and wait until it begins; None if it does not."""
        control = search.control
        request = averaging_pb2.JoinRequest(
            schema_hash=self.schema_hash,
            expiration=control.deadline,
            gather=control.data_for_gather,
            group_key=str(control.step),
        )
        try:
            stub = self._servicer_type.get_stub(self._p2p, leader, namespace=self._prefix)
            async with asyncio.timeout(self.request_timeout):
                stream = await stub.rpc_join_group(request)
            async with aclosing(stream):
                async with asyncio.timeout(self.request_timeout):
                    message = await anext(stream)
                if message.code == averaging_pb2.ACCEPTED:
                    joined = self._joined(search)
                    if leader in joined and rank(control.step, self.peer_id) < rank(control.step, leader):
                        return None  # the peers have asked each other: the better candidate leads
                    search.leader = leader
                    for peer_id, asked in joined.items():
                        asked.answer.set_result(None if peer_id == leader else leader)
                    message = await self._await_begin(stream, search, leader)
        except (TimeoutError, StopAsyncIteration, P2PDaemonError, P2PHandlerError, OSError) as error:
            logger.debug(f"{leader} does not lead step {control.step}: {error!r}")
            search.failures[leader] = time.monotonic(), "could not be reached"
            return None
        finally:
            search.leader = None
        if message.code == averaging_pb2.BEGIN_ALLREDUCE:
            if (group := self._parse_group(message, control.step)) is None:
                logger.warning(f"{leader} formed an invalid group, such as one without this peer")
                search.given_up.add(leader)
            return group
        search.failures[leader] = time.monotonic(), averaging_pb2.MessageCode.Name(message.code)
        other = _read_peer_id(message.suggested_leader)
        if redirected or other is None or other in {self.peer_id, leader, *search.given_up} or other in self._banned:
            return None
        return await self._follow(search, other, redirected=True)

    async def _await_begin(
        self, stream: AsyncIterator[averaging_pb2.MessageFromLeader], search: Search, leader: PeerID
    ) -> averaging_pb2.MessageFromLeader:
        """Wait for the leader's next message; TimeoutError long after the step was due: the leader may be frozen."""
        message, until = asyncio.ensure_future(anext(stream)), math.inf
        try:
            while not message.done():
                if time.monotonic() >= until:
                    search.given_up.add(leader)
                    raise TimeoutError
                if search.seconds_due() >= 0:
                    until = min(until, time.monotonic() + self.min_matchmaking_time + LEADER_MARGIN)
                await asyncio.wait({message}, timeout=POLL_SECONDS)
            return message.result()
        finally:
            message.cancel()
            # A stream cannot be closed while something waits for its next message.
            await asyncio.gather(message, return_exceptions=True)

    def _parse_group(self, message: averaging_pb2.MessageFromLeader, step: int) -> GroupInfo | None:
        content, gathered = message.ordered_peer_ids, tuple(message.gathered)
        if len(content) != len(gathered) or len(content) > MAX_HELD_REQUESTS + 1:  # in 4 MiB, there are two million
            return None
        peer_ids = tuple(peer_id for peer_id in map(_read_peer_id, content) if peer_id is not None)
        if self.peer_id not in peer_ids or len(set(peer_ids)) < len(content):
            return None
        with suppress(ValueError):
            for claims in gathered:
                parse_claims(claims)
            if message.group_id == make_group_id(message.group_id[:NONCE_BYTES], step, peer_ids, gathered):
                return GroupInfo(message.group_id, peer_ids, gathered)
        return None

    # Answers to other peers

    def _refuse(self, request: averaging_pb2.JoinRequest, peer_id: PeerID) -> int | None:
        """Return the code to refuse a request with; None to accept it."""
        step = parse_step(request.group_key)
        if step is None:
            return averaging_pb2.BAD_GROUP_KEY
        if request.schema_hash != self.schema_hash:
            return averaging_pb2.BAD_SCHEMA_HASH
        is_large = request.ByteSize() > MAX_REQUEST_BYTES  # with unknown fields; it is kept while it waits
        if is_large or peer_id in self._banned or self.client_mode or peer_id == self.peer_id:
            return averaging_pb2.PROTOCOL_VIOLATION
        try:
            parse_claims(request.gather)
        except ValueError:
            return averaging_pb2.PROTOCOL_VIOLATION  # it would make the round fail at all members
        if step <= self.finished_step:
            return averaging_pb2.NOT_LOOKING_FOR_GROUP
        if len(self._requests) >= MAX_HELD_REQUESTS and peer_id not in self._requests.keys() | self._known.keys():
            return averaging_pb2.GROUP_IS_FULL
        return None

    async def rpc_join_group(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        """Answer a request to join the group of a step: with the group, or with the leader that this peer follows."""
        peer_id = context.remote_id
        code = self._refuse(request, peer_id)
        if code is not None:
            yield averaging_pb2.MessageFromLeader(code=code)
            return
        step = int(request.group_key)  # as `_refuse` has checked
        entry = _Request(step, parse_claims(request.gather), asyncio.get_running_loop().create_future())
        if (before := self._requests.get(peer_id)) is not None and not before.answer.done():
            before.answer.set_result(None)
        self._requests[peer_id] = entry
        search = self._search
        if search is not None and search.leader is not None and search.control.step == step:
            entry.answer.set_result(search.leader)
        try:
            if not entry.answer.done():
                yield averaging_pb2.MessageFromLeader(code=averaging_pb2.ACCEPTED)
            answer = await entry.answer
            if isinstance(answer, GroupInfo):
                yield averaging_pb2.MessageFromLeader(
                    code=averaging_pb2.BEGIN_ALLREDUCE,
                    group_id=answer.group_id,
                    ordered_peer_ids=[member.to_bytes() for member in answer.peer_ids],
                    gathered=answer.gathered,
                )
            else:
                code = averaging_pb2.NOT_A_LEADER if answer else averaging_pb2.GROUP_DISBANDED
                suggested = answer.to_bytes() if answer else b""
                yield averaging_pb2.MessageFromLeader(code=code, suggested_leader=suggested)
        finally:
            if self._requests.get(peer_id) is entry:
                del self._requests[peer_id]
