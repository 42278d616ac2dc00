"""Tests of matchmaking for a global step, on an in-memory network without processes and libp2p."""

import asyncio
import collections
import functools
import itertools
import math
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, aclosing
from functools import partial
from types import SimpleNamespace

import pytest
from google.protobuf.message import DecodeError
from hivemind.averaging.group_info import GroupInfo
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.p2p import P2PDaemonError, PeerID, ServicerBase
from hivemind.proto import averaging_pb2
from hivemind.utils.crypto import RSAPrivateKey

from peerstep.peer.clock import run_time
from peerstep.reports.records import signer_of
from peerstep.rounds import conduct, known_peers, matchmaking, relay, requests
from peerstep.rounds.claims import KEY_BYTES, SIGNATURE_BYTES, Claims, parse_claims, rank, sign, tag_of
from peerstep.rounds.matchmaking import RosterEntry, StepMatchmaking
from peerstep.rounds.requests import parse_step

pytestmark = pytest.mark.usefixtures("patches", "clock")

PATIENCE = 0.6  # min_matchmaking_time in seconds
CLAIMS = Claims(100.0).pack()
SIGNERS: dict[bytes, PeerID] = {}  # by subkey; the peer IDs are none of keys, so that their order is known


def make_ids(number: int) -> list[PeerID]:
    """Return peer IDs in the order in which they are asked to lead step 1."""
    return sorted((PeerID(b"\x12\x20" + bytes([i] * 32)) for i in range(number)), key=lambda peer: rank(1, peer))


@functools.cache
def key_of(peer_id: PeerID) -> RSAPrivateKey:
    key = RSAPrivateKey()
    SIGNERS[RSASignatureValidator(key).local_public_key] = peer_id
    return key


def subkey_of(peer_id: PeerID) -> bytes:
    return RSASignatureValidator(key_of(peer_id)).local_public_key


def entry_of(peer_id: PeerID, leader: PeerID, claims: Claims | None = None, step: int = 1) -> bytes:
    """Return a peer's entry for the list of a leader."""
    scope = known_peers.KnownPeers(peer_id, None, b"runschema").scope_of(peer_id, step, leader)
    return sign(key_of(peer_id), scope, (claims or Claims(100.0, asked_at=run_time())).pack())


def joining(peer_id: PeerID, leader: PeerID, step: int = 1) -> averaging_pb2.JoinRequest:
    """Return what a peer sends to a leader to join its group."""
    return request(step, gather=entry_of(peer_id, leader, step=step) + subkey_of(peer_id))


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
            servicer_type=Servicer, private_key=key_of(peer_id), prefix="run", target_group_size=None,
            min_group_size=2, min_matchmaking_time=patience, request_timeout=0.3, client_mode=client_mode,
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
        entries = [
            RosterEntry(peer_id, subkey_of(peer_id), self.peers[peer_id].client_mode, peer_id not in new)
            for peer_id in known
        ]
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
    monkeypatch.setattr(known_peers, "signer_of", lambda subkey: SIGNERS.get(subkey) or signer_of(subkey))
    monkeypatch.setattr(matchmaking, "RETRY_SECONDS", 0.1)
    monkeypatch.setattr(matchmaking, "LEADER_MARGIN", 0.3)
    monkeypatch.setattr(matchmaking, "SMALL_SECONDS", 0.5)


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


@pytest.mark.parametrize(
    "answer", [averaging_pb2.MessageFromLeader(code=777), DecodeError("no protobuf"), TypeError()]
)
async def test_search_goes_on_whatever_a_leader_answers(answer):
    """One key that answered with an unknown code ended the search of all others, at each step that it led."""
    network, (leader, *others) = make_network(4)

    async def answer_falsely(_request, _context):
        if isinstance(answer, Exception):
            raise answer
        yield answer

    network.peers[leader].rpc_join_group = answer_falsely
    assert_one_group(await network.find(others), others)


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
    assert network.peers[ids[0]].requests.next_step == 1 and network.peers[ids[1]].requests.next_step == -1
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


async def test_halves_that_are_too_late_for_each_other_meet(clock):
    """Each has rounds of its own. The early half waits for the other after two, four and eight of them."""
    network, ids = make_network(5)
    halves, seconds = (ids[:2], ids[2:4]), []
    for number in range(1, 6):
        started = clock.now
        for half in halves:
            network.down = {*ids} - {*half}
            await network.find(half, number)
        seconds.append(clock.now - started)
    assert [duration >= 2 * PATIENCE for duration in seconds] == [True, True, True, False, True]
    for number in (6, 7, 8):
        network.down = {*ids} - {*halves[0]}
        await network.find(halves[0], number)
    network.down = set()
    early = [network.search(peer_id, 9)[1] for peer_id in halves[0]]
    await asyncio.sleep(0.8 * PATIENCE)
    late = [network.search(peer_id, 9)[1] for peer_id in halves[1]]
    assert_one_group(await asyncio.wait_for(asyncio.gather(*early, *late), 5), ids[:4])


async def test_leader_that_is_due_later_is_followed_until_it_begins(clock):
    """It waits for a peer that does not come, so that it begins long after its follower was due."""
    network, ids = make_network(3)
    control, leading = network.search(ids[0], is_due=False)
    _, following = network.search(ids[1])
    await asyncio.sleep(0.9 * PATIENCE)
    control.allow_allreduce()
    assert_one_group(await asyncio.wait_for(asyncio.gather(leading, following), 5), ids[:2])
    assert network.calls.count((ids[1], ids[0])) == 1 and clock.now >= 1.9 * PATIENCE


