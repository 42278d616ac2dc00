"""Peers, models and optimizers for tests of the engine. They need nothing of cotrain."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch_optimizer import Lamb
from transformers import AlbertConfig, AlbertForPreTraining

from peerstep.local_peer import LocalPeer
from peerstep.optimizer import CollaborativeOptimizer
from peerstep.options import Options
from peerstep.step.local_updates import LocalUpdates

LOCAL = "/ip4/127.0.0.1/tcp/0"
TINY_ALBERT = {
    "model_type": "albert",
    "embedding_size": 16,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "classifier_dropout_prob": 0.0,
    "max_position_embeddings": 64,
}
CONFIG = AlbertConfig(vocab_size=1000, **{name: value for name, value in TINY_ALBERT.items() if name != "model_type"})


def make_batch(size: int = 8, length: int = 32) -> dict[str, torch.Tensor]:
    """Build random samples with the same number of masked tokens in each."""
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(5, 1000, (size, length), generator=generator)
    labels = input_ids.clone()
    labels[:, ::4] = -100
    sentence_order_label = torch.randint(0, 2, (size,), generator=generator)
    return {"input_ids": input_ids, "labels": labels, "sentence_order_label": sentence_order_label}


def build_model() -> AlbertForPreTraining:
    """Build a model whose initial weights are always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AlbertForPreTraining(CONFIG)


@dataclass
class Hyperparameters:
    """The optimizer of the run, and its schedule."""

    optimizer: str = "lamb"  # or adamw
    learning_rate: float = 0.01
    warmup_steps: int = 0
    total_steps: int = 1000
    weight_decay: float = 0.01
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-6
    clamp_value: float = 10_000.0
    local_updates: bool = False
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.5
    max_update_norm: float = 1.0

    def build_groups(self, model: torch.nn.Module) -> list[dict]:
        """Return matrices with weight decay, and vectors without."""
        decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
        vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
        groups = {"params": decayed, "weight_decay": self.weight_decay}, {"params": vectors, "weight_decay": 0.0}
        return list(groups)

    def build_optimizer(self, groups: list[dict]) -> torch.optim.Optimizer:
        betas, lamb = (self.adam_beta1, self.adam_beta2), partial(Lamb, clamp_value=self.clamp_value, debias=False)
        build = lamb if self.optimizer == "lamb" else partial(torch.optim.AdamW, fused=True)  # as the scripts do
        return build(groups, lr=self.learning_rate, betas=betas, eps=self.adam_epsilon, weight_decay=self.weight_decay)

    def build_scheduler(self, optimizer: torch.optim.Optimizer) -> LambdaLR:
        """Build linear warm-up and decay; the factor of the update of step `step + 1` is never 0 in the run."""
        warmup, total = self.warmup_steps, self.total_steps

        def factor(step: int) -> float:
            return step / warmup if step < warmup else max(0.0, (total - step) / (total - warmup))

        return LambdaLR(optimizer, lambda step: max(factor(step), factor(step + 1)))


def build_optimizer(model: torch.nn.Module, peer, batch_size_per_step: int, **settings) -> CollaborativeOptimizer:
    """Build an optimizer.

    :param settings: values of Hyperparameters and Options
    """
    names = {field.name for field in fields(Hyperparameters)}
    chosen = Hyperparameters(**{name: value for name, value in settings.items() if name in names})
    options = {name: value for name, value in settings.items() if name not in names}
    local = LocalUpdates(chosen.outer_learning_rate, chosen.outer_momentum, chosen.max_update_norm)
    return CollaborativeOptimizer(
        chosen.build_groups(model),
        chosen.build_optimizer,
        peer,
        Options(batch_size_per_step=batch_size_per_step, **options),
        scheduler=chosen.build_scheduler,
        local_updates=local if chosen.local_updates else None,
    )


@contextlib.contextmanager
def local_optimizer(model: torch.nn.Module, peer, batch_size_per_step: int, **settings) -> Iterator:
    """Open an optimizer without delays: the global step is complete when `step` returns."""
    settings = {
        "max_grad_norm": 0.0, "matchmaking_time": 3.1, "averaging_timeout": 15.0, "delay_grad_averaging": False,
        "delay_optimizer_step": False, "min_refresh_period": 0.1, "max_refresh_period": 0.5,
        "default_refresh_period": 0.2, **settings,
    }  # fmt: skip
    optimizer = build_optimizer(model, peer, batch_size_per_step, **settings)
    try:
        yield optimizer
    finally:
        optimizer.shutdown()


def local_peer(folder: Path, run_id: str, initial_peers: tuple[str, ...] = (), **options) -> LocalPeer:
    """Start a peer on this machine."""
    return LocalPeer(run_id, folder / "identity.key", initial_peers, host_maddrs=[LOCAL], **options)
