"""Lists of large groups: a leader sends its list to a few members, which pass it on.

To all of 128 members a leader would send 5 MB: 3 seconds of a home uplink, in which they look for other leaders. To
the others it names the digest of the list, and two members to get it from. So nobody is believed but the leader, as
with a list that it sends itself, see KnownPeers.check_list. The list reaches the two members by different ways. A
silent member delays those that ask it first by ANSWER_SECONDS, one that only promises it by RELAY_SECONDS or more;
then they ask the other one, and at last the leader.

Lists have no keys, which would be half of them: a member knows those of its roster from their reports. It asks who has
sent it the list for others.
"""

import asyncio
import hashlib
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2

from peerstep.rounds.claims import TAG_BYTES, tag_of
from peerstep.rounds.known_peers import parse_keys, read_peer_id

MAX_DIRECT = 32  # members up to which a leader sends its list to all: 0.35 MB
FANOUT = 4  # members to which a member of a larger group passes the list on, if enough of them are public
# A member waits as long until one that is to pass the list on says that it does; it takes a connection. With the wait
# for the list alone, each of the silent ones cost 3.5 s among 256 trainers, and half of them asked the leader at last.
ANSWER_SECONDS = 1.5
# It then waits as long for the list, and longer with each peer of the roster: a list of 512 members, 0.17 MB, passes
# five uplinks of 15 Mbit/s.
RELAY_SECONDS, RELAY_SECONDS_PER_PEER = 1.5, 1 / 128
HOLD_SECONDS = 15.0  # for which a member that has no list yet lets others wait for it
HOLD_POLL_SECONDS = 0.05
DIGEST_BYTES = 32
MAX_LISTS = 4  # newest lists that a member passes on


def build_list(entries: Mapping[PeerID, bytes]) -> averaging_pb2.MessageFromLeader:
    """Return the message with the signed claims of a group's members."""
    return averaging_pb2.MessageFromLeader(
        code=averaging_pb2.BEGIN_ALLREDUCE,
        ordered_peer_ids=[member.to_bytes() for member in entries],
        gathered=entries.values(),
    )


def digest_of(message: averaging_pb2.MessageFromLeader) -> bytes:
    return hashlib.sha256(message.SerializeToString(deterministic=True)).digest()