async def test_leader_that_says_that_it_is_due_and_freezes_is_abandoned(clock):
    network, ids = make_network(3)
    _, leading = network.search(ids[0])
    searches = [network.search(peer_id)[1] for peer_id in ids[1:2]]
    await asyncio.sleep(0.1)
    leading.cancel()
    network.down = {ids[0]}
    searches.append(network.search(ids[2])[1])
    assert_one_group(await asyncio.wait_for(asyncio.gather(*searches), 10), ids[1:])


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
        network.peers[own].set_roster(
            [RosterEntry(own, subkey_of(own), False, False), RosterEntry(other, subkey_of(other), False, True)]
        )
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
async def test_search_ends_when_it_is_cancelled_while_it_abandons_its_leader(later, monkeypatch):
    """`later` counts the turns of the event loop from the decision to the cancellation."""
    network, ids = make_network(2, patience=0.0)
    network.search(ids[0], is_due=False)  # accepts the other peer, and does not begin
    await asyncio.sleep(0)
    monkeypatch.setattr(matchmaking, "Search", partial(matchmaking.Search, given_up=(given_up := GivenUp())))
    _, search = network.search(ids[1])
    await asyncio.sleep(0)
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
    assert not any(peer.missed or peer.absences for peer in network.peers.values()), "all are in a group of the step"


async def test_banned_peer_is_left_out():
    network, ids = make_network(3, patience=30.0)
    for peer_id in ids[1:]:
        network.peers[peer_id].conduct.ban(ids[0], run_time() + 60)
    _, outsider = network.search(ids[0])
    assert_one_group(await network.find(ids[1:]), ids[1:])
    assert not outsider.done()
    assert network.peers[ids[1]].missed == {ids[0]: "banned"}
    async with network.join(ids[1], ids[0], request(number=2)) as answers:
        assert (await anext(answers)).code == averaging_pb2.PROTOCOL_VIOLATION


PROOF = bytes(SIGNATURE_BYTES + KEY_BYTES)


def request(
    number: int = 1, schema_hash: bytes = b"schema", gather: bytes = CLAIMS + PROOF
) -> averaging_pb2.JoinRequest:
    return averaging_pb2.JoinRequest(schema_hash=schema_hash, group_key=str(number), gather=gather)


MALFORMED_CLAIMS = [
    *(Claims(bandwidth) for bandwidth in (-1.0, 1e10, math.nan)),
    *(Claims(100.0, distance) for distance in (math.nan, -1.0, 1e7)),
    *(Claims(100.0, asked_at=time) for time in (math.nan, math.inf, -1.0)),
    Claims(100.0, silent=(bytes(8),) * 9),
]
MALFORMED = [
    b"",
    CLAIMS,
    CLAIMS[:-1] + PROOF,
    *(CLAIMS + PROOF + bytes(1 + number) for number in (0, 10**6, 4_190_000)),
]
MALFORMED += [claims.pack() + PROOF for claims in MALFORMED_CLAIMS]
LARGE_FIELD = b"\xfa\x07" + b"\x80\x89\x7a" + bytes(2_000_000)  # of a number that the message does not have


@pytest.mark.parametrize(
    ("join_request", "code"),
    [
        (request(number=3), averaging_pb2.NOT_LOOKING_FOR_GROUP),  # a step that is over
        (request(number=2), averaging_pb2.NOT_LOOKING_FOR_GROUP),
        (request(number=4, schema_hash=b"other"), averaging_pb2.BAD_SCHEMA_HASH),
        (averaging_pb2.JoinRequest(), averaging_pb2.BAD_GROUP_KEY),
        (request(number=4), averaging_pb2.PROTOCOL_VIOLATION),  # the signature is false
        *((request(number=4, gather=claims), averaging_pb2.PROTOCOL_VIOLATION) for claims in MALFORMED),
        (type(request()).FromString(request(4).SerializeToString() + LARGE_FIELD), averaging_pb2.PROTOCOL_VIOLATION),
    ],
    ids=lambda value: "" if isinstance(value, int) else None,
)
async def test_first_answer_to_a_request(join_request, code):
    network, ids = make_network(2)
    network.peers[ids[0]].requests.finish(3)
    async with network.join(*ids, join_request) as answers:
        assert (await anext(answers)).code == code
    async with network.join(*ids, joining(ids[1], ids[0], step=4)) as answers:
        assert (await anext(answers)).code == averaging_pb2.ACCEPTED


@pytest.mark.parametrize(("leader", "step", "signer"), [(1, 1, 1), (0, 2, 1), (0, 1, 2)])
async def test_request_that_was_signed_for_something_else_is_refused(leader, step, signer):
    """For another leader, for another step, or by another peer."""
    network, ids = make_network(3)
    claims = Claims(100.0, asked_at=run_time())
    scope = known_peers.KnownPeers(ids[1], None, b"runschema").scope_of(ids[1], step, ids[leader])
    entry = sign(key_of(ids[signer]), scope, claims.pack())
    async with network.join(*ids[:2], request(1, gather=entry + subkey_of(ids[signer]))) as answers:
        assert (await anext(answers)).code == averaging_pb2.PROTOCOL_VIOLATION


