"""Two real peers train a causal model; pretrained weights."""

import contextlib
import json
import math
import shutil
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForPreTraining, AutoTokenizer

from arguments import ModelArguments
from cotrain.common.errors import UserError
from cotrain.data.tokenizers import load_tokenizer
from cotrain.models.model import load_config
from cotrain.models.pretrained import load_pretrained
from cotrain.options import NOTHING, Adopted
from cotrain.tasks import task_loading as tasks
from cotrain.training.checkpoints import list_checkpoints
from tests.support.models import build_model
from tests.support.peers import LONG_STEPS, TINY_CONFIGS, Scripts, join_together, local_peer, prepare_data

VOCAB_SIZE = 600
CHOSEN = Adopted(frozenset({"model_name_or_path"}))
COMMON = (*LONG_STEPS, "--max_global_steps", 2, "--optimizer", "adamw", "--learning_rate", 1e-3,
          "--logging_steps", 1000, "--leave_timeout", 0)  # fmt: skip


@pytest.mark.peers
def test_two_peers_train_a_causal_model(tmp_path, launcher):
    """The other families take their steps in tests/models/test_families.py."""
    data, config = tmp_path / "data", tmp_path / "config.json"
    prepare_data(data, "clm", VOCAB_SIZE, launcher=launcher)
    config.write_text(json.dumps(TINY_CONFIGS["gpt2"]), encoding="utf-8")
    scripts = Scripts(tmp_path, data, launcher=launcher)
    try:
        with local_peer(tmp_path, "albert") as peer:
            address = str(peer.dht.get_visible_maddrs()[0])
            common = ("--model_name_or_path", config, "--initial_peers", address, *COMMON)
            trainers = one, two = [scripts.trainer(name, *common) for name in ("one", "two")]
            join_together(one, two)
            exit_codes = [trainer.wait(240) for trainer in trainers]
        for trainer, exit_code in zip(trainers, exit_codes, strict=True):
            assert exit_code == 0 and "Averaged gradients with 2 peers" in trainer.output, trainer.output
            assert "Traceback" not in trainer.output
        first_loss = float(one.wait_for(r"Local step 1: loss = ([\d.]+)")[1])
        assert first_loss == pytest.approx(math.log(VOCAB_SIZE), rel=0.05)
        checkpoint = list_checkpoints(tmp_path / "two")[0]
        model, info = AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
        assert model.config.model_type == "gpt2" and not info["missing_keys"] and not info["unexpected_keys"]
        assert len(AutoTokenizer.from_pretrained(checkpoint)) == model.config.vocab_size == VOCAB_SIZE
    finally:
        scripts.close()


# From pretrained weights


@pytest.fixture
def pretrained(data, tmp_path):
    """Return a folder with a model whose weights differ from the initial weights of a run."""
    args = ModelArguments(model_name_or_path=str(data / "config.json"), tokenizer_path=str(data / "tokenizer"))
    model = build_model(load_config(args, NOTHING, load_tokenizer(args.tokenizer_path)), "another run")
    model.save_pretrained(tmp_path / "pretrained")
    return tmp_path / "pretrained"


def build(data, path, run_id: str = "run") -> dict[str, torch.Tensor]:
    """Build a trainer's model from the weights at a path, and return its state."""
    args = ModelArguments(str(path), from_pretrained=True, tokenizer_path=str(data / "tokenizer"))
    return tasks.build_initial_model(tasks.load_task(args, NOTHING, has_weights=True), run_id).state_dict()


def test_pretrained_weights_are_loaded(data, pretrained):
    loaded, expected = build(data, pretrained), AutoModelForPreTraining.from_pretrained(pretrained).state_dict()
    assert all(loaded[name].equal(expected[name]) for name in expected)


@pytest.mark.parametrize("chosen_by_the_run", [False, True])
def test_a_run_gives_weights_in_safetensors_only(data, pretrained, tmp_path, monkeypatch, chosen_by_the_run):
    """A repository is in the cache, with weights that torch would unpickle. A user's own may have them."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "cache/models--me--model/snapshots/a"
    shutil.copytree(pretrained, folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    (tmp_path / "cache/models--me--model/refs").mkdir()
    (tmp_path / "cache/models--me--model/refs/main").write_text("a", encoding="utf-8")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    args = ModelArguments("me/model", from_pretrained=True, tokenizer_path=str(data / "tokenizer"), cache_dir="cache")
    adopted = CHOSEN if chosen_by_the_run else NOTHING
    task = tasks.load_task(args, adopted, has_weights=True)
    with pytest.raises(UserError, match="no weights") if chosen_by_the_run else contextlib.nullcontext():
        tasks.build_initial_model(task, "run")
    shutil.copytree(pretrained, "me/model")  # as the data of a run might
    with pytest.raises(UserError, match="is a path on this") if chosen_by_the_run else contextlib.nullcontext():
        tasks.load_task(args, adopted, has_weights=True)


def test_a_run_gives_weights_of_at_most_20_gb(monkeypatch):
    files = [SimpleNamespace(rfilename="a/x.safetensors", size=15_000_000_000)] * 2
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: SimpleNamespace(siblings=files))
    args = ModelArguments("me/model", from_pretrained=True)
    with pytest.raises(UserError, match="'me/model' have 30 GB"):
        load_pretrained(None, args, CHOSEN)


def test_layers_without_pretrained_weights_are_the_same_on_each_peer(data, pretrained, tmp_path):
    """A masked-LM checkpoint of ALBERT lacks the sentence-order head."""
    AutoModelForMaskedLM.from_pretrained(pretrained).save_pretrained(tmp_path / "mlm")
    one, two, other = (build(data, tmp_path / "mlm", run_id) for run_id in ("run", "run", "other"))
    head = [name for name in one if "sop_classifier" in name and one[name].ndim > 1]
    assert head and all(one[name].equal(two[name]) for name in one)
    assert not any(one[name].equal(other[name]) for name in head)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (None, "is a configuration"),
        ({"vocab_size": 100}, "a vocabulary of 100, the tokenizer of 500: prepare the data with"),
        ({"hidden_size": 64}, "no weights that fit"),
    ],
)
def test_pretrained_weights_that_do_not_fit(data, pretrained, changes, fault):
    path = pretrained / "config.json"
    if changes is not None:
        path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")
    with pytest.raises(UserError, match=fault):
        build(data, pretrained if changes else path)
