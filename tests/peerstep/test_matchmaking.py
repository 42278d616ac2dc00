"""Tests of matchmaking for a global step, on an in-memory network without processes and libp2p."""

import asyncio
import itertools
import math
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, aclosing
from functools import partial
from types import SimpleNamespace

import pytest
from hivemind.averaging.group_info import GroupInfo
from hivemind.p2p import P2PDaemonError, PeerID, ServicerBase
from hivemind.proto import averaging_pb2

from peerstep import matchmaking
from peerstep.clock import run_time
from peerstep.matchmaking import (
    Claims,
    RosterEntry,
    StepMatchmaking,
    make_group_id,
    parse_claims,
    parse_step,
    rank,
)

pytestmark = pytest.mark.usefixtures("patches", "clock")

PATIENCE = 0.6  # min_matchmaking_time in seconds
CLAIMS = Claims(100.0).pack()


def make_ids(number: int) -> list[PeerID]:
    """Return peer IDs in the order in which they are asked to lead step 1."""
    return sorted((PeerID(b"\x12\x20" + bytes([i] * 32)) for i in range(number)), key=lambda peer: rank(1, peer))


class Control:
    """Handle of a round, with the attributes that matchmaking reads."""

    def __init__(self, number: int, is_due: bool, claims: Claims):
        self.step, self.deadline, self.data_for_gather = number, 0.0, claims.pack()
        self._trigger = asyncio.Event()
        if is_due:
            self._trigger.set()

    def allow_allreduce(self) -> None:
        self._trigger.set()

    @property
    def triggered(self) -> bool:
        return self._trigger.is_set()

    def done(self) -> bool:
        return False


class Servicer(ServicerBase):
    """Stub that connects the peers of a network."""

    @classmethod
    def get_stub(cls, p2p, peer: PeerID, namespace: str | None = None) -> SimpleNamespace:
        return SimpleNamespace(rpc_join_group=partial(p2p.network.ask, p2p.peer_id, peer))


class Network:
    """In-memory network of peers that look for groups with each other."""

    def __init__(self):
        self.peers: dict[PeerID, StepMatchmaking] = {}
        self.down: set[PeerID] = set()
        self.frozen: set[PeerID] = set()
        self.calls: list[tuple[PeerID, PeerID]] = []

    def add(self, peer_id: PeerID, client_mode: bool = False, patience: float = PATIENCE) -> StepMatchmaking:
        self.peers[peer_id] = StepMatchmaking(
            SimpleNamespace(peer_id=peer_id, network=self), b"schema", SimpleNamespace(peer_id=peer_id),
            servicer_type=Servicer, prefix="run", target_group_size=None, min_group_size=2,
            min_matchmaking_time=patience, request_timeout=0.3, client_mode=client_mode,
        )  # fmt: skip
        return self.peers[peer_id]

    async def ask(self, caller: PeerID, peer: PeerID, request: averaging_pb2.JoinRequest) -> AsyncIterator:
        """Return a peer's answers to a request."""
        self.calls.append((caller, peer))
        if peer in self.frozen:
            await asyncio.sleep(100)
        if peer in self.down:
            raise P2PDaemonError("cannot be dialed")
        return self.peers[peer].rpc_join_group(request, SimpleNamespace(remote_id=caller))

    def join(self, leader: PeerID, caller: PeerID, request: averaging_pb2.JoinRequest) -> aclosing:
        """Ask a peer to lead; the context has its answers."""
        return aclosing(self.peers[leader].rpc_join_group(request, SimpleNamespace(remote_id=caller)))

    def know(self, known: Iterable[PeerID], new: Iterable[PeerID] = (), by: Iterable[PeerID] | None = None) -> None:
        """Set the roster of peers.

        :param known: the peers of the roster
        :param new: the peers of the roster that are not established
        :param by: the peers whose roster is set; default: all
        """
        entries = [RosterEntry(peer_id, self.peers[peer_id].client_mode, peer_id not in new) for peer_id in known]
        for peer_id in self.peers if by is None else by:
            self.peers[peer_id].set_roster(entries)

    def search(self, peer_id: PeerID, number: int = 1, is_due: bool = True) -> tuple[Control, asyncio.Task]:
        control = Control(number, is_due, Claims(0.0 if self.peers[peer_id].client_mode else 100.0))
        return control, asyncio.create_task(self.peers[peer_id].look_for_group(control))

    async def find(self, peer_ids: Iterable[PeerID], number: int = 1, timeout: float = 10.0) -> list[GroupInfo]:
        """Let peers look for the group of a step at the same time, and return the group that each has found."""
        tasks = [self.search(peer_id, number)[1] for peer_id in peer_ids]
        return await asyncio.wait_for(asyncio.gather(*tasks), timeout)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(matchmaking, "RETRY_SECONDS", 0.1)
    monkeypatch.setattr(matchmaking, "LEADER_MARGIN", 0.3)


