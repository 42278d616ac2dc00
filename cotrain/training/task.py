"""What a trainer trains: its data and its model."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cotrain.arguments import TrainerArguments
from cotrain.data import download, loading, tokenizers
from cotrain.models.model import build_trainer_model, choose_kernels, enable_gradient_checkpointing, load_config
from cotrain.training.hf_trainer import choose_devices


@dataclass(frozen=True)
class Task:
    """Data and model of a trainer. The model is on the CPU until it is moved to `device`.

    :param num_devices: number of GPUs that transformers' Trainer uses; 1 without a GPU
    """

    tokenizer: PreTrainedTokenizerBase
    dataset: Dataset
    collator: Callable
    model: PreTrainedModel
    device: torch.device
    num_devices: int


def load_task(args: TrainerArguments) -> Task:
    """Download the data if it is missing, and load it and the model.

    :raises UserError: if something is missing or does not fit
    """
    device, num_devices = choose_devices(args.training)
    download.fetch_data(args.dataset, args.training.disable_tqdm)
    tokenizer = tokenizers.load_tokenizer(args.dataset.tokenizer_path)
    config = load_config(args.dataset, tokenizer)
    dataset, collator = loading.load_training_data(args.dataset, args.training, tokenizer, config)
    model = build_trainer_model(config, args.dataset, args.collaboration.run_id)
    if args.training.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    choose_kernels(model, args.training, num_devices if device.type == "cuda" else 0)
    return Task(tokenizer, dataset, collator, model, device, num_devices)
