"""What averaging relies on between a GPU and the CPU: copies of gradients, and forked averagers."""

import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch
from hivemind.utils.tensor_descr import _safe_check_pinned

from peerstep.accumulators import GradientAccumulator
from tests.peerstep.test_accumulators import train_locally

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("build", [GradientAccumulator, train_locally])
@pytest.mark.parametrize(
    ("device", "size", "repeats"), [("cpu", 2**10, 3), pytest.param("cuda", 2**26, 100, marks=pytest.mark.gpu)]
)
def test_contribution_is_complete_once_it_is_loaded(build, device, size, repeats):
    """The copy from a GPU, of 256 MiB, must have ended: the averager's process reads the shared memory at once."""
    parameter = torch.zeros(size, device=device)
    shared = torch.zeros(size).share_memory_()
    accumulator = build([parameter], [torch.zeros(size)], [shared])
    for number in range(repeats):
        values = torch.full_like(parameter, number + 1.0)
        if build is train_locally:
            parameter.copy_(-values)
        else:
            parameter.grad = values
        accumulator.add(1)
        accumulator.load()
        first, last = float(shared[0]), float(shared[-1])
        assert first == last == number + 1.0
        assert torch.equal(shared, values.cpu())


@pytest.mark.parametrize("device", DEVICES)
def test_forked_process_finds_quickly_that_no_memory_is_pinned(device):
    """hivemind asks for each tensor and each part. In a fork of a process that uses CUDA, each answer is an error."""
    torch.zeros(1, device=device)
    with ProcessPoolExecutor(1, get_context("fork")) as processes:
        seconds, is_pinned = processes.submit(check_pinned, 1000).result(60)
    assert not is_pinned and seconds < 1.0


def check_pinned(repeats: int) -> tuple[float, bool]:
    began = time.monotonic()
    results = [_safe_check_pinned(torch.zeros(9)) for _ in range(repeats)]
    return time.monotonic() - began, any(results)
