#!/usr/bin/env python3
"""Fine-tune with TRL's SFTTrainer and peft, one process: benchmarks/trl_trainer.py BASE DATASET OUT FLAGS

Takes the samples that tokenize_wikitext103.py has prepared, as they are: the same tokens, packing and learnt tokens as
those of a run. Optimizer, schedule, adapters, clipping and precision are those of a run as well. Writes the adapters
and steps.jsonl to OUT. Needs trl 1.16.0, as in requirements-organiser.txt.
"""

import argparse
import itertools
import sys
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from datasets import Dataset, load_from_disk
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

from cotrain.settings import Hyperparameters
from cotrain.training.builders import build_local_optimizer, build_param_groups, build_scheduler
from tests.support.altered import Recorder

TRL = "1.16.0"


def to_trl(sample: dict) -> dict:
    """Return a prepared sample in the columns of TRL's packed samples."""
    starts = [place for place, is_start in enumerate(sample["start_mask"]) if is_start] + [len(sample["input_ids"])]
    labels = [
        token if is_answer else -100
        for token, is_answer in zip(sample["input_ids"], sample["answer_mask"], strict=True)
    ]
    lengths = [after - before for before, after in itertools.pairwise(starts)]
    return {"input_ids": sample["input_ids"], "labels": labels, "seq_lengths": lengths}


class StepRecorder(TrainerCallback):
    def __init__(self, recorder: Recorder):
        self.recorder = recorder

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs:
            samples = args.per_device_train_batch_size * args.gradient_accumulation_steps
            self.recorder.write("step", step=state.global_step, samples=samples, loss=logs["loss"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--samples", type=int, required=True, help="of a step")
    parser.add_argument("--micro_batch", type=int, default=1)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warmup_steps", type=int, required=True)
    parser.add_argument("--learning_rate", type=float, required=True)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    assert version("trl") == TRL, f"pip install trl=={TRL}"
    torch.manual_seed(args.seed)
    model = AutoModelForCausalLM.from_pretrained(args.base, dtype="auto")
    options = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, options)
    schedule = Hyperparameters(
        optimizer="adamw", adam_epsilon=1e-8, learning_rate=args.learning_rate, warmup_steps=args.warmup_steps,
        total_steps=args.steps,
    )  # fmt: skip
    optimizer = build_local_optimizer(build_param_groups(model, schedule.weight_decay, "adamw"), schedule)
    dataset = load_from_disk(str(args.dataset))["train"]
    args.out.mkdir(parents=True, exist_ok=True)
    SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=str(args.out), per_device_train_batch_size=args.micro_batch,
            gradient_accumulation_steps=args.samples // args.micro_batch, max_steps=args.steps, seed=args.seed,
            packing=True, max_length=None, dataset_kwargs={"skip_prepare_dataset": True}, logging_steps=1,
            max_grad_norm=schedule.max_grad_norm, gradient_checkpointing=False, bf16=False, use_cpu=True,
            save_steps=2, save_only_model=True, report_to="none", disable_tqdm=True, dataloader_num_workers=0,
        ),
        train_dataset=Dataset.from_list([to_trl(sample) for sample in dataset]),
        processing_class=AutoTokenizer.from_pretrained(args.base),
        optimizers=(optimizer, build_scheduler(optimizer, schedule)),
        callbacks=[StepRecorder(Recorder(args.out / "steps.jsonl"))],
    ).train()  # fmt: skip
    model.save_pretrained(args.out)


if __name__ == "__main__":
    main()
