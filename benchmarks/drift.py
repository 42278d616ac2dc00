#!/usr/bin/env python3
"""Measure how far the parameters of trainers drift apart, by compression and by how often parameters are averaged.

benchmarks/drift.py --steps 24

Trainers of a tiny model in this process take the same global steps in each setting, in rounds over 127.0.0.1,
with the optimizer, averager and compression of the scripts. In local updates each trainer takes three local steps
for a global step.
"""

import argparse
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from cotrain.training.builders import build_param_groups
from cotrain.training.round_time import BITS
from tests.support.engine import CONFIG
from tests.support.models import build_model
from tests.support.swarm import SAMPLES, Swarm, flat

LOCAL_STEP_SAMPLES = 4
LOCAL_STEPS = 3  # of each trainer in a global step, in local updates

LEGEND = """\
gradient, parameter   --gradient_compression (of the pseudo-gradients, in local updates) and --state_compression
every                 --average_state_every
bits                  sent for each parameter and global step, mean
apart                 largest distance between the parameters of two trainers, relative to their norm: after the last
                      global step, and the most after any
error                 distance to the parameters without any compression, relative to what all steps have changed"""


@dataclass(frozen=True)
class Setting:
    """What rounds carry, and in which mode."""

    gradient: str
    parameter: str
    every: int
    local_updates: bool

    @property
    def bits(self) -> float:
        return BITS[self.gradient] + BITS[self.parameter] / self.every


def settings() -> list[Setting]:
    choices = [
        ("none", "none", 1), ("float16", "float16", 1), ("float16", "float16", 4), ("float16", "float16", 8),
        ("float16", "float16", 1000),
        ("blockwise8", "float16", 1), ("blockwise8", "float16", 4), ("blockwise8", "float16", 8),
        ("blockwise8", "float16", 1000), ("blockwise4", "float16", 1), ("blockwise4", "float16", 8),
    ]  # fmt: skip
    return [Setting(*choice, is_local) for is_local in (False, True) for choice in choices]


def train(swarm: Swarm, num_trainers: int, num_steps: int) -> tuple[list[float], torch.Tensor]:
    """Take global steps.

    :returns: the largest relative distance between two trainers after each step; the first trainer's parameters
    """
    generator, distances = torch.Generator().manual_seed(0), []
    swarm.add_several(*[False] * num_trainers)
    for step in range(1, num_steps + 1):
        swarm.meet()
        for trainer in swarm.trainers:
            trainer.optimizer.finish_pending_update()
        for _ in range(LOCAL_STEPS):
            for trainer in swarm.trainers:
                rows = torch.randperm(len(SAMPLES["labels"]), generator=generator)[:LOCAL_STEP_SAMPLES]
                trainer.local_step({name: values[rows] for name, values in SAMPLES.items()})
        swarm.wait_for(step)
        for trainer in swarm.trainers:
            entry = trainer.entry
            assert entry["outcome"] == "averaged" and len(entry["group"]) == num_trainers, entry
        parameters = [trainer.parameters for trainer in swarm.trainers]
        distances.append(max(float((a - b).norm() / a.norm()) for a, b in combinations(parameters, 2)))
    return distances, parameters[0]


def measure(setting: Setting, num_trainers: int, num_steps: int) -> tuple[list[float], torch.Tensor]:
    with ExitStack() as own, tempfile.TemporaryDirectory() as folder:
        options = {
            "gradient_compression": setting.gradient,
            "state_compression": setting.parameter,
            "average_state_every": setting.every,
            "target_batch_size": num_trainers * LOCAL_STEPS * LOCAL_STEP_SAMPLES,
        }
        if setting.local_updates:
            options |= {"local_updates": True, "max_grad_norm": 1.0}
        return train(Swarm(own, Path(folder), **options), num_trainers, num_steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24, help="global steps in each setting; default: 24")
    parser.add_argument("--trainers", type=int, default=3, help="default: 3")
    args = parser.parse_args()
    groups = build_param_groups(build_model(CONFIG, "run"), 0.01)  # in the optimizer's order
    initial = flat(parameter for group in groups for parameter in group["params"])
    print(f"{args.trainers} trainers, {args.steps} global steps, {len(initial):,} parameters")
    exact = {}
    for setting in settings():
        if setting.local_updates not in exact:
            print(f"\n{'local updates' if setting.local_updates else 'gradients'}")
            columns = f"{'gradient':>12}{'parameter':>12}{'every':>7}{'bits':>7}"
            print(f"{columns}{'apart: last':>13}{'most':>10}{'error':>10}")
        distances, parameters = measure(setting, args.trainers, args.steps)
        reference = exact.setdefault(setting.local_updates, parameters)
        error = float((parameters - reference).norm() / (reference - initial).norm())
        print(
            f"{setting.gradient:>12}{setting.parameter:>12}{setting.every:>7}{setting.bits:>7.1f}"
            f"{distances[-1]:>13.1e}{max(distances):>10.1e}{error:>10.1e}",
            flush=True,
        )
    print(f"\n{LEGEND}")


if __name__ == "__main__":
    main()
