"""The page of --dashboard: it shows the curves, it is read-only, and it ends with the monitor."""

import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
import requests

from lib.monitoring.dashboard_server import DashboardServer
from tests.support.peers import ROOT, wait_until

SECRET = "a-write-token-that-nobody-may-see"
# Draws two steps and a table, as the monitor does.
WRITER = """
import sys
from pathlib import Path
from lib.monitoring.aggregation import StepReport
from lib.monitoring.trackers import build_reporters
reporters = build_reporters(Path(sys.argv[1]), "my run", "trackio")
for step in (1, 2):
    reporters.report(StepReport(step, 5.0 - step, 2, 64, 3.5, 2, 4, 1e9), {"contribution/eve": 5})
reporters.report_table("contributors", ("name", "samples"), [("<img src=x onerror=document.title=1>", 5)], 2)
reporters.close()
"""
# Starts the server and waits to be killed.
PARENT = """
import logging, sys, time
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
from lib.monitoring.dashboard_server import DashboardServer
DashboardServer("run", "127.0.0.1", int(sys.argv[1]))
time.sleep(600)
"""


@pytest.fixture
def port() -> int:
    with socket.socket() as candidate:
        candidate.bind(("127.0.0.1", 0))
        return candidate.getsockname()[1]


@pytest.fixture(autouse=True)
def environment(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("TRACKIO_WRITE_TOKEN", SECRET)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def start(caplog) -> Iterator:
    """Return a function that starts a server."""
    caplog.set_level(logging.INFO)
    servers = []

    def start(port: int | None, project: str = "my run") -> DashboardServer:
        servers.append(DashboardServer(project, "127.0.0.1", port))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def call(address: str, name: str, **values) -> requests.Response:
    return requests.post(f"{address}/api/{name}", json=values, timeout=30)


def test_page_shows_the_curves_and_changes_nothing(start, port, caplog, tmp_path):
    subprocess.run([sys.executable, "-W", "ignore", "-c", WRITER, str(tmp_path)], check=True, timeout=120)
    server = start(port)
    page = wait_until(lambda: re.search(r"Dashboard: (\S+) \(read-only\)", caplog.text), 120, "the address")[1]
    assert page == f"http://127.0.0.1:{port}/?project=my%20run"
    response = requests.get(page, timeout=30)
    assert response.status_code == 200 and "text/html" in response.headers["content-type"]
    address = f"http://127.0.0.1:{port}"
    logs = call(address, "get_logs", project="my run", run="monitor").text
    assert '"loss":4.0' in logs.replace(" ", "") and "contribution/eve" in logs
    for name in ("delete_run", "bulk_log", "force_sync", "query_project"):
        assert call(address, name, project="my run", run="monitor").status_code == 404, name
    upload = requests.post(f"{address}/api/upload", files={"files": b"x"}, timeout=30)
    assert upload.status_code >= 400 and "write_token is required" in upload.text
    assert "monitor" in call(address, "get_runs_for_project", project="my run").text

    server.close()
    server.close()
    with pytest.raises(requests.ConnectionError):
        requests.get(page, timeout=30)
    assert SECRET not in caplog.text and "token" not in caplog.text and response.text.count(SECRET) == 0
    assert [record.levelname for record in caplog.records if "ashboard" in record.message] == ["INFO"]


@pytest.fixture
def browse(tmp_path):
    """Return a function that opens a page in a headless browser and returns its document after scripts have run."""
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("needs chromium: apt install chromium")

    def browse(page: str) -> str:
        command = [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=15000", "--dump-dom",
            f"--user-data-dir={tmp_path / 'browser'}", page,
        ]  # fmt: skip
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout

    return browse


@pytest.mark.browser
def test_browser_shows_the_curves_and_runs_no_code_in_names(start, port, caplog, tmp_path, browse):
    subprocess.run([sys.executable, "-W", "ignore", "-c", WRITER, str(tmp_path)], check=True, timeout=120)
    start(port)
    wait_until(lambda: "Dashboard: " in caplog.text, 120, "the address")
    curves, tables = (browse(f"http://127.0.0.1:{port}/{name}?project=my%20run") for name in ("", "media"))
    for curve in ("loss", "alive peers", "performance", "eve"):
        assert re.search(rf">\s*{curve}\s*<", curves), curve
    assert "&lt;img src=x onerror=document.title=1&gt;" in tables and "<img src=x" not in tables
    assert "<title>Trackio Dashboard</title>" in tables
    for document in (curves, tables):
        assert SECRET not in document


def test_port_in_use_is_one_warning(start, port, caplog):
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        start(port)
        wait_until(lambda: "has ended" in caplog.text, 120, "the warning")
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1 and f"port {port}" in warnings[0] and "--dashboard_port" in warnings[0]


def test_server_ends_with_a_killed_monitor(port, tmp_path):
    with open(tmp_path / "out", "wb") as out:
        parent = subprocess.Popen([sys.executable, "-W", "ignore", "-c", PARENT, str(port)], stdout=out, stderr=out)
    try:
        wait_until(lambda: b"Dashboard: " in (tmp_path / "out").read_bytes(), 120, "the address")
        (child,) = psutil.Process(parent.pid).children()
        assert os.getpgid(child.pid) != os.getpgid(parent.pid), "Ctrl-C would end it"
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert SECRET.encode() not in (tmp_path / "out").read_bytes()


def test_monitor_with_a_dashboard(scripts, port):
    monitor = scripts.monitor("--dashboard", "--dashboard_port", port)
    wait_until(lambda: "Dashboard: " in monitor.output, 120, "the address")
    assert f"Dashboard: http://127.0.0.1:{port}/?project=" in monitor.output
    assert requests.get(f"http://127.0.0.1:{port}/", timeout=30).status_code == 200
    assert monitor.stop() == 0, monitor.output
    monitor.assert_nothing_left()
    with pytest.raises(requests.ConnectionError):
        requests.get(f"http://127.0.0.1:{port}/", timeout=30)
    assert SECRET not in monitor.output and "write_token" not in monitor.output and "Traceback" not in monitor.output
