"""Description of the prepared data, in a file beside it. Importing this module takes no time, unlike torch."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from cotrain.common.errors import UserError, first_line

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 1
REMEDY = "create the data with ./tokenize_wikitext103.py, or download the organiser's with --dataset_url"


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
    def load(cls, dataset_path: str | Path) -> "Manifest":
        """Read the manifest of a dataset; raise UserError if there is none, or it is not readable."""
        path = Path(dataset_path) / MANIFEST_NAME
        if not Path(dataset_path).is_dir():
            raise UserError(f"--dataset_path: there is no folder '{dataset_path}'; {REMEDY}")
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format_version"] != FORMAT_VERSION:
                raise ValueError(f"it has format {content['format_version']}, this version reads {FORMAT_VERSION}")
            return cls(**content)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"--dataset_path: '{path}' cannot be read ({first_line(error)}); {REMEDY}") from error

    def save(self, dataset_path: str | Path) -> None:
        text = json.dumps(asdict(self), indent=2) + "\n"
        (Path(dataset_path) / MANIFEST_NAME).write_text(text, encoding="utf-8")
