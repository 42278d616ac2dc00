#!/usr/bin/env python3
"""Measure one thing on a GPU, within ten minutes, and print one figure.

benchmarks/gpu_calls.py hand_over   seconds of `load` while the main thread keeps the GPU busy: expected below 0.4
benchmarks/gpu_calls.py memory      GB at the peak of a micro-batch of GPT-2, 4 x 1,024 tokens in bf16: computed 6.3
benchmarks/gpu_calls.py lamb        milliseconds of a step of LAMB inside local updates, for 448 tensors of adapters

With --device cpu, it tries itself: the sizes are small, and the figures mean nothing. It has not been run on a GPU."""

import argparse
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from cotrain.models.model import build_without_weights, read_config
from cotrain.training.lamb import ForeachLamb
from peerstep.accumulators import GradientAccumulator


def make_parameters(device: torch.device, number: int = 448, size: int = 93_000) -> list[torch.nn.Parameter]:
    parameters = [torch.nn.Parameter(torch.randn(size, device=device)) for _ in range(number)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return parameters


def wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


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


def memory(device: torch.device) -> str:
    config = read_config("gpt2" if device.type != "cpu" else "albert-tiny")
    model = type(build_without_weights(config))(config).to(device).train()
    sums = [torch.zeros_like(parameter) for parameter in model.parameters()]
    tokens = torch.zeros(4, 1024 if device.type != "cpu" else 16, dtype=torch.long, device=device)
    options = {"sentence_order_label": tokens[:, 0]} if config.model_type == "albert" else {}
    with torch.autocast(device.type, dtype=torch.bfloat16):
        loss = model(input_ids=tokens, labels=tokens, **options).loss
    loss.backward()
    peak = torch.accelerator.max_memory_allocated(device) if device.type != "cpu" else sum(t.nbytes for t in sums)
    return f"peak {peak / 1e9:.2f} GB"


def lamb(device: torch.device) -> str:
    optimizer, steps = ForeachLamb(make_parameters(device), lr=1e-3), 20 if device.type != "cpu" else 2
    optimizer.step()
    wait(device)
    started = time.monotonic()
    for _ in range(steps):
        optimizer.step()
    wait(device)
    return f"step {1e3 * (time.monotonic() - started) / steps:.1f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    calls = {call.__name__: call for call in (hand_over, memory, lamb)}
    parser.add_argument("call", choices=calls)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    args = parser.parse_args()
    print(calls[args.call](torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")))


if __name__ == "__main__":
    main()
