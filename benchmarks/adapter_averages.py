#!/usr/bin/env python3
"""What averages of adapters cost with local updates: held-out loss beside averages of gradients, the same samples.

benchmarks/adapter_averages.py CONVERSATIONS.json     # rows of instruction, input, output; an hour of one core
benchmarks/adapter_averages.py data/tokenized --base FOLDER --length 128 --samples 384   # prepared samples

A base is trained on some of the conversations, and unlike peers tune adapters of it on the others, see
local_updates_simulation.py. Averages of gradients are exact. `both` averages A and B, whose product is not the mean
of the peers' products; `only B` leaves A as it is drawn, and `in turn` trains A in one round and B in the next: both
are exact. `residual` is what the average of `both` lacks, of the mean change of the products in a round.
"""

import argparse
import copy
from itertools import product
from pathlib import Path

import numpy as np
import torch
from datasets import load_from_disk
from peft import LoraConfig, get_peft_model
from scipy import stats
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks import token_weights
from benchmarks.local_updates_simulation import Budget, LocalUpdatePeers, Simulation, Variant
from cotrain.settings import Hyperparameters

LENGTH, RANK, HELD_OUT = 256, 8, 48
FORMS = ("gradients", "both", "only B", "in turn")


class AdapterTask:
    """A base, its adapters, and samples of conversations, as `Simulation` needs them."""

    def __init__(self, base: torch.nn.Module, rows: list[dict], held_out: list[dict], only_b: bool):
        self.base, self.rows, self.held_out, self.only_b = base, rows, held_out, only_b
        self.num_samples = len(rows)

    def build_model(self, seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(copy.deepcopy(self.base), config)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_B" in name or ("lora_A" in name and not self.only_b))
        return model

    def make_batch(self, indices: list[int]) -> dict[str, torch.Tensor]:
        return make_batch([self.rows[index] for index in indices])

    def evaluate(self, model: torch.nn.Module) -> float:
        return token_weights.evaluate(model, self.held_out)


def cut(samples: list[dict], length: int) -> list[dict]:
    """Return parts of samples of at most `length` tokens, those with something to learn."""
    pieces = []
    for sample in samples:
        for at in range(0, len(sample["input_ids"]), length):
            pieces.append({name: values[at : at + length] for name, values in sample.items()})
    return [piece for piece in pieces if piece["answer_mask"][1:].any()]


def make_batch(rows: list[dict]) -> dict[str, torch.Tensor]:
    ids, mask = (
        torch.nn.utils.rnn.pad_sequence([torch.from_numpy(row[name]).long() for row in rows], True)
        for name in ("input_ids", "answer_mask")
    )
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100)}


def products_of(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return B times A of each layer."""
    return [b @ a for a, b in zip(parameters[::2], parameters[1::2], strict=True)]


class AdapterPeers(LocalUpdatePeers):
    """Peers with local updates of adapters. Pairs of A and B are next to each other in the parameters.

    :param in_turn: whether a round trains A or B, and the next one the other
    """

    def __init__(self, *args, in_turn: bool):
        super().__init__(*args)
        self.in_turn = in_turn
        self.residual = 0.0  # of the newest round

    def local_step(self, peer: int, batch: dict[str, torch.Tensor], num_samples: int) -> None:
        if self.in_turn:
            trained = "lora_A" if self.step % 2 else "lora_B"
            for name, parameter in self.accumulators[peer].model.named_parameters():
                parameter.requires_grad_(trained in name)
        super().local_step(peer, batch, num_samples)

    def begin_round(self, absent: frozenset[int], progress: float) -> None:
        super().begin_round(absent, progress)
        theta = [parameter.detach() for parameter in self.theta]
        if len(theta) % 2 or theta[0].shape[0] != RANK:  # without A
            return
        models = [[t - c for t, c in zip(theta, a.contribution, strict=True)] for a in self.accumulators]
        mean = [torch.stack(parts).mean(0) for parts in zip(*models, strict=True)]
        means = [torch.stack(parts).mean(0) for parts in zip(*map(products_of, models), strict=True)]
        lacking = [a - b for a, b in zip(means, products_of(mean), strict=True)]
        change = [a - b for a, b in zip(means, products_of(theta), strict=True)]
        self.residual = float(torch.nn.utils.get_total_norm(lacking) / torch.nn.utils.get_total_norm(change))


def tune(task: AdapterTask, form: str, variant: Variant, rate: float, seed: int, samples: int) -> tuple[float, float]:
    """Tune adapters; return the held-out loss, and the residual of the last round."""
    budget = Budget(samples, 1)
    updates, schedule = variant.local_updates, budget.schedule(variant)
    args = Hyperparameters(optimizer="adamw", learning_rate=rate, local_updates=updates, **schedule)
    simulation = Simulation(task, variant, args, budget, seed)
    if updates:
        builder = lambda: task.build_model(seed).eval()  # noqa: E731  as Simulation's
        simulation.peers = AdapterPeers(variant, args, builder, in_turn=form == "in turn")
    simulation.run()
    return simulation.result.evaluations[samples], getattr(simulation.peers, "residual", 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("conversations", type=Path, help="with --base: a prepared dataset")
    parser.add_argument("--base", type=Path, help="folder of a pretrained model. Default: a small one, trained first")
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of a sample")
    parser.add_argument("--forms", choices=FORMS, nargs="+", default=FORMS, help="the first is what others are beside")
    parser.add_argument("--peers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--local_steps", type=int, nargs="+", default=[8, 50])
    parser.add_argument("--samples", type=int, default=3200)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 2e-3, 4e-3], help="the first seed chooses")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.base:
        dataset = load_from_disk(str(args.conversations)).with_format("numpy", ["input_ids", "answer_mask"])
        for_peers, held_out = (cut([*dataset[split]], args.length) for split in ("train", "validation"))
        held_out = held_out[:HELD_OUT]
        base = AutoModelForCausalLM.from_pretrained(args.base, dtype="auto").eval()
        loss = token_weights.evaluate(base, held_out)
    else:
        rows = cut(token_weights.load(args.conversations), args.length)
        order = np.random.default_rng(0).permutation(len(rows))
        parts = np.split(order, [HELD_OUT, HELD_OUT + len(rows) // 3])
        held_out, for_base, for_peers = ([rows[n] for n in part] for part in parts)
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        base = LlamaForCausalLM(LlamaConfig(vocab_size=272, max_position_embeddings=args.length, **sizes))
        loss = token_weights.train(base, for_base, held_out, 1000, 1000, 3e-3, True)
    print(f"{len(for_peers)} rows; base {loss:.4f}", flush=True)
    for peers, local_steps in product(args.peers, args.local_steps):
        losses = {}
        for form in args.forms:
            task = AdapterTask(base, for_peers, held_out, form == "only B")
            variant = Variant(peers, local_steps, local_updates=form != "gradients")
            first = {rate: tune(task, form, variant, rate, 0, args.samples) for rate in args.rates}
            rate = min(first, key=lambda one: first[one][0])
            later = [tune(task, form, variant, rate, seed, args.samples) for seed in range(1, args.seeds)]
            losses[form], residuals = np.array([first[rate], *later]).T
            change = 100 * (losses[form] / losses[args.forms[0]] - 1)
            error = stats.t.ppf(0.975, args.seeds - 1) * change.std(ddof=min(1, args.seeds - 1)) / np.sqrt(args.seeds)
            print(
                f"{peers} peers, {local_steps} local steps, {form}: {losses[form].mean():.4f} at {rate:g}, "
                f"{change.mean():+.2f} ± {error:.2f} %, residual {residuals.mean():.1%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
