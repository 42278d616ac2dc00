#!/usr/bin/env python3
"""Measure one thing on the first GPU, within ten minutes, and print one figure.

benchmarks/gpu.py hand_over      seconds of `load` while the main thread keeps the GPU busy; expected below 0.4
benchmarks/gpu.py tests          result of `make test-gpu`; three tests need two GPUs
benchmarks/gpu.py memory         GB at the peak of a micro-batch of GPT-2, 4 x 1,024 tokens in bf16; computed 6.3
benchmarks/gpu.py overhead       speed of run_trainer.py alone as a part of transformers' Trainer; expected above 0.97
benchmarks/gpu.py faults         exit codes after an out-of-memory and after a failed assertion of the device, of both
                                 scripts; expected 75
benchmarks/gpu.py game           local steps in the last minute, after another process took all memory but 1 GB thrice
benchmarks/gpu.py overflow       seconds until a trainer names the flag that helps, if fp16 overflows; below 60
benchmarks/gpu.py turing         loss of a 4-bit base in fp16, as on a T4, as a part of that in bf16; 0.99 to 1.01
benchmarks/gpu.py lamb           milliseconds of a step of LAMB inside local updates, for 448 tensors of adapters
benchmarks/gpu.py evaluator      GB above the weights of Qwen3-1.7B for a batch of 1,024 tokens; expected below 6
benchmarks/gpu.py kernels        most graphs that --torch_compile makes for five lengths of batches, of each attention

With --device cpu, a call tries itself: the sizes are small, and the figures mean nothing. None has run on a GPU.
The file is also the --task of the trainers that it starts: a language model on random tokens."""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
from torch._dynamo.utils import counters
from transformers import AutoConfig, Trainer, TrainingArguments
from transformers.utils import is_flash_attn_2_available

from cotrain import Task
from cotrain.models import pretrained
from cotrain.models.model import build_without_weights, initialize_model, read_config
from cotrain.options import NOTHING
from cotrain.tasks import text
from cotrain.training import loop, session
from cotrain.training.lamb import ForeachLamb
from peerstep.step.accumulators import GradientAccumulator
from tests.support.peers import LOCAL, Script

ROOT = Path(__file__).parents[1]
IS_TRIAL = os.environ.get("DEVICE") == "cpu"  # in a trainer
TINY = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
QWEN = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16}
VOCAB_SIZE = 32_000


