"""JsonFile across restarts, and a JSON Lines file of less worth, such as a trainer's log of its rounds."""

import errno
import json
import os

import pytest

from cotrain.common import json_file
from cotrain.common.json_file import JsonFile, JsonLinesFile


def parse(content: dict) -> int:
    if content["number"] < 0:
        raise ValueError("it is negative")
    return content["number"] + 0


def test_what_was_saved_is_loaded(tmp_path):
    file = JsonFile(tmp_path / "state.json")
    assert file.load(parse) is None
    file.save({"number": 3})
    assert JsonFile(file.path).load(parse) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", "{}", '{"number": "x"}', '{"number": -1}', "\udcff", "[" * 10**5]
)
def test_a_file_that_cannot_be_used_is_set_aside(tmp_path, content, caplog):
    file = JsonFile(tmp_path / "state.json")
    file.path.write_text(content, encoding="utf-8", errors="surrogateescape")
    assert file.load(parse) is None and not file.path.exists()
    assert (tmp_path / "state.json.old").read_text(encoding="utf-8", errors="surrogateescape") == content
    assert len(caplog.records) == 1 and "state.json.old" in caplog.text
    file.save({"number": 3})
    assert file.load(parse) == 3


def test_a_full_disk_is_one_warning_and_the_old_content_stays(tmp_path, monkeypatch, caplog):
    def fail(_path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "x")

    file = JsonFile(tmp_path / "state.json")
    file.save({"number": 1})
    with monkeypatch.context() as patched:
        patched.setattr(json_file, "new_file", fail)
        file.save({"number": 2})
        file.save({"number": 3})
    assert len(caplog.records) == 1 and "No space left" in caplog.text and file.load(parse) == 1
    file.save({"number": 4})
    assert file.load(parse) == 4


def test_large_log_makes_room_and_one_that_cannot_be_written_is_ignored(tmp_path):
    path = tmp_path / "output" / "rounds.jsonl"
    file = JsonLinesFile(path, max_bytes=20)
    for step in (1, 2, 3):
        file.write({"step": step})
    lines = path.with_suffix(".jsonl.1").read_text(encoding="utf-8") + path.read_text(encoding="utf-8")
    assert [json.loads(line)["step"] for line in lines.splitlines()] == [1, 2, 3]
    path.unlink()
    path.mkdir()
    file.write({"step": 4})
