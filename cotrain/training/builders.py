"""Builders of parameter groups, LAMB, AdamW and Muon, the learning-rate schedule, and the collaborative optimizer.

Peers exchange the optimizer state by position, so all of them must use these builders.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch_optimizer import Lamb
from transformers import get_linear_schedule_with_warmup
from transformers.pytorch_utils import Conv1D

from cotrain.common.errors import UserError
from cotrain.options import TrainerOptions
from cotrain.settings import Hyperparameters, check_compression
from cotrain.training.lamb import ForeachLamb
from peerstep.local_peer import LocalPeer, supervise
from peerstep.optimizer import CollaborativeOptimizer
from peerstep.options import Options
from peerstep.state.averager import TrainingStateAverager
from peerstep.step.local_updates import LocalUpdates, step_builders


class MuonAndAdamW(torch.optim.Optimizer):
    """torch's Muon for the groups with `is_hidden`, torch's AdamW for the others, as one optimizer.

    Muon's updates are scaled to the size of AdamW's (https://arxiv.org/abs/2502.16982, section 2.2), so that both have
    the same learning rate and weight decay.
    """

    def __init__(self, param_groups: list[dict], **options):
        super().__init__(param_groups, options)
        del options["betas"]
        matrix = torch.empty(1, 1)  # torch builds no optimizer without parameters
        self._parts = {
            True: torch.optim.Muon([matrix], **options, adjust_lr_fn="match_rms_adamw"),
            False: torch.optim.AdamW([matrix], **options),
        }
        for group in self.param_groups:
            group |= {**self._parts[group["is_hidden"]].defaults, **group}

    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            part = self._parts[group["is_hidden"]]
            part.__setstate__({"state": self.state, "param_groups": [group]})
            part.step()


def build_param_groups(model: torch.nn.Module, weight_decay: float, optimizer: str = "lamb") -> list[dict]:
    """Build parameter groups: weights with weight decay; biases, norms and other vectors without.

    For Muon, there is a first group: the matrices of hidden layers, that is, of linear layers outside of the head.
    """
    layers = getattr(model, "base_model", model).modules() if optimizer == "muon" else ()
    hidden = {id(layer.weight) for layer in layers if isinstance(layer, torch.nn.Linear | Conv1D)}
    if hasattr(model, "get_output_embeddings"):  # in the base model of some types
        hidden.discard(id(getattr(model.get_output_embeddings(), "weight", None)))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = {"params": [p for p in parameters if p.ndim > 1 and id(p) not in hidden], "weight_decay": weight_decay}
    groups = [decayed, {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0}]
    if optimizer != "muon":
        return groups  # without `is_hidden`: a training state has the entries of the groups
    matrices = {"params": [p for p in parameters if id(p) in hidden], "weight_decay": weight_decay}
    return [{**group, "is_hidden": group is matrices} for group in (matrices, *groups)]


def build_local_optimizer(param_groups: list[dict], args: Hyperparameters) -> torch.optim.Optimizer:
    """Build the local optimizer.

    LAMB follows its paper (You et al., 2019, https://arxiv.org/abs/1904.00962), without bias correction.
    torch_optimizer's `debias=True` multiplies the learning rate after the trust ratio, which the paper's correction
    does not. Its updates had 0.32 of the paper's size at the first step and 0.15 at the tenth.
    """
    lamb = partial(Lamb, clamp_value=args.clamp_value, debias=False)
    if args.local_updates:  # an optimizer of the device of the model
        lamb = partial(ForeachLamb, clamp_value=args.clamp_value)
    # On a CPU `fused` takes 0.9 ns for a parameter instead of 9.7; the results differ by 4e-9 after 50 steps.
    builders = {"lamb": lamb, "adamw": partial(torch.optim.AdamW, fused=True), "muon": MuonAndAdamW}
    return builders[args.optimizer](
        param_groups,
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        weight_decay=args.weight_decay,
    )


def build_scheduler(optimizer: torch.optim.Optimizer, args: Hyperparameters):
    """Build the learning-rate schedule: linear warm-up and linear decay over global steps.

    Its value at `step` is the factor for the update of step `step + 1`. transformers' schedule has 0 at both of its
    ends, for which peers would compute a target batch each. With --after_last_step continue the last factor
    stays.
    """
    schedule = get_linear_schedule_with_warmup(
        optimizer, num_warmup_steps=args.warmup_steps, num_training_steps=args.total_steps
    )
    factor: Any = schedule.lr_lambdas[0]
    last = args.total_steps - 1 if args.last_step is None else math.inf
    return LambdaLR(optimizer, lambda step: max(factor(min(step, last)), factor(min(step, last) + 1)))


def _step_options(args: Hyperparameters) -> dict:
    """Return what the global steps are made of: the same at all peers of a run."""
    local_updates = None
    if args.local_updates:
        local_updates = LocalUpdates(args.outer_learning_rate, args.outer_momentum, args.max_update_norm)
    return {
        "optimizer": partial(build_local_optimizer, args=args),
        "scheduler": partial(build_scheduler, args=args),
        "local_updates": local_updates,
    }


def build_optimizer(
    model: torch.nn.Module, peer: LocalPeer, batch_size_per_step: int, args: TrainerOptions
) -> CollaborativeOptimizer:
    """Build the collaborative optimizer around the local one and its schedule. Call this in the main thread.

    :param model: the model, already on its device
    :raises UserError: if the target batch size is below the samples of one local step
    """
    run_args, training_args = args.collaboration, args.training
    if run_args.target_batch_size < batch_size_per_step:
        raise UserError(
            f"--target_batch_size {run_args.target_batch_size} is below {batch_size_per_step}, the samples of one "
            "local step (--per_device_train_batch_size x devices x --gradient_accumulation_steps)"
        )
    check_compression(run_args.gradient_compression, training_args.local_updates)
    names = {field.name for field in fields(Options)}
    flags = {**vars(run_args), **vars(training_args), **vars(args.tracker)}
    return CollaborativeOptimizer(
        build_param_groups(model, training_args.weight_decay, training_args.optimizer),
        peer=peer,
        options=Options(
            **{name: value for name, value in flags.items() if name in names},
            batch_size_per_step=batch_size_per_step,
            folder=Path(training_args.output_dir),
        ),
        **_step_options(training_args),
    )


@contextlib.contextmanager
def open_observer(
    model: torch.nn.Module,
    peer: LocalPeer,
    run_id: str,
    args: Hyperparameters,
    download_timeout: float,
    folder: Path | None = None,
) -> Iterator[TrainingStateAverager]:
    """Open an averager that downloads the trainers' state into `model`, for a peer that does not train.

    The averager never joins a group, since its `step` is not called. It offers no state until `allow_state_sharing` is
    set.

    :param download_timeout: seconds that a download may take; a donor may be silent for half of them
    :param folder: see TrainingStateAverager
    """
    averager = TrainingStateAverager(
        dht=peer.dht,
        public_key=peer.public_key,
        prefix=f"{run_id}_state_averager",
        params=build_param_groups(model, args.weight_decay, args.optimizer),
        **step_builders(**_step_options(args)),
        initialize_optimizer=False,  # see build_with_statistics
        offload_optimizer=False,
        reuse_tensors=True,  # the model's parameters in shared memory: the averager's process compares them
        allow_state_sharing=False,
        download_timeout=download_timeout,
        donor_timeout=download_timeout / 2,
        folder=folder,
        start=True,
    )
    try:
        with supervise({"averager": averager}, seconds=12.0, exit_code=0):
            yield averager
    finally:
        averager.shutdown()
