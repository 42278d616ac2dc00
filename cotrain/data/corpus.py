"""Text corpus: reads the source that the flags name into documents in an Arrow file."""

import itertools
import platform
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import pyarrow as pa
from tqdm.auto import tqdm

from cotrain.common.errors import UserError, first_line
from cotrain.models.objectives import SPLITS

# Maximum sizes, so that a file with a single long line needs no more memory or time than any other. The time of
# sentencex is quadratic in the length of a line: 5 ms for 20,000 characters, 12 s for 1,000,000. The longest articles
# of WikiText have about 150,000 characters. Books are split, which leaves the last sample of each part half full,
# 1 in 200.
MAX_LINE_CHARS = 20_000
MAX_DOCUMENT_CHARS = 250_000
READ_CHARS = 1_000_000  # read from a text file at a time
WRITE_CHARS = 10_000_000  # per record batch; Arrow's limit is 2 GiB of strings per batch


@dataclass(frozen=True)
class Source:
    """Text source that is not read yet. `rows`: for each split, a function that yields rows for `split_documents`."""

    name: str
    rows: dict[str, Callable[[], Iterable[str]]]


@dataclass(frozen=True)
class Documents:
    """Documents in an Arrow file, read on demand: WikiText-103 is half a gigabyte, BookCorpus five.

    :param rows: row numbers of these documents in the file, in ascending order
    :param lengths: characters in each document
    """

    path: str
    rows: np.ndarray
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, numbers: np.ndarray | list[int] | slice) -> "Documents":
        return Documents(self.path, self.rows[numbers], self.lengths[numbers])

    def read(self) -> list[str]:
        texts = _open(self.path)
        return [texts[row].as_py() for row in self.rows.tolist()]  # `take` would copy all chunks, at most 2 GiB

    def sample(self, max_chars: int, seed: int) -> Iterator[str]:
        """Yield random documents, each once, until `max_chars` characters are reached."""
        size = 0
        for number in np.random.default_rng(seed).permutation(len(self)):
            if size >= max_chars:
                return
            yield from self.select([number]).read()
            size += int(self.lengths[number])


@lru_cache(maxsize=2)
def _open(path: str) -> pa.ChunkedArray:
    return pa.ipc.open_stream(pa.memory_map(path)).read_all()["text"]


def write_documents(rows: Iterable[str], path: Path, desc: str) -> Documents:
    """Group rows of text into documents and write the documents to an Arrow file."""
    lengths: list[int] = []
    schema = pa.schema({"text": pa.string()})
    with (
        pa.OSFile(str(path), "wb") as file,
        pa.ipc.new_stream(file, schema) as writer,
        tqdm(desc=desc, unit=" chars", unit_scale=True, delay=1) as progress,  # seconds; no bar for a small file
    ):
        batch, size = [], 0
        for document in split_documents(rows):
            batch.append(document)
            lengths.append(len(document))
            size += len(document)
            progress.update(len(document))
            if size >= WRITE_CHARS:
                writer.write_table(pa.table({"text": batch}, schema=schema))
                batch, size = [], 0
        writer.write_table(pa.table({"text": batch}, schema=schema))
    return Documents(str(path), np.arange(len(lengths)), np.array(lengths, dtype=np.int64))


def read_corpus(source: Source, folder: Path, validation_fraction: float, seed: int) -> dict[str, Documents]:
    """Read the whole source into files in `folder`; return the documents of the splits "train" and "validation".

    :param validation_fraction: fraction of the documents that is held out if the source has no validation text
    """
    corpus = {}
    for split, rows in source.rows.items():
        corpus[split] = write_documents(rows(), folder / f"{split}.arrow", desc=f"Reading {split} text")
        if not len(corpus[split]):
            raise UserError(f"{source.name}: the split '{split}' has no text; pass a file that is not empty")
    if "validation" not in corpus:
        if len(corpus["train"]) < 2:
            raise UserError(
                f"{source.name} is a single document, so none can be held out for validation: "
                "separate its documents by blank lines"
            )
        train, validation = hold_out(len(corpus["train"]), validation_fraction, seed)
        corpus = {"train": corpus["train"].select(train), "validation": corpus["train"].select(validation)}
    return corpus


def open_sample() -> Source:
    """The text that every Python carries."""
    return Source(f"the documentation topics of Python {platform.python_version()}", {"train": _sample_rows})


def open_file(path: str) -> Source:
    """A text file of the user."""
    # The folder of a file may be private: the name goes into the manifest, which is published.
    return Source(Path(path).name, {"train": partial(read_text_file, path)})


# --- rows -> documents -----------------------------------------------------------------------------------------------

_TITLE = re.compile(r"= [^=](?:.*[^=])? =")  # "= Title =", but not "= = Section = ="


def _is_title(previous: str, row: str, following: str) -> bool:
    """Whether a row of WikiText is the title of an article.

    Titles are between blank rows. Formulas are not: the test split has "= 1 henry and capacitance C =".
    """
    return row.startswith("= ") and not previous and not following and _TITLE.fullmatch(row) is not None


