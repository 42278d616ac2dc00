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
from tests.support.peers import LOCAL, TINY_ALBERT, local_peer, reserve_maddr

UNKNOWN_PEERS = (
    "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
    "QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC",
    "QmSoLPppuBtQSGwKDZT2M73ULpjvfd3aZ6ha4oFGL1KrGM",
)

LEFT_OUT = object()  # value of a flag that is not passed
PEER = f"/ip4/127.0.0.1/tcp/9/p2p/{UNKNOWN_PEERS[0]}"


@pytest.fixture
def run(monkeypatch, capsys, tmp_path, data):
    """Run the main function of a script in this process with a few flags; return its one-line error."""
    quiet = "cotrain.peer.adoption.setup_logging"  # keep the logging of the tests
    monkeypatch.setattr(quiet, lambda debug=False: None)
    monkeypatch.chdir(tmp_path)

    def run(script=run_trainer, code: int = 1, **flags: object) -> str:
        flags = {
            "tokenizer_path": data / "tokenizer", "dataset_path": data / "dataset", "host_maddrs": LOCAL,
            "model_name_or_path": data / "config.json", "output_dir": tmp_path / "out", **flags,
        }  # fmt: skip
        if script is run_training_monitor:
            del flags["dataset_path"]  # it has none
        flags = {name: value for name, value in flags.items() if value is not LEFT_OUT}
        words = [word for name, value in flags.items() for word in (f"--{name}", *([] if value is None else [value]))]
        monkeypatch.setattr(sys, "argv", [script.__name__ + ".py", *map(str, words)])
        with pytest.raises(SystemExit) as exit_info:
            run_script(script.main)
        assert exit_info.value.code == code
        (error,) = (line for line in capsys.readouterr().err.splitlines() if ": error: " in line)
        return error

    return run


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
TOKEN = "--tunnel ngrok NGROK_AUTHTOKEN"
SHORT = {**TINY_ALBERT, "max_position_embeddings": 16}


