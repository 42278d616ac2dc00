"""Builders of the optimizer that takes the global steps.

Peers exchange the optimizer state by position, so all of them must pass the same builders.
"""

from collections.abc import Callable

import torch
from torch.optim.lr_scheduler import LambdaLR

from peerstep.tensors.memory import shared_zeros_like

OptimizerBuilder = Callable[[list[dict]], torch.optim.Optimizer]
SchedulerBuilder = Callable[[torch.optim.Optimizer], LambdaLR]


def constant_schedule(optimizer: torch.optim.Optimizer) -> LambdaLR:
    """Build the schedule of a constant learning rate."""
    return LambdaLR(optimizer, lambda _step: 1.0)


def build_with_statistics(build: OptimizerBuilder, param_groups: list[dict]) -> torch.optim.Optimizer:
    """Build an optimizer, with statistics of zero.

    It needs a number as `lr` in its groups, the number of steps under `step` in its state, and scalar statistics that
    are finite and not negative. Its attribute `second_moments`, by default Adam's `exp_avg_sq`, names the statistics
    that are sent to other peers as roots, see StateLayout.
    """
    optimizer = build(param_groups)
    if not hasattr(optimizer, "second_moments"):
        optimizer.second_moments = ("exp_avg_sq",)  # pyright: ignore[reportAttributeAccessIssue]
    initialize_optimizer_state(optimizer)
    return optimizer


def initialize_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the optimizer statistics without changing a weight. hivemind's own function takes a full step."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters]
    learning_rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, learning_rate in zip(optimizer.param_groups, learning_rates, strict=True):
        group["lr"] = learning_rate
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
        for name, value in optimizer.state[parameter].items():  # `step`, and statistics with coupled weight decay
            optimizer.state[parameter][name] = shared_zeros_like(value) if isinstance(value, torch.Tensor) else 0
