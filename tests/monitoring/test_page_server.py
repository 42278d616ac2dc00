"""The page of --serve_page, and --server_url: trackio's real server in a child process."""

import contextlib
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import requests
from hivemind.utils.multiaddr import Multiaddr

from cotrain.common.flags import ArgumentsError, is_page
from cotrain.monitoring.contributors import LEADERBOARD_COLUMNS
from cotrain.monitoring.page_server import PageServer, find_address
from cotrain.monitoring.trackers import PLOT_ORDER
from run_evaluator import EvaluatorArguments
from run_training_monitor import TrainingMonitorArguments
from tests.support.peers import reserve_maddr, wait_until

TOKEN = "a-secret-of-the-organiser"
# Reports a step to the dashboard, as an evaluator on another machine would; prints what it could not send.
SENDER = """
import logging, os, sys
from pathlib import Path
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(levelname)s %(message)s")
from cotrain.monitoring.reporters import Reporters
reporters = Reporters(Path(sys.argv[1]), "my run", "trackio", server_url=sys.argv[2])
reporters.report_evaluation(int(sys.argv[3]), {"loss": 9.5})
reporters.close()
from trackio.sqlite_storage import SQLiteStorage
print("PENDING", SQLiteStorage.has_pending_data("my run"))
"""
# What a monitor and an evaluator report, to TRACKIO_DIR.
RUN = """
import sys
from pathlib import Path
from cotrain.monitoring.aggregation import StepReport
from cotrain.monitoring.contributors import LEADERBOARD_COLUMNS
from cotrain.monitoring.reporters import Reporters
reporters = Reporters(Path(sys.argv[1]), "my run", "trackio")
for step in range(1, 6):
    reporters.report(StepReport(step, 10.0 - step, 2, 64, 3.5, 2, 4, 1e9 + step), {"paused peers": 1})
    reporters.report_evaluation(step, {"loss": 10.5 - step})
rows = [(1, "alice", "75.0%", "", 240, 5, "Wb1uRsT"), (2, "bob", "25.0%", "paused", 80, 2, "B7RiXZG")]
reporters.report_table("contributors", LEADERBOARD_COLUMNS, rows, 5)
reporters.report_table("best checkpoint", ("step", "validation loss"), [(5, 5.5)], 5)
reporters.report_table("sample texts", ("text", "completion"), [("The capital of France is", "Paris.")], 5)
reporters.close()
"""


def free_port() -> str:
    return reserve_maddr().rpartition("/")[2]


def send(folder: Path, url: str, step: int, token: str = TOKEN) -> str:
    """Send an evaluation to a trackio server from a separate process, and return its output."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TRACKIO", "HF_"))}
    clean |= {"TRACKIO_WRITE_TOKEN": token, "HOME": str(folder), "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", SENDER, str(folder / "out"), url, str(step)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "encoding": "utf-8", "timeout": 120}
    return subprocess.run(command, env=clean, check=True, **options).stdout


def ask(url: str, api: str, token: str | None = None, **values) -> dict:
    headers = {} if token is None else {"X-Trackio-Write-Token": token}
    return requests.post(f"{url}/api/{api}", json={"args": [], "kwargs": values}, headers=headers, timeout=60).json()


def read_logs(url: str) -> list[dict]:
    """Return the values of all runs: one that began while its server was away is another of the same name."""
    runs = ask(url, "get_runs_for_project", project="my run").get("data") or []
    return [
        log for run in runs for log in ask(url, "get_logs", project="my run", run="my run", run_id=run["id"])["data"]
    ]


@pytest.fixture
def url(tmp_path, monkeypatch) -> str:
    """The address of a server that is not there yet. Its folder is `tmp_path`/served."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "served"))
    monkeypatch.setenv("TRACKIO_PLOT_ORDER", PLOT_ORDER)  # as the monitor's tracker does
    monkeypatch.setenv("TRACKIO_WRITE_TOKEN", TOKEN)
    return f"http://127.0.0.1:{free_port()}"


@contextlib.contextmanager
def serving(url: str) -> Iterator[PageServer]:
    with contextlib.closing(PageServer(url.removeprefix("http://"), f"{url}/?project=my%20run")) as server:
        yield server


