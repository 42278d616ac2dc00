#!/usr/bin/env python3
"""Measure what a monitor needs for 10, 100 and 1,000 trainers, and whether it still sees all of them.

benchmarks/monitor_scale.py
benchmarks/monitor_scale.py --trainers 1000 --refreshes 1000   # memory over 1,000 refreshes

A few processes store signed records of simulated trainers, which are as long as they get in a long run: metrics, a
full history, progress, and a name. The monitor reads and aggregates them with the code of run_training_monitor.py. All
peers are on 127.0.0.1. The simulated trainers are at the same step, which grows every --step_seconds.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import psutil
from hivemind.dht import DHT
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.utils import get_dht_time
from hivemind.utils.crypto import RSAPrivateKey

from arguments import BaseTrainingArguments
from benchmarks.process_usage import cpu_seconds
from lib.averaging.rounds import PROTOCOL
from lib.common.metrics_schema import history_length
from lib.common.processes import guard_children
from lib.monitoring.aggregation import MetricsAggregator
from lib.monitoring.contributors import Contributors
from lib.monitoring.monitor import TrainingMonitor
from lib.monitoring.trackers import build_reporters
from lib.peer.peer import start_peer
from utils import SignatureValidator, get_dictionary

RUN_ID = "scale"
LOCAL = "/ip4/127.0.0.1/tcp/0"
KINDS = ("metrics", "history", "training_progress", "peers", "rounds")
LIFETIME = 600.0  # of the records, in seconds
STORE_SECONDS = 600.0  # timeout for the first records of all trainers


class SimulatedSigners(RecordValidatorBase):
    """Signs records with the keys of several trainers."""

    def __init__(self, number: int):
        signers = [SignatureValidator(RSAPrivateKey()) for _ in range(number)]
        self.signers = {signer.local_public_key: signer for signer in signers}

    def validate(self, record: DHTRecord) -> bool:
        return True

    def sign_value(self, record: DHTRecord) -> bytes:
        for public_key, signer in self.signers.items():
            if public_key in record.subkey:
                return signer.sign_value(record)
        return record.value

    def strip_value(self, record: DHTRecord) -> bytes:
        return next(iter(self.signers.values())).strip_value(record)


def store_forever(address: str, first: int, number: int, num_trainers: int, step_seconds: float) -> None:
    """Store records of `number` trainers, from trainer `first` on, until the parent process ends."""
    guard_children()
    signers = SimulatedSigners(number)
    dht = DHT([address], start=True, host_maddrs=[LOCAL], record_validators=[signers])
    began_at = time.time()
    while True:
        step = 1000 + int((time.time() - began_at) / step_seconds)
        futures = []
        for trainer, public_key in enumerate(signers.signers, start=first):
            for kind, value in build_records(trainer, step, num_trainers).items():
                key, expiration = f"{RUN_ID}_{kind}", get_dht_time() + LIFETIME
                futures.append(dht.store(key, value, expiration, subkey=public_key, return_future=True))
            while len(futures) > 64:
                futures.pop(0).result(60)
        for future in futures:
            future.result(60)
        print("stored", flush=True)
        time.sleep(max(0.0, began_at + (step - 999) * step_seconds - time.time()))


def build_records(trainer: int, step: int, num_trainers: int) -> dict[str, object]:
    now = get_dht_time()
    metrics = {"step": step, "samples_per_second": 3.14, "samples_accumulated": 64, "loss": 88.2, "mini_steps": 16}
    rows = [[step - i, 3.141592, 64, 88.2345, 16] for i in reversed(range(history_length()))]
    progress = {
        "protocol": PROTOCOL, "peer_id": b"\x12\x20" + trainer.to_bytes(32, "big"), "epoch": step, "completed": step,
        "samples_accumulated": 0, "contributed": 64, "samples_per_second": 3.14, "time": now, "reported_at": now,
        "client_mode": False, "auxiliary": False,
    }  # fmt: skip
    info = {"username": f"volunteer-{trainer}", "leaving": False, "target_batch_size": 64 * num_trainers}
    rounds = {"rounds": 64, "complete": 60, "computed": 4096, "applied": 4000}
    return {"metrics": metrics, "history": rows, "training_progress": progress, "peers": info, "rounds": rounds}


def measure(num_trainers: int, args: argparse.Namespace, folder: Path) -> str:
    """Start trainers and a monitor; return a line of the table."""
    peer_args = BaseTrainingArguments(run_id=RUN_ID, host_maddrs=[LOCAL])
    peer = start_peer(peer_args, folder / "identity.key", False, threading.Event())
    numbers = [len(range(first, num_trainers, args.processes)) for first in range(args.processes)]
    firsts = [sum(numbers[:i]) for i in range(args.processes)]
    storers = []
    try:
        for first, number in zip(firsts, numbers, strict=True):
            command = [
                sys.executable,
                __file__,
                "--store",
                str(peer.dht.get_visible_maddrs()[0]),
                str(first),
                str(number),
            ]
            command += [str(num_trainers), str(args.step_seconds)]
            storers.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True))
        for storer in storers:
            storer.stdout.readline()  # "stored", or nothing if it has ended
        aggregator = MetricsAggregator(-1, alive_timeout=LIFETIME, settle_time=1.0)
        reporters, contributors = build_reporters(folder, RUN_ID), Contributors(folder, RUN_ID)
        monitor = TrainingMonitor(
            peer, RUN_ID, aggregator, reporters, contributors, keeper=None, uploader=None, refresh_period=1.0
        )
        processes = [psutil.Process(), *psutil.Process().children()]
        processes = [process for process in processes if process.pid not in {storer.pid for storer in storers}]
        walls, memory = [], []
        cpu = [cpu_seconds(process) for process in processes]
        for _ in range(args.refreshes):
            began = time.monotonic()
            monitor.refresh()
            walls.append(time.monotonic() - began)
            memory.append(sum(process.memory_info().rss for process in processes) / 1e6)
        used = sum(cpu_seconds(process) for process in processes) - sum(cpu)
        seen = {kind: len(get_dictionary(peer.dht, f"{RUN_ID}_{kind}", timeout=60)) for kind in KINDS}
        return (
            f"{num_trainers:>9}{statistics.median(walls):>12.2f}{max(walls):>8.2f}{used / args.refreshes:>13.2f}"
            f"{memory[0]:>11.0f}{memory[-1]:>7.0f}   " + ", ".join(f"{kind} {number}" for kind, number in seen.items())
        )
    finally:
        for storer in storers:
            storer.kill()
            storer.wait()
        peer.dht.shutdown()


def main() -> None:
    if sys.argv[1:2] == ["--store"]:
        address, first, number, num_trainers, step_seconds = sys.argv[2:]
        store_forever(address, int(first), int(number), int(num_trainers), float(step_seconds))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainers", default="10,100,1000", help="default: 10,100,1000")
    parser.add_argument("--refreshes", type=int, default=20, help="default: 20")
    parser.add_argument("--processes", type=int, default=2, help="that store the records; default: 2")
    parser.add_argument("--step_seconds", type=float, default=60.0, help="default: 60")
    args = parser.parse_args()
    guard_children()
    print(
        f"{'trainers':>9}{'refresh: s':>12}{'max':>8}{'CPU s':>13}{'MB: first':>11}{'last':>7}   records that are read"
    )
    for number in map(int, args.trainers.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            print(measure(number, args, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
