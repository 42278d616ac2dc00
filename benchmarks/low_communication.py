#!/usr/bin/env python3
"""Compare the loss of data-parallel training with that of local updates (DiLoCo), with simulated peers.

benchmarks/low_communication.py --train_file my.txt --folder results
benchmarks/low_communication.py --train_file my.txt --folder results --points dp h32 --tune

The local and global steps are those of the trainers, in one process on one core; nothing is sent. All runs have the
same samples, validation text and model. Each finished run is a line of results.jsonl in --folder, and the next session
continues from there. --tune sweeps the learning rates of the points with the first seed; later sessions use the best,
and those of 4 peers also for other numbers of peers.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from tqdm.auto import tqdm

from arguments import DatasetArguments
from benchmarks.local_updates_simulation import SPEEDS, Budget, Simulation, Variant
from cotrain.data.manifest import Manifest
from cotrain.monitoring.evaluation import Evaluator
from cotrain.options import NOTHING
from cotrain.settings import Hyperparameters
from cotrain.tasks.task_loading import load_task
from peerstep.patches import apply_patches
from tests.support.models import build_model
from tests.support.peers import prepare_data, read_jsonl

# A causal model predicts each token: its loss falls within some thousand local steps, unlike that of a masked one
MODEL = {
    "model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64,
    "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,  # as simulated; with 0.1 real peers end 2 % higher
}  # fmt: skip
VOCAB_SIZE = 1000
SEQ_LENGTH = 64
MICRO_BATCH = 4
VALIDATION_SAMPLES = 400
OUTER_LEARNING_RATE = 0.7
OUTER_MOMENTUM = 0.9  # that of DiLoCo; --tune also tries others
LEARNING_RATE_FACTORS = (1.0, 0.5, 2.0)
# Learning rate and momentum of the outer optimizer. With two peers, 8 local steps and 4,096 samples, the loss was 5.74
# with DiLoCo's 0.7 and 0.9; 5.89 with a quarter of the inner learning rate; 5.16 with 0.1 and 0.9; 4.91 with
# 1.0 and no momentum, which is plain averaging. That of data parallel was 4.85.
OUTER_RATES = ((0.1, 0.9), (0.7, 0.5), (1.0, 0.1))
MAX_RATE_FACTOR = 4.0  # of data-parallel batches; the square-root rule ends there

POINTS = {
    "dp": Variant(0, local_updates=False),
    "h8": Variant(0, 8),
    "h32": Variant(0, 32),
    "h128": Variant(0, 128),
}
SPECIAL_POINTS = {
    "h32-late2": Variant(0, 32, delay=2),
    "h32-late32": Variant(0, 32, delay=32),
    "h32-8bit": Variant(0, 32, compression="blockwise8"),
    "h32-4bit": Variant(0, 32, compression="blockwise4"),
    "h32-topk": Variant(0, 32, compression="topk"),
    "h32-missing": Variant(0, 32, missing=0.5),
    "dp-h32": Variant(0, 32, local_updates=False),
    "h8-warmup": Variant(0, 8, warmup=0.1),
    "h8-growing": Variant(0, 8, growth=0.25),
}
SPECIAL_PEERS = 4

LEGEND = """\
dp           data parallel: an average of gradients after one local step per peer
hN           local updates: an average after N local steps per peer, weighted by samples
lateN        the result of a round arrives N local steps after the round has begun; the local steps continue
8bit, 4bit   pseudo-gradients as blockwise8, blockwise4; likewise topk
missing      each peer misses each round with probability 0.5
warmup       plain averages after each local step, for the first tenth of the samples
growing      rounds grow from one local step to N within the first quarter of the samples
dp-h32       data parallel with the rounds of h32: equal communication, and batches 32 times as large
rates        peak learning rate of the inner optimizer, or of data parallel; learning rate and momentum
             of the outer optimizer
difference   of the final validation loss to that of dp with as many peers: mean and standard deviation of the seeds"""


@dataclass(frozen=True)
class Run:
    """One line of the results, without the outcome."""

    setup: str
    point: str
    peers: int
    seed: int
    learning_rate: float
    outer_learning_rate: float
    outer_momentum: float = OUTER_MOMENTUM

    @property
    def variant(self) -> Variant:
        return replace({**POINTS, **SPECIAL_POINTS}[self.point], peers=self.peers)


class TextTask:
    """A small language model and the prepared text. Only `make_batch` may be random; it uses torch's generator."""

    def __init__(self, folder: Path):
        dataset, tokenizer_path = folder / "dataset", folder / "tokenizer"
        manifest = Manifest.load(dataset)
        arguments = DatasetArguments(
            model_name_or_path=str(folder / "config.json"),
            tokenizer_path=str(tokenizer_path),
            dataset_path=str(dataset),
        )
        self.task = load_task(arguments, NOTHING)
        self.config = self.task.config
        self._samples = list(self.task.load_samples("train"))
        options = {"max_samples": VALIDATION_SAMPLES, "batch_size": 50, "use_cpu": True, "disable_tqdm": True}
        self._evaluator = Evaluator(self.task, **options)
        self.num_samples = len(self._samples)
        num_parameters = sum(parameter.numel() for parameter in build_model(self.config, "0").parameters())
        self.description = (
            f"{self.config.model_type} with {num_parameters:,} parameters, {self.config.vocab_size} tokens in the "
            f"vocabulary, samples of {manifest.max_seq_length} tokens: {self.num_samples:,} to train on, "
            f"{self._evaluator.num_samples} to evaluate"
        )

    def build_model(self, seed: int) -> torch.nn.Module:
        return build_model(self.config, str(seed))

    def make_batch(self, indices: Iterable[int]) -> dict[str, torch.Tensor]:
        return self.task.collate([self._samples[index] for index in indices])

    def evaluate(self, model: torch.nn.Module) -> float:
        return self._evaluator.evaluate(model, step=0)["loss"]


