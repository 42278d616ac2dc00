#!/usr/bin/env python3
"""Measure duration, cost and efficiency of rounds with N trainers.

benchmarks/swarm.py --peers 2 4 8 16

N trainers and a monitor run on this machine, with a tiny model whose micro-batches sleep. They are forked from one
process after the imports, so that they share its memory. --churn 0.1: each minute a tenth of the trainers leave, every
other one killed, and as many join. Needs no network.
"""

import argparse
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.process_usage import PARTS, measure_cpu, measure_memory
from benchmarks.round_records import (
    PeerRecords,
    RunSummary,
    compare_newcomers,
    percentile,
    ratio,
    read_records,
    summarize,
)
from tests.support.altered import DHT_REQUESTS
from tests.support.launcher import Launcher
from tests.support.peers import ALTERED, LOCAL, Script, Scripts, prepare_data

BATCH_SIZE = 8
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


class Swarm:
    """A monitor and paced trainers, which record what they do.

    :param flags: of the monitor and of all trainers
    """

    def __init__(self, folder: Path, data: Path, launcher: Launcher, target_batch_size: int, *flags: object):
        folder.mkdir(parents=True)
        self.scripts = Scripts(folder, data, launcher=launcher)
        self.flags = (
            "--run_id", "swarm", "--tokenizer_path", data / "tokenizer", "--model_name_or_path",
            data / "config.json", "--target_batch_size", target_batch_size, "--learning_rate", 0.003,
            "--warmup_steps", 0, "--host_maddrs", LOCAL, "--bootstrap_timeout", 180, *flags,
        )  # fmt: skip
        self.monitor: Script | None = None
        self.trainers: dict[str, Script] = {}
        self.staying: list[str] = []  # names of the trainers that were not told to leave
        self.absences: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def start_monitor(self, *flags: object) -> None:
        output = ("--output_dir", self.scripts.folder / "monitor")
        self.monitor = self.scripts.start("run_training_monitor.py", *self.flags, *output, *flags, log="monitor")

    def start_trainer(self, name: str, pace: float, *flags: object, download_seconds: float = 0.0) -> None:
        """Start a trainer.

        :param pace: seconds of a micro-batch
        :param download_seconds: added to each download of the training state
        """
        folder = self.scripts.folder / name
        folder.mkdir()
        self.staying.append(name)
        env = {"PACE": pace, "DOWNLOAD_SECONDS": download_seconds, "RECORD": folder / "record.jsonl"}
        self.trainers[name] = self.scripts.start(
            ALTERED, "run_trainer.py", *self.flags, "--initial_peers", self.monitor.address, "--dataset_path",
            self.scripts.data / "dataset", "--output_dir", folder, "--per_device_train_batch_size", BATCH_SIZE,
            "--gradient_accumulation_steps", 1, "--dataloader_num_workers", 0, "--use_cpu", "--seed",
            len(self.trainers), *flags, log=name, env={key: str(value) for key, value in env.items()},
        )  # fmt: skip

    def wait_until_all_train(self) -> None:
        for trainer in self.trainers.values():
            trainer.wait_for("Local step 1:", START_SECONDS + SECONDS_A_PEER * len(self.trainers))

    def freeze(self, name: str, seconds: float) -> None:
        began = time.time()
        self.trainers[name].freeze(seconds)
        self.absences[name].append((began, time.time()))

    def remove(self, name: str, number: int) -> None:
        """Send a signal to a trainer, which ends it."""
        self.staying.remove(name)
        self.absences[name].append((time.time(), float("inf")))
        self.trainers[name].process.send_signal(number)

    def stop(self) -> None:
        """End all processes, trainers first."""
        scripts = [*self.trainers.values(), *([self.monitor] if self.monitor else [])]
        for script in scripts:
            script.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 30
        for script in scripts:
            with suppress(AssertionError):
                script.wait(max(0.1, deadline - time.monotonic()))
        self.scripts.close()

    def read_records(self) -> list[PeerRecords]:
        return [read_records(name, self.scripts.folder / name, self.absences[name]) for name in self.trainers]

    def assert_alive(self) -> None:
        for name in self.staying:
            script = self.trainers[name]
            assert script.process.poll() is None, f"{name} has ended:\n{script.output[-2000:]}"


@dataclass
class Result:
    """The figures of one swarm.

    :param usage: (kind, part) -> mean over the trainers; CPU in milliseconds per second, memory in MB
    :param requests: DHT requests per trainer and step
    """

    num_trainers: int
    churn: float
    summary: RunSummary
    newcomers: dict[str, tuple[int, int]]
    used: float
    usage: dict[tuple[str, str], float]
    requests: dict[str, float]
    reads: list[float]
    load: float


