"""Messages by webhook: a local server receives them, refuses them, or says nothing."""

import json
import logging
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from arguments import CollaborationArguments
from cotrain.common import alerts as alerts_module
from cotrain.common.alerts import Alerts, announced_end, read_webhook
from cotrain.common.errors import TemporaryError, UserError
from cotrain.common.flags import ArgumentsError
from tests.support.peers import wait_until

SECRET = "T0KEN-nobody-may-read"


class Webhook(ThreadingHTTPServer):
    """A server that answers with `status`; with None it hangs until it is closed."""

    daemon_threads = True

    def __init__(self):
        self.status, self.bodies, self.closed, self.arrived = 204, [], threading.Event(), threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(handler):
                handler.server.bodies.append(json.loads(handler.rfile.read(int(handler.headers["Content-Length"]))))
                handler.server.arrived.set()
                if handler.server.status is None:
                    handler.server.closed.wait()
                    return
                handler.send_response(handler.server.status)
                handler.send_header("Location", "http://127.0.0.1:1/")
                handler.end_headers()

            def log_message(handler, *args):
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def texts(self) -> list[str]:
        return [body["text"] for body in self.bodies]


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    server = Webhook()
    yield server
    server.closed.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def file(webhook, tmp_path) -> Path:
    (tmp_path / "webhook").write_text(f"http://127.0.0.1:{webhook.server_port}/{SECRET}\n")
    return tmp_path / "webhook"


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(alerts_module, "time", clock)
    return clock


def test_a_kind_is_sent_once_an_hour(webhook, file, clock):
    alerts = Alerts(str(file), "Monitor of run r")
    for now, kind in ((0.0, "disk"), (60.0, "disk"), (60.0, "loss"), (3599.0, "disk"), (3601.0, "disk")):
        clock.now = now
        alerts.send(kind, f"{kind} at {now:.0f}")
        alerts.close()
    assert webhook.texts == [f"Monitor of run r: {what}" for what in ("disk at 0", "loss at 60", "disk at 3601")]
    assert all(body["content"] == body["text"] for body in webhook.bodies), "Slack reads one, Discord the other"


@pytest.mark.parametrize("fault", ["refuses", "redirects", "hangs", "is gone"])
def test_a_server_that_fails_stops_nothing_and_its_address_stays_secret(webhook, file, monkeypatch, caplog, fault):
    monkeypatch.setattr(alerts_module, "TIMEOUT", 0.5)
    caplog.set_level(logging.INFO)
    webhook.status = {"refuses": 403, "redirects": 302, "hangs": None, "is gone": 500}[fault]
    if fault == "is gone":
        webhook.shutdown()
        webhook.server_close()
    alerts = Alerts(str(file), "Trainer a")
    began = time.monotonic()
    alerts.send("end", "x")
    assert time.monotonic() - began < 0.4
    wait_until(lambda: "Could not send 'end' to the webhook of --webhook_file: " in caplog.text, 60, "the warning")
    assert SECRET not in caplog.text and str(webhook.server_port) not in caplog.text


@pytest.mark.parametrize(
    ("error", "stopped", "expected"),
    [
        (UserError("the disk is full"), False, ["Trainer a: stopped for good: the disk is full"]),
        (TemporaryError("no peer answers"), False, []),
        (None, False, ["Trainer a: ended: the run, or its part in it, is complete"]),
        (None, True, []),
        (SystemExit(0), True, []),
    ],
)
def test_end_is_told_unless_it_was_asked_for_or_another_start_helps(webhook, file, error, stopped, expected):
    try:
        with announced_end(Alerts(str(file), "Trainer a"), lambda: stopped):
            if error is not None:
                raise error
    except BaseException as raised:
        assert raised is error
    assert webhook.texts == expected


@pytest.mark.parametrize("content", ["", "hooks.slack.com/services/T0KEN", "ftp://a/T0KEN", "https://a/T0KEN\nmore"])
def test_wrong_file_is_refused_without_its_content(tmp_path, content):
    (tmp_path / "webhook").write_text(content)
    with pytest.raises(ArgumentsError, match="--webhook_file: .* must have one line") as error:
        CollaborationArguments(run_id="run", webhook_file=str(tmp_path / "webhook"))
    assert "T0KEN" not in str(error.value)
    (tmp_path / "webhook").write_bytes(b"\xef\xbb\xbfhttps://hooks.slack.com/services/x\r\n")  # an editor of Windows
    assert read_webhook(str(tmp_path / "webhook")) == "https://hooks.slack.com/services/x"
    with pytest.raises(ArgumentsError, match="--webhook_file: there is no file"):
        CollaborationArguments(run_id="run", webhook_file=str(tmp_path / "none"))
