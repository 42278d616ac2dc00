"""Models that were downloaded before, without the Hub: found at once, in whichever folder they are."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from huggingface_hub import constants
from transformers import GPT2Config, GPT2LMHeadModel

from arguments import DatasetArguments
from cotrain.common import hub_cache
from cotrain.common.errors import UserError
from cotrain.common.hub_cache import find_downloads
from cotrain.data.tokenizers import load_tokenizer
from cotrain.models.hub import fetch_files
from cotrain.models.model import load_config
from cotrain.models.pretrained import digest_weights, load_pretrained
from cotrain.options import NOTHING
from tests.support.conversations import make_chat_tokenizer
from tests.support.fake_hub import fake_hub

NAME, COMMIT = "org/tiny", 40 * "a"


@pytest.fixture
def home(tmp_path, monkeypatch) -> Iterator[Path]:
    """The cache of the Hub's library, with a model. The Hub does not answer, and nobody waits for it."""

    def wait(seconds: float) -> None:
        raise AssertionError(f"a retry in {seconds} s")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", wait)
    hub_cache.probe.cache_clear()
    repository = tmp_path / "home" / "models--org--tiny"
    folder = repository / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT, encoding="utf-8")
    tokenizer = make_chat_tokenizer("chatml")
    tokenizer.save_pretrained(folder)
    GPT2LMHeadModel(
        GPT2Config(vocab_size=len(tokenizer), n_positions=32, n_embd=16, n_layer=1, n_head=2)
    ).save_pretrained(folder)
    yield tmp_path / "home"
    hub_cache.probe.cache_clear()


def test_certificates_that_are_not_there_are_named(home, monkeypatch):
    """As if the Hub did not answer, another tokenizer was advised."""
    monkeypatch.setenv("SSL_CERT_FILE", "/missing.pem")
    monkeypatch.setattr(hub_cache, "get_session", httpx.Client)
    with pytest.raises(UserError, match="^SSL_CERT_FILE: there is no '/missing.pem'"):
        hub_cache.is_silent()


@pytest.mark.parametrize("is_offline", [False, True])
def test_downloaded_model_is_loaded_without_the_hub(home, monkeypatch, caplog, is_offline):
    """The default of --cache_dir is another folder than that of the Hub's library."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
    args = DatasetArguments(model_name_or_path=NAME, from_pretrained=True)
    tokenizer = load_tokenizer(NAME, "--tokenizer", use_hub=True, cache_dir=args.cache_dir)
    config = load_config(args, NOTHING, tokenizer)
    assert load_pretrained(config, args, NOTHING).num_parameters() > 0 and len(digest_weights(args, NOTHING)) == 16
    base = fetch_files(NAME, False, True, **find_downloads(NAME, None))
    assert base == home / "models--org--tiny" / "snapshots" / COMMIT
    assert caplog.text.count("does not answer") == (not is_offline)


def test_fullest_folder_is_used(home, tmp_path):
    """The preparation may have put the tokenizer alone into its folder."""
    part = Path("data/cache/models--org--tiny/snapshots", COMMIT)
    part.mkdir(parents=True)
    (part / "tokenizer.json").touch()
    for cache_dir in ("data/cache", None):
        assert find_downloads(NAME, cache_dir)["cache_dir"] == str(home)
    shutil.rmtree(home)
    assert find_downloads(NAME, None)["cache_dir"] == "data/cache"
    shutil.rmtree("data")
    assert find_downloads(NAME, "other")["cache_dir"] == "other"


def test_hub_that_answers_is_used(home, monkeypatch):
    with fake_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        assert not find_downloads(NAME, None)["local_files_only"]
