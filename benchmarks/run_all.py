#!/usr/bin/env python3
"""Run the benchmarks one after the other, and write what they print to benchmarks/RESULTS.md.

benchmarks/run_all.py              # a quick subset, at most 20 minutes: make bench
benchmarks/run_all.py --all        # all of them, some hours: make bench-all
benchmarks/run_all.py --only preparation,packing --text wiki.test.tokens

Nothing else should run on the machine. Of a benchmark that fails or takes too long, the end of the output is shown.
"""

import argparse
import datetime
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import psutil
import torch

from lib.data.corpus import open_sample

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "RESULTS.md"
QUICK_TIMEOUT, TIMEOUT = 480.0, 14_400.0  # seconds for one benchmark
GRACE_SECONDS = 60.0  # after an interrupt, for a benchmark to stop its processes


@dataclass(frozen=True)
class Benchmark:
    """A benchmark and its arguments; "{text}" is the text file, "{folder}" a folder for files.

    :param quick: arguments in the quick subset; None if it is not part of that
    :param full: arguments otherwise
    """

    name: str
    title: str
    quick: str | None
    full: str
    needs_root: bool = False
    needs_gpu: bool = False

    def reason_to_skip(self) -> str | None:
        if self.needs_root and os.geteuid() != 0:
            return "needs root"
        if self.needs_gpu and not torch.cuda.is_available():
            return "needs a GPU"
        return None


BENCHMARKS = [
    Benchmark("preparation", "Data preparation", "--text {text} --repeat 1", "--text {text} --megabytes 19,100"),
    Benchmark("preparation", "Memory of the preparation", None, "--text {text} --memory --megabytes 20,200,2000"),
    Benchmark("packing", "Packing", "--text {text}", "--text {text}"),
    Benchmark("startup", "Start-up", "--repeat 1", "--imports"),
    Benchmark("overhead", "One trainer against the plain Trainer", None, "--trainers 1"),
    Benchmark(
        "overhead",
        "Two trainers against two plain Trainers",
        "--trainers 2 --threads 1 --step_seconds 15 --steps 3 --repeat 1",
        "--trainers 2 --threads 1",
    ),
    Benchmark(
        "overhead",
        "Two trainers of ALBERT-large",
        None,
        "--trainers 2 --threads 1 --model configs/albert-large-v2.json --micro_batch 1 --samples 6 --step_seconds 40 "
        "--steps 2 --repeat 1",
    ),
    Benchmark("monitor_scale", "The monitor with many trainers", "--trainers 10,100 --refreshes 10", ""),
    Benchmark("rounds", "Rounds of equal trainers", "--calm --minutes 2", "--calm"),
    Benchmark("rounds", "Rounds of unequal trainers", None, ""),
    Benchmark("swarm", "Swarms", None, "--peers 2 4 8 16 --churn 0 0.1"),
    Benchmark("drift", "Drift of the parameters", None, ""),
    Benchmark("home_lines", "Home lines", None, "", needs_root=True),
    Benchmark("low_communication", "Local updates", None, "--train_file {text} --folder {folder}/low_communication"),
    Benchmark("reference_curve", "Reference curve", None, "--train_file {text} --folder {folder}/curves"),
    Benchmark("gpu", "GPU", None, "", needs_gpu=True),
]


def run(benchmark: Benchmark, arguments: str, text: Path, folder: Path, timeout: float) -> str:
    """Run a benchmark; return its section of RESULTS.md, which names no path of this machine."""
    shown_command = f"benchmarks/{benchmark.name}.py {arguments.format(text='TEXT', folder='FOLDER')}".strip()
    command = [f"benchmarks/{benchmark.name}.py", *arguments.format(text=text, folder=folder).split()]
    print(f"\n== {benchmark.title}: {shown_command}", flush=True)
    began, outcome = time.monotonic(), ""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            if process.wait(timeout):
                outcome = f"; it failed with exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            outcome = f"; it was ended after {timeout / 60:.0f} minutes"
        finally:
            stop(process)
        output.seek(0)
        printed = output.read()
    seconds = time.monotonic() - began
    lines = [line.rsplit("\r", 1)[-1] for line in printed.splitlines()]  # of a progress bar, the last state
    shown = "\n".join(lines[-25:] if outcome else lines)
    print(shown, flush=True)
    return f"## {benchmark.title}\n\n`{shown_command}`, {seconds:.0f} s{outcome}\n\n```\n{shown}\n```\n"


def stop(process: subprocess.Popen) -> None:
    """End a benchmark that still runs, and what it has started."""
    if process.poll() is None:
        children = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
        for child in children:
            if child.is_running():
                child.kill()


def describe_machine() -> str:
    processors = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    model = processors[0].split(":", 1)[1].strip() if processors else platform.processor()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    return (
        f"{datetime.date.today()}, commit {commit.strip() or 'unknown'}: {psutil.cpu_count()} cores ({model}), "
        f"{psutil.virtual_memory().total / 2**30:.0f} GiB of memory, {gpu}; Python {platform.python_version()}, torch "
        f"{torch.__version__}"
    )


def main() -> None:
    names = list(dict.fromkeys(benchmark.name for benchmark in BENCHMARKS))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="run all benchmarks, not only the quick subset")
    parser.add_argument("--only", type=lambda text: text.split(","), help=f"run these: {', '.join(names)}")
    parser.add_argument("--text", type=Path, help="text, UTF-8; default: Python's documentation topics")
    parser.add_argument("--folder", type=Path, help="keep long results here; default: a temporary folder")
    parser.add_argument("--output", type=Path, default=RESULTS, help="default: benchmarks/RESULTS.md")
    args = parser.parse_args()
    if unknown := set(args.only or ()) - set(names):
        parser.error(f"--only: unknown: {', '.join(sorted(unknown))}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # peers share the machine
    head = f"# Results of the benchmarks\n\nWritten by `make bench`, as it came out. {describe_machine()}\n"
    sections = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        text = args.text or Path(temporary) / "sample.txt"
        if args.text is None:
            text.write_text("\n".join(open_sample().rows["train"]()), encoding="utf-8")
        for benchmark in BENCHMARKS:
            arguments = benchmark.full if args.all else benchmark.quick
            if arguments is None or (args.only and benchmark.name not in args.only):
                continue
            if reason := benchmark.reason_to_skip():
                sections.append(f"## {benchmark.title}\n\nNot run: {reason}\n")
                continue
            timeout = TIMEOUT if args.all else QUICK_TIMEOUT
            sections.append(run(benchmark, arguments, text.absolute(), folder.absolute(), timeout))
            args.output.write_text("\n".join([head, *sections]), encoding="utf-8")


if __name__ == "__main__":
    main()
