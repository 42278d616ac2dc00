"""Workarounds for hivemind 1.1.12 in the DHT and in libp2p's daemon, see docs/upgrading-hivemind.md."""

import asyncio
import functools
import math
import multiprocessing
import multiprocessing.util
import os
import pickle
import shutil
import tempfile
import zlib
from collections.abc import Collection, Sequence
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

from google.protobuf.message import Message
from hivemind.dht import DHT, dht
from hivemind.dht import node as dht_node
from hivemind.dht import protocol as dht_protocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.p2p.p2p_daemon_bindings.control import DEFAULT_MAX_MSG_SIZE
from hivemind.proto import dht_pb2
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.timed_storage import ValueWithExpiration

PROGRESS = "training_progress"  # ending of the key of the progress reports
NUM_BUCKETS = 16  # keys that share them
# Nodes that a read looks for: those that store a key, and as many more. Of hivemind's 20 most only name other nodes.
BEAM_SIZE = 10
# Requests of a read at a time. With hivemind's four, the slowest of 20 reads of 8 peers on home lines took 7 to 9 s
# during rounds, and some ended at the timeout of 10 s; with 16 they take 5 s, as those of one key did.
NUM_WORKERS = 16
START_SECONDS = 4.0  # a daemon that starts looks for its public address after 0.25, 0.75, 1.75 and 3.75 s
MAX_KEYS = 64  # of a request, each once: 4 MiB of the same key would be answered 190,000 times; peers ask for 4
WITHOUT_CACHES = {"cache_locally": False, "cache_nearest": 0, "cache_on_store": False}  # of DHTNode.create
WITHOUT_RELAYS = Path(__file__).with_name("without_relays.json")


class RelayedP2P(P2P):
    """libp2p's daemon, restricted to the given relays, with direct connections to other peers behind NAT if possible.

    hivemind leaves the discovery of relays on: libp2p then uses no relay until it has found four candidates or three
    minutes have passed, as if a relay is given with two addresses, which it counts as two.

    Without relays the daemon needs a file: its flag can only switch them on, and they are on by default.
    """

    errors = None  # of SafeDHT, in its process

    @classmethod
    async def create(cls, *args, trusted_relays: Sequence[Multiaddr | str] | None = None, **kwargs) -> P2P:
        if not trusted_relays:
            return await super().create(*args, **kwargs)
        addresses = {str(maddr).rsplit("/", 1)[-1]: maddr for maddr in reversed(trusted_relays)}  # peer ID -> first
        p2p = await super().create(*args, trusted_relays=list(addresses.values()), **kwargs)
        await close_relayed_connections(p2p)
        return p2p

    async def call_protobuf_handler(self, peer_id: PeerID, *args) -> Message:
        try:
            return await super().call_protobuf_handler(peer_id, *args)  # pyright: ignore[reportReturnType]
        except Exception as error:
            if self.errors is not None:
                line = f"{peer_id} {' '.join(str(error).split())}"[:400]
                self.errors.value = f"{self.errors.value.decode(errors='replace')}\n{line}".encode()[-4000:]
            raise

    @staticmethod
    def _make_process_args(*args, **kwargs) -> list[str]:
        if "trustedRelays" in kwargs:
            kwargs["relayDiscovery"] = False
        if not kwargs["relay"]:
            kwargs["f"] = WITHOUT_RELAYS
        return P2P._make_process_args(*args, **kwargs)


@functools.cache
def use_own_socket_folder(_pid: int) -> None:
    """Keep the Unix sockets of DHTs that are built later in a folder that is removed when this process ends.

    hivemind leaves two or more sockets per start in /tmp. Those of a killed process stay, as with hivemind.
    """
    folder = tempfile.mkdtemp(prefix="cotrain-sockets-", dir=os.environ["TMPDIR"])  # of this user alone, and short
    RelayedP2P._UNIX_SOCKET_PREFIX = f"/unix{folder}/"  # pyright: ignore[reportAttributeAccessIssue]
    # Of the socket through which files are passed:
    multiprocessing.current_process()._config["tempdir"] = folder  # pyright: ignore[reportAttributeAccessIssue]
    # That socket is removed first, when this process exits.
    multiprocessing.util.Finalize(None, shutil.rmtree, (folder,), {"ignore_errors": True}, exitpriority=-100)


async def receive_raw_data(reader: asyncio.StreamReader) -> bytes:
    """Receive a message of a stream. hivemind believes any length: one stream could fill the memory.

    A message larger than a unary one may be raises IncompleteReadError, which ends the stream without a log line. The
    largest are parts of tensors, of 0.5 MiB.
    """
    num_bytes = int.from_bytes(await reader.readexactly(P2P.HEADER_LEN), P2P.BYTEORDER)
    if num_bytes > DEFAULT_MAX_MSG_SIZE:
        raise asyncio.IncompleteReadError(b"", num_bytes)
    return await reader.readexactly(num_bytes)


async def close_relayed_connections(p2p: P2P) -> None:
    """Disconnect a daemon that has just started from the peers that it has reached through relays only.

    Once connections are opened again, libp2p replaces them by direct ones. It tries that once for each connection, and
    fails before the daemon knows its public address. Peers behind NAT connect within 0.5 s of the start, often before.
    """
    await asyncio.sleep(START_SECONDS)
    connections = await p2p.list_peers()
    direct = {peer.peer_id for peer in connections if not any("p2p-circuit" in maddr for maddr in peer.addrs)}
    for peer_id in {peer.peer_id for peer in connections} - direct:
        await p2p._client.disconnect(peer_id)  # pyright: ignore[reportAttributeAccessIssue]


