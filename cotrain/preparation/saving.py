"""Preparation of the data: tokenize and pack documents in several processes, and save the dataset or its shards."""

import contextlib
import gc
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from functools import lru_cache, partial
from pathlib import Path

import pyarrow as pa
from datasets import Dataset, DatasetDict
from datasets.table import MemoryMappedTable

from cotrain.common.atomic_files import temporary_folder
from cotrain.common.errors import UserError
from cotrain.common.json_file import JsonLinesFile, read_records
from cotrain.common.progress_bar import ProgressBar
from cotrain.data.archive import DATASET, write_archive
from cotrain.data.loading import check_samples, open_samples
from cotrain.data.manifest import Manifest, Shard
from cotrain.data.schemas import SCHEMAS
from cotrain.data.tokenizers import load_tokenizer
from cotrain.models.vocabulary import vocabulary_size
from cotrain.preparation.chat_shapes import report_left_out
from cotrain.preparation.conversations import encode_conversation
from cotrain.preparation.corpus import Corpus, Documents
from cotrain.preparation.encoding import TextEncoder
from cotrain.preparation.packing import PackingConfig, PackingStats, build_samples
from cotrain.preparation.preview import show_preview
from peerstep.peer.processes import leave_with_parent

# Characters that a worker tokenizes and packs at once. It is not the number of workers that decides what is in a
# sample: none spans two groups.
GROUP_CHARS = 500_000


@contextlib.contextmanager
def open_pool(num_proc: int) -> Iterator[Callable]:
    """Yield a `map` that runs in worker processes, which leave Ctrl-C to this one; UserError if one of them dies."""
    pool = ProcessPoolExecutor(num_proc, initializer=leave_with_parent)
    gc.disable()  # here and in the workers: a tenth of the time; a task leaves no reference cycles
    try:
        yield map if num_proc == 1 else pool.map
    except BrokenProcessPool:
        raise UserError("a worker process has died (out of memory?); pass a lower --num_proc") from None
    finally:
        gc.enable()
        pool.shutdown(cancel_futures=True)


