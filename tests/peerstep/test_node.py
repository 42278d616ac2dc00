"""Workarounds for hivemind's DHT and libp2p's daemon."""

import asyncio
import contextlib
import math
import multiprocessing
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock, MagicMock

import psutil
import pytest
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerInfo
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
from hivemind.proto.dht_pb2 import FOUND_DICTIONARY, FindRequest, FindResponse, FindResult, NodeInfo
from hivemind.utils import MPFuture, MSGPackSerializer
from hivemind.utils.multiaddr import Multiaddr

from peerstep.local_peer import end_dht, load_identity
from peerstep.peer import node as node_module
from peerstep.peer.clock import run_time
from peerstep.peer.node import (
    NUM_BUCKETS,
    bucket_of,
    close_relayed_connections,
    compress,
    node_id_of,
    receive_raw_data,
)
from peerstep.reports.records import get_dictionary, store_record
from tests.support.engine import local_peer
from tests.support.processes import wait_until

OFFERS = "run_state_averager.all_averagers"
HOP = "/libp2p/circuit/relay/0.2.0/hop"  # what a peer behind NAT asks a relay for
RELAY = "/ip4/127.0.0.1/tcp/31337/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


@pytest.mark.peers
def test_daemon_has_the_relays_that_it_is_given_and_sockets_of_this_user_alone(tmp_path):
    """By default libp2p uses no relay until it has found four candidates or three minutes have passed.

    It also waits if it finds fewer relays than it was given addresses.
    """
    relays = [RELAY, RELAY.replace("/tcp/31337", "/udp/31337/quic-v1")]
    with local_peer(tmp_path, "run", use_relay=True, use_auto_relay=True, trusted_relays=relays) as peer:
        process = psutil.Process(peer.dht.pid)
        (daemon,) = process.children()
        assert {f"-trustedRelays={RELAY}", "-relayDiscovery=0"} <= set(daemon.cmdline())
        folder = Path(re.search(r"/unix(/\S+)/", " ".join(daemon.cmdline()))[1])
        assert (folder.stat().st_uid, folder.stat().st_mode & 0o777) == (os.getuid(), 0o700) and any(folder.iterdir())
        # Not what is in /tmp: a bare hivemind peer of another test may have put its sockets there.
        paths = [socket.laddr for owner in (process, daemon) for socket in owner.net_connections("unix")]
        assert [path for path in paths if "-sockets-" in path and not path.startswith(f"{folder}/")] == []


@pytest.mark.peers
@pytest.mark.parametrize("use_relay", [True, False])
def test_peer_relays_for_nobody_unless_it_is_asked_to(tmp_path, use_relay):
    with local_peer(tmp_path / "one", "run", use_relay=use_relay) as one:
        address = str(one.dht.get_visible_maddrs()[0])
        with local_peer(tmp_path / "two", "run", (address,)) as two:

            async def ask_for_a_relay() -> None:
                p2p = await two.dht.replicate_p2p()
                await p2p._client.stream_open(one.dht.peer_id, (HOP,))

            is_refused = pytest.raises(ControlFailure, match="not supported")
            with contextlib.nullcontext() if use_relay else is_refused:
                asyncio.run(ask_for_a_relay())


@pytest.mark.peers
def test_reports_under_several_keys_are_read_as_one_and_no_copy_counts(tmp_path):
    """A trainer that stores its report under each of the keys has one report."""
    with local_peer(tmp_path / "one", "run") as one:
        address = str(one.dht.get_visible_maddrs()[0])
        with local_peer(tmp_path / "two", "run", (address,)) as two:
            right = bucket_of(two.public_key)
            store_record(two.dht, "run_training_progress", two.public_key, {"epoch": 1}, 50.0)
            store_record(one.dht, "run_training_progress", one.public_key, {"epoch": 2}, 50.0)
            for bucket in set(range(NUM_BUCKETS)) - {right}:
                key = f"run_training_progress.{bucket}"
                two.dht.store(key, {"epoch": 9}, run_time() + 60, subkey=two.public_key)
            wait_until(lambda: len(get_dictionary(one.dht, "run_training_progress")) == 2, 120, "both reports")
            for peer in (one, two):
                found = get_dictionary(peer.dht, "run_training_progress")
                assert [found[p.public_key].value["epoch"] for p in (two, one)] == [1, 2]


async def test_announced_length_of_a_message_is_bounded():
    """One stream that announces 1 TiB could fill the memory."""
    reader = asyncio.StreamReader()
    for length, content in ((7, b"message"), (2**40, b"")):
        reader.feed_data(length.to_bytes(P2P.HEADER_LEN, P2P.BYTEORDER) + content)
    assert await receive_raw_data(reader) == b"message"
    with pytest.raises(asyncio.IncompleteReadError):
        await receive_raw_data(reader)


def test_only_peers_without_a_direct_connection_are_disconnected(monkeypatch):
    monkeypatch.setattr("peerstep.peer.node.START_SECONDS", 0.0)
    direct, relayed = "/ip4/1.2.3.4/tcp/31337", f"{RELAY}/p2p-circuit"
    connections = [("a", direct), ("b", relayed), ("c", relayed), ("c", direct), ("b", relayed)]
    p2p = AsyncMock()
    p2p.list_peers.return_value = [PeerInfo(peer, [Multiaddr(maddr)]) for peer, maddr in connections]
    asyncio.run(close_relayed_connections(p2p))
    p2p._client.disconnect.assert_awaited_once_with("b")


def hold_the_lock(has_lock) -> None:
    with MPFuture._update_lock:
        has_lock.set()
        time.sleep(600)


