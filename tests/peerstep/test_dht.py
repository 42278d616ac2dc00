"""The DHT of a run beside nodes that lie about themselves, about others and about records."""

import asyncio
import copy
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace

import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2
from hivemind.utils.crypto import RSAPrivateKey
from hivemind.utils.timed_storage import ValueWithExpiration

from peerstep.peer import node as own_node
from peerstep.peer.clock import run_time
from peerstep.peer.node import bucket_of, node_id_of
from peerstep.reports.records import build_validators
from tests.support.dht_nodes import KEY, Nodes, invent_peers, make_hostile, report, report_keys


def own_ids_next_to(protocol, key: DHTID) -> list[tuple[DHTID, PeerID]]:
    return [(DHTID(int(key) ^ (i + 1)), protocol.p2p.peer_id) for i in range(20)]


def made_up_peers_next_to(_protocol, key: DHTID) -> list[tuple[DHTID, PeerID]]:
    return invent_peers(key, 20)


def nobody(_protocol, _key: DHTID) -> list:
    return []


@pytest.mark.peers
@pytest.mark.parametrize(
    ("near", "delay"),
    [(own_ids_next_to, 0.0), (made_up_peers_next_to, 0.0), (nobody, 2.5)],
    ids=["its own key under many IDs", "peers that do not exist", "late, and nothing"],
)
async def test_one_key_hides_no_records(near, delay):
    """Six honest nodes and a newcomer found nothing from the moment at which the reports before expired."""
    async with Nodes() as nodes:
        for _ in range(4):
            await nodes.add()
        await nodes.publish(step=1, lifetime=2.0)
        hostile = make_hostile(near, delay)
        await nodes.add(hostile)
        await asyncio.sleep(2.0)
        for step in (2, 3):
            await nodes.publish(step)
            started = time.monotonic()
            assert await nodes.read_all() == [[step] * 4] * 4
            assert delay or time.monotonic() - started < 2.0
        newcomer = await nodes.add()
        assert await nodes.read(newcomer) == [3] * 4
        assert hostile.num_stored > 0


@pytest.mark.peers
async def test_node_is_where_its_key_places_it():
    """One ping made the target's ID lead to the stranger; 4,000 added 4,000 entries, and each sent all records."""
    async with Nodes() as nodes:
        hostile = make_hostile(own_ids_next_to)
        for _ in range(2):
            await nodes.add()
        await nodes.publish(step=1)
        (victim, _), (target, _) = nodes.honest
        stranger, table = await nodes.add(hostile), victim.protocol.routing_table
        assert victim.node_id == victim.protocol.node_id == node_id_of(victim.peer_id)
        before, num_stored = dict(table.uid_to_peer_id), hostile.num_stored
        claims = [target.node_id, *(DHTID(int(key) ^ i) for key in report_keys() for i in range(1, 7))]
        stub = stranger.protocol.get_stub(victim.peer_id)
        for claim in claims:
            info = dht_pb2.NodeInfo(node_id=claim.to_bytes())
            await stub.rpc_ping(dht_pb2.PingRequest(peer=info), timeout=10)
            await stub.rpc_find(dht_pb2.FindRequest(keys=[claim.to_bytes()], peer=info), timeout=10)
            await stub.rpc_store(dht_pb2.StoreRequest(peer=info), timeout=10)
        assert table.uid_to_peer_id == before and table.get(node_id=target.node_id) == target.peer_id
        assert hostile.num_stored == num_stored, "records were sent to a place that it has chosen"
        assert await nodes.read_all() == [[1, 1]] * 2