class Results:
    """Finished runs, one JSON object a line in a file."""

    def __init__(self, path: Path):
        self.path = path
        self.lines: dict[Run, dict] = {}
        for line in read_jsonl(path):
            self.lines[Run(**line["run"])] = line
        if path.exists() and not path.read_text(encoding="utf-8").endswith(
            "\n"
        ):  # an interrupted session has begun a line
            path.write_text("".join(json.dumps(line) + "\n" for line in self.lines.values()), encoding="utf-8")

    def add(self, run: Run, outcome: dict) -> None:
        line = json.dumps({"run": asdict(run), **outcome})
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        self.lines[run] = json.loads(line)  # its keys are strings, as in a resumed session

    def loss(self, run: Run) -> float:
        """Return the final loss of a run; infinity if it diverged."""
        loss = list(self.lines[run]["evaluations"].values())[-1]
        return loss if math.isfinite(loss) else math.inf

    def tuned(self, run: Run) -> Run:
        """Return the run with the learning rates of least loss among those tried, its own if there are none.

        All rates are tried with the first seed, so that seed decides. What was not tuned itself has the rates of the
        same point with SPECIAL_PEERS peers, a variant of h32 those of h32. Those of data parallel depend on the batch.
        """
        similar = [run]
        if run.variant.local_updates:
            similar.append(replace(run, peers=SPECIAL_PEERS))
        if run.point.startswith("h32-"):
            similar += [replace(other, point="h32") for other in similar]
        for other in similar:
            tried = self._tried(other)
            is_tuned = len({replace(candidate, seed=0) for candidate in tried}) > 1
            if is_tuned or (tried and other.point != run.point):
                best = min(tried, key=lambda candidate: (candidate.seed, self.loss(candidate)))
                return replace(best, point=run.point, peers=run.peers, seed=run.seed)
        return run

    def _tried(self, run: Run) -> list[Run]:
        key = (run.setup, run.point, run.peers)
        return [other for other in self.lines if (other.setup, other.point, other.peers) == key]


def plan_runs(args: argparse.Namespace, setup: str, budget: Budget) -> list[Run]:
    """Return the runs of a session: by seed, the special points last."""
    special_peers = SPECIAL_PEERS if SPECIAL_PEERS in args.peers else args.peers[0]
    grid = [*product(args.peers, POINTS), *product([special_peers], SPECIAL_POINTS)]
    runs = []
    for seed, (peers, point) in product(args.seeds, grid):
        if args.points is None or point in args.points:
            outer_rate, momentum = args.outer or (OUTER_LEARNING_RATE, OUTER_MOMENTUM)
            run = Run(setup, point, peers, seed, args.learning_rate, outer_rate, momentum)
            if not run.variant.local_updates:
                factor = math.sqrt(budget.target_batch_size(run.variant) / budget.micro_batch)
                run = replace(run, learning_rate=args.learning_rate * min(MAX_RATE_FACTOR, factor))
            runs.append(run)
    return runs


def sweep(run: Run) -> list[Run]:
    """Return the runs that tune a run: first its learning rate, then the rate and momentum of the outer optimizer."""
    runs = [replace(run, learning_rate=run.learning_rate * factor) for factor in LEARNING_RATE_FACTORS]
    if run.variant.local_updates:
        runs += [replace(run, outer_learning_rate=rate, outer_momentum=momentum) for rate, momentum in OUTER_RATES]
    return runs


def build_arguments(run: Run, budget: Budget, optimizer: str) -> Hyperparameters:
    return Hyperparameters(
        optimizer=optimizer,
        learning_rate=run.learning_rate,
        adam_epsilon=1e-6 if optimizer == "lamb" else 1e-8,
        local_updates=run.variant.local_updates,
        outer_learning_rate=run.outer_learning_rate,
        outer_momentum=run.outer_momentum,
        **budget.schedule(run.variant),
    )