def measure(swarm: Swarm, num_trainers: int, pace: float, seconds: float, churn: float, grace: float) -> Result:
    """Run one swarm and return its figures.

    :param pace: mean seconds per micro-batch; the trainers differ from it by up to a quarter
    :param churn: fraction of the trainers that leave, and join, each minute
    :param grace: seconds for the rounds in progress at the end
    """
    generator = random.Random(0)

    def add() -> None:
        swarm.start_trainer(f"trainer-{len(swarm.trainers) + 1}", pace * generator.uniform(0.75, 1.25))

    try:
        swarm.start_monitor()
        for _ in range(num_trainers):
            add()
        swarm.wait_until_all_train()
        before = {name: _measure(script) for name, script in swarm.trainers.items()}
        began, since, num_left = time.time(), time.monotonic(), 0
        period = 60 / (churn * num_trainers) if churn else float("inf")
        while time.monotonic() < since + seconds:
            swarm.assert_alive()
            if time.monotonic() >= since + (num_left + 1) * period:
                swarm.remove(generator.choice(swarm.staying), signal.SIGKILL if num_left % 2 else signal.SIGTERM)
                add()
                num_left += 1
            time.sleep(0.5)
        ended, stayed = time.time(), [name for name in swarm.staying if name in before]
        after = {name: _measure(swarm.trainers[name]) for name in stayed}
        load = os.getloadavg()[1]
        time.sleep(grace)
    finally:
        swarm.stop()
    records = swarm.read_records()
    summary, of_stayed = summarize(records, began, ended), [peer for peer in records if peer.name in stayed]
    usage: dict[tuple[str, str], float] = {}
    for part in PARTS:
        cpu = [1000 * (after[name][0] - before[name][0])[part] / (ended - began) for name in stayed]
        usage["cpu", part] = statistics.fmean(cpu) if cpu else 0.0
        usage["memory", part] = statistics.fmean([after[name][1][part] / 2**20 for name in stayed] or [0.0])
    requests = sum((peer.requests_between(began, ended) for peer in of_stayed), Counter())
    return Result(
        num_trainers=num_trainers,
        churn=churn,
        summary=summary,
        newcomers=compare_newcomers(records, summary.steps, began, FIRST_STEPS),
        used=summary.applied_fraction(swarm.staying),
        usage=usage,
        requests={name: ratio(requests[name], len(stayed) * len(summary.steps)) for name in DHT_REQUESTS},
        reads=[seconds for peer in of_stayed for moment, seconds in peer.reads if began < moment < ended],
        load=load,
    )


def _measure(script: Script) -> tuple[Counter, Counter]:
    """Return CPU seconds and memory of a trainer, by part."""
    family = script.family()
    return measure_cpu(script.process.pid, family), measure_memory(script.process.pid, family)


def print_incomplete(summary: RunSummary) -> None:
    """Print the incomplete steps with their details."""
    for step in summary.steps:
        if not step.is_whole:
            kind = "complete, in part" if step.is_complete else "incomplete"
            print(f"  step {step.step} {kind}: {step.details[:600]}")


def print_results(results: list[Result]) -> None:
    """Print the tables."""
    print(f"\n{'peers':>5}{'churn':>7}{'steps':>7}{'step p50':>10}{'complete':>10}{'in full':>9}", end="")
    print(f"{'due to averaged p50, p95':>26}{'used':>7}{'read p50, p95':>16}", end="")
    print(f"{'pings':>8}{'stores':>8}{'finds':>8}{'load':>6}")
    for result in results:
        summary = result.summary
        latency, read = (
            f"{percentile(values, 50):.1f} s, {percentile(values, 95):.1f} s"
            for values in (summary.latencies, result.reads)
        )
        print(f"{result.num_trainers:>5}{result.churn:>7.0%}{len(summary.steps):>7}", end="")
        print(f"{percentile(summary.durations, 50):>8.1f} s{summary.complete_fraction:>10.0%}", end="")
        print(f"{summary.whole_fraction:>9.0%}{latency:>26}{result.used:>7.0%}{read:>16}", end="")
        print("".join(f"{number:>8.1f}" for number in result.requests.values()), f"{result.load:>5.1f}")
    print(f"\n{'peers':>5}{'churn':>7}  CPU ms/s, MB" + "".join(f"{part:>16}" for part in (*PARTS, "all")))
    for result in results:
        pairs = [(result.usage["cpu", part], result.usage["memory", part]) for part in PARTS]
        pairs.append(tuple(map(sum, zip(*pairs, strict=True))))
        print(f"{result.num_trainers:>5}{result.churn:>7.0%}  {'':<12}", end="")
        print("".join(f"{f'{cpu:.1f}, {memory:.0f}':>16}" for cpu, memory in pairs))
    for result in results:
        if result.churn:
            cells = [f"{name} {part} of {whole}" for name, (part, whole) in result.newcomers.items()]
            print(f"\n{result.num_trainers} peers, churn {result.churn:.0%}: {', '.join(cells)}")


def open_folder(stack: ExitStack, folder: Path | None, name: str) -> tuple[Path, Path, Launcher]:
    """Return a folder for logs, that of the data, and a launcher. A temporary folder is removed at the end."""
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["TMPDIR"] = str(folder)  # the sockets of killed peers stay in this folder
    if not (folder / "data" / "config.json").exists():
        prepare_data(folder / "data")
    launcher = Launcher(folder / "launcher.log")
    stack.callback(launcher.close)
    return folder, folder / "data", launcher


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, nargs="+", default=[2, 4, 8, 16], help="trainers of each swarm")
    parser.add_argument("--churn", type=float, nargs="+", default=[0.0], help="fraction that leaves each minute")
    parser.add_argument("--minutes", type=float, default=4.0, help="for each swarm, after all trainers have begun")
    parser.add_argument("--folder", type=Path, help="keep the logs in this folder")
    args = parser.parse_args()
    results = []
    with ExitStack() as stack:
        folder, data, launcher = open_folder(stack, args.folder, "swarm")
        for churn in args.churn:
            for number in args.peers:
                step_seconds, pace = max(15.0, 2.0 * number), max(0.5, number / 8)
                target = round(step_seconds * number * BATCH_SIZE / pace)
                swarm = Swarm(folder / f"{number}-{churn:g}", data, launcher, target)
                result = measure(swarm, number, pace, 60 * args.minutes, churn, grace=step_seconds / 2)
                print(f"{number} trainers, churn {churn:.0%}: {len(result.summary.steps)} steps", flush=True)
                print_incomplete(result.summary)
                results.append(result)
    print_results(results)
    print(f"\n{LEGEND}")


if __name__ == "__main__":
    main()
