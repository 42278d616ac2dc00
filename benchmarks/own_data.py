#!/usr/bin/env python3
"""Measure what four trainers learn if each has a separate kind of text, which the others never see.

benchmarks/own_data.py --folder results                                  # a tiny model, five seeds
benchmarks/own_data.py --folder results --base FOLDER --steps 160 --seeds 0      # adapters on a real base

The local and global steps are those of the trainers, in one process on one core. The held-out loss of each kind of
text is compared with that of one process that has all four kinds, and as many samples and steps; and on the other
three kinds with that of each trainer alone, with its own part of the samples. Local updates take more optimizer steps
for as many samples: what unlike texts cost them is their loss beside that of "alike", where each trainer has all four
kinds. Trainers have the speeds 1, 2, 1, 4: a faster one gives more samples.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from pydoc_data.topics import topics

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
from scipy import stats
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from arguments import ModelArguments
from benchmarks.local_updates_simulation import (
    SPEEDS,
    Budget,
    Simulation,
    Variant,
    parameters_of,
    sample_order,
)
from cotrain.models.adapters import add_adapters
from cotrain.preparation.tokenizer_training import train_tokenizer
from cotrain.settings import Hyperparameters
from cotrain.training.builders import build_param_groups
from peerstep.patches import apply_patches
from tests.support.peers import read_jsonl

PEERS, LENGTH, VOCAB_SIZE = 4, 64, 1000
SAMPLES, HELD_OUT = 1000, 100  # of each kind, of a tiny model; with a real base fewer are needed
BASE_SAMPLES, BASE_STEPS, BASE_BATCH, BASE_RATE = 1000, 600, 32, 4e-3  # a tiny base learns other samples of all kinds
KINDS = ("encyclopaedia", "code", "instructions", "manual")
TARGET = 8  # mean local steps of the trainers together in a round of gradients, and of one process in a step

DEFAULT = Variant(PEERS, 2, local_updates=False, compression="float16")
LOCAL = Variant(PEERS, 16, compression="float16", equally=True)
SETTINGS = {
    "default": DEFAULT,
    "default, equally": replace(DEFAULT, equally=True),
    "default, equally, open": replace(DEFAULT, equally=True, is_open=True),
    "default, open": replace(DEFAULT, is_open=True),
    "local 16": replace(LOCAL, equally=False),
    "local 16, equally": LOCAL,
    "local 16, equally, alike": LOCAL,
    "local 16, equally, proximal": replace(LOCAL, proximal=0.1),
    "local 16, per step": replace(LOCAL, equally=False, per_step=True),
    "local 4, equally": replace(LOCAL, local_steps=4),
    "local 4, equally, alike": replace(LOCAL, local_steps=4),
}


def read_texts(shared: Path) -> list[str]:
    """Return a text of each of KINDS."""
    rows = json.loads((shared / "chat/alpaca_en_demo.json").read_text(encoding="utf-8"))
    code = sorted(Path(json.__file__).parents[1].glob("[a-m]*.py"))
    return [
        (shared / "wikitext-103/wiki.test.tokens").read_text(encoding="utf-8"),
        "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in code[:60]),
        "\n".join(f"{row['instruction']} {row['input']}\n{row['output']}\n" for row in rows),
        "\n".join(topics.values()),
    ]


class Texts:
    """The samples of all kinds, one kind after the other, and the model."""

    def __init__(self, shared: Path, base: Path | None, micro_batch: int):
        self.base, texts, scale = base, read_texts(shared), 1 if base is None else 6
        if base is None:
            lines = chain.from_iterable(text[:200_000].splitlines(keepends=True) for text in texts)
            self.tokenizer = train_tokenizer(lines, "clm", VOCAB_SIZE, LENGTH)
        else:
            self.tokenizer = AutoTokenizer.from_pretrained(base)
        self.sizes, self.held_out, samples, others = [SAMPLES // scale] * PEERS, [], [], []
        for text in texts:
            ids = self.tokenizer(text[:1_200_000], add_special_tokens=False)["input_ids"]
            rows = torch.tensor(ids[: len(ids) // LENGTH * LENGTH]).view(-1, LENGTH)
            rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
            num_held_out = HELD_OUT // scale
            assert len(rows) >= num_held_out + SAMPLES // scale + (BASE_SAMPLES if base is None else 0), len(rows)
            self.held_out.append(rows[:num_held_out])
            samples.append(rows[num_held_out : num_held_out + SAMPLES // scale])
            others.append(rows[-BASE_SAMPLES:])
        self._samples, self.num_samples, self.micro_batch = torch.cat(samples), sum(self.sizes), micro_batch
        self._weights = None if base else self._train_base(torch.cat(others))

    def _train_base(self, samples: torch.Tensor) -> dict[str, torch.Tensor]:
        model, generator = self.build_tiny(), torch.Generator().manual_seed(0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=BASE_RATE)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, BASE_STEPS)
        for _ in range(BASE_STEPS):
            rows = samples[torch.randint(len(samples), (BASE_BATCH,), generator=generator)]
            optimizer.zero_grad()
            model(input_ids=rows, labels=rows, use_cache=False).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        return model.state_dict()

    def build_tiny(self, seed: int = 0) -> torch.nn.Module:
        torch.manual_seed(seed)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
        return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB_SIZE, max_position_embeddings=LENGTH, **sizes))

    def build_model(self, seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        if self._weights is not None:
            model = self.build_tiny()
            model.load_state_dict(self._weights)
            return model
        model = AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.bfloat16)
        return add_adapters(model, ModelArguments(model_name_or_path=str(self.base), lora_rank=8), self.tokenizer)

    def make_batch(self, indices: list[int]) -> dict[str, torch.Tensor]:
        rows = self._samples[indices]
        return {"input_ids": rows, "labels": rows, "use_cache": False}

    def evaluate_all(self, model: torch.nn.Module) -> list[float]:
        """Return the held-out loss of each kind."""
        losses = []
        for rows in self.held_out:
            with torch.no_grad():
                parts = [float(model(input_ids=x, labels=x, use_cache=False).loss) * len(x) for x in rows.split(10)]
            losses.append(sum(parts) / len(rows))
        return losses


class OwnData(Simulation):
    """Peers each of which draws from one kind; or one peer that draws from all."""

    def __init__(self, task: Texts, variant: Variant, args: Hyperparameters, budget: Budget, seed: int, kinds: list):
        super().__init__(task, variant, args, budget, seed)
        self._marks = []
        self._orders = [self._order(seed, number, kind) for number, kind in enumerate(kinds)]

    def _order(self, seed: int, number: int, kind: int | None) -> Iterator[int]:
        if kind is None:
            return sample_order(self.task.num_samples, seed, number)
        start = sum(self.task.sizes[:kind])
        return (start + index for index in sample_order(self.task.sizes[kind], seed, number))

    def _evaluate(self) -> list[float]:
        groups = build_param_groups(self._model, 0.0, self._optimizer)
        with torch.no_grad():
            for target, source in zip(parameters_of(groups), self.peers.global_parameters(), strict=True):
                target.copy_(source)
        return self.task.evaluate_all(self._model)


def train(texts: Texts, name: str, args: argparse.Namespace, seed: int) -> dict:
    """Train in a setting, "one process" or "alone N", and return the losses and what the bounds have left."""
    steps, kinds, variant = args.steps, list(range(PEERS)), SETTINGS.get(name)
    if name == "one process":
        variant, kinds = Variant(1, TARGET, local_updates=False), [None]
    elif variant is None:
        kinds = [int(name.split()[1])]
        variant = Variant(1, TARGET, local_updates=False)
        steps = max(TARGET, steps * SPEEDS[kinds[0]] // sum(SPEEDS[:PEERS]))
    elif variant.local_updates and args.base:  # as many rounds as fit
        variant = replace(variant, local_steps=max(1, variant.local_steps // 4))
    if name.endswith("alike"):
        kinds = [None] * PEERS
    budget = Budget(steps * texts.micro_batch, texts.micro_batch)
    rate = args.learning_rate * (0.5 if variant.local_updates else 1.0)  # of batches an eighth as large
    flags = {"local_updates": variant.local_updates, "outer_learning_rate": args.outer[0]}
    flags |= {"outer_momentum": args.outer[1], "max_grad_norm": 1.0, **budget.schedule(variant)}
    hyperparameters = Hyperparameters(optimizer="adamw", adam_epsilon=1e-8, learning_rate=rate, **flags)
    simulation = OwnData(texts, variant, hyperparameters, budget, seed, kinds)
    (losses,) = simulation.run().evaluations.values()
    factors = [(sender, factor) for part in simulation.peers.kept for sender, factor in part.items()]
    cut = [[factor < 0.99 for sender, factor in factors if sender == number] for number in range(PEERS)]
    kept = [float(np.mean([x for sender, x in factors if sender == number] or [1.0])) for number in range(PEERS)]
    return {"losses": losses, "cut": [float(np.mean(x or [0])) for x in cut], "kept": kept}


def show(found: dict[tuple[str, int], dict], seeds: list[int]) -> None:
    """Print the loss of each setting beside others' in per cent, with the 95 % margin over the seeds."""
    kinds = "".join(f"{kind:>15}" for kind in KINDS)
    print(f"\n{'setting':<28}{'beside':<26}{'mean of the four':>18}{kinds}")
    names = list(dict.fromkeys(name for name, _ in found))
    pairs = [(name, "one process") for name in names if name != "one process"]
    pairs += [(name, f"{name}, alike") for name in names] + [
        ("local 16, equally, proximal", "local 16, equally, alike")
    ]
    pairs += [("default, equally", f"alone {number}") for number in range(PEERS)]
    for name, reference in pairs:
        known = [seed for seed in seeds if (name, seed) in found and (reference, seed) in found]
        pairs_of_losses = [(found[name, seed]["losses"], found[reference, seed]["losses"]) for seed in known]
        rows = [100 * (np.array(losses) / np.array(others) - 1) for losses, others in pairs_of_losses]
        if rows:
            means = [float(row.mean()) for row in rows]
            factor = stats.t.ppf(0.975, len(rows) - 1) / math.sqrt(len(rows)) if rows[1:] else 0.0
            margin = factor * np.std(means, ddof=1) if rows[1:] else 0.0
            values = "".join(f"{value:>+14.2f}%" for value in np.mean(rows, axis=0))
            print(f"{name:<28}{reference:<26}{np.mean(means):>+9.2f} ± {margin:4.2f} %{values}")
    for name in filter(SETTINGS.__contains__, names):
        of_seeds = [found[name, seed] for seed in seeds if (name, seed) in found]
        cut, kept = (np.round(100 * np.mean([x[key] for x in of_seeds], axis=0), 1) for key in ("cut", "kept"))
        print(f"{name}: parts of each trainer scaled down {cut} %, left of a part {kept} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="for the results; finished runs are kept")
    parser.add_argument("--shared", type=Path, default=Path("/work/shared/data"), help="folder with the texts")
    parser.add_argument("--base", type=Path, help="a pretrained model, for adapters of rank 8")
    parser.add_argument("--steps", type=int, default=512, help="local steps of all trainers together")
    parser.add_argument("--micro_batch", type=int, default=4)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--outer", type=float, nargs=2, default=(0.7, 0.5), metavar=("RATE", "MOMENTUM"))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    args = parser.parse_args()
    apply_patches()
    torch.set_num_threads(1)
    texts = Texts(args.shared, args.base, args.micro_batch)
    args.folder.mkdir(parents=True, exist_ok=True)
    path, setup = args.folder / "own_data.jsonl", [str(args.base), args.steps, args.learning_rate, *args.outer]
    found = {(x["name"], x["seed"]): x for x in read_jsonl(path) if x["setup"] == setup}
    names = ["one process", *args.settings, *(f"alone {number}" for number in range(PEERS))]
    initial = texts.evaluate_all(texts.build_model(0).eval())
    print("before training:", *(f"{kind} {loss:.3f}" for kind, loss in zip(KINDS, initial, strict=True)), flush=True)
    for seed in args.seeds:
        for name in names:
            if (name, seed) not in found:
                found[name, seed] = {"name": name, "seed": seed, "setup": setup, **train(texts, name, args, seed)}
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(found[name, seed]) + "\n")
                losses = ", ".join(f"{loss:.3f}" for loss in found[name, seed]["losses"])
                print(f"seed {seed}, {name}: {losses}", flush=True)
    show(found, args.seeds)


if __name__ == "__main__":
    main()
