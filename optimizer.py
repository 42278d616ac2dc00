"""How the model is optimized: parameter groups, LAMB or AdamW, the learning-rate schedule, and hivemind around them.

Peers exchange the optimizer's state by position, so each of them must build it here.
"""

from functools import partial

import torch
from hivemind.compression import (
    CompressionBase,
    Float16Compression,
    NoCompression,
    Quantile8BitQuantization,
    ScaledFloat16Compression,
    Uniform8BitQuantization,
)
from torch_optimizer import Lamb
from transformers import get_linear_schedule_with_warmup
from transformers.trainer_pt_utils import get_parameter_names

from arguments import (
    AveragerArguments,
    HyperparameterArguments,
    OptimizerArguments,
    ProgressTrackerArguments,
)
from errors import UserError
from hivemind_fixes import AdamW, Optimizer, TrainingStateAverager
from utils import Peer

# Norms by class and by name: ALBERT's `full_layer_layer_norm` is missed by the customary "LayerNorm.weight".
_NO_DECAY_CLASSES = [torch.nn.LayerNorm]
_NO_DECAY_NAMES = [r"(^|\.)bias$", r"layer_?norm", r"(^|[._])norm($|\.)"]

COMPRESSIONS: dict[str, type[CompressionBase]] = {
    "none": NoCompression,
    "float16": Float16Compression,
    "scaled_float16": ScaledFloat16Compression,
    "uniform8": Uniform8BitQuantization,
    "quantile8": Quantile8BitQuantization,
}


def make_param_groups(model: torch.nn.Module, weight_decay: float) -> list[dict]:
    """Two groups: weights, which decay, and biases and norms, which do not."""
    decayed = set(get_parameter_names(model, _NO_DECAY_CLASSES, _NO_DECAY_NAMES))
    parameters = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [
        {"params": [p for name, p in parameters if name in decayed], "weight_decay": weight_decay},
        {"params": [p for name, p in parameters if name not in decayed], "weight_decay": 0.0},
    ]


def make_optimizer(param_groups: list[dict], args: HyperparameterArguments) -> torch.optim.Optimizer:
    """The local optimizer that `args.optimizer` names, with statistics of zero.

    LAMB is that of its paper (You et al., 2019, https://arxiv.org/abs/1904.00962), without bias correction:
    torch_optimizer's `debias=True` multiplies the learning rate after the trust ratio, which the paper's correction
    does not: steps came out 0.32 of the paper's at the first step and 0.15 at the tenth.
    """
    common = {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
        "weight_decay": args.weight_decay,
    }
    if args.optimizer == "adamw":
        optimizer = AdamW(param_groups, **common)
    else:
        optimizer = Lamb(param_groups, **common, clamp_value=args.clamp_value, debias=False)
    initialize_statistics(optimizer)
    return optimizer


def initialize_statistics(optimizer: torch.optim.Optimizer) -> None:
    """Create the optimizer's statistics without moving a weight.

    hivemind would run a real step with zero gradients at the full learning rate, at every start of every peer.
    """
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
        optimizer.state[parameter]["step"] *= 0  # a number, or AdamW's tensor


def make_scheduler(optimizer: torch.optim.Optimizer, args: HyperparameterArguments):
    """Linear warm-up and decay over the collaboration's steps."""
    return get_linear_schedule_with_warmup(
        optimizer, num_warmup_steps=args.warmup_steps, num_training_steps=args.total_steps
    )


def build_optimizer(
    model: torch.nn.Module,
    peer: Peer,
    run_id: str,
    batch_size_per_step: int | None,
    max_grad_norm: float,
    hyperparameters: HyperparameterArguments,
    optimizer_args: OptimizerArguments,
    averager_args: AveragerArguments,
    tracker_args: ProgressTrackerArguments,
) -> Optimizer:
    """hivemind's optimizer around the local one and its schedule. Call it in the main thread.

    :param batch_size_per_step: samples between two calls of its `step`; None for an auxiliary peer, which takes no
        step and only helps others average
    :raises UserError: if the target batch size is below the samples of one local step
    """
    args, is_auxiliary = optimizer_args, batch_size_per_step is None
    target_batch_size = args.target_batch_size - args.batch_size_lead
    if not is_auxiliary and target_batch_size < batch_size_per_step:
        raise UserError(
            f"--target_batch_size {args.target_batch_size} (less --batch_size_lead) is below {batch_size_per_step}, "
            f"the samples of one local step (--per_device_train_batch_size x devices x --gradient_accumulation_steps)"
        )
    averaging_compression = COMPRESSIONS[args.averaging_compression]()
    return Optimizer(
        dht=peer.dht,
        private_key=peer.private_key,
        run_id=run_id,
        target_batch_size=target_batch_size,
        batch_size_per_step=batch_size_per_step,
        params=make_param_groups(model, hyperparameters.weight_decay),
        optimizer=partial(make_optimizer, args=hyperparameters),
        scheduler=partial(make_scheduler, args=hyperparameters),
        max_grad_norm=max_grad_norm,
        auxiliary=is_auxiliary,
        offload_optimizer=not is_auxiliary,
        delay_grad_averaging=args.delay_grad_averaging and not is_auxiliary,
        delay_optimizer_step=args.delay_optimizer_step and not is_auxiliary,
        client_mode=args.client_mode,
        average_state_every=args.average_state_every,
        matchmaking_time=args.matchmaking_time,
        averaging_timeout=args.averaging_timeout,
        # A peer of the group that is silent for so long is left out of a round. hivemind would take matchmaking_time,
        # which busy machines and slow lines exceed.
        next_chunk_timeout=max(args.matchmaking_time, args.averaging_timeout / 4),
        grad_compression=averaging_compression,
        state_averaging_compression=averaging_compression,
        load_state_compression=COMPRESSIONS[args.load_state_compression](),
        performance_ema_alpha=tracker_args.performance_ema_alpha,
        tracker_opts={
            "min_refresh_period": tracker_args.min_refresh_period,
            "max_refresh_period": tracker_args.max_refresh_period,
            "default_refresh_period": tracker_args.default_refresh_period,
            "expected_drift_peers": tracker_args.expected_drift_peers,
            "expected_drift_rate": tracker_args.expected_drift_rate,
            "metadata_expiration": tracker_args.metadata_expiration,
        },
        # hivemind hands `averager_opts` to the state averager only, whatever its documentation says
        grad_averager_opts={"target_group_size": averager_args.target_group_size, "bandwidth": args.bandwidth},
        state_averager_opts={
            "initialize_optimizer": False,  # see initialize_statistics
            "target_group_size": averager_args.target_group_size,
            "bandwidth": args.bandwidth,
            "download_timeout": args.load_state_timeout,
            "donor_timeout": args.averaging_timeout,
        },
        verbose=True,
    )


def build_state_averager(
    model: torch.nn.Module, peer: Peer, run_id: str, training_args: HyperparameterArguments, download_timeout: float
) -> TrainingStateAverager:
    """What a peer needs that watches but does not train: it downloads the state that trainers offer.

    It never joins a group, since nobody calls its `step`, and offers nothing until `allow_state_sharing` is set.
    """
    return TrainingStateAverager(
        dht=peer.dht,
        prefix=f"{run_id}_state_averager",
        params=make_param_groups(model, training_args.weight_decay),
        optimizer=partial(make_optimizer, args=training_args),
        scheduler=partial(make_scheduler, args=training_args),
        initialize_optimizer=False,  # see initialize_statistics
        offload_optimizer=False,
        allow_state_sharing=False,
        download_timeout=download_timeout,
        donor_timeout=download_timeout / 2,
        start=True,
    )