class Inbox:
    """A process's end of the pipe for calls. Counts the beats of its event loop, which polls every three seconds.

    Skips calls of processes that have died since: a call names the socket at which its sender waits for the answer.

    :param beats: shared counter, see Watchdog
    """

    def __init__(self, pipe: Connection, beats: Synchronized):
        self.pipe, self.beats = pipe, beats
        self.fileno, self.send = pipe.fileno, pipe.send

    def poll(self) -> bool:
        self.beats.value += 1
        return self.pipe.poll()

    def recv(self) -> tuple[str, list, dict]:
        message = self.pipe.recv_bytes()
        try:
            return pickle.loads(message)
        except (OSError, EOFError, RuntimeError):
            return "skip_call", [], {}


class DHTProtocol(dht_protocol.DHTProtocol):
    """hivemind's, which believes a node that claims when its answer expires.

    A dictionary expires when the newest of its records does. With an empty one that never expires, a single node hid
    the records of all others. Of an answer only the records that are refused are dropped, not, as by hivemind, all.
    The name is part of the protocol.
    """

    def _validate_dictionary(self, key_bytes: bytes, dictionary: DictionaryDHTValue) -> bool:
        dictionary.maxsize = math.inf  # not what the sender says, which may be no number
        with dictionary.freeze():
            for subkey, (value, expiration) in list(dictionary.items()):
                if not self._validate_record(key_bytes, self.serializer.dumps(subkey), value, expiration):
                    del dictionary[subkey]
        return True

    async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        if len(request.keys) > min(MAX_KEYS, len(set(request.keys))):
            raise ValueError("too many keys, or repeated ones")
        return await super().rpc_find(request, context)

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


def bucket_of(subkey: object) -> int:
    """Return the number of the key under which a subkey's report is; -1 for what is no subkey."""
    return zlib.crc32(subkey) % NUM_BUCKETS if isinstance(subkey, bytes) else -1


async def read_reports(node: dht_node.DHTNode, key: str) -> dict[bytes, ValueWithExpiration]:
    """Return the reports under all keys that `key` stands for, by subkey. A copy under another key does not count."""
    buckets = {f"{key}.{bucket}": bucket for bucket in range(NUM_BUCKETS)}
    found = await node.get_many(buckets, math.inf, num_workers=NUM_WORKERS, beam_size=BEAM_SIZE)
    return {
        subkey: record
        for name, records in found.items()
        for subkey, record in (records.value.items() if isinstance(records, ValueWithExpiration) else ())
        if bucket_of(subkey) == buckets[name]
    }


class RunNode(dht_node.DHTNode):
    """Node that spreads the progress reports.

    Each report is under one of NUM_BUCKETS keys, which follows from its subkey, and a read merges them. With one key,
    five nodes had all the traffic of 100 peers, and each store of a report fetched all others.
    """

    async def store(self, key: str, *args, subkey: object, **kwargs) -> bool:
        key = f"{key}.{bucket_of(subkey)}" if key.endswith(PROGRESS) else key
        return await super().store(key, *args, subkey=subkey, **kwargs)

    async def get(self, key: str, **kwargs) -> ValueWithExpiration | None:
        if not key.endswith(PROGRESS):
            return await super().get(key, **kwargs)
        records = await read_reports(self, key)
        return ValueWithExpiration(records, math.inf) if records else None


class SafeDHT(DHT):
    """hivemind.DHT that survives the death of a process that has called it.

    Found values are not cached: all reads are of the newest ones, and a node with a copy would send it in each answer.
    """

    p2p_class: type[P2P] = RelayedP2P  # replaces hivemind's P2P, also in processes that replicate it
    is_open = True  # anybody may join the run

    def run_in_background(self, await_ready: bool = True, timeout: float | None = None) -> None:
        self.beats = multiprocessing.RawValue("Q", 0)
        self.errors = multiprocessing.RawArray("c", 4096)  # lines of failed calls at the start: peer and error
        super().run_in_background(await_ready, timeout)

    def run(self) -> None:
        # In the DHT process alone: hivemind takes the classes from its modules.
        dht.DHTNode, dht_node.P2P, dht_node.DHTProtocol = RunNode, self.p2p_class, DHTProtocol
        RelayedP2P.errors = self.errors
        dht_protocol.MAX_DHT_TIME_DISCREPANCY_SECONDS = math.inf  # the clock is corrected, see peerstep/redial.py
        self._inner_pipe = Inbox(self._inner_pipe, self.beats)  # pyright: ignore[reportArgumentType]
        self.kwargs |= WITHOUT_CACHES
        super().run()

    def check_invitation(self) -> None:
        """Raise UserError if this peer's invitation no longer holds, in a run with invitations."""

    async def replicate_p2p(self) -> P2P:
        """Return the P2P of this process, connected to the daemon of the DHT process."""
        if self._p2p_replica is None or self._origin_pid != os.getpid():
            self._origin_pid = os.getpid()
            daemon_listen_maddr = self.run_coroutine(DHT._get_p2p_daemon_listen_maddr)
            self._p2p_replica = await self.p2p_class.replicate(daemon_listen_maddr)  # pyright: ignore[reportArgumentType]
        return self._p2p_replica

    async def skip_call(self) -> None:
        pass
