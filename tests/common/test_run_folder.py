"""Output folders that were those of another run."""

import json
from pathlib import Path

import pytest

from cotrain.common.errors import UserError
from cotrain.common.run_folder import claim_folder, find_checkpoint, find_run


def write(folder: Path, run_id: str, *steps: int) -> None:
    """Write what a monitor and a trainer of a run leave."""
    for name in ("metrics.jsonl", "evaluations.jsonl", "rounds.jsonl", "wandb_run_id"):
        (folder / name).write_text(run_id, encoding="utf-8")
    for name in ("contributors.json", *(f"checkpoint-{step}/collaboration.json" for step in steps)):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps({"run_id": run_id}), encoding="utf-8")


def read(folder: Path) -> dict[str, str]:
    """Return the names of the files in a folder, with the run that wrote them."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    texts = {str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in files}
    return {name: json.loads(text)["run_id"] if name.endswith(".json") else text for name, text in texts.items()}


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "outputs"


def begin(folder: Path, run_id: str, *steps: int) -> None:
    folder.mkdir(exist_ok=True)
    claim_folder(folder, run_id)
    write(folder, run_id, *steps)


def test_each_run_continues_with_its_own_files(folder, caplog):
    caplog.set_level("INFO")
    begin(folder, "first", 600, 700)
    (folder / "identity.key").write_text("the peer's", encoding="utf-8")
    first = read(folder)
    assert caplog.messages == [] and set(first.values()) == {"first", "the peer's"}
    claim_folder(folder, "first")
    assert read(folder) == first, "a restart"
    begin(folder, "a/b c", 10, 600)
    (warning,) = caplog.messages
    assert f"'{folder}' was that of run 'first'" in warning and "other-runs/first" in warning
    assert {name for name, run in read(folder).items() if run == "first"} == {
        f"other-runs/first/{name}" for name in first if name not in ("run.json", "identity.key")
    }
    assert find_run(folder) == "a/b c" and (folder / "identity.key").exists()
    second = read(folder)
    claim_folder(folder, "first")
    assert {name: run for name, run in read(folder).items() if not name.startswith("other-runs")} == first
    claim_folder(folder, "a/b c")
    assert read(folder) == second


@pytest.mark.parametrize("left", ["contributors.json", "checkpoint-20/collaboration.json"])
def test_folder_of_an_earlier_version_says_whose_it_is(folder, caplog, left):
    folder.mkdir()
    write(folder, "first", 20)
    for path in folder.rglob("*.json"):
        if str(path.relative_to(folder)) != left:
            path.unlink()
    claim_folder(folder, "second")
    assert {path.name for path in folder.iterdir()} == {"other-runs", "run.json"} and len(caplog.messages) == 1


@pytest.mark.parametrize("run_id", ["日" * 100, "é" * 100, "x" * 100, "../x"])
def test_run_of_any_name_has_a_folder(folder, run_id):
    begin(folder, run_id, 20)
    begin(folder, "second", 10)
    begin(folder, run_id)
    assert (folder / "checkpoint-20").is_dir() and (folder / "metrics.jsonl").read_text(encoding="utf-8") == run_id


def test_files_of_the_user_stay(folder):
    begin(folder, "first", 20)
    (folder / "train.jsonl").touch()
    (folder / "checkpoint-best").symlink_to("checkpoint-20")
    claim_folder(folder, "second")
    assert (folder / "train.jsonl").exists() and (folder / "checkpoint-best").is_symlink()


def test_files_of_nobody_are_used(folder):
    (folder / "checkpoint-20").mkdir(parents=True)
    (folder / "metrics.jsonl").touch()
    claim_folder(folder, "second")
    assert {path.name for path in folder.iterdir()} == {"checkpoint-20", "metrics.jsonl", "run.json"}


def test_interrupted_move_is_completed_and_nothing_is_replaced(folder):
    begin(folder, "first", 600)
    (folder / "other-runs" / "first").mkdir(parents=True)
    (folder / "other-runs" / "first" / "metrics.jsonl").write_text("earlier", encoding="utf-8")
    (folder / "run.json").write_text("no JSON", encoding="utf-8")  # contributors.json says it, too
    claim_folder(folder, "second")
    claim_folder(folder, "first")
    assert (folder / "metrics.jsonl").read_text(encoding="utf-8") == "first"
    assert [path.read_text(encoding="utf-8") for path in folder.rglob("metrics.jsonl.*")] == ["earlier"]


def test_trainer_that_starts_hides_no_run(tmp_path):
    """Its status has no run yet; the checkpoint beside it has."""
    write(tmp_path, "first", 20)
    (tmp_path / "status.json").write_text('{"run_id": ""}', encoding="utf-8")
    assert find_run(tmp_path) == "first"


# The least files that open: a name, and its content
MODEL = {"config.json": b"{}", "tokenizer_config.json": b"{}", "model.safetensors": b"\2" + bytes(7) + b"{}"}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("model.safetensors", b"", "model.safetensors' is damaged or incomplete"),
        ("model.safetensors", b"\2" + bytes(6), "model.safetensors' is damaged or incomplete"),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid", "a pointer of Git LFS: run git lfs"),
        ("config.json", b"", "config.json' is damaged or incomplete"),
        ("tokenizer_config.json", b"{", "tokenizer_config.json' is damaged or incomplete"),
        ("config.json", None, "there is no complete checkpoint in "),
        (
            "model.safetensors",
            PermissionError(13, "Permission denied"),
            "model.safetensors' cannot be read (Permission",
        ),
    ],
)
def test_a_damaged_checkpoint_is_named_and_an_older_one_taken(folder, capsys, monkeypatch, name, content, words):
    """generate.py and export_model.py ended with safetensors' words about the newest one."""
    for path, file in ((step, file) for step in ("checkpoint-8", "checkpoint-9") for file in MODEL):
        (folder / path).mkdir(parents=True, exist_ok=True)
        (folder / path / file).write_bytes(MODEL[file])
    assert find_checkpoint(folder) == folder / "checkpoint-9" and capsys.readouterr().err == ""
    damaged, opened = folder / "checkpoint-9" / name, Path.open

    def open_file(path: Path, *args, **kwargs):
        if path == damaged:
            raise content
        return opened(path, *args, **kwargs)

    if content is None:
        damaged.unlink()
    elif isinstance(content, bytes):
        damaged.write_bytes(content)
    else:
        monkeypatch.setattr(Path, "open", open_file)
    assert find_checkpoint(folder) == folder / "checkpoint-8"
    error = capsys.readouterr().err
    assert words in error and str(damaged.parent) in error and f"taking the older '{folder / 'checkpoint-8'}'" in error
    (folder / "checkpoint-8" / "config.json").write_bytes(b"")
    with pytest.raises(UserError, match="^CHECKPOINT: .*checkpoint-9.*; pass a folder with config.json"):
        find_checkpoint(folder)
