"""Workarounds for hivemind 1.1.12 in the DHT and in libp2p's daemon, see docs/upgrading-hivemind.md."""

import asyncio
import functools
import math
import multiprocessing
import multiprocessing.util
import os
import pickle
import random
import shutil
import tempfile
import time
import zlib
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

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
NUM_BUCKETS = 64  # keys that share them: of 512 trainers, each has 8
NUM_ASKED = 10  # nodes near a key that a read asks: more than store it, because the tables of two nodes may differ
NUM_REPLICAS, MEMBER_REPLICAS = 3, 2  # nodes and members of the last rounds near a key that store a record
NUM_MET = 4  # unknown nodes in an answer that are called: a stranger may name any number that do not exist
FEW_MEMBERS = 32  # of the last rounds, up to which a read asks all of them, see RunNode
FEW_PUBLIC = 16  # of them, up to which each read asks the initial peers, too
RENEWED_SECONDS = 10.0  # seconds in which each live trainer has renewed its report: two heartbeats
PATIENCE = 1.0  # seconds that a read waits after half of the nodes have answered, and twice as long as these took
SKIP_SECONDS = 300.0  # for which reads do not wait for a node that was late: it costs them 0.3 % of the time
MAX_ANSWER_BYTES = 3.5 * 2**20  # of several keys; a message has at most 4 MiB
COMPRESSED_BYTES = 2048  # of the records under a key, from which on an answer has them compressed: 8.6 KB become 4.9
START_SECONDS = 4.0  # a daemon that starts looks for its public address after 0.25, 0.75, 1.75 and 3.75 s
MAX_NAMES = 40  # nodes that an answer names for a key; a node names 20
MAX_KEYS = NUM_BUCKETS  # of a request, each once: 4 MiB of the same key would be answered 190,000 times
ZLIB = b"\x78"  # first byte of what is compressed; a dictionary begins with that of an extension type of msgpack
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


@functools.lru_cache(maxsize=4096)
def node_id_of(peer_id: PeerID) -> DHTID:
    """Return the place of a peer in the DHT. If peers chose it, one could be next to each key, any number of times."""
    return DHTID.generate(peer_id.to_bytes())


def compress(result: dht_pb2.FindResult) -> None:
    """Compress what a node answers for a key, if it has the records of several peers: names and marks are the same."""
    if result.type == dht_pb2.FOUND_DICTIONARY and len(result.value) >= COMPRESSED_BYTES:
        result.value = zlib.compress(result.value, level=1)


def decompress(response: dht_pb2.FindResponse) -> None:
    """Undo `compress` for all keys; ValueError if the records are larger than a message may be."""
    num_bytes = 0
    for result in response.results:
        if result.type == dht_pb2.FOUND_DICTIONARY and result.value[:1] == ZLIB:
            unpacker = zlib.decompressobj()
            result.value = unpacker.decompress(result.value, max(1, DEFAULT_MAX_MSG_SIZE - num_bytes))
            if not unpacker.eof:
                raise ValueError("too many records, or damaged ones")
            num_bytes += len(result.value)


class CheckedStub:
    """Sends requests to a node, and refuses answers that hivemind would take as they are.

    With 60,000 names in 3.5 MB, to parse one took 1.1 s of the processor in each read. A time may be NaN or infinite.
    """

    def __init__(self, stub: Any):
        self._stub, self.rpc_ping, self.rpc_store = stub, stub.rpc_ping, stub.rpc_store

    async def rpc_find(self, *args, **options) -> dht_pb2.FindResponse:
        response = await self._stub.rpc_find(*args, **options)
        if any(max(len(r.nearest_node_ids), len(r.nearest_peer_ids)) > MAX_NAMES for r in response.results):
            raise ValueError("too many names")
        if not all(math.isfinite(result.expiration_time) for result in response.results):
            raise ValueError("a time that is no number")
        decompress(response)
        return response


