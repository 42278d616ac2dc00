"""Fixtures: tiny data that the real script prepares once, and scripts that do not outlive their test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from processes import guard_children
from tests.peers import Scripts, prepare_data


@pytest.fixture(scope="session", autouse=True)
def children_end_with_the_tests() -> None:
    guard_children()


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """A folder with `dataset`, `tokenizer` and `config.json`, made as a user would make them."""
    folder = tmp_path_factory.mktemp("data")
    prepare_data(folder)
    return folder


@pytest.fixture
def scripts(tmp_path, data) -> Iterator[Scripts]:
    scripts = Scripts(tmp_path, data)
    yield scripts
    scripts.close()
