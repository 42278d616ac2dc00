"""The demo: processes and summary; and a complete run."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import run_local_demo
from cotrain.common.errors import UserError
from cotrain.common.json_file import read_records
from run_local_demo import Workers, new_demo_folder, summarize
from tests.support.peers import Script, hold_until_all_begin, wait_until
from tests.support.processes import ROOT

FOLDER = "it's a demo"
STEPS = [
    {"step": 1, "loss": 8.31, "performance": 139.4, "alive peers": 2},
    {"step": 2, "loss": None, "performance": 128.0, "alive peers": 2},
    {"step": 3, "loss": 7.52, "performance": 119.0, "alive peers": 2},
]


def test_a_new_demo_replaces_an_old_one_that_has_ended_and_nothing_else(tmp_path):
    folder = tmp_path / "a" / "demo"
    with new_demo_folder(folder):
        (folder / "commands.txt").write_text("./run_trainer.py", encoding="utf-8")
        (folder / "monitor").mkdir()
        (folder / "monitor.log").write_text("old", encoding="utf-8")
        with pytest.raises(UserError, match="is in use by another"), new_demo_folder(folder):
            pass
        assert (folder / "monitor.log").exists()
    with new_demo_folder(folder):
        assert sorted(path.name for path in folder.iterdir()) == [".lock", "commands.txt"]
        assert (folder / "commands.txt").read_text(encoding="utf-8") == ""

    (tmp_path / "thesis.tex").write_text("42", encoding="utf-8")
    with pytest.raises(UserError, match="contains other files"), new_demo_folder(tmp_path):
        pass
    assert (tmp_path / "thesis.tex").read_text(encoding="utf-8") == "42"


class TestWorkers:
    @pytest.fixture
    def workers(self, tmp_path):
        with contextlib.closing(Workers(tmp_path)) as workers:
            yield workers

    def script(self, folder: Path, code: str) -> str:
        path = folder / "script.py"
        path.write_text(code, encoding="utf-8")
        return str(path)

    @pytest.mark.parametrize("hint", ["", r"\nWhat to do: buy one"])
    def test_a_failure_is_one_line_that_names_the_log(self, tmp_path, workers, hint):
        workers.start("bad", self.script(tmp_path, f"print('first'); exit('bad.py: error: no disk{hint}')"))
        with pytest.raises(UserError) as raised:
            workers.wait_for(lambda: False, "nothing", 120)
        assert str(raised.value) == f"bad ended with exit code 1: no disk (see {tmp_path / 'bad.log'})"

    def test_waiting_ends(self, workers):
        with pytest.raises(UserError, match="timeout: waited 0 seconds for the moon; see the logs"):
            workers.wait_for(lambda: False, "the moon", 0.3)

    def test_stop_kills_processes_that_ignore_sigterm(self, tmp_path, workers, monkeypatch):
        monkeypatch.setattr(run_local_demo, "STOP_SECONDS", 1.0)
        code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(3600)"
        deaf = self.script(tmp_path, code)
        for name in ("a", "b"):
            workers.start(name, deaf)
        for name in ("a", "b"):
            workers.wait_for((tmp_path / f"{name}.log").read_text, "both", 120)
        workers.close()
        assert not any(map(workers.is_running, ("a", "b")))

    @pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: the kernel ends orphans")
    def test_processes_end_with_a_killed_demo(self, tmp_path):
        sleeper = self.script(tmp_path, "import os, time; print(os.getpid(), flush=True); time.sleep(3600)")
        demo = tmp_path / "demo.py"
        demo.write_text(
            "import time\nfrom pathlib import Path\nfrom run_local_demo import Workers\n"
            f"Workers(Path({str(tmp_path)!r})).start('sleeper', {sleeper!r})\n"
            "time.sleep(3600)\n",
            encoding="utf-8",
        )
        with subprocess.Popen([sys.executable, demo], env={**os.environ, "PYTHONPATH": str(ROOT)}) as process:
            log = tmp_path / "sleeper.log"
            wait_until(lambda: log.exists() and log.read_bytes().strip(), 120, "the start of the sleeper")
            pid = int(log.read_text(encoding="utf-8"))
            assert psutil.pid_exists(pid)
            process.kill()
        wait_until(lambda: not psutil.pid_exists(pid), 120, "the end of the sleeper")


def write_records(folder: Path, steps: list[dict], outcomes: list[str]) -> None:
    rounds = [{"step": number, "outcome": outcome, "group": ["a", "b"]} for number, outcome in enumerate(outcomes, 1)]
    for path, records in (("monitor/metrics.jsonl", steps), ("trainer-1/rounds.jsonl", rounds)):
        (folder / path).parent.mkdir()
        (folder / path).write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")


def test_summary(tmp_path, monkeypatch):
    monkeypatch.delenv("TRACKIO_DIR", raising=False)
    write_records(tmp_path, STEPS, ["alone", "averaged", "averaged"])
    (tmp_path / "monitor" / "checkpoint-10").mkdir()
    summary = summarize(tmp_path)
    assert "8.310 at first, 7.520 at last" in summary and "2 x 2 peers" in summary
    assert f"{tmp_path / 'monitor' / 'checkpoint-10'}\n" in summary
    assert f"generate.py {tmp_path / 'monitor'} " in summary
    assert f"TRACKIO_DIR={tmp_path / 'monitor' / 'trackio'} trackio show --project demo" in summary
    assert "TRACKIO_PLOT_ORDER=" in summary and "&smoothing=0 at its end" in summary


@pytest.mark.parametrize(
    ("steps", "outcome", "message"),
    [
        (STEPS, "alone", "no step was averaged by two trainers"),
        (STEPS[:2], "averaged", "the loss did not fall: 8.310;"),
        (STEPS[::-1], "averaged", "the loss did not fall: 7.520, 8.310;"),
    ],
)
def test_a_bad_result_is_an_error(tmp_path, steps, outcome, message):
    write_records(tmp_path, steps, [outcome])
    with pytest.raises(UserError, match=message):
        summarize(tmp_path)


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
    script = demo("--max_global_steps", 2, "--output_dir", FOLDER, forks=forks)
    wait_until(lambda: len(find_trainers(script)) == 2, 200, "the start of both trainers")
    trainers = find_trainers(script)
    hold_until_all_begin(trainers, timeout=240)  # they are not forked: at a load of 12, their imports take 110 seconds
    code = script.wait(timeout=300)
    assert code == 0, script.output
    assert re.search(r"^Step 2 of 2   loss \d+\.\d+   \d+ samples/s   2 peers$", script.output, re.MULTILINE)
    assert re.search(r"Gradients averaged  \d x 2 peers", script.output)
    assert (tmp_path / FOLDER / "monitor" / "checkpoint-2" / "model.safetensors").is_file()
    assert (tmp_path / FOLDER / "monitor" / "trackio").is_dir()
    steps = read_records(tmp_path / FOLDER / "monitor" / "metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2]
    assert steps[0]["loss"] - steps[-1]["loss"] > 0.1
    log = (tmp_path / FOLDER / "monitor.log").read_text(encoding="utf-8")
    assert len(set(re.findall(r"Step #\d+\t(.*) -> '", log))) == 2, "both texts are completed"
    assert log.rindex("Contributors, by samples") > log.rindex("Step #2\tloss"), "the leaderboard of the last step"
    command = (tmp_path / FOLDER / "commands.txt").read_text(encoding="utf-8").splitlines()[-2]
    assert re.fullmatch(r"OMP_NUM_THREADS=1 .*run_trainer.py .*", command)
    script.assert_nothing_left()


def test_demo_fails_with_a_trainer(demo):
    script = demo(forks=True)
    trainers = wait_until(lambda: find_trainers(script), 200, "the start of a trainer")
    next(iter(trainers)).kill()
    assert script.wait() == 1
    assert re.search(r"run_local_demo.py: error: trainer-\d ended with SIGKILL: ", script.output)
    script.assert_nothing_left()


def test_demo_is_interrupted(demo, tmp_path):
    script = demo("--output_dir", FOLDER, forks=True)
    log = tmp_path / FOLDER / "trainer-1.log"
    wait_until(lambda: log.exists() and b"Running a DHT peer" in log.read_bytes(), 200, "a trainer that has joined")
    script.process.send_signal(signal.SIGINT)
    assert script.wait() == 130
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
