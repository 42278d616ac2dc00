"""Runs with random faults over the simulated network: unlike trainers, some minutes of faults, then peace.

A seed gives the plan: trainers, settings, faults, IDs and noise. Threads that are due at the same time may interleave
otherwise, so a seed may end otherwise, too.
"""

import asyncio
import heapq
import itertools
import logging
import math
import random
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from hivemind.p2p import P2PDaemonError
from hivemind.utils import MPFuture
from hivemind.utils.timed_storage import ValueWithExpiration

from peerstep.peer import clock
from peerstep.reports.records import signer_of
from peerstep.rounds import allreduce, reducer, uplink
from tests.support.monitored import Monitor, MonitoredScenario
from tests.support.scenario import BATCH, Peer, State
from tests.support.simulated_network import DHT_SECONDS, DIAL_SECONDS
from tests.support.simulated_time import EPOCH, owner

KINDS = ["freeze"] * 4 + ["kill"] * 3 + ["join"] * 2 + ["leave"] + ["cut"] * 3 + ["partition"] * 2 + ["thin"] * 2
KINDS += ["oneway"] * 2 + ["dht_slow"] * 2 + ["dht_fail"] * 2 + ["nan"] * 2 + ["long"] * 2
MAX_TRAINERS = 9
THIN = 20.0  # by which the uplink is thinner during a fault
# Rounds with parameters in peace, in which trainers become equal: who is far keeps its own in one, lacks all after the
# next, and receives them then. In seed 3018 the fast trainers were killed: steps took 43 s, and every seventh averaged
# parameters, one in 300 s. A download takes some seconds after the last one.
LEAST_AVERAGED, LOAD_SECONDS = 3, 60.0
LONG_SECONDS = 60.0  # of a local step
# Bytes of a gradient in a round, and of the parameters
GRADIENT_BYTES = {"none": 800, "float16": 400, "blockwise4": 110, "topk": 60}
PARAMETER_BYTES = 800


@dataclass(frozen=True)
class Plan:
    """What happens in a run."""

    seed: int
    settings: dict  # of all trainers
    measures: bool  # whether trainers measure their bandwidth
    trainers: list[dict]  # speed, uplink, client, clock, residual
    faults: list[dict]  # t, kind, who, seed, and what the kind needs
    end: float  # of the faults, in seconds
    has_monitor: bool


def draw_plan(seed: int) -> Plan:
    """Draw two to eight trainers, and faults for ten to twelve minutes."""
    rng = random.Random(seed)
    number = rng.randint(2, 8)
    speeds = [8 ** rng.random() for _ in range(number)]
    speeds = [round(speed * 0.6 * number / sum(speeds), 3) for speed in speeds]
    uplinks = [_draw_uplink(rng) for _ in range(number)]
    seconds = rng.choice([6, 8, 10, 12, 16])
    local_updates = rng.random() < 0.35
    compression = rng.choice(["none", "float16", "blockwise4"] + (["topk", "topk"] if local_updates else []))
    delays = rng.choice([(True, True), (True, True), (False, True), (False, False)])
    settings = {
        "target_batch_size": max(16, round(sum(speeds) * BATCH * seconds)),
        "gradient_compression": compression,
        "average_state_every": rng.randint(2, 8),
        "target_group_size": rng.choice([256, 256, 3]),
        "delay_grad_averaging": delays[0],
        "delay_optimizer_step": delays[1],
        "matchmaking_time": rng.choice([3.1, 4.0, 5.0, 8.0]),
        "averaging_timeout": rng.choice([15.0, 20.0, 30.0, 60.0]),
        **({"local_updates": True} if local_updates else {}),
    }
    measures = rng.random() < 0.5
    trainers = [
        {
            "speed": speed,
            "uplink": uplink,
            "client": index > 0 and rng.random() < 0.25,
            "clock": round(rng.uniform(-200, 200), 1) if rng.random() < 0.4 else 0.0,
            "residual": round(rng.uniform(-2, 2), 2) if rng.random() < 0.4 else 0.0,  # what a measured clock errs by
        }
        for index, (speed, uplink) in enumerate(zip(speeds, uplinks, strict=True))
    ]
    end = 60.0 * rng.choice([10, 10, 10, 12])
    faults, now, gap = [], 40.0, rng.choice([15, 25, 40])
    while (now := now + rng.expovariate(1 / gap)) <= end - 10:
        kind = rng.choice(KINDS)
        fault = {"t": round(now, 1), "kind": kind, "who": rng.randrange(64), "seed": rng.randrange(10**6)}
        faults.append(fault | _draw_fault(kind, rng))
    _widen(settings, [*trainers, *(fault for fault in faults if fault["kind"] == "join")])
    return Plan(seed, settings, measures, trainers, faults, end, rng.random() < 0.5)


