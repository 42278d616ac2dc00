"""What a trainer computes on: the task of the run, its samples and its model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from cotrain.common.atomic_files import lock_folder
from cotrain.common.errors import UserError
from cotrain.data.own_samples import OwnSamples
from cotrain.models.device import choose_kernels, enable_gradient_checkpointing
from cotrain.options import TrainerOptions
from cotrain.preparation.own_data import prepare_own_data
from cotrain.task import Task
from cotrain.tasks.task_loading import build_initial_model, load_samples, load_task
from cotrain.training.hf_trainer import choose_devices
from cotrain.training.needs import set_batch_size
from peerstep.tensors.memory import share_parameters


@dataclass(frozen=True)
class Workload:
    """Task, samples and model of a trainer. The model is on the CPU until it is moved to `device`.

    :param num_devices: number of GPUs that transformers' Trainer uses; 1 without a GPU
    """

    task: Task
    samples: Dataset
    model: torch.nn.Module
    device: torch.device
    num_devices: int

    def num_parameters(self, only_trainable: bool = False) -> int:
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad or not only_trainable)


def load_workload(args: TrainerOptions) -> Workload:
    """Load the task, downloading its data if it is missing, and build its model.

    :raises UserError: if something is missing or does not fit
    """
    device, num_devices = choose_devices(args.training, args.dataset.lora_rank is not None)
    hide_bar = args.training.disable_tqdm
    task = load_task(args.dataset, args.adopted, has_weights=True, disable_tqdm=hide_bar, device=device)
    if (path := args.dataset.own_data) is not None:
        _prepare_own_data(path, args, task)
    samples: Any = load_samples(task, "train")
    set_batch_size(args, device)
    batch_size = args.training.per_device_train_batch_size
    of_one = samples.own if isinstance(samples, OwnSamples) else samples
    if len(of_one) < batch_size:
        what = "the task" if of_one is samples else f"--own_data: '{args.dataset.own_data}'"
        raise UserError(f"{what} has {len(of_one)} samples, fewer than --per_device_train_batch_size {batch_size}")
    model = build_initial_model(task, args.collaboration.run_id)
    if args.training.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    choose_kernels(model, args.training, 0 if device.type == "cpu" else num_devices)
    if device.type == "cpu":
        share_parameters(model)
    return Workload(task, samples, model, device, num_devices)


def _prepare_own_data(path: str, args: TrainerOptions, task: Any) -> None:
    """Prepare --own_data in the output folder, for the task of a language model."""
    if not args.dataset.takes_own_data:
        remedy = "drop it, or ask the organiser to state takes_own_data: true"
        raise UserError(f"--own_data: run {args.collaboration.run_id} takes no data of trainers; {remedy}")
    folder = Path(args.training.output_dir)
    task.own_path = folder / "own_data"
    with lock_folder(folder, "--output_dir"):  # another trainer may run there
        prepare_own_data(path, task.load_manifest(), Path(args.dataset.tokenizer_path), task.own_path)
