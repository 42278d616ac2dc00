#!/usr/bin/env python3
"""Measure what the progress reports cost the nodes of the DHT: benchmarks/reports.py --peers 25 50

The nodes run in this process and call each other without a network. Each peer stores its report and reads all of them,
twice; the second time counts: the calls, and the bytes of all requests and answers, without those of libp2p. The
Mbit/s are for peers that report every 5 s, and read as often as trainers do at most. Needs no network.
"""

import argparse
import asyncio
import os
import sys
import time
from collections import Counter
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
from tests.support.dht_records import make_validators

KEY = f"run_{own_node.PROGRESS}"


class Protocol(own_node.DHTProtocol):
    nodes: dict[PeerID, "Protocol"] = {}
    sent = Counter()  # peer ID -> bytes
    calls = Counter()  # name -> calls, each a request and an answer

    async def add_p2p_handlers(self, *_args, **_kwargs) -> None:
        self.nodes[self.p2p.peer_id] = self

    def get_stub(self, peer: PeerID) -> SimpleNamespace:
        return SimpleNamespace(
            **{name: partial(self.call, peer, name) for name in ("rpc_ping", "rpc_find", "rpc_store")}
        )

    async def call(self, peer: PeerID, name: str, request, timeout: float | None = None):
        answer = await getattr(self.nodes[peer], name)(request, P2PContext("", "", self.p2p.peer_id))
        self.calls[name] += 1
        self.sent.update({self.p2p.peer_id: request.ByteSize()})
        self.sent.update({peer: answer.ByteSize()})
        return answer


async def measure(signers: list[RSAPrivateKey], period: float) -> str:
    """Return the traffic of the nodes, and the cost of a store and of a read.

    :param period: seconds between two reads of a peer
    """
    nodes, subkeys = [], []
    for signer in signers:
        (validator,), subkey = make_validators("run", signer)
        validator.known = nodes[0].protocol.record_validator.known if nodes else validator.known  # checked once
        p2p = SimpleNamespace(peer_id=PeerID(os.urandom(32)))
        nodes.append(await own_node.RunNode.create(p2p=p2p, record_validator=validator, **own_node.WITHOUT_CACHES))
        nodes[-1].initial_peers = {nodes[0].peer_id}
        await asyncio.gather(*(nodes[-1].protocol.call_ping(other.peer_id) for other in nodes[-4:-1] + nodes[:1]))
        await nodes[-1].find_nearest_nodes([nodes[-1].node_id])
        subkeys.append(subkey)
    for _ in range(2):
        Protocol.sent.clear()
        Protocol.calls.clear()
        started = time.process_time()
        for node, subkey in zip(nodes, subkeys, strict=True):
            record = PeerProgress(b"", time=run_time(), reported_at=run_time(), samples_per_second=1.5).to_record()
            await node.store(KEY, {**record, "schema": "0" * 16}, run_time() + 170, subkey=subkey)
        for_reports, stores, stored = Counter(Protocol.sent), sum(Protocol.calls.values()), time.process_time()
        Protocol.sent.clear()
        Protocol.calls.clear()
        for node in nodes:
            found = (await node.get(KEY, latest=True)).value
            assert len(found) == len(nodes), (len(found), len(nodes))
    spent = [1000 * seconds / len(nodes) for seconds in (stored - started, time.process_time() - stored)]
    calls = [number / len(nodes) for number in (stores, sum(Protocol.calls.values()))]
    seconds = ((for_reports, HEARTBEAT_SECONDS), (Protocol.sent, period))
    mbits = [sum(8e-6 * sent[peer] / each for sent, each in seconds) for peer in Protocol.sent]
    each = ", ".join(
        f"a {name} {number:.1f} calls and {ms:.0f} ms of CPU"
        for name, number, ms in zip(("store", "read"), calls, spent, strict=True)
    )
    busiest, mean = max(mbits), sum(mbits) / len(nodes)
    return f"busiest node {busiest:.2f} Mbit/s, mean {mean:.2f}, reads every {period:.1f} s; {each}"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, nargs="+", default=[25, 50, 100])
    numbers, dht_node.DHTProtocol = parser.parse_args().peers, Protocol
    signers = [RSAPrivateKey() for _ in range(max(numbers))]
    for number in numbers:
        print(f"{number} peers", flush=True)
        print("  " + await measure(signers[:number], max(0.5, SECONDS_PER_PEER * number)), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
