"""The model and its optimizer, without a network."""

from functools import partial

import pytest
import torch
from transformers import AlbertForPreTraining, AutoConfig

from arguments import LocalTrainingArguments
from cotrain.common.argument_parser import parse_arguments
from cotrain.common.errors import UserError
from cotrain.models.device import choose_kernels, enable_gradient_checkpointing
from cotrain.models.model import read_config
from cotrain.peer.signed_settings import SETTINGS
from cotrain.settings import Hyperparameters
from cotrain.training.builders import build_local_optimizer, build_param_groups
from peerstep.state.statistics import build_with_statistics, initialize_optimizer_state
from tests.support.engine import CONFIG, make_batch
from tests.support.families import FAMILIES
from tests.support.models import build_model
from tests.support.peers import TINY_CONFIGS


@pytest.mark.parametrize("name", ["no-such", "no/such"])
def test_name_that_the_hub_does_not_have_is_one_line_of_ours(name, monkeypatch):
    """The Hub library's message is about its cache, or its own offline mode."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError) as error:
        read_config(name)
    reason = "the Hub does not answer, or has no model of that name"
    assert f"no model configuration at '{name}' ({reason}); pass" in str(error.value)


@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_gradient_checkpointing_computes_again_and_the_same(family):
    """transformers does not support it for ALBERT."""
    batch = make_batch(length=16)
    if family != "albert":
        del batch["sentence_order_label"]
    gradients, calls = [], []
    for with_checkpoints in (False, True):
        model = build_model(AutoConfig.for_model(**TINY_CONFIGS[family], vocab_size=1000), "run").train()
        if with_checkpoints:
            enable_gradient_checkpointing(model)
        activations = [module for module in model.modules() if "GELU" in type(module).__name__]
        count = [0]
        for module in activations:
            module.register_forward_hook(lambda *_, count=count: count.__setitem__(0, count[0] + 1))
        model(**batch).loss.backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
        calls.append(count[0])
    assert torch.allclose(*gradients, atol=1e-7)
    assert calls[1] == calls[0] + 2, "the activation of each of the two layers is computed once more"


def test_weight_decay_skips_each_bias_and_each_norm():
    model = build_model(CONFIG, "run")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, not_decayed = ([names[id(p)] for p in group["params"]] for group in build_param_groups(model, 0.01))
    assert len(decayed) + len(not_decayed) == len(names)
    assert any("full_layer_layer_norm" in name for name in not_decayed)
    for name in names.values():
        is_exempt = name.endswith("bias") or "norm" in name.lower()
        assert (name in not_decayed) == is_exempt, name


def test_lamb_takes_the_step_of_its_paper():
    """You et al. 2019, algorithm 2, one step from zero moments, computed by hand in float64."""
    weights, gradient = torch.tensor([3.0, -4.0, 12.0]), torch.tensor([0.5, -1.0, 0.25])
    beta1, beta2, epsilon, decay, learning_rate = 0.9, 0.999, 1e-6, 0.01, 0.1
    first, second = (1 - beta1) * gradient.double(), (1 - beta2) * gradient.double() ** 2
    update = first / (second.sqrt() + epsilon) + decay * weights.double()
    expected = weights.double() - learning_rate * weights.double().norm() / update.norm() * update

    parameter = torch.nn.Parameter(weights.clone())
    args = Hyperparameters(learning_rate=learning_rate, weight_decay=decay)
    optimizer = build_local_optimizer([{"params": [parameter], "weight_decay": decay}], args)
    parameter.grad = gradient
    optimizer.step()
    assert torch.allclose(parameter.detach().double(), expected, rtol=1e-6)
    # the norm of the step is learning_rate x norm of the weights, independent of the scale of the gradient
    assert (parameter.detach() - weights).norm() == pytest.approx(0.1 * 13.0, rel=1e-5)


@pytest.mark.parametrize("name", ["lamb", "adamw", "muon"])
def test_initializing_the_optimizer_moves_nothing(name):
    model = AlbertForPreTraining(CONFIG)
    before = [parameter.clone() for parameter in model.parameters()]
    args = Hyperparameters(learning_rate=0.5, optimizer=name)
    optimizer = build_with_statistics(partial(build_local_optimizer, args=args), build_param_groups(model, 0.1, name))
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert len(optimizer.state) == len(before), "hivemind would take a step to fill it"
    for state in optimizer.state.values():
        assert not any(torch.as_tensor(value).any() for value in state.values())
    assert {group["lr"] for group in optimizer.param_groups} == {0.5}
    assert all(parameter.grad is None for parameter in model.parameters())
    initialize_optimizer_state(optimizer)  # a second call changes nothing either
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def build_family(family: str) -> torch.nn.Module:
    model_type, fields, *_ = FAMILIES[family]
    return build_model(AutoConfig.for_model(**{**fields, "model_type": model_type}, vocab_size=600), "run")


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "albert", "deberta-v3", "opt"])
def test_muon_is_for_matrices_of_hidden_layers(family):
    """Not for embeddings, the head of the model, biases and norms."""
    model = build_family(family)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    hidden, *others = ([names[id(p)] for p in group["params"]] for group in build_param_groups(model, 0.1, "muon"))
    assert len(hidden) + sum(map(len, others)) == len(names)
    assert hidden and not [name for name in hidden if "embed" in name and "project" not in name and "map" not in name]
    assert not [name for name in hidden if "head" in name or "predictions" in name or "classifier" in name]
    assert any("embed" in name or "wte" in name for name in others[0])


def test_muon_is_torchs_beside_torchs_adamw():
    """Each group takes the step of torch's optimizer, also after a transfer of the state."""
    ours, theirs = build_family("llama"), build_family("llama")
    args = Hyperparameters(optimizer="muon", learning_rate=0.01, weight_decay=0.1, adam_epsilon=1e-7)
    optimizer = build_local_optimizer(build_param_groups(ours, 0.1, "muon"), args)
    hidden, matrices, vectors = build_param_groups(theirs, 0.1, "muon")
    muon = torch.optim.Muon(hidden["params"], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw", eps=1e-7)
    groups = [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in (matrices, vectors)]
    adamw = torch.optim.AdamW(groups, lr=0.01, eps=1e-7)
    tokens = torch.randint(600, (2, 16), generator=torch.Generator().manual_seed(0))
    for step in range(3):
        for model, optimizers in ((ours, [optimizer]), (theirs, [muon, adamw])):
            model(input_ids=tokens, labels=tokens).loss.backward()
            for an_optimizer in optimizers:
                an_optimizer.step()
                an_optimizer.zero_grad()
        if step == 1:
            optimizer.load_state_dict(optimizer.state_dict())
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
    steps = [state["step"] for state in optimizer.state_dict()["state"].values() if "step" in state]
    assert set(map(int, steps)) == {3} and len(steps) < len(optimizer.state)


# How this machine computes


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention_implementations_compute_the_same(implementation, tmp_path):
    model, tokens = build_family("llama"), torch.arange(5, 21)[None]
    expected = model(input_ids=tokens).logits
    choose_kernels(model, LocalTrainingArguments(attn_implementation=implementation), num_gpus=0)
    assert model.config._attn_implementation == implementation
    assert torch.allclose(model(input_ids=tokens).logits, expected, atol=1e-5)
    model.save_pretrained(tmp_path)
    assert "attn_implementation" not in (tmp_path / "config.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("family", "flags", "num_gpus", "fault"),
    [
        ("llama", {"attn_implementation": "flash_attention_2"}, 0, "_implementation flash_attention_2 .*needs a GPU"),
        ("llama", {"attn_implementation": "flex_attention"}, 0, "--attn_implementation flex_attention .*needs a GPU"),
        ("deberta-v3", {"attn_implementation": "sdpa"}, 0, "--attn_implementation sdpa .*the model has another one"),
        ("llama", {"torch_compile": True}, 2, "--torch_compile .*several GPUs"),
        ("llama", {"torch_compile": True}, 0, "--torch_compile .*compiler found"),
    ],
)
def test_what_is_not_available_is_one_line(monkeypatch, family, flags, num_gpus, fault):
    def fail(*_):
        raise RuntimeError("No working C++ compiler found\nin this test")

    monkeypatch.setattr(torch, "compile", lambda _: fail)
    with pytest.raises(UserError, match=fault) as error:
        choose_kernels(build_family(family), LocalTrainingArguments(**flags), num_gpus)
    assert "\n" not in str(error.value)


@pytest.mark.long
def test_compiled_model_computes_the_same():
    model, tokens = build_family("llama"), torch.arange(5, 21)[None]
    names, expected = list(model.state_dict()), model(input_ids=tokens, labels=tokens).loss
    choose_kernels(model, LocalTrainingArguments(torch_compile=True), num_gpus=0)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4) and list(model.state_dict()) == names


def test_kernels_are_local_and_have_known_names():
    """A name with a slash would be downloaded from the Hub and run."""
    assert not {"attn_implementation", "torch_compile"} & SETTINGS
    with pytest.raises(SystemExit):
        parse_arguments([LocalTrainingArguments], "test", ["--attn_implementation", "someone/kernel"])
