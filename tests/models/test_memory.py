"""The memory of a micro-batch, computed without weights, beside what a CPU and an H100 take."""

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from cotrain.common.batch_size import fit_batch_size
from cotrain.models.adapters import add_adapters
from cotrain.models.device import enable_gradient_checkpointing
from cotrain.models.memory import PeakMeter, base_bytes, key_of, micro_batch_bytes
from cotrain.models.model import build_without_weights, read_config
from deploy import join

SIZES = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_key_value_heads": 8},
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_key_value_heads": 8},
}


def build(name: str, checkpointing: bool = False) -> torch.nn.Module:
    """Build a Llama with adapters of rank 16, without weights."""
    config = LlamaConfig(**SIZES[name], vocab_size=128256, num_attention_heads=32, tie_word_embeddings=name == "1B")
    config.architectures = ["LlamaForCausalLM"]
    names = {"model_name_or_path": "x", "model_revision": None, "lora_tokens": ""}
    args = SimpleNamespace(lora_targets="all-linear", lora_rank=16, lora_alpha=None, **names)
    model = add_adapters(build_without_weights(config), args, SimpleNamespace(chat_template=None)).train()
    if checkpointing:
        enable_gradient_checkpointing(model)
    return model


def total(model: torch.nn.Module, in_4_bits: bool) -> float:
    """Return the GB of a micro-batch of 1,024 tokens: base, adapters, their gradients and sums, and activations."""
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    frozen = base_bytes(model, in_4_bits)
    return 1e-9 * (frozen + 8 * trained + micro_batch_bytes(model, 1, 1024, torch.bfloat16))


@pytest.mark.long
@pytest.mark.parametrize(
    ("checkpointing", "in_4_bits", "measured"),
    [(False, False, 25.4), (True, False, 18.5), (False, True, 14.0), (True, True, 8.1)],
)
def test_adapters_of_llama_8b_take_what_an_h100_took(checkpointing, in_4_bits, measured):
    assert total(build("8B", checkpointing), in_4_bits) == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("name", "dtype", "batch", "estimate"),
    [("albert-large-v2", torch.bfloat16, (4, 512), 3.8), ("albert-large-v2", None, (4, 512), 6.5),
     ("gpt2", torch.bfloat16, (4, 1024), 6.3), ("gpt2", None, (4, 1024), 8.3)],
)  # fmt: skip
def test_full_training_counts_activations(name, dtype, batch, estimate):
    """They were 0: "0.3 GB needed: ok" for ALBERT-large, on a card of 4 GB."""
    model = build_without_weights(read_config(name)).train()
    weights = sum(parameter.numel() for parameter in model.parameters())
    peak = micro_batch_bytes(model, *batch, dtype, has_order=name.startswith("albert"))
    assert 1e-9 * (8 * weights + peak) == pytest.approx(estimate, rel=0.1)


@pytest.mark.parametrize(("name", "measured"), [("8B", 5.9), ("1B", 1.03)])
def test_base_in_4_bits_keeps_embeddings_and_head_in_bf16(name, measured):
    assert 1e-9 * base_bytes(build(name), in_4_bits=True) == pytest.approx(measured, rel=0.05)


def test_peak_is_that_of_the_tensors_alive_at_once():
    start = torch.zeros(1000)
    with PeakMeter({key_of(start)}) as meter:
        for _ in range(3):
            start = start + 1.0
        del start
    assert meter.peak == 2 * 4000


@pytest.mark.parametrize(("free", "expected"), [(0.0, 1), (5.9, 2), (6.0, 4), (9.9, 4), (500.0, 64)])
def test_micro_batch_is_the_largest_power_of_two_that_fits(free, expected, monkeypatch):
    """One function chooses those of trainers and of notebooks."""
    assert fit_batch_size(free, 2.0, 1.0) == expected
    run = SimpleNamespace(stdout=f"{int(free * 1024)}\n")
    monkeypatch.setattr(join.subprocess, "run", lambda *_, **__: run)
    assert join.choose_batch_size() == expected