def test_dht_that_is_killed_leaves_no_lock_to_the_next():
    has_lock = multiprocessing.Event()
    process = multiprocessing.Process(target=hold_the_lock, args=(has_lock,), daemon=True)
    process.start()
    assert has_lock.wait(120)
    end_dht(process)
    assert not process.is_alive()
    future = MPFuture()
    multiprocessing.Process(target=future.set_result, args=("sent",), daemon=True).start()  # it takes the lock
    assert future.result(60) == "sent"


async def hide_all(protocol: DHTProtocol, request: FindRequest, _context) -> FindResponse:
    empty = MSGPackSerializer.dumps(DictionaryDHTValue())
    results = [FindResult(type=FOUND_DICTIONARY, value=empty, expiration_time=math.inf) for _ in request.keys]
    return FindResponse(results=results, peer=protocol.node_info)


_find = DHTProtocol.rpc_find


async def answer_late(protocol: DHTProtocol, request: FindRequest, context) -> FindResponse:
    await asyncio.sleep(0.5)
    return await _find(protocol, request, context)


@pytest.mark.peers
def test_node_that_answers_with_an_empty_dictionary_hides_no_records(tmp_path):
    """It claims that the dictionary never expires, which ended the search of each reader."""
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DHTProtocol, "rpc_find", hide_all)
            hostile = stack.enter_context(local_peer(tmp_path / "hostile", "run"))
            patch.setattr(DHTProtocol, "rpc_find", answer_late)
            address = str(hostile.dht.get_visible_maddrs()[0])
            writer = stack.enter_context(local_peer(tmp_path / "writer", "run", (address,)))
        addresses = (address, str(writer.dht.get_visible_maddrs()[0]))
        reader = stack.enter_context(local_peer(tmp_path / "reader", "run", addresses, client_mode=True))
        store_record(writer.dht, OFFERS, writer.public_key, 7.0, 60)
        wait_until(lambda: get_dictionary(reader.dht, OFFERS), 120, "the record")
        for _ in range(5):
            assert get_dictionary(reader.dht, OFFERS)[writer.public_key].value == 7.0


@pytest.mark.parametrize(("number", "is_read"), [(20, True), (41, False), (60_000, False)])
async def test_answer_with_too_many_names_is_dropped(monkeypatch, number, is_read):
    """To read 60,000 of them took 1.1 s of the processor."""
    names = [b"\x12\x20" + number.to_bytes(32) for number in range(number)]
    ids = [node_id_of(PeerID(name)).to_bytes() for name in names]
    key = DHTID.generate("key")
    response = FindResponse(results=[FindResult(nearest_node_ids=ids, nearest_peer_ids=names)])
    found = await find(monkeypatch, response, [key])
    assert (found is not None) == is_read
    assert found is None or len(found[key][1]) == number


@pytest.mark.parametrize(
    ("num_bytes", "end", "is_read"),
    [
        (100, None, True),
        (2**22 // 3, None, True),
        (2**22 // 3 + 100, None, False),
        (2**24, None, False),
        (100, 50, False),
    ],
)
async def test_compressed_answer_is_read_unless_it_is_damaged_or_too_large(monkeypatch, num_bytes, end, is_read):
    """4 MB may become 4 GB. The largest is as long as a message may be, under all keys together."""
    records = DictionaryDHTValue()
    records.store(b"subkey", os.urandom(num_bytes - 50) if num_bytes < 200 else bytes(num_bytes - 50), run_time() + 60)
    packed = MSGPackSerializer.dumps(records)
    result = FindResult(type=FOUND_DICTIONARY, value=packed, expiration_time=run_time() + 60)
    monkeypatch.setattr(node_module, "COMPRESSED_BYTES", 1)
    compress(result)
    result.value = result.value[:end]
    keys = [DHTID.generate(number) for number in range(3)]
    found = await find(monkeypatch, FindResponse(results=[result] * 3), keys)
    assert (found is not None) == is_read
    assert found is None or all(found[key][0].value.get(b"subkey") == records.get(b"subkey") for key in keys)


async def find(monkeypatch, response: FindResponse, keys: list[DHTID]) -> dict | None:
    """Return what a node reads in the answer of another node; None if it refuses the answer."""
    stub = SimpleNamespace(rpc_ping=None, rpc_store=None, rpc_find=AsyncMock(return_value=response))
    monkeypatch.setattr(DHTProtocol, "get_stub", lambda protocol, peer: stub)
    protocol = node_module.DHTProtocol.__new__(node_module.DHTProtocol)
    protocol.rpc_semaphore, protocol.wait_timeout, protocol.routing_table = asyncio.Semaphore(), 1.0, MagicMock()
    protocol.p2p, protocol.node_info = SimpleNamespace(peer_id=PeerID(b"\x12\x20" + bytes(32))), NodeInfo()
    protocol.record_validator = None
    protocol.update_routing_table = protocol.call_ping = AsyncMock()
    protocol.routing_table.__contains__.return_value = True
    return await protocol.call_find(PeerID(b"\x12\x20" + b"1" * 32), keys)


@pytest.mark.parametrize("is_new", [True, False])
def test_an_identity_that_another_peer_may_use_is_checked(tmp_path, is_new):
    """A new key needs no check, which takes a second."""

    def build(**options) -> None:
        pytest.fail(str(options["check_if_identity_free"]))

    if not is_new:
        load_identity(tmp_path / "identity.key")
    with pytest.raises(pytest.fail.Exception, match=str(not is_new)), local_peer(tmp_path, "run", node_class=build):
        pass
