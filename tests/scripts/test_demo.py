"""The demo: command lines, processes, display and summary; and a complete run."""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from rich.console import Console

import run_local_demo
import run_training_monitor
from arguments import TRAINER_ARGUMENTS
from lib.common.checks import ArgumentsError
from lib.common.cli import parse_arguments
from lib.common.errors import UserError
from run_local_demo import (
    Command,
    DemoArguments,
    Result,
    View,
    Workers,
    count_rounds,
    dashboard_command,
    find_checkpoint,
    last_message,
    monitor_command,
    new_demo_folder,
    read_address,
    read_jsonl,
    tokenize_command,
    trainer_command,
)
from tests.support.peers import ROOT, Script, hold_until_all_begin, wait_until
from tokenize_wikitext103 import TokenizationArguments

ADDRESS = "/ip4/127.0.0.1/tcp/1/p2p/QmSDukXYoCmQT4ZZWhofaSyxinZHByTqDrsffZFWrMDXH1"
STEPS = [
    {"step": 1, "loss": 8.31, "performance": 139.4, "alive peers": 2},
    {"step": 2, "loss": None, "performance": 128.0, "alive peers": 2},
    {"step": 3, "loss": 7.52, "performance": 119.0, "alive peers": 2},
]


class TestCommands:
    def test_as_typed_is_what_runs(self, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        command = Command("a.py", {"train_file": "it's my file.txt", "sample": True, "n": 3}, {"A": "b c"})
        typed = command.as_typed(width=30)
        words = shlex.split(typed.replace("\\\n", ""))
        assert words == ["A=b c", os.path.relpath(ROOT / "a.py"), *command.arguments]
        assert len(typed.splitlines()) > 1

    def test_scripts_in_the_current_folder(self, monkeypatch):
        monkeypatch.chdir(ROOT)
        assert Command("a.py", {"sample": True}).as_typed() == "./a.py --sample"

    def test_monitor_and_trainers_agree(self):
        args = DemoArguments(trainers=3, max_global_steps=5, output_dir="somewhere")
        monitor = parse_arguments(run_training_monitor.ARGUMENTS, "-", monitor_command(args).arguments)
        trainers = [
            parse_arguments(TRAINER_ARGUMENTS, "-", trainer_command(args, number, ADDRESS).arguments)
            for number in (1, 2)
        ]
        monitor_args, run, peer = monitor
        training, dataset, collaboration, averager, _ = trainers[0]
        assert (run.model_name_or_path, run.tokenizer_path) == (dataset.model_name_or_path, dataset.tokenizer_path)
        assert (run.learning_rate, run.total_steps) == (training.learning_rate, training.total_steps)
        assert peer.run_id == collaboration.run_id
        assert collaboration.initial_peers == [ADDRESS]
        assert collaboration.max_global_steps == 5
        assert averager.target_group_size == 3
        assert len({monitor_args.output_dir, *(trainer[0].output_dir for trainer in trainers)}) == 3

    def test_trainers_find_the_prepared_data(self):
        args = DemoArguments()
        (tokenization,) = parse_arguments([TokenizationArguments], "-", tokenize_command(args).arguments)
        _, dataset, *_ = parse_arguments(TRAINER_ARGUMENTS, "-", trainer_command(args, 1, ADDRESS).arguments)
        assert tokenization.sample
        assert (tokenization.output_path, tokenization.tokenizer_path) == (
            dataset.dataset_path,
            dataset.tokenizer_path,
        )

    def test_custom_text(self, tmp_path):
        text = tmp_path / "my text.txt"
        text.write_text("Hello.")
        command = tokenize_command(DemoArguments(train_file=str(text), vocab_size=300))
        (tokenization,) = parse_arguments([TokenizationArguments], "-", command.arguments)
        assert (tokenization.train_file, tokenization.vocab_size, tokenization.sample) == (str(text), 300, False)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"trainers": 1}, "--trainers must be 2 or more"),
        ({"max_global_steps": 1}, "--max_global_steps must be 2 or more"),
        ({"vocab_size": 0}, "--vocab_size must be above zero"),
        ({"train_file": "missing.txt"}, "--train_file: there is no file 'missing.txt'"),
    ],
)
def test_wrong_flags(flags, message):
    with pytest.raises(ArgumentsError, match=message):
        DemoArguments(**flags)


