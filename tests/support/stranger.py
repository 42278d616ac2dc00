"""Peer without a GPU that knows one address of a run and attacks it with records alone, until it is killed.

It reports in the name of every trainer that it finds and in its own, withdraws their offers of a state, offers one
itself, and fills the dictionaries of the run with junk.

python tests/support/stranger.py RUN_ID MULTIADDRESS
"""

import asyncio
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from hivemind.dht import DHT, DHTID, DHTNode
from hivemind.dht.validation import DHTRecord
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer, get_dht_time
from hivemind.utils.crypto import RSAPrivateKey

from lib.averaging.records import signer_of
from lib.common.processes import guard_children
from tests.support.hostile_peer import UncheckedSignatures, progress

DAY = 86_000.0
JUNK = 1000  # records under each key: as many as a node keeps


class Stranger:
    """The attack, in the DHT process: its pipe does not take as much."""

    def __init__(self, node: DHTNode, run_id: str, own: bytes):
        self.node, self.own = node, own
        self.reports, self.offers = f"{run_id}_training_progress", f"{run_id}_state_averager.all_averagers"
        self.keys = [self.reports, self.offers, f"{run_id}_metrics", f"{run_id}_peers", "run_config"]
        self.records: list[DHTRecord] = []

    def write(self, key: str, subkey: bytes, value: object, lifetime: float = DAY) -> None:
        parts = DHTID.generate(key).to_bytes(), MSGPackSerializer.dumps(subkey), MSGPackSerializer.dumps(value)
        record = DHTRecord(*parts, get_dht_time() + lifetime)
        self.records.append(replace(record, value=self.node.protocol.record_validator.sign_value(record)))

    def write_all(self, trainers: list[bytes]) -> None:
        self.write(self.reports, self.own, {**progress(epoch=30_000), "samples_accumulated": 64}, lifetime=100.0)
        self.write(self.offers, self.own, 30_000.0, lifetime=100.0)
        for number, trainer in enumerate(trainers):
            peer_id = signer_of(trainer).to_bytes()
            forged = {**progress(epoch=1, when=50.0), "peer_id": peer_id, "auxiliary": True}
            for subkey in (trainer, peer_id, b"x%d" % number + self.own):
                self.write(self.reports, subkey, forged, lifetime=100.0)
                self.write(self.offers, subkey, None)
        for key in self.keys:
            for number in range(JUNK):
                self.write(key, b"%d" % number, None)
                self.write(key, b"y%d" % number + self.own, None)

    async def send(self) -> None:
        """Store the records at all known nodes, whichever are responsible for the keys."""
        while self.records:
            part, self.records = self.records[:JUNK], self.records[JUNK:]
            request = dht_pb2.StoreRequest(
                keys=[record.key for record in part],
                subkeys=[record.subkey for record in part],
                values=[record.value for record in part],
                expiration_time=[record.expiration_time for record in part],
                in_cache=[False] * len(part),
            )
            for peer in list(self.node.protocol.routing_table.uid_to_peer_id.values()):
                with suppress(Exception):
                    await self.node.protocol.get_stub(peer).rpc_store(request, timeout=10.0)


async def attack(_dht: DHT, node: DHTNode, run_id: str, own: bytes) -> None:
    stranger = Stranger(node, run_id, own)
    while True:
        found = await node.get(stranger.reports, latest=True)
        trainers = [subkey for subkey in (found.value if found else {}) if subkey != own]
        stranger.write_all(trainers)
        await stranger.send()
        print(f"attacked {len(trainers)} trainers", flush=True)
        await asyncio.sleep(0.5)


def main(run_id: str, address: str) -> None:
    signer = UncheckedSignatures(RSAPrivateKey())
    dht = DHT([address], start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"], record_validators=[signer])
    dht.run_coroutine(partial(attack, run_id=run_id, own=signer.local_public_key))


if __name__ == "__main__":
    guard_children()  # its DHT process must end with it
    main(*sys.argv[1:])
