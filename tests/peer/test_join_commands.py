"""Each command that joins a run, in a script, page or notebook, is accepted by a run with its own settings."""

import json
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hivemind.utils.crypto import RSAPrivateKey

import run_trainer
from arguments import TRAINER_ARGUMENTS, ModelArguments
from cotrain.common.argument_parser import ArgumentParser, CommandLine
from cotrain.common.errors import UserError
from cotrain.models.hub import build_hub_options
from cotrain.models.model import read_config
from cotrain.peer import adoption
from cotrain.peer.adoption import Entry, find_run_config
from cotrain.peer.signed_settings import SETTINGS, TASK, RunConfig
from deploy.aws import Deployment
from run_evaluator import ARGUMENTS as EVALUATOR_ARGUMENTS
from run_training_monitor import ARGUMENTS as MONITOR_ARGUMENTS
from tests.scripts.test_readme import ADDRESS, PEER_ID, read_script_calls
from tests.support.aws import make_settings
from tests.support.peers import TINY_ALBERT
from tests.support.processes import ROOT

ORGANISER = RSAPrivateKey()
JOINING = {
    "run_trainer.py": TRAINER_ARGUMENTS,
    "run_custom_trainer.py": TRAINER_ARGUMENTS,
    "run_evaluator.py": EVALUATOR_ARGUMENTS,
    "run_training_monitor.py": MONITOR_ARGUMENTS,
}
# No default, nor a value that a command in the documents states
RUN = {"run_id": "my-albert", "target_batch_size": 2048, "learning_rate": 0.0123, "local_updates": True,
       "mlm_probability": 0.25, "averaging_timeout": 77.0, "state_compression": "none"}  # fmt: skip


def read_documents() -> Iterator[tuple[str, str, list[str]]]:
    for path in [*ROOT.glob("*.py"), ROOT / "README.md", *ROOT.glob("deploy/*.service")]:
        text = re.sub(
            r"\\\n|\n +(?=--)", " ", path.read_text(encoding="utf-8").replace("/p2p/XXXX", f"/p2p/{PEER_ID}")
        )
        for script, words in re.findall(
            r"(run_\w+\.py) +(--[^`\n]*--initial_peers [^`\n]*|--initial_peers /[^`\n]*)", text
        ):
            yield path.name, script, shlex.split(words)
    for page, script, words in read_script_calls():
        if script in JOINING and "--initial_peers" in words:
            yield page, script, words


COMMANDS = [*read_documents()]
assert {place for place, _, _ in COMMANDS} >= {"trainer.service", "README.md", "deploy_on_aws.ipynb", "running.md"}


