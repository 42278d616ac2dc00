#!/usr/bin/env python3
"""Draw reference curves: the loss of a model by step, for one plain process and for collaborations of N peers.

benchmarks/reference_curve.py --folder curves --train_file my.txt
benchmarks/reference_curve.py --folder curves --train_file my.txt --peers 0,2,4 --steps 300 --batch 256

All curves have the same data, initial weights, optimizer, schedule and batch; only the order of the samples differs.
0 peers are transformers' Trainer alone (benchmarks/plain_trainer.py). N peers are a monitor, an evaluator and N
trainers on 127.0.0.1. A call that was interrupted continues: the Trainer from its checkpoint, a collaboration from the
one of its monitor. The results are curve.csv and curve.svg in --folder, with 30 points for each curve: the mean loss
on the samples since the point before, and the last validation loss up to it.

ALBERT-large on the whole of WikiText-103, as in the published runs; it takes GPUs, and has not been tried:

benchmarks/reference_curve.py --folder curves --train_file wiki.train.tokens --model albert-large-v2 \\
    --vocab_size 30000 --max_seq_length 512 --batch 4096 --micro_batch 4 --steps 125000 --learning_rate 0.00176 \\
    --warmup_steps 5000
"""

import argparse
import csv
import itertools
import os
import signal
import statistics
import sys
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot

from cotrain.data.manifest import Manifest
from tests.support.peers import LOCAL, Scripts, prepare_data, read_jsonl, wait_until

NUM_POINTS = 30  # of each curve
COLUMNS = ("peers", "step", "samples", "train_loss", "validation_loss")
END_SECONDS = 120.0  # for the evaluation of the last step


@dataclass(frozen=True)
class Point:
    """A step of a curve. `peers`: 0 for the plain Trainer."""

    peers: int
    step: int
    samples: int
    train_loss: float | None
    validation_loss: float | None


def shared_flags(args: argparse.Namespace, data: Path) -> list[object]:
    """Return the flags that a trainer, the monitor and the evaluator must agree on."""
    return [
        "--run_id", f"curve-{args.seed}", "--model_name_or_path", args.model, "--tokenizer_path", data / "tokenizer",
        "--learning_rate", args.learning_rate, "--warmup_steps", args.warmup_steps, "--total_steps", args.steps,
    ]  # fmt: skip


def trainer_flags(args: argparse.Namespace, data: Path) -> list[object]:
    return [
        *shared_flags(args, data), "--dataset_path", data / "dataset", "--target_batch_size", args.batch,
        "--per_device_train_batch_size", args.micro_batch, "--gradient_accumulation_steps", 1,
        "--dataloader_num_workers", 0, "--max_global_steps", args.steps, "--seed", args.seed,
    ]  # fmt: skip


def train_plain(args: argparse.Namespace, data: Path) -> None:
    folder = args.folder / "plain"
    if any(point.step >= args.steps for point in read_plain(args)):
        return
    folder.mkdir(exist_ok=True)
    with closing(Scripts(folder, data)) as scripts:
        script = scripts.start(
            "benchmarks/plain_trainer.py", *trainer_flags(args, data), "--output_dir", folder / "output", log="plain",
            env={"RECORD": str(folder / "record.jsonl"), "EVALUATION_STEPS": str(args.evaluation_steps)},
        )  # fmt: skip
        if script.wait(args.timeout):
            sys.exit(f"The plain trainer failed:\n{script.output}")


def read_plain(args: argparse.Namespace) -> list[Point]:
    events = read_jsonl(args.folder / "plain" / "record.jsonl")
    losses = {event["step"]: event["loss"] for event in events if event["event"] == "loss"}
    evaluations = {event["step"]: event["loss"] for event in events if event["event"] == "evaluation"}
    return [
        Point(0, step, step * args.batch, losses.get(step), evaluations.get(step))
        for step in sorted({*losses, *evaluations})
    ]


def train_together(args: argparse.Namespace, data: Path, num_peers: int) -> None:
    folder = args.folder / f"peers-{num_peers}"
    if any(point.step >= args.steps for point in read_together(args, num_peers)):
        return
    folder.mkdir(exist_ok=True)
    shared = [*shared_flags(args, data), "--host_maddrs", LOCAL]
    with closing(Scripts(folder, data)) as scripts:
        monitor = scripts.start(
            "run_training_monitor.py", *shared, "--output_dir", folder / "monitor", "--refresh_period", 1,
            "--save_checkpoint_step_interval", args.evaluation_steps, log="monitor",
        )  # fmt: skip
        joining = ["--initial_peers", monitor.address]
        evaluator = scripts.start(
            "run_evaluator.py", *shared, *joining, "--dataset_path", data / "dataset", "--output_dir",
            folder / "evaluator", "--evaluation_steps", args.evaluation_steps, "--refresh_period", 1,
            "--max_global_steps", args.steps, log="evaluator",
        )  # fmt: skip
        flags = [*trainer_flags(args, data), *joining, "--host_maddrs", LOCAL, "--target_group_size", num_peers]
        names = [f"trainer-{number}" for number in range(num_peers)]
        trainers = [scripts.start("run_trainer.py", *flags, "--output_dir", folder / name, log=name) for name in names]
        for trainer in trainers:
            if trainer.wait(args.timeout):
                sys.exit(f"A trainer failed:\n{trainer.output}")
        wait_until(
            lambda: any(point.step >= args.steps for point in read_together(args, num_peers)),
            END_SECONDS,
            "the monitor's report of the last step",
        )
        with suppress(AssertionError):  # it may find nobody who still offers the last state
            evaluator.wait(END_SECONDS)


