#!/usr/bin/env python3
"""Measure duration, cost and efficiency of rounds with N trainers.

benchmarks/swarm.py --peers 2 4 8 16

N trainers and a monitor run on this machine, with a tiny model whose micro-batches sleep. They are forked from one
process after the imports, so that they share its memory. --churn 0.1: each minute a tenth of the trainers leave, every
other one killed, and as many join. Needs no network.
"""

import argparse
import contextlib
import importlib
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, wraps
from multiprocessing import RawArray
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import psutil
from hivemind.dht.protocol import DHTProtocol
from hivemind.p2p import PeerID
from hivemind.utils import MPFuture

import run_trainer
import run_training_monitor
from benchmarks import paced_peer
from benchmarks.process_usage import PARTS, measure_cpu, measure_memory
from benchmarks.round_records import (
    NewcomerSummary,
    PeerRecords,
    RunSummary,
    percentile,
    read_jsonl,
    read_local_records,
    read_round_log,
    summarize,
    summarize_newcomers,
)
from lib.averaging.progress import ProgressTracker
from lib.common.errors import run_script
from lib.common.processes import leave_with_parent
from tests.support.family import Family
from tests.support.launcher import MODULES
from tests.support.peers import LOCAL, prepare_data, wait_until

BATCH_SIZE = 8
MAX_PEERS = 256  # in total, including peers that have left
CALLS = ("call_ping", "call_store", "call_find")
START_SECONDS = 60.0  # timeout for the start, plus SECONDS_A_PEER for each peer
SECONDS_A_PEER = 15.0
FIRST_STEPS = 3  # a trainer is a newcomer in so many steps

LEGEND = """\
complete    steps for which all trainers that were alive when it was due were in one group; alive: has made a local
            step, downloads nothing, and was not told to leave. In full: all of them received all of the average, too
due         when the first trainer began the step
averaged    when a trainer had the average
used        samples applied / samples computed, by trainers that stayed to the end
CPU, MB     of a trainer by process: CPU milliseconds a second; memory, shared pages divided by their users (PSS).
            Mean over the trainers that were there all the time
read        how long a trainer's DHT takes to read the progress of all others
pings, stores, finds: DHT requests that a trainer sends for one global step
newcomers   trainers in their first 3 steps: how often they, and the others, got the average; and how many steps with
            and without newcomers were complete"""


class MessageCounter:
    """Counts the DHT requests of each peer, in memory that all forked processes share."""

    def __init__(self):
        self._counts = {name: RawArray("q", MAX_PEERS) for name in CALLS}
        self.index = 0  # index of the peer in this process
        for name in CALLS:
            setattr(DHTProtocol, name, self._counting(name, getattr(DHTProtocol, name)))

    def _counting(self, name: str, call: Callable) -> Callable:
        counts = self._counts[name]

        @wraps(call)
        async def counting_call(*args, **kwargs):
            counts[self.index] += 1
            return await call(*args, **kwargs)

        return counting_call

    def read(self, index: int) -> Counter:
        return Counter({name: counts[index] for name, counts in self._counts.items()})


@dataclass
class Usage:
    """Resource usage of the processes of a peer so far.

    :param cpu: seconds, by part
    :param memory: bytes, by part
    """

    cpu: Counter
    memory: Counter
    messages: Counter


@dataclass
class ForkedPeer:
    """A peer in a process forked from this one."""

    name: str
    index: int
    pid: int
    folder: Path
    left_at: float | None = None
    exit_code: int | None = None
    before: Usage | None = None
    family: Family = field(init=False)

    def __post_init__(self):
        self.family = Family(self.pid)

    @property
    def log(self) -> Path:
        return self.folder.with_suffix(".log")

    def poll(self) -> int | None:
        """Return the exit code, None while the process runs."""
        if self.exit_code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.exit_code = os.waitstatus_to_exitcode(status)
        return self.exit_code

    def has_begun(self) -> bool:
        """Whether the trainer has completed a local step.

        :raises AssertionError: if its process has ended
        """
        assert self.poll() is None, f"{self.name} ended with {self.exit_code}:\n{self.log.read_text()[-2000:]}"
        return any(record["event"] == "local step" for record in read_jsonl(self.folder / "local.jsonl"))

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill_all(self) -> None:
        for process in self.family.alive():
            with contextlib.suppress(psutil.NoSuchProcess):
                if not process.name().startswith("torch_shm"):
                    process.kill()
        if self.exit_code is None:
            with contextlib.suppress(ChildProcessError):
                self.exit_code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def measure(self, counter: MessageCounter) -> Usage:
        """Measure the resource usage of the peer's processes so far."""
        family = self.family.alive()
        return Usage(measure_cpu(self.pid, family), measure_memory(self.pid, family), counter.read(self.index))


