"""Settings files: each value is read as on a command line; what cannot be one is refused in one line."""

from collections.abc import Callable
from pathlib import Path

import pytest

from arguments import TRAINER_ARGUMENTS
from cotrain.common.argument_parser import ArgumentParser, KeywordParser
from cotrain.common.errors import UserError
from run_training_monitor import ARGUMENTS
from tests.support.processes import ROOT


@pytest.fixture
def parse(tmp_path) -> Callable:
    """Return a function that parses a file of this content, and more words; it returns the values of the flags."""

    def parse(content: str | bytes, *words: str, option: str = "--run_config") -> dict[str, object]:
        path = tmp_path / "run.yaml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        arguments = ArgumentParser(ARGUMENTS, "test").parse([option, str(path), *words]).arguments
        return {name: value for args in arguments for name, value in vars(args).items()}

    return parse


@pytest.mark.parametrize(
    ("content", "name", "value"),
    [
        ("target_batch_size: 010", "target_batch_size", 10),
        ("target_batch_size: 4_096", "target_batch_size", 4096),
        ("learning_rate: 1e-3", "learning_rate", 0.001),
        ("learning_rate: '0.001'", "learning_rate", 0.001),
        ("run_id: no", "run_id", "no"),
        ("run_id: 12:30", "run_id", "12:30"),
        ("run_id: 2026-11-25", "run_id", "2026-11-25"),
        ("run_id: আমার", "run_id", "আমার"),
        ("run-id: tree", "run_id", "tree"),
        ("run_id: a\nlicense: &x mit\nlanguage: *x", "language", "mit"),
        ("local_updates: no", "local_updates", False),
        ("local_updates: y", "local_updates", True),
        ("store_checkpoints: false", "store_checkpoints", False),
        ("ends_at: 2100-01-02T12:30", "ends_at", "2100-01-02T12:30"),
        ("sample_text: The [MASK] is", "sample_text", ["The [MASK] is"]),
        ("sample_text: ['A [MASK]', 'B']", "sample_text", ["A [MASK]", "B"]),
        ('{"run_id": "json", "learning_rate": 1e-3}', "run_id", "json"),
        ("\ufeffrun_id: bom\r\n", "run_id", "bom"),
        ("run_id: wide".encode("utf-16"), "run_id", "wide"),
        ("# é\nrun_id: tree", "run_id", "tree"),
    ],
)
def test_a_value_is_that_of_the_command_line(parse, content, name, value):
    found = parse(content)[name]
    assert found == value and type(found) is type(value)


def test_variables_are_meant_as_in_a_shell(parse, monkeypatch):
    """A folder called $HOME had the identity and the checkpoints."""
    monkeypatch.setenv("RUNS", "/data")
    assert parse("output_dir: $RUNS/a$b")["output_dir"] == "/data/a$b"


@pytest.mark.parametrize("option", ["--run_config", "--run-config"])
def test_the_command_line_has_the_last_word(parse, tmp_path, option):
    (tmp_path / "other.yaml").write_text("learning_rate: 0.125", encoding="utf-8")
    assert parse("learning_rate: 0.5", "--learning-rate", "0.25", option=option)["learning_rate"] == 0.25
    line = ArgumentParser(ARGUMENTS, "test").parse([f"{option}={tmp_path / 'other.yaml'}"])
    assert line.values["learning_rate"] == 0.125


def test_names_of_older_examples_are_translated_with_a_warning(parse, capsys):
    found = parse("experiment_prefix: tree\nlisten_on: '[::]:7'\nlogging_dir: logs\n")
    assert found["run_id"] == "tree" and found["host_maddrs"] == ["/ip4/0.0.0.0/tcp/7", "/ip6/::/tcp/7"]
    first, second, third = capsys.readouterr().err.splitlines()
    assert first == "warning: --experiment_prefix is now --run_id" and "--host_maddrs: /ip4" in second
    assert third.startswith("warning: --logging_dir is ignored")


