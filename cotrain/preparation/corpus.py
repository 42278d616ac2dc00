"""Text corpus: groups the rows of a source into documents in an Arrow file."""

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cotrain.common.errors import UserError
from cotrain.common.progress_bar import ProgressBar
from cotrain.models.objectives import SPLITS
from cotrain.preparation.chat_shapes import ChatReader

# Maximum sizes, so that a file with a single long line needs no more memory or time than any other. The time of
# sentencex is quadratic in the length of a line: 5 ms for 20,000 characters, 12 s for 1,000,000. The longest articles
# of WikiText have about 150,000 characters. Books are split, which leaves the last sample of each part half full,
# 1 in 200.
MAX_LINE_CHARS = 20_000
MAX_DOCUMENT_CHARS = 250_000
WRITE_CHARS = 10_000_000  # per record batch; Arrow's limit is 2 GiB of strings per batch
_SCHEMA = pa.schema({"text": pa.string()})
MAX_VALIDATION = 0.1  # of the characters of one part, if the text has several

# How rows become documents. The same for all splits of a source, and printed.
LAYOUTS = {
    "titles": "one from each title to the next, as in WikiText",
    "blank lines": "which end at blank lines and at the end of a file",
    "files": "one in each file; if blank lines separate documents, pass --row_is line",
    "rows": "one in each row",
}


class Conversation(str):
    """A row that is a document as it is: JSON in one line, see cotrain/preparation/conversations.py."""


@dataclass(frozen=True)
class Source:
    """Text source that is not read yet.

    :param parts: for each split, functions that yield rows, None for an empty cell. No document spans two parts
    :param has_lines: whether a row is a line, not a document
    :param has_files: whether each part is a document, unless it begins with a title of WikiText
    :param chat: what has read the rows, if they are conversations
    :param seen: hashes of the documents so far, whose repeats are left out; None: repeats are kept
    """

    name: str
    parts: dict[str, list[Callable[[], Iterable[str | None]]]]
    has_lines: bool
    has_files: bool = False
    chat: ChatReader | None = None
    seen: set[int] | None = None