class TestFolder:
    def test_a_new_demo_replaces_the_old_one(self, tmp_path):
        folder = tmp_path / "a" / "demo"
        with new_demo_folder(folder):
            (folder / "commands.txt").write_text("./run_trainer.py")
            (folder / "monitor").mkdir()
            (folder / "monitor.log").write_text("old")
        with new_demo_folder(folder):
            assert [path.name for path in folder.iterdir()] == ["commands.txt"]
            assert (folder / "commands.txt").read_text() == ""

    def test_nothing_else_is_replaced(self, tmp_path):
        (tmp_path / "thesis.tex").write_text("42")
        with pytest.raises(UserError, match="contains other files"), new_demo_folder(tmp_path):
            pass
        assert (tmp_path / "thesis.tex").read_text() == "42"

    def test_one_demo_at_a_time(self, tmp_path):
        with new_demo_folder(tmp_path / "demo") as folder:
            (folder / "monitor.log").touch()
            with pytest.raises(UserError, match="another demo is running"), new_demo_folder(folder):
                pass
            assert (folder / "monitor.log").exists()


class TestWorkers:
    @pytest.fixture
    def workers(self, tmp_path):
        with Workers(tmp_path, Console(quiet=True)) as workers:
            yield workers

    def script(self, folder: Path, code: str) -> Command:
        path = folder / "script.py"
        path.write_text(code)
        return Command(str(path), {})

    def test_output_goes_to_the_log_and_commands_to_a_file(self, tmp_path, workers):
        command = self.script(tmp_path, "import os; print('hello', os.environ['A'])")
        worker = workers.start("one", Command(command.script, {}, {"A": "b"}))
        workers.wait_for(lambda: not worker.is_running, 120, "its end")
        assert (tmp_path / "one.log").read_text() == "hello b\n"
        assert "A=b " in (tmp_path / "commands.txt").read_text()

    @pytest.mark.parametrize("hint", ["", r"\nWhat to do: buy one"])
    def test_a_failure_is_one_line_that_names_the_log(self, tmp_path, workers, hint):
        workers.start("bad", self.script(tmp_path, f"print('first'); exit('bad.py: error: no disk{hint}')"))
        with pytest.raises(UserError) as raised:
            workers.wait_for(lambda: False, 20, "nothing")
        assert str(raised.value) == f"bad ended with exit code 1: no disk (see {tmp_path / 'bad.log'})"

    def test_a_killed_process_is_a_failure(self, tmp_path, workers):
        worker = workers.start("sleeper", self.script(tmp_path, "import time; time.sleep(60)"))
        worker.process.kill()
        with pytest.raises(UserError, match="sleeper ended with SIGKILL"):
            workers.wait_for(lambda: False, 20, "nothing")

    def test_waiting_ends(self, tmp_path, workers):
        with pytest.raises(UserError, match="timeout: waited 0 seconds for the moon; see the logs"):
            workers.wait_for(lambda: False, 0.3, "the moon")

    def test_stop_kills_processes_that_ignore_sigterm(self, tmp_path, workers, monkeypatch):
        monkeypatch.setattr(run_local_demo, "STOP_TIMEOUT", 1.0)
        deaf = self.script(
            tmp_path,
            "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); "
            "time.sleep(60)",
        )
        all_workers = [workers.start(name, deaf) for name in ("a", "b")]
        for worker in all_workers:
            workers.wait_for(lambda worker=worker: "ready" in worker.read_log(), 120, "both")
        started = time.monotonic()
        workers.stop()
        assert time.monotonic() - started < 5
        assert not any(worker.is_running for worker in all_workers)

    @pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: the kernel ends orphans")
    def test_processes_end_with_a_killed_demo(self, tmp_path):
        sleeper = self.script(tmp_path, "import os, time; print(os.getpid(), flush=True); time.sleep(60)")
        demo = tmp_path / "demo.py"
        demo.write_text(
            "import time\nfrom pathlib import Path\nfrom rich.console import Console\n"
            "from run_local_demo import Command, Workers\n"
            f"Workers(Path({str(tmp_path)!r}), Console()).start('sleeper', Command({sleeper.script!r}, {{}}))\n"
            "time.sleep(60)\n"
        )
        with subprocess.Popen([sys.executable, demo], env={**os.environ, "PYTHONPATH": str(ROOT)}) as process:
            log = tmp_path / "sleeper.log"
            wait_until(lambda: log.exists() and log.read_text().strip(), 120, "the start of the sleeper")
            pid = int(log.read_text())
            assert psutil.pid_exists(pid)
            process.kill()
        wait_until(lambda: not psutil.pid_exists(pid), 30, "the end of the sleeper")


