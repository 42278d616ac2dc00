"""Sources of text: the sample, files, folders, and datasets on the Hugging Face Hub."""

import codecs
import contextlib
import glob
import lzma
import mimetypes
import os
import platform
import re
import shutil
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import charset_normalizer
import datasets
import fsspec
import pyarrow
from backports import zstd

from cotrain.common.errors import UserError, first_line
from cotrain.common.hub_cache import is_silent
from cotrain.common.stand_ins import find_stand_in
from cotrain.models.objectives import SPLITS
from cotrain.preparation.chat_shapes import ChatReader, unify_line_ends
from cotrain.preparation.conversations import SURROGATE, read_conversations
from cotrain.preparation.corpus import Source
from cotrain.preparation.tables import read_csv, read_dataset, read_json

# Kinds of files by name, without .gz and the like; other files are text.
_KINDS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".ndjson": "json", ".parquet": "parquet", ".tsv": "csv"}
READ_CHARS = 1_000_000  # read from a text file at a time
# Errors of libraries that read a file which is cut off, or of another kind than its name says
DAMAGED = EOFError, zlib.error, lzma.LZMAError, zstd.ZstdError, zipfile.BadZipFile, pyarrow.ArrowInvalid
# Without the code pages of DOS and Macs, which charset-normalizer finds in short texts of any language
_ENCODINGS = (
    "utf_16 utf_16_le utf_16_be cp1252 cp1250 cp1251 cp1253 cp1254 cp1255 cp1256 cp1257 cp1258 cp874 cp866 koi8_r "
    "koi8_u cp932 euc_jis_2004 gb18030 big5 cp949 iso8859_2 iso8859_5"
)


Column = str | ChatReader | None  # of the text; or each row is a conversation, which this reads


# --- embedded text ---------------------------------------------------------------------------------------------------

_UNDERLINE = re.compile(r"^([^\w\s])\1{2,}$")  # rows of one repeated character: underlines of reStructuredText


def open_sample() -> Source:
    """Open the topics of Python's help(): one row per paragraph, and a blank row after each topic."""
    rows = []
    for _, topic in sorted(topics.items()):
        lines = "\n".join(_UNDERLINE.sub("", line.strip()) for line in topic.split("\n")).strip("\n")
        rows += [*(paragraph.replace("\n", " ") for paragraph in re.split(r"\n{2,}", lines)), ""]
    name = f"the documentation topics of Python {platform.python_version()}"
    return Source(name, {"train": [rows.copy]}, has_lines=True)


# --- files -----------------------------------------------------------------------------------------------------------


def describe_files(value: object) -> list[tuple[str, int, int]]:
    """Return name, size and time of the files that a flag names, if any: others of the same name are another text."""
    paths = _find_paths(value) if isinstance(value, str) else []
    files = (file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path]))
    return [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]


def _find_paths(pattern: str) -> list[Path]:
    """Return the path of a file or a folder, whose name may have brackets, or those that a wildcard names."""
    paths = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))
    return [Path(path) for path in paths]


def open_files(pattern: str, work: Path, column: Column, encoding: str | None) -> Source:
    """Open the files that a path or a wildcard names; `column` and `encoding` as for `open_splits`."""
    files = [path for path in _find_paths(pattern) if not path.is_dir()]
    if not files[0].is_file():  # a pipe, as of <(zcat text.gz), can be read once
        with open(files[0], "rb") as pipe, open(work / "pipe", "wb") as copy:
            shutil.copyfileobj(pipe, copy)
        files = [work / "pipe"]
    # The folder of a file may be private: the name goes into the manifest, which is published.
    return open_splits(Path(pattern).name, {"train": files}, column, encoding)


def open_splits(name: str, splits: dict[str, list[Path]], column: Column, encoding: str | None) -> Source:
    """Open files; UserError if they are not all of one kind.

    :param encoding: of the files; None: find it
    """
    used = {split: [x for x in paths if x.stat().st_size] or paths[:1] for split, paths in splits.items()}
    if num_empty := sum(len(paths) - len(used[split]) for split, paths in splits.items()):  # as __init__.py
        print(f"{name}: {num_empty} empty files are left out")
    splits = used
    if len(files := [str(path) for paths in splits.values() for path in paths]) > 1:
        shown = ", ".join(os.path.relpath(path, os.path.commonpath(files)) for path in files[:3])
        print(f"{name}: {len(files):,} files: {shown}{', …' * (len(files) > 3)}")
    kinds = {_KINDS.get(_find_suffix(Path(path)), "text") for path in files}
    if len(kinds) > 1:
        raise UserError(f"'{name}' has files of several kinds; pass those of one kind, as in 'FOLDER/*.jsonl'")
    (kind,) = kinds
    options = kind, column, encoding
    parts = {split: [partial(_read_file, path, *options) for path in paths] for split, paths in splits.items()}
    is_text = kind == "text" and isinstance(column, str)
    return Source(name, parts, has_lines=is_text, has_files=is_text, chat=None if isinstance(column, str) else column)


