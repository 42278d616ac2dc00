"""What a member of a group reads from another one's contribution: attacks as a test of docs/trust.md.

The attacker has the model and the contribution, as the reducer of these layers has. The first attack looks at which
rows of the embedding have a gradient: those of the tokens in the batch. The second one is the first part of DAGER
(https://arxiv.org/abs/2405.15586): the gradient of a linear layer is in the span of its inputs, so a token at a place
is a candidate if what the first layer receives of it is in the span of the gradient.
"""

from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

from cotrain.settings import Hyperparameters
from cotrain.training.builders import build_local_optimizer, build_param_groups, build_scheduler
from peerstep.step.accumulators import GradientAccumulator
from peerstep.step.local_updates import LocalTraining

VOCAB, WIDTH, LENGTH = 1000, 192, 16


def build_model() -> GPT2LMHeadModel:
    """Return a model with a head of its own: a tied one gives each row of the embedding a gradient."""
    torch.manual_seed(0)
    sizes = {"n_embd": WIDTH, "n_layer": 1, "n_head": 2, "n_positions": LENGTH, "vocab_size": VOCAB}
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False}
    return GPT2LMHeadModel(GPT2Config(**sizes, **tokens, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0))


def draw(number: int, seed: int = 1) -> torch.Tensor:
    """Return samples, shape (number, LENGTH), with few common and many rare tokens, as a language has."""
    weights, generator = 1 / torch.arange(1, VOCAB + 1), torch.Generator().manual_seed(seed)
    return torch.multinomial(weights, number * LENGTH, True, generator=generator).view(number, LENGTH)


def contribution(model: torch.nn.Module, samples: torch.Tensor, local_updates: bool = False) -> list[torch.Tensor]:
    """Return what a trainer contributes to a round after local steps of four samples, in float16 as it is sent."""
    groups = build_param_groups(model, 0.01, "adamw")
    parameters = [parameter for group in groups for parameter in group["params"]]
    own = [torch.zeros_like(parameter) for parameter in parameters]
    if local_updates:
        args = Hyperparameters(optimizer="adamw", learning_rate=1e-3, warmup_steps=0, local_updates=True)
        builders = partial(build_local_optimizer, args=args), partial(build_scheduler, args=args)
        step_parameters = [parameter.detach().clone() for parameter in parameters]
        accumulator = LocalTraining(groups, *builders, 1.0, parameters, step_parameters, own)
    else:
        accumulator = GradientAccumulator(parameters, parameters, own)
    for batch in samples.split(4):
        model.zero_grad()
        model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        accumulator.add(len(batch))
    accumulator.load()
    sent = {id(parameter): tensor.half().float() for parameter, tensor in zip(parameters, own, strict=True)}
    return [sent.get(id(parameter)) for parameter in model.parameters()]


def named(model: torch.nn.Module, tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(zip((name for name, _ in model.named_parameters()), tensors, strict=True))


@torch.no_grad()
def find_sequences(model: GPT2LMHeadModel, gradient: torch.Tensor) -> list[set[int]]:
    """Return for each place the tokens whose input to the first layer is in the span of the layer's gradient.

    :param gradient: shape (inputs, outputs). A span of all inputs tells nothing, and all tokens are returned
    """
    body, (vectors, sizes, _) = model.transformer, torch.linalg.svd(gradient.double(), full_matrices=False)
    span = vectors[:, sizes > 1e-3 * sizes[0]]  # float16 rounds
    found = []
    for place in range(LENGTH - 1):  # the last token predicts nothing
        inputs = body.h[0].ln_1(body.wte.weight + body.wpe.weight[place]).double()
        rest = inputs - inputs @ span @ span.T
        found.append(set((rest.norm(dim=1) < 0.03 * inputs.norm(dim=1)).nonzero().flatten().tolist()))
    return found


def count_found(found: list[set[int]], sample: torch.Tensor, most: int) -> int:
    """Return for how many places the token of a sample is one of at most `most` candidates."""
    pairs = zip(found, sample.tolist(), strict=False)
    return sum(token in tokens and len(tokens) <= most for tokens, token in pairs)


def attack(samples: torch.Tensor, local_updates: bool = False) -> tuple[torch.Tensor, list[set[int]]]:
    """Return the norms of the rows of the embedding's contribution, and the candidates for each place."""
    model = build_model()
    sent = named(model, contribution(model, samples, local_updates))
    found = find_sequences(build_model(), sent["transformer.h.0.attn.c_attn.weight"])
    return sent["transformer.wte.weight"].norm(dim=1), found


def test_default_shows_one_sample_word_for_word():
    samples = draw(1)
    _, found = attack(samples)
    assert found == [{token} for token in samples[0, :-1].tolist()]


def test_default_shows_which_tokens_four_samples_have():
    """And nearly in which order: a place has at most the 42 tokens of the batch as candidates, of 1,000."""
    samples = draw(4)
    rows, found = attack(samples)
    there = set(samples[:, :-1].flatten().tolist())
    assert set(rows.nonzero().flatten().tolist()) == there
    assert [count_found(found, sample, len(there)) for sample in samples] == [LENGTH - 1] * 4


@pytest.mark.parametrize("local_updates", [False, True])
def test_many_samples_show_no_order(local_updates):
    """Of 512 samples, or 128 local steps, no sequence is found. That a rare token was in one of them still shows."""
    samples = draw(512)
    rows, found = attack(samples, local_updates)
    assert sum(count_found(found, sample, VOCAB // 4) for sample in samples) <= 0.05 * samples.numel()
    there = samples[:, :-1].flatten().bincount(minlength=VOCAB)
    assert rows[there == 1].min() > 10 * rows[there == 0].max()


def test_adapters_show_less():
    """The embedding is frozen, and an adapter of rank 4 shows four directions of the 15 inputs of one sample."""
    config = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    adapted, samples = get_peft_model(build_model(), config), draw(1)
    sent = named(adapted, contribution(adapted, samples))
    assert sent["base_model.model.transformer.wte.weight"] is None
    (of_inputs,) = [tensor for name, tensor in sent.items() if "lora_A" in name]
    assert count_found(find_sequences(build_model(), of_inputs.T), samples[0], VOCAB // 4) == 0
