"""Uploads to a fake Hub: uploaded files, failures, and a monitor that never waits for an upload."""

import json
import logging
import os
import shutil
import signal
from pathlib import Path

import psutil
import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoConfig, AutoTokenizer

from lib.common.errors import UserError
from lib.monitoring import hub_upload as upload
from lib.monitoring.aggregation import StepReport
from lib.monitoring.contributors import Contributors
from lib.monitoring.hub_upload import HubUploader, build_card_metadata, check_repo
from lib.monitoring.parsing import PeerStep
from lib.training import checkpoints
from lib.training.checkpoints import TrainingState
from lib.training.model import build_model
from tests.support.fake_hub import TOKEN, FakeHub, fake_hub
from tests.support.peers import TINY_ALBERT, Scripts, wait_until

CONFIG = AutoConfig.for_model(**TINY_ALBERT, vocab_size=500)


@pytest.fixture
def hub(monkeypatch, tmp_path) -> FakeHub:
    """Return the fake Hub, which new processes use as the endpoint."""
    with fake_hub() as hub:
        for name, value in {
            "HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
        }.items():  # fmt: skip
            monkeypatch.setenv(name, value)
        yield hub


@pytest.fixture
def make_uploader(tmp_path):
    """Return a function that builds uploaders, which are closed at the end of the test."""
    uploaders = []

    def make_uploader(**options) -> HubUploader:
        folder = tmp_path / "out"
        metadata, contributors = build_card_metadata("me/model", "my run", CONFIG), Contributors(folder, "my run")
        uploader = HubUploader(folder, metadata, contributors, ["/dns4/x.org/tcp/1/p2p/Qm"], **options)
        uploaders.append(uploader)
        return uploader

    yield make_uploader
    for uploader in uploaders:
        uploader.close()


def save(uploader: HubUploader, step: int, size: int = 10_000) -> Path:
    """Write the files of a checkpoint, without a model."""
    folder = uploader.folder / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    for name in ("model.safetensors", "training_state.pt", "collaboration.json"):
        (folder / name).write_bytes(os.urandom(size))
    return folder


def run_until(uploader: HubUploader, condition, what: str, **options):
    def updated():
        uploader.update(**options)
        return condition()

    return wait_until(updated, 240, what)  # each try starts a process that imports huggingface_hub


def upload_newest(uploader: HubUploader, **options) -> None:
    newest = checkpoints.list_checkpoints(uploader.folder)[0].name
    run_until(uploader, lambda: uploader.uploaded == newest, f"the upload of {newest}", **options)


def leftovers(uploader: HubUploader) -> list[str]:
    return [path.name for path in uploader.folder.iterdir() if path.name.startswith(".")]


def child_processes() -> list[psutil.Process]:
    return [process for process in psutil.Process().children() if "hub_worker" in " ".join(process.cmdline())]


# Uploaded files


def test_model_and_card_arrive_with_a_message_and_a_tag(hub, make_uploader, caplog):
    uploader = make_uploader()
    checkpoint = save(uploader, 7)
    with caplog.at_level("INFO"):
        upload_newest(uploader)
    assert sorted(hub.files) == ["README.md", "config.json", "model.safetensors"]
    assert hub.files["model.safetensors"] == (checkpoint / "model.safetensors").read_bytes()
    assert b"step 7 " in hub.files["README.md"] and b"/dns4/x.org/tcp/1/p2p/Qm" in hub.files["README.md"]
    assert [commit.message for commit in hub.commits] == ["Step 7 of my run"]
    assert hub.tags == {"step-7": hub.commits[0].oid}
    assert hub.repos == {"me/model": False}
    assert "Uploaded checkpoint-7 to me/model" in caplog.text and TOKEN not in caplog.text
    assert leftovers(uploader) == []


def test_training_state_goes_up_where_asked_for(hub, make_uploader):
    uploader = make_uploader(with_training_state=True, private=True)
    save(uploader, 7)
    upload_newest(uploader)
    assert {"training_state.pt", "collaboration.json"} < set(hub.files)
    assert hub.repos == {"me/model": True}


