#!/usr/bin/env python3
"""Compare what unequal peers learn with adapters and what one process learns from as many samples.

benchmarks/fine_tuning.py --train_file TEXT    a base of 1 million parameters is trained on the first half of the text
benchmarks/fine_tuning.py --memory             bytes of a frozen and of a trained parameter

Real trainers on this machine fine-tune it on the second half. The first one is the fastest. The second one comes
late; with two trainers it is also killed, and started again. Of four trainers the third is killed. One process takes
the same number of steps with AdamW in plain PyTorch, of as many samples in another order. The loss is that of
validation samples at the end, with 95 % intervals over paired seeds.

--memory runs two trainers of one base in bf16 with random weights, and compares what they use together (PSS) for two
sizes of the base, and two ranks."""

import argparse
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from scipy.stats import t as student
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks.process_usage import measure_memory
from cotrain.data.archive import file_sha256
from cotrain.data.loading import load_split
from cotrain.training.checkpoints import list_checkpoints
from tests.support.launcher import Launcher
from tests.support.peers import LOCAL, Script, Scripts, prepare_data, read_jsonl, wait_until

LENGTH, BATCH, TARGET, RANK, RATE = 128, 8, 64, 8, 3e-3
PACES = 0.7, 1.5, 1.2, 2.5  # seconds of a micro-batch, of the trainers in the order of their start


def read_samples(folder: Path, split: str) -> torch.Tensor:
    """Return the full samples of a split: LongTensor [samples, LENGTH]."""
    samples = load_split(folder / "dataset", split)["input_ids"]
    return torch.tensor([sample for sample in samples if len(sample) == LENGTH])


