#!/usr/bin/env python3
"""Train as run_trainer.py does, but alone, with transformers' Trainer and nothing of a collaboration.

RECORD=local.jsonl benchmarks/plain_trainer.py FLAGS

Takes the flags of run_trainer.py. The optimizer takes a step after --target_batch_size samples, which the Trainer
accumulates. RECORD: output file, one JSON line per step of the optimizer.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from transformers import Trainer, TrainerCallback

from arguments import TRAINER_ARGUMENTS
from benchmarks.paced_peer import Recorder
from lib.common.cli import parse_arguments
from lib.common.errors import run_script
from lib.data.loading import load_training_data
from lib.training.hf_trainer import build_training_arguments, choose_devices
from lib.training.model import build_trainer_model, load_config, load_tokenizer
from lib.training.optimizer import build_local_optimizer, build_param_groups, build_scheduler


class StepRecorder(TrainerCallback):
    """Records the time and the samples of each step of the optimizer."""

    def __init__(self, path: Path):
        self.recorder = Recorder(path)

    def on_step_end(self, args, state, control, **kwargs):
        samples = args.per_device_train_batch_size * args.gradient_accumulation_steps
        self.recorder.write("local step", samples=samples, waited=0.0)


def main() -> None:
    training_args, dataset_args, collaboration_args, *_ = parse_arguments(TRAINER_ARGUMENTS, __doc__)
    device, num_devices = choose_devices(training_args)
    tokenizer = load_tokenizer(dataset_args.tokenizer_path)
    config = load_config(dataset_args, tokenizer)
    dataset, collator = load_training_data(dataset_args, training_args, tokenizer, config)
    model = build_trainer_model(config, dataset_args, collaboration_args.run_id).to(device)
    optimizer = build_local_optimizer(build_param_groups(model, training_args.weight_decay), training_args)
    accumulation = collaboration_args.target_batch_size // training_args.batch_size_per_step(num_devices)
    args = build_training_arguments(
        replace(training_args, gradient_accumulation_steps=accumulation * training_args.gradient_accumulation_steps),
        peer_id="plain",
    )
    args.max_grad_norm = training_args.max_grad_norm
    Trainer(
        model=model,
        args=args,
        data_collator=collator,
        train_dataset=dataset,
        optimizers=(optimizer, build_scheduler(optimizer, training_args)),
        callbacks=[StepRecorder(Path(os.environ["RECORD"]))],
    ).train()


if __name__ == "__main__":
    run_script(main)
