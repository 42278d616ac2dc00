# ruff: noqa: RUF001 letters of other scripts
"""Text as people have it: other encodings, compressed, with columns, in folders; and what is no text."""

import bz2
import gzip
import io
import json
import lzma
import os
import random
import tempfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from backports import zstd
from pyarrow import parquet

from cotrain.common.errors import UserError
from cotrain.preparation import sources
from cotrain.preparation.corpus import Source, open_corpus, read_corpus
from cotrain.preparation.sources import open_dataset, open_files

DOCUMENTS = ["A café, said “he”.\nIt costs 5 €.", "def f(x):\n    return x", "Three", "Four"]
TEXT = "\n\n".join(DOCUMENTS)
JSONL = "".join(json.dumps({"n": number, "text": text}) + "\n" for number, text in enumerate(DOCUMENTS))
CSV = "n,text\n" + "".join(f'{number},"{text}"\n' for number, text in enumerate(DOCUMENTS))

# As the Hub has it: with line breaks, and blank rows
WIKITEXT = ["", " = T = \n", "", " a b . \n", "", " = = S = = \n", "", " c . \n", "", " = U = \n", "", " d . \n"]


def to_zip(content: bytes, *names: str) -> bytes:
    with zipfile.ZipFile(buffer := io.BytesIO(), "w") as archive:
        for name in names:
            archive.writestr(name, content)
    return buffer.getvalue()


def to_parquet(columns: dict) -> bytes:
    parquet.write_table(pa.table(columns), buffer := io.BytesIO())
    return buffer.getvalue()


def read_source(source: Source, work: Path) -> list[str]:
    """Return the documents of a source, sorted."""
    text = Path(tempfile.mkdtemp(dir=work))
    read_corpus(source, text)
    corpus = open_corpus(source, text, 0.1, seed=0)
    return sorted(text for parts in corpus.values() for documents in parts for text in documents.read())


def read(
    folder: Path, name: str, column: str = "text", encoding: str | None = None, has_lines: bool = True
) -> list[str]:
    """Return the documents of a file, a wildcard or a folder, sorted; those of text end at blank lines."""
    work = folder.parent / f"{folder.name}.work"
    work.mkdir(exist_ok=True)
    if (folder / name).is_dir():
        source = open_dataset(str(folder / name), None, column, encoding, cache_dir=str(work))
    else:
        source = open_files(str(folder / name), work, column, encoding)
    return read_source(replace(source, has_files=source.has_files and not has_lines), work)


