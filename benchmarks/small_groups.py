#!/usr/bin/env python3
"""Measure what small groups cost the model: trainers whose rounds average a few of them, dealt anew in each step.

benchmarks/small_groups.py --shared FOLDER --trainers 8 32 --seeds 5

Each trainer has its own model and optimizer. A round averages the gradients of each group, weighted by samples, and
one in --average_state_every its parameters, too. Speeds are 1, 2, 1 and 4, repeated, and so are the samples of a
step. Of 16 or more, one in sixteen misses each round, by chance. Printed are the held-out loss of the first trainer
beside one group of all, and the largest distance between two trainers' parameters, of their norm.
"""

import argparse
import copy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
from scipy import stats

from benchmarks.local_updates_simulation import SPEEDS, sample_order
from benchmarks.own_data import Texts
from peerstep.patches import apply_patches

MISSING = 1 / 16
RATE, WARMUP = 3e-3, 0.1  # peak, and fraction of the steps


@torch.no_grad()
def average(tensors: list[list[torch.Tensor]], weights: list[float]) -> list[torch.Tensor]:
    """Return the weighted mean of several trainers' tensors."""
    total = sum(weights)
    means = []
    for of_all in zip(*tensors, strict=True):
        means.append(sum(weight * one for weight, one in zip(weights, of_all, strict=True)) / total)
    return means


def deal(present: list[int], group_size: int, random: np.random.Generator) -> list[list[int]]:
    """Deal the trainers of a round into groups of equal size, as the engine does."""
    dealt = random.permutation(present).tolist()
    number = -(-len(dealt) // group_size)
    return [dealt[index::number] for index in range(number)]


def train(texts: Texts, trainers: int, group_size: int, every: int, steps: int, seed: int) -> tuple[float, float]:
    """Train for `steps` global steps. Return the first trainer's held-out loss, and the largest distance."""
    random = np.random.default_rng([seed, 7])
    first = texts.build_tiny(seed).eval()
    models = [first, *(copy.deepcopy(first) for _ in range(trainers - 1))]
    parameters = [list(model.parameters()) for model in models]
    optimizers = [torch.optim.AdamW(of_one, lr=RATE, weight_decay=0.0) for of_one in parameters]
    orders = [sample_order(texts.num_samples, seed, number) for number in range(trainers)]
    for step in range(1, steps + 1):
        rate = RATE * min(1.0, step / (WARMUP * steps)) * (1.0 - 0.9 * step / steps)
        for number, model in enumerate(models):
            model.zero_grad()
            batch = texts.make_batch([next(orders[number]) for _ in range(texts.micro_batch * SPEEDS[number % 4])])
            model(**batch).loss.backward()
        present = [n for n in range(trainers) if trainers < 16 or random.random() >= MISSING]
        for group in deal(present, group_size, random):
            weights = [float(SPEEDS[number % 4]) for number in group]
            mean = average([[p.grad for p in parameters[number]] for number in group], weights)
            norm = float(torch.nn.utils.get_total_norm(mean))
            for number in group:
                for parameter, gradient in zip(parameters[number], mean, strict=True):
                    parameter.grad = gradient * min(1.0, 1.0 / norm)
                optimizers[number].param_groups[0]["lr"] = rate
                optimizers[number].step()
            if step % every == 0:
                mean = average([[p.detach() for p in parameters[number]] for number in group], [1.0] * len(group))
                for number in group:
                    with torch.no_grad():
                        torch._foreach_copy_(parameters[number], mean)
    flat = torch.stack([torch.cat([p.detach().flatten() for p in of_one]) for of_one in parameters])
    distance = float(torch.cdist(flat, flat).max() / flat[0].norm())
    return float(np.mean(texts.evaluate_all(models[0]))), distance


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, required=True, help="folder with the texts, as of own_data.py")
    parser.add_argument("--trainers", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--group_size", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--average_state_every", type=int, nargs="+", default=[8, 1])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    apply_patches()
    torch.set_num_threads(1)
    texts = Texts(args.shared, None, 1)
    for trainers in args.trainers:
        settings = [
            (trainers, 8),
            *((s, e) for s in args.group_size if s < trainers for e in args.average_state_every),
        ]
        losses = {}
        for group_size, every in settings:
            found = [train(texts, trainers, group_size, every, args.steps, seed) for seed in range(args.seeds)]
            losses[group_size, every], distances = np.array(found).T
            change = 100 * (losses[group_size, every] / losses[trainers, 8] - 1)
            factor = stats.t.ppf(0.975, args.seeds - 1) / args.seeds**0.5
            print(
                f"{trainers} trainers, groups of {group_size}, parameters each {every}: loss "
                f"{losses[group_size, every].mean():.4f}, {change.mean():+.2f} ± {factor * change.std(ddof=1):.2f} %, "
                f"largest distance {100 * distances.mean():.2f} %",
                flush=True,
            )


if __name__ == "__main__":
    main()
