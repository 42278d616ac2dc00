"""metrics.jsonl loses no step, and no dashboard delays or ends the monitor."""

import errno
import glob
import json
import logging
import os
import pty
import re
import resource
import shlex
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import get_args, get_type_hints
from unittest.mock import Mock, call

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotrain.common import json_file
from cotrain.common.errors import ORGANISER_MODULES
from cotrain.common.json_file import JsonLinesFile
from cotrain.monitoring import trackers
from cotrain.monitoring.aggregation import StepReport
from cotrain.monitoring.reporters import Reporters
from cotrain.monitoring.trackers import Dashboard
from run_training_monitor import TrainingMonitorArguments
from tests.support.peers import read_jsonl, wait_until

REPOSITORY = Path(__file__).parents[2]
# Reports steps FIRST to LAST to the dashboard in a separate process, then prints what it left behind.
PROGRAM = """
import json, logging, os, sys, threading, time
from pathlib import Path
import psutil
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(levelname)s %(message)s")
from cotrain.monitoring import reporters as reporting
from cotrain.monitoring import trackers
from cotrain.monitoring.aggregation import StepReport
dashboard, folder, first, last = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
if dashboard == "wandb":
    import wandb  # takes seconds, which are not to count
started = time.monotonic()
trackers.WANDB_TIMEOUT = trackers.FINISH_TIMEOUT = 2.0
reporters = reporting.Reporters(Path(folder), "my run", dashboard)
for step in range(first, last + 1):
    loss = None if step == 1 else 10.0 - step
    extra = {"validation loss": 9.5} if step == 2 else None
    reporters.report(StepReport(step, loss, 2, 64, 3.5, 2, 4, 1e9 + step), extra)
reporters.report_table("people", ("name", "samples"), [("<script>eve", 5), ("bob", 3)], last)
reporters.close()
print("PAGE", reporters.page)
print("SECONDS", time.monotonic() - started)
print("THREADS", [thread.name for thread in threading.enumerate()])
print("CHILDREN", [child.name() for child in psutil.Process().children(recursive=True)])
if dashboard == "trackio":
    from trackio.sqlite_storage import SQLiteStorage
    print("LOGS", json.dumps(SQLiteStorage.get_logs("my run", "my run")))
"""
# Reports three steps to trackio. Another program locks its database until the second has failed.
LOCKED = """
import json, logging, sqlite3, sys, threading, time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from cotrain.monitoring import trackers
from cotrain.monitoring.trackers import Dashboard, ProjectTrackioTracker
folder, attempts, many = Path(sys.argv[2]), [], threading.Event()
trackers.time = SimpleNamespace(sleep=lambda seconds: None, monotonic=time.monotonic)
handler = logging.Handler()
handler.emit = lambda record: print(record.getMessage())
logging.getLogger("cotrain.monitoring.trackers").addHandler(handler)
tracker = ProjectTrackioTracker(folder, "my run")
from trackio.sqlite_storage import SQLiteStorage
def write(*args, write=SQLiteStorage.bulk_log, **options):
    attempts.append(options)
    if len(attempts) > 31:
        many.set()
    write(*args, **options)
SQLiteStorage.bulk_log = staticmethod(write)
dashboard = Dashboard(tracker)
find_steps = lambda: [log["step"] for log in SQLiteStorage.get_logs("my run", "my run")]
dashboard.log({"loss": 9.0}, step=0)
while not find_steps():
    time.sleep(0.1)
SQLiteStorage._get_connection = staticmethod(partial(SQLiteStorage._get_connection, timeout=0.1))
(database,) = folder.glob("*.db")
lock = sqlite3.connect(database, isolation_level=None)
lock.execute("BEGIN EXCLUSIVE")
dashboard.log({"loss": 8.0}, step=1)
many.wait(20)
lock.execute("ROLLBACK")
dashboard.log({"loss": 7.0}, step=2)
dashboard.close()
print("STEPS", find_steps())
"""


def make_report(step, loss=5.0):
    return StepReport(step, loss, alive_peers=2, samples=64, performance=3.5, contributors=2, mini_steps=4, time=1e9)


def steps_in(folder):
    return [record["step"] for record in read_jsonl(folder / "metrics.jsonl")]


# The files


@settings(max_examples=100, deadline=None)
@given(cut=st.integers(0, 50))
def test_file_that_was_cut_anywhere_is_repaired_and_continued(tmp_path_factory, cut):
    folder = tmp_path_factory.mktemp("cut")
    content = b"".join(b'{"step": %d}\n' % step for step in range(3))[:cut]
    (folder / "metrics.jsonl").write_bytes(content)
    reporters = Reporters(folder, "run")
    assert reporters.last_step() == content.count(b"\n") - 1
    for step in range(reporters.last_step() + 1, 5):
        reporters.report(make_report(step))
    assert steps_in(folder) == [0, 1, 2, 3, 4]


