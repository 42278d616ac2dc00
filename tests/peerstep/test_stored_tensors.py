"""Tests of tensors in a temporary file: values, sharing with another process, and what is left of them."""

import mmap
import os
import resource
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import psutil
import pytest
import torch

from peerstep.stored_tensors import StoredTensors

TENSORS = [
    torch.randn(3, 5), torch.tensor(2.5), torch.empty(0, 4), torch.randn(7).half(), torch.arange(4),
    torch.randn(4, 6).T, torch.randn(mmap.ALLOCATIONGRANULARITY).bfloat16(), torch.randn(1),
]  # fmt: skip


def assert_stored(stored: StoredTensors) -> None:
    assert len(stored) == len(TENSORS)
    for tensor, expected in zip(stored, TENSORS, strict=True):
        assert tensor.dtype == expected.dtype and torch.equal(tensor, expected)


def test_stored_tensors_have_their_values_each_time(tmp_path):
    stored = StoredTensors(TENSORS, tmp_path)
    for tensor in stored:
        tensor.zero_()  # changes do not reach the file
    assert_stored(stored)
    assert not list(tmp_path.iterdir()), "no file is left when the process is killed"


def receive(inbox: Connection) -> None:
    first, second = inbox.recv(), inbox.recv()
    inbox.send("received")
    inbox.recv()
    assert_stored(first), assert_stored(second)
    os._exit(7)


def test_another_process_has_the_file_for_as_long_as_it_reads(tmp_path):
    fork = get_context("fork")
    ours, theirs = fork.Pipe()
    process = fork.Process(target=receive, args=(theirs,), daemon=True)
    process.start()
    stored = StoredTensors(TENSORS, tmp_path)
    for _ in range(2):
        ours.send(stored)
    assert len(ForkingPickler.dumps(stored)) < 2000
    assert ours.poll(60) and ours.recv() == "received"
    del stored
    ours.send("continue")
    process.join(60)
    assert process.exitcode == 7


def test_file_ends_with_the_object(tmp_path):
    def num_files() -> int:
        links = (Path(link) for link in Path(f"/proc/{os.getpid()}/fd").iterdir())
        return sum(str(tmp_path) in os.readlink(link) for link in links if link.is_symlink())

    stored = StoredTensors(TENSORS, tmp_path)
    tensor = next(iter(stored))
    assert num_files() >= 1
    del stored
    assert torch.equal(tensor, TENSORS[0])
    del tensor
    assert num_files() == 0


def test_stored_tensors_need_memory_for_one_at_a_time(tmp_path):
    """The limit is 8 of 16 tensors of 16 MiB."""
    stored = StoredTensors((torch.full((4 * 2**20,), float(number)) for number in range(16)), tmp_path)
    before = psutil.Process().memory_info().vms
    for number, tensor in enumerate(stored):
        assert tensor[-1] == number
        assert psutil.Process().memory_info().vms < before + 8 * 16 * 2**20


def test_full_disk_is_an_oserror(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))  # Python ignores SIGXFSZ
    try:
        with pytest.raises(OSError, match="File too large"):
            StoredTensors([torch.zeros(2**20)], tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