def make_network(number: int, clients: int = 0, patience: float = PATIENCE) -> tuple[Network, list[PeerID]]:
    """Build a network of peers that know each other.

    :param number: number of peers
    :param clients: how many of them, the last ones, are in client mode
    :param patience: `min_matchmaking_time` in seconds
    """
    network, ids = Network(), make_ids(number)
    for index, peer_id in enumerate(ids):
        network.add(peer_id, client_mode=index >= number - clients, patience=patience)
    network.know(ids)
    return network, ids


def assert_one_group(groups: list[GroupInfo], members: Iterable[PeerID]) -> None:
    assert len({group.group_id for group in groups}) == 1
    assert all(set(group.peer_ids) == set(members) for group in groups)
    assert len({group.peer_ids for group in groups}) == 1, "the same order for all"
    assert all(len(group.gathered) == len(group.peer_ids) for group in groups)


@pytest.mark.parametrize(("number", "clients"), [(2, 0), (3, 0), (8, 0), (2, 1), (5, 3)])
async def test_peers_of_a_step_form_one_group_at_once(clock, number, clients):
    network, ids = make_network(number, clients, patience=30.0)
    assert_one_group(await network.find(ids), ids)
    assert clock.now < 2, "nobody waits when all have come"
    assert {leader for _, leader in network.calls} == {ids[0]}, "all ask the one that the rule names"


def test_leader_changes_between_steps():
    ids = make_ids(8)
    assert len({min(ids, key=lambda peer: rank(step, peer)) for step in range(50)}) > 4


async def test_peers_of_different_steps_never_meet():
    network, (one, other) = make_network(2)
    searches = [network.search(one, 1)[1], network.search(other, 1 + 2**32)[1]]
    done, _ = await asyncio.wait(searches, timeout=2 * PATIENCE)
    assert not done


@pytest.mark.parametrize(
    ("key", "number"),
    [
        *((str(number), number) for number in (0, 1, 5, 2**31, 10**18 - 1)),
        *((key, None) for key in ("", "run", "-1", "+1", "1.0", " 1", "1_0", "0b1", "\u0663", "\u00b2", "1" * 19)),
    ],
)
def test_request_names_its_step(key, number):
    assert parse_step(key) == number


async def test_group_begins_when_the_step_is_due():
    network, ids = make_network(3, patience=30.0)
    controls, tasks = zip(*(network.search(peer_id, is_due=False) for peer_id in ids), strict=True)
    done, _ = await asyncio.wait(tasks, timeout=0.5)
    assert not done, "all are there, but the step is not due"
    controls[0].allow_allreduce()  # of the leader
    assert_one_group(await asyncio.wait_for(asyncio.gather(*tasks), 2), ids)


@pytest.mark.parametrize(("state", "number"), [("down", 1), ("frozen", 1), ("frozen", 2)])
async def test_next_peer_leads_if_the_first_are_unreachable(state, number):
    """A peer that fails is asked again only after those that were not asked yet."""
    network, ids = make_network(5, patience=30.0)
    getattr(network, state).update(ids[:number])
    assert_one_group(await network.find(ids[number:]), ids[number:])
    assert network.peers[ids[number]].missed == dict.fromkeys(ids[:number], "could not be reached")


async def test_abandoned_leader_is_not_asked_again_through_its_followers():
    """Two followers that give up a leader one after the other must not redirect each other to it repeatedly.

    For the leader the step is not due: it keeps the requests without beginning.
    """
    network, ids = make_network(3)
    _, held = network.search(ids[0], is_due=False)
    _, early = network.search(ids[1])
    await asyncio.sleep(PATIENCE / 2)
    _, late = network.search(ids[2])
    assert_one_group(await asyncio.wait_for(asyncio.gather(early, late), 4), ids[1:])
    assert network.calls.count((ids[1], ids[0])) == network.calls.count((ids[2], ids[0])) == 1
    held.cancel()


