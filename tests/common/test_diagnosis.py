"""The table of messages: each row is a message of the code, and docs/troubleshooting.md has the current table."""

import errno
import os
from collections.abc import Callable

import pytest
import torch
from hivemind.p2p import P2PDaemonError

from arguments import BaseTrainingArguments
from lib.common.atomic_files import lock_folder
from lib.common.checks import check_peer
from lib.common.diagnosis import DIAGNOSES, PAGE, Diagnosis, diagnose, render_page
from lib.common.errors import describe
from lib.data.manifest import Manifest
from lib.peer.addresses import look_up_public_ip
from lib.peer.peer import _explain_start_failure, _why_outside
from run_forever import Outcome
from tests.support.messages import read_templates

ADDRESS = "/ip4/203.0.113.1/tcp/31337/p2p/QmVUecCSp9yW9fE14vhp7fjCTHiWyA7gDhZxZk3B7RiXZG"


def error_of(function: Callable, *args: object) -> str:
    with pytest.raises(Exception) as caught:
        function(*args)
    return describe(caught.value)


def lock_twice(folder) -> None:
    with lock_folder(folder, "--output_dir"), lock_folder(folder, "--output_dir"):
        pass


def os_error(number: int) -> str:
    return describe(OSError(number, os.strerror(number), "outputs/rounds.jsonl"))


# The fixed words of a row -> a call that makes the message. The other rows are compared with the strings of the code.
PROVOKED = {
    "is not installed": lambda folder: describe(ModuleNotFoundError(name="wandb")),
    "is in use by another peer": lambda folder: error_of(lock_twice, folder),
    "Identity": lambda folder: _explain_start_failure(
        P2PDaemonError("Identity from `key` is already taken by another peer"), BaseTrainingArguments()
    ),
    "cannot listen on": lambda folder: _explain_start_failure(
        P2PDaemonError("Daemon failed to start: failed to listen on any addresses"), BaseTrainingArguments()
    ),
    "the p2p daemon": lambda folder: _explain_start_failure(
        P2PDaemonError("Failed to start p2pd daemon: [Errno 13] Permission denied"), BaseTrainingArguments()
    ),
    "no peer could be started": lambda folder: _why_outside(TimeoutError(), BaseTrainingArguments()),
    "none of --initial_peers": lambda folder: _why_outside(
        TimeoutError(), BaseTrainingArguments(initial_peers=[ADDRESS])
    ),
    "too many open files": lambda folder: os_error(errno.EMFILE),
    "the disk is full": lambda folder: os_error(errno.ENOSPC),
    "OutOfMemoryError": lambda folder: describe(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")),
    "lacks the peer ID": lambda folder: error_of(check_peer, "--initial_peers", "203.0.113.1:31337"),
    "did not return": lambda folder: error_of(look_up_public_ip, "http://127.0.0.1:1", 0.1),
    "--dataset_path: there is no folder": lambda folder: error_of(Manifest.load, folder / "none"),
    "it was ended by": lambda folder: Outcome(-9, has_worked=False).describe(),
}


def call_of(row: Diagnosis) -> Callable | None:
    return next((call for words, call in PROVOKED.items() if words in row.message), None)


@pytest.mark.parametrize("row", [row for row in DIAGNOSES if call_of(row)], ids=lambda row: row.message)
def test_call_makes_the_message(row, tmp_path):
    assert diagnose(call_of(row)(tmp_path)) is row


def test_each_call_belongs_to_one_row():
    assert all(sum(words in row.message for row in DIAGNOSES) == 1 for words in PROVOKED)


@pytest.mark.parametrize("row", [row for row in DIAGNOSES if not call_of(row)], ids=lambda row: row.message)
def test_message_is_in_the_code(row):
    found = [template for template in read_templates() if row.matches(template.text)]
    assert found, "the message of the row is not in the code: has it been reworded?"
    example = " ".join(row.example.split())
    assert any(template.pattern.search(example) for template in found), [template.text for template in found]


@pytest.mark.parametrize("row", DIAGNOSES, ids=lambda row: row.message)
def test_example_matches_its_row_only(row):
    assert [other.message for other in DIAGNOSES if other.matches(row.example)] == [row.message]


def test_page_is_current():
    page = PAGE.read_text()
    assert page == render_page(page), "run python -m lib.common.diagnosis"
    assert page == render_page(page.replace("| none of", "| one of")), "a table that was edited is replaced"
