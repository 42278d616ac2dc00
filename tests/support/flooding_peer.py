"""Peer without a GPU that knows one address of a run and floods its peers with streams, until it is killed.

It opens streams for groups that do not exist, requests to join groups, downloads that it does not read, and streams
that announce 1 TiB and send some of it. It asks for the same records thousands of times in one request.

python tests/support/flooding_peer.py RUN_ID MULTIADDRESS
"""

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from hivemind.dht import DHT, DHTID, DHTNode
from hivemind.p2p import P2P, PeerID
from hivemind.proto import averaging_pb2, dht_pb2
from hivemind.utils import get_dht_time
from hivemind.utils.asyncio import as_aiter
from hivemind.utils.crypto import RSAPrivateKey

from peerstep.peer.node import PROGRESS, read_reports
from peerstep.peer.processes import guard_children
from peerstep.reports.records import signer_of
from peerstep.rounds.averager import RoundAverager
from peerstep.state.averager import TrainingStateAverager
from tests.support.dht_records import make_validators

ROUNDS, STATES, METRICS = "round_averager", "state_averager", "metrics"
NUM_PARTS, NUM_JOINS, NUM_DOWNLOADS = 50, 20, 20  # streams to each peer, again and again
LAP = 3.0  # seconds
NUM_FINDS, NUM_KEYS = 20, 50_000
ANNOUNCED, SENT = 2**40, 64 * 2**20  # bytes


async def hold(call) -> None:
    """Open a stream, read its first message, and nothing more."""
    async for _ in await call:
        await asyncio.sleep(600)


async def send_oversized(p2p: P2P, peer: PeerID, name: str) -> None:
    _, reader, writer = await p2p.call_binary_stream_handler(peer, name)
    writer.write(P2P.MESSAGE_MARKER + ANNOUNCED.to_bytes(P2P.HEADER_LEN, P2P.BYTEORDER))
    for _ in range(SENT // 2**20):
        writer.write(bytes(2**20))
        await writer.drain()
    await reader.read(1)


async def find_repeatedly(node: DHTNode, peer: PeerID, run_id: str) -> None:
    keys = [DHTID.generate(f"{run_id}_{METRICS}").to_bytes()] * NUM_KEYS
    request = dht_pb2.FindRequest(keys=keys, peer=node.protocol.node_info)
    for _ in range(NUM_FINDS):
        with suppress(Exception):
            await node.protocol.get_stub(peer).rpc_find(request, timeout=LAP)


def list_calls(p2p: P2P, peer: PeerID, run_id: str) -> Iterator:
    prefix = f"{run_id}_{ROUNDS}"
    rounds = RoundAverager.get_stub(p2p, peer, namespace=prefix)
    states = TrainingStateAverager.get_stub(p2p, peer, namespace=f"{run_id}_{STATES}")
    for _ in range(NUM_PARTS):
        part = averaging_pb2.AveragingData(code=averaging_pb2.PART_FOR_AVERAGING, group_id=os.urandom(40))
        yield hold(rounds.rpc_aggregate_part(as_aiter(part)))
    for number in range(NUM_JOINS):
        request = averaging_pb2.JoinRequest(
            group_key=str(2**40 + number), expiration=get_dht_time() + 60, gather=os.urandom(60)
        )
        yield hold(rounds.rpc_join_group(request))
    for _ in range(NUM_DOWNLOADS):
        yield hold(states.rpc_download_state(averaging_pb2.DownloadRequest()))
    for method in ("rpc_join_group", "rpc_aggregate_part"):
        yield send_oversized(p2p, peer, RoundAverager._get_handle_name(prefix, method))


async def flood(_dht: DHT, node: DHTNode, run_id: str, own: bytes) -> None:
    tasks: set[asyncio.Task] = set()
    while True:
        reports = await read_reports(node, f"{run_id}_{PROGRESS}")
        peers = [signer_of(subkey) for subkey in reports if subkey != own]
        for task in tasks:
            task.cancel()
        with suppress(Exception):
            await asyncio.gather(*tasks, return_exceptions=True)
        tasks = {asyncio.create_task(call) for peer in peers for call in list_calls(node.p2p, peer, run_id)}
        tasks |= {asyncio.create_task(find_repeatedly(node, peer, run_id)) for peer in peers}
        print(f"attacked {len(peers)} trainers", flush=True)
        await asyncio.sleep(LAP)


def main(run_id: str, address: str) -> None:
    validators, own = make_validators(run_id, RSAPrivateKey())
    dht = DHT([address], start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"], record_validators=validators)
    dht.run_coroutine(partial(flood, run_id=run_id, own=own))


if __name__ == "__main__":
    guard_children()  # its DHT process must end with it
    main(*sys.argv[1:])