def _widen(settings: dict, trainers: list[dict]) -> None:
    """Let each link carry a round in half of the shortest global step, outside of faults; the search takes time, too.

    A group whose rounds take longer misses steps, whatever the rules are. The worst of three: a public trainer beside
    two clients: it sends all averages to both, twice the bytes of its values. Seed 1028 has links that need longer
    than its step of 4.0 s: with those, a trainer took part in 12 of 16 rounds.
    """
    step_seconds = settings["target_batch_size"] / BATCH / sum(trainer["speed"] for trainer in trainers)
    least = 2 * (GRADIENT_BYTES[settings["gradient_compression"]] + PARAMETER_BYTES) / (0.5 * step_seconds)
    for trainer in trainers:
        trainer["uplink"] = max(trainer["uplink"], math.ceil(least))


def _draw_uplink(rng: random.Random) -> int:
    return round(300.0 * 100 ** rng.random())


def _draw_fault(kind: str, rng: random.Random) -> dict:
    match kind:
        case "freeze":
            return {"seconds": round(300 ** rng.random(), 1)}
        case "kill":
            return {
                "silently": rng.random() < 0.5,
                "seconds": round(rng.uniform(3, 120), 1),
                "checkpoint": rng.random() < 0.6,
                "same_id": rng.random() < 0.7,
            }
        case "join":
            speed = round(0.6 * 8 ** (rng.random() - 0.6), 3)
            return {"speed": speed, "uplink": _draw_uplink(rng), "client": rng.random() < 0.25}
        case "cut" | "partition" | "oneway":
            return {"seconds": round(5 * 60 ** rng.random(), 1), "fraction": round(rng.uniform(0.2, 0.6), 2)}
        case "thin":
            return {"seconds": round(rng.uniform(10, 200), 1)}
        case "dht_slow":
            return {"seconds": round(rng.uniform(20, 150), 1), "delay": round(0.05 * 60 ** rng.random(), 2)}
        case "dht_fail":
            seconds, mode = round(rng.uniform(5, 90), 1), rng.choice(["silent", "error", "partial", "empty"])
            return {"seconds": seconds, "mode": mode, "all": rng.random() < 0.4}
    return {}


class _ClockError:
    """Stands for the measured error of this machine's clock: that of each peer, and what its measurement errs by."""

    @property
    def value(self) -> float:
        peer = owner.get()
        return getattr(peer, "residual", 0.0) - getattr(peer, "clock", 0.0)