@pytest.mark.programs
def test_page_is_public_but_not_its_token(tmp_path, url, capfd, caplog):
    """The child dies once. The curves of an evaluator on another machine are on the same page."""
    caplog.set_level(logging.INFO)
    with serving(url) as server:
        assert server.check() is None, "nothing listens yet"
        page = wait_until(server.check, 120, "the page")
        assert requests.get(page, timeout=60).ok and caplog.messages == [f"Curves of the run: {page}"]
        process = psutil.Process(server.process.pid)
        assert process.nice() > psutil.Process().nice() and TOKEN not in " ".join(process.cmdline())
        server.process.kill()
        server.process.wait()
        wait_until(lambda: server.check() and len(caplog.messages) > 2, 120, "another server")
        assert re.search(r"trackio's server has ended with code -9; .*Trying again", caplog.messages[1])
        assert caplog.messages[2] == caplog.messages[0] and len(caplog.messages) == 3

        assert "WARNING" not in send(tmp_path, url, step=3)
        (log,) = wait_until(lambda: read_logs(url), 120, "the evaluation")
        assert log["step"] == 3 and log["validation loss"] == 9.5
        for token in (None, "", "a-guess"):
            assert "write_token is required" in ask(url, "delete_run", token, project="my run", run="my run")["error"]
        assert "no attribute" in ask(url, "query_project", project="my run", query="select 1")["error"]
        if sys.platform == "linux":
            assert psutil.Process(server.process.pid).rlimit(psutil.RLIMIT_DATA)[0] == 2**31
        assert len(read_logs(url)) == 1
        newest = server.process
    assert newest.poll() is not None, "it ends with the monitor"
    assert TOKEN not in "".join(capfd.readouterr()) + caplog.text and not has_listener(url)


@pytest.mark.programs
def test_token_is_a_random_one_of_the_server_if_none_is_stated(url, monkeypatch):
    monkeypatch.delenv("TRACKIO_WRITE_TOKEN")
    with serving(url) as server:
        wait_until(server.check, 120, "the page")
        for token in (None, "", TOKEN):
            assert ask(url, "get_run_mutation_status", token)["data"]["allowed"] is False


def has_listener(url: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(url.rpartition(":")[2]))) == 0


@pytest.mark.programs
def test_server_has_no_secret_but_its_own(url, monkeypatch):
    """Strangers reach it; the token of an upload was in its environment."""
    names = {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "TRACKIO_WRITE_TOKEN"}
    for name in names:
        monkeypatch.setenv(name, TOKEN)
    with contextlib.closing(PageServer(url.removeprefix("http://"), url)) as server:
        server.check()
        child = psutil.Process(server.process.pid).environ()
    assert names & child.keys() == {"TRACKIO_WRITE_TOKEN"} and child["PATH"] == os.environ["PATH"]


def test_port_of_another_program_is_one_warning_and_no_page(url, caplog):
    caplog.set_level(logging.INFO)
    with serving(url) as server:
        with socket.create_server(("127.0.0.1", int(server.port))):
            for _ in range(2):
                server.check()
                server.process.wait(120)
            assert server.check() is None
            (warning,) = caplog.messages
            assert f"another program may use port {server.port}" in warning
        assert wait_until(server.check, 120, "the page, once the port is free")


def test_address_has_the_host_that_the_peer_announces():
    def find(endpoint: str, *maddrs: str) -> str:
        visible = [Multiaddr(f"{maddr}/p2p/QmVUecRSJCjDfdiPQcBLqYxZHMSMYGPvKJBAqYKpzLLyQc") for maddr in maddrs]
        dht = SimpleNamespace(get_visible_maddrs=lambda: visible)
        return find_address(endpoint, SimpleNamespace(dht=dht, run_id="my run"))

    home, public = "/ip4/192.168.1.7/tcp/31337", "/ip4/203.0.113.1/tcp/31337"
    tail = "/?project=my%20run&smoothing=0"
    for endpoint, maddrs, host in [
        ("0.0.0.0:7860", [home, "/ip4/8.8.8.8/tcp/31337"], "8.8.8.8:7860"),
        ("0.0.0.0:7860", ["/ip6/2001:4860::1/tcp/31337", "/ip4/8.8.8.8/tcp/1"], "8.8.8.8:7860"),
        ("0.0.0.0:80", [home, "/dns4/example.org/tcp/31337"], "example.org:80"),
        ("[::]:7860", [home, "/ip4/8.8.8.8/tcp/31337"], "8.8.8.8:7860"),
        ("127.0.0.1:7860", [public], "127.0.0.1:7860"),
    ]:
        page = find(endpoint, *maddrs)
        assert page == f"http://{host}{tail}" and is_page(page)
    for endpoint, maddr in (("[::1]:7860", public), ("0.0.0.0:7860", "/ip6/2001:4860::1/tcp/31337")):
        with pytest.raises(ArgumentsError, match="--serve_page: trainers refuse .*--page"):
            find(endpoint, maddr)


# --server_url


@contextlib.contextmanager
def hanging(port: int) -> Iterator[None]:
    """A server that accepts connections and answers nothing."""
    accepted = []
    with socket.create_server(("127.0.0.1", port)) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    accepted.append(listener.accept())

        thread = threading.Thread(target=accept)
        thread.start()
        yield
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    for connection, _ in accepted:
        connection.close()


