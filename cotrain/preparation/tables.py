"""Rows of files with columns, as they are: JSON in each of its layouts, CSV, and tables of `datasets`."""

import csv
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any, TextIO

from cotrain.preparation.chat_shapes import drop_nulls

ROW_LINES = 20  # in a row of CSV of more lines a quotation mark may not be closed
# As Spark, Hive and MySQL write a quotation mark: "" is usual, and \" ends a text which ends with a backslash
_ESCAPED = re.compile(r'(?<!\\)\\"(?![",;\t|\s])')


def read_json(file: TextIO) -> Iterator[Any]:
    """Yield the rows of lines of JSON, a list, {"data": [...]}, pandas' columns, or objects of several lines each.

    Of lines of JSON, one that is none is yielded as text, and so are the lines of a file that has no JSON.
    """
    first, heads = [], []
    while len(heads) < 2 and (line := file.readline()):
        first.append(line)
        heads += [line] if line.strip() else []
    values = list(map(_parse_line, heads))
    are_lists = len(heads) == 2 and all(isinstance(value, list) for value in values)
    are_lines = are_lists or any(isinstance(x, dict) and _rows_of(x) == [x] for x in values)
    is_prose = bool(heads) and heads[0].lstrip()[0] not in "{["
    if is_prose or (are_lines and not heads[0].rstrip().endswith(("{", "[", ","))):  # of several lines the first
        yield from map(_parse_line, itertools.chain(first, file))
        return
    text, position, decoder = "".join(first) + file.read(), 0, json.JSONDecoder()
    while position < len(text):
        if text[position].isspace():
            position += 1
            continue
        value, position = decoder.raw_decode(text, position)
        yield from _rows_of(value)


def _rows_of(value: Any) -> list:
    """Return the rows in a list, in {"data": [...]}, or in {column: {"0": …, "1": …}} of pandas; else the value."""
    if isinstance(value, dict) and value and all(isinstance(x, dict) and "0" in x for x in value.values()):
        return [{name: x.get(row) for name, x in value.items()} for row in next(iter(value.values()))]
    rows = value.get("data") if isinstance(value, dict) else value
    columns = value.get("columns") if isinstance(value, dict) else None
    if isinstance(columns, list) and isinstance(rows, list):  # orient="split"
        return [dict(zip(columns, row, strict=True)) for row in rows]
    return rows if isinstance(rows, list) and not any(isinstance(row, str) for row in rows) else [value]


def _parse_line(line: str) -> Any:
    """Return the value of a line of JSON, or the line if it is none."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return line


def read_csv(name: str, file: TextIO, separator: str) -> Iterator[dict]:
    """Yield the rows of CSV as texts; pandas makes NA null, and 007 7. Values beyond the columns are those of None.

    :param separator: usual one. Another that divides the header into more columns is taken instead, and printed
    """
    csv.field_size_limit(2**31 - 1)
    is_escaped = any(map(_ESCAPED.search, file))
    file.seek(0)
    rest = (re.sub(r'(?<!\\)\\"', '""', line) for line in file) if is_escaped else iter(file)
    if is_escaped:
        print(f'{name}: \\" is read as a quotation mark')
    lines = filter(str.strip, rest)
    head = next(lines, "")
    if head[:4].lower() == "sep=" and len(head.rstrip("\r\n")) == 5:  # a line for Excel
        separator, head = head[4], next(lines, "")
    found = max(separator, *",;\t|", key=lambda x: len(next(csv.reader([head], delimiter=x), "")))
    if found != separator:
        print(f"{name}: columns are separated by {found!r}, as in {head.strip():.60}")
    reader = csv.reader(itertools.chain([head], rest), delimiter=found)
    header, before, longest = next(reader, []), reader.line_num, (0, 0)
    places: dict[str, int] = {}
    for number, column in enumerate(header):
        places.setdefault(column, number)
    if twice := [column for number, column in enumerate(header) if column and places[column] < number]:
        print(f"Warning: {name}: of the columns of one name, '{twice[0]}', the first is read")
    for number, row in enumerate(filter(None, reader), 1):
        longest, before = max(longest, (reader.line_num - before, -number)), reader.line_num
        values = {column: row[place] for column, place in places.items() if place < len(row)}
        yield values | ({None: row[len(header) :]} if any(row[len(header) :]) else {})
    if longest[0] > ROW_LINES:
        what = f"row {-longest[1]} has {longest[0]} lines"
        print(f"Warning: {name}: {what}. If that is wrong, a quotation mark in it is not closed")


def read_dataset(dataset: Any) -> Iterator[dict]:
    """Yield the rows of a `Dataset` or `IterableDataset`."""
    for batch in dataset.iter(batch_size=1000):
        yield from (drop_nulls(dict(zip(batch, row, strict=True))) for row in zip(*batch.values(), strict=True))