def test_downloaded_checkpoint_is_uploaded_without_leftovers(hub, make_uploader):
    uploader = make_uploader()
    checkpoint = save(uploader, 7)
    (checkpoint / ".cache" / "huggingface").mkdir(parents=True)
    (checkpoint / "README.md").write_text("the card of then")
    upload_newest(uploader)
    assert sorted(hub.files) == ["README.md", "config.json", "model.safetensors"]
    assert b"the card of then" not in hub.files["README.md"]
    assert (checkpoint / "README.md").read_text() == "the card of then"


def test_next_checkpoint_waits_for_the_interval_unless_the_run_is_over(hub, make_uploader):
    uploader = make_uploader(interval=3600)
    save(uploader, 1)
    upload_newest(uploader)
    save(uploader, 2)
    uploader.update()
    assert child_processes() == []
    upload_newest(uploader, run_is_over=True)
    uploader.update(run_is_over=True)
    assert child_processes() == [], "once is enough"
    assert [commit.message for commit in hub.commits] == ["Step 1 of my run", "Step 2 of my run"]


def test_checkpoint_may_be_removed_while_it_is_uploaded(hub, make_uploader):
    uploader = make_uploader()
    content = (save(uploader, 7) / "model.safetensors").read_bytes()
    uploader.update()
    checkpoints.remove_old_checkpoints(uploader.folder, keep=0)
    run_until(uploader, lambda: uploader.uploaded == "checkpoint-7", "the upload")
    assert hub.files["model.safetensors"] == content


def test_checkpoint_removed_before_the_upload_is_no_failure(hub, make_uploader, monkeypatch, caplog):
    uploader = make_uploader()
    checkpoint = save(uploader, 7)
    newer = save(uploader, 8)
    shutil.rmtree(checkpoint)
    with monkeypatch.context() as patched:
        patched.setattr(upload, "list_checkpoints", lambda _folder: [checkpoint])
        uploader.update()
    assert caplog.records == [] and child_processes() == [] and leftovers(uploader) == []
    upload_newest(uploader)
    assert uploader.uploaded == newer.name


def test_file_system_without_hard_links(hub, make_uploader, monkeypatch):
    def refuse(source, target):
        raise PermissionError(1, "Operation not permitted", str(source))

    monkeypatch.setattr(os, "link", refuse)
    uploader = make_uploader()
    save(uploader, 7)
    upload_newest(uploader)
    assert "model.safetensors" in hub.files


# Failures


@pytest.mark.parametrize(
    ("refusals", "words"),
    [
        ({"/commit/": [500]}, "internal error (500)"),
        ({"/commit/": [429]}, "rate-limited by the Hub (429)"),
        ({"/commit/": [403]}, "may not write to 'me/model'"),
        ({"/repos/create": [401], "/api/models/": [401]}, "hf auth login"),
        ({"/preupload/": [404]}, "no repository 'me/model'"),
        ({"/commit/": [413]}, "refused (413)"),
    ],
)
def test_failure_is_one_line_and_is_tried_again(hub, make_uploader, monkeypatch, caplog, refusals, words):
    monkeypatch.setattr(upload, "FIRST_PAUSE", 0.2)
    hub.refusals = refusals
    uploader = make_uploader()
    save(uploader, 7)
    upload_newest(uploader)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and words in record.message and "trying again in" in record.message
    assert "\n" not in record.message and TOKEN not in record.message
    assert len(hub.commits) == 1


def test_pauses_grow_and_are_reset_by_a_success(hub, make_uploader, monkeypatch):
    monkeypatch.setattr(upload, "FIRST_PAUSE", 0.2)
    monkeypatch.setattr(upload, "LONGEST_PAUSE", 0.4)
    hub.refusals = {"/commit/": [500, 500, 500]}
    uploader = make_uploader(interval=0)
    pauses = []
    monkeypatch.setattr(
        uploader, "_fail", lambda reason, fail=uploader._fail: (pauses.append(uploader._backoff.pause), fail(reason))
    )
    save(uploader, 7)
    upload_newest(uploader)
    assert pauses == [0.2, 0.4, 0.4]
    hub.refusals = {"/commit/": [500]}
    save(uploader, 8)
    upload_newest(uploader)
    assert pauses[-1] == 0.2