def _find_suffix(path: Path) -> str:
    """Return the suffix of a file name without that of its compression."""
    return (path.with_suffix("") if fsspec.utils.infer_compression(str(path)) else path).suffix.lower()


def _read_file(path: Path, kind: str, column: Column, encoding: str | None) -> Iterator[str | None]:
    """Yield the texts or conversations of a file; of a text its lines with their ends, each at most READ_CHARS."""
    with _explain(path.name):
        if stand_in := find_stand_in(path):
            raise UserError(f"'{path.name}' is {': '.join(stand_in)}")
        if kind == "parquet":
            datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # the messages are in ours
            # One dataset for each file: files with other columns do not fit into one.
            dataset = datasets.load_dataset(kind, data_files=str(path), split="train", streaming=True)
            yield from _read_dataset(path.name, dataset, column)
            return
        is_text = kind == "text" and isinstance(column, str)
        options = {"encoding": encoding or find_encoding(path), "newline": None if is_text else ""}
        with fsspec.open(str(path), "rt", compression="infer", **options) as file:
            lines = iter(partial(file.readline, READ_CHARS), "")
            if is_text:
                yield from lines
                return
            separator = "\t" if _find_suffix(path) == ".tsv" else ","
            rows = read_csv(path.name, file, separator) if kind == "csv" else read_json(file)
            yield from _take(path.name, rows, column)


def _take(name: str, rows: Iterable[Any], column: Column) -> Iterator[str | None]:
    """Yield the texts or conversations in rows; UserError if there is no such column, or it has no text."""
    if not isinstance(column, str):
        yield from read_conversations(name, rows, column)
        return
    row, is_there = {}, False
    for number, row in enumerate(rows, 1):
        if isinstance(row, str) and not row.strip():  # a blank line
            continue
        if not isinstance(row, dict) or None in row:
            raise ValueError(f"{'too many values' if isinstance(row, dict) else 'no JSON object'} in row {number}")
        text, is_there = row.get(column), is_there or column in row
        if not isinstance(text, str | None):
            kind = type(text).__name__
            raise UserError(f"--text_column: '{column}' of '{name}' has values of type {kind}, not text")
        # A text that was cut within an emoji has half of it, which UTF-8 cannot hold
        yield text and SURROGATE.sub("\ufffd", unify_line_ends(text))
    if not is_there:
        raise UserError(f"--text_column: '{name}' has no column '{column}', but {', '.join(row)}")