class RandomTokens(Task):
    """GPT-2 on random tokens. The environment says what its batches do to the trainer."""

    def __init__(self):
        self.mode, self.count, self.calls, self.began = os.environ.get("MODE", ""), 0, 0, 0.0

    def build_model(self) -> torch.nn.Module:
        fields = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 500} if IS_TRIAL else {}
        config = AutoConfig.for_model("gpt2", architectures=["GPT2LMHeadModel"], **fields)
        model = initialize_model(config)
        if self.mode == "overflow":
            model.transformer.ln_f.weight.data *= 1e6
            if IS_TRIAL:  # a CPU refuses --fp16
                loop.autocast_dtype = session.autocast_dtype = lambda *_: torch.float16
        return model

    def load_samples(self, split: str) -> list[int]:
        return [*range(10_000)]

    def collate(self, samples: list[int]) -> dict[str, torch.Tensor]:
        self.count += 1
        length = 16 if IS_TRIAL else 1024
        if self.mode == "game":
            length = int(length * (0.2 + 0.8 * torch.rand(()).item()))
        elif self.mode == "time":
            self._time(len(samples))
        tokens = torch.randint(500 if IS_TRIAL else VOCAB_SIZE, (len(samples), length))
        return {"input_ids": tokens, "labels": tokens}

    def compute_loss(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.calls += 1
        if self.calls > 20 and self.mode == "memory":
            if IS_TRIAL:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 40 TB")
            torch.zeros(10**13, device="cuda")
        elif self.calls > 20 and self.mode == "assertion":
            if IS_TRIAL:
                raise torch.AcceleratorError("CUDA error: device-side assert triggered")
            batch = {name: tokens + 10**6 for name, tokens in batch.items()}
        return model(**batch).loss

    def _time(self, num_samples: int) -> None:
        """Write the samples per second of a minute, without the 20 s before, and end the process as Ctrl-C does."""
        warm_up, seconds = (3, 6) if IS_TRIAL else (20, 60)
        self.began = self.began or time.monotonic() + warm_up
        if time.monotonic() < self.began:
            self.count = 0
        elif time.monotonic() > self.began + seconds:
            wait(torch.device("cpu" if IS_TRIAL else "cuda"))
            speed = self.count * num_samples / (time.monotonic() - self.began)
            Path(os.environ["RECORD"]).write_text(str(speed), encoding="utf-8")
            signal.raise_signal(signal.SIGINT)


@contextmanager
def trainer(device: torch.device, script: str, mode: str, *flags: object, samples: int = 4) -> Iterator[Script]:
    with tempfile.TemporaryDirectory() as folder:
        flags = (
            "--task", __file__, "--run_id", "gpu", "--output_dir", Path(folder, "out"), "--host_maddrs", LOCAL,
            "--per_device_train_batch_size", samples, "--target_batch_size", 64 * samples, "--disable_tqdm",
            "--save_steps", 10**9, *flags,
        )  # fmt: skip
        devices = "" if device.type == "cpu" else os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        threads = str(max(1, (os.cpu_count() or 1) // 2))
        env = {"CUDA_VISIBLE_DEVICES": devices, "MODE": mode, "DEVICE": device.type, "OMP_NUM_THREADS": threads}
        env["RECORD"] = str(Path(folder, "record"))
        process = Script(script, *flags, log=Path(folder, "log"), env=env)
        try:
            yield process
        finally:
            process.kill_all()


def make_parameters(device: torch.device, number: int = 448, size: int = 93_000) -> list[torch.nn.Parameter]:
    parameters = [torch.nn.Parameter(torch.randn(size, device=device)) for _ in range(number)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return parameters


def wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def peak_gb(device: torch.device) -> float:
    return 1e-9 * torch.accelerator.max_memory_allocated(device) if device.type != "cpu" else 0.0


def hand_over(device: torch.device) -> str:
    """Adapters of an 8B model, of 168 MB; matrix products of some seconds are launched before and meanwhile."""
    parameters = make_parameters(device)
    host = [torch.zeros(parameter.shape) for parameter in parameters]
    accumulator, found = GradientAccumulator(parameters, host, [torch.zeros_like(tensor) for tensor in host]), []
    accumulator.add(4)
    accumulator.load()  # allocates
    matrix, seconds = torch.randn(*[8192 if device.type != "cpu" else 64] * 2, device=device), 10.0
    accumulator.add(4)

    def load() -> None:
        started = time.monotonic()
        accumulator.load()
        found.append(time.monotonic() - started)

    thread, end = threading.Thread(target=load), time.monotonic() + (seconds if device.type != "cpu" else 0.2)
    for number in range(2000):
        matrix @ matrix  # launched, not waited for
        if number == 500:
            thread.start()
        if number > 500 and time.monotonic() > end:
            break
    wait(device)
    thread.join()
    return f"load {found[0]:.3f} s"


def tests(device: torch.device) -> str:
    chosen = ["-m", "gpu"] if device.type != "cpu" else ["-m", "not gpu", "tests/peerstep/test_devices.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", *chosen]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=590)
    return result.stdout.rstrip().rpartition("\n")[2]


def memory(device: torch.device) -> str:
    config = read_config("gpt2" if device.type != "cpu" else "albert-tiny")
    model = type(build_without_weights(config))(config).to(device).train()
    sums = [torch.zeros_like(parameter) for parameter in model.parameters()]
    tokens = torch.zeros(4, 1024 if device.type != "cpu" else 16, dtype=torch.long, device=device)
    options = {"sentence_order_label": tokens[:, 0]} if config.model_type == "albert" else {}
    with torch.autocast(device.type, dtype=torch.bfloat16):
        loss = model(input_ids=tokens, labels=tokens, **options).loss
    loss.backward()
    return f"peak {peak_gb(device):.2f} GB, of which sums {1e-9 * sum(t.nbytes for t in sums):.2f}"


def overhead(device: torch.device) -> str:
    """Micro-batches of 16, two in a local step; the Trainer takes a step of AdamW after each local step."""
    flags = ("--gradient_accumulation_steps", 2, "--bf16")
    with trainer(device, "run_trainer.py", "time", *flags, "--dataloader_num_workers", 0, samples=16) as process:
        process.wait(300)
        ours = float((process.log.parent / "record").read_text())
    with trainer(device, "benchmarks/gpu.py", "time", samples=16) as process:
        process.wait(300)
        return f"{ours / float((process.log.parent / 'record').read_text()):.3f} of the Trainer's speed"


def train_plain() -> None:
    task, options = RandomTokens(), {"max_steps": 10**6, "report_to": "none", "save_strategy": "no", "bf16": True}
    arguments = TrainingArguments(
        per_device_train_batch_size=16, gradient_accumulation_steps=2, use_cpu=IS_TRIAL, disable_tqdm=True, **options
    )
    with suppress(KeyboardInterrupt):
        Trainer(task.build_model(), arguments, task.collate, task.load_samples("train")).train()


def faults(device: torch.device) -> str:
    codes, seconds = [], 0.0
    for script in ("run_trainer.py", "run_custom_trainer.py"):
        for mode in ("memory", "assertion"):
            with trainer(device, script, mode) as process:
                process.wait_for("CUDA", timeout=120)
                began = time.monotonic()
                codes.append(process.wait(60))
                process.assert_nothing_left()
                seconds = max(seconds, time.monotonic() - began)
    return f"exit codes {' '.join(map(str, codes))}, at most {seconds:.1f} s after the first message"


def game(device: torch.device) -> str:
    seconds = 20 if device.type != "cpu" else 1
    with trainer(device, "run_custom_trainer.py", "game", "--logging_steps", 1) as process:
        process.wait_for(r"Local step 10:", timeout=120)
        for _ in range(3):
            free = torch.accelerator.get_memory_info(device)[0] - 10**9 if device.type != "cpu" else 10**8
            taken = torch.zeros(max(0, free), dtype=torch.uint8, device=device)
            time.sleep(seconds)
            del taken
            if device.type != "cpu":
                torch.accelerator.empty_cache()
            time.sleep(seconds)
        before = process.output
        time.sleep(3 * seconds)
        steps, dropped = process.output[len(before) :].count("Local step "), process.output.count("Dropped a micro")
        return f"{steps} local steps in the last {3 * seconds} s; {dropped} micro-batches dropped"


def overflow(device: torch.device) -> str:
    flags = ("--fp16",) if device.type != "cpu" else ()
    with trainer(device, "run_custom_trainer.py", "overflow", *flags) as process:
        process.wait_for("Joined|Local step 1:", timeout=120)
        began = time.monotonic()
        process.wait_for("they overflow in fp16", timeout=300)
        return f"{time.monotonic() - began:.0f} s"


def turing(device: torch.device) -> str:
    """Twenty steps of adapters, on a Llama of 1.2 billion parameters with random weights, from one seed."""
    from cotrain.models.adapters import add_adapters

    fields = (
        TINY if device.type == "cpu" else {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    )
    config = AutoConfig.for_model("llama", architectures=["LlamaForCausalLM"], vocab_size=VOCAB_SIZE, **fields)
    losses = []
    with tempfile.TemporaryDirectory() as folder:
        initialize_model(config).to(torch.bfloat16).save_pretrained(folder)
        names = {"model_name_or_path": folder, "model_revision": None, "lora_tokens": "", "lora_targets": "all-linear"}
        names |= {"cache_dir": None, "lora_alpha": None}
        args = SimpleNamespace(load_in_4bit=device.type != "cpu", lora_rank=16, **names)
        for dtype in (torch.bfloat16, torch.float16):
            pretrained.supports_bf16 = lambda _, dtype=dtype: dtype == torch.bfloat16
            torch.manual_seed(0)
            base = pretrained.load_pretrained(config, args, NOTHING)
            model = add_adapters(base, args, SimpleNamespace(chat_template=None)).to(device)
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
            scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
            tokens = torch.randint(VOCAB_SIZE, (4, 256 if device.type != "cpu" else 16), device=device)
            for _ in range(20):
                with torch.autocast(device.type, dtype=dtype):
                    loss = model(input_ids=tokens, labels=tokens).loss
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            losses.append(loss.item())
    return f"{losses[1] / losses[0]:.4f} of the loss in bf16, {losses[0]:.3f}"


def lamb(device: torch.device) -> str:
    optimizer, steps = ForeachLamb(make_parameters(device), lr=1e-3), 20 if device.type != "cpu" else 2
    optimizer.step()
    wait(device)
    started = time.monotonic()
    for _ in range(steps):
        optimizer.step()
    wait(device)
    return f"step {1e3 * (time.monotonic() - started) / steps:.1f} ms"


def evaluator(device: torch.device) -> str:
    length, size = (1024, QWEN | {"vocab_size": 151_936}) if device.type != "cpu" else (16, TINY)
    config = AutoConfig.for_model("qwen3", architectures=["Qwen3ForCausalLM"], num_key_value_heads=4, **size)
    tokenizer = SimpleNamespace(pad_token="", init_kwargs={})
    task = text.TextTask(SimpleNamespace(dataset_path=""), NOTHING, tokenizer, config)
    text.Manifest = SimpleNamespace(load=lambda _: SimpleNamespace(max_seq_length=length))
    model = initialize_model(config).to(device, torch.bfloat16).eval()
    tokens = torch.zeros(task.eval_batch_size(), length, dtype=torch.long, device=device)
    before = peak_gb(device)
    with torch.inference_mode():
        task.evaluate(model, {"input_ids": tokens, "labels": tokens})
    return f"{peak_gb(device) - before:.2f} GB for {len(tokens)} x {length} tokens"


def kernels(device: torch.device) -> str:
    found = {}
    names = ["eager", "sdpa", *["flex_attention"] * (device.type != "cpu")]
    for name in [*names, *["flash_attention_2"] * is_flash_attn_2_available()]:
        fields = {"n_embd": 64, "n_layer": 1, "n_head": 4, "vocab_size": 99} if device.type == "cpu" else {}
        config = AutoConfig.for_model("gpt2", attn_implementation=name, **fields)
        model = transformers.GPT2LMHeadModel(config).to(device)
        torch._dynamo.reset()
        counters.clear()
        model.compile(backend="inductor" if device.type != "cpu" else "aot_eager")  # a CPU takes minutes
        for length in (24, 16, 32, 8, 40):
            tokens = torch.zeros(2, length * (1 if device.type == "cpu" else 16), dtype=torch.long, device=device)
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        found[name] = counters["stats"]["unique_graphs"]
    return f"{max(found.values())} graphs ({', '.join(f'{name} {count}' for name, count in found.items())})"


CALLS = (hand_over, tests, memory, overhead, faults, game, overflow, turing, lamb, evaluator, kernels)


def main() -> None:
    if "MODE" in os.environ:
        return train_plain()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    calls = {call.__name__: call for call in CALLS}
    parser.add_argument("call", choices=calls)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    args = parser.parse_args()
    print(calls[args.call](torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")))


if __name__ == "__main__":
    main()
