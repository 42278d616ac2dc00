"""How other peers have behaved in rounds: with whom this peer forms no group, and who leads none of its own."""

import math
from collections import Counter
from collections.abc import Callable, Collection

from hivemind.p2p import PeerID
from hivemind.utils import TimedStorage, get_logger

from peerstep.peer.clock import run_time

logger = get_logger(__name__)

MAX_SILENCES, SPARE_SECONDS = 2, 600.0  # rounds after which a silent reducer gets no share, and for how long
LEAVE_OUT_SECONDS = 600.0  # for which a leader of a false group leads this peer no more
# Consecutive groups without most peers, or without keys of strangers, after which their leader does not, and seconds
# for which it does not, doubled by each further one. It may have reached no others.
MAX_SMALL, SMALL_GROUP_SECONDS = 2, 60.0


class Conduct:
    """What this peer has seen itself. No other peer's word counts.

    :param describe: names a peer in the log
    """

    def __init__(self, peer_id: PeerID, describe: Callable[[PeerID], str] = str):
        self.peer_id, self.describe = peer_id, describe
        self._banned: TimedStorage[PeerID, None] = TimedStorage()
        self.silences: Counter[PeerID] = Counter()  # consecutive rounds in which a reducer answered nothing
        self._silent: TimedStorage[PeerID, None] = TimedStorage()
        self._small: Counter[PeerID] = Counter()  # consecutive groups of a leader of this kind
        self._left_out: TimedStorage[PeerID, None] = TimedStorage()  # leaders of false groups

    def ban(self, peer_id: PeerID, until: float) -> None:
        """Form no group with a peer before `until` (`run_time`)."""
        self._banned.store(peer_id, None, until)

    def is_banned(self, peer_id: PeerID) -> bool:
        return peer_id in self._banned

    def may_lead(self, peer_id: PeerID) -> bool:
        return not (peer_id in self._banned or peer_id in self._silent or peer_id in self._left_out)

    @property
    def silent(self) -> list[PeerID]:
        """Reducers that have answered nothing, repeatedly."""
        return [peer_id for peer_id, _ in self._silent.items()]

    def leave_out(self, leader: PeerID, fault: str, seconds: float = LEAVE_OUT_SECONDS) -> None:
        """Follow a leader no more for some time. It may be a member."""
        self._left_out.store(leader, None, run_time() + seconds)
        minutes = seconds / 60
        logger.warning(f"{self.describe(leader)} {fault}: it leads no round of this peer for {minutes:.0f} minutes")

    def record_group(self, leader: PeerID, size: int, is_odd: bool) -> None:
        """Record a group that a leader has formed, which may lack most peers, or keys of strangers."""
        self._small[leader] = self._small[leader] + 1 if is_odd else 0
        if (number := self._small[leader]) >= MAX_SMALL:
            seconds = min(LEAVE_OUT_SECONDS, math.ldexp(SMALL_GROUP_SECONDS, number - MAX_SMALL))
            fault = f"formed a group of {size} without most others or without keys, {number} times"
            self.leave_out(leader, fault, seconds)
        self._small += Counter()  # drops those of 0

    def record_round(
        self,
        leader: PeerID,
        members: Collection[PeerID],
        *,
        silent: Collection[PeerID],
        confirming: Collection[PeerID],
        refusing: Collection[PeerID],
        answering: Collection[PeerID] = (),
    ) -> None:
        """Record the reducers of a round that have answered nothing.

        For a while, or until it answers, this peer does not follow one that was silent repeatedly, and says so in its
        claims. Silence counts only if half of the others confirm a group: a leader may tell each of another.

        :param confirming, refusing, answering: members that have sent something in this group, do not know it, and
          have answered as reducers
        """
        for peer_id in answering:
            del self._silent[peer_id]
        others = set(members) - {self.peer_id, leader}
        if leader in confirming and len(others) > 2 and 2 * len(others.intersection(refusing)) > len(others):
            self.leave_out(leader, f"formed a group of {len(members)} that most of them do not know")
        if leader != self.peer_id and 2 * len(others.intersection(confirming)) < len(others):
            return
        for peer_id in members:
            self.silences[peer_id] = self.silences[peer_id] + 1 if peer_id in silent else 0
            if self.silences[peer_id] >= MAX_SILENCES:
                self._silent.store(peer_id, None, run_time() + SPARE_SECONDS)
        self.silences += Counter()