async def test_pending_requests_are_disbanded_with_the_step():
    network, ids = make_network(2)
    async with network.join(*ids, joining(ids[1], ids[0])) as answers:
        assert (await anext(answers)).code == averaging_pb2.ACCEPTED
        network.peers[ids[0]].requests.finish(1)
        assert (await anext(answers)).code == averaging_pb2.GROUP_DISBANDED


def record_round(peer: StepMatchmaking, silent: Iterable[PeerID], members: list[PeerID], leader: PeerID) -> None:
    """Let a peer see a round in which all members but the silent ones have sent something."""
    others = set(members) - {peer.peer_id, *silent}
    peer.conduct.record_round(leader, members, silent=set(silent), confirming=others, refusing=())


async def test_reducers_that_are_silent_for_most_members_get_no_share_for_a_while(monkeypatch):
    """A member that answers nothing would cost all others its share of each gradient."""
    network, ids = make_network(4)
    steps = (step for step in itertools.count(1) if min(ids, key=lambda peer_id: rank(step, peer_id)) == ids[0])
    for number, num_accusers in zip(steps, (0, 1, 2, 3), strict=False):
        for peer_id in ids[:num_accusers]:
            for _ in range(conduct.MAX_SILENCES):
                record_round(network.peers[peer_id], ids[3:], ids, ids[0])
        network.know(ids)
        (group, *others) = await network.find(ids, number)
        assert {other.group_id for other in others} == {group.group_id}, "nobody has to be told"
        bandwidths = [parse_claims(gathered).bandwidth for gathered in group.gathered]
        is_spared = num_accusers >= 2
        assert bandwidths[group.peer_ids.index(ids[3])] == (0.0 if is_spared else 100.0)
        assert bandwidths.count(100.0) == 4 - is_spared
    peer = network.peers[ids[0]]
    record_round(peer, (), ids, ids[0])
    assert not peer.conduct.silences
    monkeypatch.setattr(conduct, "SPARE_SECONDS", 0.01)
    for _ in range(2):
        record_round(peer, [ids[2]], ids, ids[0])
    await asyncio.sleep(0.02)
    assert peer.conduct.silent == [ids[3]], "the time of the other is over"


async def test_who_is_called_silent_leads_nobody():
    """Those that have seen it silent followed another leader than the rest: two groups, each half of the others' size.

    Whoever has no share answers nothing, and so stays silent for ten minutes after a fault of a link has ended.
    """
    network, ids = make_network(4)
    for peer_id in ids[:2]:
        for _ in range(conduct.MAX_SILENCES):
            record_round(network.peers[peer_id], [ids[2]], ids, ids[0])
    network.know(ids)
    await network.find(ids)
    number = next(n for n in itertools.count(2) if sorted(ids, key=lambda one: rank(n, one))[:2] == [ids[2], ids[0]])
    groups = await network.find(ids, number)
    assert {group.group_id for group in groups} == {groups[0].group_id} and len(groups[0].peer_ids) == 4
    assert {peer.led_by for peer in network.peers.values()} == {ids[0]}


async def test_silence_counts_only_in_a_group_that_others_confirm():
    """A leader that tells each member of another group makes all others look silent."""
    leader, *_, own = ids = make_ids(5)
    for confirming, is_counted in [((), False), (ids[1:2], False), (ids[1:3], True)]:
        peer = conduct.Conduct(own)
        for _ in range(conduct.MAX_SILENCES):
            peer.record_round(leader, ids, silent={ids[3]}, confirming={leader, *confirming}, refusing=())
        assert (ids[3] in peer.silent) == is_counted
    for _ in range(conduct.MAX_SILENCES):
        peer.record_round(own, ids, silent={ids[1]}, confirming=(), refusing=())
    assert ids[1] in peer.silent, "this peer knows what it has told the members"


def test_silent_reducer_is_followed_again_once_it_answers():
    """Only the link between the two may have failed: this peer would miss each step that the other one leads."""
    ids = make_ids(4)
    peer = conduct.Conduct(ids[0])
    for _ in range(conduct.MAX_SILENCES):
        peer.record_round(ids[1], ids, silent={ids[3]}, confirming=ids[1:3], refusing=())
    peer.record_round(ids[1], ids, silent=(), confirming=ids[1:], refusing=(), answering=ids[1:3])
    assert not peer.may_lead(ids[3]), "it has only sent its own values"
    peer.record_round(ids[1], ids, silent=(), confirming=ids[1:], refusing=(), answering=ids[1:])
    assert peer.may_lead(ids[3]) and not peer.silent


def test_leader_of_small_groups_leads_again_soon_and_later_if_it_forms_more_of_them(clock):
    """It may have reached no others, as during a fault of its link."""
    ids = make_ids(2)
    peer, seconds = conduct.Conduct(ids[0]), []
    for is_small in (True, True, True, True, True, True, True, False, True, True):
        peer.record_group(ids[1], 2, is_small)
        began = clock.now
        while not peer.may_lead(ids[1]):
            clock.now += 10.0
        seconds.append(10 * round((clock.now - began) / 10.0))
    assert seconds == pytest.approx([0, 60, 120, 240, 480, 600, 600, 0, 0, 60], abs=10)


