"""Text files in any usual encoding, compressed or not."""

import contextlib
import io
import mimetypes
import zipfile
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

from cotrain.common.errors import UserError

READ_CHARS = 1_000_000  # read from a text file at a time
UTF8 = "utf-8-sig"  # with or without a byte order mark
# Without the code pages of DOS and Macs, which charset-normalizer finds in short texts of any language
_ENCODINGS = (
    "utf_16 utf_16_le utf_16_be cp1252 cp1250 cp1251 cp1253 cp1254 cp1255 cp1256 cp1257 cp1258 cp874 cp866 koi8_r "
    "koi8_u cp932 euc_jis_2004 gb18030 big5 cp949 iso8859_2 iso8859_5"
)


@contextlib.contextmanager
def explain(name: str) -> Iterator[None]:
    """Turn the errors of libraries that read `name` into a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of any kind: zlib's, pyarrow's, pandas', Unicode's, the system's
        reason = " ".join(str(error.__cause__ or error).split())[:200]
        raise UserError(
            f"'{name}' cannot be read ({reason}); repair it, leave it out, or pass its --encoding"
        ) from error


def _open(path: Path) -> io.BufferedReader:
    import fsspec

    compression = fsspec.utils.infer_compression(str(path))
    # Python's reader is wanted for .zst, whose own has no lines.
    return (
        io.BufferedReader(fsspec.open(str(path), compression=compression).open()) if compression else open(path, "rb")
    )


def read_lines(path: Path, encoding: str) -> Iterator[str]:
    """Yield the lines of a file. A line of more than READ_CHARS characters is split."""
    with explain(path.name), io.TextIOWrapper(_open(path), encoding) as file:
        yield from iter(partial(file.readline, READ_CHARS), "")


@cache
def find_encoding(path: Path) -> str:
    """Return UTF8, or the encoding that charset-normalizer finds and this prints; UserError if a file is not text."""
    if zipfile.is_zipfile(path) and len(zipfile.ZipFile(path).namelist()) > 1:
        raise UserError(f"'{path.name}' has several files; unpack it, and pass the folder")
    with explain(path.name), _open(path) as file:
        sample = b"".join(file.readlines(READ_CHARS))
    if not sample.strip():
        raise UserError(f"'{path.name}' has no text; pass a file that is not empty")
    text = sample.decode(errors="replace")
    # A damaged file is still UTF-8 if most characters of several bytes are right. Reading it names the damage.
    if "\0" not in text and sum(not char.isascii() for char in text) >= 2 * text.count("\ufffd"):
        return UTF8
    import charset_normalizer

    if "\0" not in text:
        sample = b"\n".join(line for line in sample.split(b"\n") if not line.isascii())
    matches = charset_normalizer.from_bytes(sample[: 2**16], cp_isolation=_ENCODINGS.split())
    best = matches.best()
    if best is None or ("\0" in text and not best.encoding.startswith("utf_16")):
        kind = mimetypes.guess_type(path.name)[0] or "its bytes are in no known encoding"
        raise UserError(f"'{path.name}' is not text ({kind}); pass text, .jsonl, .csv or .parquet")
    western = [match for match in matches if "cp1252" in (match.encoding, *match.could_be_from_charset)]
    is_western = western and (western[0].chaos, -western[0].coherence) <= (best.chaos, -best.coherence)
    encoding = "cp1252" if is_western else best.encoding  # of equally likely ones the most common
    word = next((word for word in sample.decode(encoding, "ignore").split() if not word.isascii()), "")
    print(f"{path.name} is read as {encoding}, as in '{word[:40]}'; if that is wrong, pass --encoding")
    return encoding
