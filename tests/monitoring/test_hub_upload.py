"""Uploads to a fake Hub: uploaded files, failures, and a monitor that never waits for an upload."""

import json
import logging
import os
import shutil
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoConfig, AutoModelForPreTraining

from arguments import ModelArguments
from cotrain.common.errors import UserError
from cotrain.monitoring import hub_upload as upload
from cotrain.monitoring.aggregation import StepReport
from cotrain.monitoring.contributors import Contributors
from cotrain.monitoring.hub_upload import HubUploader, check_repo, require_token
from cotrain.monitoring.model_card import CardMetadata
from cotrain.options import NOTHING
from cotrain.tasks.task_loading import load_task
from cotrain.training import checkpoints
from cotrain.training.checkpoints import SavedState
from tests.support.dht_records import peer_step
from tests.support.fake_hub import TOKEN, FakeHub, fake_hub
from tests.support.fakes import make_text_task
from tests.support.peers import TINY_ALBERT, wait_until

TASK = make_text_task(AutoConfig.for_model(**TINY_ALBERT, vocab_size=500))


@pytest.fixture
def hub(monkeypatch, tmp_path) -> FakeHub:
    """Return the fake Hub, which this process and new ones use as the endpoint."""
    with fake_hub() as hub:
        environment = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        for name, value in {**environment, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "hf")}.items():
            monkeypatch.setenv(name, value)
        constants = {"ENDPOINT": hub.endpoint, "HF_HUB_DISABLE_XET": True, "HF_HUB_OFFLINE": False}
        for name, value in {**constants, "HF_TOKEN_PATH": str(tmp_path / "hf" / "token")}.items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        monkeypatch.setattr(upload, "FIRST_PAUSE", 0.2)
        yield hub
    huggingface_hub.close_session()


@pytest.fixture
def make_uploader(tmp_path, hub):
    """Return a function that builds uploaders, which are closed at the end of the test."""
    uploaders = []

    def make_uploader(**options) -> HubUploader:
        metadata, contributors = CardMetadata("me/model", "my run", TASK), Contributors(tmp_path / "out", "my run")
        options = {"interval": 3600.0, **options}
        uploader = HubUploader(metadata, contributors, ["/dns4/x.org/tcp/1/p2p/Qm"], tmp_path / "out", **options)
        uploaders.append(uploader)
        return uploader

    yield make_uploader
    hub.ended.set()
    for uploader in uploaders:
        wait_until(lambda uploader=uploader: not uploader.is_running, 120, "the end of the upload")


def save(uploader: HubUploader, step: int, size: int = 10_000) -> Path:
    """Write the files of a checkpoint, without a model."""
    folder = uploader.folder / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}", encoding="utf-8")
    for name in ("model.safetensors", "training_state.pt", "collaboration.json"):
        (folder / name).write_bytes(os.urandom(size))
    return folder


def upload_newest(uploader: HubUploader, page: str | None = None, run_is_over: bool = False) -> None:
    newest = checkpoints.list_checkpoints(uploader.folder)[0].name

    def is_uploaded() -> bool:
        uploader.update(page, run_is_over)
        return uploader.uploaded == newest and not uploader.is_running

    wait_until(is_uploaded, 60, f"the upload of {newest}")


def leftovers(uploader: HubUploader) -> list[str]:
    return [path.name for path in uploader.folder.iterdir() if path.name.startswith(".")]


# Uploaded files


