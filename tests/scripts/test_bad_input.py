"""Invalid input found by the scripts themselves: a one-line error with the flag and the remedy.

The exit code is 1, or 75 for an error that may pass.
"""

import json
import shutil
import socket
import sys
from contextlib import closing
from pathlib import Path

import pytest

import run_custom_trainer
import run_evaluator
import run_trainer
import run_training_monitor
from cotrain.common.errors import TEMPORARY, run_script
from tests.support.peers import LOCAL, TINY_ALBERT, local_peer

UNKNOWN_PEERS = (
    "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
    "QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC",
    "QmSoLPppuBtQSGwKDZT2M73ULpjvfd3aZ6ha4oFGL1KrGM",
)

PEER = f"/ip4/127.0.0.1/tcp/9/p2p/{UNKNOWN_PEERS[0]}"


@pytest.fixture
def run(monkeypatch, capsys, tmp_path, data):
    """Run the main function of a script in this process; return its one-line error. The exit code is 1 by default."""
    monkeypatch.setattr(
        "cotrain.peer.run_config.setup_logging", lambda debug=False: None
    )  # keep the logging of the tests

    def run(script, *args: object, code: int = 1) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [script.__name__ + ".py", *map(str, args)])
        with pytest.raises(SystemExit) as exit_info:
            run_script(script.main)
        assert exit_info.value.code == code
        errors = [line for line in capsys.readouterr().err.splitlines() if ": error: " in line]
        assert len(errors) == 1
        return errors[0]

    return run


@pytest.fixture
def trainer(run, data, tmp_path):
    def trainer(code: int = 1, **flags: object) -> str:
        flags = {
            "tokenizer_path": data / "tokenizer", "dataset_path": data / "dataset", "host_maddrs": LOCAL,
            "model_name_or_path": data / "config.json", "output_dir": tmp_path / "out", **flags,
        }  # fmt: skip
        return run(run_trainer, *(part for name, value in flags.items() for part in (f"--{name}", value)), code=code)

    return trainer


def copy_dataset(data: Path, folder: Path, **changes: object) -> Path:
    """Copy the dataset; change the values of its manifest, or without changes delete that."""
    path = shutil.copytree(data / "dataset", folder / "copy") / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}), encoding="utf-8")
    if not changes:
        path.unlink()
    return path.parent


def write(path: Path, content: str | dict) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}