def test_late_node_delays_one_read_and_its_answer_counts_in_the_next(clock):
    """It cost each read a second, and steps of 4.8 s took 6.0."""

    class DHTProtocol(own_node.DHTProtocol):  # of an honest node on a bad line
        async def rpc_find(self, *args) -> dht_pb2.FindResponse:
            response = await super().rpc_find(*args)
            await asyncio.sleep(1.7)
            return response

    async def read_often() -> None:
        async with Nodes(is_local=True) as nodes:
            for protocol in (*[own_node.DHTProtocol] * 4, DHTProtocol, make_hostile(nobody, 2.5)):
                await nodes.add(protocol)
            late, seconds = nodes.honest.pop(), 0.0
            for step in range(1, 21):
                await nodes.publish(step)
                await asyncio.sleep(1.0)
                began = clock.now
                assert await nodes.read_all() == [[step] * 4] * 4
                seconds += clock.now - began
            assert seconds < 2.0, "20 reads of four peers at once"
            nodes.honest.append(late)
            await late[0].store(KEY, report(30), run_time() + 60.0, subkey=late[1])
            for node, _ in nodes.honest[:4]:
                node.protocol.storage.clear()  # none but the late node has its record
            reader = nodes.honest[1][0]
            assert 30 not in await nodes.read(reader)
            await asyncio.sleep(2.0)
            assert 30 in await nodes.read(reader)

    asyncio.run(read_often())


async def test_record_in_the_caches_of_others_hides_none():
    """A newcomer found no donor but the one that had asked each node to cache its later offer."""
    async with Nodes(is_local=True) as nodes:
        for _ in range(5):
            await nodes.add()
        (stranger, subkey), *honest = reversed(nodes.honest)
        key, name = DHTID.generate("run_state_averager.all_averagers"), "run_state_averager.all_averagers"
        await asyncio.gather(*(node.store(name, 5.0, run_time() + 40.0, subkey=own) for node, own in honest))
        protocol, expiration = stranger.protocol, run_time() + 170.0
        packed = [protocol.serializer.dumps(value) for value in (subkey, 9.0)]
        signed = protocol.record_validator.sign_value(DHTRecord(key.to_bytes(), *packed, expiration))
        for node, _ in honest:
            await protocol.call_store(node.peer_id, [key], [signed], expiration, subkeys=[subkey], in_cache=True)
        protocol.storage.clear()
        found = await (await nodes.add()).get(name)
        assert {own for _, own in honest} <= found.value.keys()


async def test_table_is_bounded_however_many_keys_call():
    """Each node that was met stayed for good as a replacement."""
    async with Nodes(is_local=True) as nodes:
        node = await nodes.add()
        table = node.protocol.routing_table
        for number in range(5000):
            peer_id = PeerID(b"\x12\x20" + number.to_bytes(32, "big"))
            await node.protocol.update_routing_table(node_id_of(peer_id), peer_id)
        buckets, size = len(table.buckets), node.protocol.bucket_size
        assert len(table.uid_to_peer_id) == len(table.peer_id_to_uid) <= 2 * size * buckets and 20 <= buckets <= 64


async def test_answers_larger_than_a_message_are_read_in_parts(monkeypatch):
    """Above 4 MiB, the asker took the honest node for dead and dropped it: 285 keys sufficed."""
    async with Nodes(is_local=True) as nodes:
        for _ in range(6):
            await nodes.add()
        sizes = []
        answer = own_node.DHTProtocol.rpc_find

        async def find(self, request: dht_pb2.FindRequest, context) -> dht_pb2.FindResponse:
            response = await answer(self, request, context)
            values = [len(result.value) for result in response.results if result.value]  # one may be larger alone
            sizes.append((len(request.keys), sum(values) if len(values) > 1 else 0))
            return response

        monkeypatch.setattr(own_node.DHTProtocol, "rpc_find", find)
        await nodes.publish(step=1)
        monkeypatch.setattr(own_node, "MAX_ANSWER_BYTES", 2000)
        assert await nodes.read_all() == [[1] * 6] * 6
        assert max(num_bytes for num_keys, num_bytes in sizes if num_keys > 1) <= 2000
        assert any(num_keys == 1 for num_keys, _ in sizes)