def test_model_and_card_arrive_with_a_message_and_a_tag(hub, make_uploader, caplog):
    uploader = make_uploader()
    checkpoint = save(uploader, 7)
    (checkpoint / ".cache" / "huggingface").mkdir(parents=True)  # as in a checkpoint that was downloaded from the Hub
    (checkpoint / "README.md").write_text("the card of then", encoding="utf-8")
    adapters = {"base_model_name_or_path": "/home/al/secret/base", "r": 16}
    (checkpoint / "adapter_config.json").write_text(json.dumps(adapters), encoding="utf-8")
    with caplog.at_level("INFO"):
        upload_newest(uploader, "https://huggingface.co/spaces/me/curves")
    assert sorted(hub.files) == ["README.md", "adapter_config.json", "config.json", "model.safetensors"]
    published = json.loads(hub.files["adapter_config.json"])
    assert published == {"base_model_name_or_path": "base", "r": 16}, "no folder of this machine"
    assert hub.files["model.safetensors"] == (checkpoint / "model.safetensors").read_bytes()
    for words in (b"step 7 ", b"/dns4/x.org/tcp/1/p2p/Qm", b"(https://huggingface.co/spaces/me/curves)"):
        assert words in hub.files["README.md"]
    assert b"the card of then" not in hub.files["README.md"]
    assert hub.commits == ["Step 7 of my run"] and hub.tags == {"step-7": "1" * 40}
    assert hub.repos == {"me/model": False}
    assert "Uploaded checkpoint-7 to me/model" in caplog.text and TOKEN not in caplog.text
    assert leftovers(uploader) == []


def test_next_checkpoint_waits_for_the_interval_unless_the_run_is_over(hub, make_uploader):
    uploader = make_uploader(has_state=True, private=True)
    (save(uploader, 1) / "adapter_config.json").write_text('{"base_model_name_or_path": "me/base"}', encoding="utf-8")
    upload_newest(uploader)
    assert hub.files["adapter_config.json"] == b'{"base_model_name_or_path": "me/base"}'
    assert {"training_state.pt", "collaboration.json"} < set(hub.files) and hub.repos == {"me/model": True}
    save(uploader, 2)
    uploader.update(None, run_is_over=False)
    assert not uploader.is_running
    upload_newest(uploader, run_is_over=True)
    uploader.update(None, run_is_over=True)
    assert not uploader.is_running, "once is enough"
    assert hub.commits == ["Step 1 of my run", "Step 2 of my run"]


def test_checkpoint_may_be_removed_while_it_is_uploaded(hub, make_uploader):
    uploader = make_uploader()
    content = (save(uploader, 7) / "model.safetensors").read_bytes()
    uploader.update(None, run_is_over=False)
    wait_until(lambda: hub.requests, 120, "the first request, for which the files are copied")
    checkpoints.rotate_checkpoints(uploader.folder / "checkpoint-7", keep=0)
    wait_until(lambda: uploader.uploaded == "checkpoint-7", 120, "the upload")
    assert hub.files["model.safetensors"] == content


# Failures


@pytest.mark.parametrize(
    ("refusals", "words"),
    [
        ({"/commit/": [500]}, "refused (500)"),
        ({"/commit/": [429]}, "rate-limited by the Hub (429)"),
        ({"/commit/": [403]}, "may not write to 'me/model'"),
        ({"/preupload/": [404]}, "no repository 'me/model'"),
        ({}, "No space left"),
    ],
)
def test_failure_is_one_line_and_is_tried_again(hub, make_uploader, monkeypatch, caplog, refusals, words):
    uploader, hub.refusals = make_uploader(), refusals
    save(uploader, 7)
    if not refusals:
        faults = [OSError(28, "No space left on device", "out"), []]
        monkeypatch.setattr(upload, "read_records", Mock(side_effect=faults))
    upload_newest(uploader)
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert words in record.message and "trying again in" in record.message
    assert "\n" not in record.message and TOKEN not in record.message
    assert len(hub.commits) == 1 and leftovers(uploader) == []


def test_silent_hub_delays_neither_the_monitor_nor_its_shutdown(hub, make_uploader, monkeypatch, caplog):
    monkeypatch.setattr(upload, "CLOSE_TIMEOUT", 0.5)
    hub.silent_paths = ("",)
    uploader = make_uploader()
    save(uploader, 7)
    uploader.update(None, run_is_over=False)
    wait_until(lambda: hub.requests, 120, "a request")
    uploader.update(None, run_is_over=False)
    assert uploader.is_running
    uploader.close()
    assert "next start repeats it" in caplog.text


# Checks at the start


def check(license: str | None = None, language: str | None = None, private: bool = False) -> None:
    check_repo(CardMetadata("me/model", "run", TASK, license, language), private)


