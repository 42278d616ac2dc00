"""The memory that a trainer needs, and the micro-batch that fits."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from hivemind.utils import get_logger

from cotrain.common.batch_size import fit_batch_size
from cotrain.common.flags import format_size
from cotrain.data.manifest import Manifest
from cotrain.models.device import enable_gradient_checkpointing
from cotrain.models.memory import base_bytes, micro_batch_bytes
from cotrain.models.model import build_without_weights
from cotrain.options import DEFAULT_ACCUMULATION, DEFAULT_BATCH_SIZE, LocalOptions, TrainerOptions
from cotrain.tasks.task_loading import load_task
from cotrain.training.hf_trainer import autocast_dtype

logger = get_logger(__name__)

# Copies of the trained parameters on a GPU beside a micro-batch with its gradients, see docs/gpus.md: model and sum of
# the gradients; with local updates model and two moments. With accumulation, gradients of the micro-batches before
GPU_COPIES, GPU_COPIES_OF_LOCAL_UPDATES = 2, 3
# At the start, or with local updates while a round begins or ends, without a micro-batch
GPU_COPIES_ALONE, GPU_COPIES_OF_LOCAL_UPDATES_ALONE = 4, 7

# Local steps of a target batch by default, at least: when it is reached, each trainer is in the middle of one. Four
# trainers with local steps of 8 samples exceed a target of 32 by half.
STEPS_OF_TARGET = 32

SAFE = 0.85  # of the free memory; the rest is for fragmentation and for what CUDA keeps in float32


@dataclass(frozen=True)
class Needs:
    """What a trainer needs memory for: the number of trained parameters, and bytes.

    :ivar micro_batch: at the peak of a micro-batch, with the gradients
    :ivar frozen: of the base model of adapters
    """

    trained: int
    micro_batch: float
    local_updates: bool = False
    accumulates: bool = False
    frozen: float = 0.0
    text: str = ""

    @property
    def on_gpu(self) -> float:
        beside, alone = (GPU_COPIES, GPU_COPIES_ALONE)
        if self.local_updates:
            beside, alone = GPU_COPIES_OF_LOCAL_UPDATES, GPU_COPIES_OF_LOCAL_UPDATES_ALONE
        beside += self.accumulates
        return self.frozen + max(alone * 4.0 * self.trained, beside * 4.0 * self.trained + self.micro_batch)


def plan(args: TrainerOptions, batch_size: int | None = None) -> Needs:
    """Compute what a language model needs, before its weights are downloaded."""
    training = args.training
    task: Any = load_task(args.dataset, args.adopted)
    batch_size = batch_size or training.per_device_train_batch_size or DEFAULT_BATCH_SIZE
    is_adapted = args.dataset.lora_rank is not None
    model: Any = (task.build_model() if is_adapted else build_without_weights(task.config)).train()
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    frozen, base_path = base_bytes(model, args.dataset.load_in_4bit), Path(args.dataset.model_name_or_path)
    if is_adapted and base_path.is_dir() and not args.dataset.load_in_4bit:  # the base may be in float32
        frozen = float(sum(file.stat().st_size for file in base_path.glob("model*.safetensors"))) or frozen
    if training.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    length, dtype = Manifest.load(args.dataset.dataset_path).max_seq_length, autocast_dtype(training)
    peak = micro_batch_bytes(model, batch_size, length, dtype, task.objective.has_sentence_order)
    shown = "?" if peak is None else f"{peak / 1e9:.1f}"
    text = f": {frozen / 1e9:.1f} for the base, {shown} for {batch_size} x {length:,} tokens"
    text += f", the rest for {trained / 1e6:,.1f} million trained parameters"
    accumulates = training.gradient_accumulation_steps != 1
    return Needs(trained, max(peak or 0.0, 4.0 * trained), training.local_updates, accumulates, frozen, text)


def set_batch_size(args: TrainerOptions, device: torch.device) -> None:
    """Choose the samples of a local step as far as no flag has: what fits the GPU, and not much beside the target.

    With local updates it is a step of the local optimizer, which need not be short.
    """
    training = args.training
    stated = training.gradient_accumulation_steps
    training.gradient_accumulation_steps = stated or DEFAULT_ACCUMULATION
    if training.per_device_train_batch_size is not None:
        return
    training.per_device_train_batch_size = size = _fit_batch_size(args, device)
    if not training.local_updates:
        most = max(1, args.collaboration.target_batch_size // STEPS_OF_TARGET)
        training.per_device_train_batch_size = size = max(1, min(size, most // (stated or 1)))
        training.gradient_accumulation_steps = stated or min(DEFAULT_ACCUMULATION, most // size)


def _fit_batch_size(args: TrainerOptions, device: torch.device) -> int:
    if device.type == "cpu" or args.dataset.task is not None:
        return DEFAULT_BATCH_SIZE
    try:
        free = torch.accelerator.get_memory_info(device)[0]
    except RuntimeError:  # not every kind tells
        return DEFAULT_BATCH_SIZE
    one, two = plan(args, 1), plan(args, 2)
    per_sample = max(1.0, two.micro_batch - one.micro_batch)
    size = fit_batch_size(SAFE * free, replace(one, micro_batch=one.micro_batch - per_sample).on_gpu, per_sample)
    logger.info(f"{size} samples of {format_size(per_sample)} fit into the {format_size(free)} of free GPU memory")
    return size


def missing_copies(model: torch.nn.Module, args: LocalOptions) -> list[torch.Tensor]:
    """Return tensors in place of what training keeps on the device beside model and gradients."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    number = (GPU_COPIES_OF_LOCAL_UPDATES if args.local_updates else GPU_COPIES) - 1
    number += args.gradient_accumulation_steps != 1
    return [torch.zeros_like(parameter, dtype=torch.float32) for parameter in trained for _ in range(number)]


def has_own_memory(device: torch.device) -> bool:
    """Whether a device has memory beside that of the machine. Apple's GPUs and integrated ones share it."""
    if device.type == "cuda":
        return not getattr(torch.cuda.get_device_properties(device), "is_integrated", False)
    return device.type not in ("cpu", "mps")