@dataclass(frozen=True)
class Documents:
    """Documents in an Arrow file, read on demand: WikiText-103 is half a gigabyte.

    :param rows: row numbers of these documents in the file, in ascending order
    :param lengths: characters in each document
    """

    path: str
    rows: np.ndarray
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, numbers: Sequence[int] | np.ndarray) -> "Documents":
        return Documents(self.path, self.rows[numbers], self.lengths[numbers])

    def divide(self, group_chars: int) -> list["Documents"]:
        """Divide the documents into groups of about `group_chars` characters each."""
        ends = np.flatnonzero(np.diff(np.cumsum(self.lengths) // group_chars)) + 1
        return [self.select(numbers) for numbers in np.split(np.arange(len(self)), ends) if len(numbers)]

    def read(self) -> list[str]:
        """Return the texts, all in memory."""
        texts = _open(self.path)
        return [texts[row].as_py() for row in self.rows.tolist()]  # `take` would copy all chunks, at most 2 GiB

    def sample(self, max_chars: int, seed: int) -> Iterator[str]:
        """Yield random documents, each once, until `max_chars` characters are reached."""
        order = np.random.default_rng(seed).permutation(len(self))
        stop = np.searchsorted(np.cumsum(self.lengths[order]), max_chars) + 1
        for number in order[:stop]:
            yield from self.select([number]).read()


@lru_cache(maxsize=2)
def _open(path: str) -> pa.ChunkedArray:
    return pa.ipc.open_stream(pa.memory_map(path)).read_all()["text"]


@dataclass(frozen=True)
class Corpus:
    """Documents of a split in files, its parts. One part is opened at a time: memory does not grow with the text.

    :param held_out: for text that brings no validation text, the parameters of `hold_out` for each part, and
        which of its results is this split
    """

    paths: list[Path]
    held_out: tuple[float, int, int] | None = None

    def __len__(self) -> int:
        return len(self.paths)

    def __iter__(self) -> Iterator[Documents]:
        for path in self.paths:
            lengths = pc.utf8_length(_open(str(path))).to_numpy().astype(np.int64)
            documents = Documents(str(path), np.arange(len(lengths)), lengths)
            if self.held_out is not None:
                *options, split = self.held_out
                documents = documents.select(hold_out(len(documents), *options)[split])
            yield documents


def _drop_repeats(documents: Iterable[str], seen: set[int]) -> Iterator[str]:
    for document in documents:
        # A conversation begins with its place
        key = hash(document.partition('", ')[2] if isinstance(document, Conversation) else document)
        if key not in seen:
            seen.add(key)
            yield document


def write_documents(source: Source, split: str, layout: str, folder: Path, part_chars: float) -> None:
    """Group the rows of a split into documents, write these to Arrow files, and print the counts.

    :param part_chars: characters after which a file ends
    """
    num_documents, skipped = 0, Counter()
    parts = (split_documents(part(), layout, skipped) for part in source.parts[split])
    documents = itertools.chain.from_iterable(parts)
    documents = documents if source.seen is None else _drop_repeats(documents, source.seen)
    with ProgressBar(desc=f"Reading {split} text", unit=" chars", unit_scale=True, delay=1) as progress:  # seconds
        for number, first in enumerate(documents):  # the rest of a part's documents is taken below
            batch, size, written = [], 0, 0
            with (
                pa.OSFile(str(folder / f"{split}-{number:05d}.arrow"), "wb") as file,
                pa.ipc.new_stream(file, _SCHEMA) as writer,
            ):
                for document in itertools.chain([first], documents):
                    batch.append(document)
                    size += len(document)
                    num_documents += 1
                    progress.update(len(document))
                    if size >= WRITE_CHARS or written + size >= part_chars:
                        writer.write_table(pa.table({"text": batch}, schema=_SCHEMA))
                        batch, size, written = [], 0, written + size
                    if written >= part_chars:
                        break
                writer.write_table(pa.table({"text": batch}, schema=_SCHEMA))
    others = "".join(f"; {count:,} {kind} rows skipped" for kind, count in sorted(skipped.items(), reverse=True))
    print(f"{source.name}: {num_documents:,} documents of {split} text, {LAYOUTS[layout]}{others}")


def read_corpus(source: Source, folder: Path, part_chars: float = math.inf, max_left_out: float = 1.0) -> None:
    """Read the whole source into files in `folder`; UserError if more of its conversations are left out."""
    layout = "rows"
    if source.chat is None:
        rows = itertools.chain.from_iterable(part() for part in source.parts["train"])
        layout = find_layout(rows, source.has_lines)
        layout = "files" if source.has_lines and source.has_files and layout != "titles" else layout
    for split in source.parts:
        write_documents(source, split, layout, folder, part_chars)
    if source.chat is not None:
        source.chat.report(source.name, max_left_out)


def open_corpus(source: Source, folder: Path, validation_fraction: float, seed: int) -> dict[str, Corpus]:
    """Return the documents that `read_corpus` has written, of the splits "train" and "validation".

    :param validation_fraction: fraction of the documents that is held out if the source has no validation text; of a
        text in several parts at most MAX_VALIDATION of one part
    :raises UserError: if a split has no text, or none can be held out
    """
    corpus = {split: Corpus(sorted(folder.glob(f"{split}-*.arrow"))) for split in source.parts}
    for split, documents in corpus.items():
        if not len(documents):
            what = "text" if source.chat is None else "conversation"
            raise UserError(f"{source.name}: the split '{split}' has no {what}; pass a file that is not empty")
    if "validation" not in corpus:
        paths = corpus["train"].paths
        if (
            len(paths) == 1
            and len(next(iter(corpus["train"]))) < 2
            and not _divide(paths[0], validation_fraction, seed)
        ):
            remedy = "separate its documents by blank lines" if source.has_lines else "pass a text of several rows"
            raise UserError(f"{source.name} is a single document, so none can be held out for validation: {remedy}")
        if len(paths) > 1:
            validation_fraction = min(validation_fraction, MAX_VALIDATION / len(paths))
        corpus = {split: Corpus(paths, (validation_fraction, seed, n)) for n, split in enumerate(SPLITS)}
    return corpus


def _divide(path: Path, fraction: float, seed: int) -> bool:
    """Divide the only document in a file at the end of a line, so that `hold_out` takes a `fraction` of it."""
    (text,) = next(iter(Corpus([path]))).read()
    is_end = hold_out(2, fraction, seed)[1][0] == 1
    cut = text.find("\n", round(len(text) * (1 - fraction if is_end else fraction))) + 1 or text.rfind("\n") + 1
    if text[:cut].strip() and text[cut:].strip():
        new = path.with_suffix(".new")  # the file is mapped into memory
        with pa.OSFile(str(new), "wb") as file, pa.ipc.new_stream(file, _SCHEMA) as writer:
            writer.write_table(pa.table({"text": [text[:cut], text[cut:]]}, schema=_SCHEMA))
        new.replace(path)
        _open.cache_clear()
    return len(next(iter(Corpus([path])))) > 1


# --- rows -> documents -----------------------------------------------------------------------------------------------

# "= Title =", but not "= = Section = =". Between blank rows: the test split also has "= 1 henry and capacitance C ="
_TITLE = re.compile(r"= [^=](?:.*[^=])? =")


def find_layout(rows: Iterable[str | None], has_lines: bool) -> str:
    """Return the key of LAYOUTS for a source: "titles" if its text begins with a title of WikiText.

    :param has_lines: whether a row of another source than WikiText is a line, not a document
    """
    stripped = ((row or "").strip() for row in rows)
    first = next(filter(None, stripped), "")
    if _TITLE.fullmatch(first) and not next(stripped, ""):
        return "titles"
    return "blank lines" if has_lines else "rows"


def _cut_row(row: str) -> Iterator[str]:
    """Yield the lines of a row without white space at their ends, in pieces of at most MAX_LINE_CHARS characters.

    Lines are cut at spaces if possible. White space at the start of a line is the indentation of code.
    """
    for line in row.split("\n"):
        while len(line) > MAX_LINE_CHARS:
            cut = line.rfind(" ", 1, MAX_LINE_CHARS) + 1 or MAX_LINE_CHARS
            yield line[:cut].rstrip()
            line = line[cut:]
        yield line.rstrip()


def _cut_text(lines: Iterable[str]) -> Iterator[str]:
    """Yield a text as it is, in pieces of at most MAX_DOCUMENT_CHARS, which end at line ends if possible."""
    pieces, size = [], 0
    for line in itertools.chain.from_iterable(text.splitlines(keepends=True) for text in lines):
        for begin in range(0, len(line), MAX_DOCUMENT_CHARS):
            piece = line[begin : begin + MAX_DOCUMENT_CHARS]
            if size + len(piece) > MAX_DOCUMENT_CHARS:
                yield "".join(pieces)
                pieces, size = [], 0
            pieces.append(piece)
            size += len(piece)
    yield "".join(pieces)


def _mark_ends(rows: Iterable[str | None], layout: str) -> Iterator[str | None]:
    """Yield the lines of the rows, and None where a document ends."""
    clean = str.strip if layout == "titles" else str.rstrip
    for has_text, paragraph in itertools.groupby((clean(row or "") for row in rows), key=bool):
        head = list(itertools.islice(paragraph, 2))
        if has_text and (layout == "blank lines" or (len(head) == 1 and _TITLE.fullmatch(head[0]))):
            yield None
        for row in itertools.chain(head, paragraph):
            yield from filter(None, _cut_row(row))
    yield None


def split_documents(
    rows: Iterable[str | None], layout: str = "blank lines", skipped: Counter[str] | None = None
) -> Iterator[str]:
    """Group rows of text into documents.

    :param layout: a key of LAYOUTS. In any case a document has at most MAX_DOCUMENT_CHARS: BookCorpus has one sentence
        per row and no separators between books
    :param skipped: counts the rows of the layout "rows" that are "null" or "blank"
    :returns: documents that are not blank. In the layouts "rows" and "files" they are as in the source, in others
        their lines have no white space at their ends
    """
    skipped = Counter() if skipped is None else skipped
    if layout == "files":
        yield from filter(str.strip, _cut_text(rows))
        return
    if layout == "rows":
        for row in rows:
            if row is None or not row.strip():
                skipped["null" if row is None else "blank"] += 1
            elif isinstance(row, Conversation):
                yield row
            else:
                yield from filter(str.strip, _cut_text([row.strip("\r\n")]))
        return
    lines, size = [], 0
    for line in _mark_ends(rows, layout):
        if lines and (line is None or size + len(line) > MAX_DOCUMENT_CHARS):
            if document := "\n".join(lines).strip("\n"):
                yield document
            lines, size = [], 0
        if line is not None:
            lines.append(line)
            size += len(line)


def hold_out(num_documents: int, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Divide documents into those for training and for validation, of at least two documents at least one each.

    :returns: their numbers, each in ascending order
    """
    num_held_out = min(max(1, round(fraction * num_documents)), num_documents - 1)
    order = np.random.default_rng([seed, num_documents]).permutation(num_documents)
    return np.sort(order[num_held_out:]), np.sort(order[:num_held_out])