def test_check_creates_the_repository_with_a_stored_token(hub, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UserError, match="--space_id: no token .*hf auth login"):
        require_token("--space_id")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "token").write_text(TOKEN, encoding="utf-8")
    require_token("--space_id")
    check(private=True, license="apache-2.0", language="en")
    check()  # it is there already
    assert hub.repos == {"me/model": True} and hub.commits == []


@pytest.mark.parametrize(
    ("token", "fault", "words"),
    [
        ("", None, "--repo_id: no token .*hf auth login"),
        ("hf_Wrong", None, "does not accept the token"),
        (TOKEN, "another's", "may not write to 'me/model'"),
        (TOKEN, "license", "--license or --language.*must be one of"),
        (TOKEN, "offline", "HF_HUB_OFFLINE"),
    ],
)
def test_trouble_that_does_not_pass_is_reported_at_the_start(hub, monkeypatch, token, fault, words):
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", fault == "offline")
    hub.writable = fault != "another's"
    with pytest.raises(UserError, match=words) as caught:
        check(license="my-own" if fault == "license" else None)
    assert "\n" not in str(caught.value) and "hf_Wrong" not in str(caught.value)


@pytest.mark.parametrize("faults", [{"silent_paths": ("",)}, {"refusals": {"/repos/create": [503]}}])
def test_hub_that_cannot_be_reached_is_a_warning(hub, monkeypatch, caplog, faults):
    monkeypatch.setattr(upload, "TIMEOUTS", (1.0, 1.0, 1.0, None))
    vars(hub).update(faults)
    check()
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "Uploads will be tried" in record.message


# The monitor


def test_monitor_uploads_a_checkpoint_that_loads(hub, scripts, data, tmp_path):
    state = SavedState("up", {"epoch": 3, "statistics": []}, [torch.zeros(3)])
    args = ModelArguments(model_name_or_path=str(data / "config.json"), tokenizer_path=str(data / "tokenizer"))
    task = load_task(args, NOTHING)
    checkpoints.save_checkpoint(tmp_path / "monitor", task, task.build_model(), state, {})
    contributors = Contributors(tmp_path / "monitor", "up")
    contributors.record_names({b"key": "<b>alice</b>"})
    contributors.add(StepReport(3, 5.0, 1, 64, 1.0, 1, 1, 0.0, (peer_step(b"key", 3, 64),)))
    contributors.save()
    flags = ("--run_id", "up", "--repo_id", "me/model", "--license", "mit", "--announce_maddrs", "/dns4/x.org/tcp/99")
    monitor = scripts.monitor(*flags, "--page", "https://example.org/curves")
    monitor.wait_for("Uploaded checkpoint-3 to me/model")
    (tmp_path / "fetched").mkdir()
    for name, content in hub.files.items():
        (tmp_path / "fetched" / name).write_bytes(content)
    card = ModelCard.load(tmp_path / "fetched" / "README.md")
    assert card.data.license == "mit" and card.data.library_name == "transformers"
    assert "./run_trainer.py --initial_peers /dns4/x.org/tcp/99/p2p/" in card.text
    assert "(https://example.org/curves)" in card.text
    assert "alice" in card.text and "<b>alice" not in card.text
    assert type(AutoModelForPreTraining.from_pretrained(tmp_path / "fetched")).__name__ == "AlbertForPreTraining"
    assert monitor.stop() == 0 and TOKEN not in monitor.output
    monitor.assert_nothing_left()

    # Second start, with a Hub that stops responding in the middle of an upload of several files
    monitor = scripts.monitor(*flags, "--upload_interval", "0", "--upload_training_state")
    monitor.wait_for("Uploaded checkpoint-3")
    shutil.copytree(tmp_path / "monitor" / "checkpoint-3", tmp_path / "monitor" / "checkpoint-4")
    for path in (tmp_path / "monitor" / "checkpoint-4").glob("*.[sp]*t*"):
        path.write_bytes(os.urandom(1000))
    hub.silent_paths = ("/storage/",)
    hub.requests.clear()
    wait_until(lambda: sum("/storage/" in request for request in hub.requests) >= 2, 120, "the next upload")
    assert monitor.stop() == 0
    assert "The monitor has stopped" in monitor.output and "ending now" not in monitor.output, "without a last resort"
    monitor.assert_nothing_left()
    assert "Traceback" not in monitor.output
