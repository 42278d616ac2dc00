"""Preparation of the data: tokenize and pack documents in several processes, and save the dataset."""

import gc
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from functools import lru_cache, partial
from pathlib import Path

import pyarrow as pa
from datasets import Dataset, DatasetDict
from datasets.table import MemoryMappedTable
from tqdm.auto import tqdm

from cotrain.common.errors import UserError
from cotrain.data.corpus import Documents
from cotrain.data.encoding import TextEncoder
from cotrain.data.manifest import Manifest
from cotrain.data.packing import SCHEMAS, PackingConfig, PackingStats, build_samples, group_documents
from cotrain.data.tokenizers import load_tokenizer
from peerstep.processes import leave_with_parent


def tokenize_corpus(
    corpus: dict[str, Documents], tokenizer: Path, config: PackingConfig, num_proc: int, work: Path, folder: Path
) -> dict[str, dict[str, int]]:
    """Tokenize and pack all splits, and save them in a folder that `datasets.load_from_disk` opens.

    :param tokenizer: folder with the tokenizer
    :param work: folder for intermediate files
    :returns: for each split, the fields of `PackingStats`
    """
    splits, dataset = {}, DatasetDict()
    pool = ProcessPoolExecutor(num_proc, initializer=begin_worker)
    map_tasks = map if num_proc == 1 else pool.map
    try:
        for split, documents in corpus.items():
            numbers = group_documents(documents.lengths)
            groups = [documents.select(group) for group in numbers]
            results = map_tasks(partial(tokenize_group, split, str(tokenizer), config), numbers, groups)
            stats, path = PackingStats(), work / f"{split}.samples"
            with (
                pa.OSFile(str(path), "wb") as file,
                pa.ipc.new_stream(file, SCHEMAS[config.objective]) as writer,
                tqdm(desc=f"Tokenizing {split}", total=documents.lengths.sum(), unit=" chars", unit_scale=True) as bar,
            ):
                for group, (samples, group_stats) in zip(groups, results, strict=True):
                    writer.write_table(samples)
                    stats += group_stats
                    bar.update(group.lengths.sum())
            if not stats.instances:
                what = f"the {split} text ({stats.documents} documents)"
                raise UserError(f"{what} is too short for one sample; pass a longer text")
            splits[split] = asdict(stats)
            dataset[split] = Dataset(MemoryMappedTable.from_file(str(path)), fingerprint=split)
    except BrokenProcessPool:
        raise UserError("a worker process has died (out of memory?); pass a lower --num_proc") from None
    finally:
        pool.shutdown(cancel_futures=True)
    dataset.save_to_disk(folder)
    return splits


def tokenize_group(
    split: str, tokenizer: str, config: PackingConfig, numbers: range, documents: Documents
) -> tuple[pa.Table, PackingStats]:
    """Tokenize and pack the documents that have these numbers within the split."""
    return build_samples(documents.read(), numbers, split, open_encoder(tokenizer), config)


@lru_cache(maxsize=1)
def open_encoder(folder: str) -> TextEncoder:
    return TextEncoder(load_tokenizer(folder))


def begin_worker() -> None:
    """In a worker: leave Ctrl-C to the parent process, and end when it ends, even if it is killed."""
    leave_with_parent()
    gc.disable()  # a tenth of the time; a task leaves no reference cycles


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
