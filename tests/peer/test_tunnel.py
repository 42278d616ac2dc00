"""Tunnels: peers join and average through the address of a tunnel, and errors name the cause. ngrok's SDK is real; its
servers are fake."""

import contextlib
import logging
import re
import signal
import socket
import sys
import types
from collections.abc import Callable
from pathlib import Path

import ngrok
import pytest

from cotrain.arguments import BaseTrainingArguments
from cotrain.common.errors import UserError
from cotrain.peer import tunnel
from cotrain.peer.addresses import get_free_port
from cotrain.peer.tunnel import (
    NGROK_INSTALL,
    TunnelWatch,
    find_local_endpoint,
    find_local_maddrs,
    find_ngrok_token,
    open_tunnel,
    probe,
)
from tests.support.peers import ROOT, Scripts, local_peer, wait_until
from tests.support.tunnels import FakeNgrok, make_certificate

SDK = ngrok.SessionBuilder
TOKEN = "2abcdefghijklmnopqrstuvwxyz_SECRET"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    """Return a home folder without the ngrok token of the user who runs the tests."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NGROK_AUTHTOKEN", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return tmp_path


@pytest.fixture
def refusal(monkeypatch) -> Callable[[int, bytes], str]:
    """Return a function that opens a tunnel at these servers instead of ngrok's, and returns the error."""

    def refusal(port: int, certificate: bytes) -> str:
        monkeypatch.setenv("NGROK_AUTHTOKEN", TOKEN)
        builder = SDK().server_addr(f"localhost:{port}").ca_cert(bytearray(certificate))
        monkeypatch.setattr(ngrok, "SessionBuilder", lambda: builder)
        with pytest.raises(UserError) as error_info, open_tunnel(BaseTrainingArguments(tunnel="ngrok")):
            pass
        message = str(error_info.value)
        assert message.startswith("--tunnel ngrok: ") and "\n" not in message and TOKEN not in message
        return message

    return refusal


@pytest.mark.peers
def test_peers_join_through_a_tunnel_that_is_closed_when_its_monitor_is_stopped_or_killed(tmp_path, launcher):
    starter = Scripts(tmp_path, tmp_path, launcher=launcher)
    with FakeNgrok() as servers, contextlib.closing(starter) as scripts:
        (tmp_path / "certificate.pem").write_bytes(servers.certificate)
        env = {
            "FAKE_NGROK": str(servers.port),
            "FAKE_NGROK_CERTIFICATE": str(tmp_path / "certificate.pem"),
            "NGROK_AUTHTOKEN": TOKEN,
        }

        def start(name: str):
            peer = scripts.start(
                "tests/support/ngrok_peer.py", "--no_store_checkpoints", "--host_maddrs", "/ip4/127.0.0.1/tcp/0",
                "--tunnel", "ngrok", "--output_dir", tmp_path / "monitor", "--debug", log=name, env=env,
            )  # fmt: skip
            peer.wait_for(r"Ngrok tunnel created: tcp://localhost:\d+")
            address = peer.wait_for(r"over the Internet, use .*--initial_peers (/dns4/localhost/tcp/\d+/p2p/\w+)")[1]
            peer.wait_for(r"same network may also use --initial_peers /ip4/127\.0\.0\.1/tcp/\d+/p2p/\w+")
            assert probe(f"localhost:{servers.public_port}") == ""
            return peer, address

        peer, address = start("stopped")
        with local_peer(tmp_path / "guest", "run", (address,)):
            assert servers.tokens == [TOKEN] and servers.bytes_passed > 1000
        assert peer.stop() == 0
        peer.assert_nothing_left()
        assert servers.was_told_to_close and not servers.is_open
        assert TOKEN not in peer.output and "Traceback" not in peer.output

        peer, _ = start("killed")
        assert peer.stop(signal.SIGKILL) == -signal.SIGKILL
        peer.assert_nothing_left()
        wait_until(lambda: not servers.is_open, 30, "the end of the session")


LOGIN = (
    f"The authtoken you specified is properly formed, but it is invalid.\nYour authtoken: {TOKEN}\r\n\r\nERR_NGROK_107"
)
CARD = "You must add a credit or debit card\r\n\r\nERR_NGROK_8013\r\n"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"refuse_login": LOGIN}, ["properly formed, but it is invalid", "ERR_NGROK_107"]),
        ({"refuse_endpoint": CARD}, ["You must add a credit or debit card", "ERR_NGROK_8013"]),
    ],
)
def test_refusal_is_shown_in_ngroks_words(fault, words, refusal):
    with FakeNgrok(**fault) as servers:
        message = refusal(servers.port, servers.certificate)
        assert all(word in message for word in words)
        wait_until(lambda: not servers.is_open, 30, "the end of the session")


