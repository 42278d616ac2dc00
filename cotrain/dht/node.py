"""Workarounds for hivemind 1.1.12 in the DHT and in libp2p's daemon, see docs/upgrading-hivemind.md."""

import asyncio
import atexit
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

from filelock import lock_descriptor
from hivemind.dht import DHT
from hivemind.dht import node as dht_node
from hivemind.dht import protocol as dht_protocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2P, PeerID
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.timed_storage import ValueWithExpiration

WITHOUT_RELAYS = Path(__file__).with_name("without_relays.json")
# Of a message in a stream; libp2p's daemon has the same bound for calls without streams. Parts have 2**19 bytes,
# chunks of a state 2**16, and its metadata some 30 bytes per entry of the optimizer's state.
MAX_MESSAGE_BYTES = 2**22
MIN_AGE = 60.0  # seconds; a younger socket folder may not be locked yet


class _BoundedReader:
    """Reads from another peer's stream. A message of more than MAX_MESSAGE_BYTES counts as the end of the stream.

    hivemind reads as many bytes into memory as the sender announces, up to 2**64.
    """

    def __init__(self, reader: asyncio.StreamReader):
        self._reader = reader

    async def readexactly(self, size: int) -> bytes:
        if size > MAX_MESSAGE_BYTES:
            raise asyncio.IncompleteReadError(b"", size)
        return await self._reader.readexactly(size)