def test_last_step_of_a_damaged_file(tmp_path):
    damage = b'\n\0\0\0\0\n\xff\xfe\n[]\n{"step": true}\n{"loss": 1}\n'
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 5}\n' + damage)
    assert Reporters(tmp_path, "run").last_step() == 5


def refuse_sync(monkeypatch, path):
    monkeypatch.setattr(json_file.os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))


def move_folder(monkeypatch, path):
    path.parent.rename(path.parent.with_name("away"))


def limit_file_size(monkeypatch, path):
    """The kernel writes a part of the line and refuses the rest, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, resource.RLIM_INFINITY))


@pytest.mark.parametrize("fault", [refuse_sync, move_folder, limit_file_size])
def test_file_that_cannot_be_written_loses_nothing(tmp_path, monkeypatch, caplog, fault):
    folder = tmp_path / "out"
    file = JsonLinesFile(folder / "metrics.jsonl")
    file.write({"step": 1})
    with monkeypatch.context() as patch:
        try:
            fault(patch, file.path)
            for step in range(2, 5):
                file.write({"step": step})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            if not folder.exists():
                (tmp_path / "away").rename(folder)
    assert steps_in(folder) == [1], "no incomplete line"
    assert [message[-22:] for message in caplog.messages] == [f"{n} steps wait in memory" for n in (1, 2, 3)]
    file.flush()
    assert steps_in(folder) == [1, 2, 3, 4]


# Dashboards in general


def make_reporters(folder, **behaviour) -> tuple[Reporters, Mock]:
    """Build reporters with a fake of one of accelerate's trackers, whose methods may raise or hang."""
    tracker, reporters = Mock(**behaviour), Reporters(folder, "run")
    tracker.name = "fake"
    reporters.dashboard = Dashboard(tracker)
    return reporters, tracker


def report_all(reporters, steps) -> None:
    """Report a step, an evaluation and a table for each step, and close the dashboard."""
    for step in steps:
        reporters.report(make_report(step, loss=None), {"applied share": 0.5})
        reporters.report_evaluation(step, {"loss": 2.0, "perplexity": 7.4, "samples": 0.5})
        reporters.report_table("people", ("name", "samples"), [("eve", 5)], step)
    reporters.close()


def test_values_have_the_names_of_hiveminds_example_in_the_files_and_the_dashboard(tmp_path, caplog):
    folder = tmp_path / "new" / "folder"
    reporters, tracker = make_reporters(folder)
    without_dashboard = Reporters(tmp_path, "run")
    assert reporters.last_step() == -1 and without_dashboard.page is None
    report_all(without_dashboard, [1])
    report_all(reporters, [7])
    shown = {"alive peers": 2, "samples": 64, "performance": 3.5, "applied share": 0.5}
    more = {"step": 7, "loss": None, "contributors": 2, "mini_steps": 4, "time": 1e9}
    evaluation = {"validation loss": 2.0, "perplexity": 7.4, "validation samples": 0.5}  # not the curve of the steps
    assert read_jsonl(folder / "metrics.jsonl") == [shown | more]
    assert read_jsonl(folder / "evaluations.jsonl")[0].items() > ({"step": 7} | evaluation).items()
    assert Reporters(folder, "run").last_step() == 7
    assert tracker.method_calls == [
        call.start(),
        call.log(shown, step=7),
        call.log(evaluation, step=7),
        call.log_table("people", ["name", "samples"], data=[["eve", 5]], step=7),
        call.finish(),
    ]
    assert not caplog.records


@pytest.mark.parametrize("failing", [["start"], ["log", "finish"], ["log_table"]])
def test_dashboard_that_fails_is_one_warning(tmp_path, caplog, failing):
    fails = {f"{method}.side_effect": ConnectionResetError("gone") for method in failing}
    report_all(make_reporters(tmp_path, **fails)[0], range(3))
    assert steps_in(tmp_path) == [0, 1, 2]
    assert len(caplog.records) == 1 and "gone" in caplog.text and "metrics.jsonl" in caplog.text


@pytest.mark.parametrize("hanging", ["start", "log", "finish"])
def test_dashboard_that_hangs_does_not_hold_up_the_monitor(tmp_path, monkeypatch, caplog, hanging):
    monkeypatch.setattr(trackers, "DASHBOARD_TIMEOUT", 0.5)
    answer = threading.Event()
    report_all(make_reporters(tmp_path, **{f"{hanging}.side_effect": lambda *_, **__: answer.wait(300)})[0], range(3))
    assert steps_in(tmp_path) == [0, 1, 2]
    assert len(caplog.records) == 1 and "did not finish in 0 s; values may be missing" in caplog.text
    answer.set()


