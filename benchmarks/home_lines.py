#!/usr/bin/env python3
"""Measure seconds and bytes of rounds on connections as at home, and fit lib/training/round_time.py to them.

benchmarks/home_lines.py --uplinks 5 10 20 100 --peers 2 4 --folder lines

Each peer runs in a network namespace behind a rate limit (tc's token bucket filter) and averages ALBERT-large's
tensors; its computation is simulated. Downlinks have 5 times the rate of the uplink, at least 50 Mbit/s. There is no
latency. Needs root, and 1.5 GB of memory for each peer. Measured points are appended to points.jsonl in --folder; a
second run measures what is missing, and again what was measured on a busy machine.

Rates rise, from before the peers connect: TCP's send buffers grow with the rate and never shrink. On a connection that
has become much slower, a full buffer has no room for more than 5 s, and libp2p closes the connection.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.line_records import (
    MODES,
    Point,
    fit,
    measured_table,
    summarize_rounds,
)
from benchmarks.round_records import read_jsonl
from lib.common.checks import require, require_positive
from lib.common.cli import parse_arguments
from lib.common.errors import UserError, run_script
from lib.common.flags import flag
from lib.training.model import build_model, read_config
from lib.training.round_time import round_seconds
from tests.support.namespaces import Internet, Public, make_internet, why_unavailable
from tests.support.peers import Script, wait_until

MODEL = "albert-large-v2"
LOCAL_STEP_SECONDS = 2.0
LOCAL_STEPS = 6  # of each peer in a global step: time for matchmaking, which begins 5 s before a step is due
START_SECONDS = 240.0
PORT = 31337


@dataclass
class LineArguments:
    """What is measured."""

    _argument_group_name = "Lines"

    uplinks: list[float] = flag(lambda: [5.0, 10.0, 20.0, 100.0], "Upload rates in Mbit/s")
    peers: list[int] = flag(lambda: [2, 4], "Numbers of peers")
    modes: list[str] = flag(lambda: list(MODES), f"Of {', '.join(MODES)}")
    rounds: int = flag(2, "Rounds of a point; the first round of all is not counted")
    max_minutes: float = flag(60.0, "Start no point that would end later than this")
    folder: str | None = flag(None, "Folder for points and logs. Default: keep neither")
    debug: bool = flag(False, "Show the traceback of an error")

    def __post_init__(self):
        require_positive(self, "rounds", "max_minutes")
        for rate in self.uplinks:
            require(rate > 0, f"--uplinks must be above zero, got {rate:g}")
        for number in self.peers:
            require(2 <= number <= 200, f"--peers must be 2 to 200, got {number}")
        for mode in self.modes:
            require(mode in MODES, f"--modes: '{mode}' is none of {', '.join(MODES)}")


def get_download(upload: float) -> float:
    """Return the download rate of an asymmetric connection, as at home."""
    return max(50.0, 5 * upload)


class Swarm:
    """Peers of one mode, each in its own network namespace.

    :param upload: the first rate to measure
    :param timeout: seconds after which a round is aborted
    """

    def __init__(
        self, stack: ExitStack, folder: Path, internet: Internet, mode: str, number: int, upload: float, timeout: float
    ):
        self.folder, self.internet, self.number = folder, internet, number
        self.hosts: list[Public] = [internet.add_public() for _ in range(number)]
        self.limit(upload)
        self.scripts: list[Script] = []
        folder.mkdir(parents=True)
        for index in range(number):
            self._start(stack, index, mode, timeout)
        for script in self.scripts:
            script.wait_for("Ready", START_SECONDS)
        (folder / "start").touch()

    def _start(self, stack: ExitStack, index: int, mode: str, timeout: float) -> None:
        initial = ("--initial_peers", self.scripts[0].address) if index else ()
        maddr = f"/ip4/{self.hosts[index].address}/tcp/{PORT}"
        script = Script(
            "benchmarks/lines_peer.py", "--run_id", "lines", "--model_name_or_path", MODEL, *MODES[mode].flags.split(),
            "--host_maddrs", maddr, *initial, "--bootstrap_timeout", START_SECONDS,
            "--output_dir", self._output(index), "--target_batch_size", LOCAL_STEPS * self.number,
            "--per_device_train_batch_size", 1, "--gradient_accumulation_steps", 1,
            "--averaging_timeout", round(timeout), "--matchmaking_time", max(5.0, timeout / 18), "--use_cpu",
            "--local_step_seconds", LOCAL_STEP_SECONDS, "--start_file", self.folder / "start",
            log=self.folder / f"peer-{index}.log", namespace=self.hosts[index].host.namespace,
        )  # fmt: skip
        stack.callback(script.kill_all)
        self.scripts.append(script)

    def _output(self, index: int) -> Path:
        return self.folder / f"peer-{index}"

    def limit(self, upload: float) -> None:
        for host in self.hosts:
            self.internet.limit(host, upload, get_download(upload))

    def read_steps(self) -> dict[int, list[tuple[dict, dict]]]:
        """Return round and traffic of all peers for each global step that all have completed."""
        logs = []
        for index in range(self.number):
            rounds = {entry["step"]: entry for entry in read_jsonl(self._output(index) / "rounds.jsonl")}
            traffic = {entry["step"]: entry for entry in read_jsonl(self._output(index) / "traffic.jsonl")}
            logs.append({step: (rounds[step], traffic[step]) for step in rounds.keys() & traffic.keys()})
        return {step: [log[step] for log in logs] for step in sorted(set.intersection(*map(set, logs)))}

    def wait_for_rounds(self, number: int, after: int, timeout: float) -> list[int]:
        """Wait until all peers have completed a number of steps after a step, and return these steps."""

        def find_steps() -> list[int]:
            for script in self.scripts:
                if script.process.poll() is not None:
                    raise UserError(f"a peer ended with code {script.process.returncode}: {script.output[-500:]}")
            steps = [step for step in self.read_steps() if step > after]
            return steps[:number] if len(steps) >= number else []

        return wait_until(find_steps, timeout, f"{number} rounds of {self.number} peers")

    def measure(self, mode: str, upload: float, elements: int, number: int, last: int, timeout: float) -> Point:
        """Measure the rounds of a number of steps after step `last`."""
        self.limit(upload)
        steps = self.wait_for_rounds(number, last, timeout)
        records = self.read_steps()
        seconds, complete = summarize_rounds([[entry for entry, _ in records[step]] for step in steps])
        traffic = [
            (after["sent"] - before["sent"], after["received"] - before["received"])
            for step in steps
            for (_, before), (_, after) in zip(records[_previous(records, step)], records[step], strict=True)
        ]
        return Point(
            peers=self.number,
            mode=mode,
            upload=upload,
            download=get_download(upload),
            elements=elements,
            bits=MODES[mode].bits,
            rounds=len(steps),
            seconds=seconds,
            sent=fmean(sent for sent, _ in traffic),
            received=fmean(received for _, received in traffic),
            complete=complete,
            load=os.getloadavg()[0] / os.cpu_count(),
        )


def _previous(records: dict[int, object], step: int) -> int:
    return max(number for number in records if number < step)


def read_points(path: Path) -> list[Point]:
    """Return the stored points; of those that were measured repeatedly, the newest."""
    return list({point.key: point for point in (Point(**record) for record in read_jsonl(path))}.values())


def measure_swarm(
    args: LineArguments, folder: Path, mode: str, number: int, elements: int, uplinks: list[float], deadline: float
) -> None:
    """Measure one mode and number of peers at several rates, from the lowest to the highest."""

    def expect(upload: float) -> float:
        return round_seconds(elements, number, MODES[mode].bits, upload)

    lowest = min(uplinks)
    timeout = max(60.0, 3 * expect(lowest))
    with make_internet() as internet, ExitStack() as stack:
        name = f"{mode}-{number}-{time.time():.0f}"
        swarm = Swarm(stack, folder / name, internet, mode, number, lowest, timeout)
        last = swarm.wait_for_rounds(1, after=0, timeout=START_SECONDS + 3 * expect(lowest))[-1]
        for upload in sorted(uplinks):
            seconds = args.rounds * (expect(upload) + LOCAL_STEPS * LOCAL_STEP_SECONDS)
            if time.monotonic() + seconds > deadline:
                print(f"{mode}, {number} peers, {upload:g} Mbit/s: left out, --max_minutes", flush=True)
                continue
            point = swarm.measure(mode, upload, elements, args.rounds, last, 3 * seconds + 60)
            last = max(swarm.read_steps())
            with open(folder / "points.jsonl", "a") as file:
                file.write(json.dumps(asdict(point)) + "\n")
            print(f"{mode}, {number} peers, {upload:g} Mbit/s: {point.round:.1f} s a round, "
                  f"{point.sent / 1e6:.1f} MB sent, load {point.load:.1f} for each core", flush=True)  # fmt: skip


def measure(args: LineArguments, folder: Path, elements: int) -> None:
    """Measure all points that are not stored yet, or not usable."""
    deadline = time.monotonic() + 60 * args.max_minutes
    done = {point.key for point in read_points(folder / "points.jsonl") if point.is_fit}
    for number in args.peers:
        for mode in args.modes:
            uplinks = [upload for upload in args.uplinks if (number, mode, upload) not in done]
            if uplinks and time.monotonic() < deadline:
                measure_swarm(args, folder, mode, number, elements, uplinks, deadline)


def report(points: list[Point], elements: int) -> None:
    """Print the tables."""
    usable = [point for point in points if point.is_fit]
    if len({point.line_seconds for point in usable}) < 2:
        print("too few points for a fit")
        return
    fitted = fit(usable)
    print("\nSeconds of a round, from due to averaged; search begins before a step is due")
    print("\n".join(measured_table(points, fitted)))
    print(f"\nround = {fitted.fixed:.2f} s + {fitted.slowdown:.3f} x bits sent / rate; bytes on the line = "
          f"{fitted.overhead:.3f} x those of the tensors; update {fitted.update:.2f} s")  # fmt: skip


def main() -> None:
    (args,) = parse_arguments((LineArguments,), __doc__)
    if (reason := why_unavailable()) is not None:
        raise UserError(reason)
    if shutil.which("tc") is None:
        raise UserError("tc not found (package iproute2)")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C: end the peers first
    with torch.device("meta"):
        elements = build_model(read_config(MODEL), "").num_parameters()
    folder = Path(args.folder or tempfile.mkdtemp(prefix="lines-")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        measure(args, folder, elements)
    finally:
        report(read_points(folder / "points.jsonl"), elements)
        if args.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    run_script(main)