def test_leader_whose_group_most_members_do_not_know_leads_no_more():
    ids = make_ids(5)
    for refusing, may_lead in [((), True), (ids[1:2], True), (ids[1:4], False)]:
        peer = conduct.Conduct(ids[4])
        peer.record_round(ids[0], ids, silent=set(ids[1:4]), confirming={ids[0]}, refusing=refusing)
        assert peer.may_lead(ids[0]) == may_lead
    peer = conduct.Conduct(ids[3])
    peer.record_round(ids[0], ids[:4], silent=set(), confirming={ids[0]}, refusing=ids[1:3])
    assert peer.may_lead(ids[0]), "in a group of four, two keys could say so"
    peer = conduct.Conduct(ids[2])
    peer.record_round(ids[0], ids[:3], silent={ids[1]}, confirming={ids[0]}, refusing=ids[1:2])
    assert peer.may_lead(ids[0]), "one member's word is not enough"


async def test_request_for_a_step_far_ahead_does_not_hide_the_others():
    network, (leader, *callers) = make_network(3)
    async with AsyncExitStack() as stack:
        for peer_id, number in zip(callers, (2**59, 1), strict=True):
            asked = joining(peer_id, leader, number)
            answers = await stack.enter_async_context(network.join(leader, peer_id, asked))
            assert (await anext(answers)).code == averaging_pb2.ACCEPTED
        assert network.peers[leader].requests.next_step == 1


async def test_requests_of_a_stranger_count_for_a_short_time(clock):
    """One key that asked for each step, without a report, kept a lone trainer from 18 of 24 steps."""
    network, (leader, known, stranger) = make_network(3)
    forget(network, stranger, by=[leader])
    for _ in range(2):
        for seconds, step in ((0.0, 1), (1.0 + requests.STRANGER_SECONDS, -1)):
            clock.now += seconds
            async with network.join(leader, stranger, joining(stranger, leader)) as answers:
                assert (await anext(answers)).code == averaging_pb2.ACCEPTED
                assert network.peers[leader].requests.next_step == step
        async with network.join(leader, known, joining(known, leader, 3)) as answers:
            assert (await anext(answers)).code == averaging_pb2.ACCEPTED
            assert network.peers[leader].requests.next_step == 3
        clock.now += known_peers.KNOWN_SECONDS
        network.know([known], by=[leader])


def forget(network: Network, *peer_ids: PeerID, by: Iterable[PeerID]) -> None:
    """Let peers not know others."""
    for peer in (network.peers[peer_id] for peer_id in by):
        for peer_id in peer_ids:
            del peer.roster[peer_id], peer.known.public_keys[peer_id]


async def test_strangers_are_let_in_once_the_leader_has_read_their_reports():
    """They are counted nowhere: a hundred of them, which cost nothing, made a group of silent members."""
    network, ids = make_network(4)
    forget(network, *ids[2:], by=ids[:1])  # the leader
    searches = [network.search(peer_id)[1] for peer_id in reversed(ids)]
    group = await searches[-1]
    assert set(group.peer_ids) == set(ids[:2])
    for search in searches:
        search.cancel()
    await asyncio.gather(*searches, return_exceptions=True)
    network.know(ids)
    assert_one_group(await network.find(ids, 2), ids)


async def test_peer_that_was_in_a_roster_lately_is_no_stranger(monkeypatch, clock):
    """Its newest report may be late, after a step of any length."""
    network, ids = make_network(3)
    clock.now += known_peers.KNOWN_SECONDS
    network.know(ids[:2], by=ids[:1])
    assert_one_group(await network.find(ids), ids)
    leader = network.peers[ids[0]]
    leader.absences.update(ids)
    network.know(ids[:2])
    clock.now += known_peers.KNOWN_SECONDS
    network.know(ids[:2])
    kept = leader.known.public_keys.keys(), leader.absences.keys()
    assert kept == (set(ids[:2]), set(ids[:2])), "nothing is kept of peers that have left"


async def test_number_of_pending_requests_is_bounded(monkeypatch):
    monkeypatch.setattr(requests, "MAX_HELD_REQUESTS", 2)
    network, ids = make_network(2)
    expected = [averaging_pb2.ACCEPTED] * 2 + [averaging_pb2.GROUP_IS_FULL, averaging_pb2.ACCEPTED]
    async with AsyncExitStack() as stack:
        for peer_id, code in zip((*make_ids(9)[-3:], ids[1]), expected, strict=True):  # strangers, a known one
            answers = await stack.enter_async_context(network.join(ids[0], peer_id, joining(peer_id, ids[0])))
            assert (await anext(answers)).code == code
    assert not network.peers[ids[0]].requests.held


@pytest.fixture
def small_tree(monkeypatch) -> None:
    """Let a leader of nine send its list to four, in two trees with two branches at each member."""
    monkeypatch.setattr(relay, "MAX_DIRECT", 2)
    monkeypatch.setattr(relay, "FANOUT", 2)


async def never(*_) -> None:
    await asyncio.sleep(math.inf)


async def answer_shortened(digest: bytes, _peer_id: PeerID) -> averaging_pb2.MessageFromLeader:
    return averaging_pb2.MessageFromLeader(code=averaging_pb2.BEGIN_ALLREDUCE, group_id=digest)


async def answer_lists_alone(answer: Callable, answer_for_keys: Callable, wanted: bytes, peer_id: PeerID):
    return await (answer if len(wanted) == relay.DIGEST_BYTES else answer_for_keys)(wanted, peer_id)