def _prepare_trainer(pace: float, folder: Path) -> None:
    """In the process of a trainer: pace it, and record how long it takes to read the progress of all peers."""
    paced_peer.apply(pace, folder / "local.jsonl")
    recorder, finish = paced_peer.Recorder(folder / "reads.jsonl"), ProgressTracker._finish_fetch

    @wraps(finish)
    def finish_fetch(tracker: ProgressTracker) -> bool:
        _, begun_at = tracker._pending_fetch
        is_finished = finish(tracker)
        if is_finished:
            recorder.write("read", seconds=time.monotonic() - begun_at)
        return is_finished

    ProgressTracker._finish_fetch = finish_fetch


class Swarm:
    """A monitor and trainers, forked from this process.

    :param num_trainers: trainers at the start
    :param step_seconds: expected duration of a global step with `num_trainers` trainers
    :param pace: mean seconds per micro-batch; the trainers differ from it by up to a quarter
    """

    def __init__(
        self, folder: Path, data: Path, counter: MessageCounter, num_trainers: int, step_seconds: float, pace: float
    ):
        self.folder, self.data, self.counter, self.pace = folder, data, counter, pace
        self.num_trainers = num_trainers
        self.target_batch_size = round(step_seconds * num_trainers * BATCH_SIZE / pace)
        self.peers: list[ForkedPeer] = []
        self.random = random.Random(0)
        folder.mkdir(parents=True)

    @property
    def trainers(self) -> list[ForkedPeer]:
        return self.peers[1:]

    @property
    def staying(self) -> list[ForkedPeer]:
        """The trainers that were not told to leave."""
        return [peer for peer in self.trainers if peer.left_at is None]

    def _fork(self, name: str, main: Callable[[], None], script: str, flags: tuple, prepare: Callable[[], None]):
        folder = self.folder / name
        folder.mkdir()
        sys.stdout.flush()
        index, pid = len(self.peers), os.fork()
        if pid == 0:
            self._run(main, [script, *map(str, flags), "--output_dir", str(folder)], folder, index, prepare)
        self.peers.append(ForkedPeer(name, index, pid, folder))

    def _run(
        self, main: Callable[[], None], arguments: list[str], folder: Path, index: int, prepare: Callable
    ) -> None:
        """In the forked process: run the script, and exit."""
        code = 1
        try:
            leave_with_parent()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            log = os.open(folder.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            sys.argv = arguments
            MPFuture.reset_backend()  # its locks would be shared by all peers
            self.counter.index = index
            prepare()
            run_script(main)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    @property
    def _flags(self) -> tuple:
        return (
            "--run_id", "swarm", "--tokenizer_path", self.data / "tokenizer", "--model_name_or_path",
            self.data / "config.json", "--target_batch_size", self.target_batch_size, "--learning_rate", 0.003,
            "--warmup_steps", 0, "--host_maddrs", LOCAL, "--bootstrap_timeout", 180,
        )  # fmt: skip

    def start_monitor(self) -> str:
        """Start the monitor.

        :returns: the address of the monitor
        """
        flags = (*self._flags, "--refresh_period", 5)
        self._fork("monitor", run_training_monitor.main, "run_training_monitor.py", flags, lambda: None)
        monitor = self.peers[0]

        def find_address() -> re.Match | None:
            assert monitor.poll() is None, monitor.log.read_text()
            return (
                re.search(r"--initial_peers (/ip4/[\w./]+)", monitor.log.read_text()) if monitor.log.exists() else None
            )

        return wait_until(find_address, START_SECONDS, "the address of the monitor")[1]

    def start_trainer(self, address: str) -> None:
        number = len(self.peers)
        name = f"trainer-{number}"
        flags = (
            *self._flags, "--initial_peers", address, "--dataset_path", self.data / "dataset",
            "--per_device_train_batch_size", BATCH_SIZE, "--gradient_accumulation_steps", 1,
            "--dataloader_num_workers", 0, "--use_cpu", "--seed", number,
        )  # fmt: skip
        pace = self.pace * self.random.uniform(0.75, 1.25)
        prepare = partial(_prepare_trainer, pace, self.folder / name)
        self._fork(name, run_trainer.main, "run_trainer.py", flags, prepare)

    def run(self, seconds: float, churn: float) -> tuple[float, float]:
        """Start all peers, and train for some seconds.

        :param churn: fraction of the trainers that leave, and join, each minute
        :returns: begin and end of the measured period
        """
        address = self.start_monitor()
        for _ in range(self.num_trainers):
            self.start_trainer(address)
        timeout = START_SECONDS + SECONDS_A_PEER * self.num_trainers
        for peer in self.trainers:
            wait_until(peer.has_begun, timeout, f"the first local step of {peer.name}")
        for peer in self.trainers:
            peer.before = peer.measure(self.counter)
        began, since = time.time(), time.monotonic()
        period = 60 / (churn * self.num_trainers) if churn else seconds
        num_left = 0
        while time.monotonic() < since + seconds:
            for peer in self.staying:
                assert peer.poll() is None, f"{peer.name} ended with {peer.exit_code}:\n{peer.log.read_text()[-2000:]}"
            if churn and time.monotonic() >= since + (num_left + 1) * period and len(self.peers) < MAX_PEERS:
                self._replace_one(address, signal.SIGKILL if num_left % 2 else signal.SIGTERM)
                num_left += 1
            time.sleep(0.5)
        return began, time.time()

    def _replace_one(self, address: str, number: int) -> None:
        """Send a signal to a random trainer, and start a new one."""
        peer = self.random.choice(self.staying)
        peer.family.look()
        peer.left_at = time.time()
        peer.send_signal(number)
        self.start_trainer(address)

    def stop(self) -> None:
        """End all processes, trainers first."""
        for peer in reversed(self.peers):
            peer.family.look()
            peer.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and None in [peer.poll() for peer in self.peers]:
            time.sleep(0.2)
        for peer in self.peers:
            peer.kill_all()

    def read_records(self) -> list[PeerRecords]:
        return [_read_records(peer) for peer in self.trainers]


def _read_records(peer: ForkedPeer) -> PeerRecords:
    records = PeerRecords(peer.name)
    if peer.left_at is not None:
        records.absences.append((peer.left_at, float("inf")))
    if (identity := peer.folder / "identity.key").exists():
        records.peer_id = str(PeerID.from_identity(identity.read_bytes()))
    read_local_records(records, peer.folder / "local.jsonl")
    read_round_log(records, peer.folder / "rounds.jsonl")
    return records


@dataclass
class Result:
    """The figures of one swarm."""

    num_trainers: int
    churn: float
    summary: RunSummary
    newcomers: NewcomerSummary
    used: float
    cpu: dict[str, float]  # milliseconds per second, by part
    memory: dict[str, float]  # MB, by part
    messages: dict[str, float]  # per trainer and step
    reads: list[float]  # seconds
    load: float


def measure(swarm: Swarm, seconds: float, churn: float, grace: float) -> Result:
    """Run one swarm and return its figures.

    :param grace: seconds for the rounds in progress at the end
    """
    try:
        began, ended = swarm.run(seconds, churn)
        stayed = [peer for peer in swarm.staying if peer.before is not None]
        after = {peer.name: peer.measure(swarm.counter) for peer in stayed}
        time.sleep(grace)
    finally:
        swarm.stop()
    records = swarm.read_records()
    summary = summarize(records, began, ended)
    names = {peer.name for peer in swarm.staying}
    staying = [peer for peer in summary.peers if peer.name in names]
    applied, computed = sum(peer.applied for peer in staying), sum(peer.computed for peer in staying)
    usage = defaultdict(list)
    for peer in stayed:
        cpu = after[peer.name].cpu - peer.before.cpu
        for part in PARTS:
            usage["cpu", part].append(1000 * cpu[part] / (ended - began))
            usage["memory", part].append(after[peer.name].memory[part] / 2**20)
        messages = after[peer.name].messages - peer.before.messages
        for name in CALLS:
            usage["messages", name].append(messages[name] / max(1, len(summary.steps)))
    means = {key: statistics.fmean(values) for key, values in usage.items()}
    return Result(
        num_trainers=swarm.num_trainers,
        churn=churn,
        summary=summary,
        newcomers=summarize_newcomers(records, summary.steps, began, FIRST_STEPS),
        used=applied / computed if computed else float("nan"),
        cpu={part: means.get(("cpu", part), 0.0) for part in PARTS},
        memory={part: means.get(("memory", part), 0.0) for part in PARTS},
        messages={name: means.get(("messages", name), 0.0) for name in CALLS},
        reads=[
            record["seconds"]
            for peer in stayed
            for record in read_jsonl(peer.folder / "reads.jsonl")
            if began < record["time"] < ended
        ],
        load=os.getloadavg()[1],
    )


def print_incomplete(result: Result, most: int = 12) -> None:
    """Print the incomplete steps with their details."""
    incomplete = [step for step in result.summary.steps if not step.is_whole]
    for step in incomplete[:most]:
        kind = "complete, in part" if step.is_complete else "incomplete"
        print(f"  step {step.step} {kind}: {step.details[:600]}")
    if len(incomplete) > most:
        print(f"  and {len(incomplete) - most} more")


def print_results(results: list[Result]) -> None:
    """Print the tables."""
    print(f"\n{'peers':>5}{'churn':>7}{'steps':>7}{'step p50':>10}{'complete':>10}{'in full':>9}", end="")
    print(f"{'due to averaged p50, p95':>26}{'used':>7}{'read p50, p95':>16}", end="")
    print(f"{'pings':>8}{'stores':>8}{'finds':>8}{'load':>6}")
    for result in results:
        summary = result.summary
        latency = f"{percentile(summary.latencies, 50):.1f} s, {percentile(summary.latencies, 95):.1f} s"
        print(f"{result.num_trainers:>5}{result.churn:>7.0%}{len(summary.steps):>7}", end="")
        print(f"{percentile(summary.durations, 50):>8.1f} s{summary.complete_fraction:>10.0%}", end="")
        reads = f"{percentile(result.reads, 50):.1f} s, {percentile(result.reads, 95):.1f} s"
        print(f"{summary.whole_fraction:>9.0%}{latency:>26}{result.used:>7.0%}{reads:>16}", end="")
        print("".join(f"{result.messages[name]:>8.1f}" for name in CALLS), f"{result.load:>5.1f}")
    print(f"\n{'peers':>5}{'churn':>7}  CPU ms/s, MB" + "".join(f"{part:>16}" for part in PARTS) + f"{'all':>16}")
    for result in results:
        print(f"{result.num_trainers:>5}{result.churn:>7.0%}  {'':<12}", end="")
        pairs = [(result.cpu[part], result.memory[part]) for part in PARTS]
        pairs.append((sum(result.cpu.values()), sum(result.memory.values())))
        print("".join(f"{f'{cpu:.1f}, {memory:.0f}':>16}" for cpu, memory in pairs))
    if with_churn := [result for result in results if result.churn]:
        names = ("newcomers", "others", "with_newcomers", "without")
        print(f"\n{'peers':>5}{'churn':>7}" + "".join(f"{name.replace('_', ' '):>18}" for name in names))
        for result in with_churn:
            cells = ["{} of {}".format(*getattr(result.newcomers, name)) for name in names]
            print(f"{result.num_trainers:>5}{result.churn:>7.0%}" + "".join(f"{cell:>18}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--peers", type=int, nargs="+", default=[2, 4, 8, 16], help="numbers of trainers; one swarm is run for each"
    )
    parser.add_argument(
        "--churn", type=float, nargs="+", default=[0.0], help="fraction of the trainers that leave each minute"
    )
    parser.add_argument(
        "--minutes", type=float, default=4.0, help="minutes for each swarm, after all trainers have begun"
    )
    parser.add_argument(
        "--step_seconds", type=float, help="target seconds of a global step; default: 15, or 2 for each trainer"
    )
    parser.add_argument("--pace", type=float, help="seconds of a micro-batch; default: 0.5, or 0.125 for each trainer")
    parser.add_argument("--folder", type=Path, help="keep the logs in this folder")
    args = parser.parse_args()

    for name in MODULES:  # imported here, they are shared by all peers
        importlib.import_module(name)
    folder = args.folder or Path(tempfile.mkdtemp(prefix="swarm-"))
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.tempdir = str(folder)  # the sockets of killed peers stay in this folder
    counter, results = MessageCounter(), []
    try:
        data = folder / "data"
        if not data.exists():
            data.mkdir()
            prepare_data(data)
        for churn in args.churn:
            for number in args.peers:
                step_seconds = args.step_seconds or max(15.0, 2.0 * number)
                pace = args.pace or max(0.5, number / 8)
                swarm = Swarm(folder / f"{number}-{churn:g}", data, counter, number, step_seconds, pace)
                result = measure(swarm, 60 * args.minutes, churn, grace=step_seconds / 2)
                print(f"{number} trainers, churn {churn:.0%}: {len(result.summary.steps)} steps", flush=True)
                print_incomplete(result)
                results.append(result)
    finally:
        if args.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
        if results:
            print_results(results)
            print(f"\n{LEGEND}")


if __name__ == "__main__":
    main()
