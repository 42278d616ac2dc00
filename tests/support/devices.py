"""Two fake devices for DataParallel, and the precision in which a layer computes."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import TrainingArguments


def use_two_fake_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers use DataParallel, and DataParallel compute on the CPU as it does on two GPUs.

    As with GPUs, two threads compute half of the samples each, with the default dtype of autocast.
    """
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    monkeypatch.setattr(torch.nn.DataParallel, "forward", _forward)
    monkeypatch.setattr(torch.nn.DataParallel, "parallel_apply", _parallel_apply)


def _forward(data_parallel: torch.nn.DataParallel, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    halves = [{name: values.chunk(2)[index] for name, values in inputs.items()} for index in range(2)]
    outputs = data_parallel.parallel_apply([data_parallel.module] * 2, [()] * 2, halves)
    return {"loss": torch.stack([output["loss"] for output in outputs])}


def _parallel_apply(_data_parallel, modules: list, inputs: list[tuple], kwargs: list[dict]) -> list:
    is_enabled = torch.is_autocast_enabled("cpu")
    both_run = threading.Barrier(2)

    def apply_one(module, inputs: tuple, kwargs: dict):
        both_run.wait()
        with torch.amp.autocast("cpu", enabled=is_enabled):
            return module(*inputs, **kwargs)

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(apply_one, modules, inputs, kwargs))


def record_precision(layer: torch.nn.Module) -> list[tuple[int, torch.dtype | None]]:
    """Record the thread and the dtype of autocast of each call of a layer; None without autocast."""
    calls = []

    def record(_layer, _inputs, output: torch.Tensor) -> None:
        device_type = output.device.type
        is_enabled = torch.is_autocast_enabled(device_type)
        calls.append((threading.get_ident(), torch.get_autocast_dtype(device_type) if is_enabled else None))

    layer.register_forward_hook(record)
    return calls