def test_silent_hub_delays_neither_the_monitor_nor_its_shutdown(hub, make_uploader, monkeypatch, caplog):
    monkeypatch.setattr(upload, "CLOSE_TIMEOUT", 0.5)
    hub.silent.set()
    uploader = make_uploader()
    save(uploader, 7)
    run_until(uploader, lambda: hub.requests, "a request")
    (process,) = child_processes()
    uploader.update()
    assert process.is_running(), "nobody has waited for its end"
    ended = uploader._upload.process
    uploader.close()
    assert ended.returncode == -signal.SIGKILL
    assert child_processes() == [] and leftovers(uploader) == []
    assert "next start repeats it" in caplog.text


def test_upload_that_takes_too_long_is_ended(hub, make_uploader, monkeypatch, caplog):
    hub.silent.set()
    uploader = make_uploader()
    save(uploader, 7)
    run_until(uploader, lambda: hub.requests, "a request")
    monkeypatch.setattr(upload, "UPLOAD_TIMEOUT", 0.0)
    uploader.update()
    assert "not done after" in caplog.text and child_processes() == [] and leftovers(uploader) == []


def test_full_disk_is_one_line(hub, make_uploader, monkeypatch, caplog):
    def fail(*_args):
        raise OSError(28, os.strerror(28), "out")

    monkeypatch.setattr(upload, "read_curve", fail)
    uploader = make_uploader()
    save(uploader, 7)
    uploader.update()
    assert ["the disk is full" in record.message for record in caplog.records] == [True]
    assert leftovers(uploader) == []


# Checks at the start


def check(repo_id: str = "me/model", private: bool = False, **options) -> None:
    check_repo(build_card_metadata(repo_id, "run", CONFIG, **options), private)


def test_check_creates_the_repository(hub, tmp_path):
    check(private=True, license="apache-2.0", language="en")
    assert hub.repos == {"me/model": True} and hub.commits == []
    check()  # it is there already


def test_missing_token_is_reported_at_the_start(hub, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UserError, match="--repo_id: no token .*hf auth login"):
        check()


def test_stored_token_is_found(hub, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "token").write_text(TOKEN)
    check()
    assert hub.repos


