"""A JSON Lines file of less worth, such as a trainer's log of its rounds."""

import json

from cotrain.common.json_file import JsonLinesFile


def test_large_file_makes_room_and_one_that_cannot_be_written_is_ignored(tmp_path):
    path = tmp_path / "output" / "rounds.jsonl"
    file = JsonLinesFile(path, max_bytes=20)
    for step in (1, 2, 3):
        file.write({"step": step})
    lines = path.with_suffix(".jsonl.1").read_text(encoding="utf-8") + path.read_text(encoding="utf-8")
    assert [json.loads(line)["step"] for line in lines.splitlines()] == [1, 2, 3]
    path.unlink()
    path.mkdir()
    file.write({"step": 4})
