#!/usr/bin/env python3
"""Turn text into a tokenized dataset and a tokenizer that every trainer can load. Run it once, on any machine:

./tokenize_wikitext103.py                                                  # WikiText-103, ALBERT's tokenizer
./tokenize_wikitext103.py --sample --train_tokenizer --vocab_size 2000     # nothing to download
./tokenize_wikitext103.py --train_file my.txt --train_tokenizer --archive data.tar.gz
./tokenize_wikitext103.py --objective clm --tokenizer gpt2                 # for GPT-2
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lib.common.checks import require, require_apart, require_not_negative, require_positive
from lib.common.cli import parse_arguments
from lib.common.errors import UserError, run_script
from lib.common.flags import flag
from lib.common.objectives import DEFAULT_OBJECTIVE, OBJECTIVES

# The rest is imported where it is used: torch and transformers take seconds, which --help and a text file that cannot
# be read need not wait for.
if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

    from lib.data.corpus import Documents, Source
    from lib.data.encoding import TextEncoder
    from lib.data.manifest import Manifest
    from lib.data.packing import PackingConfig, PackingStats

# A folder is only replaced if it has one of these files.
DATASET_FILES = ("dataset_dict.json",)
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json")


@dataclass
class TokenizationArguments:
    """From text to a dataset that every trainer can load."""

    _argument_group_name = "Tokenization"

    dataset_name: str = flag("Salesforce/wikitext", "Dataset on the Hugging Face Hub, with a column 'text'")
    dataset_config_name: str | None = flag(
        None, "Configuration of the dataset. Default: wikitext-103-v1 for WikiText, else none"
    )
    dataset_revision: str | None = flag(
        None,
        "Branch, tag or commit of the dataset on the Hub. Default: the newest; for BookCorpus, refs/convert/parquet, "
        "the Hub's copy of a dataset that is a Python script",
    )
    train_file: str | None = flag(
        None,
        "Text file to use instead of --dataset_name, UTF-8. Documents end at blank lines or, as in "
        "WikiText, at titles",
    )
    validation_file: str | None = flag(
        None,
        "Text file for validation, with --train_file. Default: --validation_fraction of the documents is held out",
    )
    sample: bool = flag(False, "Use the documentation topics included with Python as the text. Nothing is downloaded")
    validation_fraction: float = flag(
        0.05, "Fraction of the documents to hold out for validation if the source has no validation split"
    )
    tokenizer: str = flag("albert-large-v2", "Tokenizer: a name on the Hugging Face Hub or a local folder")
    train_tokenizer: bool = flag(False, "Train a tokenizer on the text instead of loading one. Nothing is downloaded")
    tokenizer_type: Literal["sentencepiece", "wordpiece", "bpe"] | None = flag(
        None,
        "Kind of tokenizer for --train_tokenizer: sentencepiece (ALBERT's), wordpiece (BERT's) or bpe "
        "(GPT-2's for a causal objective, else RoBERTa's). Default: by objective, in this order",
    )
    vocab_size: int = flag(30000, "Size of the vocabulary for --train_tokenizer")
    objective: Literal[tuple(OBJECTIVES)] = flag(
        DEFAULT_OBJECTIVE,
        "Training objective of the data: "
        + ", ".join(f"{objective.name} ({objective.short_description})" for objective in OBJECTIVES.values()),
    )
    language: str = flag("en", "Language of the text, as an ISO 639-1 code; it determines where sentences end")
    max_seq_length: int = flag(512, "Maximum number of tokens per sample, including special tokens")
    output_path: str = flag(
        "data/albert_tokenized_wikitext", "Folder for the tokenized dataset", aliases=["--dataset_path"]
    )
    tokenizer_path: str = flag("data/tokenizer", "Folder for the tokenizer")
    cache_dir: str | None = flag("data/cache", "Folder for downloads and intermediate files")
    archive: str | None = flag(None, "Also pack dataset, tokenizer and manifest into this .tar.gz for hosting")
    num_proc: int = flag(2, "Number of worker processes. The result does not depend on it; lower it to save memory")
    seed: int = flag(
        0, "Random seed. It determines where segments are split and swapped, and which documents are held out"
    )
    overwrite: bool = flag(False, "Replace an existing dataset")
    debug: bool = flag(False, "Log more, and show the traceback of a fatal error")

    def __post_init__(self):
        if self.tokenizer_type is None:
            self.tokenizer_type = OBJECTIVES[self.objective].tokenizer_type
        require_positive(self, "vocab_size", "num_proc")
        require_not_negative(self, "seed")
        require_apart("output_path", self.output_path, "tokenizer_path", self.tokenizer_path)
        require(self.max_seq_length >= 8, f"--max_seq_length must be 8 or more, got {self.max_seq_length}")
        require(
            0 < self.validation_fraction < 1,
            f"--validation_fraction must be between 0 and 1: {self.validation_fraction}",
        )
        require(not (self.sample and self.train_file), "pass either --sample or --train_file, not both")
        require(
            self.validation_file is None or self.train_file is not None, "--validation_file also needs --train_file"
        )
        for name in ("train_file", "validation_file"):
            path = getattr(self, name)
            require(path is None or Path(path).is_file(), f"--{name}: there is no file '{path}'")
        require(
            self.archive is None or self.archive.endswith((".tar.gz", ".tgz")),
            f"--archive {self.archive}: the archive is compressed; pass a name that ends in .tar.gz",
        )
        if self.dataset_config_name is None and self.dataset_name.endswith("wikitext"):
            self.dataset_config_name = "wikitext-103-v1"
        if self.dataset_revision is None and self.dataset_name in ("bookcorpus", "bookcorpus/bookcorpus"):
            self.dataset_revision = "refs/convert/parquet"


def main() -> None:
    (args,) = parse_arguments([TokenizationArguments], __doc__)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if args.num_proc == 1 else "false"  # threads or processes, not both
    with termination_as_exit():
        started = time.perf_counter()
        manifest = prepare(args)
        print(summarize(args, manifest))
        if args.archive is not None:
            print(f"Archive {args.archive}, SHA-256 {pack(args)}")
        print(f"Done in {time.perf_counter() - started:.0f} s")


@contextlib.contextmanager
def termination_as_exit() -> Iterator[None]:
    """Raise SystemExit on SIGTERM, so that temporary files are removed."""
    is_ending = threading.Event()
    code = 128 + signal.SIGTERM

    def end(*_) -> None:
        is_ending.set()
        sys.exit(code)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    except Exception:
        if is_ending.is_set():
            sys.exit(code)  # an import in progress has made an ImportError of it
        raise


def prepare(args: TokenizationArguments) -> Manifest:
    """Make dataset, tokenizer and manifest."""
    from lib.common.atomic_files import check_target, new_folder, temporary_folder
    from lib.data.corpus import read_corpus
    from lib.data.packing import PackingConfig
    from lib.data.schema import SPLITS

    # What cannot be written is found out first, then what cannot be read, then the rest.
    if args.archive is not None:
        check_target(Path(args.archive), "--archive", args.overwrite)
    if args.train_tokenizer:
        check_target(Path(args.tokenizer_path), "--tokenizer_path", args.overwrite, TOKENIZER_FILES)
    output_path = Path(args.output_path)
    with contextlib.ExitStack() as stack:
        dataset_folder = stack.enter_context(new_folder(output_path, "--output_path", args.overwrite, DATASET_FILES))
        work = stack.enter_context(temporary_folder(Path(args.cache_dir or output_path.parent) / "work"))
        source = open_source(args)
        corpus = read_corpus(source, work, args.validation_fraction, args.seed)
        # Entered after the dataset's folder, so complete before it: a dataset never lacks its tokenizer.
        tokenizer, tokenizer_folder = build_tokenizer(args, corpus["train"], stack)

        config = PackingConfig(args.objective, args.max_seq_length, args.seed, args.language)
        arrow_files = {split: work / f"{split}_samples.arrow" for split in SPLITS}
        open_encoder(str(tokenizer_folder))  # the workers inherit it
        with open_workers(args.num_proc) as map_tasks:
            stats = {
                split: tokenize_split(split, corpus[split], tokenizer_folder, config, map_tasks, arrow_files[split])
                for split in SPLITS
            }
        manifest = build_manifest(args, source.name, tokenizer, stats)
        save_dataset(arrow_files, manifest, dataset_folder)
    return manifest


def open_source(args: TokenizationArguments) -> Source:
    """The source of the text that the flags ask for."""
    from lib.data.corpus import open_files, open_hub_dataset, open_sample

    if args.sample:
        return open_sample()
    if args.train_file is not None:
        return open_files(args.train_file, args.validation_file)
    return open_hub_dataset(args.dataset_name, args.dataset_config_name, args.dataset_revision, args.cache_dir)


def find_tokenizer(name: str, cache_dir: str | None) -> PreTrainedTokenizerBase:
    """A tokenizer from a local folder or from the Hugging Face Hub.

    :raises UserError: if there is none of this name
    """
    from lib.data.corpus import go_offline_if_needed
    from lib.data.tokenizers import load_tokenizer

    if not Path(name).is_dir():
        go_offline_if_needed()
    remedy = "pass another tokenizer, go online, or pass --train_tokenizer to train one"
    return load_tokenizer(name, "--tokenizer", remedy, use_hub=True, cache_dir=cache_dir)


def build_tokenizer(
    args: TokenizationArguments, documents: Documents, stack: contextlib.ExitStack
) -> tuple[PreTrainedTokenizerBase, Path]:
    """Train or load the tokenizer, and save it unless it is there already.

    :param documents: to train on
    :param stack: at whose end the tokenizer is complete in --tokenizer_path
    :returns: the tokenizer, and the folder that it can be loaded from until then
    """
    from tqdm.auto import tqdm

    from lib.common.atomic_files import new_folder
    from lib.data.tokenizers import check_special_tokens, is_same_tokenizer

    path = Path(args.tokenizer_path)
    if args.train_tokenizer:
        from lib.data.tokenizer_training import TRAINING_CHARS, train_tokenizer

        sample = documents.sample(TRAINING_CHARS, args.seed)
        sample = tqdm(sample, desc=f"Training a {args.tokenizer_type} tokenizer", unit=" documents", delay=1)
        tokenizer = train_tokenizer(sample, args.tokenizer_type, args.objective, args.vocab_size, args.max_seq_length)
    else:
        tokenizer = find_tokenizer(args.tokenizer, args.cache_dir)
    check_special_tokens(tokenizer, args.objective)
    if not args.train_tokenizer and is_same_tokenizer(tokenizer, path):
        return tokenizer, path
    folder = stack.enter_context(new_folder(path, "--tokenizer_path", args.overwrite, TOKENIZER_FILES))
    tokenizer.save_pretrained(folder)
    return tokenizer, folder


def tokenize_split(
    split: str, documents: Documents, tokenizer_folder: Path, config: PackingConfig, map_tasks: Callable, path: Path
) -> PackingStats:
    """Tokenize and pack the documents of a split into an Arrow file.

    :param map_tasks: like `map`
    :raises UserError: if that gives no sample at all
    """
    import pyarrow as pa
    from tqdm.auto import tqdm

    from lib.data.packing import SCHEMAS, PackingStats, group_documents

    groups = group_documents(documents.lengths)
    tasks = [(start, documents.rows[start:stop].tolist()) for start, stop in groups]
    function = partial(tokenize_group, documents.path, split, str(tokenizer_folder), config)
    stats = PackingStats()
    results = map_tasks(function, tasks)
    import datasets  # noqa: F401  takes a second, in which the workers begin

    with (
        pa.OSFile(str(path), "wb") as file,
        pa.ipc.new_stream(file, SCHEMAS[config.objective]) as writer,
        tqdm(desc=f"Tokenizing {split}", total=documents.num_chars, unit=" chars", unit_scale=True) as progress,
    ):
        for (start, stop), (samples, group_stats) in zip(groups, results, strict=True):
            writer.write_table(samples)
            stats += group_stats
            progress.update(int(documents.lengths[start:stop].sum()))
    if not stats.instances:
        raise UserError(
            f"the {split} text ({stats.documents} documents) is too short for one sample; pass a longer text"
        )
    return stats


def tokenize_group(
    documents_path: str, split: str, tokenizer_folder: str, config: PackingConfig, task: tuple[int, list[int]]
) -> tuple[pa.Table, PackingStats]:
    """One task of a worker. `task`: number of the first document within the split; rows of the file."""
    from lib.data.corpus import read_documents
    from lib.data.packing import build_samples

    start, rows = task
    documents = read_documents(documents_path, rows)
    return build_samples(documents, range(start, start + len(rows)), split, open_encoder(tokenizer_folder), config)


@lru_cache(maxsize=1)
def open_encoder(folder: str) -> TextEncoder:
    from lib.data.encoding import build_encoder
    from lib.data.tokenizers import load_tokenizer

    return build_encoder(load_tokenizer(folder))


@contextlib.contextmanager
def open_workers(num_proc: int) -> Iterator[Callable]:
    """Yield a function like `map` that computes in several processes."""
    if num_proc == 1:
        yield map
        return
    pool = ProcessPoolExecutor(num_proc, initializer=begin_worker)
    try:
        yield pool.map
    except BrokenProcessPool:
        raise UserError("a worker process has died (out of memory?); pass a lower --num_proc") from None
    finally:
        pool.shutdown(cancel_futures=True)


def begin_worker() -> None:
    """In a worker: leave Ctrl-C to the parent process, and end when it ends, even if it is killed."""
    gc.disable()  # a tenth of the time; a task leaves no reference cycles
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_exit_after_parent, daemon=True).start()


def _exit_after_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def build_manifest(
    args: TokenizationArguments, source: str, tokenizer: PreTrainedTokenizerBase, stats: dict[str, PackingStats]
) -> Manifest:
    from lib.data.manifest import Manifest, tokenizer_sha256

    # The manifest is published, and a folder of this machine is nobody else's business.
    name = Path(args.tokenizer).resolve().name if Path(args.tokenizer).is_dir() else args.tokenizer
    return Manifest(
        source=source,
        objective=args.objective,
        max_seq_length=args.max_seq_length,
        seed=args.seed,
        language=args.language,
        tokenizer="trained on this text" if args.train_tokenizer else name,
        tokenizer_class=type(tokenizer).__name__,
        vocab_size=len(tokenizer),
        tokenizer_sha256=tokenizer_sha256(tokenizer),
        splits={split: asdict(split_stats) for split, split_stats in stats.items()},
    )


def save_dataset(arrow_files: dict[str, Path], manifest: Manifest, folder: Path) -> None:
    """Write a DatasetDict and its manifest, byte for byte the same for the same samples."""
    from datasets import Dataset, DatasetDict
    from datasets.table import MemoryMappedTable

    # `datasets` would name them after the time at which the files were written.
    fingerprint = hashlib.sha256(json.dumps(asdict(manifest)).encode()).hexdigest()[:12]
    splits = {
        split: Dataset(MemoryMappedTable.from_file(str(path)), fingerprint=f"{fingerprint}-{split}")
        for split, path in arrow_files.items()
    }
    DatasetDict(splits).save_to_disk(str(folder))
    manifest.save(folder)


def pack(args: TokenizationArguments) -> str:
    """Write the archive; return its SHA-256. Unpacked in the project's folder, it lies where trainers look for it."""
    from lib.data.archive import write_archive

    defaults = TokenizationArguments()
    folders = {defaults.output_path: Path(args.output_path), defaults.tokenizer_path: Path(args.tokenizer_path)}
    return write_archive(Path(args.archive), folders)