def test_wrong_token_is_reported_at_the_start(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_Wrong")
    with pytest.raises(UserError, match="does not accept the token") as caught:
        check()
    assert "hf_Wrong" not in str(caught.value)


@pytest.mark.parametrize("exists", [True, False])
def test_read_only_token_is_reported_at_the_start(hub, tmp_path, exists):
    hub.writable = False
    if exists:
        hub.repos["me/model"] = False
    else:
        hub.refusals = {"/api/models/": [404]}
    with pytest.raises(UserError, match="may not write to 'me/model'"):
        check()


def test_unknown_license_is_reported_at_the_start(hub, tmp_path):
    with pytest.raises(UserError, match="--license or --language.*must be one of") as caught:
        check(license="my-own")
    assert "\n" not in str(caught.value)


def test_offline_mode_is_reported_at_the_start(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="HF_HUB_OFFLINE"):
        check()


@pytest.mark.parametrize("trouble", ["closed", "silent", "broken"])
def test_hub_that_cannot_be_reached_is_a_warning(hub, tmp_path, monkeypatch, caplog, trouble):
    if trouble == "closed":
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    elif trouble == "silent":
        hub.silent.set()
        monkeypatch.setattr(upload, "CHECK_TIMEOUT", 5.0)
    else:
        hub.refusals = {"/repos/create": [503]}
    check()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "Uploads will be tried" in record.message
    assert child_processes() == []


# The monitor


@pytest.fixture
def monitor_scripts(hub, scripts) -> Scripts:
    """Return the scripts whose uploads go to the fake Hub: the monitor passes the variables on to hub_worker.py."""
    scripts.late |= {name for name in os.environ if name.startswith("HF_")}
    return scripts


def save_real_checkpoint(folder: Path, data: Path) -> Path:
    model = build_model(CONFIG, "run")
    state = TrainingState("up", {"epoch": 3, "optimizer_metadata": []}, [torch.zeros(3)])
    tokenizer = AutoTokenizer.from_pretrained(data / "tokenizer")
    return checkpoints.save_checkpoint(folder, model, tokenizer, state, {})


def test_monitor_uploads_a_checkpoint_that_loads(hub, monitor_scripts, data, tmp_path):
    save_real_checkpoint(tmp_path / "monitor", data)
    contributors = Contributors(tmp_path / "monitor", "up")
    contributors.record_names({b"key": "<b>alice</b>"})
    contributors.add(StepReport(3, 5.0, 1, 64, 1.0, 1, 1, 0.0, (PeerStep(b"key", 3, 1.0, 64, 5.0, 1),)))
    contributors.save()
    flags = ("--run_id", "up", "--repo_id", "me/model", "--license", "mit", "--announce_maddrs", "/dns4/x.org/tcp/99")
    monitor = monitor_scripts.monitor(*flags)
    monitor.wait_for("Uploaded checkpoint-3 to me/model")
    (tmp_path / "fetched").mkdir()
    for name, content in hub.files.items():
        (tmp_path / "fetched" / name).write_bytes(content)
    card = ModelCard.load(tmp_path / "fetched" / "README.md")
    assert card.data.license == "mit" and card.data.library_name == "transformers"
    assert "--initial_peers /dns4/x.org/tcp/99/p2p/" in card.text
    assert "alice" in card.text and "<b>alice" not in card.text
    namespace: dict = {}
    snippet = card.text.split("```python\n")[1].split("```")[0]
    exec(snippet.replace("me/model", str(tmp_path / "fetched")), namespace)
    assert type(namespace["model"]).__name__ == "AlbertForPreTraining" and len(namespace["tokenizer"]) == 500
    assert monitor.stop(timeout=60) == 0 and TOKEN not in monitor.output
    monitor.assert_nothing_left()

    # Second start, with a Hub that stops responding
    monitor = monitor_scripts.monitor(*flags, "--upload_interval", "0")
    monitor.wait_for("Uploaded checkpoint-3")
    hub.silent.set()
    shutil.copytree(tmp_path / "monitor" / "checkpoint-3", tmp_path / "monitor" / "checkpoint-4")
    hub.requests.clear()
    wait_until(lambda: hub.requests, 120, "the next upload")
    assert monitor.stop(timeout=60) == 0
    assert "The monitor has stopped" in monitor.output and "ending now" not in monitor.output, "without a last resort"
    monitor.assert_nothing_left()
    assert "Traceback" not in monitor.output


def test_upload_ends_with_a_killed_monitor(hub, monitor_scripts, data, tmp_path):
    monitor = monitor_scripts.monitor("--run_id", "up", "--repo_id", "me/model")
    monitor.wait_for("visible multiaddresses")  # the check of the Hub is done by then
    hub.silent.set()
    hub.requests.clear()
    save_real_checkpoint(tmp_path / "monitor", data)
    wait_until(lambda: hub.requests, 120, "an upload")
    assert any("hub_worker" in " ".join(process.cmdline()) for process in monitor.family()) and not hub.files
    monitor.process.kill()
    monitor.assert_nothing_left()


def test_leftover_of_a_killed_monitor_is_removed(tmp_path):
    from lib.common.atomic_files import remove_leftovers

    folder = tmp_path / f".upload.{'0' * 12}.new"
    folder.mkdir()
    (folder / "README.md").write_text(json.dumps({}))
    remove_leftovers(tmp_path)
    assert not folder.exists()
