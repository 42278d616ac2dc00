"""Arrow files of a stranger: what they take in memory is bounded by their size."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pytest

from cotrain.data.loading import FREE_BATCHES, check_samples, open_samples
from cotrain.data.schemas import SCHEMAS

SCHEMA = SCHEMAS["clm"]
ROWS = pa.record_batch([pa.array([[1, 1]] * 100, field.type) for field in SCHEMA], schema=SCHEMA)
EMPTY = ROWS.slice(0, 0)


def write(path: Path, *batches: pa.RecordBatch, metadata: dict | None = None, **options: object) -> Path:
    with pa.ipc.new_stream(str(path), batches[0].schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for batch in batches:
            writer.write_batch(batch, custom_metadata=metadata)
    return path


def zeros(samples: int) -> pa.RecordBatch:
    """Return samples of 512 zeros, which compress to almost nothing."""
    ends = np.arange(samples + 1, dtype=np.int32) * 512
    values = [np.zeros(samples * 512, dtype=field.type.value_type.to_pandas_dtype()) for field in SCHEMA]
    return pa.record_batch([pa.ListArray.from_arrays(ends, pa.array(column)) for column in values], names=SCHEMA.names)


def write_dictionary(path: Path) -> Path:
    words = pa.array(["a" * 1000] * 100).dictionary_encode()
    return write(path, pa.record_batch([*ROWS.columns, words], names=[*SCHEMA.names, "words"]))


def write_columns(path: Path) -> Path:
    nothing = {f"x{number}": pa.nulls(100) for number in range(1000)}
    return write(path, pa.record_batch([*ROWS.columns, *nothing.values()], names=[*SCHEMA.names, *nothing]))


def write_runs(path: Path) -> Path:
    """A billion rows in a column of a few bytes."""
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([100], pa.int32()), pa.array([1], pa.int8()))
    return write(path, pa.record_batch([ROWS.column(0), runs], names=SCHEMA.names))


BOMBS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "zstd": (lambda path: write(path, ROWS, compression="zstd"), "compressed"),
    "lz4": (lambda path: write(path, ROWS, compression="lz4"), "compressed"),
    "one of many": (lambda path: write(path, ROWS, ROWS, EMPTY, compression="zstd"), "compressed"),
    "as Arrow 0.17 stated it": (
        lambda path: write(path, ROWS, metadata={"ARROW:experimental_compression": "zstd"}), "compressed"
    ),
    "empty batches": (lambda path: write(path, *[EMPTY] * (2 * FREE_BATCHES)), "batches"),
    "dictionary": (write_dictionary, "other columns"),
    "columns": (write_columns, "other columns"),
    "run-end encoded": (write_runs, "other types"),
    "large schema": (
        lambda path: write(path, ROWS.replace_schema_metadata({"x": "a" * 2**21})), "parts that"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_file_that_grows_in_memory_is_refused(name, tmp_path):
    make, reason = BOMBS[name]
    with pytest.raises(ValueError, match=reason):
        open_samples([make(tmp_path / "data.arrow")], "clm", 100)


def test_memory_is_bounded_by_the_size_of_the_file(tmp_path):
    """40 MB of zeros are 0.1 MB with compression; before, they were unpacked."""
    path = write(tmp_path / "data.arrow", zeros(16_384), compression="zstd")
    before = psutil.Process().memory_info().rss
    with pytest.raises(ValueError, match="compressed"):
        open_samples([path], "clm", 16_384)
    assert path.stat().st_size < 200_000
    assert psutil.Process().memory_info().rss - before < 20_000_000


def test_own_data_behind_a_link_is_read(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    write(tmp_path / "elsewhere/data.arrow", ROWS, EMPTY, zeros(3))
    (tmp_path / "data").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "link.arrow").symlink_to(tmp_path / "data/data.arrow")
    for path in (tmp_path / "data/data.arrow", tmp_path / "link.arrow"):
        table = open_samples([path], "clm", 103)
        check_samples(table, 512, 2)
        assert table.column("input_ids")[102].as_py() == [0] * 512
