"""The table of messages: each row is a message of the code, and a line of a log finds its row."""

import pytest
import torch

from lib.common.diagnosis import diagnose, read_diagnoses
from lib.common.errors import describe
from tests.support.messages import read_templates


def test_each_row_is_a_message_of_the_code():
    missing = [row.message for row in read_diagnoses() if not any(map(row.matches, read_templates()))]
    assert missing == ["too many open files", "OutOfMemoryError"], "has a message been reworded?"
    assert diagnose(describe(torch.OutOfMemoryError("CUDA out of memory"))).message == "OutOfMemoryError"


def test_each_row_is_found_by_its_words():
    assert all(diagnose(row.message) is row for row in read_diagnoses())


@pytest.mark.parametrize(
    "line, message",
    [
        ("[WARN] No group for step #39 in time: proceeding with local gradients", "No group for step"),
        ("The round of step #3 was partial: received 61% of it", "The round of step … was"),
    ],
)
def test_line_of_a_log_finds_its_row(line, message):
    assert diagnose(line).message.startswith(message)