def read_together(args: argparse.Namespace, num_peers: int) -> list[Point]:
    folder = args.folder / f"peers-{num_peers}"
    losses = {record["step"]: record["loss"] for record in read_jsonl(folder / "monitor" / "metrics.jsonl")}
    results = read_jsonl(folder / "evaluator" / "evaluations.jsonl")
    evaluations = {result["step"]: result["validation loss"] for result in results}
    return [
        Point(num_peers, step, step * args.batch, losses.get(step), evaluations.get(step))
        for step in sorted({*losses, *evaluations})
    ]


def thin_out(points: list[Point], steps: int) -> list[Point]:
    """Return NUM_POINTS points for each curve."""
    thinned, width = [], max(1, steps // NUM_POINTS)
    for peers, last in itertools.product(sorted({point.peers for point in points}), range(width, steps + 1, width)):
        part = [point for point in points if point.peers == peers and last - width < point.step <= last]
        losses = [point.train_loss for point in part if point.train_loss is not None]
        evaluations = [point.validation_loss for point in part if point.validation_loss is not None]
        if part:
            mean, newest = statistics.fmean(losses) if losses else None, evaluations[-1] if evaluations else None
            thinned.append(Point(peers, last, part[-1].samples, mean, newest))
    return thinned


def write_results(folder: Path, points: list[Point], title: str) -> None:
    with (folder / "curve.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for point in points:
            losses = ("" if loss is None else f"{loss:.4f}" for loss in (point.train_loss, point.validation_loss))
            writer.writerow([point.peers, point.step, point.samples, *losses])
    pyplot.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "curve"}
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for number, peers in enumerate(sorted({point.peers for point in points})):
        name, color = "one process" if peers == 0 else f"{peers} peers", f"C{number}"
        for kind, style in (("train_loss", {"alpha": 0.4}), ("validation_loss", {"linestyle": "--"})):
            curve = [(point.step, getattr(point, kind)) for point in points if point.peers == peers]
            label = f"{name}, {kind.replace('_', ' ')}"
            axes.plot(
                *zip(*((x, y) for x, y in curve if y is not None), strict=True), color=color, label=label, **style
            )
    axes.set(xlabel="step", ylabel="loss")
    axes.set_title(title, fontsize=8)
    axes.legend()
    figure.tight_layout()
    figure.savefig(folder / "curve.svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="for data, checkpoints and results")
    parser.add_argument("--train_file", type=Path, help="text, UTF-8; default: Python's documentation topics")
    parser.add_argument("--model", default="albert-tiny", help="default: albert-tiny")
    parser.add_argument("--vocab_size", type=int, default=4000, help="default: 4000")
    parser.add_argument("--max_seq_length", type=int, default=64, help="default: 64")
    parser.add_argument("--peers", default="0,2", help="numbers of peers; 0: one plain process. Default: 0,2")
    parser.add_argument("--batch", type=int, default=256, help="samples of a step; default: 256")
    parser.add_argument("--micro_batch", type=int, default=16, help="default: 16")
    parser.add_argument("--steps", type=int, default=300, help="default: 300")
    parser.add_argument("--evaluation_steps", type=int, default=25, help="steps between evaluations; default: 25")
    parser.add_argument("--learning_rate", type=float, default=0.005, help="default: 0.005")
    parser.add_argument("--warmup_steps", type=int, default=30, help="default: 30")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=86_400.0, help="seconds for each curve; default: a day")
    args = parser.parse_args()
    args.folder = args.folder.absolute()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the peers share this machine
    data, curves = args.folder / "data", [int(number) for number in args.peers.split(",")]
    if not (data / "config.json").exists():
        flags = ("--max_seq_length", args.max_seq_length, "--seed", args.seed)
        prepare_data(data, "mlm_sop", args.vocab_size, *flags, train_file=args.train_file)
    manifest = Manifest.load(data / "dataset")
    title = (
        f"{Path(args.model).stem}, {manifest.source}, {manifest.max_seq_length} tokens, batch {args.batch}, "
        f"seed {args.seed}"
    )
    print(title)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, which stops the processes
    try:
        for number in curves:
            train_together(args, data, number) if number else train_plain(args, data)
    except KeyboardInterrupt:
        print("Interrupted: call it again to continue")
    finally:
        points = [
            point for number in curves for point in (read_together(args, number) if number else read_plain(args))
        ]
        write_results(args.folder, thin_out(points, args.steps), title)
    evaluated = [point for point in points if point.validation_loss is not None]
    print("\n".join(f"{point.peers} peers, step {point.step}: {point.validation_loss:.4f}" for point in evaluated))


if __name__ == "__main__":
    main()