class FalseLeader:
    """A leader that sends another list than that of the requests.

    :param change: takes the true entries, and returns those that it sends
    """

    def __init__(self, network: Network, peer_id: PeerID, change: Callable[[dict[PeerID, bytes]], dict]):
        self.network, self.peer_id, self.change = network, peer_id, change
        self.asked: dict[PeerID, bytes] = {}
        self.keys: list[bytes] = []  # what it tells those that ask for keys
        network.peers[peer_id].rpc_join_group = self.lead

    async def lead(self, request, context):
        yield averaging_pb2.MessageFromLeader(code=averaging_pb2.ACCEPTED)
        if len(request.gather) < KEY_BYTES:
            yield averaging_pb2.MessageFromLeader(gathered=self.keys)
            return
        self.asked[context.remote_id] = request.gather[:-KEY_BYTES]
        await asyncio.sleep(0.1)  # until all have asked
        entries = self.change({**self.asked, self.peer_id: entry_of(self.peer_id, self.peer_id)})
        yield averaging_pb2.MessageFromLeader(
            code=averaging_pb2.BEGIN_ALLREDUCE,
            group_id=bytes(relay.DIGEST_BYTES),  # as if the list were elsewhere
            ordered_peer_ids=[peer_id.to_bytes() for peer_id in entries],
            gathered=entries.values(),
        )


LEADER, *MEMBERS = make_ids(4)
INVENTED = PeerID(b"\x12\x20" + bytes([7, 1] * 16))
OLD = Claims(100.0, asked_at=1.0)


class NoPeerID:
    def to_bytes(self) -> bytes:
        return bytes(100)


FALSE_LISTS = {
    "without a member": lambda entries: {p: e for p, e in entries.items() if p not in MEMBERS},
    "without its leader": lambda entries: {p: e for p, e in entries.items() if p != LEADER},
    "an invented distance": lambda entries: (
        entries
        | {
            p: Claims(0.0, 64.0, asked_at=run_time()).pack() + e[-SIGNATURE_BYTES:]
            for p, e in entries.items()
            if p in MEMBERS
        }
    ),
    "its own signature": lambda entries: (
        entries | {p: sign(key_of(LEADER), b"", Claims(0.0, 64.0, asked_at=run_time()).pack()) for p in MEMBERS}
    ),
    "unsigned": lambda entries: dict.fromkeys(entries, CLAIMS),
    "empty": lambda entries: dict.fromkeys(entries, b""),
    "two exchanged": lambda entries: entries | {MEMBERS[0]: entries[MEMBERS[1]], MEMBERS[1]: entries[MEMBERS[0]]},
    "of another step": lambda entries: entries | {LEADER: entry_of(LEADER, LEADER, step=2)},
    "for another leader": lambda entries: entries | {LEADER: entry_of(LEADER, MEMBERS[0])},
    "old": lambda entries: entries | {LEADER: entry_of(LEADER, LEADER, OLD)},
    "an invented member": lambda entries: entries | {INVENTED: entry_of(LEADER, LEADER)},
    "a peer ID that is none": lambda entries: entries | {NoPeerID(): b""},
}


@pytest.mark.parametrize("kind", FALSE_LISTS)
async def test_leader_of_a_false_group_leads_no_more(kind, monkeypatch, clock):
    """Such leaders replaced the parameters of all members, or took most of each round."""
    warnings: list[str] = []
    monkeypatch.setattr(conduct.logger, "warning", warnings.append)
    network, ids = make_network(4)
    FalseLeader(network, ids[0], FALSE_LISTS[kind])
    assert_one_group(await network.find(ids[1:], timeout=60.0), ids[1:])
    for peer_id in ids[1:]:
        assert not network.peers[peer_id].conduct.may_lead(ids[0])
    assert [str(ids[0]) in warning for warning in warnings] == [True] * 3, "one line at each member"
    kept = {peer_id: len(network.peers[peer_id].requests.relay._lists) for peer_id in ids[1:]}
    assert {*kept.values()} == {1}, "the true list; no false one, which may have 4 MiB"
    step = next(step for step in range(2, 99) if min(ids, key=lambda peer_id: rank(step, peer_id)) == ids[0])
    network.know(ids)
    network.calls.clear()
    assert_one_group(await network.find(ids[1:], step), ids[1:])
    assert len(warnings) == 3 and ids[0] not in {callee for _, callee in network.calls}
    clock.now += conduct.LEAVE_OUT_SECONDS
    assert network.peers[ids[1]].conduct.may_lead(ids[0])


async def test_claims_cannot_be_used_again():
    """A leader keeps what members have asked with, and lists them in a later attempt at the same step."""
    network, ids = make_network(4)
    leader = FalseLeader(network, ids[0], lambda entries: entries)
    assert_one_group(await network.find(ids[1:]), ids)
    kept = {peer_id: entry for peer_id, entry in leader.asked.items() if peer_id != ids[1]}
    leader.change = lambda entries: entries | kept
    network.know(ids)
    _, search = network.search(ids[1])
    await asyncio.sleep(1.0)
    assert not network.peers[ids[1]].conduct.may_lead(ids[0])
    search.cancel()


@pytest.mark.parametrize("asked_at", [0.0, -3000.0, 3000.0, 1e12])
async def test_leader_lists_no_claims_that_members_refuse(asked_at):
    """One key with an old entry made all honest leaders lead no more."""
    network, ids = make_network(4)
    false = ids[3]
    asked_at = run_time() + asked_at if abs(asked_at) == 3000.0 else asked_at
    network.peers[false].known.sign = lambda packed, step, leader, silent: entry_of(
        false, leader, Claims(100.0, asked_at=asked_at), step
    )
    searches = [network.search(peer_id)[1] for peer_id in ids]
    assert_one_group(await asyncio.wait_for(asyncio.gather(*searches[:3]), 60.0), ids[:3])
    assert all(network.peers[peer_id].conduct.may_lead(ids[0]) for peer_id in ids[1:3])
    searches[3].cancel()


