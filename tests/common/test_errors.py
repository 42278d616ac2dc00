"""Errors are described in one line."""

import errno

import pytest

from cotrain.common.errors import describe, first_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("no such file"), "no such file"),
        (ValueError("\n  first  \nsecond"), "first  "),
        (ValueError(), "ValueError"),
        (ValueError("  \n "), "ValueError"),
        (ValueError("x" * 1000), "x" * 200),
    ],
)
def test_first_line(error, line):
    assert first_line(error) == line


def test_no_permission_is_one_line():
    error = PermissionError(errno.EACCES, "Permission denied", "/root/data")
    assert describe(error) == "/root/data: Permission denied"


def test_a_fatal_error_is_described_in_full():
    assert describe(ValueError("x" * 1000 + "\nmore")) == f"ValueError: {'x' * 1000} (--debug shows where)"
