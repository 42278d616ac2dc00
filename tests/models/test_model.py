"""The model and its optimizer, without a network."""

import pytest
import torch
from transformers import AlbertForPreTraining, AutoConfig

from cotrain.arguments import HyperparameterArguments
from cotrain.models.model import build_model, enable_gradient_checkpointing
from cotrain.training.optimizer import build_local_optimizer, build_param_groups, initialize_optimizer_state
from tests.support.fakes import make_batch
from tests.support.peers import TINY_CONFIGS
from tests.support.swarm import CONFIG


def test_initial_weights_depend_on_the_run_alone():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    one = build_model(CONFIG, "run").state_dict()
    assert torch.equal(torch.rand(3), expected), "the random generator is left alone"
    same, other = build_model(CONFIG, "run").state_dict(), build_model(CONFIG, "another").state_dict()
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


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
    args = HyperparameterArguments(learning_rate=learning_rate, weight_decay=decay)
    optimizer = build_local_optimizer([{"params": [parameter], "weight_decay": decay}], args)
    parameter.grad = gradient
    optimizer.step()
    assert torch.allclose(parameter.detach().double(), expected, rtol=1e-6)
    # the norm of the step is learning_rate x norm of the weights, independent of the scale of the gradient
    assert (parameter.detach() - weights).norm() == pytest.approx(0.1 * 13.0, rel=1e-5)


@pytest.mark.parametrize("name", ["lamb", "adamw"])
def test_initializing_the_optimizer_moves_nothing(name):
    model = AlbertForPreTraining(CONFIG)
    before = [parameter.clone() for parameter in model.parameters()]
    args = HyperparameterArguments(learning_rate=0.5, optimizer=name)
    optimizer = build_local_optimizer(build_param_groups(model, 0.1), args)
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert len(optimizer.state) == len(before), "hivemind would take a step to fill it"
    assert all(state["step"] == 0 and not state["exp_avg"].any() for state in optimizer.state.values())
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]
    assert all(parameter.grad is None for parameter in model.parameters())
    initialize_optimizer_state(optimizer)  # a second call changes nothing either
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_adamw_is_torchs_and_its_steps_survive_compression():
    """hivemind sends tensors in float16, in which step 2049 is 2048 and step 70,000 infinity."""
    args = HyperparameterArguments(optimizer="adamw", learning_rate=0.1, weight_decay=0.01)
    ours, theirs = (torch.nn.Parameter(torch.tensor([3.0, -4.0])) for _ in range(2))
    optimizer = build_local_optimizer([{"params": [ours]}], args)
    reference = torch.optim.AdamW([theirs], lr=0.1, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01)

    def step_both(gradient):
        for parameter, an_optimizer in ((ours, optimizer), (theirs, reference)):
            parameter.grad = torch.tensor(gradient)
            an_optimizer.step()
        assert torch.equal(ours, theirs)

    step_both([0.5, -1.0])
    state = optimizer.state_dict()
    assert state["state"][0]["step"] == 1 and type(state["state"][0]["step"]) is int
    state["state"][0]["step"] = 70_000
    optimizer.load_state_dict(state)
    reference.state[theirs]["step"] += 69_999
    step_both([0.25, 2.0])
    assert optimizer.state_dict()["state"][0]["step"] == 70_001