class FaultyPeer(Peer):
    """A trainer that knows which of its local steps are in which round.

    :param options: speed, uplink, client, clock and residual
    """

    def __init__(self, scenario: "FaultyRun", name: str, options: dict):
        uplink, client = options["uplink"], options["client"]
        super().__init__(scenario, name, options["speed"], uplink, client, options.get("clock", 0.0))
        self.options, self.residual = options, options.get("residual", 0.0)
        self.computed: list[float] = []  # end of each local step; their indices name them
        self.pending: list[int] = []  # local steps that are accumulated, and those of the newest round
        self.in_round: list[int] = []
        self.checkpoint: State | None = None
        self.has_left, self.dht_mode = False, None
        self.has_nan, self.extra_seconds = False, 0.0  # of the next local step

    def train(self) -> None:
        self._watch(self.optimizer.model.accumulator)
        self.optimizer.on_round = self._on_round
        try:
            super().train()
        except Exception:
            self.scenario.errors.append(f"{self.name}: {traceback.format_exc()}")

    def _watch(self, accumulator) -> None:
        """Follow the local steps through the accumulator."""
        add, load, take_back, drop = accumulator.add, accumulator.load, accumulator.take_back, accumulator.drop
        is_loading = threading.local()

        def added(*args) -> int:
            with accumulator.lock:
                self.pending.append(len(self.computed))
                self.computed.append(self.scenario.time.read())
                return add(*args)

        def loaded() -> int:
            with accumulator.lock:
                is_loading.value = True
                try:
                    samples = load()
                finally:
                    is_loading.value = False
                self.in_round, self.pending = self.pending, []
                return samples

        def taken_back(*args) -> None:
            with accumulator.lock:
                take_back(*args)
                self.pending, self.in_round = self.in_round + self.pending, []

        def dropped() -> None:
            with accumulator.lock:
                drop()
                if not getattr(is_loading, "value", False):
                    self.pending = []

        accumulator.add, accumulator.load = added, loaded
        accumulator.take_back, accumulator.drop = taken_back, dropped

    def _on_round(self, entry: dict) -> None:
        self.rounds.append(entry)
        if entry["outcome"] == "alone":
            for number in self.in_round:
                self.scenario.uses[self, number].add(f"alone in step {entry['step']}")

    def _join(self) -> None:
        """As cotrain/training/session.py does, until a state is loaded or nobody is ahead."""
        tracker, until = self.optimizer.tracker, self.scenario.time.read() + 600.0
        for attempt in itertools.count(1):
            tracker.refresh()
            if self.optimizer.load_state_from_peers():
                break
            ahead = [peer for peer in tracker.view().live if peer.epoch > self.step + 1]
            if not ahead or (len(ahead) == 1 and attempt >= 5) or self.scenario.time.read() > until:
                break
            self.scenario.time.sleep(3.0)
        self.optimizer.pop_records()
        self.has_joined = True

    def compute_seconds(self) -> float:
        extra, self.extra_seconds = self.extra_seconds, 0.0
        return super().compute_seconds() + extra

    def compute(self, weight: torch.Tensor) -> torch.Tensor:
        gradient = super().compute(weight)
        if self.has_nan:
            self.has_nan, gradient[3] = False, math.nan
        return gradient

    def record(self) -> None:
        before = self._recorded
        super().record()
        if self._recorded != before and self._recorded % 3 == 0:
            self.checkpoint = self.state

    def get(self, key: str, **_) -> MPFuture:
        """Read the DHT, which may not answer, raise, or know only a part of the records or none."""
        future, run, mode = MPFuture(), self.scenario, self.dht_mode or self.scenario.dht_mode

        def answer() -> None:
            with suppress(Exception):  # the asker may have cancelled it
                if mode == "error":
                    future.set_exception(RuntimeError("the DHT fails"))
                elif mode is None:
                    run.answer(self, key, future)
                elif not self.ended:
                    future.set_result(run.answer_in_part(self, key, 0.5 if mode == "partial" else 0.0))

        if mode != "silent":
            run.call_in_loop(answer, run.dht_delay)
        return future


