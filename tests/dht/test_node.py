"""Workarounds for hivemind's DHT and libp2p's daemon."""

import asyncio
import contextlib
import math
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from unittest.mock import AsyncMock

import psutil
import pytest
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerInfo
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
from hivemind.proto.dht_pb2 import FOUND_DICTIONARY, FindRequest, FindResponse, FindResult
from hivemind.proto.runtime_pb2 import Tensor
from hivemind.utils import MPFuture, MSGPackSerializer, get_dht_time
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.timed_storage import ValueWithExpiration

from cotrain.admission.invitations import load_identity
from cotrain.common.errors import TemporaryError
from cotrain.dht.node import (
    MAX_MESSAGE_BYTES,
    RelayedP2P,
    _without_claims,
    close_relayed_connections,
    use_own_socket_folder,
)
from cotrain.dht.run_records import get_dictionary, store_record
from cotrain.peer import peer as peer_module
from cotrain.peer.peer import _end
from tests.support.peers import local_peer, wait_until

HOP = "/libp2p/circuit/relay/0.2.0/hop"  # what a peer behind NAT asks a relay for
RELAY = "/ip4/127.0.0.1/tcp/31337/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


@pytest.mark.peers
def test_daemon_uses_the_relays_that_it_is_given_and_no_others(tmp_path):
    """By default libp2p uses no relay until it has found four candidates or three minutes have passed.

    It also waits if it finds fewer relays than it was given addresses.
    """
    relays = [RELAY, RELAY.replace("/tcp/31337", "/udp/31337/quic-v1")]
    with local_peer(tmp_path, "run", use_relay=True, use_auto_relay=True, trusted_relays=relays) as peer:
        (daemon,) = psutil.Process(peer.dht.pid).children()
        assert {f"-trustedRelays={RELAY}", "-relayDiscovery=0"} <= set(daemon.cmdline())


@pytest.mark.peers
@pytest.mark.parametrize("use_relay", [True, False])
def test_peer_without_relays_relays_for_nobody(tmp_path, use_relay):
    with local_peer(tmp_path / "one", "run", use_relay=use_relay) as one:
        address = str(one.dht.get_visible_maddrs()[0])
        with local_peer(tmp_path / "two", "run", (address,)) as two:

            async def ask_for_a_relay() -> None:
                p2p = await two.dht.replicate_p2p()
                await p2p._client.stream_open(one.dht.peer_id, (HOP,))

            with contextlib.nullcontext() if use_relay else pytest.raises(ControlFailure, match="not supported"):
                asyncio.run(ask_for_a_relay())


@pytest.mark.peers
@pytest.mark.parametrize("serves", [True, False])
def test_peer_relays_more_than_128_kib_only_if_asked_to(tmp_path, serves):
    with local_peer(tmp_path, "run", use_relay=True, serve_as_relay=serves) as peer:
        (daemon,) = psutil.Process(peer.dht.pid).children()
        assert f"-relayService={int(serves)}" in daemon.cmdline()


@pytest.mark.peers
def test_identity_that_another_peer_uses_is_named(tmp_path):
    with local_peer(tmp_path / "one", "run") as first:
        address = str(first.dht.get_visible_maddrs()[0])
        copy = shutil.copytree(tmp_path / "one", tmp_path / "three")
        with (
            pytest.raises(TemporaryError, match=f"Identity from `{copy}/identity.key` is already taken"),
            local_peer(copy, "run", (address,), bootstrap_timeout=3),
        ):
            pass


def test_only_peers_without_a_direct_connection_are_disconnected():
    direct, relayed = "/ip4/1.2.3.4/tcp/31337", f"{RELAY}/p2p-circuit"
    connections = [("a", direct), ("b", relayed), ("c", relayed), ("c", direct), ("b", relayed)]
    p2p = AsyncMock()
    p2p.list_peers.return_value = [PeerInfo(peer, [Multiaddr(maddr)]) for peer, maddr in connections]
    asyncio.run(close_relayed_connections(p2p, delay=0))
    p2p._client.disconnect.assert_awaited_once_with("b")


@pytest.mark.peers
def test_sockets_are_in_a_folder_of_this_process(tmp_path):
    with local_peer(tmp_path, "run") as peer:
        folder = Path(RelayedP2P._UNIX_SOCKET_PREFIX.removeprefix("/unix"))
        assert folder.parent == Path(tempfile.gettempdir()) and folder.stat().st_mode & 0o777 == 0o700
        process = psutil.Process(peer.dht.pid)
        (daemon,) = process.children()
        assert any(f"/unix{folder}/" in argument for argument in daemon.cmdline())
        assert any(folder.iterdir())
        # Not what is in /tmp: a bare hivemind peer of another test may have put its sockets there.
        paths = [socket.laddr for owner in (process, daemon) for socket in owner.net_connections("unix")]
        assert [path for path in paths if "hivemind" in path and not path.startswith(f"{folder}/")] == []


def use_sockets(pipe) -> None:
    use_own_socket_folder()
    pipe.send(RelayedP2P._UNIX_SOCKET_PREFIX.removeprefix("/unix"))
    time.sleep(600)


