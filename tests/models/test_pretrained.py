"""Pretrained weights that a run has chosen: no file of them names another file, and their size is known before."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

from arguments import DatasetArguments
from cotrain.common.errors import UserError
from cotrain.models import hub
from cotrain.models.model import load_config, read_config
from cotrain.models.pretrained import load_pretrained
from cotrain.options import Adopted

CONFIG = {
    "model_type": "gpt2", "vocab_size": 64, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
SECRET = 0.4242
CHOSEN = Adopted(frozenset({"model_name_or_path"}))


@pytest.fixture
def private(tmp_path, monkeypatch) -> Path:
    """The folder of a volunteer's own model, outside the data of the run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "private"
    save_model(folder, SECRET)
    return folder


def save_model(folder: Path, value: float, **options) -> Path:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**CONFIG))
    model.transformer.wte.weight.data.fill_(value)
    model.save_pretrained(folder, **options)
    return folder


def load(name: str, **flags) -> GPT2LMHeadModel:
    args = DatasetArguments(model_name_or_path=name, from_pretrained=True, **flags)
    config = read_config(name if Path(name).is_dir() else json.dumps(CONFIG))
    config.architectures = ["GPT2LMHeadModel"]
    return load_pretrained(config, args, CHOSEN)


def write_adapters(folder: Path, base: str) -> None:
    adapters = {
        "peft_type": "LORA", "r": 1, "target_modules": ["c_attn"], "fan_in_fan_out": True, "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(adapters), encoding="utf-8")
    layer = "base_model.model.transformer.h.0.attn.c_attn"
    parts = {f"{layer}.lora_A.weight": torch.zeros(1, 16), f"{layer}.lora_B.weight": torch.zeros(48, 1)}
    save_file(parts, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def cache(folder: Path) -> Path:
    """Make the folder of a repository me/model in a cache of the Hub."""
    repository = folder / "cache/models--me--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("a" * 40, encoding="utf-8")
    return repository / "snapshots" / ("a" * 40)


@pytest.mark.parametrize("where", ["{private}/model.safetensors", "../../private/model.safetensors", ".."])
def test_index_names_no_file_elsewhere(private, where):
    folder = Path("data/model")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    index = {"weight_map": {"transformer.wte.weight": where.format(private=private)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(
        UserError, match="no weights that fit at 'data/model'|' is damaged, or no index of files"
    ) as error:
        load("data/model")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("has_weights", [False, True])
@pytest.mark.parametrize("base", ["{private}", "private", "another/repository"])
@pytest.mark.parametrize("is_archive", [False, True])
def test_adapters_lead_to_no_base(private, tmp_path, base, has_weights, is_archive):
    folder = Path("data/model") if is_archive else cache(tmp_path)
    save_model(folder, 0.0)
    if not has_weights:
        (folder / "model.safetensors").unlink()
    write_adapters(folder, base.format(private=private))
    with pytest.raises(UserError, match="has adapters: merge them with ./export_model.py"):
        load("data/model" if is_archive else "me/model", cache_dir="cache")


@pytest.mark.parametrize("is_sharded", [False, True])
def test_own_files_are_read_whatever_lies_beside(private, tmp_path, is_sharded):
    """Parts with an index as save_pretrained writes it, linked from elsewhere, as in a cache of the Hub."""
    save_model(tmp_path / "blobs", 0.25, **({"max_shard_size": "5KB"} if is_sharded else {}))
    snapshot = cache(tmp_path)
    snapshot.mkdir(parents=True)
    for file in (tmp_path / "blobs").iterdir():
        (snapshot / file.name).symlink_to(file)
    assert len(list(snapshot.glob("*.safetensors"))) == 1 or is_sharded
    for name in ("me/model", str(snapshot)):
        model = load(name, cache_dir="cache")
        assert (model.transformer.wte.weight == 0.25).all() and model.dtype == torch.float32
    if is_sharded:
        next(snapshot.glob("*.safetensors")).unlink()
        with pytest.raises(UserError, match="no weights that fit"):
            load("me/model", cache_dir="cache")


def test_pointer_of_git_lfs_is_named(tmp_path):
    """It was "Error while deserializing header: header too large"."""
    save_model(tmp_path / "model", 0.25)
    (tmp_path / "model/model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:2264")
    with pytest.raises(UserError, match="model.safetensors' is a pointer of Git LFS: run git lfs pull"):
        load(str(tmp_path / "model"), lora_rank=4)


class Listed:
    """A Hub with one repository, which is copied from a folder when it is downloaded."""

    def __init__(self, folder: Path, target: Path, monkeypatch, sizes: dict[str, int | None]):
        self.folder, self.target, self.downloaded = folder, target, []
        self.sizes = {file.name: file.stat().st_size for file in folder.iterdir()} | sizes
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", self.model_info)
        monkeypatch.setattr(hub, "hf_hub_download", self.download)

    def model_info(self, *_args, **_options) -> SimpleNamespace:
        files = [SimpleNamespace(rfilename=name, size=size) for name, size in self.sizes.items()]
        return SimpleNamespace(siblings=files, sha="b" * 40)

    def download(self, _name: str, file: str, revision: str, **_options) -> str:
        assert revision == "b" * 40, "all files are of the commit whose sizes were asked"
        self.downloaded.append(file)
        self.target.mkdir(exist_ok=True)
        return shutil.copy(self.folder / file, self.target / file)


def test_listed_files_alone_are_downloaded(private, tmp_path, monkeypatch):
    save_model(tmp_path / "hub", 0.5)
    for name in ("modeling.py", "pytorch_model.bin", "model-00001-of-00002.safetensors", "tokenizer.json"):
        (tmp_path / "hub" / name).write_bytes(b"x")
    listed = Listed(tmp_path / "hub", tmp_path / "downloaded", monkeypatch, {})
    assert (load("me/model").transformer.wte.weight == 0.5).all()
    assert sorted(listed.downloaded) == ["config.json", "generation_config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"model.safetensors": 30 * 10**9}, "have 30 GB: pass --model_name_or_path yourself"),
        ({"model.safetensors": None}, "does not tell all sizes"),
        ({"config.json": None}, "does not tell all sizes"),
        ({"config.json": 10**9}, "pass --model_name_or_path yourself"),
        ({"adapter_config.json": 1}, "has adapters"),
    ],
)
def test_what_is_large_or_of_unknown_size_is_not_downloaded(private, tmp_path, monkeypatch, sizes, reason):
    listed = Listed(save_model(tmp_path / "hub", 0.5), tmp_path / "downloaded", monkeypatch, sizes)
    with pytest.raises(UserError, match=reason):
        load("me/model")
    assert not listed.downloaded


def test_configuration_of_a_run_is_bounded_for_each_peer(private, tmp_path, monkeypatch):
    """A monitor reads no weights."""
    listed = Listed(save_model(tmp_path / "hub", 0.5), tmp_path / "downloaded", monkeypatch, {"config.json": 10**9})
    args = DatasetArguments(model_name_or_path="me/model")
    with pytest.raises(UserError, match="pass --model_name_or_path yourself"):
        load_config(args, CHOSEN, None)
    assert not listed.downloaded


def test_size_that_cannot_be_asked_is_a_refusal(private, monkeypatch):
    def fail(*_args, **_options):
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fail)
    with pytest.raises(UserError, match="does not tell the files of 'me/model' and their sizes .*no route"):
        load("me/model", cache_dir="cache")
