"""Tests of the OpenMP workers of a trainer's threads."""

import threading

import pytest
import torch

from lib.averaging.optimizer import use_one_core
from tests.support.offline import offline_optimizer
from tests.support.peers import wait_until


@pytest.fixture(autouse=True)
def two_workers():
    number = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(number)


def test_one_thread_is_limited_and_no_other():
    numbers = []

    def compute() -> None:
        use_one_core()
        torch.ones(1_000_000).add_(1)
        numbers.append(torch.get_num_threads())

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert (numbers, torch.get_num_threads()) == ([1], 2)


@pytest.mark.usefixtures("offline")
def test_global_steps_leave_the_cores_to_the_local_steps(monkeypatch):
    optimizer, numbers = offline_optimizer(torch.nn.Linear(2, 1)), []
    monkeypatch.setattr(optimizer, "_advance", lambda: numbers.append(torch.get_num_threads()))
    optimizer._start_thread()
    wait_until(lambda: numbers, 30, "the step thread")
    optimizer.stop_averaging()
    assert (numbers[0], torch.get_num_threads()) == (1, 2)