def test_socket_folders_of_killed_processes_are_removed_and_no_others(tmp_path, monkeypatch):
    """Not those of running processes, whatever their ID is, nor a folder or file that somebody else has made."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(RelayedP2P, "_UNIX_SOCKET_PREFIX", "")
    folders = []
    processes = []
    for _ in range(2):
        receiver, sender = multiprocessing.Pipe()
        processes.append(multiprocessing.Process(target=use_sockets, args=(sender,), daemon=True))
        processes[-1].start()
        folders.append(Path(receiver.recv()))
    killed, running = folders
    os.kill(processes[0].pid, signal.SIGKILL)
    processes[0].join()
    others = [
        tmp_path / f"{name}-sockets-{suffix}" for name in ("hivemind", "cotrain") for suffix in ("x", os.getpid())
    ]
    (tmp_path / "elsewhere").mkdir()
    others[2].write_text("a file")
    others[3].symlink_to("elsewhere")
    for path in (*folders, *others):
        path.mkdir() if not os.path.lexists(path) else None
        os.utime(path, (0, 0), follow_symlinks=False)
    use_own_socket_folder()
    assert not killed.exists() and running.exists() and all(os.path.lexists(path) for path in others)
    assert (tmp_path / "elsewhere").exists()
    processes[1].kill()


@pytest.mark.peers
def test_client_listens_nowhere_and_nobody_asks_the_router_for_a_port(tmp_path):
    with (
        local_peer(tmp_path / "one", "run") as one,
        local_peer(tmp_path / "two", "run", (str(one.dht.get_visible_maddrs()[0]),), client_mode=True) as two,
    ):
        for peer, listens in ((one, True), (two, False)):
            (daemon,) = psutil.Process(peer.dht.pid).children()
            assert "-natPortMap=0" in daemon.cmdline()
            ports = [socket for socket in daemon.net_connections("inet") if socket.status == psutil.CONN_LISTEN]
            assert bool(ports) == listens
            assert listens or all(socket.raddr for socket in daemon.net_connections("inet")), "no UDP either"


async def count_bytes(tensors, _context):
    async for tensor in tensors:
        yield Tensor(buffer=str(len(tensor.buffer)).encode())


@pytest.mark.peers
def test_stream_that_announces_more_than_a_message_may_have_is_ended(tmp_path):
    """hivemind reads into memory whatever is announced."""
    with local_peer(tmp_path / "one", "run") as one, contextlib.ExitStack() as stack:
        address = str(one.dht.get_visible_maddrs()[0])
        two = stack.enter_context(local_peer(tmp_path / "two", "run", (address,)))

        async def exchange() -> None:
            server, client = await one.dht.replicate_p2p(), await two.dht.replicate_p2p()
            options = {"stream_input": True, "stream_output": True}
            await server.add_protobuf_handler("count", count_bytes, Tensor, **options)

            async def parts():
                yield Tensor(buffer=b"x" * (2**19 + 2**16))
                yield Tensor(buffer=b"x" * (MAX_MESSAGE_BYTES - 16))

            answers = await client.iterate_protobuf_handler(server.peer_id, "count", parts(), Tensor)
            assert [int(answer.buffer) async for answer in answers] == [2**19 + 2**16, MAX_MESSAGE_BYTES - 16]
            memory = psutil.Process().memory_info().rss
            _, reader, writer = await client.call_binary_stream_handler(server.peer_id, "count")
            writer.write(P2P.MESSAGE_MARKER + (2**40).to_bytes(P2P.HEADER_LEN, P2P.BYTEORDER))
            with contextlib.suppress(ConnectionError):
                for _ in range(64):
                    writer.write(bytes(2**20))
                    await asyncio.wait_for(writer.drain(), 10)
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await asyncio.wait_for(reader.readexactly(1), 10)
            assert psutil.Process().memory_info().rss - memory < 2**25

        asyncio.run(exchange())


def hold_the_lock(has_lock) -> None:
    with MPFuture._update_lock:
        has_lock.set()
        time.sleep(600)


def test_dht_that_is_killed_leaves_no_lock_to_the_next():
    has_lock = multiprocessing.Event()
    process = multiprocessing.Process(target=hold_the_lock, args=(has_lock,), daemon=True)
    process.start()
    assert has_lock.wait(30)
    _end(process)
    assert not process.is_alive() and MPFuture._update_lock.acquire(timeout=1)
    MPFuture._update_lock.release()


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
        info = {"username": "ann", "leaving": False}
        store_record(writer.dht, "run_peers", writer.public_key, info, 60)
        wait_until(lambda: get_dictionary(reader.dht, "run_peers"), 30, "the record")
        for _ in range(5):
            assert get_dictionary(reader.dht, "run_peers")[writer.public_key].value == info


def test_expiration_of_a_dictionary_is_that_of_its_newest_record():
    found, now = DictionaryDHTValue(), get_dht_time()
    for subkey, lifetime in ((b"one", 50.0), (b"two", 70.0)):
        found.store(subkey, b"value", now + lifetime)
    found.latest_expiration_time = 1e12
    checked = _without_claims(ValueWithExpiration(found, 1e12))
    assert checked.expiration_time == checked.value.latest_expiration_time == now + 70.0
    assert _without_claims(ValueWithExpiration(DictionaryDHTValue(), 1e12)) is None


@pytest.mark.parametrize("is_new", [True, False])
def test_an_identity_that_another_peer_may_use_is_checked(tmp_path, monkeypatch, is_new):
    """A new key needs no check, which takes a second."""
    monkeypatch.setattr(peer_module, "SafeDHT", lambda **options: pytest.fail(str(options["check_if_identity_free"])))
    if not is_new:
        load_identity(tmp_path / "identity.key")
    with pytest.raises(pytest.fail.Exception, match=str(not is_new)), local_peer(tmp_path, "run"):
        pass
