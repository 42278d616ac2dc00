"""Matchmaking for the round of a global step. Each step has one leader, derived from the progress reports.

Every peer ranks the roster of a step in the same order. The peer asks the first candidate to join its group, and asks
the next one only if the first cannot be reached. Each step has a separate key, so peers of different steps never meet.
A peer that is asked before it has reached the step holds the request until then. The leader begins when the step is
due and all peers of the roster have asked, or `min_matchmaking_time` after the step was due. It passes on what each
peer has signed, see claims.py; the members check that, and that few peers are missing and few are strangers.
hivemind/averaging/matchmaking.py knows neither the step nor the peers.
"""

import asyncio
import itertools
import math
import statistics
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, AsyncIterator  # noqa: UP035  hivemind does not recognize that of collections.abc

from hivemind.averaging.control import AveragingStage, StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.matchmaking import Matchmaking
from hivemind.dht import DHT
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import get_logger
from hivemind.utils.crypto import RSAPrivateKey

from peerstep.rounds.claims import SIGNATURE_BYTES, called_silent, deal, parse_claims, rank
from peerstep.rounds.conduct import Conduct
from peerstep.rounds.known_peers import MAX_STRANGERS, KnownPeers, parse_list, read_peer_id
from peerstep.rounds.relay import ListReader, build_list
from peerstep.rounds.requests import JoinRequests, Request

logger = get_logger(__name__)

LEADER_MARGIN = 2.0  # seconds after which a leader that should have begun is abandoned
RETRY_SECONDS = 1.0  # before an unreachable leader is asked again
POLL_SECONDS = 0.05  # between two looks at who has asked, whether the step is due, or an answer has come
MAX_ABSENCES = 2  # consecutive rounds that a peer may miss before leaders stop waiting for it
# For one missing of as many peers, leaders wait half as long, and for one of more even less, but LEAST_PART of it: in
# large runs some have just left.
MISSING_PART, LEAST_PART = 32, 0.25
# As many thirds of the expected peers are in a group, or it waits for SMALL_SECONDS longer. With half of them, one key
# beside four trainers made two groups of three, in which nothing bounds its weight.
LEAST_THIRDS, SMALL_SECONDS = 2, 4.0


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
class RosterEntry:
    """A peer that may take part in the round of a step."""

    peer_id: PeerID
    public_key: bytes  # the subkey of its records, which checks what it signs
    is_client: bool  # it accepts no connections, and so cannot lead
    is_established: bool  # it has completed a step of the run, so that other peers know it
    is_away: bool = False  # it says that nobody is to wait for it; it may ask nevertheless


@dataclass
class Search:
    """State of this peer's search for the group of one step."""

    control: RoundControl
    failures: dict[PeerID, tuple[float, str]] = field(default_factory=dict)  # leader -> time (`monotonic`) and reason
    given_up: set[PeerID] = field(default_factory=set)  # leaders that accepted this peer and did not begin
    due_since: float = math.inf  # `time.monotonic`
    listed: Collection[PeerID] = ()  # peers in the groups of the step

    def seconds_due(self) -> float:
        """Return the seconds since the step is due at this peer, as this search has noticed; -inf before."""
        if self.control.triggered:
            self.due_since = min(self.due_since, time.monotonic())
        return time.monotonic() - self.due_since


