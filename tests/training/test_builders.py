"""Optimizers: the same steps as their references, with fewer kernels and no wait for the device."""

from functools import partial

import pytest
import torch
from torch_optimizer import Lamb

from arguments import LocalTrainingArguments
from cotrain.settings import Hyperparameters
from cotrain.training.builders import build_local_optimizer, build_param_groups, build_scheduler
from cotrain.training.lamb import ForeachLamb
from peerstep.state.layout import StateLayout
from peerstep.state.statistics import build_with_statistics
from tests.support.fake_device import DeviceTensor


def make_parameters() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(30, 20, generator=generator), 50 * torch.randn(40, generator=generator), torch.zeros(7)]
    return [torch.nn.Parameter(tensor) for tensor in tensors]


def train(builder, steps: int = 50) -> list[torch.Tensor]:
    """Return the parameters after some steps; one tensor has no gradient in the first ones."""
    parameters, generator = make_parameters(), torch.Generator().manual_seed(1)
    decayed, others = {"params": parameters[:1], "weight_decay": 0.01}, {"params": parameters[1:], "weight_decay": 0.0}
    optimizer = builder([decayed, others])
    for step in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        if step < 3:
            parameters[1].grad = None
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def test_lamb_of_local_updates_takes_the_steps_of_the_reference():
    options = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6}
    found = train(partial(ForeachLamb, clamp_value=10.0, **options))
    expected = train(partial(Lamb, clamp_value=10.0, debias=False, **options))
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).norm() / other.norm()) < 1e-6


def test_lamb_of_local_updates_waits_for_no_tensor(monkeypatch):
    """Each wait empties the queue of a GPU: 1,344 for each local step of the adapters of an 8B model."""
    parameters = [torch.nn.Parameter(DeviceTensor(tensor.detach(), "cuda")) for tensor in make_parameters()]
    for parameter in parameters:
        parameter.grad = DeviceTensor(torch.ones(parameter.shape), "cuda")
    args = LocalTrainingArguments(optimizer="lamb", local_updates=True)
    optimizer, waits = build_local_optimizer([{"params": parameters}], args), []
    monkeypatch.setattr(DeviceTensor, "on_operation", lambda name, blocks: waits.append(name) if blocks else None)
    for _ in range(2):
        optimizer.step()
    assert waits == []
    assert isinstance(build_local_optimizer([{"params": parameters}], LocalTrainingArguments()), Lamb), "global steps"


def test_fused_adamw_has_the_steps_and_the_state_of_the_plain_one():
    """Peers with one and with the other exchange states. It takes a tenth of the time on a CPU."""
    options = {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-6}
    args = LocalTrainingArguments(optimizer="adamw", learning_rate=0.001, adam_beta2=0.999, adam_epsilon=1e-6)
    built = partial(build_local_optimizer, args=args)
    for one, other in zip(train(built), train(partial(torch.optim.AdamW, **options)), strict=True):
        assert float((one - other).norm() / other.norm()) < 1e-6
    groups = [{"params": make_parameters()}]
    layouts = [StateLayout(build_with_statistics(builder, groups)) for builder in (built, torch.optim.AdamW)]
    assert layouts[0].names == layouts[1].names
    assert layouts[0].optimizer.param_groups[0]["fused"]


@pytest.mark.parametrize("name", ["lamb", "adamw", "muon"])
def test_each_optimizer_trains_beside_local_updates(name):
    args = LocalTrainingArguments(optimizer=name, local_updates=True, learning_rate=0.01)
    parameter = torch.nn.Parameter(torch.ones(4, 3))
    optimizer = build_local_optimizer(
        [{"params": [parameter], **({"is_hidden": True} if name == "muon" else {})}], args
    )
    parameter.grad = torch.randn(4, 3)
    optimizer.step()
    assert not torch.equal(parameter, torch.ones(4, 3)) and parameter.isfinite().all()


def test_rate_of_the_last_step_stays_in_a_run_that_continues():
    args = Hyperparameters(warmup_steps=0, total_steps=4, after_last_step="continue")
    scheduler = build_scheduler(build_local_optimizer(build_param_groups(torch.nn.Linear(2, 2), 0.0), args), args)
    factors = [scheduler.lr_lambdas[0](step) for step in range(7)]
    assert factors == [1.0, 0.75, 0.5, 0.25, 0.25, 0.25, 0.25]
