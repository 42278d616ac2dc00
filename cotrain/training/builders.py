"""Builders of parameter groups, LAMB, AdamW and Muon, learning-rate schedule, and hivemind's optimizer and averagers.

Peers exchange the optimizer state by position, so all of them must use these builders.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from hivemind.compression import (
    CompressionBase,
    Float16Compression,
    NoCompression,
    RoleAdaptiveCompression,
    SizeAdaptiveCompression,
)
from torch.optim.lr_scheduler import LambdaLR
from torch_optimizer import Lamb
from transformers import get_linear_schedule_with_warmup
from transformers.pytorch_utils import Conv1D

from cotrain.arguments import (
    CollaborationArguments,
    HyperparameterArguments,
    TrainerArguments,
    check_compression,
)
from cotrain.common.errors import UserError
from peerstep.base import shared_zeros_like
from peerstep.compression import COMPRESSIONS
from peerstep.local_updates import LocalUpdatesOptimizer
from peerstep.optimizer import CollaborativeOptimizer
from peerstep.progress import TrackerOptions
from peerstep.rounds import RoundAverager
from peerstep.state import TrainingStateAverager
from peerstep.swarm import Swarm, supervise


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


def build_local_optimizer(param_groups: list[dict], args: HyperparameterArguments) -> torch.optim.Optimizer:
    """Build the local optimizer, with statistics of zero.

    Each optimizer needs a number as `lr` in its groups, the number of steps under `step` in its state, scalar
    statistics that are finite and not negative, and `second_moments`: the names of statistics that are sent to other
    peers as roots, see TrainingStateAverager.copy_state.

    LAMB follows its paper (You et al., 2019, https://arxiv.org/abs/1904.00962), without bias correction.
    torch_optimizer's `debias=True` multiplies the learning rate after the trust ratio, which the paper's correction
    does not. Its updates had 0.32 of the paper's size at the first step and 0.15 at the tenth.
    """
    lamb = partial(Lamb, clamp_value=args.clamp_value, debias=False)
    builders = {"lamb": lamb, "adamw": torch.optim.AdamW, "muon": MuonAndAdamW}
    optimizer = builders[args.optimizer](
        param_groups,
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        weight_decay=args.weight_decay,
    )
    optimizer.second_moments = ("exp_avg_sq",)  # of all three; Muon's matrices have none
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


def build_scheduler(optimizer: torch.optim.Optimizer, args: HyperparameterArguments):
    """Build the learning-rate schedule: linear warm-up and linear decay over global steps.

    Its value at `step` is the factor for the update of step `step + 1`. transformers' schedule has 0 at both of its
    ends, for which peers would compute a target batch each.
    """
    schedule = get_linear_schedule_with_warmup(
        optimizer, num_warmup_steps=args.warmup_steps, num_training_steps=args.total_steps
    )
    factor = schedule.lr_lambdas[0]
    return LambdaLR(optimizer, lambda step: max(factor(step), factor(step + 1)))


def build_outer_optimizer(param_groups: list[dict], args: HyperparameterArguments) -> torch.optim.SGD:
    """Build the optimizer of the global steps with local updates: SGD with Nesterov momentum, as in DiLoCo."""
    groups = [{"params": group["params"]} for group in param_groups]
    optimizer = torch.optim.SGD(groups, lr=args.outer_learning_rate, momentum=args.outer_momentum, nesterov=True)
    optimizer.second_moments = ()
    initialize_optimizer_state(optimizer)
    return optimizer


def _step_optimizer(args: HyperparameterArguments) -> dict:
    """Return the builders of the optimizer of the global steps and of its schedule."""
    if args.local_updates:
        return {"optimizer": partial(build_outer_optimizer, args=args), "scheduler": None}
    return {"optimizer": partial(build_local_optimizer, args=args), "scheduler": partial(build_scheduler, args=args)}


def _round_options(hyperparameter_args: HyperparameterArguments, args: CollaborationArguments) -> dict:
    """Return the options of RoundAverager. The bounds on contributions are the same at all peers of a run."""
    local_updates = hyperparameter_args.local_updates
    check_compression(args.gradient_compression, local_updates)
    return {
        "local_updates": local_updates,
        "max_grad_norm": hyperparameter_args.max_update_norm if local_updates else hyperparameter_args.max_grad_norm,
        "learning_rate": hyperparameter_args.learning_rate,
        "max_weight": float(args.target_batch_size),  # a peer counts for a whole step at most
        "gradient_compression": COMPRESSIONS[args.gradient_compression](),
        "parameter_compression": COMPRESSIONS[args.state_compression](),
        "average_parameters_every": args.average_state_every,
        "target_group_size": args.target_group_size,
        "bandwidth": args.bandwidth,
        "min_matchmaking_time": args.matchmaking_time,
        "allreduce_timeout": args.averaging_timeout,
        # Seconds of silence after which a peer is excluded from a round. hivemind's default is `matchmaking_time`,
        # which busy machines and slow connections exceed.
        "next_chunk_timeout": max(args.matchmaking_time, args.averaging_timeout / 4),
    }


def build_optimizer(
    model: torch.nn.Module, peer: Swarm, batch_size_per_step: int, args: TrainerArguments
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
    params = build_param_groups(model, training_args.weight_decay, training_args.optimizer)
    optimizer_class = CollaborativeOptimizer
    if training_args.local_updates:
        optimizer_class = partial(
            LocalUpdatesOptimizer,
            inner_params=params,
            inner_optimizer=partial(build_local_optimizer, args=training_args),
            inner_scheduler=partial(build_scheduler, args=training_args),
            max_local_grad_norm=training_args.max_grad_norm,
        )
    return optimizer_class(
        dht=peer.dht,
        public_key=peer.public_key,
        run_id=run_args.run_id,
        target_batch_size=run_args.target_batch_size,
        batch_size_lead=run_args.batch_size_lead,
        batch_size_per_step=batch_size_per_step,
        params=params,
        **_step_optimizer(training_args),
        offload_optimizer=True,
        delay_grad_averaging=run_args.delay_grad_averaging,
        delay_optimizer_step=run_args.delay_optimizer_step,
        client_mode=run_args.client_mode,
        matchmaking_time=run_args.matchmaking_time,
        averaging_timeout=run_args.averaging_timeout,
        load_state_compression=build_state_compression(run_args.load_state_compression),
        performance_ema_alpha=args.tracker.performance_ema_alpha,
        tracker_opts={"args": TrackerOptions(**asdict(args.tracker)), "believes_weights": not peer.dht.is_open},
        grad_averager_factory=partial(
            RoundAverager, believes_weights=not peer.dht.is_open, **_round_options(training_args, run_args)
        ),
        averager_opts={
            "initialize_optimizer": False,  # see initialize_optimizer_state
            "download_timeout": run_args.load_state_timeout,
            "donor_timeout": run_args.averaging_timeout,
            "folder": Path(training_args.output_dir),
        },
        verbose=True,
    )


def build_state_compression(name: str) -> CompressionBase:
    """Build the compression of the training state for peers that download it.

    Single numbers are not compressed: hivemind's scaled_float16 cannot compress them. Optimizer statistics are sent in
    float16 at least: 8 bits, and 16 bits scaled to a tensor's deviation, have no values for small second moments.
    """
    compression = COMPRESSIONS[name]()
    statistics = compression if name == "none" else Float16Compression()
    by_role = RoleAdaptiveCompression(optimizer=statistics, default=compression)
    return SizeAdaptiveCompression(threshold=2, less=NoCompression(), greater_equal=by_role)


@contextlib.contextmanager
def open_observer(
    model: torch.nn.Module,
    peer: Swarm,
    run_id: str,
    args: HyperparameterArguments,
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
        **_step_optimizer(args),
        initialize_optimizer=False,  # see initialize_optimizer_state
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