class StepMatchmaking(Matchmaking):
    """Finds the group of a global step. Runs in the averager's process."""

    peer_id: PeerID

    def __init__(self, p2p: P2P, schema_hash: bytes, dht: DHT, *, private_key: RSAPrivateKey | None = None, **kwargs):
        super().__init__(p2p, schema_hash, dht, **kwargs)
        self.known = KnownPeers(self.peer_id, private_key, self._prefix.encode() + schema_hash)
        self.conduct = Conduct(self.peer_id, getattr(dht, "describe", str))
        self.requests = JoinRequests(schema_hash, self.client_mode, self.known, self.conduct)
        self.lists = ListReader(schema_hash, self._stub)
        self.led_by = self.peer_id  # leader of the last group
        self.is_split = False  # whether its list had other groups
        self.awaits_list = False  # whether a leader has begun, and other members are to pass its list on
        self.roster: dict[PeerID, RosterEntry] = {}
        self.missed: dict[PeerID, str] = {}  # peers of the roster that are not in the last group, and why
        # Peers that most members of the last list call silent. They have no share, so they cannot answer
        self._called_silent: set[PeerID] = set()
        self.absences: Counter[PeerID] = Counter()  # consecutive rounds that a peer has missed
        # Those of the newest groups; who returns, as after a partition, is not missed before it was in one
        self._lists: deque[Collection[PeerID]] = deque(maxlen=MAX_ABSENCES)

    # Input from the main process

    def set_roster(self, entries: Iterable[RosterEntry]) -> None:
        """Replace the peers that may take part in the next round, including this peer."""
        before = self.roster
        self.roster = {entry.peer_id: entry for entry in entries}
        self.known.update({peer_id: entry.public_key for peer_id, entry in (before | self.roster).items()})
        for peer_id in self.absences.keys() - self.known.public_keys:
            del self.absences[peer_id]

    # Search for a group

    async def look_for_group(self, control: RoundControl) -> GroupInfo:
        """Find the group of a step. Runs until a group is found; cancel it to give up."""
        async with self.lock_looking_for_group:
            search = Search(control)
            while True:
                leader, group = self.choose_leader(search), None
                if leader == self.peer_id:
                    group = self._lead(search)
                elif leader is not None:
                    group = await self._follow(search, leader)
                if group is not None:
                    self._on_group(search)
                    return group
                await asyncio.sleep(POLL_SECONDS)

    def _on_group(self, search: Search) -> None:
        present = {peer_id for peer_id, entry in self.roster.items() if not entry.is_away}
        missed = present - {*search.listed, self.peer_id}
        reasons = {peer_id: reason for peer_id, (_, reason) in search.failures.items()}
        reasons |= {peer_id: "banned" for peer_id in missed if self.conduct.is_banned(peer_id)}
        self.missed = {peer_id: reasons.get(peer_id, "did not ask to join") for peer_id in missed}
        self.absences.update(missed)
        self._lists.append(search.listed)
        for peer_id in search.listed:
            self.absences.pop(peer_id, None)

    def _candidates(self, search: Search) -> list[PeerID]:
        """Return the peers that may lead, best first. Peers new to the run may lead only if there are no others."""
        nodes = [entry for entry in self.roster.values() if not entry.is_client]
        nodes = [entry for entry in nodes if self.conduct.may_lead(entry.peer_id)]
        # A silent leader splits the group: members that call it silent follow another one.
        nodes = [entry for entry in nodes if entry.peer_id not in self._called_silent] or nodes
        established = [entry for entry in nodes if entry.is_established and not entry.is_away]
        step = search.control.step
        return sorted((entry.peer_id for entry in established or nodes), key=lambda peer_id: rank(step, peer_id))

    def choose_leader(self, search: Search) -> PeerID | None:
        """Return the best candidate that has not failed to answer; None if there is none at the moment.

        Candidates that have failed are asked again after RETRY_SECONDS, unless other peers wait for this one to begin.
        A leader that no peer has joined asks the other candidates: they may have formed a group without it.
        """
        joined = self.requests.for_step(search.control.step)
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
        joined = self.requests.for_step(search.control.step)
        if search.seconds_due() >= 0:
            for request in joined.values():
                if not request.due.done():
                    request.due.set_result(None)
        expected = self._expected(search)
        missing = expected - joined.keys()
        seconds = self.min_matchmaking_time if missing else 0.0
        if (part := MISSING_PART * len(missing) / max(1, len(expected))) <= 1.0:
            seconds *= max(part, LEAST_PART) / 2
        is_due = bool(joined) and search.seconds_due() >= seconds
        return self.assemble(search, joined) if is_due and self._are_enough(search, joined, LEADER_MARGIN) else None

    def _are_enough(self, search: Search, peer_ids: Collection[PeerID], margin: float = 0.0) -> bool:
        """Return whether few of the expected peers are missing, or the step was due long ago: they will not come.

        :param margin: further seconds of a leader: its members see later that the step is due
        """
        if search.seconds_due() >= self.min_matchmaking_time + SMALL_SECONDS + margin:
            return True
        expected = self._expected(search) & set[PeerID]().union(*self._lists)
        return 3 * (1 + len(expected.intersection(peer_ids))) >= LEAST_THIRDS * (1 + len(expected))

    def _expected(self, search: Search) -> set[PeerID]:
        """Return the peers of the roster that the leader waits for.

        If as many have missed the last rounds as have not, they may have rounds of their own, each half too late for
        the other: they are waited for again after two such rounds, after four, eight, and so on.
        """
        present = {peer_id for peer_id, entry in self.roster.items() if not entry.is_away} - {self.peer_id}
        present = {peer_id for peer_id in present if not self.conduct.is_banned(peer_id)}
        absences = {peer_id: self.absences[peer_id] for peer_id in present}
        absent = {peer_id for peer_id, number in absences.items() if number >= MAX_ABSENCES}
        if 2 * len(absent) > len(present):
            absent = {peer_id for peer_id in absent if absences[peer_id].bit_count() > 1}
        return present - absent - search.failures.keys()

    def assemble(self, search: Search, joined: dict[PeerID, Request]) -> GroupInfo:
        """Tell the peers that have asked who else has. Return this peer's group, see `deal`."""
        entries = {peer_id: request.entry for peer_id, request in joined.items()}
        entries[self.peer_id] = self._sign(search.control, self.peer_id)
        relays = [peer_id for peer_id in self._candidates(search) if peer_id in joined]
        # In another order in each step: who claims a fast link and passes nothing on is not always near the leader.
        bandwidths = {peer_id: parse_claims(entries[peer_id][:-SIGNATURE_BYTES]).bandwidth for peer_id in relays}
        relays.sort(key=lambda peer_id: bandwidths[peer_id] < statistics.median(bandwidths.values()))
        others = [peer_id for peer_id in joined if peer_id not in relays]
        told = self.requests.relay.plan(self.peer_id, build_list(entries), self.known.all_keys, relays, others)
        for peer_id, request in joined.items():
            request.answer.set_result(told[peer_id])
        return self._deal(search, entries, self.peer_id)

    def _deal(self, search: Search, entries: Mapping[PeerID, bytes], leader: PeerID) -> GroupInfo:
        claims = {peer_id: parse_claims(entry[:-SIGNATURE_BYTES]) for peer_id, entry in entries.items()}
        self.known.record_members(leader, claims)
        search.listed, self.led_by = claims.keys(), leader
        self._called_silent = called_silent(claims)
        groups = deal(search.control.step, claims, self.target_group_size)
        self.is_split = len(groups) > 1
        return next(group for group in groups if self.peer_id in group)

    def _sign(self, control: RoundControl, leader: PeerID) -> bytes:
        return self.known.sign(control.data_for_gather, control.step, leader, self.conduct.silent)

    def _stub(self, peer_id: PeerID) -> Any:
        return self._servicer_type.get_stub(self._p2p, peer_id, namespace=self._prefix)

    async def _follow(self, search: Search, leader: PeerID, redirected: bool = False) -> GroupInfo | None:
        """Ask a peer to lead and wait until it begins; None if it does not."""
        control = search.control
        own = self._sign(control, leader)
        request = averaging_pb2.JoinRequest(
            schema_hash=self.schema_hash,
            expiration=control.deadline,
            gather=own + self.known.own_key,
            group_key=str(control.step),
        )
        try:
            async with asyncio.timeout(self.request_timeout):
                stream = await self._stub(leader).rpc_join_group(request)
            async with aclosing(stream):
                async with asyncio.timeout(self.request_timeout):
                    message = await anext(stream)
                if message.code == averaging_pb2.ACCEPTED:
                    joined = self.requests.for_step(search.control.step)
                    if leader in joined and rank(control.step, self.peer_id) < rank(control.step, leader):
                        return None  # the peers have asked each other: the better candidate leads
                    self.requests.following = control.step, leader
                    for peer_id, asked in joined.items():
                        asked.answer.set_result(None if peer_id == leader else leader)
                    message = await self._await_begin(stream, search, leader)
        except Exception as error:  # whatever it answers, such as no protobuf, the search goes on with others
            logger.debug(f"{leader} does not lead step {control.step}: {error!r}")
            search.failures[leader] = time.monotonic(), "could not be reached"
            return None
        finally:
            self.requests.following = None
        if message.code == averaging_pb2.BEGIN_ALLREDUCE:
            self.awaits_list = True
            try:
                listed, sender = await self.lists.receive(control.step, leader, message, len(self.roster))
                if listed is not None:
                    return await self._accept_group(search, leader, own, listed, sender)
            finally:
                self.awaits_list = False
            search.given_up.add(leader)
            return None
        is_known = message.code in averaging_pb2.MessageCode.values()
        code = averaging_pb2.MessageCode.Name(message.code) if is_known else f"unknown code {message.code}"
        search.failures[leader] = time.monotonic(), code
        other, excluded = read_peer_id(message.suggested_leader), {self.peer_id, leader, *search.given_up}
        if redirected or other is None or other in excluded or not self.conduct.may_lead(other):
            return None
        return await self._follow(search, other, redirected=True)

    async def _await_begin(
        self, stream: AsyncIterator[averaging_pb2.MessageFromLeader], search: Search, leader: PeerID
    ) -> averaging_pb2.MessageFromLeader:
        """Wait for the group, or a refusal; TimeoutError long after the step was due: the leader may be frozen.

        The step may be due later at the leader, which tells it by a second ACCEPTED: both then wait as long.
        """
        message, until, is_due = asyncio.ensure_future(anext(stream)), math.inf, False
        try:
            while True:
                if message.done():
                    if is_due or message.result().code != averaging_pb2.ACCEPTED:
                        return message.result()
                    message, is_due = asyncio.ensure_future(anext(stream)), True
                    until = time.monotonic() + self.min_matchmaking_time + SMALL_SECONDS + 2 * LEADER_MARGIN
                if time.monotonic() >= until:
                    search.given_up.add(leader)
                    raise TimeoutError
                if search.seconds_due() >= 0 and not is_due:
                    until = min(until, time.monotonic() + self.min_matchmaking_time + LEADER_MARGIN)
                await asyncio.wait({message}, timeout=POLL_SECONDS)
        finally:
            message.cancel()
            # A stream cannot be closed while something waits for its next message.
            await asyncio.gather(message, return_exceptions=True)

    async def _accept_group(
        self, search: Search, leader: PeerID, own: bytes, message: averaging_pb2.MessageFromLeader, sender: PeerID
    ) -> GroupInfo | None:
        """Return this peer's group in a leader's list; None if the list is false, or too many peers are missing.

        :param own: this peer's entry
        :param sender: who has sent the list
        """
        try:
            entries = parse_list(message)
            strangers, keys = self.known.strangers_in(entries), self.known.all_keys
            if has_keys := len(strangers) <= MAX_STRANGERS:
                found = await self.lists.ask_for_keys(search.control.step, leader, sender, message, strangers)
                keys, has_keys = keys | (found or {}), found is not None
            self.known.check_list(entries, search.control.step, leader, own, keys)
            self.requests.relay.keep(message, keys)
        except ValueError as error:
            search.given_up.add(leader)
            self.conduct.leave_out(leader, f"formed a false group for step #{search.control.step} ({error})")
            return None
        is_small = not self._are_enough(search, entries)
        self.conduct.record_group(leader, len(entries), is_small or not has_keys)
        if not is_small and has_keys and self.known.are_mostly_known(entries):
            return self._deal(search, entries, leader)
        fault = "without most others" if is_small else "with many strangers"
        logger.info(f"{leader} formed a group of {len(entries)} {fault}: asking another peer to lead")
        search.given_up.add(leader)
        return None

    def rpc_join_group(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        return self.requests.answer(request, context.remote_id)
