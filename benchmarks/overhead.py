#!/usr/bin/env python3
"""Compare the speed of trainers of a run with that of plain trainers that compute the same.

benchmarks/overhead.py --train_file my.txt

Runs in turn, --repeat times: N processes of transformers' Trainer with the same model, data, micro-batch, optimizer
and batch (plain_trainer.py); N trainers of a run. There is no monitor, the trainers have default settings, and they
wait for nothing: their speeds differ by what a run costs. Needs no network.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.process_usage import PARTS, measure_cpu
from benchmarks.round_records import read_records
from tests.support.peers import LOCAL, Script, prepare_data

MODEL = {
    "model_type": "albert", "embedding_size": 128, "hidden_size": 256, "intermediate_size": 1024,
    "num_hidden_layers": 4, "num_attention_heads": 4,
}  # fmt: skip
VOCAB_SIZE = 1000  # more than the sample text has cannot be trained
SEQ_LENGTH = 128
TIMEOUT = 3600.0  # of a run, in seconds
SKIPPED_STEPS = 2  # global steps of the start-up

LEGEND = """\
samples/s   of all trainers together, from the end of the start-up to the last global step; medians
ratio       to the plain trainers of the same repetition; median, least and most
main        CPU milliseconds of the main process for each sample: mean over the trainers, median over the repetitions
DHT ...     CPU milliseconds of each other process of a trainer for each second
quiet       the ratio to expect on a quiet machine where each trainer has the cores of its threads: that of the CPU
            time of a sample, times what the other processes leave of a core. Threads that wait for others count as
            busy, so that only one thread for each trainer gives an exact figure"""


@dataclass
class Outcome:
    """The figures of one run.

    :param rate: samples per second of all trainers
    :param main: CPU seconds of the main process per sample
    :param others: CPU seconds of the other processes per second, by part
    """

    rate: float
    main: float
    others: Counter

    def quiet_ratio(self, plain: "Outcome") -> float:
        return plain.main / self.main * (1 - self.others.total())


@dataclass
class Trainer:
    """One process under measurement.

    :param is_plain: whether it is plain_trainer.py
    :param usage: number of completed steps -> CPU seconds so far, by part
    """

    script: Script
    folder: Path
    is_plain: bool
    usage: dict[int, Counter] = field(default_factory=dict)

    def steps(self) -> list[tuple[float, int]]:
        """Return time and samples of the completed global steps."""
        records = read_records("", self.folder)
        if self.is_plain:
            return [(moment, samples) for moment, samples, _ in records.local_steps]
        # The samples of a missed round count in the next one.
        rounds = [records.rounds[step] for step in sorted(records.rounds)]
        return [(entry["begin"], entry["samples"]) for entry in rounds if entry["outcome"] != "missed"]

    def observe(self) -> int:
        """Return the number of completed steps, and keep the CPU time at each.

        :raises AssertionError: if the process has ended
        """
        assert self.script.process.poll() is None, self.script.output
        number = len(self.steps())
        if number not in self.usage:
            self.usage[number] = measure_cpu(self.script.process.pid, self.script.family())
        return number

    def outcome(self, last: int) -> Outcome:
        """Return the figures from the end of the start-up to that of step `last`, or of the next ones observed."""
        first, last = (min(number for number in self.usage if number >= limit) for limit in (SKIPPED_STEPS, last))
        steps = self.steps()[first - 1 : last]
        samples, seconds = sum(samples for _, samples in steps[1:]), steps[-1][0] - steps[0][0]
        used = self.usage[last] - self.usage[first]
        main = used.pop("main") / samples
        return Outcome(samples / seconds, main, Counter({part: cpu / seconds for part, cpu in used.items()}))


def play(args: argparse.Namespace, folder: Path, data: Path, is_plain: bool) -> Outcome:
    """Run trainers of one kind in a new folder."""
    trainers: list[Trainer] = []
    last, deadline = SKIPPED_STEPS + args.steps, time.monotonic() + TIMEOUT
    try:
        for number in range(args.trainers):
            address = trainers[0].script.address if trainers and not is_plain else None
            trainers.append(start(args, folder / str(number), data, is_plain, address))
        while min(trainer.observe() for trainer in trainers) < last:
            assert time.monotonic() < deadline, f"not within {TIMEOUT:.0f} s:\n{trainers[0].script.output}"
            time.sleep(0.25)
    finally:
        for trainer in trainers:
            trainer.script.kill_all()
    outcomes = [trainer.outcome(last) for trainer in trainers]
    others = sum((outcome.others for outcome in outcomes), Counter())
    return Outcome(
        rate=sum(outcome.rate for outcome in outcomes),
        main=statistics.fmean(outcome.main for outcome in outcomes),
        others=Counter({part: cpu / len(outcomes) for part, cpu in others.items()}),
    )


def start(args: argparse.Namespace, folder: Path, data: Path, is_plain: bool, address: str | None) -> Trainer:
    folder.mkdir(parents=True)
    flags = [
        "--run_id", "overhead", "--tokenizer_path", data / "tokenizer", "--dataset_path", data / "dataset",
        "--model_name_or_path", data / "config.json", "--output_dir", folder, "--use_cpu", "--disable_tqdm",
        "--per_device_train_batch_size", args.micro_batch, "--gradient_accumulation_steps", 1,
        "--dataloader_num_workers", 0, "--save_steps", 10**6, "--seed", folder.name,
        "--target_batch_size", args.samples * (1 if is_plain else args.trainers),
    ]  # fmt: skip
    if not is_plain:
        flags += ["--host_maddrs", LOCAL, *(["--initial_peers", address] if address else [])]
    env = {"OMP_NUM_THREADS": str(args.threads), "RECORD": str(folder / "record.jsonl")}
    name = "benchmarks/plain_trainer.py" if is_plain else "run_trainer.py"
    return Trainer(Script(name, *flags, log=folder.with_suffix(".log"), env=env), folder, is_plain)


def print_results(outcomes: dict[str, list[Outcome]]) -> None:
    print(f"\n{'':<14}{'samples/s':>10}{'ratio':>8}{'(least, most)':>17}{'quiet':>8}", end="")
    print("".join(f"{part:>16}" for part in PARTS))
    for title, runs in outcomes.items():
        pairs = list(zip(runs, outcomes["plain"], strict=True))
        ratios = [run.rate / plain.rate for run, plain in pairs]
        quiet = statistics.median(run.quiet_ratio(plain) for run, plain in pairs)
        print(
            f"{title:<14}{statistics.median(run.rate for run in runs):>10.2f}{statistics.median(ratios):>8.3f}", end=""
        )
        print(f"{f'({min(ratios):.3f}, {max(ratios):.3f})':>17}{quiet:>8.3f}", end="")
        print(f"{1000 * statistics.median(run.main for run in runs):>16.2f}", end="")
        others = [1000 * statistics.median(run.others[part] for run in runs) for part in PARTS[1:]]
        print("".join(f"{milliseconds:>16.2f}" for milliseconds in others))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainers", type=int, default=2, help="trainers at a time")
    parser.add_argument("--threads", type=int, default=1, help="threads of a trainer")
    parser.add_argument("--samples", type=int, default=400, help="of a trainer in a global step; aim at 15 s or more")
    parser.add_argument("--steps", type=int, default=4, help="global steps to measure in each run")
    parser.add_argument("--repeat", type=int, default=3, help="number of repetitions")
    parser.add_argument("--micro_batch", type=int, default=8, help="samples of a micro-batch, a local step")
    parser.add_argument("--model", type=Path, help="configuration, JSON; default: an ALBERT of 4 layers, 256 wide")
    parser.add_argument("--train_file", type=Path, help="text to train on; default: a small sample")
    args = parser.parse_args()
    outcomes: dict[str, list[Outcome]] = {"plain": [], "in a run": []}
    with tempfile.TemporaryDirectory(prefix="overhead-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        flags = ("--max_seq_length", SEQ_LENGTH)
        prepare_data(folder / "data", "mlm_sop", VOCAB_SIZE, *flags, train_file=args.train_file)
        model = MODEL if args.model is None else json.loads(args.model.read_text(encoding="utf-8"))
        (folder / "data" / "config.json").write_text(json.dumps(model), encoding="utf-8")
        with contextlib.suppress(KeyboardInterrupt):
            for number in range(args.repeat):
                for title, runs in outcomes.items():
                    runs.append(play(args, folder / f"{title}-{number}", folder / "data", title == "plain"))
                    print(f"{title}: {runs[-1].rate:.2f} samples/s, load {os.getloadavg()[0]:.1f}", flush=True)
    print_results(outcomes)
    print(f"\n{LEGEND}\n{args.trainers} trainers with {args.threads} threads on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
