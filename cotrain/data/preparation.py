"""Preparation of the data: tokenize and pack documents in several processes, and write the dataset."""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache, partial
from pathlib import Path

import pyarrow as pa
from tqdm.auto import tqdm

from cotrain.common.errors import UserError
from cotrain.common.processes import leave_with_parent
from cotrain.data.corpus import Documents
from cotrain.data.encoding import TextEncoder
from cotrain.data.manifest import Manifest
from cotrain.data.packing import SCHEMAS, PackingConfig, PackingStats, build_samples, group_documents


def tokenize_split(
    split: str, documents: Documents, tokenizer_folder: Path, config: PackingConfig, map_tasks: Callable, folder: Path
) -> PackingStats:
    """Tokenize and pack the documents of a split into an Arrow file in the dataset's folder."""
    (folder / split).mkdir()
    tasks = [(start, documents.select(slice(start, stop))) for start, stop in group_documents(documents.lengths)]
    results = map_tasks(partial(tokenize_group, split, str(tokenizer_folder), config), tasks)
    import datasets  # noqa: F401  takes a second, during which the workers start

    stats = PackingStats()
    with (
        pa.OSFile(str(folder / split / "data.arrow"), "wb") as file,
        pa.ipc.new_stream(file, SCHEMAS[config.objective]) as writer,
        tqdm(desc=f"Tokenizing {split}", total=documents.num_chars, unit=" chars", unit_scale=True) as progress,
    ):
        for (_, group), (samples, group_stats) in zip(tasks, results, strict=True):
            writer.write_table(samples)
            stats += group_stats
            progress.update(group.num_chars)
    if not stats.instances:
        raise UserError(
            f"the {split} text ({stats.documents} documents) is too short for one sample; pass a longer text"
        )
    return stats


def tokenize_group(
    split: str, tokenizer_folder: str, config: PackingConfig, task: tuple[int, Documents]
) -> tuple[pa.Table, PackingStats]:
    """Tokenize and pack the documents of a group, whose first has the number `start` within the split."""
    start, documents = task
    numbers = range(start, start + len(documents))
    return build_samples(documents.read(), numbers, split, open_encoder(tokenizer_folder), config)


@lru_cache(maxsize=1)
def open_encoder(folder: str) -> TextEncoder:
    from cotrain.data.tokenizers import load_tokenizer  # takes seconds; unreadable text is reported before

    return TextEncoder(load_tokenizer(folder))


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
    leave_with_parent()
    gc.disable()  # a tenth of the time; a task leaves no reference cycles


def save_manifest(manifest: Manifest, folder: Path) -> None:
    """Write the manifest, and what `datasets.load_from_disk` needs to open the splits."""
    state = {"_data_files": [{"filename": "data.arrow"}], "_format_type": None, "_format_kwargs": {}}
    state |= {"_format_columns": None, "_output_all_columns": False}
    for split in manifest.splits:
        content = json.dumps(state | {"_fingerprint": split, "_split": split})
        (folder / split / "state.json").write_text(content, encoding="utf-8")
        (folder / split / "dataset_info.json").write_text("{}", encoding="utf-8")
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(manifest.splits)}), encoding="utf-8")
    manifest.save(folder)


def summarize(manifest: Manifest) -> str:
    lines = []
    for split, numbers in manifest.splits.items():
        counts = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in numbers.items())
        fill = numbers["tokens"] / (manifest.max_seq_length * numbers["instances"])
        lines.append(f"{split}: {counts}; mean fill {fill:.1%}")
        if split == "train" and fill < 0.8:
            remedy = "If blank lines separate paragraphs rather than documents, remove them"
            lines.append(f"Warning: most documents are short. {remedy}")
    return "\n".join(lines)
