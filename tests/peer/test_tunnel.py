"""Tunnels: their addresses and errors, which name the cause. ngrok's SDK is real; its servers are fake."""

import contextlib
import re
import socket
import sys
import types
from collections.abc import Callable
from pathlib import Path

import ngrok
import pytest

from arguments import BaseTrainingArguments
from cotrain.common.errors import TemporaryError, UserError
from cotrain.peer import tunnel
from cotrain.peer.addresses import get_free_port
from cotrain.peer.tunnel import NGROK_INSTALL, find_local_endpoint, find_local_maddrs, find_ngrok_token, open_tunnel
from tests.support.processes import ROOT
from tests.support.tunnels import FakeSessionBuilder

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
def refusal(monkeypatch) -> Callable[[object], str]:
    """Return a function that opens a tunnel with an instance of the SDK, and returns the error."""

    def refusal(builder: object, kind: type[UserError] = UserError) -> str:
        monkeypatch.setenv("NGROK_AUTHTOKEN", TOKEN)
        monkeypatch.setattr(ngrok, "SessionBuilder", lambda: builder)
        with pytest.raises(kind) as error_info, open_tunnel(BaseTrainingArguments(tunnel="ngrok")):
            pass
        message = str(error_info.value)
        assert message.startswith("--tunnel ngrok: ") and "\n" not in message and TOKEN not in message
        return message

    return refusal


def test_refusal_is_shown_in_ngroks_words(refusal):
    builder = FakeSessionBuilder()
    builder.refusal = "failed to connect session", f"it is invalid.\nYour authtoken: {TOKEN}\r\n\r\nERR_NGROK_107"
    assert refusal(builder).endswith("it is invalid. Your authtoken: ... ERR_NGROK_107")


def test_session_of_a_crashed_peer_is_waited_for(refusal):
    builder = FakeSessionBuilder()
    limit = "Your account is limited to 1 simultaneous ngrok agent sessions.\r\nERR_NGROK_108"
    builder.refusal = "failed to connect session", limit
    assert "ERR_NGROK_108; another peer uses this token" in refusal(builder, TemporaryError)


def test_ngrok_that_does_not_answer_is_named(refusal, monkeypatch):
    """With the real SDK."""
    assert "failed to connect" in refusal(SDK().server_addr(f"localhost:{get_free_port()}"))
    monkeypatch.setattr(tunnel, "NGROK_TIMEOUT", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert "no answer" in refusal(SDK().server_addr(f"localhost:{silent.getsockname()[1]}"))


def test_tunnel_leads_to_the_peer_and_is_closed(monkeypatch, tmp_path):
    monkeypatch.setenv("NGROK_AUTHTOKEN", TOKEN)
    monkeypatch.setattr(FakeSessionBuilder, "log", str(tmp_path / "log"))
    monkeypatch.setattr(ngrok, "SessionBuilder", FakeSessionBuilder)
    args = BaseTrainingArguments(tunnel="ngrok", announce_maddrs=["/ip4/192.168.1.5/tcp/80"])
    with open_tunnel(args):
        port = args.host_maddrs[0].rsplit("/", 1)[1]
        assert args.announce_maddrs == [f"/dns4/localhost/tcp/{port}", "/ip4/192.168.1.5/tcp/80"]
    noted = (tmp_path / "log").read_text(encoding="utf-8").splitlines()
    assert noted == [f"token {TOKEN}", f"open tcp://127.0.0.1:{port}", "close"]


def test_sdk_that_is_not_installed_is_named_with_the_command(monkeypatch):
    monkeypatch.setenv("NGROK_AUTHTOKEN", TOKEN)
    assert NGROK_INSTALL.split()[-1] in (ROOT / "requirements-dev.txt").read_text(encoding="utf-8").split()
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
    (home / path).write_text(content, encoding="utf-8")
    with contextlib.nullcontext() if token else pytest.raises(UserError, match=r"NGROK_AUTHTOKEN.*add-authtoken"):
        assert find_ngrok_token() == token
    monkeypatch.setenv("NGROK_AUTHTOKEN", "another\n")
    assert find_ngrok_token() == "another"


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
