#!/usr/bin/env python3
"""Train on random samples and record the speed: the peer of benchmarks/gpu.py.

    RECORD=speed.json GO=go SEQ_LENGTH=512 SECONDS=60 benchmarks/gpu_peer.py trainer FLAGS

The flags are those of run_trainer.py. `trainer` runs that script, `plain` runs transformers' Trainer with its default
optimizer, and `largest` searches for the largest micro-batch. Environment variables:

    SEQ_LENGTH  tokens of a sample
    GO          file; the measurement begins WARMUP seconds after the file appears
    WARMUP, SECONDS
    RECORD      JSON file for the result
"""

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from accelerate.utils import find_executable_batch_size
from torch.utils.data import Dataset, default_collate
from transformers import Trainer, TrainerCallback

import run_trainer
from arguments import TRAINER_ARGUMENTS, DatasetArguments
from cotrain.common.argument_parser import parse_arguments
from cotrain.common.errors import run_script
from cotrain.models import model as models
from cotrain.task import Task
from cotrain.tasks.task_loading import build_initial_model
from cotrain.training import hf_trainer, workload
from peerstep.accumulators import GradientAccumulator

VOCAB_SIZE = 30_000
MOST_SAMPLES = 1024  # of a micro-batch, for the search


class RandomSamples(Dataset):
    """Samples for masked LM with sentence order, each without padding."""

    def __init__(self, length: int, seq_length: int):
        self.length, self.seq_length = length, seq_length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(5, VOCAB_SIZE, (self.seq_length,))
        return {
            "input_ids": tokens,
            "attention_mask": torch.ones_like(tokens),
            "labels": tokens.where(torch.rand(self.seq_length) < 0.15, -100),
            "sentence_order_label": torch.tensor(index % 2),
        }


class Stopwatch(TrainerCallback):
    """Measures samples per second, writes them to a file, and ends the training."""

    def __init__(self, samples_per_step: int):
        self.samples_per_step, self.begin, self.num_steps = samples_per_step, float("inf"), 0
        self.started_at: float | None = None

    def on_step_end(self, args, state, control, **kwargs):
        if self.begin == float("inf") and Path(os.environ["GO"]).exists():
            self.begin = time.monotonic() + float(os.environ["WARMUP"])
        if time.monotonic() < self.begin:
            return
        if self.started_at is None:
            self.started_at = finish_kernels()
            return
        self.num_steps += 1
        if time.monotonic() > self.started_at + float(os.environ["SECONDS"]):
            seconds = finish_kernels() - self.started_at
            write(samples_per_second=self.num_steps * self.samples_per_step / seconds, memory=peak_memory())
            control.should_training_stop = True


class TimedTrainer(hf_trainer.CollaborativeTrainer):
    """The trainer of run_trainer.py, timed."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.add_callback(Stopwatch(samples_per_step(self.args)))


def samples_per_step(args) -> int:
    return args.train_batch_size * args.gradient_accumulation_steps


def finish_kernels() -> float:
    """Wait until the GPU is idle, and return the time."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.monotonic()


def peak_memory() -> float:
    """Return the largest amount of GPU memory in use so far, in GiB, without the CUDA context."""
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


def write(**result: float) -> None:
    Path(os.environ["RECORD"]).write_text(json.dumps(result), encoding="utf-8")


class RandomTask(Task):
    """A language model on random tokens."""

    def __init__(self, dataset_args: DatasetArguments, *_args, **_options):
        self.config = models.read_config(dataset_args.model_name_or_path)
        self.config.vocab_size = VOCAB_SIZE

    def build_model(self) -> torch.nn.Module:
        return models.initialize_model(self.config)

    def load_samples(self, split: str) -> RandomSamples:
        return RandomSamples(10_000, int(os.environ["SEQ_LENGTH"]))


def train_plain() -> None:
    training_args, dataset_args, *_ = parse_arguments(TRAINER_ARGUMENTS, __doc__)
    device, _ = hf_trainer.choose_devices(training_args)
    task, args = RandomTask(dataset_args), hf_trainer.build_training_arguments(training_args, "peer")
    model = build_initial_model(task, "gpu").to(device)
    model.accepts_loss_kwargs = False  # as CollaborativeTrainer assumes
    trainer = Trainer(model=model, args=args, train_dataset=task.load_samples("train"), data_collator=task.collate)
    trainer.add_callback(Stopwatch(samples_per_step(args)))
    trainer.train()


def search_largest() -> None:
    training_args, dataset_args, *_ = parse_arguments(TRAINER_ARGUMENTS, __doc__)
    device, _ = hf_trainer.choose_devices(training_args)
    model = build_initial_model(RandomTask(dataset_args), "gpu").to(device)
    parameters = [*model.parameters()]
    accumulator = GradientAccumulator(parameters, [], [torch.zeros(parameter.shape) for parameter in parameters])
    dtype = hf_trainer.autocast_dtype(training_args)

    def train(batch_size: int) -> int:
        samples = RandomSamples(batch_size, int(os.environ["SEQ_LENGTH"]))
        for _ in range(2):
            batch = {
                name: values.to(device)
                for name, values in default_collate([samples[index] for index in range(batch_size)]).items()
            }
            with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
                loss = model(**batch).loss
            loss.backward()
            accumulator.add(batch_size)
            model.zero_grad()
        return batch_size

    largest = find_executable_batch_size(train, starting_batch_size=MOST_SAMPLES)()
    write(largest=largest, memory=peak_memory())


def main() -> None:
    mode = sys.argv.pop(1)
    if mode == "trainer":
        workload.load_task = RandomTask
        hf_trainer.CollaborativeTrainer = TimedTrainer
    run_script({"trainer": run_trainer.main, "plain": train_plain, "largest": search_largest}[mode])


if __name__ == "__main__":
    main()