async def test_claims_in_the_list_of_one_leader_do_not_age_those_in_that_of_another():
    """A peer that sets its clock ahead in a round which a leader misses would make its next list look old."""
    network, ids = make_network(4)
    step = next(step for step in range(2, 99) if min(ids, key=lambda peer_id: rank(step, peer_id)) == ids[1])
    ahead = Claims(100.0, asked_at=run_time() + 1000.0)
    signs = network.peers[ids[3]].known.sign
    network.peers[ids[3]].known.sign = lambda packed, step, leader, silent: entry_of(ids[3], leader, ahead, step)
    assert_one_group(await network.find([ids[0], *ids[2:]], timeout=60.0), [ids[0], *ids[2:]])
    network.peers[ids[3]].known.sign = signs
    network.know(ids)
    assert_one_group(await network.find(ids, step, timeout=60.0), ids)
    assert all(network.peers[peer_id].conduct.may_lead(ids[1]) for peer_id in ids)


async def test_groups_without_most_peers_are_not_joined():
    """In a group of two, nothing bounds what the leader sends."""
    network, ids = make_network(5)
    assert_one_group(await network.find(ids, 100), ids)

    async def answer(request, context):
        own = entry_of(ids[0], ids[0], step=int(request.group_key))
        pair = {context.remote_id: request.gather[:-KEY_BYTES], ids[0]: own}
        yield averaging_pb2.MessageFromLeader(code=averaging_pb2.ACCEPTED)
        yield averaging_pb2.MessageFromLeader(
            code=averaging_pb2.BEGIN_ALLREDUCE,
            ordered_peer_ids=[peer_id.to_bytes() for peer_id in pair],
            gathered=pair.values(),
        )

    network.peers[ids[0]].rpc_join_group = answer
    steps = [step for step in range(1, 99) if min(ids, key=lambda peer_id: rank(step, peer_id)) == ids[0]]
    for step, may_lead in zip(steps[:2], (True, False), strict=True):
        network.know(ids)
        assert_one_group(await network.find(ids[1:], step), ids[1:])
        assert all(network.peers[peer_id].conduct.may_lead(ids[0]) == may_lead for peer_id in ids[1:])


async def test_few_peers_form_a_group_once_the_others_do_not_come(clock):
    """Three of five have died, and their reports are not old enough yet."""
    network, ids = make_network(5)
    assert_one_group(await network.find(ids, 100), ids)
    begun = clock.now
    groups = await network.find(ids[:2], timeout=60.0)
    assert_one_group(groups, ids[:2])
    assert clock.now - begun >= PATIENCE + matchmaking.SMALL_SECONDS
    assert all(network.peers[peer_id].conduct.may_lead(other) for peer_id in ids[:2] for other in ids)


async def test_peers_that_return_are_not_missed():
    """As after a partition, whose sides see each other's reports before they are in rounds together."""
    network, ids = make_network(4)
    assert_one_group(await network.find(ids[:2], 100), ids[:2])
    network.know(ids)
    network.down.update(ids[2:])
    assert_one_group(await network.find(ids[:2], 101), ids[:2])
    assert all(network.peers[peer_id].conduct.may_lead(other) for peer_id in ids[:2] for other in ids)


@pytest.mark.parametrize("is_passed_on", [False, True])
async def test_member_needs_no_report_of_another_one(request, clock, is_passed_on):
    """The leader has read it a moment before. One key that showed it to a leader alone made it lead no more.

    The member asks for its key: in a large group, who has passed the list on, which may have had to ask, too.
    """
    if is_passed_on:
        request.getfixturevalue("small_tree")
    network, ids = make_network(9 if is_passed_on else 4)
    forget(network, ids[3], by=[*ids[1:3], *ids[4:]])
    begun = clock.now
    assert_one_group(await network.find(ids), ids)
    assert clock.now - begun < 2.0
    assert all(network.peers[peer_id].conduct.may_lead(ids[0]) for peer_id in ids)
    assert {callee for _, callee in network.calls} > {ids[0]} or not is_passed_on


@pytest.mark.usefixtures("small_tree")
@pytest.mark.parametrize("answer", [never, answer_shortened])
async def test_keys_that_one_member_does_not_tell_are_asked_of_the_leader(monkeypatch, answer):
    network, ids = make_network(9)
    forget(network, ids[3], by=ids[4:])
    for peer_id in ids[1:]:
        own = network.peers[peer_id].requests.relay
        monkeypatch.setattr(own, "answer", partial(answer_lists_alone, own.answer, answer))
    assert_one_group(await network.find(ids, timeout=30.0), ids)
    assert all(network.peers[peer_id].conduct.may_lead(other) for peer_id in ids for other in ids)


async def test_a_leader_that_can_be_reached_no_more_is_not_blamed_for_a_key(monkeypatch):
    network, ids = make_network(4)
    forget(network, ids[3], by=ids[1:2])
    own = network.peers[ids[0]].requests.relay
    monkeypatch.setattr(own, "answer", never)
    found = asyncio.gather(*(network.search(peer_id)[1] for peer_id in ids[2:]), network.search(ids[0])[1])
    _, search = network.search(ids[1])
    assert_one_group(await found, ids)
    await asyncio.wait({search}, timeout=10.0)
    assert network.peers[ids[1]].conduct.may_lead(ids[0])
    search.cancel()


