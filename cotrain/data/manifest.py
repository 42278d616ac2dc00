"""Description of the prepared data, in a file beside it. Importing this module takes no time, unlike torch."""

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

from cotrain.common.errors import UserError, first_line

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 1
REMEDY = "create the data with ./tokenize_wikitext103.py, or download the organiser's with --dataset_url"
MAX_SHARDS, MAX_SHARD_BYTES = 10_000, 20e9


@dataclass(frozen=True)
class Shard:
    """An archive, beside that of the manifest, with one Arrow file of the training split."""

    name: str
    sha256: str
    bytes: int  # of the archive
    unpacked: int  # bytes of the Arrow file
    samples: int

    def __post_init__(self):
        numbers = self.bytes, self.unpacked, self.samples
        is_valid = all(type(x) is int and 0 < x <= MAX_SHARD_BYTES for x in numbers) and self.samples < 2**31
        is_name = re.fullmatch(r"[A-Za-z0-9][\w.-]{0,99}-[0-9]{5}\.tar\.gz", self.name, re.ASCII) is not None
        if not (is_name and is_valid and re.fullmatch("[0-9a-f]{64}", self.sha256)):
            raise ValueError("a shard has an invalid name, size or SHA-256")

    @property
    def file(self) -> str:
        """Path of the Arrow file in the dataset's folder."""
        return f"train/data-{self.name[-12:-7]}.arrow"


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
    shards: list[Shard] = field(default_factory=list)  # of the training split; empty if it is beside the manifest

    @classmethod
    def load(cls, dataset_path: str | Path) -> "Manifest":
        """Read the manifest of a dataset; raise UserError if there is none, or it is not readable."""
        path = Path(dataset_path) / MANIFEST_NAME
        if not Path(dataset_path).is_dir():
            raise UserError(f"--dataset_path: there is no folder '{dataset_path}'; {REMEDY}")
        if not path.is_file():
            remedy = f"pass the folder that has it, or {REMEDY}"
            raise UserError(f"--dataset_path: '{dataset_path}' has no {MANIFEST_NAME}; {remedy}")
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format_version"] != FORMAT_VERSION:
                raise ValueError(f"it has format {content['format_version']}, this version reads {FORMAT_VERSION}")
            shards = [Shard(**shard) for shard in content.pop("shards", [])]
            if len(shards) > MAX_SHARDS or len({shard.file for shard in shards}) < len(shards):
                raise ValueError("it has too many shards, or two with the same number")
            return cls(**content, shards=shards)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            names = ", ".join(re.findall(r"'\w+'", str(error)))
            reason = f"missing or unexpected: {names}" if isinstance(error, TypeError) else first_line(error)
            raise UserError(f"--dataset_path: '{path}' cannot be read ({reason}); {REMEDY}") from error

    def save(self, dataset_path: str | Path) -> None:
        text = json.dumps(asdict(self), indent=2) + "\n"
        (Path(dataset_path) / MANIFEST_NAME).write_text(text, encoding="utf-8")
