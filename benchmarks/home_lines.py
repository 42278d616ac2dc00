#!/usr/bin/env python3
"""Measure seconds and bytes of rounds on links as at home.

benchmarks/home_lines.py --uplinks 5 10 20 100 --peers 2 4
benchmarks/home_lines.py --uplinks 14.7 --downlink 7.6 --peers 8 --slow 2 --modes default topk

Each peer runs in a network namespace behind a rate limit (tc's token bucket filter) and averages the tensors of a
model; its computation is simulated. Downlinks have 5 times the rate of the uplink, at least 50 Mbit/s. With --slow,
some peers have a third of these rates. With --latency, packets take so long to another peer. Needs root, and for each
peer 1.5 GB of memory with ALBERT-large, 6 GB with GPT-2.

Rates rise, from before the peers connect: TCP's send buffers grow with the rate and never shrink. On a link that has
become much slower, a full buffer has no room for more than 5 s, and libp2p closes the connection.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.support.namespaces import Internet, why_unavailable
from tests.support.peers import Script, read_jsonl, wait_until

LOCAL_STEP_SECONDS = 2.0
START_SECONDS = 240.0
ROUND_SECONDS = 900.0  # timeout of a round
PORT = 31337
MODES = {
    "default": "",
    "blockwise8": "--gradient_compression blockwise8",
    "local": "--local_updates --gradient_compression blockwise8",
    "topk": "--local_updates --gradient_compression topk --average_state_every 1000",
    "adapters": "--gradient_compression blockwise4",
    "gradients": "--average_state_every 1000",  # the first 999 rounds have no parameters
    "gradients8": "--average_state_every 1000 --gradient_compression blockwise8",
}

LEGEND = """\
round     seconds from due to averaged: mean over rounds and peers; of these, search for a group, and all-reduce
applied   seconds from when the first peer began the step to the new parameters
sent      MB of a peer from one global step to the next, with all headers and other traffic; likewise received
computing fraction of the time from one global step to the next that is that of local steps
complete  fraction of the rounds that had all peers and in which all averages arrived
load      load average for each core: rounds on a busy machine wait for the CPU"""


class Swarm:
    """Peers of one mode, each in its own network namespace."""

    def __init__(self, stack: ExitStack, folder: Path, mode: str, number: int, upload: float, args):
        self.folder, self.number, self.args = folder, number, args
        self.internet = stack.enter_context(Internet(args.latency))
        self.hosts = [self.internet.add_public() for _ in range(number)]
        self.limit(upload)
        self.scripts: list[Script] = []
        folder.mkdir(parents=True)
        for index in range(number):
            self.scripts.append(self._start(index, mode))
            stack.callback(self.scripts[-1].kill_all)
        for script in self.scripts:
            script.wait_for("Ready", START_SECONDS)
        (folder / "start").touch()

    def _start(self, index: int, mode: str) -> Script:
        initial = ("--initial_peers", self.scripts[0].address) if index else ()
        return Script(
            "benchmarks/lines_peer.py", "--run_id", "lines", "--model_name_or_path", self.args.model,
            *MODES[mode].split(), "--host_maddrs", f"/ip4/{self.hosts[index].address}/tcp/{PORT}", *initial,
            "--bootstrap_timeout", START_SECONDS, "--output_dir", self.folder / str(index),
            "--target_batch_size", self.args.local_steps * self.number,
            *(["--in_background"] if self.args.in_background else []), "--per_device_train_batch_size", 1,
            "--gradient_accumulation_steps", 1, "--averaging_timeout", round(ROUND_SECONDS), "--use_cpu",
            "--local_step_seconds", LOCAL_STEP_SECONDS, "--start_file", self.folder / "start",
            log=self.folder / f"{index}.log", namespace=self.hosts[index].namespace,
        )  # fmt: skip

    def limit(self, upload: float) -> None:
        for index, host in enumerate(self.hosts):
            rate = upload / (3 if index >= self.number - self.args.slow else 1)
            self.internet.limit(host, rate, max(50.0, self.args.downlink * rate))

    def read_steps(self) -> dict[int, list[tuple[dict, dict]]]:
        """Return round and traffic of all peers for each global step that all have completed."""
        logs = []
        for index in range(self.number):
            rounds, traffic = (
                {entry["step"]: entry for entry in read_jsonl(self.folder / str(index) / name)}
                for name in ("rounds.jsonl", "traffic.jsonl")
            )
            logs.append({step: (rounds[step], traffic[step]) for step in rounds.keys() & traffic.keys()})
        return {step: [log[step] for log in logs] for step in sorted(set.intersection(*map(set, logs)))}

    def wait_for_rounds(self, number: int, after: int) -> list[int]:
        """Wait until all peers have completed a number of steps after a step, and return these steps."""

        def find_steps() -> list[int]:
            for script in self.scripts:
                assert script.process.poll() is None, script.output[-500:]
            steps = [step for step in self.read_steps() if step > after]
            return steps[:number] if len(steps) >= number else []

        return wait_until(find_steps, number * ROUND_SECONDS, f"{number} rounds of {self.number} peers")


def summarize(records: dict[int, list[tuple[dict, dict]]], steps: list[int]) -> dict[str, float]:
    """Return the means of the figures of some steps, see LEGEND."""

    def mean(phase: str) -> float:
        return fmean(entry["seconds"].get(phase, 0.0) for step in steps for entry, _ in records[step])

    def begun_at(step: int) -> float:
        phases = ("load", "round", "update")
        return min(entry["time"] - sum(entry["seconds"].get(phase, 0.0) for phase in phases)
                   for entry, _ in records[step])  # fmt: skip

    def increases(name: str) -> list[float]:
        pairs = [(max(earlier for earlier in records if earlier < step), step) for step in steps]
        return [
            after[name] - before[name]
            for earlier, step in pairs
            for (_, before), (_, after) in zip(records[earlier], records[step], strict=True)
        ]

    return {
        "round": mean("load") + mean("round"),
        "search": mean("matchmaking"),
        "reduce": mean("allreduce"),
        "applied": fmean(entry["time"] - begun_at(step) for step in steps for entry, _ in records[step]),
        "sent": fmean(increases("sent")) / 1e6,
        "received": fmean(increases("received")) / 1e6,
        "computing": sum(increases("computed")) / sum(increases("time")),
        "complete": fmean(
            all(entry["received"] == 1 and len(entry["group"]) == len(records[step]) for entry, _ in records[step])
            for step in steps
        ),
        "load": os.getloadavg()[0] / os.cpu_count(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uplinks", type=float, nargs="+", default=[5.0, 10.0, 20.0, 100.0], help="in Mbit/s")
    parser.add_argument("--peers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--model", default="albert-large-v2", help="name or config file; default: albert-large-v2")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--downlink", type=float, default=5.0, help="rate of the downlink / that of the uplink")
    parser.add_argument("--latency", type=float, default=0.0, help="in milliseconds")
    parser.add_argument("--slow", type=int, default=0, help="peers with a third of the rates")
    help_text = "of each peer in a global step; matchmaking begins 5 s before a step is due"
    parser.add_argument("--local_steps", type=int, default=6, help=help_text)
    parser.add_argument("--in_background", action="store_true", help="take local steps during rounds, as trainers do")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of a point; the first round of all is left out")
    args = parser.parse_args()
    if (reason := why_unavailable()) or shutil.which("tc") is None:
        sys.exit(reason or "tc not found (package iproute2)")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C: end the peers first
    columns = ("round", "search", "reduce", "applied", "sent", "received", "computing", "complete", "load")
    print(f"{'mode':<12}{'peers':>6}{'uplink':>8}" + "".join(f"{name:>10}" for name in columns))
    for number in args.peers:
        for mode in args.modes:
            with tempfile.TemporaryDirectory(prefix="lines-") as folder, ExitStack() as stack:
                swarm = Swarm(stack, Path(folder) / "run", mode, number, min(args.uplinks), args)
                last = swarm.wait_for_rounds(1, after=0)[-1]
                for upload in sorted(args.uplinks):
                    swarm.limit(upload)
                    steps = swarm.wait_for_rounds(args.rounds, after=last)
                    figures = summarize(swarm.read_steps(), steps)
                    last = max(swarm.read_steps())
                    print(f"{mode:<12}{number:>6}{upload:>8g}", end="")
                    print("".join(f"{figures[name]:>10.2f}" for name in columns), flush=True)
    print(f"\n{LEGEND}")


if __name__ == "__main__":
    main()
