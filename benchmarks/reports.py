#!/usr/bin/env python3
"""Measure what the progress reports cost the nodes of the DHT: benchmarks/reports.py --peers 16 64 512

The nodes run in this process and call each other without a network; three of eight are public. Each trainer stores its
report every 5 s, but one in a hundred that has left, and some read all reports, not for the first time. The bytes are
those of all requests and answers, without libp2p's. A read is as frequent as that of a trainer at most.
"""

import argparse
import asyncio
import math
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent.parent))

from hivemind.dht import node as dht_node
from hivemind.p2p import P2PContext, PeerID
from hivemind.utils.crypto import RSAPrivateKey

from peerstep.peer import node as own_node
from peerstep.peer.clock import run_time
from peerstep.progress.tracker import HEARTBEAT_SECONDS, SECONDS_PER_PEER
from peerstep.reports.progress_report import PeerProgress
from tests.support.dht_nodes import stub_without_network
from tests.support.dht_records import make_validators

KEY = f"run_{own_node.PROGRESS}"
MARKS = tuple((8 * step, os.urandom(6).hex()) for step in range(1, 9))  # all trainers have the same history


class Protocol(own_node.DHTProtocol):
    nodes: dict[PeerID, "Protocol"] = {}
    sent, received = Counter(), Counter()  # peer ID -> bytes

    async def add_p2p_handlers(self, *_args, **_kwargs) -> None:
        self.nodes[self.p2p.peer_id] = self

    def get_stub(self, peer: PeerID) -> own_node.CheckedStub:
        return stub_without_network(partial(self.call, peer))

    async def call(self, peer: PeerID, name: str, request, timeout: float | None = None):
        answer = await getattr(self.nodes[peer], name)(request, P2PContext("", "", self.p2p.peer_id))
        for sender, receiver, message in ((self.p2p.peer_id, peer, request), (peer, self.p2p.peer_id, answer)):
            self.sent[sender] += message.ByteSize()
            self.received[receiver] += message.ByteSize()
        return answer


def is_public(index: int) -> bool:
    return index % 8 in (0, 3, 5)


async def build_nodes(signers: list[RSAPrivateKey], rng: random.Random) -> tuple[list, list[bytes]]:
    """Return the nodes, which know most of each other and the members of the last rounds, and their subkeys."""
    nodes, subkeys = [], []
    for index, signer in enumerate(signers):
        (validator,), subkey = make_validators("run", signer)
        validator.known = nodes[0].protocol.record_validator.known if nodes else validator.known  # checked once
        node = await own_node.RunNode.create(
            p2p=SimpleNamespace(peer_id=PeerID(os.urandom(32))),
            record_validator=validator,
            client_mode=not is_public(index),
            **own_node.WITHOUT_CACHES,
        )
        node.initial_peers = {nodes[0].peer_id} if nodes else set()
        nodes.append(node)
        subkeys.append(subkey)
    public = nodes[8::8] + nodes[3::8] + nodes[5::8] or nodes[:1]
    members = rng.sample(public, min(max(32, len(nodes) // 2), len(public)))
    for node in nodes:
        node.members = [member.peer_id for member in members]
        for other in rng.sample(public, min(150, len(public))):
            if other is not node:
                await node.protocol.update_routing_table(other.node_id, other.peer_id)
    return nodes, subkeys


async def publish(nodes: list, subkeys: list[bytes], has_left: Callable[[int], bool]) -> None:
    for index, (node, subkey) in enumerate(zip(nodes, subkeys, strict=True)):
        if not has_left(index):
            report = PeerProgress(b"", time=run_time(), reported_at=run_time(), samples_per_second=1.5, marks=MARKS)
            value = {**report.to_record(), "schema": "0" * 16}
            await node.store(KEY, value, run_time() + 120, subkey=subkey)


async def measure(signers: list[RSAPrivateKey], num_readers: int) -> str:
    """Return the traffic of the nodes, for one more node than there are trainers: the initial peer."""
    rng, number = random.Random(0), len(signers) - 1
    nodes, subkeys = await build_nodes(signers, rng)
    readers = rng.sample(nodes[1:], min(num_readers, number))
    for _ in range(2):
        await publish(nodes[1:], subkeys[1:], lambda _: False)
        for node in readers:
            await node.get(KEY, latest=True)
            node.read_at = -math.inf  # long enough ago that all have renewed their reports
    Protocol.sent.clear()
    await publish(nodes[1:], subkeys[1:], lambda index: index % 100 == 99)
    for_stores = Counter(Protocol.sent)
    Protocol.sent.clear()
    Protocol.received.clear()
    started = time.process_time()
    for node in readers:
        assert len((await node.get(KEY, latest=True)).value) == number
    spent = (time.process_time() - started) / len(readers)
    period = max(0.5, SECONDS_PER_PEER * number)
    period = min(period, max(30.0, period / 2))
    of_readers = number / len(readers) / period  # reads per second, of all for each of those measured
    sends = [8e-6 * (for_stores[n.peer_id] / HEARTBEAT_SECONDS + Protocol.sent[n.peer_id] * of_readers) for n in nodes]
    received = statistics.median(Protocol.received[node.peer_id] for node in readers)
    public = [rate for index, rate in enumerate(sends) if is_public(index) and index] or [0.0]
    return (
        f"{number} trainers, a read every {period:.1f} s: {received / 1e6:.2f} MB, {8e-6 * received / period:.2f} "
        f"Mbit/s and {1000 * spent:.0f} ms of CPU; Mbit/s sent by the initial peer {sends[0]:.2f}, a public trainer "
        f"{statistics.median(public):.2f}, the busiest {max(public):.2f}"
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, nargs="+", default=[16, 64, 128])
    parser.add_argument("--readers", type=int, default=32, help="trainers whose reads are measured")
    args, dht_node.DHTProtocol = parser.parse_args(), Protocol
    signers = [RSAPrivateKey() for _ in range(1 + max(args.peers))]
    for number in args.peers:
        print(await measure(signers[: 1 + number], args.readers), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
