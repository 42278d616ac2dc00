"""Peer without a GPU that knows one address of a run and attacks it with records alone, until it is killed.

It writes invalid records, and claims that are false: in the name of every trainer that it finds and in its own. It
withdraws the trainers' offers of a state, offers one itself, and fills the dictionaries of the run with junk.

python tests/support/hostile_peer.py RUN_ID MULTIADDRESS
"""

import asyncio
import random
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from hivemind.dht import DHT, DHTID, DHTNode
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.validation import DHTRecord
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer, get_dht_time
from hivemind.utils.crypto import RSAPrivateKey

from peerstep.peer.node import PROGRESS, bucket_of, read_reports
from peerstep.peer.processes import guard_children
from peerstep.reports.records import signer_of
from peerstep.rounds.averager import PROTOCOL
from tests.support.dht_records import trainer_record

# The claimed steps are far above those of the tests' runs, so that tests can tell them from the trainers' reports.
GOOD = {"step": 30_000, "samples_per_second": 1.5, "samples_accumulated": 64, "loss": 12.5, "mini_steps": 2}
NAN, INFINITY = float("nan"), float("inf")
METRICS = [
    {**GOOD, "step": 10**18}, {**GOOD, "step": 2**31 - 1}, {**GOOD, "step": 10**6}, {**GOOD, "step": -1},
    {**GOOD, "loss": NAN}, {**GOOD, "loss": INFINITY}, {**GOOD, "loss": 1e300},
    {**GOOD, "samples_accumulated": 10**15},
    {**GOOD, "samples_per_second": -1.0}, {"step": 1}, {**GOOD, "extra": 0}, [1, 2], "text", None, b"\xc1", 10**9,
    {**GOOD, "step": True}, {**GOOD, "mini_steps": 0, "samples_accumulated": 0}, GOOD,
]  # fmt: skip
HISTORIES = [[[10**9, 1.0, 1, 1.0, 1]] * 64, [[NAN] * 5], [[1, 2]], "x" * 12_000, [[0] * 5] * 1000, {"a": 1}]
PRIORITIES = [INFINITY, NAN, 1e308, 10**6, -1, "text", None, 30_000.0]  # of the offered state
EPOCHS = [10**18, 2**31, 10**6, 30_000]
LONG = 170.0  # seconds; a node refuses records that live much longer
JUNK = 1000  # records under each key: as many as a node keeps


def nest(levels: int, extension: bool = False) -> bytes:
    """Return msgpack of nested lists, or of the nested extension type that hivemind packs tuples into."""
    packed = b"\x90"
    for _ in range(levels):
        packed = b"\x91" + (b"\xc9" + len(packed).to_bytes(4, "big") + b"\x40" if extension else b"") + packed
    return packed


# Bytes that make hivemind's readers raise: no msgpack, truncated, an extension type that raises, nested values
RAW = [b"\xc1", b"", b"\x92\x01", b"\xc7\x01\x50\xc0", nest(400), nest(400, extension=True)]


def progress(epoch: int, rate: float = 1.0, when: float = 0.0) -> dict:
    """Build a progress report.

    :param when: its time, in seconds from now
    """
    return {
        "protocol": PROTOCOL, "epoch": epoch, "completed": epoch,
        "samples_accumulated": 0, "contributed": 0, "samples_per_second": rate, "time": get_dht_time() + when,
        "reported_at": get_dht_time() + when, "client_mode": False,
    }  # fmt: skip


class Attack:
    """The attack, in the DHT process: its pipe does not take as much. `own` is the key that the peer may sign with."""

    def __init__(self, node: DHTNode, run_id: str, own: bytes):
        self.node, self.run_id, self.own = node, run_id, own
        self.reports, self.metrics, self.offers = PROGRESS, "metrics", "state_averager.all_averagers"
        self.records: list[DHTRecord] = []

    def write(self, name: str, subkey: object, value: object, lifetime: float = 100.0) -> None:
        self.write_raw(name, subkey, MSGPackSerializer.dumps(value), lifetime)

    def write_raw(self, name: str, subkey: object, value: bytes, lifetime: float = 100.0) -> None:
        name = f"{name}.{max(0, bucket_of(subkey))}" if name == PROGRESS else name
        key = DHTID.generate(f"{self.run_id}_{name}").to_bytes()
        record = DHTRecord(key, MSGPackSerializer.dumps(subkey), value, get_dht_time() + lifetime)
        self.records.append(replace(record, value=self.node.protocol.record_validator.sign_value(record)))

    def write_malformed(self) -> None:
        for value in METRICS:
            for subkey in (self.own, b"plain", "text", 7, b"[owner:ssh-rsa garbage]"):
                self.write(self.metrics, subkey, value)
                rows = [list(value.values())] if isinstance(value, dict) else [value]
                self.write("trainers", subkey, trainer_record(*rows))
        self.write(self.metrics, self.own, GOOD, lifetime=10**8)
        for value in HISTORIES:
            self.write("trainers", self.own, trainer_record() | {"history": value})
        self.write("monitor", self.own, {"stores_checkpoints": True, "checkpoint_step": 10**19})
        self.write("trainers", self.own, trainer_record(username="\x1b[31m" + "x" * 10_000, leaving=True))
        for name in ("round_averager.0b", self.offers, self.reports, self.metrics, "trainers"):
            for raw in RAW:
                self.write_raw(name, b"raw", raw, LONG)
                self.write_raw(name, self.own, raw, LONG)
            self.write(name, None, True, LONG)  # a record without a subkey, beside which no other may be stored

    def write_false_claims(self, trainers: list[bytes]) -> None:
        self.write(self.reports, self.own, progress(10**6, when=10**6))
        for epoch in random.sample(EPOCHS, len(EPOCHS)):  # the last one stays in force until the next lap
            for rate in (NAN, INFINITY, 1e30, 1.0):
                self.write(self.reports, self.own, {**progress(epoch, rate), "samples_accumulated": 64})
        for value in PRIORITIES:
            self.write(self.offers, self.own, value)
            self.write(self.offers, random.randbytes(20), value)
        for number, trainer in enumerate(trainers):
            peer_id = signer_of(trainer).to_bytes()
            forged = {**progress(epoch=1, when=50.0), "peer_id": peer_id}
            for subkey in (trainer, peer_id, b"x%d" % number + self.own):
                self.write(self.reports, subkey, forged)
                self.write(self.offers, subkey, None, LONG)
                self.write(self.metrics, subkey, GOOD)
                self.write("trainers", subkey, trainer_record(list(GOOD.values()), leaving=True))

    def write_junk(self) -> None:
        for name in (self.reports, self.offers, self.metrics, "trainers", "run_config"):
            for number in range(JUNK):
                self.write(name, b"%d" % number, None, LONG)
                self.write(name, b"y%d" % number + self.own, None, LONG)

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
    attack = Attack(node, run_id, own)
    while True:
        reports = await read_reports(node, f"{run_id}_{PROGRESS}")
        trainers = [subkey for subkey in reports if subkey != own]
        attack.write_malformed()
        attack.write_false_claims(trainers)
        attack.write_junk()
        await attack.send()
        print(f"attacked {len(trainers)} trainers", flush=True)
        await asyncio.sleep(0.5)


def main(run_id: str, address: str) -> None:
    signer = RSASignatureValidator(RSAPrivateKey())
    dht = DHT([address], start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"], record_validators=[signer])
    dht.run_coroutine(partial(attack, run_id=run_id, own=signer.local_public_key))


if __name__ == "__main__":
    guard_children()  # its DHT process must end with it
    main(*sys.argv[1:])