@contextlib.contextmanager
def _explain(name: str) -> Iterator[None]:
    """Turn the errors of libraries that read `name` into a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of any kind: zlib's, pyarrow's, pandas', Unicode's, the system's
        cause, remedy = error.__cause__ or error, "repair it, leave it out, or pass its --encoding"
        reason = " ".join(first_line(cause).split())
        if isinstance(cause, DAMAGED) or (isinstance(cause, OSError) and cause.errno is None):  # those of gzip, bz2
            reason, remedy = "it is cut off, damaged or of another kind than its name says", "copy it again"
        elif isinstance(cause, UnicodeDecodeError):
            reason = f"its byte 0x{cause.object[cause.start]:02x} is not {cause.encoding}"
        raise UserError(f"'{name}' cannot be read ({reason}); {remedy}") from error


@cache
def find_encoding(path: Path) -> str:
    """Return UTF-8, or the encoding that charset-normalizer finds and this prints; UserError if a file is not text."""
    names = zipfile.ZipFile(path).namelist() if zipfile.is_zipfile(path) else []  # the first one is read
    if any("__MACOSX/" not in name and not Path(name).name.startswith(".") for name in names[1:]):
        raise UserError(f"'{path.name}' has several files; unpack it, and pass the folder")
    with fsspec.open(str(path), compression="infer") as file:
        sample = file.read(READ_CHARS)
    if not sample:
        raise UserError(f"'{path.name}' has no text; pass a file that is not empty")
    if b"\x1b$" in sample:  # of old Japanese or Korean mails, which are ASCII with escapes
        for escaped in ("iso2022_jp_2004", "iso2022_kr"):
            with contextlib.suppress(UnicodeDecodeError):
                codecs.getincrementaldecoder(escaped)().decode(sample)
                print(f"{path.name} is read as {escaped}; if that is wrong, pass --encoding")
                return escaped
    # A character that is cut at the end of the sample is no damage.
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(sample, final=len(sample) < READ_CHARS)
    # A damaged file is still UTF-8 if most characters of several bytes are right. Reading it names the damage.
    if "\0" not in text and sum(not char.isascii() for char in text) >= 2 * text.count("\ufffd"):
        return "utf-8-sig"  # with or without a byte order mark
    if "\0" not in text:
        sample = b"\n".join(line for line in sample.split(b"\n") if not line.isascii())
    matches = charset_normalizer.from_bytes(sample[: 2**16], cp_isolation=_ENCODINGS.split())
    best = matches.best()
    if best is None or ("\0" in text and not best.encoding.startswith("utf_16")):
        kind = mimetypes.guess_type(path.name)[0] or "text/"  # of its name
        why = "its bytes are in no known encoding" if kind.startswith("text/") else kind
        raise UserError(f"'{path.name}' is not text ({why}); pass text, .jsonl, .csv or .parquet")
    western = [match for match in matches if "cp1252" in (match.encoding, *match.could_be_from_charset)]
    is_western = western and (western[0].chaos, -western[0].coherence) <= (best.chaos, -best.coherence)
    encoding = "cp1252" if is_western else best.encoding  # of equally likely ones the most common
    word = next((word for word in sample.decode(encoding, "ignore").split() if not word.isascii()), "")
    print(f"{path.name} is read as {encoding}, as in '{word[:40]}'; if that is wrong, pass --encoding")
    return encoding


# --- datasets --------------------------------------------------------------------------------------------------------


def open_dataset(name: str, config_name: str | None, column: Column, encoding: str | None, **options: Any) -> Source:
    """Open a dataset on the Hugging Face Hub, or one in a folder; UserError if there is none of this name.

    :param options: of `datasets.load_dataset`
    """
    full_name, folder = " ".join(filter(None, [name, config_name])), Path(name).resolve()
    try:
        if folder.is_dir():
            cache_dir = options["cache_dir"]
            splits = datasets.load_dataset_builder(name, config_name, cache_dir=cache_dir).config.data_files
        else:
            datasets.config.HF_HUB_OFFLINE |= is_silent()  # it would retry for 28 s
            splits = datasets.load_dataset(name, config_name, **options)
    except Exception as error:
        remedy = "go online, check the name and the configuration, or pass --train_file or --sample"
        if "scripts are no longer supported" in str(error):
            remedy = "pass --dataset_revision refs/convert/parquet, the Hub's copy of it, or another dataset"
        elif folder.is_dir():
            remedy = f"it needs .txt, .jsonl, .csv or .parquet files; pass others as --train_file '{name}/*'"
        is_wrapped = isinstance(error, datasets.exceptions.DatasetGenerationError)
        reason = first_line(error.__cause__ or error if is_wrapped else error)
        raise UserError(f"--dataset_name: '{full_name}' cannot be loaded: {reason}; {remedy}") from error
    if "train" not in splits:
        raise UserError(f"--dataset_name: '{full_name}' has no split 'train', but {', '.join(map(str, splits))}")
    used = {split: splits[split] for split in SPLITS if split in splits}
    if not folder.is_dir():
        parts = {split: [partial(_read_dataset, full_name, dataset, column)] for split, dataset in used.items()}
        chat = None if isinstance(column, str) else column
        return Source(full_name, parts, has_lines=used["train"].builder_name == "text", chat=chat)
    used = {split: [Path(file).resolve() for file in files] for split, files in used.items()}
    others = {path.resolve() for path in folder.rglob("*") if path.is_file()}.difference(*used.values())
    if others:
        names = sorted(str(path.relative_to(folder)) for path in others)
        print(f"{folder.name}: left out {', '.join(names[:5])}{f' and {len(names) - 5} more' * (len(names) > 5)}")
    return open_splits(folder.name, used, column, encoding)


def _read_dataset(name: str, dataset, column: Column) -> Iterator[str | None]:
    """Yield the texts, or conversations, of a `Dataset` or `IterableDataset`; UserError if the column has none."""
    with _explain(name):
        if column in (dataset.column_names or ()):
            dataset = dataset.select_columns(column)
        yield from _take(name, read_dataset(dataset), column)
