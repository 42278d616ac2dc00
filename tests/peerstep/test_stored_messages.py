"""Tests of messages in a temporary file: contents, sharing with another process, and what is left of them."""

import os
import resource
import sys
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import psutil
import pytest

from peerstep.state.messages import StoredMessages

MESSAGES = [b"first", b"", bytes(range(256)) * 300, b"\0" * 4, b"last"]


def test_stored_messages_have_their_contents_each_time(tmp_path):
    stored = StoredMessages(MESSAGES, tmp_path)
    readers = [iter(stored) for _ in range(2)]
    assert [next(reader) for reader in readers] == MESSAGES[:1] * 2
    assert all(list(reader) == MESSAGES[1:] for reader in readers) and list(stored) == MESSAGES
    assert not list(tmp_path.iterdir()), "no file is left when the process is killed"
    assert list(StoredMessages([], tmp_path)) == []


def receive(inbox: Connection) -> None:
    first, second = inbox.recv(), inbox.recv()
    inbox.send("received")
    inbox.recv()
    assert list(first) == list(second) == MESSAGES
    sys.exit(7)


def test_another_process_has_the_file_for_as_long_as_it_reads(tmp_path):
    fork = get_context("fork")
    ours, theirs = fork.Pipe()
    process = fork.Process(target=receive, args=(theirs,), daemon=True)
    process.start()
    stored = StoredMessages(MESSAGES, tmp_path)
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

    stored = StoredMessages(MESSAGES, tmp_path)
    reader = iter(stored)
    del stored
    assert next(reader) == MESSAGES[0] and num_files() == 1
    assert list(reader) == MESSAGES[1:] and num_files() == 0


def test_messages_need_memory_for_one_at_a_time(tmp_path):
    before = psutil.Process().memory_info().rss
    stored = StoredMessages((bytes([number]) * 2**24 for number in range(16)), tmp_path)
    for number, message in enumerate(stored):
        assert message[-1] == number
        assert psutil.Process().memory_info().rss < before + 6 * 2**24


def test_full_disk_is_an_oserror(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))  # Python ignores SIGXFSZ
    try:
        for size in (100, 2**20):  # also of what is still in the buffer at the end
            with pytest.raises(OSError, match="File too large"):
                StoredMessages([bytes(size)] * 1000, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