async def test_list_with_many_strangers_is_left_and_frames_nobody():
    """Keys without reports cost nothing: 60 of them, which reduce nothing, would have most of each gradient."""
    network, ids = make_network(4)
    strangers = set(make_ids(7)) - {*ids}
    leader = FalseLeader(network, ids[0], lambda entries: entries | {p: entry_of(p, ids[0]) for p in strangers})
    leader.keys = [subkey_of(peer_id) for peer_id in strangers]
    assert_one_group(await network.find(ids[1:]), ids[1:])
    assert all(network.peers[peer_id].conduct.may_lead(ids[0]) for peer_id in ids)
    assert leader.asked


async def test_key_of_another_peer_signs_nothing():
    """A member's peer ID follows from its key."""
    network, ids = make_network(3)
    entries = {peer_id: entry_of(peer_id, ids[0]) for peer_id in ids}
    keys = {peer_id: subkey_of(peer_id) for peer_id in ids}
    network.peers[ids[1]].known.check_list(entries, 1, ids[0], entries[ids[1]], keys)
    scope = network.peers[ids[0]].known.scope_of(ids[2], 1, ids[0])
    for key in (key_of(ids[0]), RSAPrivateKey()):
        false = sign(key, scope, Claims(100.0, asked_at=run_time()).pack())
        with pytest.raises(ValueError, match="has not signed"):
            network.peers[ids[1]].known.check_list(entries | {ids[2]: false}, 1, ids[0], entries[ids[1]], keys)


async def test_group_in_which_nobody_reduces_is_false():
    """Shares of nobody made the round fail at all members, which lost their contributions."""
    network, ids = make_network(3)
    peer, claims = network.peers[ids[2]], Claims(0.0, asked_at=run_time())
    entries = {peer_id: entry_of(peer_id, ids[0], claims) for peer_id in ids}
    with pytest.raises(ValueError, match="nobody reduces"):
        peer.known.check_list(entries, 1, ids[0], entries[ids[2]], peer.known.all_keys)


async def test_leader_of_hundreds_hardly_waits_for_the_last_one(monkeypatch, clock):
    """One of 512 has always just left: all others waited for 2.5 s in each step."""
    monkeypatch.setattr(matchmaking, "MISSING_PART", 1)
    network, ids = make_network(5, patience=3.0)
    assert_one_group(
        await asyncio.wait_for(asyncio.gather(*(network.search(one)[1] for one in ids[:4])), 10.0), ids[:4]
    )
    assert 0.3 < clock.now < 1.0


@pytest.mark.parametrize("delay", [0.5, math.inf])
async def test_leader_of_a_large_group_waits_half_as_long_for_the_last_one(monkeypatch, clock, delay):
    """One of 33 trainers that asked half a second after the others was in no round."""
    monkeypatch.setattr(matchmaking, "MISSING_PART", 3)
    network, ids = make_network(5, patience=3.0)
    others = asyncio.gather(*(network.search(peer_id)[1] for peer_id in ids[:4]))
    present = ids
    if delay < math.inf:
        await asyncio.sleep(delay)
        last = network.search(ids[4])[1]
        assert_one_group([await asyncio.wait_for(last, 10.0)], ids)
    else:
        present = ids[:4]
    assert_one_group(await others, present)
    assert clock.now < 2.0


@pytest.mark.usefixtures("small_tree")
@pytest.mark.parametrize("answer", [None, never, answer_shortened])
async def test_members_pass_on_the_list_of_a_large_group(monkeypatch, answer):
    """One of them is a client, and another one may be silent, or lie: who relies on it asks others."""
    network, ids = make_network(9, clients=1)
    served = []
    for peer_id, peer in network.peers.items():
        own = peer.requests.relay
        handler = answer if answer and peer_id == ids[1] else own.answer
        monkeypatch.setattr(own, "answer", partial(count_list, served, handler))
    assert_one_group(await network.find(ids, timeout=30.0), ids)
    assert {*served} == {*ids[4:]}, "the leader sends its list to three"


async def count_list(served: list[PeerID], handler: Callable, digest: bytes, peer_id: PeerID):
    served.append(peer_id)
    return await handler(digest, peer_id)


@pytest.mark.usefixtures("small_tree")
async def test_who_claims_most_is_not_always_near_the_leader(monkeypatch):
    """It could delay a quarter of a large group in each step: it passes no list on, and each then waits for it."""
    network, ids = make_network(12)
    served, asked_in = [], []
    own = network.peers[ids[1]].requests.relay
    monkeypatch.setattr(own, "answer", partial(count_list, served, own.answer))
    for step in range(1, 9):
        claims = [Claims(1e9 if peer_id == ids[1] else 100.0) for peer_id in ids]
        controls = [Control(step, True, of_peer) for of_peer in claims]
        searches = zip(ids, controls, strict=True)
        groups = await asyncio.gather(*(network.peers[peer_id].look_for_group(c) for peer_id, c in searches))
        assert_one_group(groups, ids)
        asked_in += [step] if served else []
        served.clear()
        for peer in network.peers.values():
            peer.requests.finish(step)
    assert 0 < len(asked_in) < 7


@pytest.mark.usefixtures("small_tree")
async def test_leader_gives_its_list_to_those_that_get_it_from_nobody(monkeypatch):
    network, ids = make_network(9)
    for peer_id in ids[1:]:
        monkeypatch.setattr(network.peers[peer_id].requests.relay, "answer", never)
    searches = asyncio.gather(*(network.search(peer_id)[1] for peer_id in ids))
    await asyncio.sleep(relay.RELAY_SECONDS)
    assert 0 < sum(peer.awaits_list for peer in network.peers.values()) < 6
    assert_one_group(await searches, ids)
    assert not any(peer.awaits_list for peer in network.peers.values())


