#!/usr/bin/env python3
"""Measure whether hundreds of trainers find each other, and what it costs them: benchmarks/hundreds.py --peers 16 128

Progress reports, matchmaking and the lists of members are those of the engine, in one process with simulated time and
without tensors: a round takes ROUND_SECONDS, and of its streams only their opening is counted. Each trainer reads all
reports as often as the engine does; what a read sends is measured by benchmarks/reports.py. Unlike trainers: three of
eight are public, speeds differ by a factor of six, a quarter has thinner lines, one in sixteen answers no request to
join, and CHURN of all leave without a word, and join, within ten minutes. Wrong clocks are not simulated.
"""

import argparse
import asyncio
import base64
import functools
import random
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent.parent))

import pytest
from hivemind.p2p import P2PDaemonError, PeerID, ServicerBase
from hivemind.proto import averaging_pb2
from hivemind.utils.timed_storage import ValueWithExpiration

from peerstep.options import Options
from peerstep.peer.clock import run_time
from peerstep.progress.tracker import ProgressTracker
from peerstep.reports.records import signer_of
from peerstep.rounds import known_peers
from peerstep.rounds.claims import SIGNATURE_BYTES, Claims
from peerstep.rounds.matchmaking import StepMatchmaking
from peerstep.step.coordinator import LOOK_SECONDS, MAX_LOOK_SECONDS
from tests.support.simulated_network import LATENCY, SimulatedKey, make_subkey
from tests.support.simulated_time import LeapingClock

STEP_SECONDS, ROUND_SECONDS, CHURN = 60.0, 5.0, 0.1
UP, DOWN, THIN = 14.7e6 / 8, 112e6 / 8, 3.0  # bytes per second, and how much less a thin line has
STREAM_BYTES = 600  # to open a stream on an open connection, and to close it
READ_BYTES = 1200  # of a read of the reports, for each trainer
SLOWEST, FASTEST, MEAN_RATE = 12.0, 2.0, 0.179  # seconds of a local step; samples per second, the mean of 1 / seconds


class Control:
    """Handle of a round, with what matchmaking reads."""

    def __init__(self, step: int, claims: Claims):
        self.step, self.deadline, self.data_for_gather = step, run_time() + 65.0, claims.pack()
        self.triggered = False

    def done(self) -> bool:
        return False


class Servicer(ServicerBase):
    @classmethod
    def get_stub(cls, p2p, peer: PeerID, namespace: str | None = None) -> SimpleNamespace:
        return SimpleNamespace(rpc_join_group=partial(p2p.run.ask, p2p, peer))


class Pending:
    """Answer of the DHT to a read."""

    def __init__(self, until: float, clock: LeapingClock, records: dict):
        self._until, self._clock, self._records = until, clock, records

    def done(self) -> bool:
        return self._clock.now >= self._until

    def result(self, timeout: float) -> ValueWithExpiration:
        return ValueWithExpiration(self._records, float("inf"))

    def cancel(self) -> None:
        pass


