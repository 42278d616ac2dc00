"""Requirements: data preparation, trainers, monitor and evaluator run without the organiser's packages, and a script
that needs one prints how to install it."""

import importlib
import logging
import sys

import pytest

from lib.common.errors import ORGANISER_MODULES, UserError
from lib.monitoring.reporters import Reporters
from tests.support.peers import ROOT, Script, local_peer

INSTALL = "pip install -r requirements-organiser.txt"


def read_requirements(name: str) -> list[str]:
    lines = (line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines())
    return [line for line in lines if line]


@pytest.fixture
def run_as_volunteer(launcher, tmp_path):
    """Return a function that runs a script to its end without the organiser's packages, and returns its output."""

    def run(name: str, *args: object, code: int = 1) -> str:
        script = Script("tests/support/volunteer.py", name, *args, log=tmp_path / "script.log", launcher=launcher)
        assert script.wait(300) == code, script.output
        return script.output

    return run


def test_each_list_builds_on_the_one_before():
    trainer, organiser = read_requirements("requirements.txt"), read_requirements("requirements-organiser.txt")
    assert organiser[0] == "-r requirements.txt"
    assert read_requirements("requirements-dev.txt")[0] == "-r requirements-organiser.txt"
    assert {line.split("==")[0] for line in organiser[1:]} == ORGANISER_MODULES
    assert not {line.split("==")[0] for line in trainer} & ORGANISER_MODULES


# Each script finds the wrong flag after all its imports.
SEQ_LENGTH = ("--seq_length 7 --dataset_path DATA/dataset", "--seq_length 7: the data has sequences of")


@pytest.mark.parametrize(
    ("script", "flags", "error"),
    [
        ("run_trainer.py", *SEQ_LENGTH),
        ("run_custom_trainer.py", *SEQ_LENGTH),
        ("run_training_monitor.py", "--client_mode", "--client_mode: peers join through the monitor"),
    ],
)
def test_trainer_and_monitor_start_without_the_organisers_packages(data, run_as_volunteer, script, flags, error):
    flags = f"--tokenizer_path DATA/tokenizer --model_name_or_path DATA/config.json {flags}"
    assert error in run_as_volunteer(script, *flags.replace("DATA", str(data)).split())


@pytest.mark.peers
def test_evaluator_loads_its_data_without_the_organisers_packages(data, run_as_volunteer, tmp_path):
    with local_peer(tmp_path / "peer", "run") as peer:
        output = run_as_volunteer(
            "run_evaluator.py", "--tokenizer_path", data / "tokenizer", "--dataset_path", tmp_path / "none",
            "--model_name_or_path", data / "config.json", "--run_id", "run", "--initial_peers",
            peer.dht.get_visible_maddrs()[0],
        )  # fmt: skip
    assert "--dataset_path: there is no folder" in output, "found after all imports"


def test_data_is_prepared_without_the_organisers_packages(run_as_volunteer, tmp_path):
    run_as_volunteer("tokenize_wikitext103.py", "--sample", "--train_tokenizer", "--vocab_size", 1000, code=0)
    assert (tmp_path / "data" / "tokenizer").is_dir()


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_missing_dashboard_is_a_warning_with_the_command(tmp_path, monkeypatch, caplog, name):
    monkeypatch.setitem(sys.modules, name, None)
    with caplog.at_level(logging.WARNING):
        Reporters(tmp_path, "r", name).close()
    assert f"{name} is not installed: {INSTALL}" in caplog.text


def test_missing_boto3_is_one_line_in_the_notebook(monkeypatch):
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.delitem(sys.modules, "deploy.aws", raising=False)
    with pytest.raises(UserError, match=f"boto3 is not installed: {INSTALL}"):
        importlib.import_module("deploy.aws")