async def test_early_request_is_kept_until_the_step():
    network, ids = make_network(2, patience=30.0)
    _, early = network.search(ids[1])
    await asyncio.sleep(0.5)
    assert network.peers[ids[0]].requested_step == 1 and network.peers[ids[1]].requested_step == -1
    _, late = network.search(ids[0])
    assert_one_group(await asyncio.wait_for(asyncio.gather(early, late), 2), ids)


async def test_absent_peer_is_waited_for_in_two_rounds_only(clock):
    network, ids = make_network(3)
    present = [peer_id for peer_id in ids if peer_id != ids[2]]
    seconds = []
    for _ in range(4):
        started = clock.now
        await network.find(present)
        seconds.append(clock.now - started)
        assert network.peers[ids[0]].missed == {ids[2]: "did not ask to join"}
    assert min(seconds[:2]) >= PATIENCE > max(seconds[2:])
    assert_one_group(await network.find(ids), ids)


async def test_peer_that_does_not_know_the_leader_is_redirected():
    network, ids = make_network(4, patience=3.0)
    network.know(ids[1:], by=ids[2:])
    assert_one_group(await network.find(ids), ids)


async def test_leader_redirects_its_followers_to_a_better_leader():
    network, ids = make_network(4, patience=30.0)
    network.know(ids[1:], by=ids[1:3])
    tasks = [network.search(peer_id)[1] for peer_id in ids]
    await asyncio.sleep(0.3)
    network.know(ids, by=ids[1:3])
    assert_one_group(await asyncio.wait_for(asyncio.gather(*tasks), 5), ids)


async def test_newcomers_lead_only_newcomers():
    """The first peer has the best rank. It asks another one unless all are new, and may join without being known."""
    for new, known, leader in (([0], [0, 1, 2], 1), ([0], [1, 2], 1), ([0, 1, 2], [0, 1, 2], 0)):
        network, ids = make_network(3)
        network.know(ids, new=[ids[number] for number in new])
        network.know([ids[number] for number in known], new=[ids[number] for number in new], by=ids[1:])
        assert_one_group(await network.find(ids), ids)
        assert {called for _, called in network.calls} == {ids[leader]}


async def test_peers_that_ask_each_other_form_one_group():
    network, ids = make_network(2)
    # For each peer, the other is the only established one and so the only candidate for the leader.
    for own, other in itertools.permutations(ids):
        network.peers[own].set_roster([RosterEntry(own, False, False), RosterEntry(other, False, True)])
    assert_one_group(await network.find(ids), ids)


async def test_search_ends_when_it_is_cancelled_while_the_roster_changes():
    """A search that outlives its cancellation would keep those for the next steps waiting."""
    network, ids = make_network(2)
    _, search = network.search(ids[0], is_due=False)  # it leads, and waits for the other
    for _ in range(5):
        await asyncio.sleep(0)
    network.know(ids)
    await asyncio.sleep(0)
    search.cancel()
    done, _ = await asyncio.wait({search}, timeout=1)
    assert done and search.cancelled()
    assert_one_group(await network.find(ids, number=2), ids)


class GivenUp(set):
    """The leaders that a search has abandoned."""

    def __init__(self):
        self.has_one = asyncio.Event()

    def add(self, leader: PeerID) -> None:
        super().add(leader)
        self.has_one.set()


@pytest.mark.parametrize("later", range(6))
async def test_search_ends_when_it_is_cancelled_while_it_abandons_its_leader(later):
    """`later` counts the turns of the event loop from the decision to the cancellation."""
    network, ids = make_network(2, patience=0.0)
    network.search(ids[0], is_due=False)  # accepts the other peer, and does not begin
    _, search = network.search(ids[1])
    await asyncio.sleep(0)
    network.peers[ids[1]]._search.given_up = given_up = GivenUp()
    await given_up.has_one.wait()
    for _ in range(later):
        await asyncio.sleep(0)
    search.cancel()
    done, _ = await asyncio.wait({search}, timeout=1)
    if not done:
        search.cancel()  # the test itself must end
    assert done and search.cancelled()


async def test_clients_wait_for_a_peer_that_accepts_connections():
    network, ids = make_network(3, clients=2, patience=30.0)
    network.know(ids[1:])
    tasks = [network.search(peer_id)[1] for peer_id in ids[1:]]
    done, _ = await asyncio.wait(tasks, timeout=0.5)
    assert not done
    network.know(ids)
    tasks.append(network.search(ids[0])[1])
    assert_one_group(await asyncio.wait_for(asyncio.gather(*tasks), 3), ids)


