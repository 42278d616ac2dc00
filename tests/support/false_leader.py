"""A trainer that forms false groups in the steps that it leads, and answers them with values of its own."""

import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import torch
from hivemind.averaging.group_info import GroupInfo
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2

from peerstep.rounds.averager import RoundAverager
from peerstep.rounds.claims import SIGNATURE_BYTES, Claims, deal, parse_claims
from peerstep.rounds.matchmaking import Search, StepMatchmaking
from peerstep.rounds.reducer import answers_to
from peerstep.rounds.relay import build_list
from peerstep.rounds.shares import Standing, divide

Entries = dict[PeerID, bytes]
INVENTED = [PeerID(b"\x12\x20" + bytes([7, number] * 16)) for number in range(60)]


def claims_of(entry: bytes) -> Claims:
    return parse_claims(entry[:-SIGNATURE_BYTES])


def rewrite(entry: bytes, **changes) -> bytes:
    """Change the claims in another peer's entry, whose signature stays."""
    return replace(claims_of(entry), **changes).pack() + entry[-SIGNATURE_BYTES:]


class FalseLeader:
    """What an averager does in the steps that it leads. Create it in the averager's process.

    :param kind: a key of KINDS
    :param factor: of its parameters, in what it answers
    """

    def __init__(self, averager: RoundAverager, matchmaking: StepMatchmaking, kind: str, factor: float = -3.0):
        self.averager, self.matchmaking, self.factor = averager, matchmaking, factor
        self.change: Callable[[FalseLeader, Entries, PeerID], Entries] = KINDS[kind]
        self.led: list[int] = []  # steps
        self.kept: Entries = {}  # of earlier steps
        self.numbers = itertools.count(1)
        self.groups: dict[bytes, tuple[int, GroupInfo]] = {}
        matchmaking.assemble = self.assemble

    def sign(self, step: int, **changes) -> bytes:
        """Sign claims of its own."""
        claims = Claims(self.averager.claim.value, **changes)
        return self.matchmaking.known.sign(claims.pack(), step, self.matchmaking.peer_id, ())

    def assemble(self, search: Search, joined: dict) -> None:
        step, own = search.control.step, self.matchmaking.peer_id
        self.led.append(step)
        true = {peer_id: request.entry for peer_id, request in joined.items()}
        for victim, request in joined.items():
            entries = self.change(self, true | {own: self.sign(step)}, victim)
            if entries.get(victim):
                for group in deal(step, {peer_id: claims_of(entry) for peer_id, entry in entries.items()}, None):
                    self.groups[group.group_id] = step, group
            request.answer.set_result(build_list(entries))
        self.kept |= true

    async def answer(
        self, request: averaging_pb2.AveragingData, sender: PeerID
    ) -> AsyncIterator[averaging_pb2.AveragingData] | None:
        """Return what it answers in a false group; None if the group is none of these."""
        if request.group_id not in self.groups:
            return
        (step, group), averager = self.groups[request.group_id], self.averager
        standing = Standing([parse_claims(gathered) for gathered in group.gathered])
        shares = divide([claims.bandwidth for claims in standing.claims])
        parts = averager.cut_parts(step, group, standing, shares, 0.0)[self.matchmaking.peer_id]
        for _, part in answers_to(sender, parts):
            values = torch.full_like(part.own, 10.0) if part.is_gradient else part.own * self.factor
            yield averaging_pb2.AveragingData(code=averaging_pb2.AVERAGED_PART, tensor_part=part.compress(values))

    def wrap(self, handler: Callable) -> Callable:
        """Return the handler of parts, which answers in false groups, too."""

        async def answer(stream, context):
            if (first := await anext(stream, None)) is None:
                return

            async def again():
                yield first
                async for message in stream:
                    yield message

            is_false = first.group_id in self.groups
            messages = self.answer(first, context.remote_id) if is_false else handler(again(), context)
            async for message in messages:
                yield message

        return answer


def _own(leader: FalseLeader) -> PeerID:
    return leader.matchmaking.peer_id


KINDS: dict[str, Callable[[FalseLeader, Entries, PeerID], Entries]] = {
    "false claims": lambda leader, entries, victim: {
        victim: rewrite(entries[victim], bandwidth=0.0, distance=64.0), _own(leader): entries[_own(leader)]
    },
    "groups of two": lambda leader, entries, victim: {victim: entries[victim], _own(leader): entries[_own(leader)]},
    "zero shares": lambda leader, entries, victim: {p: rewrite(e, bandwidth=0.0) for p, e in entries.items()},
    "invented members": lambda leader, entries, victim: entries | dict.fromkeys(INVENTED, entries[_own(leader)]),
    # True entries, and a claim of its own that is another one for each member: as many groups
    "separate groups": lambda leader, entries, victim: entries | {
        _own(leader): leader.sign(leader.led[-1], distance=1e-6 * next(leader.numbers))
    },
    "old claims": lambda leader, entries, victim: leader.kept | {
        victim: entries[victim], _own(leader): entries[_own(leader)]
    },
}  # fmt: skip