def test_tables_become_rare(tmp_path, monkeypatch):
    """Tables of up to 100 rows at every fifth of 125 000 steps would be 200 MB, which the page loads at once."""

    def shown(table_steps) -> list[int]:
        reporters, tracker = make_reporters(tmp_path)
        for step in table_steps:
            for name in ("one", "two"):
                reporters.report_table(name, ("samples",), [(5,)], step)
        reporters.close()
        return [logged.kwargs["step"] for logged in tracker.log_table.call_args_list if logged.args[0] == "one"]

    steps = shown([*range(0, 2000, 5), 1000])
    assert steps[:23] == [*range(0, 110, 5), 115] and steps[-2] > 1800 and steps[-1] == 1000, "a rollback"
    assert 60 < len(steps) < 100
    assert shown((56, 57, 58)) == [56, 58], "the last table of a run is shown"
    monkeypatch.setattr(trackers, "TABLE_SECONDS", 0.0)
    assert shown((56, 57, 58)) == [56, 57, 58], "after half an hour: who is paused has changed"


def test_only_plain_addresses_are_published(tmp_path):
    reporters, tracker = make_reporters(tmp_path)
    for tracker.page in (None, "javascript:alert(1)", "https://x/ y"):
        assert reporters.page is None
    reporters.close()


SPACE = "https://huggingface.co/spaces/me/space"


@pytest.mark.parametrize(("name", "url"), [("wandb", "https://wandb.ai/me/run/runs/1"),
                                           ("trackio", f"{SPACE}?project=run&smoothing=0")])  # fmt: skip
def test_page_is_known_after_the_start(tmp_path, monkeypatch, name, url):
    stub = Mock(**{"setup.return_value.settings.mode": "online", "init.return_value.url": url})
    monkeypatch.setitem(sys.modules, name, stub)
    reporters = Reporters(tmp_path, "run", name, space_id="me/space" if name == "trackio" else None)
    wait_until(lambda: reporters.page is not None, 120, "the address")
    assert reporters.page == url
    assert stub.init.call_args.kwargs.get("space_id") == (None if name == "wandb" else "me/space")
    reporters.close()


@pytest.mark.parametrize("name", get_args(get_type_hints(TrainingMonitorArguments)["report_to"])[1:])
def test_dashboard_that_is_not_installed_is_one_warning(tmp_path, monkeypatch, caplog, name):
    for module in (name, "tensorboardX") if name == "tensorboard" else (name,):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    report_all(Reporters(tmp_path, "run", name), [1])
    assert steps_in(tmp_path) == [1]
    remedy = "is not installed: pip install -r requirements-organiser.txt" if name in ORGANISER_MODULES else ""
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)
    assert f"{name} {remedy}".strip() in warning


# The real trackers, each in a separate process


def run_program(tmp_path, dashboard, first=0, last=4, program=PROGRAM, **environment):
    """Run a program without account and network, on a terminal (where wandb would ask for a key).

    :returns: its output
    """
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "TRACKIO", "HF_"))}
    home = tmp_path / "home"
    home.mkdir(exist_ok=True)
    clean |= {"HOME": str(home), "NETRC": str(home / "netrc"), "XDG_CONFIG_HOME": str(home), "TERM": "xterm",
              "PYTHONPATH": str(REPOSITORY)} | environment  # fmt: skip
    terminal, side = pty.openpty()
    try:
        return subprocess.run(
            [sys.executable, "-c", program, dashboard, str(tmp_path / "out"), str(first), str(last)],
            env=clean, stdin=side, stderr=side, stdout=subprocess.PIPE, text=True, timeout=120, check=True,
        encoding="utf-8").stdout  # fmt: skip
    finally:
        os.close(terminal)
        os.close(side)


def assert_nothing_left(output):
    assert "THREADS ['MainThread']" in output and "CHILDREN []" in output and "WARNING" not in output


def find_wandb_files(tmp_path):
    return sorted((tmp_path / "out" / "wandb").glob("offline-run-*/run-*.wandb"))


