"""What is wrong with folders and files is said before the slow imports, by each script that reads them."""

import json
import sys

import pytest

import export_model
from cotrain.admission.invitations import load_identity
from cotrain.common.errors import UserError, first_line
from cotrain.common.flags import ArgumentsError
from cotrain.common.json_file import JsonFile
from cotrain.data.manifest import Manifest
from cotrain.models.config import read_fields
from cotrain.options import PeerOptions
from run_training_monitor import RunArguments
from tokenize_wikitext103 import TokenizationArguments

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"


def write_base(folder, name="config.json", content=b"{}"):
    """Write the least model that opens, with another content of one file."""
    folder.mkdir()
    for file, sound in {"config.json": b"{}", "model.safetensors": b"\2" + bytes(7) + b"{}", name: content}.items():
        (folder / file).write_bytes(sound)
    return str(folder)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("model.safetensors", POINTER, "model.safetensors' is a pointer of Git LFS: run git lfs pull"),
        ("model.safetensors", b"\2" + bytes(6), "model.safetensors' is damaged or incomplete"),
        ("config.json", POINTER, "config.json' is a pointer of Git LFS"),
        ("config.json", b"{", "config.json' is damaged or incomplete"),
        ("adapter_config.json", b"{}", "base' has adapters: merge them"),
    ],
)
def test_a_bad_base_is_refused_by_monitor_and_preparation(tmp_path, name, content, words):
    """A monitor, which trains nothing, started with it, and the preparation packed it for all trainers."""
    base = write_base(tmp_path / "base", name, content)
    with pytest.raises(ArgumentsError, match=f"^--model_name_or_path: .*{words}"):
        RunArguments(lora_rank=4, model_name_or_path=base)
    with pytest.raises(ArgumentsError, match=f"^--base: .*{words}"):
        TokenizationArguments(train_tokenizer=True, archive="a.tar.gz", base=base)


def test_a_monitor_needs_no_weights(tmp_path):
    base = write_base(tmp_path / "base")
    (tmp_path / "base/model.safetensors").unlink()
    assert RunArguments(lora_rank=4, model_name_or_path=base).from_pretrained


def test_export_names_a_taken_folder_before_it_imports(tmp_path, monkeypatch):
    """It took five CPU seconds."""

    def fail():
        pytest.fail("slow imports")

    write_base(tmp_path / "model", "tokenizer_config.json")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/mine.txt").touch()
    monkeypatch.setattr(export_model, "announce_imports", fail)
    monkeypatch.setattr(sys, "argv", ["export_model.py", str(tmp_path / "model"), str(tmp_path / "taken")])
    with pytest.raises(UserError, match=r"^OUT: the folder '.*taken' contains other files"):
        export_model.main()


def test_damaged_json_is_named_by_its_line():
    """It said "Expecting ',' delimiter: line 2 column 9 (char 9)"."""
    with pytest.raises(ValueError, match="Expecting") as caught:
        json.loads('{"a":\n "b" "c"}')
    assert first_line(caught.value) == "line 2 is not valid JSON"


def test_a_key_that_the_peer_wrote_is_taken(tmp_path):
    load_identity(path := tmp_path / "identity.key")
    assert PeerOptions(identity_path=str(path)).identity_path == str(path)


@pytest.mark.parametrize(
    ("name", "words"), [("model.safetensors", "git lfs pull$"), ("config.json", "copy the model")]
)
def test_one_remedy_is_named(tmp_path, name, words):
    """It said "run git lfs pull; copy the model again"."""
    base = write_base(tmp_path / "base", name, POINTER if "lfs" in words else b"{")
    with pytest.raises(ArgumentsError, match=words):
        RunArguments(lora_rank=4, model_name_or_path=base)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({}, "'format_version' is missing"),
        ({"format_version": 1}, "missing or unexpected: 'source', .*'splits'"),
        ([], "missing or unexpected: "),
    ],
)
def test_content_of_another_kind_is_named_without_the_words_of_python(tmp_path, caplog, content, words):
    """It was "'format_version'", and "Manifest.__init__() missing 10 required positional arguments"."""
    (tmp_path / "manifest.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(UserError, match=rf"manifest.json' cannot be read \({words}\)"):
        Manifest.load(tmp_path)
    JsonFile(tmp_path / "manifest.json").load(lambda found: Manifest(**found, source=found["format_version"]))
    words = words if "format_version" in words else "a value is missing, or of another type"
    assert f"renamed to manifest.json.old: {words}" in caplog.text


def test_a_folder_without_a_configuration_is_named(tmp_path):
    """It said "('model_type')"."""
    with pytest.raises(UserError, match=r"no model configuration at '.*' \(it has no config.json\); pass a "):
        read_fields(str(tmp_path))