def test_ngrok_that_does_not_answer_is_named(refusal, monkeypatch):
    certificate, _ = make_certificate()
    assert "failed to connect" in refusal(get_free_port(), certificate)
    monkeypatch.setattr(tunnel, "NGROK_TIMEOUT", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert "no answer" in refusal(silent.getsockname()[1], certificate)


def test_sdk_that_is_not_installed_is_named_with_the_command(monkeypatch):
    monkeypatch.setenv("NGROK_AUTHTOKEN", TOKEN)
    assert NGROK_INSTALL.split()[-1] in (ROOT / "requirements-dev.txt").read_text().split()
    for module in (None, types.ModuleType("ngrok")):  # the second: older than SessionBuilder
        monkeypatch.setitem(sys.modules, "ngrok", module)
        with (
            pytest.raises(UserError, match=re.escape(NGROK_INSTALL)),
            open_tunnel(BaseTrainingArguments(tunnel="ngrok")),
        ):
            pass


@pytest.mark.parametrize(
    ("path", "content", "token"),
    [
        (".config/ngrok/ngrok.yml", "version: 3\nagent:\n  authtoken: TOKEN\n", "TOKEN"),
        (".config/ngrok/ngrok.yml", 'version: "2"\nauthtoken: "TOKEN"\n', "TOKEN"),
        (".config/ngrok/ngrok.yml", "authtoken: [TOKEN", None),
        (".config/ngrok/ngrok.yml", "agent: 3\nauthtoken: ' '\x00", None),
        (".config/ngrok/other.yml", "authtoken: TOKEN\n", None),
    ],
)
def test_token_is_found_where_ngrok_keeps_it(home, path, content, token, monkeypatch):
    (home / path).parent.mkdir(parents=True)
    (home / path).write_text(content)
    with contextlib.nullcontext() if token else pytest.raises(UserError, match=r"NGROK_AUTHTOKEN.*add-authtoken"):
        assert find_ngrok_token() == token
    monkeypatch.setenv("NGROK_AUTHTOKEN", "another\n")
    assert find_ngrok_token() == "another"


def test_tunnel_that_breaks_is_reported_once_and_so_is_its_return(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    results = iter(["", "lost", "", "down", "down", "down", "", "down", "down"])
    monkeypatch.setattr(tunnel, "probe", lambda endpoint: next(results) if endpoint == "tunnel" else peer_fault)
    watch, peer_fault = TunnelWatch("tunnel", "local"), ""
    for _ in range(7):
        watch.work()
    peer_fault = "refused"
    for _ in range(2):
        watch.work()
    levels = [record.levelno for record in caplog.records if record.name == "cotrain.peer.tunnel"]
    assert levels == [logging.WARNING, logging.INFO]
    assert "Nobody can join through the tunnel tunnel (down)" in caplog.text


def test_probe_tells_a_peer_from_another_server():
    assert "refused" in probe(f"127.0.0.1:{get_free_port()}")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert "timed out" in probe(f"127.0.0.1:{silent.getsockname()[1]}", timeout=0.1)


def test_local_addresses_are_those_of_the_interfaces(monkeypatch):
    found = {2: ["127.0.0.1", "192.168.1.5"], 10: ["::1", "fd00::5", "fe80::5%eth0"], 17: ["02:42:ac:11:00:02"]}
    interface = [
        types.SimpleNamespace(family=family, address=text) for family, texts in found.items() for text in texts
    ]
    monkeypatch.setattr("psutil.net_if_addrs", lambda: {"all": interface})
    expected = ["/ip4/192.168.1.5/tcp/7", "/ip6/fd00::5/tcp/7", "/ip4/10.0.0.1/tcp/7"]
    assert find_local_maddrs(["/ip4/0.0.0.0/tcp/7", "/ip6/::/tcp/7", "/ip4/10.0.0.1/tcp/7"]) == expected


@pytest.mark.parametrize(
    ("endpoint", "listen", "maddr", "local"),
    [
        ("bore.pub:7", "/ip4/0.0.0.0/tcp/80", "/dns4/bore.pub/tcp/7", "127.0.0.1:80"),
        ("203.0.113.9:7", "/ip4/10.0.0.1/tcp/80", "/ip4/203.0.113.9/tcp/7", "10.0.0.1:80"),
        ("[2001:db8::1]:7", "/ip6/::/tcp/80", "/ip6/2001:db8::1/tcp/7", "[::1]:80"),
    ],
)
def test_tunnel_is_announced_first_and_with_what_the_user_announces(endpoint, listen, maddr, local):
    others = ["/ip4/192.168.1.5/tcp/80"]
    args = BaseTrainingArguments(announce_tunnel=endpoint, host_maddrs=[listen], announce_maddrs=others)
    with open_tunnel(args):
        assert args.announce_maddrs == [maddr, *others]
    assert find_local_endpoint([listen], 80) == local