@pytest.mark.programs
def test_wandb_without_login_records_offline(tmp_path):
    output = run_program(tmp_path, "wandb")
    assert "(no login found)" in output and "wandb login, then wandb sync" in output and "PAGE None" in output
    assert_nothing_left(output)
    (file,) = find_wandb_files(tmp_path)
    content = file.read_bytes()
    pattern = re.search(r"wandb sync (\S+)", output)[1]
    assert glob.glob(pattern) == [str(file.parent)]
    assert len(list(file.parent.glob("files/media/table/people*.table.json"))) == 1
    assert content.count(b"alive peers") >= 5 and content.count(b"validation loss") >= 1 and b"my run" in content

    run_program(tmp_path, "wandb", 5, 6)
    first, second = find_wandb_files(tmp_path)  # the same run continues
    assert sorted(glob.glob(pattern)) == [str(first.parent), str(second.parent)]
    wandb_id = (tmp_path / "out" / "wandb_run_id").read_text(encoding="utf-8").strip()
    assert first.name == second.name == f"run-{wandb_id}.wandb"


@pytest.mark.programs
@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"WANDB_API_KEY": "a" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}, "offline (Failed to"),
        ({"WANDB_API_KEY": "short"}, "offline (WANDB_API_KEY invalid"),
        ({"WANDB_MODE": "disabled"}, None),
    ],
    ids=["unreachable", "malformed key", "disabled"],
)
def test_wandb_that_cannot_be_online(tmp_path, environment, reason):
    output = run_program(tmp_path, "wandb", **environment)
    assert float(re.search(r"SECONDS ([\d.]+)", output)[1]) < 30
    assert ("offline" not in output) if reason is None else (f"wandb records {reason}" in output)
    assert len(find_wandb_files(tmp_path)) == (reason is not None) and steps_in(tmp_path / "out") == [0, 1, 2, 3, 4]
    assert_nothing_left(output)


@pytest.mark.programs
def test_trackio_keeps_a_local_dashboard(tmp_path):
    run_program(tmp_path, "trackio", 0, 2)
    output = run_program(tmp_path, "trackio", 3, 4)
    folder = tmp_path / "out" / "trackio"
    assert f"TRACKIO_DIR={folder} trackio show --project 'my run'" in output and "PAGE None" in output
    assert "7860" not in output  # another page may have this port
    assert re.search(r"Curves: TRACKIO_PLOT_ORDER='loss,.* that it prints, with &smoothing=0 at its end\n", output)
    assert_nothing_left(output)
    assert list(folder.glob("*.db")) and not (tmp_path / "home" / ".cache" / "huggingface" / "trackio").exists()
    logs = json.loads(output.split("LOGS ")[1].splitlines()[0])
    tables = [log.pop("people") for log in logs if "people" in log]
    assert [row["name"] for row in tables[1]["_value"]] == ["<script>eve", "bob"]
    logs = [log for log in logs if "loss" in log or "alive peers" in log]  # without those of the tables
    assert [log["step"] for log in logs] == [0, 1, 2, 3, 4]
    assert [log.get("loss") for log in logs] == [10.0, None, 8.0, 7.0, 6.0]
    assert logs[2]["validation loss"] == 9.5 and logs[0]["alive peers"] == 2 and logs[0]["samples"] == 64


@pytest.mark.programs
def test_steps_wait_for_a_database_that_is_locked(tmp_path):
    """trackio dropped the steps after 30 s, and this after ten minutes."""
    output = run_program(tmp_path, "trackio", program=LOCKED)
    assert "STEPS [0, 1, 2]" in output and output.count("the page gets the steps later") == 1


@pytest.mark.browser
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium: apt install chromium")
def test_browser_shows_the_curves_and_runs_no_code_in_names(tmp_path):
    """The command that the monitor logs, and the page in Chromium."""
    logged = re.search(r"Curves: (.*)", run_program(tmp_path, "trackio", 0, 4))[1]
    order, variable, _, *arguments = shlex.split(logged, comments=True)
    variables = dict(word.split("=", 1) for word in (order, variable, "BROWSER=true", "PYTHONUNBUFFERED=1"))
    command = [str(Path(sys.executable).with_name("trackio")), *arguments]
    options = {"stdout": subprocess.PIPE, "encoding": "utf-8"}
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=15000", "--dump-dom"]
    with subprocess.Popen(command, env={**os.environ, **variables}, **options) as server:
        try:
            address = next(match[1] for line in server.stdout if (match := re.search(r"(http://\S+:\d+)/", line)))
            curves, tables = (
                subprocess.run(
                    ["chromium", *flags, f"--user-data-dir={tmp_path}/browser",
                     f"{address}/{page}?project=my%20run&smoothing=0"], check=True, timeout=120, **options,
                ).stdout
                for page in ("", "media")
            )  # fmt: skip
        finally:
            server.terminate()
    names = ("loss", "validation loss", "alive peers")
    positions = [re.search(rf">\s*{name}\s*<", curves).start() for name in names]
    assert positions == sorted(positions) and ">performance<" in curves
    assert "&lt;script&gt;eve" in tables and "<script>eve" not in tables
