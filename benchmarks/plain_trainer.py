#!/usr/bin/env python3
"""Train as run_trainer.py does, but alone, with transformers' Trainer and nothing of a collaboration.

RECORD=local.jsonl benchmarks/plain_trainer.py FLAGS

Takes the flags of run_trainer.py. The optimizer takes a step after --target_batch_size samples, which the Trainer
accumulates. Environment variables:

    RECORD            output file, one JSON line per step of the optimizer, and per evaluation
    EVALUATION_STEPS  steps of the optimizer between two evaluations and checkpoints; default: none. The next call
                      continues from the newest checkpoint in --output_dir
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from arguments import TRAINER_ARGUMENTS
from cotrain.common.argument_parser import parse_arguments
from cotrain.common.errors import run_script
from cotrain.monitoring.evaluation import Evaluator
from cotrain.options import DEFAULT_ACCUMULATION, NOTHING
from cotrain.tasks.task_loading import build_initial_model, load_samples, load_task
from cotrain.training.builders import build_local_optimizer, build_param_groups, build_scheduler
from cotrain.training.hf_trainer import build_training_arguments, choose_devices
from tests.support.altered import Recorder


class StepRecorder(TrainerCallback):
    """Records the time, the samples and the loss of each step of the optimizer, and evaluations.

    :param evaluator: evaluates the model every `evaluation_steps` steps
    """

    def __init__(self, recorder: Recorder, evaluator: Evaluator, evaluation_steps: int | None):
        self.recorder, self.evaluator, self.evaluation_steps = recorder, evaluator, evaluation_steps

    def on_step_end(self, args, state, control, model, **kwargs):
        samples = args.per_device_train_batch_size * args.gradient_accumulation_steps
        self.recorder.write("local step", samples=samples, waited=0.0)
        if self.evaluation_steps and state.global_step % self.evaluation_steps == 0:
            loss = self.evaluator.evaluate(model, state.global_step)["loss"]
            self.recorder.write("evaluation", step=state.global_step, loss=loss)

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs:
            self.recorder.write("loss", step=state.global_step, loss=logs["loss"])


def main() -> None:
    training_args, dataset_args, collaboration_args, *_ = parse_arguments(TRAINER_ARGUMENTS, __doc__)
    device, num_devices = choose_devices(training_args)
    task = load_task(dataset_args, NOTHING, has_weights=True)
    model = build_initial_model(task, collaboration_args.run_id).to(device)
    model.accepts_loss_kwargs = False  # as CollaborativeTrainer assumes
    optimizer = build_local_optimizer(build_param_groups(model, training_args.weight_decay), training_args)
    accumulation = collaboration_args.target_batch_size // training_args.batch_size_per_step(num_devices)
    args = build_training_arguments(
        replace(
            training_args,
            gradient_accumulation_steps=accumulation
            * (training_args.gradient_accumulation_steps or DEFAULT_ACCUMULATION),
        ),
        peer_id="plain",
    )
    args.max_grad_norm = training_args.max_grad_norm
    if collaboration_args.max_global_steps is not None:
        args.max_steps = collaboration_args.max_global_steps
    evaluation_steps = int(os.environ.get("EVALUATION_STEPS", 0)) or None
    if evaluation_steps:
        args.save_steps, args.logging_steps = evaluation_steps, 1
    evaluator = Evaluator(task, use_cpu=training_args.use_cpu, disable_tqdm=True)
    recorder = StepRecorder(Recorder(Path(os.environ["RECORD"])), evaluator, evaluation_steps)
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    Trainer(
        model=model,
        args=args,
        data_collator=task.collate,
        train_dataset=load_samples(task, "train"),
        optimizers=(optimizer, build_scheduler(optimizer, training_args)),
        callbacks=[recorder],
    ).train(resume_from_checkpoint=get_last_checkpoint(args.output_dir))


if __name__ == "__main__":
    run_script(main)