@pytest.mark.parametrize(("number", "clients", "size"), [(10, 0, 4), (10, 8, 4), (6, 5, 2), (4, 0, 4)])
async def test_too_many_peers_are_split_into_groups(number, clients, size):
    network, ids = make_network(number, clients, patience=30.0)
    for peer in network.peers.values():
        peer.target_group_size = size
    groups = {group.group_id: group for group in await network.find(ids)}.values()
    assert sorted(peer_id for group in groups for peer_id in group.peer_ids) == sorted(ids)
    num_groups = min(number - clients, -(-number // size))
    assert len(groups) == num_groups
    sizes = [group.group_size for group in groups]
    assert max(sizes) - min(sizes) <= 1
    for group in groups:
        assert any(not network.peers[peer_id].client_mode for peer_id in group.peer_ids)


async def test_banned_peer_is_left_out():
    network, ids = make_network(3, patience=30.0)
    for peer_id in ids[1:]:
        network.peers[peer_id].ban(ids[0], run_time() + 60)
    _, outsider = network.search(ids[0])
    assert_one_group(await network.find(ids[1:]), ids[1:])
    assert not outsider.done()
    assert network.peers[ids[1]].missed == {ids[0]: "banned"}
    async with network.join(ids[1], ids[0], request(number=2)) as answers:
        assert (await anext(answers)).code == averaging_pb2.PROTOCOL_VIOLATION


def request(number: int = 1, schema_hash: bytes = b"schema", gather: bytes = CLAIMS) -> averaging_pb2.JoinRequest:
    return averaging_pb2.JoinRequest(schema_hash=schema_hash, group_key=str(number), gather=gather)


MALFORMED_CLAIMS = [
    *(Claims(bandwidth) for bandwidth in (-1.0, 1e10, math.nan)),
    *(Claims(100.0, distance) for distance in (math.nan, -1.0, 1e7)),
]
MALFORMED = [b"", CLAIMS[:-1], *(CLAIMS + bytes(number) for number in (1, 10**6, 4_194_180))]
MALFORMED += [claims.pack() for claims in MALFORMED_CLAIMS]
LARGE_FIELD = b"\xfa\x07" + b"\x80\x89\x7a" + bytes(2_000_000)  # of a number that the message does not have


@pytest.mark.parametrize(
    ("join_request", "code"),
    [
        (request(number=3), averaging_pb2.NOT_LOOKING_FOR_GROUP),  # a step that is over
        (request(number=2), averaging_pb2.NOT_LOOKING_FOR_GROUP),
        (request(number=4, schema_hash=b"other"), averaging_pb2.BAD_SCHEMA_HASH),
        (averaging_pb2.JoinRequest(), averaging_pb2.BAD_GROUP_KEY),
        (request(number=4), averaging_pb2.ACCEPTED),
        *((request(number=4, gather=claims), averaging_pb2.PROTOCOL_VIOLATION) for claims in MALFORMED),
        (type(request()).FromString(request(4).SerializeToString() + LARGE_FIELD), averaging_pb2.PROTOCOL_VIOLATION),
    ],
    ids=lambda value: "" if isinstance(value, int) else None,
)
async def test_first_answer_to_a_request(join_request, code):
    network, ids = make_network(2)
    network.peers[ids[0]].finish(3)
    async with network.join(*ids, join_request) as answers:
        assert (await anext(answers)).code == code


async def test_pending_requests_are_disbanded_with_the_step():
    network, ids = make_network(2)
    async with network.join(*ids, request()) as answers:
        assert (await anext(answers)).code == averaging_pb2.ACCEPTED
        network.peers[ids[0]].finish(1)
        assert (await anext(answers)).code == averaging_pb2.GROUP_DISBANDED


async def test_silent_members_get_no_share_for_a_while(monkeypatch):
    """A member that answers nothing would cost all others its share of each gradient."""
    network, ids = make_network(3)
    leader = network.peers[ids[0]]
    leader.record_silence({ids[1]}, ids)
    groups = await network.find(ids, 1)
    assert {parse_claims(claims).bandwidth for claims in groups[0].gathered} == {100.0}, "once is no rule"
    leader.record_silence({ids[1]}, ids)
    for number in (2, 3):
        network.know(ids)
        (group, *_) = await network.find(ids, number)
        claims = dict(zip(group.peer_ids, map(parse_claims, group.gathered), strict=True))
        is_led = min(ids, key=lambda peer_id, number=number: rank(number, peer_id)) == ids[0]
        assert claims[ids[1]].bandwidth == (0.0 if is_led else 100.0)
        assert claims[ids[0]].bandwidth == claims[ids[2]].bandwidth == 100.0
    leader.record_silence(set(), ids)
    assert not leader._silences
    monkeypatch.setattr(matchmaking, "SPARE_SECONDS", 0.01)
    for _ in range(2):
        leader.record_silence({ids[2]}, ids)
    await asyncio.sleep(0.02)
    assert [peer_id for peer_id, _ in leader._spared.items()] == [ids[1]], "the time of the other is over"


async def test_request_for_a_step_far_ahead_does_not_hide_the_others():
    network, (leader, *callers) = make_network(3)
    async with AsyncExitStack() as stack:
        for peer_id, number in zip(callers, (2**59, 1), strict=True):
            answers = await stack.enter_async_context(network.join(leader, peer_id, request(number)))
            assert (await anext(answers)).code == averaging_pb2.ACCEPTED
        assert network.peers[leader].requested_step == 1


@pytest.mark.parametrize("num_known", [2, 1])
async def test_strangers_are_let_in_only_if_nobody_else_has_asked(num_known):
    """They are counted nowhere: a hundred of them, which cost nothing, made a group of silent members."""
    network, ids = Network(), make_ids(4)
    for peer_id in ids:
        network.add(peer_id)
    network.know(ids, by=ids[1:])
    network.know(ids[:num_known], by=ids[:1])  # the leader
    searches = [network.search(peer_id)[1] for peer_id in reversed(ids)]
    group = await searches[-1]
    assert set(group.peer_ids) == set(ids[:2] if num_known == 2 else ids)
    await asyncio.sleep(0.05)
    assert [search.done() for search in reversed(searches)] == [peer_id in group for peer_id in ids]
    for search in searches:
        search.cancel()


async def test_peer_that_was_in_a_roster_lately_is_no_stranger(monkeypatch, clock):
    """Its newest report may be late, after a step of any length."""
    network, ids = make_network(3)
    clock.now += matchmaking.KNOWN_SECONDS
    network.know(ids[:2], by=ids[:1])
    assert_one_group(await network.find(ids), ids)
    leader = network.peers[ids[0]]
    leader._absences.update(ids)
    network.know(ids[:2])
    clock.now += matchmaking.KNOWN_SECONDS
    network.know(ids[:2])
    assert leader._known.keys() == leader._absences.keys() == set(ids[:2]), "nothing is kept of peers that have left"


async def test_number_of_pending_requests_is_bounded(monkeypatch):
    monkeypatch.setattr(matchmaking, "MAX_HELD_REQUESTS", 2)
    network, ids = make_network(2)
    expected = [averaging_pb2.ACCEPTED] * 2 + [averaging_pb2.GROUP_IS_FULL, averaging_pb2.ACCEPTED]
    async with AsyncExitStack() as stack:
        for peer_id, code in zip((*make_ids(9)[-3:], ids[1]), expected, strict=True):  # strangers, a known one
            answers = await stack.enter_async_context(network.join(ids[0], peer_id, request()))
            assert (await anext(answers)).code == code
    assert not network.peers[ids[0]]._requests


OTHER_CLAIMS = Claims(1e9).pack()


@pytest.mark.parametrize("members", ["without us", "one twice", "malformed claims", "other claims", "another step"])
async def test_invalid_group_is_not_joined(members):
    """A leader that told two members different claims made them cut the tensors differently, and ban each other."""
    network, ids = make_network(2)

    async def lie(_request, _context):
        peers = {"without us": ids[:1], "one twice": [*ids, ids[1]]}.get(members, ids)
        gathered = [b"" if members == "malformed claims" else CLAIMS] * len(peers)
        group_id = make_group_id(b"8 bytes!", 2 if members == "another step" else 1, peers, gathered)
        yield averaging_pb2.MessageFromLeader(code=averaging_pb2.ACCEPTED)
        yield averaging_pb2.MessageFromLeader(
            code=averaging_pb2.BEGIN_ALLREDUCE,
            group_id=group_id,
            ordered_peer_ids=[peer.to_bytes() for peer in peers],
            gathered=[OTHER_CLAIMS, *gathered[1:]] if members == "other claims" else gathered,
        )

    network.peers[ids[0]].rpc_join_group = lie
    _, search = network.search(ids[1])
    done, _ = await asyncio.wait({search}, timeout=1.0)
    assert not done