@pytest.mark.parametrize(
    ("content", "culprit"),
    [
        ("learning_rate: 0.5\nlearning_rate: 0.1", "--learning_rate is stated twice"),
        ("compression: none\naveraging_compression: none", "--gradient_compression is stated twice"),
        ("model_name_or_path: gpt2\nconfig_path: gpt2", "--model_name_or_path is stated twice"),
        ("run_id: &x a\nlicense: &x b", "found duplicate anchor 'x'"),
        ("base: &x {learning_rate: 0.1}\n<<: *x\n<<: *x", "--base is nested"),
        ("lerning_rate: 0.1", "unknown argument '--lerning_rate', did you mean --learning_rate?"),
        ("--learning_rate: 0.1", "'--learning_rate' must not begin with '-'"),
        ("on: 6", "unknown argument '--on'"),
        ("max_steps: 5", "--max_steps is no longer supported"),
        ("run_config: other.yaml", "--run_config is for the command line only"),
        ("help: true", "--help is for the command line only"),
        ("no_store_checkpoints: true", "--no_store_checkpoints is for the command line only"),
        ("optimizer:\n  name: lamb", "--optimizer is nested"),
        ("sample_text: [[a]]", "--sample_text is nested"),
        ("learning_rate: [0.1, 0.2]", "--learning_rate takes one value, not a list"),
        ("run_id: !!python/object/apply:os.system ['echo']", "--run_id takes one value, not a list"),
        ("run_id:", "--run_id has no value"),
        ("run_id: --debug", "--run_id: '--debug' must not begin with '-'"),
        ("sample_text: [a, -x]", "--sample_text: '-x' must not begin with '-'"),
        ("warmup_steps: 1:30", "--warmup_steps"),
        ("target_batch_size: 4k", "--target_batch_size"),
        ("target_batch_size: 99999999999999999999999", "--target_batch_size must be at most"),
        ("learning_rate: Infinity", "--learning_rate must be at most 2147483647, got inf"),
        ("learning_rate: NaN", "--learning_rate must be above 0, got nan"),
        ("learning_rate: -0.1", "--learning_rate: '-0.1' must not begin with '-'"),
        ("local_updates: off", "--local_updates"),
        ("run_id: |\n  a\n  b\n", "--run_id must be one line"),
        ("run_id: " + "[" * 3000 + "]" * 3000, "not YAML: it is not text in UTF-8, or has hundreds of brackets"),
        ("a: [", "line 1, column 5"),
        ("run_id: a\n\tb: 1", "not YAML: line 2, column 1: a tab: write spaces"),
        ("\trun_id: a", "line 1, column 1: a tab: write spaces"),
        ("run_id: a\n---\nrun_id: b", "not YAML"),
        ("run_id: *x", "undefined alias 'x'"),
        ("- a", "must have lines such as 'run_id: my-albert'"),
        ("", "must have lines such as 'run_id: my-albert'"),
        (b"run_id: caf\xe9", "not YAML: it is not text in UTF-8"),
        (b"run_id: a\0b", "not YAML"),
    ],
)  # fmt: skip
def test_what_is_no_setting_is_refused_in_one_line(parse, capsys, content, culprit):
    with pytest.raises(SystemExit) as ended:
        parse(content)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and culprit in error and "run.yaml'" in error, error
    assert error.count("\n") == 1 and len(error) < 700, error


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (
            ["--run_config", "no/such.yaml"],
            "with --run_config 'no/such.yaml': the file cannot be read (No such",
        ),
        (["--run_config", "a.yaml", "--run_config", "b.yaml"], "--run_config takes one file"),
        (["--run_id", "a", "--run_config"], "argument --run_config/--run-config: expected one argument"),
        (["--run_config", "."], "with --run_config '.': the file cannot be read (Is a directory)"),
        (
            ["--run_config", "--debug"],
            "with --run_config '--debug': the file cannot be read (No such",
        ),
    ],
)
def test_file_that_cannot_be_read(words, fault, capsys):
    with pytest.raises(SystemExit):
        ArgumentParser(ARGUMENTS, "test").parse(words)
    error = capsys.readouterr().err
    assert fault in error and error.count("\n") == 1


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=str)
def test_files_that_come_with_the_project(path: Path):
    assert "run_id" in ArgumentParser(ARGUMENTS, "test").parse(["--run_config", str(path)]).stated


@pytest.mark.parametrize("value", ["inf", "nan", "1e999", "99999999999999999999999"])
@pytest.mark.parametrize("flag", ["learning_rate", "averaging_timeout"])
def test_numbers_on_a_command_line_are_finite(flag, value, capsys):
    with pytest.raises(SystemExit):
        ArgumentParser(TRAINER_ARGUMENTS, "test").parse([f"--{flag}", value])
    assert f"--{flag} must be" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("keywords", "fault"),
    [
        ({"learning_rate": float("inf")}, "join_run: --learning_rate must be at most"),
        ({"learning_rate": float("nan")}, "join_run: --learning_rate must be above 0"),
        ({"target_batch_size": 10**23}, "join_run: --target_batch_size must be at most"),
        ({"learning_rate": [0.1, 0.2]}, "--learning_rate takes one value, not a list"),
        ({"help": True}, "--help is for the command line only"),
        ({"run_id": "--debug"}, "join_run: argument --run_id/--run-id: expected one argument"),
        ({"run_id": "a\nb"}, "join_run: --run_id must be one line"),
    ],
)
def test_keywords_of_join_run(keywords, fault):
    with pytest.raises(UserError, match=fault):
        KeywordParser(TRAINER_ARGUMENTS, "join_run").parse_keywords(keywords)