def play(runs: list[Run], task: TextTask, budget: Budget, optimizer: str, results: Results) -> None:
    """Compute the runs that have no result yet."""
    left = [run for run in runs if run not in results.lines]
    with tqdm(total=len(left) * budget.local_steps, unit=" steps", mininterval=5, smoothing=0.05) as progress:
        for run in left:
            progress.set_description(f"{run.point}, {run.peers} peers, seed {run.seed}")
            simulation = Simulation(task, run.variant, build_arguments(run, budget, optimizer), budget, run.seed)
            try:
                simulation.run(progress.update)
            except FloatingPointError:
                simulation.result.evaluations[budget.samples] = math.nan
            results.add(run, asdict(simulation.result))
            tqdm.write(f"{progress.desc}, rates {describe_rates(run)}: loss {results.loss(run):.4f}")


def describe_rates(run: Run) -> str:
    rates = [run.learning_rate]
    if run.variant.local_updates:
        rates += [run.outer_learning_rate, run.outer_momentum]
    return " / ".join(f"{rate:.2g}" for rate in rates)


def format_tables(runs: list[Run], results: Results) -> str:
    """Return the table of all points. `runs`: with the learning rates that are to be shown."""
    done = [run for run in runs if run in results.lines]
    losses = {(run.point, run.peers, run.seed): results.loss(run) for run in done}
    groups: dict[tuple[int, str], list[Run]] = {}
    for run in sorted(done, key=lambda run: run.peers):
        groups.setdefault((run.peers, run.point), []).append(run)
    lines = [f"{'peers':>5}  {'point':<17}{'rounds':>7}{'rates':>21}{'seeds':>6}{'loss':>9}  difference"]
    for (peers, point), group in groups.items():
        first = results.lines[group[0]]
        mean = statistics.mean(results.loss(run) for run in group)
        references = [(results.loss(run), losses.get(("dp", peers, run.seed))) for run in group]
        differences = [100 * (loss / reference - 1) for loss, reference in references if reference is not None]
        lines.append(
            f"{peers:>5}  {point:<17}{first['rounds']:>7}{describe_rates(group[0]):>21}{len(group):>6}{mean:>9.4f}  "
            f"{describe_differences(differences)}"
        )
    return "\n".join(lines)


def describe_differences(differences: list[float]) -> str:
    if not differences:
        return "-"
    spread = f" +- {statistics.stdev(differences):.2f}" if len(differences) > 1 else ""
    return f"{statistics.mean(differences):+.2f} %{spread}"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*POINTS, *SPECIAL_POINTS]
    parser.add_argument("--train_file", type=Path, help="text, UTF-8; default: Python's documentation topics")
    parser.add_argument("--folder", type=Path, required=True, help="for the prepared text and the results")
    parser.add_argument("--points", nargs="+", choices=names, help="default: all")
    parser.add_argument("--peers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--samples", type=int, default=16384, help="of all peers together; default: 16384")
    parser.add_argument(
        "--optimizer", choices=("adamw", "lamb", "muon"), default="adamw", help="inner, and of data parallel"
    )
    parser.add_argument(
        "--learning_rate", type=float, default=2e-3,
        help="peak of the inner optimizer; data parallel: times the root of the batch in micro-batches, at most 4",
    )  # fmt: skip
    parser.add_argument(
        "--outer", type=float, nargs=2, metavar=("RATE", "MOMENTUM"),
        help=f"of the outer optimizer, without --tune; default: {OUTER_LEARNING_RATE} {OUTER_MOMENTUM}",
    )  # fmt: skip
    parser.add_argument("--tune", action="store_true", help="sweep the learning rates with the first seed")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    apply_patches()  # the compressions that hivemind has under the same numbers
    torch.set_num_threads(1)  # a result does not depend on the number of cores
    budget = Budget(args.samples, MICRO_BATCH)
    if not (args.folder / "data" / "config.json").exists():
        flags = ("--max_seq_length", SEQ_LENGTH, "--validation_fraction", 0.1, "--num_proc", 1)
        prepare_data(args.folder / "data", "clm", VOCAB_SIZE, *flags, train_file=args.train_file)
        (args.folder / "data" / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    task = TextTask(args.folder / "data")
    setup = f"{task.description}; {args.samples} samples in micro-batches of {MICRO_BATCH}; {args.optimizer}"
    print(f"{setup}\npeers with relative speeds {', '.join(map(str, SPEEDS))}, repeated")
    results = Results(args.folder / "results.jsonl")
    runs = plan_runs(args, setup, budget)
    if args.tune:
        runs = [candidate for run in runs if run.seed == args.seeds[0] for candidate in sweep(run)]
    else:
        runs = runs if args.outer else [results.tuned(run) for run in runs]
    try:
        play(runs, task, budget, args.optimizer, results)
    except KeyboardInterrupt:
        print("Interrupted: the finished runs are kept")
    chosen = runs if args.outer else list(dict.fromkeys(results.tuned(run) for run in runs))
    print(f"\n{format_tables(chosen, results)}\n\n{LEGEND}")


if __name__ == "__main__":
    main()
