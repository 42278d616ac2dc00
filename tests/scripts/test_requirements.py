"""Requirements: data preparation, trainers, monitor and evaluator run without the organiser's packages, and a script
that needs one prints how to install it."""

import importlib
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from lib.common.errors import ORGANISER_MODULES, UserError
from lib.monitoring.trackers import build_reporters
from tests.support.launcher import Launcher
from tests.support.peers import ROOT, Script, local_peer

VOLUNTEER = ROOT / "tests" / "support" / "volunteer.py"
INSTALL = "pip install -r requirements-organiser.txt"


def read_requirements(name: str) -> list[str]:
    lines = (line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines())
    return [line for line in lines if line]


@pytest.fixture(scope="module")
def volunteers(tmp_path_factory) -> Iterator[Launcher]:
    """Return a launcher without the organiser's packages: all its imports are those of a volunteer."""
    launcher = Launcher(tmp_path_factory.mktemp("volunteers") / "launcher.log", wrappers=[VOLUNTEER])
    yield launcher
    launcher.close()


@pytest.fixture
def run_as_volunteer(volunteers, tmp_path):
    """Return a function that runs a script to its end without the organiser's packages."""

    def run(name: str, *args: object) -> Script:
        assert volunteers.can_start({})
        script = Script(name, *args, log=tmp_path / "script.log", launcher=volunteers)
        script.wait(300)
        return script

    return run


def test_each_list_builds_on_the_one_before():
    trainer, organiser = read_requirements("requirements.txt"), read_requirements("requirements-organiser.txt")
    assert organiser[0] == "-r requirements.txt"
    assert read_requirements("requirements-dev.txt")[0] == "-r requirements-organiser.txt"
    assert {line.split("==")[0] for line in organiser[1:]} == ORGANISER_MODULES
    assert not {line.split("==")[0] for line in trainer} & ORGANISER_MODULES


@pytest.mark.parametrize("script", ["run_trainer.py", "run_custom_trainer.py"])
def test_trainer_loads_its_data_without_the_organisers_packages(data, run_as_volunteer, script):
    flags = ("--tokenizer_path", data / "tokenizer", "--dataset_path", data / "dataset",
             "--model_name_or_path", data / "config.json", "--seq_length", 7)  # fmt: skip
    result = run_as_volunteer(script, *flags)
    assert "--seq_length 7: the data has sequences of" in result.output, (
        "everything is imported before the data is read"
    )
    assert result.process.returncode == 1


@pytest.mark.peers
def test_evaluator_loads_its_data_without_the_organisers_packages(data, run_as_volunteer, tmp_path):
    with local_peer(tmp_path / "peer", "run") as peer:
        result = run_as_volunteer(
            "run_evaluator.py", "--tokenizer_path", data / "tokenizer", "--dataset_path", tmp_path / "none",
            "--model_name_or_path", data / "config.json", "--run_id", "run", "--initial_peers",
            peer.dht.get_visible_maddrs()[0],
        )  # fmt: skip
    assert "--dataset_path: there is no folder" in result.output, "found after all imports"
    assert result.process.returncode == 1


def test_monitor_starts_without_the_organisers_packages(run_as_volunteer):
    result = run_as_volunteer("run_training_monitor.py", "--client_mode")
    assert "--client_mode: peers join through the monitor" in result.output, "found after all imports"
    assert result.process.returncode == 1


@pytest.mark.programs
def test_data_is_prepared_without_the_organisers_packages(tmp_path):
    flags = ("--sample", "--train_tokenizer", "--vocab_size", "1000")
    command = [sys.executable, VOLUNTEER, "tokenize_wikitext103.py", *flags]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0 and (tmp_path / "data" / "tokenizer").is_dir(), result.stderr


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_missing_dashboard_is_a_warning_with_the_command(tmp_path, monkeypatch, caplog, name):
    monkeypatch.setitem(sys.modules, name, None)
    with caplog.at_level(logging.WARNING):
        build_reporters(tmp_path, "r", name).close()
    assert f"{name} is not installed: {INSTALL}" in caplog.text


def test_missing_boto3_is_one_line_in_the_notebook(monkeypatch):
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.delitem(sys.modules, "deploy.aws", raising=False)
    with pytest.raises(UserError, match=f"boto3 is not installed: {INSTALL}"):
        importlib.import_module("deploy.aws")