class Peer:
    """A trainer; its P2P and DHT objects, too."""

    def __init__(self, run: "Run", index: int):
        rng = run.rng
        self.run, self.index = run, index
        self.subkey = make_subkey(rng)
        self.peer_id, self.is_open = signer_of(self.subkey), True
        self.key = run.keys[self.subkey] = SimulatedKey(self.subkey)
        self.client_mode = index % 8 not in (0, 3, 5)
        self.is_silent = not self.client_mode and index % 16 == 11
        self.thin = THIN if index % 4 == 1 else 1.0
        self.local_seconds = rng.uniform(FASTEST, SLOWEST)
        self.sent, self.received, self.messages = Counter(), Counter(), Counter()
        self.free_at = [0.0, 0.0]
        self.joined_at, self.has_left = run.clock.now, False
        self.reads = self.stores = 0
        self.tracker = ProgressTracker(self, "run", run.options, public_key=self.subkey, schema="s")
        self.matchmaking = StepMatchmaking(
            SimpleNamespace(peer_id=self.peer_id, run=run, peer=self), b"schema", self, servicer_type=Servicer,
            private_key=self.key, prefix="run", target_group_size=run.options.target_group_size, min_group_size=2,
            min_matchmaking_time=run.options.matchmaking_time, request_timeout=3.0, client_mode=self.client_mode,
        )  # fmt: skip
        self.samples, self.step, self.search = 0, 0, None
        self.has_read = asyncio.Event()  # since its step thread has looked: that looks ten times a second

    # As a DHT

    def store(self, key: str, value: dict | None, expiration: float, subkey: bytes, **_) -> None:
        self.stores += 1
        self.run.records[self.subkey] = ValueWithExpiration(value, expiration)

    def get(self, key: str, **_) -> Pending:
        self.reads += 1
        now = run_time()
        records = {k: r for k, r in self.run.records.items() if r.expiration_time > now}
        seconds = 2 * LATENCY + self.run.read_bytes * self.thin / DOWN
        return Pending(self.run.clock.now + seconds, self.run.clock, records)

    def describe(self, peer_id: PeerID) -> str:
        return str(peer_id)

    # Coroutines of its threads

    async def compute(self) -> None:
        """The main thread."""
        while not self.has_left:
            await asyncio.sleep(self.local_seconds * self.run.rng.uniform(0.9, 1.1))
            self.samples += 1
            self.tracker.report_samples(self.samples, self.step)

    async def track(self) -> None:
        """The tracker's thread."""
        tracker, clock = self.tracker, self.run.clock
        while not self.has_left:
            if tracker.own.is_reporting and clock.now >= tracker.own.report_at:
                tracker.publish_report()
            if tracker._pending is None and clock.now >= tracker.next_read_at:
                tracker.begin_read()
            if tracker._pending is not None and tracker.finish_read():
                self.update_roster()
                self.has_read.set()
            await asyncio.sleep(0.1 if tracker._pending is None else 0.05)

    def update_roster(self) -> None:
        self.matchmaking.set_roster(self.tracker.view().roster(self.step + 1))
        self.matchmaking.requests.finish(self.step)

    async def take_steps(self) -> None:
        """The step thread, as StepThread and RoundCoordinator."""
        options = self.run.options
        while not self.has_left:
            view = self.tracker.view()
            step, seconds = self.step + 1, view.seconds_to_step
            agreed = view.agreed_step
            if agreed > self.step:  # it has missed steps
                self.end_step(agreed, None)
                continue
            if self.search is None and seconds <= options.matchmaking_time + view.doubt and view.num_expected(step):
                control = Control(step, Claims(0.0 if self.client_mode else 14.7 / self.thin))
                self.update_roster()
                self.search = control, asyncio.create_task(self.matchmaking.look_for_group(control))
            if self.search is not None and (seconds <= 0 or self.search[1].done()):
                await self.take_step(step)
            else:
                self.has_read.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.has_read.wait(), min(max(0.1, seconds / 4), 5.0))

    async def take_step(self, step: int) -> None:
        control, search = self.search
        clock, began, look = self.run.clock, self.run.clock.now, LOOK_SECONDS
        self.tracker.begin_step(step, self.samples)
        self.samples, control.triggered = 0, True
        self.run.due[step].append(began)
        group, next_look = None, began + look
        while not search.done() and clock.now < began + 60.0 and not self.has_left:
            if clock.now >= next_look:
                look = min(2 * look, MAX_LOOK_SECONDS)
                next_look = clock.now + look
                self.tracker.refresh_in(0.0)
                if self.tracker.view().most_have_completed(step):
                    break
            await asyncio.sleep(0.1)
        if search.done():
            group = search.result()
            self.run.begun[step].append((clock.now, group.group_id))
            self.run.waits[step].append(clock.now - began)
            reducers = sum(not self.run.by_id[peer_id].client_mode for peer_id in group.peer_ids)
            number = len(group.peer_ids) if not self.client_mode else 0
            self.count("streams", "sent", STREAM_BYTES * reducers, reducers)
            self.count("streams", "received", STREAM_BYTES * number, number)
            silent = {peer_id for peer_id in group.peer_ids if self.run.by_id[peer_id].is_silent} - {self.peer_id}
            ends = {"confirming": group.peer_ids, "refusing": ()}  # nobody reaches a silent one as a reducer either
            self.matchmaking.conduct.record_round(self.matchmaking.led_by, group.peer_ids, silent=silent, **ends)
            until = clock.now + ROUND_SECONDS
            while clock.now < until:
                if clock.now >= next_look:
                    look = min(2 * look, MAX_LOOK_SECONDS)
                    next_look = clock.now + look
                    self.tracker.refresh_in(0.0)
                await asyncio.sleep(0.25)
        else:
            search.cancel()
            self.run.missed[step].append(self.index)
        self.end_step(step, group)

    def end_step(self, step: int, group) -> None:
        if self.search is not None:
            self.search[1].cancel()
        self.step, self.search = step, None
        if group is not None:
            self.tracker.record_round(group.peer_ids, (), list(self.matchmaking.missed))
        marks = tuple((8 * n, "ab" * 6) for n in range(max(1, step // 8 - 7), step // 8 + 1))
        self.tracker.report_position(step, self.samples, marks=marks)
        self.update_roster()

    def count(self, kind: str, way: str, num_bytes: float, messages: float = 1) -> None:
        getattr(self, way)[kind] += num_bytes
        self.messages[kind] += messages


class Run:
    """All trainers of a run."""

    def __init__(self, number: int, clock: LeapingClock, seed: int = 0, **options):
        self.rng, self.clock, self.read_bytes = random.Random(seed), clock, READ_BYTES * number
        self.records, self.keys, self.by_id = {}, {}, {}
        self.due, self.begun, self.missed = defaultdict(list), defaultdict(list), defaultdict(list)
        self.waits = defaultdict(list)  # seconds from due to begun, of each trainer
        target = round(MEAN_RATE * number * STEP_SECONDS)
        self.options = Options(batch_size_per_step=1, target_batch_size=target, **options)
        self.peers = [Peer(self, index) for index in range(number)]
        self.by_id = {peer.peer_id: peer for peer in self.peers}
        self.tasks = []

    async def ask(self, p2p, peer_id: PeerID, request: averaging_pb2.JoinRequest) -> AsyncIterator:
        caller, callee = p2p.peer, self.by_id[peer_id]
        await asyncio.sleep(2 * LATENCY)
        if callee.has_left:
            await asyncio.sleep(3.0)
            raise P2PDaemonError("does not answer")
        if callee.client_mode:
            raise P2PDaemonError("cannot be dialed")
        if callee.is_silent:
            await asyncio.sleep(100.0)
        await self.carry(caller, callee, request.ByteSize(), "requests")
        return self.answers(
            callee, caller, callee.matchmaking.rpc_join_group(request, SimpleNamespace(remote_id=caller.peer_id))
        )

    async def answers(self, callee: Peer, caller: Peer, stream) -> AsyncIterator:
        async for message in stream:
            await self.carry(callee, caller, message.ByteSize(), "lists" if message.gathered else "requests")
            yield message

    async def carry(self, sender: Peer, receiver: Peer, size: int, kind: str) -> None:
        sender.count(kind, "sent", size)
        receiver.count(kind, "received", size)
        arrives = self.clock.now
        for end, (peer, rate) in enumerate(((sender, UP), (receiver, DOWN))):
            peer.free_at[end] = max(peer.free_at[end], self.clock.now) + size * peer.thin / rate
            arrives = max(arrives, peer.free_at[end])
        await asyncio.sleep(arrives - self.clock.now + LATENCY)

    def start(self, peer: Peer) -> None:
        self.tasks += [asyncio.create_task(work()) for work in (peer.compute, peer.track, peer.take_steps)]

    async def train(self, seconds: float) -> None:
        for peer in self.peers:
            self.start(peer)
        number, period = len(self.peers), 600.0 / (CHURN * len(self.peers))
        next_change = self.clock.now + 120.0
        while self.clock.now < seconds:
            await asyncio.sleep(1.0)
            if self.clock.now >= next_change:
                next_change += period
                self.rng.choice([peer for peer in self.peers if not peer.has_left]).has_left = True
                newcomer = Peer(self, self.rng.randrange(16 * number))
                self.peers.append(newcomer)
                self.by_id[newcomer.peer_id] = newcomer
                self.start(newcomer)
        for task in self.tasks:
            task.cancel()


def percent(values: list[float], part: float) -> float:
    return sorted(values)[int(part * (len(values) - 1))]


def show(run: Run, seconds: float) -> None:
    stayed = [peer for peer in run.peers if peer.joined_at == 0 and not peer.has_left]
    steps = [step for step in sorted(run.begun) if run.begun[step]][2:-1]  # rates are known, and the step is over
    waits, shares, spread, groups, own = [], [], [], [], []
    for step in steps:
        due, begun = run.due[step], [time for time, _ in run.begun[step]]
        sizes = Counter(group_id for _, group_id in run.begun[step])
        waits.append(statistics.median(begun) - min(due))
        own.append(statistics.median(run.waits[step]))
        spread.append(percent(due, 0.95) - min(due))
        shares.append(sizes.most_common(1)[0][1] / (len(begun) + len(run.missed[step])))
        groups.append(len(sizes))
    print(
        f"{len(stayed)} of {len(run.peers)} trainers stayed; {len(steps)} steps; in the largest group "
        f"{statistics.fmean(shares):.1%}, at least {min(shares):.1%}; {statistics.fmean(groups):.1f} groups; from the "
        f"first due to begun {statistics.fmean(waits):.1f} s, at most {max(waits):.1f} s, and from its own due of the "
        f"median trainer {statistics.fmean(own):.1f} s; 95 % due within {statistics.fmean(spread):.1f} s; "
        f"{60 * statistics.median(p.reads for p in stayed) / seconds:.1f} reads and "
        f"{60 * statistics.median(p.stores for p in stayed) / seconds:.1f} stores of a trainer in a minute"
    )
    for kind in ("requests", "lists", "streams"):
        for way in ("sent", "received"):
            rates = [8e-3 * getattr(peer, way)[kind] / seconds for peer in stayed]
            print(f"  {kind:<9}{way:<9} kbit/s: median {statistics.median(rates):.2f}, busiest {max(rates):.1f}")
    print(flush=True)


async def measure(
    number: int, seconds: float, group_size: int, clock: LeapingClock, patches: pytest.MonkeyPatch
) -> None:
    run = Run(number, clock, target_group_size=group_size)

    @functools.lru_cache(maxsize=2**20)
    def verify(key: bytes, scope: bytes, entry: bytes) -> bool:
        signature = base64.b64encode(entry[-SIGNATURE_BYTES:])
        return run.keys[key].sign(scope + entry[:-SIGNATURE_BYTES]) == signature

    patches.setattr(known_peers, "verify", verify)
    await run.train(seconds)
    show(run, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--target_group_size", type=int, default=256)
    args = parser.parse_args()
    clock, patches = LeapingClock(), pytest.MonkeyPatch()
    clock.install(patches)
    for number in args.peers:
        clock.now = 0.0
        asyncio.run(measure(number, 60 * args.minutes, args.target_group_size, clock, patches))


if __name__ == "__main__":
    main()
