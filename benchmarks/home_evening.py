#!/usr/bin/env python3
"""Compare what an evening of eight volunteers at home is worth in each mode: the loss after equal hours and samples.

benchmarks/home_evening.py --train_file my.txt --folder results

A third of the size in everything that takes time: a model of 1.4 million parameters on lines of 3.2 Mbit/s up and 24.6
down has the rounds of ALBERT-large at 14.7 and 112 Mbit/s in a third of the time. Two trainers have a third of these
rates. A packet takes 23 ms of the evening to another home. Micro-batches are paced. Each ten minutes of the evening a
trainer leaves, every other one killed, and another joins; a line stalls for a minute. The loss is that of the first
trainer on held-out text. Prints times of the evening, three times those measured. Needs root, 8 GB of memory, and 1.5
cores.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import time
from contextlib import ExitStack
from itertools import count, cycle
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from benchmarks.low_communication import TextTask
from benchmarks.round_records import summarize
from benchmarks.swarm import BATCH_SIZE, Swarm, open_folder
from cotrain.training.builders import build_param_groups
from cotrain.training.checkpoints import STATE_FILE, list_checkpoints, load_training_state
from tests.support.namespaces import Host, Internet, why_unavailable
from tests.support.peers import Scripts, prepare_data, read_jsonl

MODEL = {
    "model_type": "gpt2", "n_embd": 160, "n_layer": 4, "n_head": 4, "n_positions": 64,
    "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
}  # fmt: skip
VOCABULARY = 1000
SCALE = 3  # seconds of the evening in a second
UPLINK, DOWNLINK = 3.24, 24.6  # Mbit/s
LATENCY = 23.0 / SCALE  # milliseconds
PEERS, SLOW = 8, (3, 6)
PACE, STEP_SECONDS = 1.0, 21.0  # a global step takes 63 s of the evening, as 4,096 samples of 8 T4s
MODES = {
    "default": "--learning_rate 0.003",
    "local": "--learning_rate 0.002 --local_updates --gradient_compression blockwise8",
    "topk": "--learning_rate 0.002 --local_updates --gradient_compression topk --average_state_every 64",
}


class Evening(Swarm):
    """A swarm whose trainers are at home, each on a host with its own line."""

    def __init__(self, stack: ExitStack, folder: Path, data: Path, mode: str, launcher):
        target = round(PEERS * BATCH_SIZE * STEP_SECONDS / PACE)
        flags = f"--optimizer adamw --adam_epsilon 1e-8 --warmup_steps 4 --averaging_timeout 60 {MODES[mode]}"
        super().__init__(folder, data, launcher, target, *flags.split())
        stack.callback(self.stop)
        self.internet = stack.enter_context(Internet(LATENCY))
        self.hosts: dict[str, tuple[Host, float]] = {}  # with the rate of its line, relative to UPLINK and DOWNLINK
        self.data, self.launcher = data, launcher

    def _move_to_new_host(self, name: str, rate: float) -> tuple[str, ...]:
        """Let the next script run on a new host, and return its flags."""
        host = self.internet.add_public()
        self.hosts[name] = host, rate
        self.limit(name)
        running = self.scripts.running
        self.scripts = Scripts(self.scripts.folder, self.data, host.namespace, self.launcher)
        self.scripts.running = running
        return "--host_maddrs", f"/ip4/{host.address}/tcp/31337"

    def open(self) -> None:
        self.start_monitor("--refresh_period", 5, *self._move_to_new_host("monitor", 10.0))

    def add(self) -> None:
        name = f"trainer-{(number := len(self.trainers))}"
        address = self._move_to_new_host(name, 1 / 3 if number in SLOW else 1.0)
        self.start_trainer(name, PACE, *address, "--backup_every_steps", 1)

    def limit(self, name: str, fraction: float = 1.0) -> None:
        """Give a host a fraction of the rate of its line."""
        host, rate = self.hosts[name]
        self.internet.limit(host, UPLINK * rate * fraction, DOWNLINK * rate * fraction)


def keep_states(folder: Path, kept: dict[float, Path]) -> None:
    """Keep the state in each checkpoint of the first trainer."""
    for checkpoint in list_checkpoints(folder / "trainer-0")[:1]:
        if (moment := (checkpoint / STATE_FILE).stat().st_mtime) not in kept:
            kept[moment] = folder / f"{moment}.pt"
            shutil.copy(checkpoint / STATE_FILE, kept[moment])


def spend_evening(evening: Evening, minutes: float, kept: dict[float, Path]) -> float:
    """Let an evening pass, and return when it began."""
    evening.open(encoding="utf-8")
    for _ in range(PEERS):
        evening.add()
    evening.wait_until_all_train()
    began, since, event, signals = time.time(), time.monotonic(), 0, cycle((signal.SIGINT, signal.SIGKILL))
    leavers, stalled = count(1), None
    while (evening_minute := (time.monotonic() - since) * SCALE / 60) < minutes:
        evening.assert_alive()
        keep_states(evening.scripts.folder, kept)
        if evening_minute >= 10 * event + 5 and stalled is None:
            stalled = evening.staying[(5 * event + 2) % PEERS]
            evening.limit(stalled, 0.01)
        if evening_minute >= 10 * event + 6 and stalled is not None:
            evening.limit(stalled)
            stalled = None
        if evening_minute >= 10 * (event + 1):
            evening.remove(f"trainer-{next(leavers)}", next(signals))
            evening.add()
            event += 1
        time.sleep(0.5)
    return began


def report(evening: Evening, mode: str, minutes: float, began: float, kept: dict[float, Path], task: TextTask) -> dict:
    """Return the figures of an evening, and the loss by its minute and by the run's applied samples."""
    ended = began + minutes * 60 / SCALE
    records = evening.read_records()
    summary = summarize(records, began, ended)
    computed, applied = (sum(getattr(peer, name) for peer in summary.peers) for name in ("computed", "applied"))
    rounds = [
        entry
        for name in evening.trainers
        for entry in read_jsonl(evening.scripts.folder / name / "rounds.jsonl")
        if began < entry["time"] < ended and entry["outcome"] == "averaged"
    ]
    curve = []
    for moment, path in sorted(kept.items()):
        if not began < moment < ended:
            continue
        state = load_training_state(path, "swarm")
        model = task.build_model(0)
        parameters = [parameter for group in build_param_groups(model, 0.0) for parameter in group["params"]]
        with torch.no_grad():
            for parameter, value in zip(parameters, state.tensors[: len(parameters)], strict=True):
                parameter.copy_(value)
        before = sum(peer.applied for peer in summarize(records, began, moment).peers)
        curve.append([round((moment - began) * SCALE / 60, 1), before, round(task.evaluate(model), 4)])
    return {
        "mode": mode,
        "allreduce": fmean(entry["seconds"].get("allreduce", 0.0) for entry in rounds) * SCALE,
        "search": fmean(entry["seconds"].get("matchmaking", 0.0) for entry in rounds),  # not scaled
        "received": fmean(entry["received"] for entry in rounds),
        "steps": len(summary.steps),
        "computing": computed / BATCH_SIZE * PACE / (PEERS * (ended - began)),
        "applied": applied / computed,
        "load": os.getloadavg()[2] / os.cpu_count(),
        "samples an hour": round(applied / minutes * 60),
        "curve": curve,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--minutes", type=float, default=36.0, help="of the evening")
    parser.add_argument("--train_file", type=Path, help="text, UTF-8; default: Python's documentation topics")
    parser.add_argument("--folder", type=Path, help="for data, logs and results; default: a temporary folder")
    args = parser.parse_args()
    if reason := why_unavailable():
        sys.exit(reason)
    torch.set_num_threads(1)
    with ExitStack() as stack:
        folder, data, launcher = open_folder(stack, args.folder, "home-evening")
        flags = ("--max_seq_length", MODEL["n_positions"], "--validation_fraction", 0.1)
        config = data / "config.json"
        if json.loads(config.read_text(encoding="utf-8")) != MODEL:
            shutil.rmtree(data)
            prepare_data(data, "clm", VOCABULARY, *flags, train_file=args.train_file)
            config.write_text(json.dumps(MODEL), encoding="utf-8")
        task = TextTask(data)
        for mode in args.modes:
            kept: dict[float, Path] = {}
            with ExitStack() as of_mode:
                evening = Evening(of_mode, folder / mode, data, mode, launcher)
                began = spend_evening(evening, args.minutes, kept)
            print(json.dumps(report(evening, mode, args.minutes, began, kept, task)), flush=True)


if __name__ == "__main__":
    main()
