#!/usr/bin/env python3
"""What it costs that peers weigh by samples, and not by learnt tokens: held-out loss, the same samples in both.

benchmarks/token_weights.py CONVERSATIONS.json     # rows of instruction, input, output; minutes of one core

Each global step averages four peers with 1, 1, 2 and 4 packed rows. Within a peer tokens weigh the same. Each seed is
another order of the samples: from the same base, both variants get the same, and only the weights differ.
"""

import argparse
import copy
import json
from pathlib import Path

import numpy as np
import torch
from scipy import stats
from transformers import LlamaConfig, LlamaForCausalLM

from cotrain.preparation.conversations import encode_conversation, set_end_of_turn
from cotrain.preparation.packing import pack_conversations
from tests.support.conversations import chat, make_chat_tokenizer

LENGTH, PEERS = 768, (1, 1, 2, 4)
AVERAGED = 5  # last steps whose loss is averaged


def load(path: Path) -> list[dict]:
    """Return packed rows of real conversations, in bytes."""
    tokenizer = make_chat_tokenizer("chatml")
    set_end_of_turn(tokenizer)
    rows = json.loads(path.read_text(encoding="utf-8"))
    texts = ((f"{row['instruction']}\n{row['input']}".strip(), row["output"]) for row in rows)
    encoded = (encode_conversation(json.dumps(["row", chat(*x)["messages"], 0, None]), tokenizer) for x in texts)
    return list(pack_conversations(((ids, mask) for ids, mask in encoded if len(ids) <= LENGTH), LENGTH))


def run(model: torch.nn.Module, rows: list[dict]) -> tuple[torch.Tensor, int]:
    """Return the sum of the losses of learnt tokens, and their number."""
    ids = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(row["input_ids"]).long() for row in rows], True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(row["answer_mask"]) for row in rows], True)
    labels = ids.masked_fill(mask == 0, -100)[:, 1:]
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return loss, int((labels != -100).sum())


def build_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=272, max_position_embeddings=LENGTH, **sizes))


def evaluate(model: torch.nn.Module, rows: list[dict]) -> float:
    with torch.no_grad():
        losses, counts = zip(*(run(model, rows[n : n + 8]) for n in range(0, len(rows), 8)), strict=True)
    return float(sum(losses)) / sum(counts)


def train(
    model: torch.nn.Module, rows: list[dict], held_out: list[dict], seed: int, steps: int, rate: float, by_tokens: bool
) -> float:
    """Train with a rate that falls to zero; return the mean of the held-out loss after each of the last steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    order, losses = np.random.default_rng(seed), []
    for step in range(steps):
        optimizer.zero_grad()
        picked = iter(order.choice(len(rows), sum(PEERS), replace=False))
        results = [run(model, [rows[next(picked)] for _ in range(size)]) for size in PEERS]
        weights = np.array([count if by_tokens else size for (_, count), size in zip(results, PEERS, strict=True)])
        for (loss, count), weight in zip(results, weights / weights.sum(), strict=True):
            (loss / count * weight).backward()
        optimizer.step()
        schedule.step()
        if step >= steps - AVERAGED:
            losses.append(evaluate(model, held_out))
    return float(np.mean(losses))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("conversations", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rate", type=float, default=5e-4)
    parser.add_argument("--seeds", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    samples = load(args.conversations)
    learnt = np.array([sample["answer_mask"].sum() for sample in samples])
    print(f"{len(samples)} rows; learnt tokens of one {learnt.min()} to {learnt.max()}, deviation {learnt.std():.0f}")
    order = np.random.default_rng(0).permutation(len(samples))
    rows, held_out = ([samples[n] for n in part] for part in (order[40:], order[:40]))
    base = build_model()
    print(f"base: {train(base, rows, held_out, 1000, args.steps, 10 * args.rate, True):.4f}", flush=True)
    differences = []
    for seed in range(args.seeds):
        by_samples, by_tokens = (
            train(copy.deepcopy(base), rows, held_out, seed, args.steps, args.rate, kind) for kind in (False, True)
        )
        differences.append(100 * (by_samples / by_tokens - 1))
        print(
            f"seed {seed}: by samples {by_samples:.4f}, by tokens {by_tokens:.4f}, {differences[-1]:+.3f} %",
            flush=True,
        )
    # Two-sided, of Student's distribution
    error = stats.t.ppf(0.975, args.seeds - 1) * np.std(differences, ddof=1) / np.sqrt(args.seeds)
    print(f"by samples beside by tokens: {np.mean(differences):+.3f} ± {error:.3f} % of the loss (95 %)")


if __name__ == "__main__":
    main()
