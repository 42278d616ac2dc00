"""Checks of this machine: its packages, limits, memory, and the speed of a micro-batch."""

import math
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

import psutil
import torch
from accelerate.utils import send_to_device
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from cotrain.common.atomic_files import lock_folder
from cotrain.common.errors import UserError
from cotrain.common.signals import StopSignal
from cotrain.common.versions import MISSING, compare_versions
from cotrain.data.sampler import PeerSampler
from cotrain.options import LocalOptions
from cotrain.training.finding import Finding
from cotrain.training.hf_trainer import autocast_dtype
from cotrain.training.needs import Needs, has_own_memory, missing_copies
from cotrain.training.workload import Workload

PRECISION_ADVICE = {
    torch.float16: "it overflows in fp16. Pass --bf16, or --fp32 on a GPU without bf16",
    torch.bfloat16: "pass --fp32, or ask the organiser about the model",
    None: "check the data, or ask the organiser about the model",
}
MUST_BE_EQUAL = "hivemind"  # peers of other versions may not understand each other; torch may fit the driver
MIN_OPEN_FILES = 4096
DEVICE_SECONDS = 5.0  # for which micro-batches are computed
BATCH_SECONDS = 60.0  # for a micro-batch, at most
# Copies of the parameters in a trainer's processes, see docs/gpus.md#memory: peak PSS of two trainers and newcomers on
# CPUs, models of 9.3 and 30 M parameters. The rest is what a trainer of a tiny model takes.
COPIES, COPIES_OF_LOCAL_UPDATES, SHARED_COPIES = 9, 12, 6
BASE_BYTES = 1.0e9
# Copies of these (computed), without and with local updates, that are on a GPU: model, gradients, their sum or two
# moments. Beside one, the sums are copied through pinned memory.
COPIES_ON_GPU = 2, 4


def check_versions(requirements: str) -> Finding:
    """Compare the installed packages with the pinned ones, in the text of requirements.txt."""
    others = compare_versions(requirements)
    text = ", ".join(others.values())
    advice = "Run pip install -r requirements.txt" if MUST_BE_EQUAL in others or MISSING in text else ""
    return Finding("versions", text or "those of requirements.txt", advice)


def check_open_files(limit: int) -> Finding:
    is_enough = limit >= MIN_OPEN_FILES or limit == resource.RLIM_INFINITY
    advice = f"Raise the hard limit to {MIN_OPEN_FILES}: as root with ulimit -Hn, or in the container's options"
    return Finding("open files", f"at most {limit}", "" if is_enough else advice)


def check_folders(output_dir: Path) -> str:
    """Lock the output folder, as a trainer does, and return where files are; UserError if it cannot be used."""
    with lock_folder(output_dir, "--output_dir") as fault:
        if fault:
            raise UserError(fault)
    return f"{output_dir}; temporary files in {tempfile.gettempdir()}; TMPDIR is {os.environ.get('TMPDIR', 'not set')}"


def check_memories(needs: Needs, device: torch.device, num_devices: int = 1) -> Iterator[Finding]:
    """Yield what memory is free and needed: of each GPU if there is one, of the machine, and shared memory."""
    on_gpu, local_updates = has_own_memory(device), needs.local_updates
    memory, bytes_per_copy = psutil.virtual_memory().available, 4.0 * needs.trained
    copies = (COPIES_OF_LOCAL_UPDATES if local_updates else COPIES) - on_gpu * COPIES_ON_GPU[local_updates]
    rest = 0.0 if on_gpu else needs.frozen + (needs.micro_batch - bytes_per_copy)
    needed = BASE_BYTES + copies * bytes_per_copy + rest
    rows = [("memory", memory, needed, "End other programs, or choose a machine with more memory")]
    advice = "End other programs on the GPU, choose one with more memory, or pass --use_cpu"
    for number in range(num_devices if on_gpu else 0):
        subject = f"GPU {number} memory" if num_devices > 1 else "GPU memory"
        with suppress(RuntimeError):  # not every kind tells
            free = torch.accelerator.get_memory_info(torch.device(device.type, number))[0]
            rows.append((subject, free, needs.on_gpu, advice))
    if os.path.isdir("/dev/shm"):
        free = psutil.disk_usage("/dev/shm").free
        rows.append(("/dev/shm", free, SHARED_COPIES * bytes_per_copy, "Enlarge it, in Docker with --shm-size"))
    for subject, free, needed, advice in rows:
        text = f"{free / 1e9:.1f} GB free, about {needed / 1e9:.1f} needed"
        yield Finding(subject, text + needs.text * (subject != "/dev/shm"), advice if free < needed else "")


class Deadline(TorchDispatchMode):
    """Ends a computation after BATCH_SECONDS or a signal, at any of its operations; the backward pass is one call."""

    def __init__(self, stop: StopSignal, task: str):
        super().__init__()
        self.stop, self.task, self.end = stop, task, time.monotonic() + BATCH_SECONDS

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if self.stop.is_set():
            raise SystemExit(0)
        if time.monotonic() > self.end:
            remedy = "choose a smaller model, a smaller --per_device_train_batch_size, or a GPU"
            raise UserError(f"{self.task} takes more than {BATCH_SECONDS:.0f} s: {remedy}")
        return function(*args, **(kwargs or {}))


def measure_device(work: Workload, args: LocalOptions, size: int, stop: StopSignal, sampler: PeerSampler) -> str:
    """Compute one micro-batch, then if it has the size of training some seconds of others, and return the speed.

    :raises UserError: if one takes too long; SystemExit after a signal
    """
    device, dtype, model = work.device, autocast_dtype(args), work.model.to(work.device).train()
    limit, task = DEVICE_SECONDS if size == args.per_device_train_batch_size else 0.0, f"a micro-batch of {size}"
    copies = missing_copies(model, args) if device.type != "cpu" else []
    started = time.monotonic()
    try:
        for number, batch in enumerate(DataLoader(work.samples, size, sampler=sampler, collate_fn=work.task.collate)):
            batch = send_to_device(batch, device)
            with Deadline(stop, f"{device}: {task}") if number == 0 and not args.torch_compile else nullcontext():
                with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
                    loss = work.task.compute_loss(model, batch)
                loss.backward()
                model.zero_grad()
                if not math.isfinite(loss.item()):  # waits for the GPU
                    raise UserError(f"{device}: the loss of {task} is {loss.item()}: {PRECISION_ADVICE[dtype]}")
            if (seconds := time.monotonic() - started) >= limit:
                break
            if number == 0:
                started = time.monotonic()
        peak = torch.accelerator.max_memory_allocated(device) if device.type != "cpu" else 0
    finally:
        copies.clear()
        model.zero_grad()
        model.cpu()
    seconds /= max(1, number)
    hint = "; raise --per_device_train_batch_size" if device.type != "cpu" and seconds < 0.2 and size > 1 else ""
    used = f", {peak / 1e9:.1f} GB with all copies" if peak else ""
    return f"{device}: {task} takes {seconds:.2f} s, {size / seconds:.1f} samples/s{used}{hint}"
