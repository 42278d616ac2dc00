#!/usr/bin/env python3
"""Measure what delayed gradients cost: simulated trainers beside one process with the same samples.

benchmarks/delay.py --models llama --peers 4 --seeds 0 1 2 3 --train_file my.txt

Unequal trainers accumulate gradients in simulated time, in one process and on one core; nothing is sent. A global
step is due once they have the target batch. Its update arrives after the time of a round; a trainer has it from its
next local step on. `wait`: local steps wait for the running round. `default`: as the optimizer does, where that costs
little, and a round waits for the end of local steps that are short. `together`: all local steps end before a round
begins, as without delays. One process then takes as many steps with batches of the same sizes. Each line: held-out
losses, their difference, the share of samples that were computed on old parameters, and the speed beside trainers that
never wait.
"""

import argparse
import heapq
import itertools
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from scipy.stats import t

from benchmarks.local_updates_simulation import copies_of, parameters_of, sample_order
from benchmarks.low_communication import MODEL, SEQ_LENGTH, VOCAB_SIZE, TextTask
from cotrain.settings import Hyperparameters
from cotrain.training.builders import build_local_optimizer, build_param_groups, build_scheduler
from peerstep.accumulators import clip_norm
from peerstep.pace import SHORT
from peerstep.patches import apply_patches
from peerstep.state import set_schedule
from tests.support.peers import prepare_data