def train(model: torch.nn.Module, samples: torch.Tensor, steps: int, size: int, rate: float, seed: int) -> None:
    """Train with AdamW, and the gradient clipped to 1 as by default."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, generator = torch.optim.AdamW(parameters, rate), torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for part in samples[torch.randint(len(samples), (size,), generator=generator)].split(16):
            (model(input_ids=part, labels=part).loss * len(part) / size).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()


@torch.inference_mode()
def evaluate(model: torch.nn.Module, samples: torch.Tensor) -> float:
    return statistics.fmean(model(input_ids=part, labels=part).loss.item() for part in samples.split(16))


def prepare(folder: Path, options: tuple) -> None:
    """Prepare the `text.txt` in a folder: `data/dataset` and `data/tokenizer`."""
    script = Script(
        "tokenize_wikitext103.py", "--train_file", folder / "text.txt", "--objective", "clm", "--max_seq_length",
        LENGTH, "--output_path", folder / "data/dataset", "--tokenizer_path", folder / "data/tokenizer", *options,
        log=folder / "prepare.log",
    )  # fmt: skip
    assert script.wait(600) == 0, script.output


def make_base(folder: Path, data: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(data / "tokenizer")
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=344, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    train(model, read_samples(data, "train"), 150, 32, 2e-3, seed=0)
    model.save_pretrained(folder)


def train_together(
    folder: Path, data: Path, base: Path, peers: int, seed: int, steps: int, launcher: Launcher
) -> tuple[float, int]:
    """Let real trainers fine-tune the base; return the loss and the number of samples."""
    scripts = Scripts(folder, data, launcher=launcher)
    try:
        common = (
            "--run_id", f"seed-{seed}", "--model_name_or_path", base, "--lora_rank", RANK, "--optimizer", "adamw",
            "--adam_epsilon", 1e-8, "--learning_rate", RATE, "--warmup_steps", 0, "--target_batch_size", TARGET,
            "--per_device_train_batch_size", BATCH, "--target_group_size", 16, "--seed", seed, "--host_maddrs", LOCAL,
            "--total_steps", 10**6, "--max_global_steps", steps, "--leave_timeout", 0, "--matchmaking_time", 4,
        )  # fmt: skip
        first = scripts.trainer("0", *common, pace=PACES[0])
        join = ("--initial_peers", first.address)
        others = [scripts.trainer(str(n), *common, *join, pace=PACES[n]) for n in range(2, peers)]
        first.wait_for(r"Step #2\n", timeout=300)
        late = scripts.trainer("1", *common, *join, pace=PACES[1])
        late.wait_for("Averaged gradients with", timeout=300)
        (others[0] if others else late).kill_all()
        if not others:
            late = scripts.trainer("1", *common, *join, pace=PACES[1])
        assert first.wait(timeout=1200) == 0, first.output
        averaged = first.output.count("Averaged gradients with")
        print(f"  {averaged} of {steps} steps were averaged", end="", flush=True)
    finally:
        scripts.close()
    model = AutoPeftModelForCausalLM.from_pretrained(list_checkpoints(folder / "0")[0])
    rounds = read_jsonl(folder / "0" / "rounds.jsonl")
    samples = sum(sum(round_["weights"].values()) or round_["samples"] for round_ in rounds)
    return evaluate(model, read_samples(data, "validation")), samples


def measure_trainers(folder: Path, width: int, rank: int, launcher: Launcher) -> tuple[int, int, int]:
    """Return the median bytes of two trainers after four steps together, and the frozen and trained parameters."""
    folder.mkdir()
    config = LlamaConfig(
        vocab_size=4000, hidden_size=width, intermediate_size=width * 8 // 3, num_hidden_layers=4,
        num_attention_heads=12, max_position_embeddings=LENGTH, tie_word_embeddings=True,
    )  # fmt: skip
    base = LlamaForCausalLM(config).to(torch.bfloat16)
    base.save_pretrained(folder / "model")
    options = LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    trained, total = get_peft_model(base, options).get_nb_trainable_parameters()
    scripts = Scripts(folder, folder.parent / "data", launcher=launcher)
    try:
        flags = (
            "--model_name_or_path", folder / "model", "--lora_rank", rank, "--optimizer", "adamw", "--adam_epsilon",
            1e-8, "--target_batch_size", 8, "--per_device_train_batch_size", 1, "--gradient_compression", "blockwise4",
        )  # fmt: skip
        first = scripts.trainer("0", *flags, pace=PACES[0])
        trainers = [first, scripts.trainer("1", *flags, "--initial_peers", first.address, pace=PACES[1])]
        wait_until(lambda: all(t.output.count("Averaged gradients with 2") >= 4 for t in trainers), 1200, "four steps")
        used = []
        for _ in range(20):  # while rounds and steps run
            used.append(sum(measure_memory(t.process.pid, t.family()).total() for t in trainers))
            time.sleep(1)
    finally:
        scripts.close()
    return round(statistics.median(used)), total - trained, trained


def measure_memory_of_parameters(folder: Path) -> None:
    prepare_data(folder / "data", "clm", 4000)
    launcher, points = Launcher(folder / "launcher.log"), []
    for width, rank in ((768, 16), (768, 384), (2304, 16)):
        points.append(measure_trainers(folder / f"{width}-{rank}", width, rank, launcher))
        used, frozen, trained = points[-1]
        print(f"width {width}, rank {rank}: {frozen:,} frozen, {trained:,} trained, {used / 1e6:,.0f} MB", flush=True)
    launcher.close()
    (used, frozen, trained), (of_rank, _, more_trained), (of_width, more_frozen, also_trained) = points
    of_trained = (of_rank - used) / 2 / (more_trained - trained)
    of_frozen = (of_width - used - 2 * of_trained * (also_trained - trained)) / (more_frozen - frozen)
    print(f"{of_trained:.1f} bytes of each trainer for a trained parameter")
    print(f"{of_frozen:.1f} bytes of both together for a frozen one")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train_file", type=Path)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--peers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16)
    args = parser.parse_args()
    if args.memory:
        with tempfile.TemporaryDirectory() as name:
            return measure_memory_of_parameters(Path(name))
    if args.train_file is None:
        parser.error("pass --train_file or --memory")
    text = args.train_file.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        half = text.rindex("\n", 0, len(text) // 2)
        for part, content in (("base", text[:half]), ("tuning", text[half:])):
            (folder / part).mkdir()
            (folder / part / "text.txt").write_text(content, encoding="utf-8")
            options = ("--train_tokenizer", "--vocab_size", 4000)
            prepare(folder / part, options if part == "base" else ("--tokenizer", folder / "base/data/tokenizer"))
        base, data, launcher = folder / "model", folder / "tuning/data", Launcher(folder / "launcher.log")
        make_base(base, folder / "base/data")
        digest, validation = file_sha256(base / "model.safetensors"), read_samples(data, "validation")
        print(f"the base: {evaluate(AutoModelForCausalLM.from_pretrained(base), validation):.4f}")
        for peers in args.peers:
            differences = []
            for seed in range(args.seeds):
                (folder / f"{peers}-{seed}").mkdir()
                run_folder = folder / f"{peers}-{seed}"
                loss, samples = train_together(run_folder, data, base, peers, seed, args.steps, launcher)
                torch.manual_seed(seed)
                options = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
                alone = get_peft_model(AutoModelForCausalLM.from_pretrained(base), options)
                train(alone, read_samples(data, "train"), args.steps, round(samples / args.steps), RATE, seed)
                expected = evaluate(alone, validation)
                differences.append(100 * (loss / expected - 1))
                print(f"; {peers} trainers, seed {seed}: {loss:.4f}, one process {expected:.4f}", flush=True)
            mean, half_width = statistics.fmean(differences), math.nan
            if len(differences) > 1:
                error = statistics.stdev(differences) / math.sqrt(len(differences))
                half_width = student.ppf(0.975, len(differences) - 1) * error
            print(f"{peers} trainers: {mean:+.2f} +- {half_width:.2f} %")
        launcher.close()
        assert file_sha256(base / "model.safetensors") == digest, "the base has changed"


if __name__ == "__main__":
    main()