class FaultyRun(MonitoredScenario):
    """A run with the faults of a plan. Use it as a context manager, and call `run`."""

    def __init__(self, plan: Plan, grain: float = 0.16):
        super().__init__(plan.seed, grain, **plan.settings)
        self.plan, self._rng = plan, random.Random(plan.seed)
        self.errors: list[str] = []  # tracebacks, and what is logged as an error
        self.ended: list[FaultyPeer] = []  # peers that were killed
        self.uses: dict[tuple[FaultyPeer, int], set] = defaultdict(set)  # local step -> rounds that have added it
        self.peace_at = math.inf
        self.dht_mode, self.dht_delay = None, DHT_SECONDS
        self._contributions: dict[tuple, tuple[FaultyPeer, list[int]]] = {}  # group and sender -> its local steps
        self._cut_counts: dict[frozenset, int] = defaultdict(int)  # unordered pairs, of which faults may overlap
        self._one_way: dict[tuple, int] = defaultdict(int)  # sender and receiver
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._log_handler = _ErrorLog(self)

    def __enter__(self) -> "FaultyRun":
        super().__enter__()
        logging.getLogger("peerstep").setLevel(logging.INFO)
        self._patches.setattr(clock, "offset", _ClockError())
        self._patches.setattr(uplink, "FIRST_CLAIM", 1e-4)  # of links that are as small as the models
        self._patches.setattr(uplink, "RATE_SECONDS", 0.25)
        self._patches.setattr(threading, "excepthook", self._on_exception)
        for name in ("peerstep", "hivemind", None):
            logging.getLogger(name).addHandler(self._log_handler)
        self._watch_rounds()
        return self

    def __exit__(self, *error) -> None:
        self.nodes += [peer for peer in self.ended if peer not in self.nodes]
        for name in ("peerstep", "hivemind", None):
            logging.getLogger(name).removeHandler(self._log_handler)
        super().__exit__(*error)

    def _on_exception(self, args: threading.ExceptHookArgs) -> None:
        if args.exc_type is not SystemExit:
            self.errors.append("".join(traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback)))

    def _watch_rounds(self) -> None:
        """Record which local steps each reducer adds."""
        prepare, add_held = allreduce.AllReduce.__post_init__, reducer.Reducer.add_held

        def prepared(runner: allreduce.AllReduce, *args) -> None:
            prepare(runner, *args)
            peer = owner.get()
            runner.reducer.group_id = runner.group_id
            self._contributions[runner.group_id, peer.peer_id] = peer, peer.in_round

        def added(of_reducer: reducer.Reducer, sums) -> None:
            for sender in sums.held:
                peer, numbers = self._contributions.get((of_reducer.group_id, sender), (None, ()))
                for number in numbers:
                    self.uses[peer, number].add(of_reducer.group_id)
            add_held(of_reducer, sums)

        self._patches.setattr(allreduce.AllReduce, "__post_init__", prepared)
        self._patches.setattr(reducer.Reducer, "add_held", added)

    # Peers

    @property
    def live(self) -> list[FaultyPeer]:
        return [peer for peer in self.peers if not (peer.ended or peer.has_left)]

    def add_trainer(self, options: dict, state: State | None = None, subkey: bytes | None = None) -> FaultyPeer:
        """Add a trainer with the options of a plan.

        :param subkey: of the identity of a trainer that was killed
        """
        index = len(self.peers) + sum(peer not in self.nodes for peer in self.ended)
        peer = FaultyPeer(self, chr(ord("a") + index % 26) * (1 + index // 26), options)
        if subkey is not None:
            peer.subkey, peer.peer_id, peer.private_key = subkey, signer_of(subkey), self.private_keys[subkey]
        flags = {"bandwidth": None} if self.plan.measures else {}
        peer.start(0, self.initial, state, {**self.flags, **flags})
        self.nodes.append(peer)
        return peer

    # The network

    def reaches(self, one: Peer, other: Peer) -> bool:
        return not self._one_way[one, other] and super().reaches(one, other)

    async def dial(self, caller: Peer, peer_id) -> Peer:
        callee = await super().dial(caller, peer_id)
        if self._one_way[callee, caller]:  # its answer is lost
            await asyncio.sleep(DIAL_SECONDS)
            raise P2PDaemonError("does not answer")
        return callee

    def answer_in_part(self, peer: Peer, key: str, fraction: float) -> ValueWithExpiration | None:
        now, records = EPOCH + self.time.read(), self._records[self._side_of(peer)].get(key, {})
        found = {k: r for k, r in records.items() if r.expiration_time > now and self._rng.random() < fraction}
        return ValueWithExpiration(found, now) if found else None

    # Faults

    def run(self, folder: Path, peace: float = 300.0) -> None:
        """Let the faults of the plan happen, and then some seconds of peace: more if parameters are averaged rarely.

        :param folder: for the checkpoints of a monitor
        """
        for options in self.plan.trainers:
            self.add_trainer(options)
        if self.plan.has_monitor:
            self.add_monitor(folder)
        for fault in self.plan.faults:
            self._at(fault["t"], partial(self._begin, fault))
        self.time.go()
        while self._events:
            at, _, event = heapq.heappop(self._events)
            self._pass_until(at)
            event()
        self._pass_until(self.plan.end)
        self.peace_at = self.time.read()
        self._pass_until(self.peace_at + peace)
        if self._num_averaged() < LEAST_AVERAGED:
            while self._num_averaged() < LEAST_AVERAGED and self.time.read() < self.peace_at + 4 * peace:
                self._pass_until(self.time.read() + 5.0)
            self._pass_until(self.time.read() + LOAD_SECONDS)

    def _num_averaged(self) -> int:
        """Count the rounds with parameters since the peace began, of any group."""
        every, since = self.plan.settings["average_state_every"], self.peace_at + EPOCH
        steps = {
            entry["step"]
            for peer in self.live
            for entry in list(peer.rounds)
            if entry["outcome"] == "averaged" and entry["time"] - peer.clock > since
        }
        return sum(step % every == 0 for step in steps)

    def _pass_until(self, until: float) -> None:
        """Wait, and let the monitor look at the run now and then."""
        while (seconds := until - self.time.read()) > 0:
            self.time.sleep(min(5.0, seconds))
            steps = sorted(peer.step for peer in self.live)
            for monitor in self.nodes:
                if isinstance(monitor, Monitor) and steps:
                    monitor.look(steps[len(steps) // 2] or -1)

    def _at(self, at: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), event))

    def _after(self, seconds: float, event: Callable[[], None]) -> None:
        self._at(self.time.read() + seconds, event)

    def _begin(self, fault: dict) -> None:
        peer = self.live[fault["who"] % len(self.live)]
        getattr(self, f"_{fault['kind']}")(peer, fault)

    def _may_lose(self, peer: FaultyPeer) -> bool:
        """Whether the run goes on without a trainer."""
        return any(not other.client_mode for other in self.live if other is not peer)

    def _freeze(self, peer: FaultyPeer, fault: dict) -> None:
        if peer.is_frozen:
            return
        peer.freeze()
        self._after(fault["seconds"], peer.thaw)

    def _kill(self, peer: FaultyPeer, fault: dict) -> None:
        if not self._may_lose(peer):
            return
        peer.thaw()
        peer.kill(fault["silently"])
        self.ended.append(peer)
        if fault["same_id"]:
            self.nodes.remove(peer)
        state, subkey = peer.checkpoint if fault["checkpoint"] else None, peer.subkey if fault["same_id"] else None
        self._after(fault["seconds"], lambda: self.add_trainer(peer.options, state, subkey))

    def _join(self, _peer: FaultyPeer, fault: dict) -> None:
        if len(self.live) < MAX_TRAINERS:
            self.add_trainer({name: fault[name] for name in ("speed", "uplink", "client")})

    def _leave(self, peer: FaultyPeer, _fault: dict) -> None:
        if not peer.is_frozen and self._may_lose(peer):
            peer.has_left = True
            threading.Thread(target=peer.leave, daemon=True).start()

    def _split(self, fault: dict, peers: Collection[Peer]) -> tuple[list[Peer], list[Peer]]:
        peers = list(peers)
        random.Random(fault["seed"]).shuffle(peers)
        number = min(len(peers) - 1, max(1, round(fault["fraction"] * len(peers))))
        return peers[:number], peers[number:]

    def _count(self, counts: dict, keys: Collection, change: int) -> None:
        for key in keys:
            counts[key] += change
        self._cuts = {pair for pair, number in self._cut_counts.items() if number}

    def _cut(self, _peer: FaultyPeer, fault: dict) -> None:
        ones, others = self._split(fault, self.live)
        pairs = {frozenset({one, other}) for one in ones for other in others}
        self._count(self._cut_counts, pairs, 1)
        self._after(fault["seconds"], lambda: self._count(self._cut_counts, pairs, -1))

    def _oneway(self, _peer: FaultyPeer, fault: dict) -> None:
        ones, others = self._split(fault, self.live)
        pairs = set(itertools.product(ones, others))
        self._count(self._one_way, pairs, 1)
        self._after(fault["seconds"], lambda: self._count(self._one_way, pairs, -1))

    def _partition(self, _peer: FaultyPeer, fault: dict) -> None:
        if not self._sides:
            monitors = [node for node in self.nodes if isinstance(node, Monitor)]
            cuts = self._cuts
            self.partition(self._split(fault, [*self.live, *monitors])[0])
            self._cuts = cuts
            self._after(fault["seconds"], self._end_partition)

    def _end_partition(self) -> None:
        self.heal()
        self._count(self._cut_counts, (), 0)

    def _thin(self, peer: FaultyPeer, fault: dict) -> None:
        peer.uplink = peer.options["uplink"] / THIN
        self._after(fault["seconds"], lambda: setattr(peer, "uplink", peer.options["uplink"]))

    def _dht_slow(self, _peer: FaultyPeer, fault: dict) -> None:
        self.dht_delay = fault["delay"]
        self._after(fault["seconds"], lambda: setattr(self, "dht_delay", DHT_SECONDS))

    def _dht_fail(self, peer: FaultyPeer, fault: dict) -> None:
        whose = self if fault["all"] else peer
        whose.dht_mode = fault["mode"]
        self._after(fault["seconds"], lambda: setattr(whose, "dht_mode", None))

    def _nan(self, peer: FaultyPeer, _fault: dict) -> None:
        peer.has_nan = True

    def _long(self, peer: FaultyPeer, _fault: dict) -> None:
        peer.extra_seconds = LONG_SECONDS


class _ErrorLog(logging.Handler):
    """Collects what is logged with a traceback, or as an error."""

    def __init__(self, run: FaultyRun):
        super().__init__()
        self._run = run

    def emit(self, record: logging.LogRecord) -> None:
        is_error = record.exc_info or record.levelno >= logging.ERROR or "Traceback" in record.getMessage()
        if is_error and not getattr(owner.get(), "ended", False):
            text = record.getMessage()
            if record.exc_info and record.exc_info[0]:
                text += "".join(traceback.format_exception(*record.exc_info))
            self._run.errors.append(text)
