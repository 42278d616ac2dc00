"""Tests of the OpenMP workers of a trainer's threads."""

import pytest
import torch

from tests.support.offline import offline_optimizer
from tests.support.peers import wait_until


@pytest.fixture(autouse=True)
def two_workers():
    number = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(number)


@pytest.mark.usefixtures("offline")
def test_global_steps_leave_the_cores_to_the_local_steps(monkeypatch):
    optimizer, numbers = offline_optimizer(torch.nn.Linear(2, 1)), []

    def compute() -> None:
        torch.ones(1_000_000).add_(1)
        numbers.append(torch.get_num_threads())

    monkeypatch.setattr(optimizer, "_advance", compute)
    optimizer._start_thread()
    wait_until(lambda: numbers, 30, "the step thread")
    optimizer.stop_averaging()
    assert (numbers[0], torch.get_num_threads()) == (1, 2)
