"""This peer's rounds by their groups, for the members that send parts: perhaps before a round begins, or after it."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import AsyncIterator  # noqa: UP035  hivemind does not recognize that of collections.abc

from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2

from peerstep.rounds.allreduce import AllReduce

# Of a peer, and of all peers, whose part of an unknown group arrives before this peer has the group
MAX_WAITING_STREAMS, MAX_WAITING_STREAMS_OF_ALL = 2, 256
UNKNOWN_SECONDS = 3.0  # for which such a part waits, or longer while this peer waits for the list of its group
MAX_FIRST_BYTES = 256  # of the first message of such a stream, which has no part
MAX_KEPT_ROUNDS = 64  # newest rounds of this peer of which it knows that they have ended


class OwnRounds:
    """Finds the round that a part is for. hivemind refuses the part if another round ends meanwhile.

    The whole group then waits for the sender.

    :param reducer_timeout: seconds for which a part waits; after that time the sender stops waiting, too
    :param awaits_list: whether this peer waits for the list of a group, see relay.py
    """

    def __init__(self, reducer_timeout: float, awaits_list: Callable[[], bool] = bool):
        self._reducer_timeout, self._awaits_list = reducer_timeout, awaits_list
        # Group ID -> this peer's round, which is None if it was cancelled; None: it has ended
        self._rounds: dict[bytes, asyncio.Future[AllReduce | None] | None] = {}
        self.refused: deque[tuple[bytes, PeerID]] = deque(maxlen=256)  # group ID, and sender of a refused part
        self._elsewhere: deque[tuple[bytes, PeerID]] = deque(maxlen=256)  # the same of unknown groups in this round
        self.waiting: Counter[PeerID] = Counter()  # streams of unknown groups

    def search(self) -> None:
        """Record that the search for the next group begins."""
        self._elsewhere.clear()

    def expect(self, group_id: bytes) -> None:
        """Record that this peer has a group, whose round is to begin."""
        self._rounds[group_id] = asyncio.get_running_loop().create_future()

    def begin(self, runner: AllReduce) -> None:
        """Give a round the parts that have come. A sender that was refused does not try again."""
        begins = self._rounds[runner.group_id]
        assert begins is not None
        begins.set_result(runner)
        for group_id, sender in self.refused:
            if group_id == runner.group_id:
                runner.reducer.drop_unstarted(sender)

    def end(self, group_id: bytes) -> None:
        """Record that a round has ended, or was cancelled before it began."""
        begins, self._rounds[group_id] = self._rounds[group_id], None
        if begins is not None and not begins.done():
            begins.set_result(None)
        while len(self._rounds) > MAX_KEPT_ROUNDS:
            del self._rounds[next(iter(self._rounds))]

    def senders_elsewhere(self) -> set[PeerID]:
        """Return the peers that have sent parts of groups that this peer does not know."""
        return {sender for group_id, sender in self._elsewhere if group_id not in self._rounds}

    async def answer(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], sender: PeerID
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        """Receive a member's part of the tensors."""
        if (request := await anext(stream, None)) is None:
            return
        is_small = request.ByteSize() <= MAX_FIRST_BYTES  # it may be kept for a while
        if is_small and (runner := await self._await_round(request.group_id, sender)) is not None:
            async for message in runner.reducer.answer(sender, stream):
                yield message
        else:
            self.refused.append((request.group_id, sender))
            yield averaging_pb2.AveragingData(code=averaging_pb2.BAD_GROUP_ID)

    async def _await_round(self, group_id: bytes, sender: PeerID) -> AllReduce | None:
        """Wait until this peer's round of a group begins; None if it has ended or does not begin in time."""
        # An unknown group: the leader's announcement may be one answer late; then this peer has left too early to
        # receive it.
        if group_id not in self._rounds:
            self._elsewhere.append((group_id, sender))
            if self.waiting[sender] >= MAX_WAITING_STREAMS or self.waiting.total() >= MAX_WAITING_STREAMS_OF_ALL:
                return None
            self.waiting[sender] += 1
            until = time.monotonic() + UNKNOWN_SECONDS
            try:
                while group_id not in self._rounds and (time.monotonic() < until or self._awaits_list()):
                    await asyncio.sleep(0.05)
            finally:
                self.waiting -= Counter({sender: 1})
        if (begins := self._rounds.get(group_id)) is None:
            return None
        await asyncio.wait({begins}, timeout=self._reducer_timeout)
        return begins.result() if begins.done() else None
