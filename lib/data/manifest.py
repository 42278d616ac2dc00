"""Description of the prepared data, in a file beside it. Importing this module takes no time, unlike torch."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lib.common.errors import UserError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 1
REMEDY = "create the data with ./tokenize_wikitext103.py, or download the organiser's with --dataset_url"


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the SHA-256 of the vocabulary, tokens with their ids."""
    vocab = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(vocab).encode()).hexdigest()


@dataclass
class Manifest:
    """Description of a dataset, stored in its folder. A trainer compares it with its flags, tokenizer and model."""

    source: str
    objective: str  # a key of OBJECTIVES
    max_seq_length: int  # tokens, special tokens included
    seed: int
    language: str
    tokenizer: str  # as named in the flags
    tokenizer_class: str
    vocab_size: int
    tokenizer_sha256: str
    splits: dict[str, dict[str, int]]  # split -> fields of packing.PackingStats
    format_version: int = FORMAT_VERSION

    @classmethod
    def load(cls, dataset_path: str | Path) -> Manifest:
        """Read the manifest of a dataset.

        :raises UserError: if there is none, or it is not readable
        """
        path = Path(dataset_path) / MANIFEST_NAME
        if not Path(dataset_path).is_dir():
            raise UserError(f"--dataset_path: there is no folder '{dataset_path}'; {REMEDY}")
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format_version"] != FORMAT_VERSION:
                raise ValueError(f"it has format {content['format_version']}, this version reads {FORMAT_VERSION}")
            return cls(**content)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"--dataset_path: '{path}' cannot be read ({first_line(error)}); {REMEDY}") from error

    def save(self, dataset_path: str | Path) -> None:
        path = Path(dataset_path) / MANIFEST_NAME
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise UserError if the data was prepared with another tokenizer."""
        if tokenizer_sha256(tokenizer) != self.tokenizer_sha256:
            raise UserError(
                f"--tokenizer_path: this tokenizer ({len(tokenizer)} tokens) is not the one that the data was made "
                f"with ({self.tokenizer_class}, {self.vocab_size} tokens); take both from the same archive"
            )

    def check_seq_length(self, seq_length: int | None) -> None:
        """Raise UserError if the data has another sequence length. None accepts any length."""
        if seq_length not in (None, self.max_seq_length):
            raise UserError(
                f"--seq_length {seq_length}: the data has sequences of {self.max_seq_length} tokens; drop the flag, "
                f"or make other data with ./tokenize_wikitext103.py --max_seq_length {seq_length}"
            )

    def check_objective(self, objective: str) -> None:
        """Raise UserError if the data was prepared for another objective than the model's."""
        if objective != self.objective:
            raise UserError(
                f"--model_name_or_path: this model is trained with the objective {objective}, but the data was made "
                f"for {self.objective}; choose another model, or make other data with "
                f"./tokenize_wikitext103.py --objective {objective}"
            )
