"""Lists of large groups: a leader sends its list to a few members, which pass it on.

To all of 128 members a leader would send 11 MB: six seconds of a home uplink, in which they look for other leaders. To
the others it names the digest of the list, and two members to get it from. So nobody is believed but the leader, as
with a list that it sends itself, see KnownPeers.check_list. The list reaches the two members by different ways. A
silent member delays those that ask it first by ANSWER_SECONDS, one that only promises it by RELAY_SECONDS or more;
then they ask the other one, and at last the leader.
"""

import asyncio
import hashlib
import math
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2

MAX_DIRECT = 32  # members up to which a leader sends its list to all: 0.7 MB
FANOUT = 4  # members to which a member of a larger group passes the list on, if enough of them are public
# A member waits as long until one that is to pass the list on says that it does; it takes a connection. With the wait
# for the list alone, each of the silent ones cost 3.5 s among 256 trainers, and half of them asked the leader at last.
ANSWER_SECONDS = 1.5
# It then waits as long for the list, and longer with each peer of the roster: a list of 512 members, 0.35 MB, passes
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


class Relay:
    """The newest lists, of this peer and of others, for those that ask for them."""

    def __init__(self):
        # Digest -> list, and its members that this peer has not sent it to: 88 KB for a request of 100 bytes
        self._lists: OrderedDict[bytes, tuple[averaging_pb2.MessageFromLeader, set[bytes]]] = OrderedDict()
        self._waiting: set[PeerID] = set()

    def keep(self, message: averaging_pb2.MessageFromLeader) -> bytes:
        """Pass a list on from now on, once to each of its members; return its digest."""
        digest = digest_of(message)
        self._lists[digest] = message, set(message.ordered_peer_ids)
        if len(self._lists) > MAX_LISTS:
            self._lists.popitem(last=False)
        return digest

    def plan(
        self,
        leader: PeerID,
        listed: averaging_pb2.MessageFromLeader,
        relays: Sequence[PeerID],
        others: Sequence[PeerID],
    ) -> dict[PeerID, averaging_pb2.MessageFromLeader]:
        """Return what the leader tells each member: the list, or who has it.

        :param relays: members that can be called, those on fast lines first: they are to be near the leader
        """
        members = [*relays, *others]
        if len(members) <= MAX_DIRECT:
            return dict.fromkeys(members, listed)
        digest = self.keep(listed)
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

    async def answer(self, digest: bytes, peer_id: PeerID) -> averaging_pb2.MessageFromLeader:
        """Return the list with a digest once this peer has it; a refusal if that takes too long, or the second time.

        A peer waits for one list at a time.
        """
        until = time.monotonic() + HOLD_SECONDS
        if peer_id not in self._waiting:
            self._waiting.add(peer_id)
            try:
                while digest not in self._lists and time.monotonic() < until:
                    await asyncio.sleep(HOLD_POLL_SECONDS)
            finally:
                self._waiting.discard(peer_id)
        message, unserved = self._lists.get(digest, (None, set[bytes]()))
        if message is None or peer_id.to_bytes() not in unserved:
            return averaging_pb2.MessageFromLeader(code=averaging_pb2.GROUP_DISBANDED)
        unserved.remove(peer_id.to_bytes())
        return message