class DHTProtocol(dht_protocol.DHTProtocol):
    """hivemind's, which believes what nodes say of themselves and of others.

    The ID of a node follows from its peer ID, here and in each answer; nobody calls a node with another one. The table
    has nodes that have called or answered, at most 40 in each of some 32 buckets. hivemind sends each new node the
    records near it; these are renewed anyway, and a read asks more nodes than store them.

    Of an answer only the records that are refused are dropped, not, as by hivemind, all. The name is part of the
    protocol.
    """

    @classmethod
    async def create(cls, p2p: P2P, _node_id: DHTID, *args, **kwargs) -> dht_protocol.DHTProtocol:
        return await super().create(p2p, node_id_of(p2p.peer_id), *args, **kwargs)

    def _validate_dictionary(self, key_bytes: bytes, dictionary: DictionaryDHTValue) -> bool:
        dictionary.maxsize = math.inf  # not what the sender says, which may be no number
        with dictionary.freeze():
            for subkey, (value, expiration) in list(dictionary.items()):
                if not self._validate_record(key_bytes, self.serializer.dumps(subkey), value, expiration):
                    del dictionary[subkey]
        return True

    def get_stub(self, peer: PeerID) -> Any:
        return CheckedStub(super().get_stub(peer))

    async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        if len(request.keys) > min(MAX_KEYS, len(set(request.keys))):
            raise ValueError("too many keys, or repeated ones")
        response, num_bytes = await super().rpc_find(request, context), 0
        for number, result in enumerate(response.results):
            if number > 0:  # 20 names for each key were as much as the reports of 64 trainers
                del result.nearest_node_ids[:], result.nearest_peer_ids[:]
            if num_bytes and num_bytes + len(result.value) > MAX_ANSWER_BYTES:
                node_id, peer_id = self.node_id.to_bytes(), self.p2p.peer_id.to_bytes()  # pyright: ignore[reportOptionalMemberAccess]
                # The mark of what is left out, which a node never answers otherwise:
                result.CopyFrom(dht_pb2.FindResult(nearest_node_ids=[node_id], nearest_peer_ids=[peer_id]))
            num_bytes += len(result.value)
            compress(result)
        return response

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
        request.in_cache[:] = [False] * len(request.in_cache)  # one cached record would hide all others
        return await super().rpc_store(request, context)

    async def call_find(self, peer: PeerID, keys: Collection[DHTID]) -> dict | None:
        """Ask a node for keys, and again for those that it left out. Call a few of the nodes that it names."""
        ask, unknown = super().call_find, set()
        found = await ask(peer, keys) or {}
        left_out = [key for key, (value, near) in found.items() if value is None and peer in near.values()]
        for alone in await asyncio.gather(*(ask(peer, [key]) for key in left_out if len(found) > 1)):
            found |= alone or {}
        for key, (value, near) in found.items():
            found[key] = value, {node_id: named for node_id, named in near.items() if node_id == node_id_of(named)}
            unknown.update(named for named in found[key][1].values() if named not in self.routing_table)
        unknown -= {peer, self.p2p.peer_id}
        for named in random.sample(list(unknown), min(NUM_MET, len(unknown))):
            asyncio.create_task(self.call_ping(named))  # noqa: RUF006  see switch_to_safe_loop
        return found or None

    async def update_routing_table(self, node_id: DHTID | None, peer_id: PeerID, responded: bool = True) -> None:
        table, right_id = self.routing_table, node_id_of(peer_id)
        bucket = table.buckets[table.get_bucket_index(right_id)]
        if responded and node_id == right_id:
            if right_id not in table and len(bucket.replacement_nodes) >= bucket.size:
                del table[next(iter(bucket.replacement_nodes))]  # the oldest
            if (to_ping := table.add_or_update_node(right_id, peer_id)) is not None:
                asyncio.create_task(self.call_ping(to_ping[1]))  # noqa: RUF006
        elif not responded and right_id in table:
            del table[right_id]


def bucket_of(subkey: object) -> int:
    """Return the number of the key under which a subkey's report is; -1 for what is no subkey."""
    return zlib.crc32(subkey) % NUM_BUCKETS if isinstance(subkey, bytes) else -1


async def read_reports(node: dht_node.DHTNode, key: str) -> dict[bytes, ValueWithExpiration]:
    """Return the reports under all keys that `key` stands for, by subkey."""
    found: dict[str, Any] = await node.get_many([f"{key}.{bucket}" for bucket in range(NUM_BUCKETS)])
    return {subkey: record for records in found.values() if records for subkey, record in records.value.items()}