@pytest.mark.parametrize("has_members", [False, True])
async def test_many_keys_hide_nothing_from_members_of_the_same_rounds(has_members):
    """The initial peer has left. Many IDs were tried, until ten are nearer to each key with reports than others."""
    async with Nodes(is_local=True) as nodes:
        for _ in range(5):
            await nodes.add()
        await nodes.publish(step=1, lifetime=0.1)
        await nodes.read_all()
        hostile = make_hostile(nobody)
        attacked = [report_keys()[bucket_of(subkey)] for _, subkey in nodes.honest]
        for peer_id in {peer_id for key in attacked for _, peer_id in invent_peers(key, 10)}:
            await nodes.add(hostile, peer_id)
        await nodes.honest.pop(0)[0].shutdown()
        for node, _ in nodes.honest:
            node.members = [other.peer_id for other, _ in nodes.honest if has_members]
        await nodes.publish(step=2)
        found = await nodes.read_all()
        assert (found == [[2] * 4] * 4) == has_members


@pytest.fixture
def few_are_many(monkeypatch) -> None:
    """Let twelve trainers be a large run."""
    monkeypatch.setattr(own_node, "FEW_MEMBERS", 6)
    monkeypatch.setattr(own_node, "FEW_PUBLIC", 1)


def private_key_where(is_wanted: Callable[[bytes], bool]) -> RSAPrivateKey:
    """Return a key of a trainer whose subkey is as wanted."""
    while not is_wanted(build_validators("run", key := RSAPrivateKey())[1]):
        pass
    return key


@asynccontextmanager
async def large_run() -> AsyncIterator[Nodes]:
    """Twelve nodes which all know the members of the last rounds, and have read the reports twice."""
    async with Nodes(is_local=True) as nodes:
        for _ in range(12):
            await nodes.add()
        for node, _ in nodes.honest:
            node.members = [other.peer_id for other, _ in nodes.honest]
        for step in (1, 2):
            await nodes.publish(step, lifetime=60.0 + step)
            await nodes.read_all()
        yield nodes


@pytest.mark.usefixtures("few_are_many")
async def test_a_read_in_a_large_run_asks_one_member_for_each_key(monkeypatch):
    asked, answer = [], own_node.DHTProtocol.rpc_find

    async def find(self, request: dht_pb2.FindRequest, context) -> dht_pb2.FindResponse:
        asked.extend(request.keys)
        return await answer(self, request, context)

    async with large_run() as nodes:
        await nodes.publish(step=3, lifetime=63.0)
        monkeypatch.setattr(own_node.DHTProtocol, "rpc_find", find)
        assert await nodes.read_all() == [[3] * 12] * 12
        of_reports = {report_keys()[bucket_of(subkey)].to_bytes() for _, subkey in nodes.honest}
        usual = sum(key in of_reports for key in asked) / 12
        first_time = nodes.honest[-1][0]
        first_time.news.clear()
        asked.clear()
        await nodes.read(first_time)
        at_first = sum(key in of_reports for key in asked)
        assert usual < 2 * len(of_reports) < 8 * len(of_reports) < at_first


@pytest.mark.usefixtures("few_are_many")
@pytest.mark.parametrize("lie", ["nothing", "old records"])
async def test_a_member_of_a_large_run_hides_nobody_of_the_last_read(monkeypatch, lie):
    """Who asks it first asks others, too: somebody is missing there, or has not renewed a report."""
    monkeypatch.setattr(own_node, "RENEWED_SECONDS", 0.0)
    async with large_run() as nodes:
        liar = nodes.honest[5][0].protocol
        before = {key: copy.deepcopy(liar.storage.get(key)) for key in report_keys()} if lie == "old records" else {}
        await nodes.publish(step=3, lifetime=63.0)
        monkeypatch.setattr(liar.storage, "get", before.get)
        honest = [node for node, _ in nodes.honest if node.protocol is not liar]
        assert await asyncio.gather(*map(nodes.read, honest)) == [[3] * 12] * 11


