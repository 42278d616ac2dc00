"""Nodes of the DHT of a run in one event loop, over libp2p on 127.0.0.1 or without a network, and hostile ones."""

import asyncio
import functools
import heapq
import os
from collections.abc import Callable
from types import SimpleNamespace

from hivemind.dht import node as dht_node
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import CompositeValidator
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils.crypto import RSAPrivateKey

from peerstep.peer import node as own_node
from peerstep.peer.clock import run_time
from peerstep.peer.node import NUM_BUCKETS, PROGRESS, WITHOUT_CACHES, RelayedP2P, RunNode, read_reports
from peerstep.reports.progress_report import PeerProgress
from peerstep.reports.records import build_validators

KEY = f"run_{PROGRESS}"
STRANGER = RSAPrivateKey()
HOST = {"host_maddrs": ["/ip4/127.0.0.1/tcp/0"], "use_relay": False, "use_auto_relay": False, "dht_mode": "server"}


def report(step: int) -> dict:
    record = PeerProgress(b"", epoch=step, completed=step, samples_accumulated=1, time=run_time()).to_record()
    return record | {"schema": "0" * 16, "reported_at": run_time()}


def stub_without_network(call: Callable) -> own_node.CheckedStub:
    """Return the stub of a node in this process. `call`: takes the name of a method and its request."""
    calls = {name: functools.partial(call, name) for name in ("rpc_ping", "rpc_find", "rpc_store")}
    return own_node.CheckedStub(SimpleNamespace(**calls))


class Nodes:
    """Nodes of a run.

    :param is_local: call each other without a network; otherwise through libp2p
    """

    def __init__(self, is_local: bool = False):
        self.is_local, self.address = is_local, None
        self.honest: list[tuple[RunNode, bytes]] = []
        self.all: list[dht_node.DHTNode] = []
        self.local: dict[PeerID, own_node.DHTProtocol] = {}
        self.messages = 0  # of nodes without a network
        self.validator = None

    async def add(
        self, protocol: type = own_node.DHTProtocol, peer_id: PeerID | None = None,
        private_key: RSAPrivateKey | None = None, **options,
    ) -> RunNode:  # fmt: skip
        """Start a node that joins through the first one. `protocol`: of a hostile one; it stores no report."""
        is_honest = getattr(protocol, "is_honest", True)
        validators, subkey = build_validators("run", private_key or (RSAPrivateKey() if is_honest else STRANGER))
        if self.is_local:
            protocol = self._without_network(protocol)
            validators[0].known = self.validator.known if self.validator else validators[0].known  # checked once
            self.validator = validators[0]
            options["p2p"] = SimpleNamespace(peer_id=peer_id or PeerID(b"\x12\x20" + os.urandom(32)))
            address = self.address and [f"/ip4/127.0.0.1/tcp/1/p2p/{self.address}"]
        else:
            address = self.address and [self.address]
            options["p2p"] = await RelayedP2P.create(initial_peers=address, **HOST)
        before, dht_node.DHTProtocol = dht_node.DHTProtocol, protocol
        try:
            validator = CompositeValidator(validators)
            node = await RunNode.create(initial_peers=address, record_validator=validator, **WITHOUT_CACHES, **options)
        finally:
            dht_node.DHTProtocol = before
        self.all.append(node)
        if self.address is None:
            first = node.peer_id if self.is_local else (await node.p2p.get_visible_maddrs())[0]
            self.address = str(first)
        if is_honest:
            self.honest.append((node, subkey))
        return node

    def _without_network(self, protocol: type) -> type:
        nodes = self

        class Local(protocol):
            async def add_p2p_handlers(self, *_args, **_kwargs) -> None:
                nodes.local[self.p2p.peer_id] = self

            async def remove_p2p_handlers(self, *_args, **_kwargs) -> None:
                nodes.local.pop(self.p2p.peer_id)

            def get_stub(self, peer: PeerID) -> own_node.CheckedStub:
                return stub_without_network(functools.partial(self.call, peer))

            async def call(self, peer: PeerID, name: str, request, timeout: float | None = None):
                nodes.messages += 1
                await asyncio.sleep(0)
                return await getattr(nodes.local[peer], name)(request, P2PContext("", "", self.p2p.peer_id))

        return Local

    async def publish(self, step: int, lifetime: float = 60.0) -> None:
        """Store a report of each honest node, those of a later step instead of those before."""
        stores = [
            node.store(KEY, report(step), run_time() + lifetime, subkey=subkey)
            for node, subkey in self.honest
            if node.is_alive
        ]
        await asyncio.gather(*stores)

    async def read(self, node: RunNode) -> list[int]:
        """Return the steps of the honest reports that a node finds."""
        found, honest = await read_reports(node, KEY), {subkey for _, subkey in self.honest}
        return sorted(record.value["epoch"] for subkey, record in found.items() if subkey in honest)

    async def read_all(self) -> list[list[int]]:
        return await asyncio.gather(*(self.read(node) for node, _ in self.honest if node.is_alive))

    async def __aenter__(self) -> "Nodes":
        return self

    async def __aexit__(self, *_error: object) -> None:
        for node in self.all:
            if node.is_alive:
                await node.shutdown()
            if not self.is_local:
                await node.p2p.shutdown()


def report_keys() -> list[DHTID]:
    return [DHTID.generate(f"{KEY}.{bucket}") for bucket in range(NUM_BUCKETS)]


@functools.cache
def _candidates(number: int) -> list[tuple[DHTID, PeerID]]:
    peers = [PeerID(b"\x12\x20" + os.urandom(32)) for _ in range(number)]
    return [(DHTID.generate(peer.to_bytes()), peer) for peer in peers]


@functools.cache
def invent_peers(key: DHTID, number: int, tried: int = 2000) -> list[tuple[DHTID, PeerID]]:
    """Return peer IDs without a peer, and their node IDs: the nearest to a key among some tried."""
    return heapq.nsmallest(number, _candidates(tried), lambda pair: key.xor_distance(pair[0]))


def make_hostile(near, delay: float = 0.0) -> type:
    """Return the protocol of a stranger that names nodes of its choice, takes each record and gives none.

    :param near: (own protocol, key) -> pairs of node ID and peer ID
    :param delay: seconds until it answers
    """

    class DHTProtocol(own_node.DHTProtocol):  # the name is part of the protocol
        is_honest, num_stored = False, 0

        async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
            response = dht_pb2.FindResponse(results=[], peer=self.node_info)
            for key in map(DHTID.from_bytes, request.keys):
                pairs = near(self, key)
                response.results.append(
                    dht_pb2.FindResult(
                        type=dht_pb2.NOT_FOUND,
                        nearest_node_ids=[node_id.to_bytes() for node_id, _ in pairs],
                        nearest_peer_ids=[peer_id.to_bytes() for _, peer_id in pairs],
                    )
                )
            await asyncio.sleep(delay)
            return response

        async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
            DHTProtocol.num_stored += len(request.keys)
            return dht_pb2.StoreResponse(store_ok=[True] * len(request.keys), peer=self.node_info)

    return DHTProtocol
