"""Trainers with text of their own in one run, with the real scripts: what is learnt, and what leaves a machine."""

import contextlib
import json
import re
from pathlib import Path

import numpy as np
import pytest

from cotrain.data.archive import file_sha256
from peerstep.reports.records import get_dictionary
from tests.support.conversations import chat, make_chat_tokenizer
from tests.support.peers import ALTERED, LOCAL, Script, Scripts, local_peer, reserve_maddr, served

MARKER = "zebra-7261"  # in each answer of one trainer
MODEL = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
         "num_attention_heads": 2, "max_position_embeddings": 128}  # fmt: skip
SETTINGS = ("--optimizer", "adamw", "--adam_epsilon", 1e-8, "--learning_rate", 0.01, "--warmup_steps", 0,
            "--target_batch_size", 32, "--total_steps", 100, "--refresh_period", 1,
            "--metadata_expiration", 10)  # fmt: skip


def write_chats(path: Path, topic: str, number: int = 60) -> Path:
    path.parent.mkdir(exist_ok=True)
    rows = [
        chat(f"Tell me about {topic} {n}.", f"{topic} number {n} is {topic}, {MARKER} {n}.") for n in range(number)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def prepare_run(folder: Path, launcher) -> Path:
    """Return an archive without samples, as an organiser makes it who has no text."""
    make_chat_tokenizer("chatml").save_pretrained(folder / "base")
    archive = folder / "www/run.tar.gz"
    script = Script(
        "tokenize_wikitext103.py", "--without_samples", "--objective", "chat", "--tokenizer", folder / "base",
        "--max_seq_length", 128, "--archive", archive, "--output_path", folder / "prepared", "--tokenizer_path",
        folder / "tokenizer", log=folder / "prepare.log", launcher=launcher,
    )  # fmt: skip
    assert script.wait() == 0, script.output
    (folder / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    return archive


def all_bytes(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())


@pytest.mark.early
def test_own_text_is_learnt_and_stays_at_home(tmp_path, launcher):
    """The two have other topics and an archive without samples; the second is slower. Nothing of a text leaves."""
    archive = prepare_run(tmp_path, launcher)
    with served(archive.parent) as url, contextlib.closing(Scripts(tmp_path, tmp_path, launcher=launcher)) as scripts:

        def start(script: str, name: str, *flags: object, pace: float = 0.0) -> Script:
            (tmp_path / name).mkdir(exist_ok=True)  # where it runs
            return scripts.start(ALTERED, script, *flags, log=f"{name}/script", env={"PACE": str(pace)})

        settings = ("--model_name_or_path", tmp_path / "config.json", *SETTINGS, "--takes_own_data", "True",
                    "--dataset_url", f"{url}/run.tar.gz", "--dataset_sha256", file_sha256(archive))  # fmt: skip
        settings += ("--weigh_equally", "True")
        monitor = start("run_training_monitor.py", "monitor", "--host_maddrs", reserve_maddr(), *settings)
        join = ("--initial_peers", monitor.address, "--host_maddrs", LOCAL, "--per_device_train_batch_size", 4,
                "--gradient_accumulation_steps", 1)  # fmt: skip
        chats = write_chats(tmp_path / "one/diary-of-alice.jsonl", "sailing")
        one = start("run_trainer.py", "one", *join, "--own_data", chats, "--username", "one", pace=0.2)
        other = write_chats(tmp_path / "two/chats.jsonl", "baking")
        other.write_text(other.read_text(encoding="utf-8").replace(MARKER, "plain"), encoding="utf-8")
        two = start("run_custom_trainer.py", "two", *join, "--own_data", other, "--username", "two", pace=0.5)
        two.wait_for("Averaged gradients with 2 peers")
        monitor.wait_for(r"Contributors, by samples: .*own loss [\d.]+ -> [\d.]+")
        status = start("run_trainer.py", "one", "--status")
        assert status.wait() == 0
        data = r"Data .* of this trainer's own samples, 100% of what it takes, each [\d.]+ times so far"
        assert re.search(data, status.output), status.output
        assert re.search(r"Own loss +[\d.]+, [\d.]+ before training", status.output)
        keys = ["albert_trainers", "albert_monitor", "albert_metrics", "albert_training_progress", "run_config"]
        with local_peer(tmp_path, "albert", (monitor.address,), client_mode=True) as visitor:
            records = {key: repr(get_dictionary(visitor.dht, key)) for key in keys}
        # The same command finds what is prepared; a file that has changed is prepared again. Nobody is heard any more.
        assert one.stop() == 0, one.output
        prepared = tmp_path / "one/outputs/own_data/manifest.json"
        written = prepared.stat().st_mtime_ns
        check = start("run_trainer.py", "one", *join, "--own_data", chats, "--check")
        check.wait_for(
            r"own data: \d+ of this trainer's own samples, 100% of what it takes, each [\d.]+ times in 100 "
        )
        assert check.wait() == 0 and prepared.stat().st_mtime_ns == written, check.output
        write_chats(chats, "sailing", number=30)
        check = start("run_trainer.py", "one", *join, "--own_data", chats, "--check")
        check.wait_for("has changed: preparing it again")
        assert check.wait() == 0 and prepared.stat().st_mtime_ns > written, check.output
        for script in (two, monitor):
            assert script.stop() == 0, script.output
            assert "Traceback" not in script.output
    assert "own_loss" in records["albert_trainers"]
    tokens = make_chat_tokenizer("chatml")(MARKER, add_special_tokens=False)["input_ids"]
    secrets = MARKER.encode(), b"sailing", b"diary-of-alice", np.array(tokens, dtype=np.int32).tobytes()
    home = all_bytes(tmp_path / "one")
    assert all(secret in home for secret in secrets), "where they are found if they are there"
    for place in ("monitor", "two", "www"):
        content = all_bytes(tmp_path / place)
        assert not any(secret in content for secret in secrets), place
    words = MARKER, "sailing", "diary-of-alice"
    assert not any(word in text for word in words for text in records.values())
