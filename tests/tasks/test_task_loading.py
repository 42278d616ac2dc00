"""The file of --task: what it must have, and one line for what is wrong with it."""

import re
import sys

import pytest
import torch

import run_trainer
import run_training_monitor
from arguments import ModelArguments
from cotrain import Task
from cotrain.common.errors import UserError, describe, run_script
from cotrain.monitoring.samples import open_completer
from cotrain.tasks.task_loading import build_initial_model, load_samples, read_task
from tests.support.engine import CONFIG
from tests.support.fakes import make_text_task
from tests.support.peers import LOCAL

HEAD = "import torch\nfrom cotrain import Task\n\n"
GOOD = f"""{HEAD}class Mine(Task):
    def build_model(self):
        return torch.nn.Linear(2, 1)

    def load_samples(self, split):
        return [1.0, 2.0, 3.0, 4.0]
"""


@pytest.fixture
def write(tmp_path):
    """Return a function that writes the file of a task."""

    def write(text: str):
        (tmp_path / "mine.py").write_text(text, encoding="utf-8")
        return tmp_path / "mine.py"

    return write


def test_initial_weights_are_equal_on_all_peers_of_a_run_alone(write):
    one, two, other = (build_initial_model(read_task(write(GOOD)), run_id) for run_id in ("run", "run", "other"))
    assert one.weight.equal(two.weight) and not one.weight.equal(other.weight)
    state = torch.get_rng_state()
    build_initial_model(read_task(write(GOOD)), "run")
    assert torch.get_rng_state().equal(state), "each peer keeps random numbers of its own"


def test_changed_file_is_read_again_and_has_another_digest(write):
    """Python's compiled files are found by size and second."""
    first = ModelArguments(task=str(write(GOOD))).task_sha256
    read_task(write(GOOD))
    path = write(GOOD.replace("Linear(2, 1)", "Linear(3, 1)"))
    assert build_initial_model(read_task(path), "run").in_features == 3
    second = ModelArguments(task=str(path)).task_sha256
    assert second != first
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))  # as Git for Windows does
    assert ModelArguments(task=str(path)).task_sha256 == second


def test_parameters_are_float32(write):
    path = write(GOOD.replace("Linear(2, 1)", "Linear(2, 1).half()"))
    assert build_initial_model(read_task(path), "run").weight.dtype == torch.float32


IMPORTED = GOOD.replace("class Mine(Task)", "from examples.digits import Digits\nclass Mine(Task)")


@pytest.mark.parametrize("text", [GOOD, IMPORTED, GOOD.replace("(Task):", "(Task, dict):")])
def test_one_subclass_of_its_own_is_the_task(write, text):
    assert type(read_task(write(text))).__name__ == "Mine"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("def f(:\n", r"SyntaxError.*mine.py, line 1"),
        ("x = 1\n\nx.y\n", r"AttributeError in '.*mine.py', line 3: 'int' object"),
        ("import no_such_package\n", r"ModuleNotFoundError in .*line 1: No module named 'no_such_package'"),
        (HEAD, "defines 0 subclasses of cotrain.Task; it must define one"),
        (GOOD + "\nclass Other(Task):\n    pass\n", "defines 2 subclasses of cotrain.Task"),
        (GOOD.replace("    def build", "    def __init__(self, size):\n        pass\n\n    def build"), "TypeError"),
        (f"{HEAD}class Mine(Task):\n    pass\n", "NotImplementedError.*: build_model is missing"),
        (GOOD.replace("torch.nn.Linear(2, 1)", "1 / 0"), r"ZeroDivisionError in '.*mine.py', line 6"),
        (
            GOOD.replace("torch.nn.Linear(2, 1)", "'model'"),
            "build_model must return a torch.nn.Module",
        ),
        (GOOD.replace("torch.nn.Linear(2, 1)", "torch.nn.ReLU()"), "with parameters to train"),
        (GOOD.replace("[1.0, 2.0, 3.0, 4.0]", "[]"), "load_samples has no samples of the split 'train'"),
        (GOOD.replace("[1.0, 2.0, 3.0, 4.0]", "split.x"), r"AttributeError in '.*mine.py', line 9"),
    ],
)
def test_fault_of_the_file_is_one_line(write, text, fault):
    with pytest.raises(Exception) as error:
        task = read_task(write(text))
        build_initial_model(task, "run")
        load_samples(task, "train")
    message = describe(error.value)
    assert re.search(fault, message) and "\n" not in message


@pytest.mark.parametrize("script", [run_trainer, run_training_monitor])
@pytest.mark.parametrize("debug", [False, True])
def test_script_ends_with_one_line_and_with_debug_the_traceback(write, script, debug, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(
        "cotrain.peer.adoption.setup_logging", lambda debug=False: None
    )  # keep the logging of the tests
    path = write(GOOD.replace("torch.nn.Linear(2, 1)", "1 / 0"))
    words = ["--task", str(path), "--host_maddrs", LOCAL, "--output_dir", str(tmp_path), *["--debug"] * debug]
    monkeypatch.setattr(sys, "argv", ["script.py", *words])
    with pytest.raises(SystemExit) as exit_info:
        run_script(script.main)
    error = capsys.readouterr().err
    assert exit_info.value.code == 1
    assert ("Traceback" in error) == debug
    assert (
        f"script.py: error: ZeroDivisionError in '{path}', line 6: division by zero (--debug shows where)\n" in error
    )


def test_texts_need_a_language_model(write):
    with pytest.raises(UserError, match="--sample_text completes texts by a language model: drop it"):
        open_completer(read_task(write(GOOD)), torch.nn.Linear(1, 1), ["a text"])


def test_defaults_of_the_interface(tmp_path):
    class Output:
        loss = torch.tensor(2.0)

    task = Task()
    assert task.collate([{"x": 1.0}, {"x": 2.0}])["x"].tolist() == [1.0, 2.0]
    assert task.evaluate(lambda x: Output, {"x": 1}) == {"loss": Output.loss}
    task.save_pretrained(torch.nn.Linear(1, 1), tmp_path)
    assert not list(tmp_path.iterdir())


def test_peer_without_data_loads_no_samples():
    """A monitor has a task, and no --dataset_path."""
    with pytest.raises(UserError, match="--dataset_path is missing"):
        make_text_task(CONFIG).load_samples("train")