class TestFiles:
    def test_address(self, tmp_path):
        path = tmp_path / "peer.json"
        assert read_address(path) is None
        path.write_text(json.dumps({"initial_peers": [ADDRESS, "/ip4/127.0.0.1/udp/1"]}))
        assert read_address(path) == ADDRESS

    def test_last_message(self):
        log = "Nov 20 15:05:37.968 [INFO] Step #1\nNov 20 15:05:38.316 [WARN] Too slow\n  warnings.warn(f'{old}')\n"
        assert last_message(log) == "Too slow"
        assert last_message("Fetching\n") == "starting"

    def test_rounds_are_counted_once(self):
        def entry(step: int, group: str, outcome: str = "averaged") -> dict:
            return {"step": step, "outcome": outcome, "group": list(group)}

        pairs = [entry(1, "ab"), entry(1, "ba"), entry(2, "ab"), entry(2, "ba"), entry(3, "ab")]
        assert count_rounds([*pairs, entry(4, "abc"), entry(4, "bca"), entry(4, "cab")]) == {2: 3, 3: 1}
        assert count_rounds([entry(1, "", "alone"), entry(2, "ab", "failed")]) == {}

    def test_the_newest_checkpoint_is_by_step(self, tmp_path):
        assert find_checkpoint(tmp_path) is None
        for step in (9, 10):
            (tmp_path / f"checkpoint-{step}").mkdir()
        assert find_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")

    def test_dashboard(self, tmp_path, monkeypatch):
        monkeypatch.delenv("TRACKIO_DIR", raising=False)
        assert dashboard_command(tmp_path) is None
        (tmp_path / "trackio").mkdir()
        assert dashboard_command(tmp_path) == f"TRACKIO_DIR={tmp_path / 'trackio'} trackio show --project demo"

    def test_steps_without_the_line_that_is_being_written(self, tmp_path):
        path = tmp_path / "metrics.jsonl"
        assert read_jsonl(path) == []
        path.write_text(json.dumps(STEPS[0]) + "\n" + json.dumps(STEPS[1])[:10])
        assert read_jsonl(path) == STEPS[:1]


class TestView:
    def test_plain_lines_each_once(self, capsys):
        with View(Console(), max_global_steps=9) as view:
            view.update(STEPS[:1], {"monitor": "hello"})
            view.update(STEPS, {"monitor": "hello"})
        assert capsys.readouterr().out.splitlines() == [
            "Step 1 of 9   loss 8.310   139 samples/s   2 peers",
            "Step 2 of 9   loss unknown   128 samples/s   2 peers",
            "Step 3 of 9   loss 7.520   119 samples/s   2 peers",
        ]

    def test_table(self, capsys):
        view = View(Console(), max_global_steps=9)
        Console(width=100).print(view.make_table(STEPS))
        lines = capsys.readouterr().out.splitlines()
        assert "step of 9" in lines[0]
        assert len(lines) == 4
        assert lines[1].count("█") > lines[3].count("█") > 20

    def test_table_shows_the_newest_steps(self, capsys):
        view = View(Console(), max_global_steps=99)
        Console(width=100).print(view.make_table([{**STEPS[0], "step": number} for number in range(1, 51)]))
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 1 + View.MAX_ROWS
        assert lines[-1].split()[0] == "50"