@pytest.fixture
def adopt(monkeypatch, tmp_path) -> Callable[[dict, str, list[str]], Entry]:
    """Return a function for the arguments that a script's command leads to in a run with some settings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cotrain.common.hub_cache.probe", lambda *_args: True)
    Path("examples").symlink_to(ROOT / "examples")
    Path("chats.jsonl").touch()
    Path("alice.invitation").write_text('{"token": ""}', encoding="utf-8")

    def adopt(run: dict, script: str, words: list[str]) -> Entry:
        config = RunConfig.sign(run, ORGANISER)
        monkeypatch.setattr(adoption, "visit_run", lambda *_args: config)
        return find_run_config(parse(script, [*words, "--output_dir", str(tmp_path)]), stop=None)

    return adopt


def parse(script: str, words: list[str]) -> CommandLine:
    return ArgumentParser(JOINING[script], "test").parse(words)


def settings_in(arguments: tuple) -> dict[str, object]:
    return {name: getattr(args, name) for args in arguments for name in SETTINGS if hasattr(args, name)}


@pytest.mark.parametrize(("place", "script", "words"), COMMANDS, ids=[place for place, _, _ in COMMANDS])
def test_command_takes_the_settings_of_the_run(adopt, place, script, words):
    line = parse(script, words)
    stated = {name: value for name, value in line.values.items() if name in SETTINGS}
    (digest,) = [args.task_sha256 for args in line.arguments if isinstance(args, ModelArguments)]
    run = {**RUN, **stated, **({} if digest is None else {TASK: digest})}
    taken = settings_in(adopt(run, script, words).arguments)
    assert "learning_rate" in taken
    assert {name: taken[name] for name in taken.keys() & run} == {name: run[name] for name in taken.keys() & run}


def test_aws_trainers_take_the_settings_in_the_monitors_flags(adopt):
    flags = "--target_batch_size 2048 --learning_rate 0.0123"
    deployment = Deployment(make_settings(run_id="my-albert", monitor_flags=flags))
    parameters = deployment.parameters()
    monitor_flags, trainer_flags = (shlex.split(parameters[f"{role}Flags"]) for role in ("Coordinator", "Trainer"))
    stated = ArgumentParser(MONITOR_ARGUMENTS, "test").parse(monitor_flags).values
    taken = settings_in(adopt(stated, "run_trainer.py", ["--initial_peers", ADDRESS, *trainer_flags]).arguments)
    assert (taken["run_id"], taken["target_batch_size"], taken["learning_rate"]) == ("my-albert", 2048, 0.0123)


def test_model_in_a_file_travels_with_the_settings(adopt, tmp_path):
    path, other = tmp_path / "config.json", tmp_path / "other.json"
    path.write_text(json.dumps({**TINY_ALBERT, "auto_map": {"AutoModel": "me/code--x.Y"}}), encoding="utf-8")
    other.write_text(json.dumps({**TINY_ALBERT, "hidden_size": 48}), encoding="utf-8")
    run, joining = {**RUN, "model_name_or_path": str(path)}, ["--initial_peers", ADDRESS]
    _, dataset_args, *_ = adopt(run, "run_trainer.py", joining).arguments
    config = read_config(dataset_args.model_name_or_path)
    assert config.hidden_size == TINY_ALBERT["hidden_size"] and not hasattr(config, "auto_map")
    adopt(run, "run_trainer.py", [*joining, "--model_name_or_path", str(path)])  # the same file
    with pytest.raises(UserError, match=r"--model_name_or_path is .*other\.json here and .*: drop the flag"):
        adopt(run, "run_trainer.py", [*joining, "--model_name_or_path", str(other)])


@pytest.mark.parametrize("flag", ["--dataset_url", "--model_name_or_path"])
def test_less_trust_in_what_the_volunteer_has_not_typed(adopt, flag):
    run = {**RUN, "dataset_url": "http://169.254.169.254/data.tar.gz", "model_name_or_path": "name/model"}
    name, joining = flag.removeprefix("--"), ["--initial_peers", ADDRESS]
    entry = adopt(run, "run_trainer.py", joining)
    assert name in entry.adopted.names and list(map(str, entry.adopted.near)) == [ADDRESS.split("/")[2]]
    strict = {"token": False, "use_safetensors": True, "trust_remote_code": False}
    assert build_hub_options(entry.arguments[1], entry.adopted) == strict | {
        "cache_dir": "data/cache",
        "local_files_only": False,
    }
    entry = adopt(run, "run_trainer.py", [*joining, flag, run[name]])
    dataset_args = entry.arguments[1]
    assert dataset_args.dataset_url == run["dataset_url"] and name not in entry.adopted.names
    assert ("token" in build_hub_options(dataset_args, entry.adopted)) == (name == "dataset_url")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["/ip4/203.0.113.1/tcp/1/p2p/Qm", "--client_mode"],
         ["--initial_peers", "/ip4/203.0.113.1/tcp/1/p2p/Qm", "--client_mode"]),
        (["--status"], ["--status"]),
        ([], []),
    ],
)  # fmt: skip
def test_installed_command_takes_the_address_alone(monkeypatch, words, expected):
    """`cotrain-join`, which pyproject.toml declares with the modules that it needs."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    module, _, function = settings["project"]["scripts"]["cotrain-join"].partition(":")
    assert {module, "arguments", "callback", "utils"} == set(settings["tool"]["setuptools"]["py-modules"])
    monkeypatch.setattr(sys, "argv", ["cotrain-join", *words])
    monkeypatch.setattr(run_trainer, "run_script", lambda main: main is run_trainer.main or pytest.fail("another"))
    getattr(sys.modules[module], function)()
    assert sys.argv[1:] == expected