class RelayedP2P(P2P):
    """libp2p's daemon, restricted to the given relays, with direct connections to other peers behind NAT if possible.

    hivemind leaves the discovery of relays on. libp2p then uses no relay until it has found four candidates or three
    minutes have passed. It waits as long for a relay that is given with two addresses, which it counts as two.

    Without relays the daemon needs a file: its flag can only switch them on, and they are on by default.

    Unlike in hivemind, the daemon asks the router for a port only on request, and relays more than 128 KiB per
    connection only with a `relay_hop_limit`, which has no other effect. If it uses relays, it always relays so much.
    """

    @classmethod
    async def create(cls, *args, trusted_relays: Sequence[Multiaddr | str] | None = None, **kwargs) -> "RelayedP2P":
        kwargs.setdefault("nat_port_map", False)
        if not trusted_relays:
            return await super().create(*args, **kwargs)
        addresses = {str(maddr).rsplit("/", 1)[-1]: maddr for maddr in reversed(trusted_relays)}  # peer ID -> first
        p2p = await super().create(*args, trusted_relays=list(addresses.values()), **kwargs)
        await close_relayed_connections(p2p)
        return p2p

    @staticmethod
    def _make_process_args(*args, **kwargs) -> list[str]:
        if "trustedRelays" in kwargs:
            kwargs["relayDiscovery"] = False
        if not kwargs["relay"]:
            kwargs["f"] = WITHOUT_RELAYS
        return P2P._make_process_args(*args, relayService=kwargs["relayHopLimit"] > 0, **kwargs)

    async def add_binary_stream_handler(self, name: str, handler: Callable, *args, **kwargs) -> None:
        async def handle(info, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await handler(info, _BoundedReader(reader), writer)

        await super().add_binary_stream_handler(name, handle, *args, **kwargs)

    async def call_binary_stream_handler(self, peer_id: PeerID, handler_name: str):
        info, reader, writer = await super().call_binary_stream_handler(peer_id, handler_name)
        return info, _BoundedReader(reader), writer


def use_own_socket_folder() -> None:
    """Keep the Unix sockets of DHTs that are built later in a folder that is removed when this process ends.

    hivemind leaves two or more sockets per start in /tmp. The folder belongs to this user alone, and is locked while
    this process or a child process runs. The folders of killed processes are removed by later calls.
    """
    for left in Path(tempfile.gettempdir()).glob("cotrain-sockets-*"):
        with suppress(OSError):  # another process has just removed it
            status = left.lstat()
            if status.st_uid == os.geteuid() and status.st_mtime < time.time() - MIN_AGE:
                descriptor = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                if lock_descriptor(descriptor, blocking=False):
                    shutil.rmtree(left, ignore_errors=True)
                os.close(descriptor)
    folder = tempfile.mkdtemp(prefix="cotrain-sockets-")  # a socket's path has at most 107 bytes
    lock_descriptor(os.open(folder, os.O_RDONLY), blocking=False)  # until the process ends
    RelayedP2P._UNIX_SOCKET_PREFIX = f"/unix{folder}/"
    atexit.register(shutil.rmtree, folder, ignore_errors=True)


async def close_relayed_connections(p2p: P2P, delay: float = 4.0) -> None:
    """Disconnect a daemon that has just started from the peers that it has reached through relays only.

    Once connections are opened again, libp2p replaces them by direct ones. It tries that once for each connection, and
    fails before the daemon knows its public address. Peers behind NAT connect within 0.5 s of the start, often before.
    """
    await asyncio.sleep(delay)  # a daemon that starts looks for its public address after 0.25, 0.75, 1.75 and 3.75 s
    connections = await p2p.list_peers()
    direct = {peer.peer_id for peer in connections if not any("p2p-circuit" in maddr for maddr in peer.addrs)}
    for peer_id in {peer.peer_id for peer in connections} - direct:
        await p2p._client.disconnect(peer_id)


class _Inbox:
    """Receiving end of the pipe for calls of a DHT. Skips calls of processes that have died since.

    Averagers call the DHT until they end, and a call names the socket at which its sender waits for the answer.
    """

    def __init__(self, pipe: Connection):
        self.pipe = pipe
        self.fileno, self.poll = pipe.fileno, pipe.poll

    def recv(self) -> tuple[str, list, dict]:
        message = self.pipe.recv_bytes()
        try:
            return ForkingPickler.loads(message)
        except (OSError, EOFError, RuntimeError):
            return "skip_call", [], {}


class DHTProtocol(dht_protocol.DHTProtocol):
    """hivemind's, which believes a node that claims when its answer expires.

    A dictionary expires when the newest of its records does. With an empty one that never expires, a single node ended
    each search for a key, and hid the records of all others. The name is part of the protocol.
    """

    async def call_find(self, peer: PeerID, keys: Collection[DHTID]) -> dict | None:
        found = await super().call_find(peer, keys)
        return found and {key: (_without_claims(value), nearest) for key, (value, nearest) in found.items()}


def _without_claims(found: ValueWithExpiration | None) -> ValueWithExpiration | None:
    if found is None or not isinstance(found.value, DictionaryDHTValue):
        return found
    newest = max((item.expiration_time for _, item in found.value.items()), default=None)
    if newest is None:
        return None
    found.value.latest_expiration_time = newest
    return ValueWithExpiration(found.value, newest)


class SafeDHT(DHT):
    """hivemind.DHT that survives the death of a process that has called it."""

    p2p_class: type[P2P] = RelayedP2P  # replaces hivemind's P2P, also in processes that replicate it

    def run(self) -> None:
        # In the DHT process alone: DHTNode.create takes the classes from its module.
        dht_node.P2P, dht_node.DHTProtocol = self.p2p_class, DHTProtocol
        dht_protocol.MAX_DHT_TIME_DISCREPANCY_SECONDS = math.inf  # the clock is corrected, see cotrain/peer/redial.py
        self._inner_pipe = _Inbox(self._inner_pipe)
        super().run()

    async def replicate_p2p(self) -> P2P:
        """Return the P2P of this process, connected to the daemon of the DHT process."""
        if self._p2p_replica is None or self._origin_pid != os.getpid():
            self._origin_pid = os.getpid()
            daemon_listen_maddr = self.run_coroutine(DHT._get_p2p_daemon_listen_maddr)
            self._p2p_replica = await self.p2p_class.replicate(daemon_listen_maddr)
        return self._p2p_replica

    async def skip_call(self) -> None:
        pass