@pytest.mark.programs
@pytest.mark.parametrize("fault", ["refuses", "hangs", "other token"])
def test_server_that_takes_nothing_is_one_warning_and_gets_the_values_later(tmp_path, url, fault):
    token = "wrong" if fault == "other token" else TOKEN
    with contextlib.ExitStack() as stack:
        if fault == "hangs":
            stack.enter_context(hanging(int(url.rpartition(":")[2])))
        server = stack.enter_context(serving(url)) if fault == "other token" else None
        if server is not None:
            wait_until(server.check, 120, "the page")
        output = send(tmp_path, url, step=1, token=token)
    warnings = re.findall("WARNING (.*)", output)
    kept = f": the curves are kept in '{tmp_path / 'out' / 'trackio'}' until it takes them"
    cause = "refuses the token in TRACKIO_WRITE_TOKEN" if server else r"does not answer as trackio does \(\w+\)"
    assert len(warnings) == 1 and re.fullmatch(f"{url} {cause}{re.escape(kept)}", warnings[0]), output
    assert "UserWarning" not in output and "PENDING True" in output and token not in output
    with serving(url) as server:
        wait_until(server.check, 120, "the page")
        assert "WARNING" not in send(tmp_path, url, step=2)
        logs = wait_until(lambda: len(logs := read_logs(url)) == 2 and logs, 120, "both evaluations")
        assert sorted(log["step"] for log in logs) == [1, 2], json.dumps(logs)


@pytest.mark.parametrize("arguments", [TrainingMonitorArguments, EvaluatorArguments])
def test_server_url_is_plain_since_it_is_published(arguments, monkeypatch):
    monkeypatch.setenv("TRACKIO_WRITE_TOKEN", TOKEN)
    assert arguments(server_url="https://curves.example.org:7860/page").report_to == "trackio"
    for wrong in (f"https://example.org/?write_token={TOKEN}", f"https://me:{TOKEN}@example.org", f"ftp://{TOKEN}",
                  f"https://example.org/#{TOKEN}", "example.org"):  # fmt: skip
        with pytest.raises(ArgumentsError, match="--server_url must be an address like .*, without a token") as e:
            arguments(server_url=wrong)
        assert TOKEN not in str(e.value)
    with pytest.raises(ArgumentsError, match="--server_url needs trackio: drop --report_to wandb"):
        arguments(server_url="https://example.org", report_to="wandb")
    monkeypatch.setenv("TRACKIO_SPACE_ID", "me/space")
    arguments(server_url="https://example.org")
    assert "TRACKIO_SPACE_ID" not in os.environ, "trackio would prefer it"
    monkeypatch.delenv("TRACKIO_WRITE_TOKEN")
    with pytest.raises(ArgumentsError, match="--server_url needs TRACKIO_WRITE_TOKEN in the environment"):
        arguments(server_url="https://example.org")


def test_serve_page_takes_a_port_or_an_endpoint(monkeypatch):
    for stated, endpoint in (("7860", "0.0.0.0:7860"), ("127.0.0.1:80", "127.0.0.1:80"), ("[::1]:80", "[::1]:80")):
        arguments = TrainingMonitorArguments(serve_page=stated)
        assert arguments.serve_page == endpoint and arguments.report_to == "trackio"
    for wrong in ("0", "65536", "page", "host:", ":80", "host:*", ""):
        with pytest.raises(ArgumentsError, match="--serve_page must be PORT or HOST:PORT such as 7860"):
            TrainingMonitorArguments(serve_page=wrong)
    with pytest.raises(ArgumentsError, match="pass one of --space_id, --server_url, --serve_page"):
        TrainingMonitorArguments(serve_page="7860", space_id="me/space")
    monkeypatch.setenv("TRACKIO_SERVER_URL", "https://example.org")
    TrainingMonitorArguments(serve_page="7860")
    assert "TRACKIO_SERVER_URL" not in os.environ


@pytest.mark.browser
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium: apt install chromium")
@pytest.mark.parametrize("width", [1280, 390], ids=["desktop", "phone"])
def test_browser_shows_a_stranger_the_run(tmp_path, url, width):
    """Loss and validation loss first; names, shares, who is paused, the best checkpoint and the newest answers."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", RUN, str(tmp_path / "out")], check=True, timeout=120, env=environment)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=15000"]
    flags += [f"--window-size={width},900", f"--user-data-dir={tmp_path}/browser"]
    options = {"stdout": subprocess.PIPE, "encoding": "utf-8", "timeout": 120, "check": True}
    with serving(url) as server:
        wait_until(server.check, 120, "the page")
        curves, tables = (
            subprocess.run(["chromium", *flags, "--dump-dom", f"{url}/{name}?project=my%20run"], **options).stdout
            for name in ("", "media")
        )
    names = ("loss", "validation loss", "performance", "alive peers")
    positions = [re.search(rf">\s*{name}\s*<", curves).start() for name in names]
    assert positions == sorted(positions)
    cells = re.findall(r"<t[dh][^>]*>(?:<[^>]*>|\s)*([^<]*?)\s*<", tables)
    shown = [cell.lower() for cell in cells]
    for row in (
        LEADERBOARD_COLUMNS,
        ("alice", "75.0%"),
        ("bob", "25.0%", "paused"),
        ("paris.",),
        ("validation loss",),
        ("5.5",),
    ):
        assert set(row) <= set(shown), (row, shown)
