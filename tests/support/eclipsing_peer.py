"""Peer without a GPU that names itself and peers that do not exist next to each key of the DHT, until it is killed.

python tests/support/eclipsing_peer.py RUN_ID MULTIADDRESS
"""

import asyncio
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ.setdefault("TMPDIR", tempfile.gettempdir())

from hivemind.dht import node as dht_node
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import CompositeValidator
from hivemind.utils.crypto import RSAPrivateKey

from peerstep.patches import apply_patches
from peerstep.peer.node import PROGRESS, WITHOUT_CACHES, RelayedP2P, RunNode, read_reports
from tests.support.dht_nodes import HOST, invent_peers, make_hostile
from tests.support.dht_records import make_validators


def name_nodes(protocol, key: DHTID) -> list:
    return [(DHTID(int(key) ^ (i + 1)), protocol.p2p.peer_id) for i in range(10)] + invent_peers(key, 10)


async def main(run_id: str, address: str) -> None:
    apply_patches()
    protocol = dht_node.DHTProtocol = make_hostile(name_nodes)
    validators, _ = make_validators(run_id, RSAPrivateKey())
    p2p = await RelayedP2P.create(initial_peers=[address], **HOST)
    options = {"initial_peers": [address], "record_validator": CompositeValidator(validators), **WITHOUT_CACHES}
    node = await RunNode.create(p2p=p2p, **options)
    while True:
        reports = await read_reports(node, f"{run_id}_{PROGRESS}")
        print(f"attacked {len(reports)} trainers, took {protocol.num_stored} records", flush=True)
        for peer in list(node.protocol.routing_table.uid_to_peer_id.values()):
            await node.protocol.call_ping(peer)
        await asyncio.sleep(5.0)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