def _cut_row(row: str) -> Iterator[str]:
    """Yield the stripped lines of a row, in pieces of at most MAX_LINE_CHARS characters, cut at spaces if possible."""
    for line in row.split("\n"):
        while len(line) > MAX_LINE_CHARS:
            cut = line.rfind(" ", 1, MAX_LINE_CHARS) + 1 or MAX_LINE_CHARS
            yield line[:cut].strip()
            line = line[cut:]
        yield line.strip()


def _mark_ends(rows: Iterable[str]) -> Iterator[str | None]:
    """Yield the non-blank lines of the rows, and None where a document ends."""
    previous, rows, following = itertools.tee((row.strip() for row in rows), 3)
    next(following, None)
    is_wikitext = None  # not known before the first line
    neighbours = itertools.chain([""], previous), rows, itertools.chain(following, [""])
    for before, row, after in zip(*neighbours, strict=False):
        is_title = _is_title(before, row, after)
        if is_wikitext is None and row:
            is_wikitext = is_title
        is_document = "\n" in row
        if is_document or (is_title if is_wikitext else not row):
            yield None
        yield from filter(None, _cut_row(row))
        if is_document:
            yield None
    yield None


def split_documents(rows: Iterable[str]) -> Iterator[str]:
    """Group rows of text into documents.

    A row is a line, or a whole document of several lines. Lines are grouped into documents
    - by article, if the first line is a title of WikiText (" = Title = " between blank lines),
    - otherwise up to the next blank line,
    - in any case up to MAX_DOCUMENT_CHARS: BookCorpus has one sentence per row and no separators between books.

    :returns: non-empty documents: stripped non-blank lines joined by newlines
    """
    lines: list[str] = []
    size = 0
    for line in _mark_ends(rows):
        if lines and (line is None or size + len(line) > MAX_DOCUMENT_CHARS):
            yield "\n".join(lines)
            lines, size = [], 0
        if line is not None:
            lines.append(line)
            size += len(line)


def hold_out(num_documents: int, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Divide at least two documents into those for training and for validation, at least one each.

    :returns: their numbers, each in ascending order
    """
    num_held_out = min(max(1, round(fraction * num_documents)), num_documents - 1)
    generator = np.random.default_rng([seed, num_documents])
    held_out = np.sort(generator.choice(num_documents, size=num_held_out, replace=False))
    return np.setdiff1d(np.arange(num_documents), held_out), held_out


# --- embedded text ---------------------------------------------------------------------------------------------------

_UNDERLINE = re.compile(r"([^\w\s])\1{2,}")  # rows of one repeated character: underlines of reStructuredText


def _sample_rows() -> Iterator[str]:
    """Yield the topics of Python's help(): one row per paragraph, and a blank row after each topic."""
    from pydoc_data.topics import topics

    for _, topic in sorted(topics.items()):
        lines = ["" if _UNDERLINE.fullmatch(line.strip()) else line.strip() for line in topic.split("\n")]
        for has_text, paragraph in itertools.groupby(lines, key=bool):
            if has_text:
                yield " ".join(paragraph)
        yield ""


# --- text files ------------------------------------------------------------------------------------------------------


def read_text_file(path: str) -> Iterator[str]:
    """Yield the lines of a UTF-8 file. A line of more than READ_CHARS characters is split."""
    number = 0
    # utf-8-sig: UTF-8, with or without the byte order mark that Windows programs write
    with open(path, encoding="utf-8-sig") as file:
        try:
            for number, line in enumerate(iter(partial(file.readline, READ_CHARS), ""), start=1):
                if "\0" in line:
                    raise UserError(f"'{path}' is not text: line {number} has a zero byte; pass a text file")
                yield line
        except UnicodeDecodeError as error:
            raise UserError(
                f"'{path}' is not UTF-8 text (byte 0x{error.object[error.start]:02x} near line {number + 1}); "
                "convert it, for example with `iconv -f latin1 -t utf-8`"
            ) from None


# --- the Hugging Face Hub --------------------------------------------------------------------------------------------


def open_hub_dataset(name: str, config_name: str | None, revision: str | None, cache_dir: str | None) -> Source:
    """Open a dataset on the Hugging Face Hub, or one in a folder."""
    import datasets

    full_name = " ".join(filter(None, [name, config_name]))
    try:
        dataset = datasets.load_dataset(name, config_name, revision=revision, cache_dir=cache_dir)
    except (ConnectionError, ValueError, RuntimeError, datasets.exceptions.DatasetNotFoundError) as error:
        remedy = "go online, check the name and the configuration, or pass --train_file or --sample"
        if "scripts are no longer supported" in str(error):
            remedy = "pass --dataset_revision refs/convert/parquet, the Hub's copy of it, or another dataset"
        raise UserError(f"--dataset_name: '{full_name}' cannot be loaded: {first_line(error)}; {remedy}") from error
    if "train" not in dataset or "text" not in dataset["train"].column_names:
        columns = {split: part.column_names for split, part in dataset.items()}
        raise UserError(f"--dataset_name: '{full_name}' has no split 'train' with a column 'text', but {columns}")
    public_name = Path(name).name if Path(name).is_dir() else full_name  # as for a file
    return Source(public_name, {split: partial(_hub_rows, dataset[split]) for split in SPLITS if split in dataset})


def _hub_rows(dataset) -> Iterator[str]:
    for batch in dataset.select_columns("text").iter(batch_size=1000):
        for row in batch["text"]:
            yield row or ""