@pytest.mark.usefixtures("few_are_many")
async def test_members_of_a_large_run_hide_no_newcomer_for_ever(monkeypatch):
    """They are the two that are asked for its key. The initial peer, which is none of them, has its record."""
    async with large_run() as nodes:
        buckets = {bucket_of(subkey) for _, subkey in nodes.honest}
        key = private_key_where(lambda subkey: bucket_of(subkey) in buckets)
        new = build_validators("run", key)[1]
        for node, _ in nodes.honest:
            node.members = [other.peer_id for other, _ in nodes.honest[1:]]
        await nodes.publish(step=3, lifetime=63.0)
        await nodes.read_all()
        place = report_keys()[bucket_of(new)]
        liars = nodes.honest[0][0].places_of(place)
        for peer_id in liars:
            storage = nodes.local[peer_id].storage
            monkeypatch.setattr(storage, "get", partial(without, new, storage.get))
        await nodes.add(private_key=key)
        await nodes.publish(step=4, lifetime=64.0)
        reader = next(node for node, _ in nodes.honest[1:] if node.peer_id not in liars)
        for _ in range(40 * own_node.NUM_BUCKETS):
            if len(await nodes.read(reader)) == 13:
                break
        else:
            pytest.fail("never found")


def without(subkey: bytes, get: Callable, key: DHTID) -> ValueWithExpiration | None:
    """Return what a node has stored under a key, without one report."""
    if (value := copy.deepcopy(get(key))) is not None and subkey in value.value:
        del value.value[subkey]
    return value


async def test_a_member_of_a_large_run_hides_nobody_after_two_reads_at_once():
    """As at the end of a step, or by two threads: only one of two trainers under a key has renewed its report."""
    now = run_time()

    def answer(**expirations: float) -> DictionaryDHTValue:
        value = DictionaryDHTValue()
        for subkey, expiration in expirations.items():
            value.store(subkey, b"report", now + expiration)
        return value

    async with Nodes(is_local=True) as nodes:
        node, key = await nodes.add(), report_keys()[0]
        for value in (answer(one=60.0, other=60.0), answer(one=65.0, other=60.0)):
            node.record_news({key: SimpleNamespace(binary_value=value)})
        assert node.lacks_news(key, answer(one=70.0))
        assert not node.lacks_news(key, answer(one=70.0, other=65.0))


@pytest.mark.usefixtures("few_are_many")
async def test_a_trainer_of_a_large_run_whose_reads_have_failed_finds_the_others():
    """Most members of its last round end while it is cut off, others start, and it takes part in no further round."""
    async with large_run() as nodes:
        cut_off, connected = nodes.honest[-1][0], dict(nodes.local)
        nodes.local.clear()
        for _ in range(2):
            await nodes.read(cut_off)
        nodes.local.update(connected)
        for node, _ in nodes.honest[1:9]:
            await node.shutdown()
        # A newcomer beside a known trainer under one key may be found by a later read only, see the test below.
        known = {bucket_of(subkey) for _, subkey in nodes.honest}
        for _ in range(4):
            await nodes.add(private_key=private_key_where(lambda subkey: bucket_of(subkey) not in known))
        await nodes.publish(step=3, lifetime=63.0)
        assert (await nodes.read(cut_off)).count(3) == 8


async def test_nodes_of_a_large_run_find_each_other():
    """Each joins through the first one, and knows few others at first. One in ten leaves without a word."""
    async with Nodes(is_local=True) as nodes:
        for _ in range(24):
            await nodes.add()
        await nodes.read_all()
        for node, _ in nodes.honest[1::10]:
            await node.shutdown()
        for _ in range(2):
            await nodes.publish(step=1)
            found = await nodes.read_all()
        known = [len(node.protocol.routing_table.uid_to_peer_id) for node, _ in nodes.honest if node.is_alive]
        assert min(known) > 18 and min(map(len, found)) == 21