def save_dataset(
    corpus: dict[str, Corpus],
    tokenizer: Path,
    config: PackingConfig,
    num_proc: int,
    work: Path,
    folder: Path,
    archive: Path | None = None,
    max_left_out: float = 1.0,
    preview: int = 0,
) -> tuple[dict[str, dict[str, int]], list[Shard]]:
    """Tokenize and pack all splits, and save them in a folder that `datasets.load_from_disk` opens.

    :param tokenizer: folder with the tokenizer
    :param work: folder for intermediate files
    :param archive: write shards of the training text beside this file, and not into the folder
    :param max_left_out: fraction of the conversations that may be left out
    :param preview: samples to show
    :returns: for each split, the counts of `PackingStats`; and the shards
    :raises UserError: if a split makes no sample, or too many conversations are left out
    """
    splits, shards, dataset, total = {}, [], DatasetDict(), PackingStats()
    with open_pool(num_proc) as map_tasks:
        write = partial(_write_samples, map_tasks, tokenizer, config)
        for split, parts in corpus.items():
            if archive is not None and split == "train":
                stats, shards = _write_shards(write, parts, work, archive)
            else:
                path = work / f"{split}.samples"
                stats = write(split, parts, path)
                dataset[split] = Dataset(MemoryMappedTable.from_file(str(path)), fingerprint=split)
            total += stats
            if not stats.instances and not total.faults and not total.long:
                what = f"the {split} text ({stats.documents} documents)"
                raise UserError(f"{what} makes no sample; pass a longer text, or for chat more or earlier answers")
            splits[split] = stats.counts()
    if config.objective == "chat":
        report_losses(total, config.max_seq_length, max_left_out)
    dataset.save_to_disk(folder)
    shown = dataset.get("train", dataset["validation"])
    step = 1 if config.objective == "chat" else max(1, len(shown) // max(1, preview))  # of texts several files
    samples = [shown[n] for n in range(0, len(shown), step)[:preview]]
    show_preview(samples, open_encoder(str(tokenizer)).tokenizer, folder)
    return splits, shards


def report_losses(stats: PackingStats, max_seq_length: int, max_left_out: float) -> None:
    """Print the conversations that are cut or left out; UserError if too many are left out."""
    report_left_out(stats.faults, stats.documents, max_left_out)
    if not stats.long:
        return
    lost, total = stats.dropped_documents - len(stats.faults), stats.documents - len(stats.faults)
    lengths = sorted(stats.long, reverse=True)
    what = f"{len(lengths):,} of {total:,} conversations are longer than --max_seq_length {max_seq_length}: "
    what += f"{len(lengths) - lost:,} are cut after the last answer that fits whole, {lost:,} are left out"
    if (allowed := total // 100) < len(lengths):
        what += f"; --max_seq_length {lengths[allowed]} keeps 99 % whole"
    if lost > max_left_out * total:
        remedy = f", or --max_left_out {-(-lost * 100 // total) / 100} to allow it" if lost < total else ""
        raise UserError(f"{what}; pass it{remedy}")
    print(what)


def _write_shards(
    write: Callable[..., PackingStats], parts: Corpus, work: Path, archive: Path
) -> tuple[PackingStats, list[Shard]]:
    """Pack each part of the training text into an archive; those in the log in `work` are finished."""
    log, total, shards = JsonLinesFile(work / "shards.jsonl"), PackingStats(), []
    finished = {record["number"]: record for record in read_records(log.path, "number")}
    for number, part in enumerate(parts):
        path = archive.with_name(f"{archive.name.removesuffix('.gz').rpartition('.')[0]}-{number:05d}.tar.gz")
        record = finished.get(number)
        if record is None or not path.exists():
            with temporary_folder(work / "train") as unpacked:
                file = unpacked / f"data-{number:05d}.arrow"
                stats = write("train", [part], file)
                record = {"number": number, "stats": asdict(stats), "unpacked": file.stat().st_size}
                record["sha256"] = write_archive(path, {f"{DATASET}/train": unpacked})
            log.write(record)
        total += (stats := PackingStats(**record["stats"]))
        if stats.instances:
            shards.append(Shard(path.name, record["sha256"], path.stat().st_size, record["unpacked"], stats.instances))
    return total, shards


def _write_samples(
    map_tasks: Callable, folder: Path, config: PackingConfig, split: str, parts: Iterable[Documents], path: Path
) -> PackingStats:
    """Write the samples of parts of a split to an Arrow file, by the tokenizer in `folder`."""
    stats, tokenize = PackingStats(), partial(tokenize_group, str(folder), config)
    tokenizer = open_encoder(str(folder)).tokenizer  # the workers inherit it
    with (
        pa.OSFile(str(path), "wb") as file,
        pa.ipc.new_stream(file, SCHEMAS[config.objective]) as writer,
        ProgressBar(desc=f"Tokenizing {split}", unit=" chars", unit_scale=True) as progress,
    ):
        for documents in parts:
            groups = documents.divide(GROUP_CHARS)
            for group, (samples, group_stats) in zip(groups, map_tasks(tokenize, groups), strict=True):
                writer.write_table(samples)
                stats += group_stats
                progress.update(group.lengths.sum())
    try:
        table = open_samples([path], config.objective, stats.instances)
        check_samples(table, config.max_seq_length, vocabulary_size(tokenizer))
    except ValueError as error:
        raise UserError(f"--tokenizer does not keep to its vocabulary ({error}); choose another one") from None
    return stats


def tokenize_group(tokenizer: str, config: PackingConfig, documents: Documents) -> tuple[pa.Table, PackingStats]:
    """Tokenize and pack documents, by the tokenizer in a folder."""
    encoder, texts = open_encoder(tokenizer), documents.read()
    if config.objective == "chat":
        return _tokenize_conversations(texts, encoder, config)
    return build_samples(texts, encoder, config)


def _tokenize_conversations(
    texts: list[str], encoder: TextEncoder, config: PackingConfig
) -> tuple[pa.Table, PackingStats]:
    """Do the same for conversations, without those that the chat template does not take."""
    conversations, faults, dropped = [], [], Counter()
    for text in texts:
        try:
            ids, learnt = encode_conversation(text, encoder.tokenizer, dropped)
            if not learnt.any():
                raise UserError(f"{json.loads(text)[0]}: the chat template shows no answer to learn")
            conversations.append((ids, learnt))
        except UserError as error:
            faults.append(str(error).partition(";")[0])
    samples, stats = build_samples(conversations, encoder, config)
    refused = PackingStats(documents=len(faults), dropped_documents=len(faults), faults=faults)
    left_out = PackingStats(dropped_reasoning=dropped["reasoning"], dropped_messages=dropped["messages"])
    return samples, stats + refused + left_out


@lru_cache(maxsize=1)
def open_encoder(folder: str) -> TextEncoder:
    return TextEncoder(load_tokenizer(folder))


def summarize(manifest: Manifest) -> str:
    """Return a line for each split, and a warning for training samples that are mostly padding."""
    lines = []
    for split, numbers in manifest.splits.items():
        counts = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in numbers.items())
        fill = numbers["tokens"] / (manifest.max_seq_length * numbers["instances"])
        lines.append(f"{split}: {counts}; mean fill {fill:.1%}")
        if "dropped_reasoning" in numbers:
            remedy = "of these, answers that it writes with reasoning at the end of a conversation are not learnt"
            lines.append(f"Warning: the chat template leaves out reasoning; {remedy}. --chat_template names another")
        if "dropped_messages" in numbers:
            remedy = "see the samples above. --chat_template names another"
            lines.append(f"Warning: the chat template leaves out messages that are no answers: {remedy}")
        if split == "train" and fill < 0.8 and manifest.objective != "chat":
            remedy = "If blank lines or rows separate paragraphs rather than documents, see --row_is"
            lines.append(f"Warning: most documents are short. {remedy}")
    return "\n".join(lines)