class RunNode(dht_node.DHTNode):
    """Node that spreads the progress reports, and that no other node can keep from records.

    Each report is under one of NUM_BUCKETS keys, which follows from its subkey, and a read merges them. With one key,
    five nodes had all the traffic of 100 peers, and each store of a report fetched all others.

    hivemind searches the nodes nearest to a key, and each that it asks may lead it astray. Here a record is stored at
    its author's node, at the initial peers, and at the nearest of the nodes in the table and of the members of the
    last rounds. A read asks the initial peers, all of these members and more of the nearest nodes, and merges the
    signed records: a node that hides records, or takes none, hides nothing. One that answers late delays a read in
    SKIP_SECONDS; its answers count in the next one.

    In a large run the copies would be too much: 512 trainers received 3.6 MB in each read, and the initial peer sent
    78 Mbit/s. There a read asks one member for each key, and the others only if it shows that somebody of the last
    read is missing, or has not renewed its report: a member can hide newcomers alone, from those that ask it first.
    Of the initial peers few keys are read, but one in each read, chosen by chance: nobody hides newcomers for ever.
    """

    p2p: P2P
    initial_peers: set[PeerID]
    members: Collection[PeerID] = ()  # of the last rounds
    late_until: dict[PeerID, float]
    # Of a read of reports in a large run, the last or shortly before: key -> subkey -> expiration; of them, what was
    # new; and the time
    found: dict[DHTID, dict[bytes, float]]
    news: dict[DHTID, dict[bytes, float]]
    read_at: float = -math.inf  # `time.monotonic`

    @classmethod
    async def create(cls, *args, initial_peers: Sequence[Multiaddr | str] | None = None, **kwargs) -> "RunNode":
        node: Any = await super().create(*args, initial_peers=initial_peers, **kwargs)
        node.initial_peers = {PeerID.from_base58(Multiaddr(maddr)["p2p"]) for maddr in initial_peers or ()}
        node.found = dict[DHTID, dict[bytes, float]]()
        node.news = dict[DHTID, dict[bytes, float]]()
        node.late_until = dict[PeerID, float]()  # nodes that reads do not wait for, and until when (`time.monotonic`)
        node.num_replicas = math.inf  # nodes that have stored a record, after which hivemind leaves out the others
        return node

    @property
    def node_id(self) -> DHTID:
        return node_id_of(self.p2p.peer_id)

    @node_id.setter
    def node_id(self, _random: DHTID) -> None:
        """hivemind chooses one before it knows the peer ID."""

    async def find_nearest_nodes(self, queries: Collection[DHTID], *args, found_callback=None, **kwargs) -> dict:
        """Find the nodes that store a record; without a callback search, as hivemind does when a node joins."""
        if found_callback is None:
            return await super().find_nearest_nodes(queries, *args, **kwargs)
        for key in queries:
            places = {*self.initial_peers, *self.places_of(key), *self._nearest(key, NUM_REPLICAS)}
            nodes = {node_id_of(peer_id): peer_id for peer_id in places - {self.peer_id}}
            kwargs["node_to_peer_id"].update(nodes)
            await found_callback(key, list(nodes), set())
        return {}

    def _nearest(self, key: DHTID, number: int) -> list[PeerID]:
        near = self.protocol.routing_table.get_nearest_neighbors(key, number, exclude=self.node_id)
        return [peer_id for _, peer_id in near]

    async def get_many_by_id(self, key_ids: Collection[DHTID], *_args, **_kwargs) -> dict:
        searches = {}
        for key in key_ids:
            # An expiration is at least NaN at no time: whatever a node claims, its answer does not end the search.
            searches[key] = search = dht_node._SearchState(key, math.nan, DictionaryDHTValue(), 0.0)
            search.record_validator = self.protocol.record_validator
        incomplete = list(key_ids)
        if is_large := len(key_ids) == NUM_BUCKETS and len(self.members) > FEW_MEMBERS:
            places = {key: {*self.places_of(key)} - {self.peer_id} for key in key_ids}
            sources = {key: {random.choice(list(peer_ids))} for key, peer_ids in places.items()}
            sources[random.choice(list(key_ids))] = self.initial_peers
            await self._ask(searches, sources)
            incomplete = [key for key in key_ids if self.lacks_news(key, searches[key].binary_value)]
        # Only now: what this node has itself may be old, and would hide that the one asked is gone.
        for key, search in searches.items():
            search.add_candidate(self.protocol.storage.get(key), None)
        await self._ask(searches, {key: self._sources(key) for key in incomplete})
        if is_large:
            self.record_news(searches)
        for search in searches.values():
            search.finish_search()
        return {key: search.future.result() for key, search in searches.items()}

    def places_of(self, key: DHTID) -> list[PeerID]:
        """Return the members that store the records under a key."""
        return self._members_near(key, MEMBER_REPLICAS)

    def _members_near(self, key: DHTID, number: int) -> list[PeerID]:
        return sorted(self.members, key=lambda peer_id: key.xor_distance(node_id_of(peer_id)))[:number]

    def _sources(self, key: DHTID) -> set[PeerID]:
        """Return the nodes that a read asks for all records under a key."""
        sources = {*self._members_near(key, FEW_MEMBERS), *self._nearest(key, NUM_ASKED)}
        if random.random() < (FEW_PUBLIC / max(1, len(self.members))) ** 2:
            sources |= self.initial_peers
        return sources

    def lacks_news(self, key: DHTID, found: DictionaryDHTValue) -> bool:
        """Whether an answer lacks a record that was new in the last read, or has no newer one of its author by now."""
        if not self.news.get(key):
            return True
        are_renewed = time.monotonic() >= self.read_at + RENEWED_SECONDS
        for subkey, expiration in self.news[key].items():
            record = found.get(subkey)
            if record is None or record.expiration_time < expiration:
                return True
            if are_renewed and record.expiration_time == expiration:
                return True
        return False

    def record_news(self, searches: dict[DHTID, Any]) -> None:
        """Remember which records are new since an earlier read: their authors are there, and renew them.

        Not again before all have renewed them: after two reads at once, few would be new.
        """
        if time.monotonic() < self.read_at + RENEWED_SECONDS:
            return
        for key, search in searches.items():
            found = {subkey: record.expiration_time for subkey, record in search.binary_value.items()}
            before = self.found.get(key, {})
            self.news[key] = {subkey: end for subkey, end in found.items() if end > before.get(subkey, 0.0)}
            self.found[key] = found
        self.read_at = time.monotonic()

    async def _ask(self, searches: dict[DHTID, Any], sources: Mapping[DHTID, Collection[PeerID]]) -> None:
        """Ask nodes for keys, each for all of its keys at once, and add what most of them answer to the searches."""
        protocol, asked = self.protocol, defaultdict(list)
        for key, peer_ids in sources.items():
            for peer_id in {*peer_ids} - {self.peer_id}:
                asked[peer_id].append(key)

        async def ask(peer_id: PeerID, keys: list[DHTID]) -> None:
            for key, (value, _) in (await protocol.call_find(peer_id, keys) or {}).items():
                if not searches[key].finished:
                    searches[key].add_candidate(value, None)
                elif value is not None and isinstance(value.value, DictionaryDHTValue):  # late: for the next read
                    for subkey, record in value.value.items():  # pyright: ignore[reportAttributeAccessIssue]
                        protocol.storage.store_subkey(key, subkey, *record)

        if asked:
            await self._wait_for_most({asyncio.create_task(ask(*each)): each[0] for each in asked.items()})

    async def _wait_for_most(self, calls: dict[asyncio.Task, PeerID]) -> None:
        """Wait for half of the nodes that are not known as late, and for the others as long as PATIENCE says.

        If all are late, this peer's own line may be slow.
        """
        started = now = time.monotonic()
        self.late_until = {peer_id: until for peer_id, until in self.late_until.items() if until > now}
        pending = {call for call, peer_id in calls.items() if peer_id not in self.late_until} or set(calls)
        number = len(pending)
        while len(pending) > number / 2:
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if pending:
            _, pending = await asyncio.wait(pending, timeout=PATIENCE + 2 * (time.monotonic() - started))
        self.late_until.update((calls[call], now + SKIP_SECONDS) for call in pending)

    async def store(self, key: str, *args, subkey: object, **kwargs) -> bool:
        key = f"{key}.{bucket_of(subkey)}" if key.endswith(PROGRESS) else key
        return await super().store(key, *args, subkey=subkey, **kwargs)

    async def get(self, key: str, members: Collection[bytes] | None = None, **kwargs) -> ValueWithExpiration | None:
        """Read the newest records under a key. `members`: peer IDs of the last rounds, which are asked from now on."""
        self.members = self.members if members is None else [PeerID(member) for member in members]
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
        dht_protocol.MAX_DHT_TIME_DISCREPANCY_SECONDS = math.inf  # the clock is corrected, see peerstep/peer/redial.py
        self._inner_pipe = Inbox(self._inner_pipe, self.beats)  # pyright: ignore[reportArgumentType]
        self.kwargs |= WITHOUT_CACHES
        super().run()

    def check_invitation(self) -> None:
        """Raise UserError if this peer's invitation no longer holds, in a run with invitations."""

    def describe(self, peer_id: PeerID) -> str:
        """Return how the log names a peer."""
        return str(peer_id)

    async def replicate_p2p(self) -> P2P:
        """Return the P2P of this process, connected to the daemon of the DHT process."""
        if self._p2p_replica is None or self._origin_pid != os.getpid():
            self._origin_pid = os.getpid()
            daemon_listen_maddr = self.run_coroutine(DHT._get_p2p_daemon_listen_maddr)
            self._p2p_replica = await self.p2p_class.replicate(daemon_listen_maddr)  # pyright: ignore[reportArgumentType]
        return self._p2p_replica

    async def skip_call(self) -> None:
        pass
