"""Fixtures: tiny data that the real script prepares once, and scripts that do not outlive their test."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from processes import guard_children
from tests.peers import ROOT, Scripts

TINY_ALBERT = {
    "model_type": "albert",
    "embedding_size": 16,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "classifier_dropout_prob": 0.0,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="session", autouse=True)
def children_end_with_the_tests() -> None:
    guard_children()


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """A folder with `dataset`, `tokenizer` and `config.json`, made as a user would make them."""
    folder = tmp_path_factory.mktemp("data")
    command = [
        sys.executable, "-W", "ignore", str(ROOT / "tokenize_wikitext103.py"), "--sample", "--train_tokenizer",
        "--vocab_size", "500", "--max_seq_length", "32", "--output_path", str(folder / "dataset"),
        "--tokenizer_path", str(folder / "tokenizer"), "--cache_dir", str(folder / "cache"),
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    (folder / "config.json").write_text(json.dumps(TINY_ALBERT))
    return folder


@pytest.fixture
def scripts(tmp_path, data) -> Iterator[Scripts]:
    scripts = Scripts(tmp_path, data)
    yield scripts
    scripts.close()