SPEEDS = (1.0, 1.5, 1.0, 2.0)  # local steps in a unit of time, repeated
CHUNK = 16  # samples of one forward pass
SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": SEQ_LENGTH}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout_prob": 0.0}
# Configuration, objective, optimizer, learning rate and epsilon
MODELS = {
    "llama": ({"model_type": "llama", "intermediate_size": 176, **SIZES}, "clm", "adamw", 3e-3, 1e-8),
    "gpt2": (MODEL, "clm", "adamw", 3e-3, 1e-8),
    "albert": (
        {"model_type": "albert", "embedding_size": 32, "intermediate_size": 128, **SIZES, **NO_DROPOUT},
        "mlm_sop", "lamb", 1e-2, 1e-6,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """How trainers take global steps.

    :param round: time of a round, in that of a local step of the slowest trainer
    :param waits: whether local steps wait for the running round
    :param together: whether the round waits for all local steps
    :param patience: fraction of a global step that rounds and local steps may wait for each other
    """

    round: float
    waits: bool = False
    together: bool = False
    patience: float = 0.0


VARIANTS = {
    "together": Variant(0.0, together=True),
    "short": Variant(0.2),
    "short, wait": Variant(0.2, waits=True),
    "default": Variant(0.2, patience=SHORT),
    "long": Variant(1.0),
    "long, wait": Variant(1.0, waits=True),
    "longer": Variant(2.0),
}


class Learner:
    """A model and its optimizer, whose gradients may be of older parameters."""

    def __init__(self, task: TextTask, args: Hyperparameters, seed: int):
        self.task, self.args, self.num_steps = task, args, 0
        self.model = task.build_model(seed).eval()  # eval(): no dropout
        groups = build_param_groups(self.model, args.weight_decay, args.optimizer)
        self._used, copies = parameters_of(groups), copies_of(groups)
        self.parameters = parameters_of(copies)
        self.optimizer = build_local_optimizer(copies, args)
        self._schedule = build_scheduler(self.optimizer, args)
        self.version = self._copy()

    def _copy(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def _use(self, version: Sequence[torch.Tensor]) -> None:
        torch._foreach_copy_(self._used, version)

    def gradient(self, version: Sequence[torch.Tensor], samples: Sequence[int]) -> list[torch.Tensor]:
        """Return the gradient of the sum of the samples' losses."""
        self._use(version)
        total: list[torch.Tensor] = []
        for begin in range(0, len(samples), CHUNK):
            chunk = samples[begin : begin + CHUNK]
            loss = self.model(**self.task.make_batch(chunk)).loss * len(chunk)
            gradient = torch.autograd.grad(loss, self._used)
            total = torch._foreach_add(total, gradient) if total else list(gradient)
        return total

    def update(self, total: Sequence[torch.Tensor], num_samples: int) -> None:
        """Take a step with the sum of the gradients of some samples."""
        mean = [gradient / num_samples for gradient in total]
        clip_norm(mean, self.args.max_grad_norm)
        for parameter, gradient in zip(self.parameters, mean, strict=True):
            parameter.grad = gradient
        set_schedule(self._schedule, self.num_steps)
        self.optimizer.step()
        self.num_steps += 1
        self.version = self._copy()

    def loss(self) -> float:
        self._use(self.version)
        return self.task.evaluate(self.model)


class Trainers:
    """Unequal trainers of one model in simulated time. After `run`, `sizes` has the samples of each step."""

    def __init__(self, learner: Learner, variant: Variant, number: int, seed: int, target: int, batch_size: int):
        self.learner, self.variant, self.target, self.batch_size = learner, variant, target, batch_size
        self.speeds = [speed for speed, _ in zip(itertools.cycle(SPEEDS), range(number), strict=False)]
        self._orders = [sample_order(learner.task.num_samples, seed, trainer) for trainer in range(number)]
        self._events: list[tuple[float, int, int]] = []  # time, order, trainer; trainer -1: a round ends
        self._order = itertools.count()
        self._begun: dict[int, tuple[list[torch.Tensor], int]] = {}  # trainer -> parameters and step of its local step
        self._waiting: list[int] = []
        self._computed: dict[int, tuple[list[torch.Tensor], list[int]]] = {}  # step -> its parameters, samples
        self._running: tuple[list[torch.Tensor], int] | None = None  # sum and samples of the running round
        self._num_samples = self._num_old = self.num_computed = 0
        self.sizes: list[int] = []
        self.old_share = self.speed = 0.0
        seconds = target / (batch_size * sum(self.speeds))  # of a global step
        self._is_short = [1 / speed <= variant.patience * seconds for speed in self.speeds]
        self._waits = [
            variant.waits or _idle_seconds(variant.round, 1 / speed) <= variant.patience * seconds
            for speed in self.speeds
        ]

    def run(self, num_steps: int) -> None:
        """Take global steps."""
        for trainer in range(len(self.speeds)):
            self._begin(trainer, 0.01 * trainer)
        time = 0.0
        while self.learner.num_steps < num_steps:
            time, _, trainer = heapq.heappop(self._events)
            if trainer < 0:
                self._end_round(time)
            else:
                self._end_local_step(trainer, time)
        self.old_share = self._num_old / sum(self.sizes)
        self.speed = self.num_computed / (self.batch_size * sum(self.speeds) * time)

    def _push(self, time: float, trainer: int) -> None:
        heapq.heappush(self._events, (time, next(self._order), trainer))

    def _begin(self, trainer: int, time: float) -> None:
        self._begun[trainer] = self.learner.version, self.learner.num_steps
        self._push(time + 1 / self.speeds[trainer], trainer)

    def _end_local_step(self, trainer: int, time: float) -> None:
        version, step = self._begun.pop(trainer)
        samples = [next(self._orders[trainer]) for _ in range(self.batch_size)]
        self._computed.setdefault(step, (version, []))[1].extend(samples)
        self._num_samples += self.batch_size
        self.num_computed += self.batch_size
        self._num_old += self.batch_size * (step < self.learner.num_steps + (self._running is not None))
        is_due = self._num_samples >= self.target and self._running is None
        if is_due and self._awaits_nobody():
            self._begin_round(time)
        waits = self._waits[trainer] and self._running is not None
        if waits or (is_due and (self.variant.together or self._waits[trainer])):
            self._waiting.append(trainer)
        else:
            self._begin(trainer, time)

    def _awaits_nobody(self) -> bool:
        """Whether a round that is due waits for no running local step."""
        awaited = (self.variant.together or (self._is_short[other] and self._waits[other]) for other in self._begun)
        return not any(awaited)

    def _begin_round(self, time: float) -> None:
        gradients = [self.learner.gradient(*computed) for computed in self._computed.values()]
        self._running = [sum(gradient) for gradient in zip(*gradients, strict=True)], self._num_samples
        self.sizes.append(self._num_samples)
        self._computed, self._num_samples = {}, 0
        self._push(time + self.variant.round, -1)

    def _end_round(self, time: float) -> None:
        self.learner.update(*self._running)
        self._running, waiting, self._waiting = None, self._waiting, []
        for trainer in waiting:
            self._begin(trainer, time)
        if self._num_samples >= self.target and self._awaits_nobody():
            self._begin_round(time)


def _idle_seconds(round_seconds: float, local_seconds: float) -> float:
    """Return what a trainer loses if its local steps wait for rounds, as CollaborativeOptimizer computes it."""
    if round_seconds < local_seconds:
        return round_seconds**2 / (2 * local_seconds)
    return round_seconds - local_seconds / 2


def train_alone(learner: Learner, sizes: Sequence[int], seed: int) -> None:
    """Take steps with batches of these sizes in one process."""
    order = sample_order(learner.task.num_samples, seed, 0)
    for size in sizes:
        learner.update(learner.gradient(learner.version, [next(order) for _ in range(size)]), size)


def interval(differences: Sequence[float]) -> str:
    """Return the mean and its 95 % interval, by Student's distribution."""
    mean, number = statistics.fmean(differences), len(differences)
    if number < 2:
        return f"{mean:+.2f} %"
    factor = t.ppf(0.975, number - 1)
    return f"{mean:+.2f} +- {factor * statistics.stdev(differences) / math.sqrt(number):.2f} %"


def open_task(folder: Path, name: str, train_file: Path | None) -> TextTask:
    config, objective, *_ = MODELS[name]
    data = folder / name
    if not (data / "config.json").exists():
        flags = ("--max_seq_length", SEQ_LENGTH, "--validation_fraction", 0.1, "--num_proc", 1)
        prepare_data(data, objective, VOCAB_SIZE, *flags, train_file=train_file)
        (data / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return TextTask(data)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train_file", type=Path, help="text, UTF-8; default: Python's documentation topics")
    parser.add_argument("--folder", type=Path, help="for the prepared text; default: a temporary one")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["llama"])
    parser.add_argument("--peers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--local_steps", type=int, default=4, help="mean of a trainer in a global step")
    parser.add_argument("--batch_size", type=int, default=8, help="samples of a local step")
    parser.add_argument("--learning_rate", type=float, help="default: the model's")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    apply_patches()
    torch.set_num_threads(1)  # a result does not depend on the number of cores
    folder = args.folder or Path(tempfile.mkdtemp())
    for name in args.models:
        task = open_task(folder, name, args.train_file)
        *_, optimizer, rate, epsilon = MODELS[name]
        hyperparameters = Hyperparameters(
            optimizer=optimizer, learning_rate=args.learning_rate or rate, adam_epsilon=epsilon,
            warmup_steps=args.steps // 20, total_steps=args.steps, max_grad_norm=1.0,
        )  # fmt: skip
        print(f"{task.description}; {optimizer}, {args.steps} steps", flush=True)
        alone: dict[tuple, float] = {}
        for peers, variant in itertools.product(args.peers, args.variants):
            differences = []
            for seed in args.seeds:
                target = args.local_steps * args.batch_size * peers
                learner = Learner(task, hyperparameters, seed)
                trainers = Trainers(learner, VARIANTS[variant], peers, seed, target, args.batch_size)
                trainers.run(args.steps)
                key = seed, tuple(trainers.sizes)
                if key not in alone:
                    learner = Learner(task, hyperparameters, seed)
                    train_alone(learner, trainers.sizes, seed)
                    alone[key] = learner.loss()
                loss = trainers.learner.loss()
                differences.append(100 * (loss / alone[key] - 1))
                print(f"  {peers} {variant:<12} seed {seed}: {loss:.4f}, alone {alone[key]:.4f}", flush=True)
            print(
                f"{name}, {peers} trainers, {variant:<12} {interval(differences)}; computed on old parameters "
                f"{trainers.old_share:.0%}, speed {trainers.speed:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