class TestResult:
    def make(self, **changes) -> Result:
        values = {"steps": STEPS, "rounds": Counter({2: 3}), "checkpoint": "demo/monitor/checkpoint-3",
                  "dashboard": "trackio show --project demo"}  # fmt: skip
        return Result(**{**values, **changes})

    def test_good(self):
        self.make().check()
        summary = self.make().summarize(Path("demo"), 95.4)
        assert "Done in 95 s: 3 steps" in summary
        assert "8.310 at first, 7.520 at last" in summary
        assert "3 x 2 peers" in summary
        assert "demo/monitor/checkpoint-3" in summary
        assert "trackio show --project demo" in summary

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"rounds": Counter()}, "no step was averaged by two trainers"),
            ({"rounds": Counter({1: 3})}, "no step was averaged by two trainers"),
            ({"steps": STEPS[:2]}, "fewer than two steps"),
            ({"steps": STEPS[::-1]}, "the loss did not fall: 7.520 at first, 8.310 at last"),
        ],
    )
    def test_bad(self, changes, message):
        with pytest.raises(UserError, match=message):
            self.make(**changes).check()

    def test_summary_of_nothing(self):
        summary = self.make(steps=[], rounds=Counter(), checkpoint=None, dashboard=None).summarize(Path("demo"), 1)
        assert "never" in summary
        assert "none" in summary


# --- the whole demo --------------------------------------------------------------------------------------------------


@pytest.fixture
def demo(tmp_path, launcher):
    """Start the demo in a separate folder; its processes end with the test.

    :param forks: fork its processes, without the seconds for the imports
    """
    demos = []

    def start(*args, forks: bool = False) -> Script:
        command = ("tests/support/forking_demo.py", "run_local_demo.py") if forks else ("run_local_demo.py",)
        demos.append(Script(*command, *args, log=tmp_path / "demo.log", launcher=launcher if forks else None))
        return demos[-1]

    yield start
    for script in demos:
        script.kill_all()


@pytest.mark.early
@pytest.mark.parametrize("forks", [True, pytest.param(False, marks=pytest.mark.long)])
def test_demo(demo, tmp_path, forks):
    script = demo("--max_global_steps", 2, forks=forks)
    trainers = wait_until(
        lambda: len(found := find_trainers(script)) == 2 and found, 200, "the start of both trainers"
    )  # fmt: skip
    hold_until_all_begin(trainers, timeout=240)  # they are not forked: at a load of 12, their imports take 110 seconds
    code = script.wait(timeout=300)
    assert code == 0, script.output
    assert re.search(r"^Step 2 of 2   loss \d+\.\d+   \d+ samples/s   2 peers$", script.output, re.MULTILINE)
    assert re.search(r"Gradients averaged  \d x 2 peers", script.output)
    assert (tmp_path / "demo" / "monitor" / "checkpoint-2" / "model.safetensors").is_file()
    assert (tmp_path / "demo" / "monitor" / "trackio").is_dir()
    steps = read_jsonl(tmp_path / "demo" / "monitor" / "metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2]
    assert steps[0]["loss"] - steps[-1]["loss"] > 0.1
    assert "run_trainer.py" in (tmp_path / "demo" / "commands.txt").read_text()
    script.assert_nothing_left()


def test_demo_fails_with_a_trainer(demo):
    script = demo(forks=True)
    trainers = wait_until(lambda: find_trainers(script), 200, "the start of a trainer")
    next(iter(trainers)).kill()
    assert script.wait(timeout=60) == 1
    assert re.search(r"run_local_demo.py: error: trainer-\d ended with SIGKILL: ", script.output)
    script.assert_nothing_left()


def test_demo_is_interrupted(demo, tmp_path):
    script = demo(forks=True)
    log = tmp_path / "demo" / "trainer-1.log"
    wait_until(
        lambda: script.family() and log.exists() and "Running a DHT peer" in log.read_text(),
        200,
        "a trainer that has joined",
    )
    script.process.send_signal(signal.SIGINT)
    assert script.wait(timeout=40) == 130
    assert script.output.rstrip().endswith("error: interrupted")
    script.assert_nothing_left()


def find_trainers(script: Script) -> dict[psutil.Process, Path]:
    """Return the main process of each trainer that has started, with its log."""
    found = {}
    for process in script.family():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            output = Path(f"/proc/{process.pid}/fd/1").readlink()
            if re.fullmatch(r"trainer-\d\.log", output.name) and process.ppid() == script.process.pid:
                found[process] = output
    return found