async def test_a_list_is_passed_on_to_peers_of_the_run_alone(clock):
    """A peer waits for one list at a time, and not for ever."""
    network, (leader, member) = make_network(2)
    stranger = make_ids(9)[-1]
    asked = request(gather=bytes(relay.DIGEST_BYTES))
    refused = await codes_of(network, leader, stranger, asked)
    began = clock.now
    at_once = await asyncio.gather(*(codes_of(network, leader, member, asked) for _ in range(2)))
    assert refused == [averaging_pb2.PROTOCOL_VIOLATION]
    assert at_once == [[averaging_pb2.ACCEPTED, averaging_pb2.GROUP_DISBANDED]] * 2
    assert clock.now - began == pytest.approx(relay.HOLD_SECONDS, abs=0.1)


async def test_a_list_is_sent_once_to_each_of_its_members():
    """Who asks again and again, or asks for one of another group, would be sent 44 KB for 100 bytes each time."""
    network, (leader, member, other) = make_network(3)
    passed_on = network.peers[leader].requests.relay
    digest = passed_on.keep(relay.build_list({peer_id: entry_of(peer_id, leader) for peer_id in (leader, member)}), {})
    refused = [averaging_pb2.ACCEPTED, averaging_pb2.GROUP_DISBANDED]
    for asked in (request(gather=digest), request(gather=digest + tag_of(member) + tag_of(other))):
        codes = [await codes_of(network, leader, peer_id, asked) for peer_id in (member, member, other)]
        assert codes == [[averaging_pb2.ACCEPTED, averaging_pb2.BEGIN_ALLREDUCE], refused, refused]


async def test_a_large_request_for_a_list_is_not_held(clock):
    network, (leader, member) = make_network(2)
    asked = request(gather=bytes(relay.DIGEST_BYTES))
    asked.group_key = "1" * requests.MAX_REQUEST_BYTES
    assert await codes_of(network, leader, member, asked) == [averaging_pb2.BAD_GROUP_KEY]
    assert clock.now < 1.0


async def codes_of(network: Network, leader: PeerID, caller: PeerID, asked: averaging_pb2.JoinRequest) -> list[int]:
    async with network.join(leader, caller, asked) as answers:
        return [answer.code async for answer in answers]


@pytest.mark.usefixtures("small_tree")
async def test_a_silent_member_is_asked_once_for_a_list(monkeypatch, clock):
    """Beside clients and few public members, both ways to a client may lead through the same one."""
    network, ids = make_network(12, clients=9)
    asked = []
    monkeypatch.setattr(network.peers[ids[1]].requests.relay, "answer", partial(count_list, asked, never))
    assert_one_group(await network.find(ids, timeout=30.0), ids)
    assert asked and len({*asked}) == len(asked)
    assert clock.now < 1.5 * relay.RELAY_SECONDS


@pytest.mark.usefixtures("small_tree")
async def test_a_list_that_comes_late_is_awaited_but_not_from_a_silent_member(monkeypatch, clock):
    """Each silent one cost as much as a slow one: among 256 trainers half of them asked the leader at last."""
    monkeypatch.setattr(relay, "RELAY_SECONDS", 6.0)
    network, ids = make_network(9)
    silent, slow = network.peers[ids[1]], network.peers[ids[2]].requests.relay
    join, pass_on = silent.rpc_join_group, slow.answer

    async def answer(asked: averaging_pb2.JoinRequest, context) -> AsyncIterator:
        if len(asked.gather) == relay.DIGEST_BYTES:
            await asyncio.sleep(math.inf)
        async for message in join(asked, context):
            yield message

    async def answer_slowly(*asked) -> averaging_pb2.MessageFromLeader:
        await asyncio.sleep(2.0)
        return await pass_on(*asked)

    monkeypatch.setattr(silent, "rpc_join_group", answer)
    monkeypatch.setattr(slow, "answer", answer_slowly)
    of_leader = network.peers[ids[0]].requests.relay
    monkeypatch.setattr(of_leader, "answer", never)
    assert_one_group(await network.find(ids, timeout=30.0), ids)
    assert clock.now < 2 * (relay.ANSWER_SECONDS + 2.0)


@pytest.mark.parametrize(("num_relays", "num_others"), [(48, 80), (192, 320), (3, 200), (1, 40)])
def test_a_list_reaches_all_members_of_any_group(num_relays, num_others):
    """Only those that can be called pass it on, each to few others if there are enough of them."""
    relays = make_ids(num_relays + 1)[1:]
    relays = [peer_id for peer_id in relays if peer_id != LEADER]
    others = [PeerID(b"\x12\x20" + bytes([9, n % 250, n // 250] + [1] * 29)) for n in range(num_others)]
    parents = relay.parents_of(LEADER, relays, others)
    assert parents.keys() == {*relays, *others}
    assert {*parents.values()} <= {LEADER, *relays}
    most = max(collections.Counter(parents.values()).values())
    assert most <= max(relay.FANOUT, math.ceil(len(parents) / (1 + len(relays))))
    for member in parents:
        steps = 0
        while member != LEADER:
            member, steps = parents[member], steps + 1
        assert steps <= 5
