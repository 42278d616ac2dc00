"""Four unlike trainers, a newcomer in the middle, and one or two peers that lie about a state or in their records.

Reports and offers pass the nodes of the DHT, real but for the network between them, and their validators; the rounds
pass tests/support/simulated_network.py. All seconds are simulated.
"""

import asyncio
import functools
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.utils import MPFuture
from hivemind.utils.crypto import RSAPrivateKey
from hivemind.utils.timed_storage import ValueWithExpiration

from peerstep.peer.node import RunNode
from peerstep.reports.marks import MAX_DIFFERENT, different_marks
from peerstep.reports.progress_report import MAX_SAMPLES
from peerstep.rounds.claims import verify
from tests.support import simulated_network
from tests.support.dht_nodes import Nodes, invent_peers, make_hostile
from tests.support.scenario import LINKS, Peer, Scenario
from tests.support.simulated_network import Node
from tests.support.simulated_time import EPOCH

pytestmark = pytest.mark.peers
UNLIKE = ((0.8, LINKS, False), (1.0, LINKS / 2, False), (1.2, LINKS, False), (1.0, 2 * LINKS, True))


class RunWithNodes(Scenario):
    """A run whose peers have nodes of the DHT of their own, and real keys."""

    def __enter__(self) -> "RunWithNodes":
        keys = {}

        def make_subkey(_rng: object) -> bytes:
            subkey = RSASignatureValidator(key := RSAPrivateKey()).local_public_key
            keys[subkey] = key
            return subkey

        super().__enter__()
        self.keys, self.dht, self.own = keys, Nodes(is_local=True), dict[Node, RunNode]()
        self.joining, self.hostile = asyncio.Lock(), list[type]()  # the protocols of hostile nodes
        self._patches.setattr(simulated_network, "make_subkey", make_subkey)
        self._patches.setattr(simulated_network, "SimulatedKey", keys.__getitem__)
        return self

    def _verify(self, key: bytes, scope: bytes, entry: bytes) -> bool:
        return verify(key, scope, entry)

    async def join(self, peer: Node) -> RunNode:
        async with self.joining:  # a node is created by a class that is a global of hivemind's
            if peer not in self.own:
                self.own[peer] = await self.dht.add(peer_id=peer.peer_id, private_key=self.keys[peer.subkey])
        return self.own[peer]

    def store(self, peer: Node, key: str, subkey: bytes, record: ValueWithExpiration) -> None:
        async def run() -> None:
            await (await self.join(peer)).store(key, *record, subkey=subkey)

        self.time.loop.create_task(run())

    def answer(self, peer: Node, key: str, future: MPFuture) -> None:
        async def run() -> None:
            found = await (await self.join(peer)).get(key)
            now, records = EPOCH + self.time.read(), found.value if found else {}
            valid = {subkey: record for subkey, record in records.items() if record.expiration_time > now}
            with suppress(Exception):  # the asker may have cancelled it
                future.set_result(ValueWithExpiration(valid, now) if valid else None)

        self.time.loop.create_task(run())

    def add_hostile_node(self) -> None:
        """Add a node that takes each record, shows none, answers late, and names itself and nobody who exists."""

        def name_nodes(protocol: SimpleNamespace, key) -> list:
            return [(key, protocol.p2p.peer_id), *invent_peers(key, 19)]

        hostile = make_hostile(name_nodes, DELAY)
        asyncio.run_coroutine_threadsafe(self.dht.add(hostile), self.time.loop).result()
        self.hostile.append(hostile)


def offer_false_state(peer: Peer) -> None:
    """Offer a state of two steps more than the others', with another value of one of 200 parameters."""
    averager = peer.optimizer.state_averager
    serialize, offer = averager.to_messages, averager.offer

    def change(metadata: dict, tensors: list[torch.Tensor]) -> Iterator[bytes]:
        false = [torch.cat([tensors[0][:1] + 3.5, tensors[0][1:]]), *tensors[1:]]
        return serialize(metadata | {"epoch": metadata["epoch"] + 2}, false)

    averager.to_messages, averager.offer = change, lambda priority: offer(priority=priority + 2)


def falsify_reports(change, peer: Peer) -> None:
    store = peer.store

    def store_false(key: str, value: object, *options, **named) -> None:
        is_report = key.endswith("progress") and value is not None
        store(key, value | change(value) if is_report else value, *options, **named)

    peer.store = store_false


REPORTS = {
    "most samples": lambda _: {"samples_accumulated": MAX_SAMPLES, "contributed": MAX_SAMPLES},
    "later steps": lambda report: {"epoch": report["epoch"] + 2, "completed": report["completed"] + 2},
}
KINDS = {"false state": offer_false_state}
KINDS |= {name: functools.partial(falsify_reports, change) for name, change in REPORTS.items()}
HIDDEN = "hidden records"
DELAY = 2.5  # seconds of a hostile node's answer
BATCH = 80  # samples of a global step of five seconds


@functools.cache
def train(kind: str | None, number: int, seconds: float) -> tuple[float, float]:
    """Return the mean distance of the honest to the optimum after some seconds, and their samples applied, of 1."""
    with RunWithNodes(7, target_batch_size=BATCH) as run:
        honest = [run.add(speed=speed, uplink=uplink, client=client) for speed, uplink, client in UNLIKE]
        liars = [run.add(speed=0.9) for _ in range(0 if kind == HIDDEN else number)]
        for liar in liars:
            KINDS[kind](liar)
        run.wait_until(lambda: len(run.own) >= len(honest), 30.0)
        for _ in range(number if kind == HIDDEN else 0):
            run.add_hostile_node()
        run.wait(seconds / 2)
        newcomer = run.add(speed=1.1)
        run.wait_until(lambda: newcomer.has_joined, 60.0)
        run.wait(seconds / 2)
        taken = newcomer.downloads[0][1]
        true = next(peer.history[taken] for peer in honest if taken in peer.history)
        assert (newcomer.loaded[0] - true).abs().max() < 0.05, "a false state"
        seen = honest[1].optimizer.tracker.others.reports
        assert all(liar.subkey in seen for liar in liars) and all(hostile.num_stored for hostile in run.hostile)
        run.unite(*honest, newcomer, tolerance=0.02)
        assert len(different_marks(newcomer.marks, honest[1].marks) or ()) <= MAX_DIFFERENT, "another history"
        print(f"{number} {kind}: step {honest[1].step} after {run.time.read():.0f} s")
        distance = sum(float((peer.state[1][0] - run.target).norm()) for peer in honest) / len(honest)
        computed = sum(samples for peer in honest for samples, _, _ in list(peer.local_steps))
        return distance, sum(peer.applied_samples for peer in honest) / computed


def check(kind: str, number: int, seconds: float, least: float) -> None:
    without, all_applied = train(None, 0, seconds)
    distance, applied = train(kind, number, seconds)
    print(f"{number} {kind}: distance {distance:.2f} of {without:.2f}, samples {applied:.1%} of {all_applied:.1%}")
    assert distance <= 1.1 * without and applied >= least, (distance, without, applied)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("kind", [*KINDS, HIDDEN])
def test_false_records_cost_the_others_nothing_in_twenty_minutes(kind, number):
    check(kind, number, 1200.0, least=0.9)
