#!/usr/bin/env python3
"""Compare the speed of trainers of a run with that of plain trainers that compute the same.

benchmarks/overhead.py --train_file my.txt
benchmarks/overhead.py --trainers 2 --baseline 6b289d5

Runs in turn, --repeat times: N processes of transformers' Trainer with the same model, data, micro-batch, optimizer
and batch (plain_trainer.py); N trainers of a run, of --baseline if given; N trainers of this commit. There is no
monitor, the trainers have default settings, and they wait for nothing: their speeds differ by what a run costs.
Needs no network.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.low_communication import prepare_data
from benchmarks.process_usage import PARTS, measure_cpu
from benchmarks.round_records import PeerRecords, read_local_records, read_round_log
from benchmarks.rounds import checked_out
from tests.support.peers import LOCAL, ROOT, Script

MODEL = {
    "model_type": "albert", "embedding_size": 128, "hidden_size": 256, "intermediate_size": 1024,
    "num_hidden_layers": 4, "num_attention_heads": 4,
}  # fmt: skip
VOCAB_SIZE = 1000  # more than the sample text has cannot be trained
SEQ_LENGTH = 128
START_SECONDS = 180.0
PATIENCE = 4.0  # timeout of a run, in expected durations
CALIBRATION_STEPS = 8

LEGEND = """\
samples/s   of all trainers together, from the end of the start-up to the last global step; medians
ratio       to the plain trainers of the same repetition; median, least and most
main        CPU milliseconds of the main process for each sample: mean over the trainers, median over the repetitions
DHT ...     CPU milliseconds of each other process of a trainer for each second
quiet       the ratio to expect on a quiet machine where each trainer has the cores of its threads: that of the CPU
            time of a sample, times what the other processes leave of a core. Other load hardly changes it"""


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
    """One process under measurement, and what it has recorded.

    :param is_plain: whether it is plain_trainer.py
    """

    script: Script
    folder: Path
    is_plain: bool
    usage: dict[int, Counter] = field(default_factory=dict)  # number of completed steps -> CPU seconds so far

    def steps(self) -> list[tuple[float, int]]:
        """Return time and samples of the completed global steps."""
        peer = PeerRecords("")
        if self.is_plain:
            read_local_records(peer, self.folder / "local.jsonl")
            return [(moment, samples) for moment, samples, _ in peer.local_steps]
        read_round_log(peer, self.folder / "rounds.jsonl")
        rounds = sorted(peer.rounds.values(), key=lambda round_: round_.step)
        # The samples of a missed round count in the next one.
        return [(round_.begin, round_.samples) for round_ in rounds if round_.outcome != "missed"]

    def observe(self) -> int:
        """Return the number of completed steps, and note the CPU time at each.

        :raises AssertionError: if the process has ended
        """
        family = self.script.family()
        assert self.script.process.poll() is None, self.script.output
        number = len(self.steps())
        if number not in self.usage:
            self.usage[number] = measure_cpu(self.script.process.pid, family)
        return number

    def outcome(self, skipped: int, last: int) -> Outcome:
        """Return the figures from the end of step `skipped` to that of step `last`, or of the next ones observed."""
        first, last = (min(number for number in self.usage if number >= limit) for limit in (skipped, last))
        steps = self.steps()[first - 1 : last]
        samples = sum(samples for _, samples in steps[1:])
        seconds = steps[-1][0] - steps[0][0]
        used = self.usage[last] - self.usage[first]
        main = used.pop("main") / samples
        return Outcome(samples / seconds, main, Counter({part: cpu / seconds for part, cpu in used.items()}))


class Bench:
    """Runs one side after the other.

    :param folder: for data, logs and outputs
    :param share: samples that a trainer computes for a global step; set by `calibrate`, unless --samples is given
    """

    def __init__(self, folder: Path, args: argparse.Namespace):
        self.folder, self.args = folder, args
        self.share = args.samples or 16 * args.micro_batch
        self.num_runs = 0

    def calibrate(self) -> None:
        """Set the samples of a step to what plain trainers compute in the wanted time."""
        rate = self.play(None, skipped=2, steps=CALIBRATION_STEPS).rate / self.args.trainers
        micro_batches = max(1, round(rate * self.args.step_seconds / self.args.micro_batch))
        self.share = micro_batches * self.args.micro_batch

    def play(self, root: Path | None, skipped: int, steps: int) -> Outcome:
        """Run trainers of one kind.

        :param root: folder with the scripts of a commit; None: plain trainers
        :param skipped: global steps of the start-up
        :param steps: global steps to measure
        """
        self.num_runs += 1
        trainers: list[Trainer] = []
        try:
            for number in range(self.args.trainers):
                trainers.append(self._start(root, number, trainers))
            last = skipped + steps
            seconds = START_SECONDS + PATIENCE * last * self.args.step_seconds
            deadline = time.monotonic() + seconds
            while min([trainer.observe() for trainer in trainers]) < last:
                assert time.monotonic() < deadline, f"not within {seconds:.0f} s:\n{trainers[0].script.output}"
                time.sleep(0.25)
        finally:
            _stop(trainers)
        outcomes = [trainer.outcome(skipped, last) for trainer in trainers]
        others = sum((outcome.others for outcome in outcomes), Counter())
        return Outcome(
            rate=sum(outcome.rate for outcome in outcomes),
            main=statistics.fmean(outcome.main for outcome in outcomes),
            others=Counter({part: cpu / len(outcomes) for part, cpu in others.items()}),
        )

    def _start(self, root: Path | None, number: int, others: Sequence[Trainer]) -> Trainer:
        folder = self.folder / f"run-{self.num_runs}" / str(number)
        folder.mkdir(parents=True)
        data, is_plain = self.folder / "data", root is None
        flags = [
            "--run_id", "overhead", "--tokenizer_path", data / "tokenizer", "--dataset_path", data / "dataset",
            "--model_name_or_path", data / "config.json", "--output_dir", folder, "--use_cpu", "--disable_tqdm",
            "--per_device_train_batch_size", self.args.micro_batch, "--gradient_accumulation_steps", 1,
            "--dataloader_num_workers", 0, "--save_steps", 10**6, "--seed", number,
            "--target_batch_size", self.share if is_plain else self.share * self.args.trainers,
        ]  # fmt: skip
        if not is_plain:
            flags += ["--host_maddrs", LOCAL]
            flags += ["--initial_peers", others[0].script.address] if others else []
        name = ROOT / "benchmarks" / "plain_trainer.py" if is_plain else root / "run_trainer.py"
        script = Script(
            str(name), *flags, log=folder.with_suffix(".log"),
            env={"OMP_NUM_THREADS": str(self.args.threads), "RECORD": str(folder / "local.jsonl")},
        )  # fmt: skip
        return Trainer(script, folder, is_plain)


def _stop(trainers: Sequence[Trainer]) -> None:
    for trainer in trainers:
        trainer.script.family()
        with contextlib.suppress(ProcessLookupError):
            trainer.script.process.terminate()
    for trainer in trainers:
        with contextlib.suppress(AssertionError):
            trainer.script.wait(20)
        trainer.script.kill_all()


def print_results(outcomes: dict[str, list[Outcome]]) -> None:
    """Print the table."""
    print(f"\n{'':<14}{'samples/s':>10}{'ratio':>8}{'(least, most)':>17}{'quiet':>8}", end="")
    print("".join(f"{part:>16}" for part in PARTS))
    for title, runs in outcomes.items():
        pairs = list(zip(runs, outcomes["plain"], strict=False))
        if not pairs:
            continue
        ratios = [run.rate / plain.rate for run, plain in pairs]
        quiet = statistics.median(run.quiet_ratio(plain) for run, plain in pairs)
        rate = statistics.median(run.rate for run in runs)
        print(f"{title:<14}{rate:>10.2f}{statistics.median(ratios):>8.3f}", end="")
        print(f"{f'({min(ratios):.3f}, {max(ratios):.3f})':>17}{quiet:>8.3f}", end="")
        print(f"{1000 * statistics.median(run.main for run in runs):>16.2f}", end="")
        others = [1000 * statistics.median(run.others[part] for run in runs) for part in PARTS[1:]]
        print("".join(f"{milliseconds:>16.2f}" for milliseconds in others))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainers", type=int, default=1, help="trainers at a time")
    parser.add_argument("--threads", type=int, help="threads of a trainer; default: the cores divided by the trainers")
    parser.add_argument("--step_seconds", type=float, default=20.0, help="target seconds of a global step")
    parser.add_argument("--steps", type=int, default=4, help="global steps to measure in each run")
    parser.add_argument("--repeat", type=int, default=3, help="number of repetitions")
    parser.add_argument("--micro_batch", type=int, default=8, help="samples of a micro-batch, a local step")
    parser.add_argument("--samples", type=int, help="of a trainer in a global step, instead of --step_seconds")
    parser.add_argument("--model", type=Path, help="configuration, JSON; default: an ALBERT of 4 layers, 256 wide")
    parser.add_argument("--train_file", type=Path, help="text to train on; default: a small sample")
    parser.add_argument("--baseline", help="commit to compare with; default: no comparison")
    parser.add_argument("--folder", type=Path, help="keep the data and the logs in this folder")
    args = parser.parse_args()
    args.threads = args.threads or max(1, (os.cpu_count() or 1) // args.trainers)

    folder = args.folder or Path(tempfile.mkdtemp(prefix="overhead-"))
    outcomes: dict[str, list[Outcome]] = {}
    try:
        model = MODEL if args.model is None else json.loads(args.model.read_text())
        prepare_data(folder / "data", args.train_file, model, VOCAB_SIZE, SEQ_LENGTH)
        with contextlib.ExitStack() as stack:
            roots: dict[str, Path | None] = {"plain": None}
            if args.baseline is not None:
                roots[args.baseline] = stack.enter_context(checked_out(args.baseline, folder / "baseline"))
            roots["this commit"] = ROOT
            outcomes = {title: [] for title in roots}
            bench = Bench(folder, args)
            if args.samples is None:
                bench.calibrate()
            for _ in range(args.repeat):
                for title, root in roots.items():
                    outcome = bench.play(root, skipped=1 if args.trainers == 1 else 2, steps=args.steps)
                    outcomes[title].append(outcome)
                    print(f"{title}: {outcome.rate:.2f} samples/s, load {os.getloadavg()[0]:.1f}", flush=True)
    finally:
        if outcomes:
            print_results(outcomes)
            print(f"\n{LEGEND}\n{args.trainers} trainers with {args.threads} threads on {os.cpu_count()} cores")
        if args.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
