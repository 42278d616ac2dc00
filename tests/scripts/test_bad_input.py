"""Invalid input found by the scripts themselves: a one-line error with the flag and the remedy.

The exit code is 1, or 75 for an error that may pass.
"""

import json
import shutil
import socket
import sys
import threading
from contextlib import closing

import pytest

import run_evaluator
import run_trainer
import run_training_monitor
from lib.common.errors import TEMPORARY, run_script
from tests.support.peers import LOCAL, TINY_ALBERT, local_peer

UNKNOWN_PEER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


@pytest.fixture
def run(monkeypatch, capsys, tmp_path, data):
    """Run the main function of a script in this process; return its one-line error. The exit code is 1 by default."""
    monkeypatch.setattr("lib.common.logs.setup_logging", lambda debug=False: None)  # keep the logging of the tests

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


def write_config(path, **changes):
    path.write_text(json.dumps({**TINY_ALBERT, **changes}))
    return path


def test_evaluator_without_initial_peers(run):
    assert "--initial_peers is missing" in run(run_evaluator)


def test_missing_tokenizer(trainer):
    message = trainer(tokenizer_path="nowhere")
    assert "--tokenizer_path" in message and "'nowhere'" in message and "tokenize_wikitext103.py" in message


def test_folder_without_a_tokenizer(trainer, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "--tokenizer_path" in trainer(tokenizer_path=tmp_path / "empty")


def test_missing_dataset(trainer):
    message = trainer(dataset_path="nowhere")
    assert "--dataset_path" in message and "'nowhere'" in message and "tokenize_wikitext103.py" in message


def test_dataset_without_a_manifest(trainer, data, tmp_path):
    shutil.copytree(data / "dataset", tmp_path / "copy")
    (tmp_path / "copy" / "manifest.json").unlink()
    assert "manifest.json" in trainer(dataset_path=tmp_path / "copy")


def test_dataset_of_another_tokenizer(trainer, data, tmp_path):
    shutil.copytree(data / "dataset", tmp_path / "copy")
    path = tmp_path / "copy" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_sha256": "0" * 64}))
    assert "--tokenizer_path" in trainer(dataset_path=tmp_path / "copy")


def test_dataset_of_another_objective(trainer, tmp_path):
    config = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
    (tmp_path / "gpt2.json").write_text(json.dumps(config))
    message = trainer(model_name_or_path=tmp_path / "gpt2.json")
    assert "--model_name_or_path" in message and "clm" in message and "mlm_sop" in message


def test_missing_model(trainer, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = trainer(model_name_or_path="no/such-model")
    assert "--model_name_or_path" in message and "no/such-model" in message and "albert-large-v2" in message


def test_config_that_is_no_json(trainer, tmp_path):
    (tmp_path / "broken.json").write_text("{")
    assert "--model_name_or_path" in trainer(model_name_or_path=tmp_path / "broken.json")


def test_model_of_a_family_that_is_not_supported(trainer, tmp_path):
    (tmp_path / "t5.json").write_text(json.dumps({"model_type": "t5"}))
    assert "t5" in trainer(model_name_or_path=tmp_path / "t5.json")


def test_sequences_longer_than_the_model_has_positions(trainer, tmp_path):
    message = trainer(model_name_or_path=write_config(tmp_path / "short.json", max_position_embeddings=16))
    assert "32 tokens" in message and "16 positions" in message


def test_sequence_length_that_the_data_does_not_have(trainer):
    assert "--seq_length 64" in trainer(seq_length=64)


def test_fp16_on_a_cpu(trainer):
    assert "--fp16" in trainer(fp16=True, use_cpu=True)


def test_target_batch_size_below_one_local_step(trainer):
    message = trainer(target_batch_size=7)
    assert "--target_batch_size 7" in message and "8 samples" in message.replace("8, the samples", "8 samples")


def test_identity_that_is_none(trainer, tmp_path):
    (tmp_path / "bad.key").write_bytes(b"garbage")
    message = trainer(identity_path=tmp_path / "bad.key")
    assert "--identity_path" in message and "bad.key" in message


def test_output_dir_that_is_a_file(trainer, tmp_path):
    (tmp_path / "file").write_text("")
    assert "file" in trainer(output_dir=tmp_path / "file")


@pytest.mark.peers
def test_port_that_is_in_use(trainer):
    with closing(socket.socket()) as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert "--host_maddrs" in trainer(host_maddrs=f"/ip4/127.0.0.1/tcp/{port}")


@pytest.mark.peers
def test_peers_that_do_not_answer(trainer):
    peer = f"/ip4/127.0.0.1/tcp/9/p2p/{UNKNOWN_PEER}"
    message = trainer(TEMPORARY, initial_peers=peer, bootstrap_timeout=4)
    assert "--initial_peers" in message and peer in message


@pytest.mark.peers
def test_peer_with_another_id_than_its_address_says(trainer, tmp_path):
    with local_peer(tmp_path / "peer", "albert") as peer:
        address = str(peer.dht.get_visible_maddrs()[0])
        wrong = address.replace(address.split("/")[-1], UNKNOWN_PEER)
        assert wrong in trainer(TEMPORARY, initial_peers=wrong, bootstrap_timeout=4)


@pytest.mark.peers
def test_peer_that_accepts_and_does_not_respond(trainer):
    """The port is open, but no process responds."""
    with closing(socket.socket()) as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        threading.Thread(target=silent.accept, daemon=True).start()
        peer = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{UNKNOWN_PEER}"
        assert "--initial_peers" in trainer(TEMPORARY, initial_peers=peer, bootstrap_timeout=6)


@pytest.mark.peers
def test_one_good_peer_among_bad_ones_is_enough(tmp_path):
    with closing(socket.socket()) as silent, local_peer(tmp_path / "good", "run") as good:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        peers = (
            f"/ip4/127.0.0.1/tcp/9/p2p/{UNKNOWN_PEER}",
            f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC",
            "/dns4/no-such-host.invalid/tcp/9/p2p/QmSoLPppuBtQSGwKDZT2M73ULpjvfd3aZ6ha4oFGL1KrGM",
            str(good.dht.get_visible_maddrs()[0]),
        )
        with local_peer(tmp_path / "joiner", "run", peers) as joiner:
            assert joiner.dht.is_alive()


def test_tunnel_without_a_token(trainer, monkeypatch, tmp_path):
    monkeypatch.delenv("NGROK_AUTHTOKEN", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    message = trainer(tunnel="ngrok")
    assert "--tunnel" in message and "NGROK_AUTHTOKEN" in message


def test_monitor_without_a_tokenizer(run, tmp_path):
    message = run(run_training_monitor, "--tokenizer_path", "nowhere", "--output_dir", tmp_path / "out")
    assert "--tokenizer_path" in message


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
        "http://127.0.0.1:9/", "--output_dir", tmp_path / "out",
    )  # fmt: skip
    assert "--use_google_dns" in message and "--announce_maddrs" in message