def write(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.txt", TEXT.encode()),
        ("t.txt", b"\xef\xbb\xbf" + TEXT.encode()),
        ("t", TEXT.replace("\n", "\r\n").encode()),
        ("t.txt.gz", gzip.compress(TEXT.encode())),
        ("t.txt.bz2", bz2.compress(TEXT.encode())),
        ("t.md.xz", lzma.compress(TEXT.encode())),
        ("t.txt.zst", zstd.compress(TEXT.encode())),
        ("t.zip", to_zip(TEXT.encode(), "t.txt")),
        ("t.zip", to_zip(TEXT.encode(), "t.txt", "__MACOSX/._t.txt", ".DS_Store")),
        ("t.jsonl", JSONL.encode()),
        ("t.json", json.dumps([{"text": text} for text in DOCUMENTS]).encode()),
        ("t.json", json.dumps({"text": {str(n): text for n, text in enumerate(DOCUMENTS)}}).encode()),
        ("t.json", json.dumps({"text": {str(n): text for n, text in enumerate(DOCUMENTS)}}, indent=1).encode()),
        ("t.jsonl.gz", gzip.compress(JSONL.encode())),
        ("t.jsonl.zst", zstd.compress(JSONL.encode())),
        ("t.jsonl.zst", b"".join(zstd.compress(line.encode()) for line in JSONL.splitlines(keepends=True))),
        ("t.csv", CSV.encode()),
        ("t.csv", b"\xef\xbb\xbf" + CSV.encode()),
        ("t.csv.gz", gzip.compress(CSV.encode())),
        ("t.tsv", CSV.replace(",", "\t", 1).replace(',"', '\t"').encode()),
        ("t.csv", CSV.replace(",", ";", 1).replace(',"', ';"').encode()),
        ("t.csv", b"\r\n" + CSV.replace(",", "\t", 1).replace(',"', '\t"').encode()),
        ("t.csv", b"sep=|\r\n" + CSV.replace(",", "|", 1).replace(',"', '|"').encode()),
        ("t.tsv", CSV.encode()),
        ("t.parquet", to_parquet({"n": [1, 2, 3, 4], "text": DOCUMENTS})),
        # Windows', and old Macs': their line ends were learnt, or separated nothing
        ("t.txt", TEXT.replace("\n", "\r\n").encode()),
        ("t.txt", TEXT.replace("\n", "\r").encode()),
        ("t.jsonl", JSONL.replace("\\n", "\\r\\n").encode()),
        ("t [1].txt", TEXT.encode()),
        # pandas' orient="split": rows of lists were conversations
        (
            "t.json",
            json.dumps(
                {
                    "columns": ["n", "text"],
                    "index": [0, 1, 2, 3],
                    "data": [[n, text] for n, text in enumerate(DOCUMENTS)],
                }
            ).encode(),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # gzip's bytes depend on the time
)
def test_each_kind_of_file(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert read(tmp_path, name) == sorted(DOCUMENTS)


@pytest.mark.parametrize(
    ("content", "documents", "printed"),
    [
        # As Spark, Hive and MySQL write it: the first quotation mark was lost, and a backslash was learnt
        (
            'n,text\n1,"She said \\"hello\\" to me."\n2,"\\"Ho\\""\n',
            ['"Ho"', 'She said "hello" to me.'], '\\" is read as a quotation mark',
        ),
        ('n,text\n1,"It is in C:\\"\n2,"say ""\\"""\n', ["It is in C:\\", 'say "\\"'], ""),
        # As pandas and datasets read it
        ("text,n,text\nOne,1,x\nTwo,2,y\n", ["One", "Two"], "of the columns of one name, 'text', the first is read"),
    ],
)  # fmt: skip
def test_csv_as_others_write_it(tmp_path, capsys, content, documents, printed):
    write(tmp_path, {"t.csv": content.encode()})
    assert read(tmp_path, "t.csv") == documents
    assert printed in capsys.readouterr().out or not printed


def test_a_changed_file_is_noticed_whatever_its_name(tmp_path):
    """One with brackets was taken for a pattern, and a preparation continued with its old text."""
    path = tmp_path / "text [1].txt"
    path.write_text("a")
    assert [name for name, *_ in sources.describe_files(str(path))] == [str(path)]


@pytest.mark.parametrize(
    ("text", "encoding", "found"),
    [
        (TEXT, "utf-16", "utf_16"),
        (TEXT, "utf-16-le", "utf_16_le"),
        (TEXT, "cp1252", "cp1252"),
        ("El niño está aquí.\n\nMañana será otro día.", "latin-1", "cp1252"),
        ("Grüße aus Köln.\n\nDas ist schön.", "cp1252", "cp1252"),
        ("Всеобщая декларация прав человека.\n\nВсе люди рождаются свободными и равными.", "koi8_r", "koi8_r"),
        ("すべての人間は、生れながらにして自由であり、\n\n尊厳と権利とについて平等である。", "shift_jis", "cp932"),
        ("人人生而自由，在尊严和权利上一律平等。\n\n他们赋有理性和良心。", "gb18030", "gb18030"),
        # As old mails, which are ASCII with escapes
        (
            "すべての人間は、生れながらにして自由であり、\n\n尊厳と権利とについて平等である。",
            "iso2022_jp",
            "iso2022_jp_2004",
        ),
        ("모든 인간은 태어날 때부터\n\n자유로우며 동등하다.", "iso2022_kr", "iso2022_kr"),
    ],
)
@pytest.mark.parametrize("name", ["t.txt", "t.csv", "t.txt.gz"])
def test_the_encoding_is_found_and_printed(tmp_path, capsys, text, encoding, found, name):
    content = text if name != "t.csv" else "text\n" + "".join(f'"{part}"\n' for part in text.split("\n\n"))
    content = content.encode(encoding)
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert read(tmp_path, name) == sorted(text.split("\n\n"))
    assert f"{name} is read as {found}" in capsys.readouterr().out
    assert read(tmp_path, name, encoding=encoding) == sorted(text.split("\n\n"))


def test_a_character_at_the_end_of_the_sample_is_whole(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sources, "READ_CHARS", 10)
    (tmp_path / "t.txt").write_bytes("123456789é\n\nTwo".encode())
    assert read(tmp_path, "t.txt") == ["123456789é", "Two"]
    assert "is read as" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("files", "name", "documents", "printed"),
    [
        ({"a.txt": b"One.", "b.txt": b"Two.\n\nThree."}, "", ["One.", "Two.", "Three."], "at the end of a file"),
        ({"a.txt": b"One.", "b.txt": b"Two.\n\nThree.", "c": b"4"}, "*.txt", ["One.", "Two.", "Three."], "blank"),
        ({"train.jsonl": b'{"text": "One."}\n{"text": "Two."}\n'}, "", ["One.", "Two."], "one in each row"),
        (
            {"a.jsonl": b'{"text": "One.", "n": 1}', "b.jsonl": b'{"text": "Two.", "x": "y"}\n{"text": "Three."}'},
            "*.jsonl", ["One.", "Two.", "Three."], "one in each row",
        ),
        (
            {"t.jsonl": b'{"text": "One."}\n{"text": null}\n{"text": ""}\n{"text": "Two."}\n{"n": 3}\n'},
            "t.jsonl", ["One.", "Two."], "2 null rows skipped; 1 blank rows skipped",
        ),
        (
            {"train.txt": b"\xef\xbb\xbf = T = \n \n a b .\n \n c d .\n \n = U = \n \n e .\n"},
            "", ["= T =\na b .\nc d .", "= U =\ne ."], "from each title to the next",
        ),
        (
            {"train.txt": b"One.\n\nTwo.", "test.txt": b"3", "README.md": b"#", ".x": b"x", "sub/more.txt": b"x"},
            "", ["One.", "Two."], "left out .x, README.md, sub/more.txt, test.txt",
        ),
        ({"train.txt": b"One.", "validation.txt": "zwölf".encode("cp1252")}, "", ["One.", "zwölf"], "as cp1252"),
        ({"t.parquet": to_parquet({"body": ["One.", "Two."]})}, "t.parquet:body", ["One.", "Two."], ""),
        (
            {"t.parquet": to_parquet({"text": WIKITEXT})},
            "t.parquet", ["= T =\na b .\n= = S = =\nc .", "= U =\nd ."], "from each title to the next",
        ),
    ],
)  # fmt: skip
def test_documents_and_what_is_left_out(tmp_path, capsys, files, name, documents, printed):
    write(tmp_path, files)
    name, _, column = name.partition(":")
    assert read(tmp_path, name, column or "text") == sorted(documents)
    assert printed in capsys.readouterr().out


@pytest.mark.parametrize(("has_lines", "documents"), [(True, ["a\nb", "c"]), (False, ["a", "b", "c"])])
def test_what_a_row_is_can_be_said(tmp_path, has_lines, documents):
    """--row_is document, for a text file with a document in each line."""
    write(tmp_path, {"t.txt": b"a\nb\n\nc"})
    source = open_files(str(tmp_path / "t.txt"), tmp_path, "text", None)
    source = replace(source, has_lines=has_lines, has_files=False)
    assert read_source(source, tmp_path) == documents


def test_a_pipe_is_read_once(tmp_path):
    reader, writer = os.pipe()
    os.write(writer, TEXT.encode())
    os.close(writer)
    source = replace(open_files(f"/dev/fd/{reader}", tmp_path, "text", None), has_files=False)
    assert read_source(source, tmp_path) == sorted(DOCUMENTS)
    os.close(reader)


PAGE = b"<!DOCTYPE html>\n<html><head>\n<title>Virus scan\nwarning</title></head><body>Sign in.</body></html>\n"
S3_ERROR = b'<?xml version="1.0"?>\n<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>'


@pytest.mark.parametrize(
    ("files", "name", "message"),
    [
        ({"t.txt": b""}, "t.txt", r"'t\.txt' has no text"),
        ({"t.jsonl": b""}, "t.jsonl", r"'t\.jsonl' has no text"),
        ({"t.txt": b"\x89PNG\r\n\x1a\n\0\0\0" + bytes(range(256))}, "t.txt", r"'t\.txt' is not text \(its bytes"),
        ({"t.png": b"\x89PNG\r\n\x1a\n\0\0\0" + bytes(range(256))}, "t.png", r"'t\.png' is not text \(image/png\)"),
        ({"a/t.jpg": b"\xff\xd8\xff\xe0\0" + bytes(range(256))}, "a", r"'t\.jpg' is not text \(image/jpeg\)"),
        ({"t.txt": "Всё. ".encode() * 40 + b"\xff" + "Всё. ".encode()}, "t.txt", "byte 0xff is not utf-8"),
        ({"t.txt.gz": gzip.compress(TEXT.encode())[:50]}, "t.txt.gz", r"'t\.txt\.gz' .* \(it is cut off, .*copy it"),
        # Of a text of several blocks, the first half was taken for all
        ({"t.zst": zstd.compress(random.Random(0).randbytes(10**6).hex().encode())[:-9]}, "t.zst", "it is cut off"),
        *(({f"t.txt.{suffix}": TEXT.encode()}, f"t.txt.{suffix}", "of another kind than its name says")
          for suffix in ("gz", "bz2", "xz", "zst")),
        ({"t.jsonl": to_parquet({"text": ["a"]})}, "t.jsonl", r"is a Parquet file: let its name end in .parquet"),
        ({"t.parquet": b"PAR1"}, "t.parquet", r"'t\.parquet' .* of another kind than its name says\); copy it again"),
        ({"t.json": b'[{"text": "a"},\n {"text" "b"}]'}, "t.json", r"\(line 2 is not valid JSON\); repair"),
        ({"t.zip": to_zip(b"x", "a.txt", "b.txt")}, "t.zip", r"has several files; unpack it"),
        ({"a.txt": b"x", "b.jsonl": JSONL.encode()}, "*", r"files of several kinds"),
        ({"a/x.py": b"x = 1"}, "a", r"--dataset_name: .*a' cannot be loaded: No .*--train_file '.*a/\*'"),
        ({"a/.x": b""}, "a", r"--dataset_name: .*cannot be loaded: .*it needs \.txt, \.jsonl"),
        ({"a/test.txt": b"x"}, "a", r"'.*a' has no split 'train', but test"),
        ({"t.jsonl": JSONL.encode() + b'{"text": "open'}, "t.jsonl", r"'t\.jsonl' cannot be read .*in row 5"),
        ({"a.jsonl": JSONL.encode(), "b.jsonl": b"{"}, "*.jsonl", r"'b\.jsonl' cannot be read"),
        ({"t.jsonl": b'{"text": 1}\n{"text": 2}\n'}, "t.jsonl", r"--text_column: 'text' of 't\.jsonl' .* type int"),
        ({"t.jsonl": b'{"text": ["a", "b"]}\n'}, "t.jsonl", r"--text_column: 'text' of 't\.jsonl' .* type list"),
        ({"t.jsonl": b'{"body": "a"}\n'}, "t.jsonl", r"--text_column: 't\.jsonl' has no column 'text', but body"),
        ({"t.csv": b"a,b\n1,2\n"}, "t.csv", r"--text_column: 't\.csv' has no column 'text', but a, b"),
        ({"t.parquet": to_parquet({"text": [b"a"]})}, "t.parquet", r"--text_column: .* type bytes"),
        ({"t.parquet": b"version https://git-lfs.github.com/spec/v1\n"}, "t.parquet", "git lfs pull"),
        ({"t.txt": b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n"}, "t.txt", "git lfs pull"),
        ({"t.txt": PAGE}, "t.txt", r"'t\.txt' is a web page \('Virus scan warning'\): open it .*download .*again"),
        ({"t.tokens": b"\xef\xbb\xbf\r\n " + PAGE.upper()}, "t.tokens", r"'t\.tokens' is a web page \('VIRUS"),
        ({"t.jsonl": b"<html lang=de>\n</html>"}, "t.jsonl", r"'t\.jsonl' is a web page: open it"),
        ({"t.csv": PAGE}, "t.csv", r"'t\.csv' is a web page .*let its name end in \.html"),
        ({"t.txt.gz": PAGE}, "t.txt.gz", r"'t\.txt\.gz' is a web page"),
        ({"t.parquet": PAGE}, "t.parquet", r"'t\.parquet' is a web page"),
        ({"t.txt": S3_ERROR}, "t.txt", r"'t\.txt' is an error of a web server \('Access Denied'\): open it"),
        ({"t.jsonl": b'{"error": "Repository not found"}'}, "t.jsonl", r"'t\.jsonl' is an error of a web server"),
        ({"t.txt": b"404: Not Found"}, "t.txt", r"'t\.txt' is an error of a web server"),
        ({"t.txt": b"Invalid username or password."}, "t.txt", r"'t\.txt' is an error of a web server"),
        ({"t.txt.crdownload": b"A text."}, "t.*", r"'t\.txt\.crdownload' is the part of a download: wait .*rename it"),
        ({"t.csv": b"text\nonly one\n"}, "t.csv", r"is a single document.*: pass a text of several rows"),
    ],
)  # fmt: skip
def test_what_is_no_text_is_named(tmp_path, files, name, message):
    write(tmp_path, files)
    with pytest.raises(UserError, match=message) as error:
        read(tmp_path, name)
    assert "\n" not in str(error.value)


def test_a_page_that_is_meant_is_read(tmp_path):
    files = {"a.html": PAGE, "b.HTM": b"<html>", "c.txt": b"An <html>, and not found.", "d.txt": b'{"error": 1}\n' * 2}
    write(tmp_path, files)
    assert read(tmp_path, "*", has_lines=False) == sorted(text.decode() for text in files.values())


# --- a file is a document --------------------------------------------------------------------------------------------

CODE = "import os\n\n\ndef f(x):\n\treturn x  \n"
NOVEL = "CHAPTER I\n\n\n" + "It was a dark night.  \n   The rain fell.\n\n" * 20


def test_a_file_is_a_document_as_it_is(tmp_path, capsys):
    files = {"a.py": CODE, "b.py": "\n\nx = 1", "c.md": NOVEL, "__init__.py": "", "d.py": ""}
    write(tmp_path, {name: text.encode() for name, text in files.items()})
    assert read(tmp_path, "*", has_lines=False) == sorted([CODE, "\n\nx = 1", NOVEL])
    out = capsys.readouterr().out
    assert "*: 3 files: a.py, b.py, c.md\n" in out
    assert "3 documents of train text, one in each file; if blank lines" in out and "--row_is line" in out
    assert "2 empty files are left out" in out


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_of_a_single_document_the_end_or_the_beginning_is_held_out(tmp_path, seed, end):
    text = NOVEL.replace("\n", end)
    write(tmp_path, {"novel.txt": text.encode()})
    source = open_files(str(tmp_path / "novel.txt"), tmp_path, "text", None)
    (tmp_path / "out").mkdir()
    read_corpus(source, tmp_path / "out")
    corpus = open_corpus(source, tmp_path / "out", 0.1, seed)
    (train,), (held_out,) = (next(iter(corpus[split])).read() for split in ("train", "validation"))
    assert NOVEL in (train + held_out, held_out + train) and 0.08 < len(held_out) / len(NOVEL) < 0.15


@pytest.mark.parametrize("name", ["**/*.py", ""])
def test_the_first_files_are_printed(tmp_path, capsys, name):
    suffix = name[-3:] or ".txt"
    write(tmp_path, {f"src/{part}/__init__{suffix}": b"x" for part in "abcd"})
    read(tmp_path / "src", name)
    init = f"__init__{suffix}"
    assert f": 4 files: a/{init}, b/{init}, c/{init}, …\n" in capsys.readouterr().out


def test_a_long_file_is_divided_at_line_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("cotrain.preparation.corpus.MAX_DOCUMENT_CHARS", 100)
    write(tmp_path, {"novel.txt": NOVEL.encode(), "x.txt": b"x" * 250})
    documents = read(tmp_path, "*.txt", has_lines=False)
    assert max(map(len, documents)) == 100 and sum(map(len, documents)) == len(NOVEL) + 250
    assert all(text.endswith("\n") or "x" in text for text in documents)


def test_a_corpus_with_titles_is_read_from_title_to_title(tmp_path, capsys):
    write(tmp_path, {"wiki.txt": b" = T = \n \n a b .\n \n c d .\n \n = U = \n \n e .\n"})
    assert read(tmp_path, "wiki.txt", has_lines=False) == ["= T =\na b .\nc d .", "= U =\ne ."]
    assert "2 documents of train text, one from each title to the next" in capsys.readouterr().out


# --- CSV and JSON as they are ----------------------------------------------------------------------------------------

WORDS = ["NA", "null", "None", "nan", "N/A", "NULL", "true", "007", "1e5", "2020-01-01", 'a "b" c', "two\nlines"]


def test_words_of_a_csv_stay(tmp_path):
    write(tmp_path, {"t.csv": ("text\n" + "".join(f'"{x.replace(chr(34), chr(34) * 2)}"\n' for x in WORDS)).encode()})
    assert read(tmp_path, "t.csv") == sorted(WORDS)


def test_the_separator_is_printed_if_it_is_not_the_usual_one(tmp_path, capsys):
    write(tmp_path, {"a.csv": b"id;text, whole;x\n1;One, two;3,5\n2;b;4\n", "b.csv": b"text\na;b\nc;d\n"})
    assert read(tmp_path, "a.csv", "text, whole") == ["One, two", "b"]
    assert "a.csv: columns are separated by ';', as in id;text, whole;x" in capsys.readouterr().out
    assert read(tmp_path, "b.csv") == ["a;b", "c;d"] and "separated" not in capsys.readouterr().out


def test_a_quotation_mark_that_is_not_closed_is_named(tmp_path, capsys):
    rows = [f"row {number}" for number in range(1, 1001)]
    rows[9], rows[989] = '"oops, no end', 'the end"'
    write(tmp_path, {"t.csv": ("text\n" + "\n".join(rows)).encode(), "u.csv": b'text\na\n\n"b\nc"\n'})
    assert len(read(tmp_path, "t.csv")) == 20
    assert "Warning: t.csv: row 10 has 981 lines. If that is wrong, a quotation mark" in capsys.readouterr().out
    assert read(tmp_path, "u.csv") == ["a", "b\nc"] and "Warning" not in capsys.readouterr().out


@pytest.mark.parametrize("indent", [None, 2])
def test_half_of_an_emoji_is_replaced(tmp_path, indent):
    """Scraped chats are cut in the middle of one. A whole one, in two escapes, stays."""
    rows = [{"text": "cut \ud83d"}, {"text": "\udc00 cut"}, {"text": "whole \U0001f600"}]
    write(tmp_path, {"t.jsonl": "\n".join(json.dumps(row, indent=indent) for row in rows).encode()})
    assert read(tmp_path, "t.jsonl") == ["cut \ufffd", "whole \U0001f600", "\ufffd cut"]


@pytest.mark.parametrize(
    "content",
    [
        "\n\n" + JSONL,
        "\n" + json.dumps([{"text": text} for text in DOCUMENTS]),
        json.dumps({"version": 1, "data": [{"text": text} for text in DOCUMENTS]}),
        json.dumps({"data": [{"text": text} for text in DOCUMENTS]}, indent=1),
        "\n".join(json.dumps({"text": text}, indent=2) for text in DOCUMENTS),
        "[\n" + ",\n".join(json.dumps({"text": text}) for text in DOCUMENTS) + "\n]\n",
        '{"data": [\n' + ",\n".join(json.dumps({"text": text}) for text in DOCUMENTS) + "\n]}",
    ],
)
@pytest.mark.parametrize("name", ["t.json", "t.jsonl", "t.jsonl.zst"])
def test_layouts_of_json(tmp_path, name, content):
    data = content.encode()
    write(tmp_path, {name: zstd.compress(data) if name.endswith("zst") else data})
    assert read(tmp_path, name) == sorted(DOCUMENTS)