# The flags, from the folders of the data and of the test, and words of the error. None: a flag without a value
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (lambda data, _: {"tokenizer_path": "nowhere"}, "--tokenizer_path 'nowhere' tokenize_wikitext103.py"),
        (lambda data, tmp: {"tokenizer_path": tmp}, "--tokenizer_path"),
        (lambda data, _: {"dataset_path": "nowhere"}, "--dataset_path 'nowhere' tokenize_wikitext103.py"),
        (lambda data, tmp: {"dataset_path": copy_dataset(data, tmp)}, "manifest.json"),
        (lambda data, tmp: {"dataset_path": copy_dataset(data, tmp, tokenizer_sha256="0" * 64)}, "--tokenizer_path"),
        (lambda data, tmp: {"model_name_or_path": write(tmp / "gpt2.json", GPT2)}, "--model_name_or_path clm mlm_sop"),
        (lambda data, _: {"model_name_or_path": "no/such"}, "--model_name_or_path no/such albert-large-v2"),
        (lambda data, tmp: {"model_name_or_path": write(tmp / "broken.json", "{")}, "--model_name_or_path"),
        (lambda data, tmp: {"model_name_or_path": write(tmp / "t5.json", {"model_type": "t5"})}, "t5"),
        (lambda data, tmp: {"model_name_or_path": write(tmp / "c.json", SHORT)}, "32 16"),
        (lambda data, _: {"task": "nowhere.py", "code": 2}, "--task nowhere.py"),
        (lambda data, _: {"seq_length": 64}, "--seq_length 64"),
        (lambda data, _: {"target_batch_size": 7, "per_device_train_batch_size": 4}, "--target_batch_size 7 8"),
        (lambda data, tmp: {"identity_path": write(tmp / "bad.key", "garbage"), "code": 2}, "--identity_path bad.key"),
        (lambda data, tmp: {"identity_path": tmp, "code": 2}, "--identity_path is not a peer's private key"),
        # A wrong token was found only after the data had been downloaded, which takes minutes.
        (lambda data, _: {"tunnel": "ngrok", "model_name_or_path": "gpt3"}, TOKEN),
        (lambda data, _: {"script": run_custom_trainer, "tunnel": "ngrok", "model_name_or_path": "gpt3"}, TOKEN),
        (lambda data, _: {"script": run_training_monitor, "tunnel": "ngrok"}, TOKEN),
        (lambda data, _: {"script": run_evaluator}, "--initial_peers is missing"),
        (lambda data, _: {"script": run_training_monitor, "tokenizer_path": "nowhere"}, "--tokenizer_path"),
        (lambda data, _: {"script": run_training_monitor, "repo_id": "me/x"}, "--repo_id hf auth login HF_TOKEN"),
        (
            lambda data, _: {
                "script": run_training_monitor, "code": TEMPORARY, "no_store_checkpoints": None,
                "use_google_dns": None, "public_ip_service": "http://127.0.0.1:9/",
            },
            "--use_google_dns --announce_maddrs",
        ),
    ],
)  # fmt: skip
def test_error_names_the_flag_and_the_remedy(run, data, tmp_path, monkeypatch, flags, words):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    for name in ("NGROK_AUTHTOKEN", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "XDG_CONFIG_HOME", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    message = run(**flags(data, tmp_path))
    assert all(word in message for word in words.split()), message


@pytest.mark.peers
def test_port_that_is_in_use(run):
    with closing(socket.socket()) as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert "--host_maddrs" in run(host_maddrs=f"/ip4/127.0.0.1/tcp/{port}")


@pytest.mark.peers
def test_port_of_another_peer(run, tmp_path, monkeypatch):
    """libp2p's sockets share it: each connection would reach one of the two."""
    monkeypatch.setattr("cotrain.peer.addresses.PORT_SECONDS", 0.5)
    maddr = reserve_maddr()
    with local_peer(tmp_path / "other", "other", host_maddrs=[maddr]):
        assert f"--host_maddrs {maddr}: the port is in use" in run(host_maddrs=maddr)


@pytest.mark.peers
def test_one_good_initial_peer_among_bad_ones_is_enough(run, tmp_path):
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
        message = run(code=TEMPORARY, initial_peers=",".join(bad), bootstrap_timeout=15)
        assert all(word in message for word in ("--initial_peers", *bad))
        with local_peer(tmp_path / "joiner", "albert", (*bad, good)) as joiner:
            assert joiner.dht.is_alive()


ORGANISER = "pip install -r requirements-organiser.txt"


@pytest.mark.parametrize(
    ("script", "flags", "module", "remedy"),
    [
        (run_training_monitor, {"wandb_project": "x"}, "wandb", "pip install -r requirements.txt"),
        (run_training_monitor, {"report_to": "wandb"}, "wandb", "pip install -r requirements.txt"),
        (run_training_monitor, {"report_to": "trackio"}, "trackio", ORGANISER),
        (run_training_monitor, {"space_id": "me/curves"}, "trackio", ORGANISER),
        (run_training_monitor, {"report_to": "tensorboard"}, "tensorboard", "pip install tensorboard"),
        (run_training_monitor, {"tunnel": "ngrok"}, "ngrok", "pip install ngrok=="),
        (run_evaluator, {"wandb_project": "x", "initial_peers": PEER}, "wandb", "pip install -r requirements.txt"),
        (run_trainer, {"tunnel": "ngrok"}, "ngrok", "pip install ngrok=="),
        (run_trainer, {"tunnel": "ngrok", "initial_peers": PEER}, "ngrok", "pip install ngrok=="),
        (run_custom_trainer, {"tunnel": "ngrok"}, "ngrok", "pip install ngrok=="),
    ],
)
def test_package_that_a_flag_needs_is_named_before_anything_else(run, tmp_path, monkeypatch, script, flags, module,
                                                                 remedy):  # fmt: skip
    monkeypatch.setitem(sys.modules, module, None)
    message = run(script, tokenizer_path="nowhere", dataset_path="nowhere", model_name_or_path="nowhere", **flags)
    (flag, value), *_ = flags.items()
    assert f"--{flag} {value}: {module} is not installed: {remedy}" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("script", [run_trainer, run_custom_trainer])
def test_trainer_without_an_address_and_data_is_told_what_it_lacks(run, script):
    message = run(script, tokenizer_path=LEFT_OUT, dataset_path=LEFT_OUT)
    assert "--initial_peers is missing" in message and "./tokenize_wikitext103.py" in message


@pytest.mark.parametrize("missing", ["--tunnel ngrok: ngrok is not installed: pip install ngrok==", "the authtoken"])
def test_check_shows_what_a_tunnel_lacks(run, tmp_path, monkeypatch, capsys, missing):
    for name in ("HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    if "not installed" in missing:
        monkeypatch.setitem(sys.modules, "ngrok", None)
    monkeypatch.delenv("NGROK_AUTHTOKEN", raising=False)
    monkeypatch.setattr("cotrain.data.tokenizers.load_tokenizer", lambda *_args, **_options: pytest.fail("loads data"))
    monkeypatch.setattr(sys, "argv", ["run_trainer.py", "--check", "--tunnel", "ngrok"])
    with pytest.raises(SystemExit):
        run_trainer.main()
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("FAILED  joining: --tunnel"))
    assert missing in line