def parents_of(leader: PeerID, relays: Sequence[PeerID], others: Sequence[PeerID]) -> dict[PeerID, PeerID]:
    """Return the parent of each member: who sends it the list. The leader is the root, and `others` are leaves."""
    above, below = [leader, *relays], [*relays, *others]
    fanout = max(FANOUT, math.ceil(len(below) / len(above)))
    return {member: above[index // fanout] for index, member in enumerate(below)}


@dataclass
class KeptList:
    """A list that this peer passes on, once to each member: 44 KB for a request of 100 bytes."""

    message: averaging_pb2.MessageFromLeader
    keys: dict[bytes, bytes]  # tag of a member -> its key; of those whose key this peer has
    without_list: set[bytes]  # members that this peer has not sent it to
    without_keys: set[bytes]  # members that it has sent no keys

    def keys_of(self, tags: bytes) -> averaging_pb2.MessageFromLeader:
        wanted = {tags[begin : begin + TAG_BYTES] for begin in range(0, len(tags), TAG_BYTES)}
        found = [self.keys[tag] for tag in wanted & self.keys.keys()]
        return averaging_pb2.MessageFromLeader(code=averaging_pb2.BEGIN_ALLREDUCE, gathered=found)


class Relay:
    """The newest lists, of this peer and of others, for those that ask for them."""

    def __init__(self):
        self._lists: OrderedDict[bytes, KeptList] = OrderedDict()  # by digest
        self._waiting: set[PeerID] = set()

    def keep(self, message: averaging_pb2.MessageFromLeader, keys: Mapping[PeerID, bytes]) -> bytes:
        """Pass a list and its members' keys on from now on, once to each of them; return its digest."""
        digest = digest_of(message)
        by_tag = {tag_of(member): keys[member] for member in map(PeerID, message.ordered_peer_ids) if member in keys}
        members = set(message.ordered_peer_ids)
        self._lists[digest] = KeptList(message, by_tag, without_list=members, without_keys=members.copy())
        if len(self._lists) > MAX_LISTS:
            self._lists.popitem(last=False)
        return digest

    def plan(
        self,
        leader: PeerID,
        listed: averaging_pb2.MessageFromLeader,
        keys: Mapping[PeerID, bytes],
        relays: Sequence[PeerID],
        others: Sequence[PeerID],
    ) -> dict[PeerID, averaging_pb2.MessageFromLeader]:
        """Return what the leader tells each member: the list, or who has it.

        :param keys: those of the members
        :param relays: members that can be called, those on fast lines first: they are to be near the leader
        """
        members, digest = [*relays, *others], self.keep(listed, keys)
        if len(members) <= MAX_DIRECT:
            return dict.fromkeys(members, listed)
        middle = len(relays) // 2
        turned = [*relays[:middle][::-1], *relays[middle:][::-1]]
        trees = [parents_of(leader, relays, others), parents_of(leader, turned, others[::-1])]
        told = {}
        for member in members:
            parents = [tree[member].to_bytes() for tree in trees]
            told[member] = averaging_pb2.MessageFromLeader(
                code=averaging_pb2.BEGIN_ALLREDUCE, group_id=digest, ordered_peer_ids=parents
            )
            if leader.to_bytes() in parents:
                told[member] = listed
        return told

    async def answer(self, wanted: bytes, peer_id: PeerID) -> averaging_pb2.MessageFromLeader:
        """Return the list with a digest once this peer has it; a refusal if that takes too long, or the second time.

        A peer waits for one list at a time.

        :param wanted: the digest; with tags behind it for the keys of these members
        """
        digest, tags = wanted[:DIGEST_BYTES], wanted[DIGEST_BYTES:]
        until = time.monotonic() + HOLD_SECONDS
        if peer_id not in self._waiting:
            self._waiting.add(peer_id)
            try:
                while digest not in self._lists and time.monotonic() < until:
                    await asyncio.sleep(HOLD_POLL_SECONDS)
            finally:
                self._waiting.discard(peer_id)
        kept, caller = self._lists.get(digest), peer_id.to_bytes()
        unserved = (kept.without_keys if tags else kept.without_list) if kept else set[bytes]()
        if kept is None or caller not in unserved:
            return averaging_pb2.MessageFromLeader(code=averaging_pb2.GROUP_DISBANDED)
        unserved.remove(caller)
        return kept.keys_of(tags) if tags else kept.message


class ListReader:
    """Gets lists, and the keys that lists lack, from members.

    :param stub: returns that of a peer, which has `rpc_join_group`
    """

    def __init__(self, schema_hash: bytes, stub: Callable[[PeerID], Any]):
        self._schema_hash, self._stub = schema_hash, stub

    async def receive(
        self, step: int, leader: PeerID, message: averaging_pb2.MessageFromLeader, num_peers: int
    ) -> tuple[averaging_pb2.MessageFromLeader | None, PeerID]:
        """Return a leader's list, and who has sent it: the leader, or a member that is to pass it on.

        :param num_peers: in the roster
        """
        digest = message.group_id
        if message.gathered or len(digest) != DIGEST_BYTES:
            return message, leader
        for parent in dict.fromkeys((*message.ordered_peer_ids[:2], leader.to_bytes())):
            if (sender := read_peer_id(parent)) is not None:
                listed = await self._ask(step, sender, digest, RELAY_SECONDS + RELAY_SECONDS_PER_PEER * num_peers)
                if listed is not None and digest_of(listed) == digest:
                    return listed, sender
        return None, leader

    async def ask_for_keys(
        self,
        step: int,
        leader: PeerID,
        sender: PeerID,
        listed: averaging_pb2.MessageFromLeader,
        strangers: Collection[PeerID],
    ) -> dict[PeerID, bytes] | None:
        """Return the keys of strangers in a list, from its sender or its leader; None if neither can be reached.

        :param strangers: at most MAX_STRANGERS
        :raises ValueError: if the leader does not know all of them
        """
        if not strangers:
            return {}
        wanted = digest_of(listed) + b"".join(map(tag_of, strangers))
        for peer_id in dict.fromkeys((sender, leader)):
            if (answer := await self._ask(step, peer_id, wanted, RELAY_SECONDS)) is not None:
                keys = parse_keys(answer.gathered)
                if keys.keys() >= {*strangers}:
                    return keys
                if peer_id == leader:
                    raise ValueError("without the keys of all members")
        return None

    async def _ask(
        self, step: int, peer_id: PeerID, wanted: bytes, seconds: float
    ) -> averaging_pb2.MessageFromLeader | None:
        """Ask a member for a list, or for keys in it, see `Relay.answer`; None if it sends nothing in so long."""
        request = averaging_pb2.JoinRequest(schema_hash=self._schema_hash, gather=wanted, group_key=str(step))
        with suppress(Exception):  # whatever it answers, the next one is asked
            async with asyncio.timeout(ANSWER_SECONDS) as patience:
                async with aclosing(await self._stub(peer_id).rpc_join_group(request)) as stream:
                    await anext(stream)  # it is there, and has the list or waits for it, too
                    patience.reschedule(asyncio.get_running_loop().time() + seconds)
                    return await anext(stream)
        return None