def summarize(args: TokenizationArguments, manifest: Manifest) -> str:
    """What was made, for a person to read."""
    from lib.data.packing import PackingStats

    splits = [PackingStats(**numbers) for numbers in manifest.splits.values()]
    with_pairs = OBJECTIVES[args.objective].has_sentence_order
    rows = [
        ("", list(manifest.splits)),
        ("documents", [f"{split.documents:,}" for split in splits]),
        ("sentences", [f"{split.sentences:,}" for split in splits if with_pairs]),
        ("samples", [f"{split.instances:,}" for split in splits]),
        ("tokens", [f"{split.tokens:,}" for split in splits]),
        ("mean fill", [f"{split.packing_efficiency(args.max_seq_length):.1%}" for split in splits]),
        ("swapped", [f"{split.swapped_instances / split.instances:.1%}" for split in splits if with_pairs]),
        ("unknown tokens", [f"{split.unknown_tokens / split.tokens:.2%}" for split in splits]),
        ("dropped tokens", [f"{split.dropped_tokens:,}" for split in splits]),
    ]
    lines = [f"{name:<16}" + "".join(f"{cell:>14}" for cell in cells) for name, cells in rows if cells]
    if num_dropped := sum(split.dropped_documents for split in splits):
        lines.append(f"Dropped {num_dropped:,} documents that are too short (at most one token)")
    if splits[0].packing_efficiency(args.max_seq_length) < 0.8:
        lines.append(
            "Warning: most documents are short. If blank lines separate paragraphs rather than documents, remove them"
        )
    for path in (args.output_path, args.tokenizer_path):
        size = sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file())
        lines.append(f"{path}: {size / 1e6:,.1f} MB")
    return "\n".join(lines)


if __name__ == "__main__":
    run_script(main)