# The flags, from the folders of the data and of the test, and words of the error.
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (lambda data, _: {"tokenizer_path": "nowhere"}, "--tokenizer_path 'nowhere' tokenize_wikitext103.py"),
        (lambda data, tmp: {"tokenizer_path": tmp}, "--tokenizer_path"),
        (lambda data, _: {"dataset_path": "nowhere"}, "--dataset_path 'nowhere' tokenize_wikitext103.py"),
        (lambda data, tmp: {"dataset_path": copy_dataset(data, tmp)}, "manifest.json"),
        (lambda data, tmp: {"dataset_path": copy_dataset(data, tmp, tokenizer_sha256="0" * 64)}, "--tokenizer_path"),
        (lambda data, tmp: {"model_name_or_path": write(tmp / "gpt2.json", GPT2)}, "--model_name_or_path clm mlm_sop"),
        (
            lambda data, _: {"model_name_or_path": "no/such-model"},
            "--model_name_or_path no/such-model albert-large-v2",
        ),
        (lambda data, tmp: {"model_name_or_path": write(tmp / "broken.json", "{")}, "--model_name_or_path"),
        (lambda data, tmp: {"model_name_or_path": write(tmp / "t5.json", {"model_type": "t5"})}, "t5"),
        (
            lambda data, tmp: {
                "model_name_or_path": write(tmp / "c.json", {**TINY_ALBERT, "max_position_embeddings": 16})
            },
            "32 16",
        ),
        (lambda data, _: {"seq_length": 64}, "--seq_length 64"),
        (lambda data, _: {"target_batch_size": 7}, "--target_batch_size 7 8"),
        (lambda data, tmp: {"identity_path": write(tmp / "bad.key", "garbage")}, "--identity_path bad.key"),
        (lambda data, tmp: {"output_dir": write(tmp / "file", "")}, "file"),
        (lambda data, _: {"tunnel": "ngrok"}, "--tunnel NGROK_AUTHTOKEN"),
    ],
)
def test_error_names_the_flag_and_the_remedy(trainer, data, tmp_path, monkeypatch, flags, words):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.delenv("NGROK_AUTHTOKEN", raising=False)
    for name in ("HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    message = trainer(**flags(data, tmp_path))
    assert all(word in message for word in words.split()), message


@pytest.mark.peers
def test_port_that_is_in_use(trainer):
    with closing(socket.socket()) as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert "--host_maddrs" in trainer(host_maddrs=f"/ip4/127.0.0.1/tcp/{port}")


@pytest.mark.peers
def test_one_good_initial_peer_among_bad_ones_is_enough(trainer, tmp_path):
    """The bad ones: a closed port, a port whose program never answers, another peer's address, an unknown host."""
    with closing(socket.socket()) as silent, local_peer(tmp_path / "good", "albert") as peer:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        good = str(peer.dht.get_visible_maddrs()[0])
        bad = (
            f"/ip4/127.0.0.1/tcp/9/p2p/{UNKNOWN_PEERS[0]}",
            f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{UNKNOWN_PEERS[1]}",
            good.replace(good.split("/")[-1], UNKNOWN_PEERS[2]),
            f"/dns4/no-such-host.invalid/tcp/9/p2p/{UNKNOWN_PEERS[2]}",
        )
        message = trainer(TEMPORARY, initial_peers=",".join(bad), bootstrap_timeout=15)
        assert all(word in message for word in ("--initial_peers", *bad))
        with local_peer(tmp_path / "joiner", "albert", (*bad, good)) as joiner:
            assert joiner.dht.is_alive()


def test_monitor_and_evaluator(run, tmp_path):
    flags = ("--tokenizer_path", "nowhere", "--output_dir", tmp_path / "out")
    assert "--tokenizer_path" in run(run_training_monitor, *flags)
    assert "--initial_peers is missing" in run(run_evaluator)


ORGANISER = "pip install -r requirements-organiser.txt"


@pytest.mark.parametrize(
    ("script", "flags", "module", "remedy"),
    [
        (run_training_monitor, "--wandb_project x", "wandb", ORGANISER),
        (run_training_monitor, "--report_to wandb", "wandb", ORGANISER),
        (run_training_monitor, "--report_to trackio", "trackio", ORGANISER),
        (run_training_monitor, "--space_id me/curves", "trackio", ORGANISER),
        (run_training_monitor, "--report_to tensorboard", "tensorboard", "pip install tensorboard"),
        (run_training_monitor, "--tunnel ngrok", "ngrok", "pip install ngrok=="),
        (run_evaluator, f"--wandb_project x --initial_peers {PEER}", "wandb", ORGANISER),
        (run_trainer, "--tunnel ngrok", "ngrok", "pip install ngrok=="),
        (run_trainer, f"--tunnel ngrok --initial_peers {PEER}", "ngrok", "pip install ngrok=="),
        (run_custom_trainer, "--tunnel ngrok", "ngrok", "pip install ngrok=="),
    ],
)
def test_package_that_a_flag_needs_is_named_before_anything_else(run, tmp_path, monkeypatch, script, flags, module,
                                                                 remedy):  # fmt: skip
    monkeypatch.setitem(sys.modules, module, None)
    message = run(script, *flags.split(), "--output_dir", tmp_path / "out")
    assert f" {module}: {module} is not installed: {remedy}" in message
    assert not (tmp_path / "out").exists()


def test_check_shows_a_missing_package(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ngrok", None)
    monkeypatch.setattr(sys, "argv", ["run_trainer.py", "--check", "--tunnel", "ngrok"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        run_trainer.main()
    assert "FAILED  joining: --tunnel ngrok: ngrok is not installed: pip install ngrok==" in capsys.readouterr().out


def test_upload_without_a_token(run, data, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    message = run(
        run_training_monitor, "--repo_id", "me/model", "--tokenizer_path", data / "tokenizer", "--model_name_or_path",
        data / "config.json", "--output_dir", tmp_path / "out",
    )  # fmt: skip
    assert "--repo_id" in message and "hf auth login" in message and "HF_TOKEN" in message


def test_unavailable_public_address(run, data, tmp_path):
    message = run(
        run_training_monitor, "--no_store_checkpoints", "--use_google_dns", "--public_ip_service",
        "http://127.0.0.1:9/", "--output_dir", tmp_path / "out", code=TEMPORARY,
    )  # fmt: skip
    assert "--use_google_dns" in message and "--announce_maddrs" in message
