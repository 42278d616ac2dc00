"""Tunnels: peers join and average through the address of a tunnel, and errors name the cause. ngrok's SDK is real; its
servers are fake."""

import contextlib
import logging
import re
import signal
import sys
import threading
import types
from pathlib import Path

import ngrok
import pytest

from arguments import BaseTrainingArguments
from lib.common.errors import UserError
from lib.peer.addresses import get_free_port, log_visible_maddrs
from lib.peer.peer import start_peer
from lib.peer.tunnel import (
    NGROK_INSTALL,
    TunnelWatch,
    find_local_endpoint,
    find_local_maddrs,
    find_ngrok_token,
    open_tunnel,
    probe,
)
from tests.support.peers import ROOT, Scripts, local_peer, wait_until
from tests.support.swarm import Network, Swarm
from tests.support.tunnels import FakeNgrok, Forwarder

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
def use(monkeypatch):
    """Redirect the SDK from ngrok's servers to these."""

    def use(servers: FakeNgrok) -> None:
        monkeypatch.setenv("NGROK_AUTHTOKEN", TOKEN)
        monkeypatch.setattr(
            ngrok,
            "SessionBuilder",
            lambda: SDK().server_addr(f"localhost:{servers.port}").ca_cert(bytearray(servers.certificate)),
        )

    return use


@pytest.mark.peers
def test_peers_average_through_the_sdk_of_ngrok(tmp_path, use, caplog):
    """The second peer knows only the tunnel."""
    caplog.set_level(logging.DEBUG)
    args = BaseTrainingArguments(run_id="run", use_relay=False, host_maddrs=["/ip4/127.0.0.1/tcp/0"], tunnel="ngrok")
    with FakeNgrok() as servers:
        use(servers)
        with contextlib.ExitStack() as stack:
            stack.enter_context(open_tunnel(args))
            assert f"Ngrok tunnel created: tcp://localhost:{servers.public_port}" in caplog.messages
            assert servers.tokens == [TOKEN] and TOKEN not in caplog.text
            first = start_peer(args, tmp_path / "identity.key", False, threading.Event())
            stack.callback(first.dht.shutdown)
            address = f"/dns4/localhost/tcp/{servers.public_port}/p2p/{first.dht.peer_id}"
            second = stack.enter_context(local_peer(tmp_path / "second", "run", (address,)))
            swarm = Swarm(stack, Network(stack, tmp_path), tmp_path)
            one, other = (swarm.add(peer=peer) for peer in (first, second))
            swarm.global_step(6, 6)
            assert [len(trainer.entry["group"]) for trainer in (one, other)] == [2, 2]
            assert (one.parameters - other.parameters).abs().max() < 1e-6
            assert servers.bytes_passed > 2 * one.parameters.nbytes
        assert servers.was_told_to_close
        wait_until(lambda: not servers.is_open, 30, "the end of the session")


@pytest.mark.peers
def test_monitor_closes_its_tunnel_when_it_is_stopped_and_when_it_is_killed(tmp_path, launcher):
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
            peer.wait_for(f"Ngrok tunnel created: tcp://localhost:{servers.public_port or '[0-9]+'}")
            peer.wait_for(r"over the Internet, use .*--initial_peers /dns4/localhost/tcp/\d+/p2p/\w+")
            peer.wait_for(r"same network may also use --initial_peers /ip4/127\.0\.0\.1/tcp/\d+/p2p/\w+")
            assert probe(f"localhost:{servers.public_port}") == ""
            return peer

        peer = start("stopped")
        assert peer.stop() == 0
        peer.assert_nothing_left()
        assert servers.was_told_to_close and not servers.is_open
        assert TOKEN not in peer.output and "Traceback" not in peer.output

        peer = start("killed")
        assert peer.stop(signal.SIGKILL) == -signal.SIGKILL
        peer.assert_nothing_left()
        wait_until(lambda: not servers.is_open, 30, "the end of the session")


def test_tunnel_is_closed_when_the_peer_does_not_start(use):
    with FakeNgrok() as servers:
        use(servers)
        with pytest.raises(RuntimeError, match="peer"), open_tunnel(BaseTrainingArguments(tunnel="ngrok")):
            assert servers.is_open
            raise RuntimeError("the peer does not start")
        assert servers.was_told_to_close
        wait_until(lambda: not servers.is_open, 30, "the end of the session")


def refusal(servers: FakeNgrok, use) -> str:
    use(servers)
    with pytest.raises(UserError) as error_info, open_tunnel(BaseTrainingArguments(tunnel="ngrok")):
        pass
    message = str(error_info.value)
    assert message.startswith("--tunnel ngrok") and "\n" not in message and TOKEN not in message
    return message


LOGIN = (
    f"The authtoken you specified is properly formed, but it is invalid.\nYour authtoken: {TOKEN}\r\n\r\nERR_NGROK_107"
)
CARD = "You must add a credit or debit card\r\n\r\nERR_NGROK_8013\r\n"


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        ({"refuse_login": LOGIN}, ["properly formed, but it is invalid", "docs/errors/err_ngrok_107"]),
        ({"refuse_endpoint": CARD}, ["You must add a credit or debit card", "docs/errors/err_ngrok_8013"]),
    ],
)
def test_refusal_is_shown_in_ngroks_words(faults, words, use):
    with FakeNgrok(**faults) as servers:
        message = refusal(servers, use)
        assert all(word in message for word in [*words, "--announce_tunnel"])
        wait_until(lambda: not servers.is_open, 30, "the end of the session")


def test_ngrok_that_cannot_be_reached_is_explained(use):
    with FakeNgrok() as servers:
        servers.break_down()
        message = refusal(servers, use)
    assert "is not reachable" in message and "connect.ngrok-agent.com:443" in message


def test_wait_for_ngrok_is_bounded(use, monkeypatch):
    monkeypatch.setattr("lib.peer.tunnel.NGROK_TIMEOUT", 0.5)
    with FakeNgrok(silent=True) as servers:
        message = refusal(servers, use)
        assert "no answer" in message and "--announce_tunnel" in message
        wait_until(lambda: not servers.is_open, 30, "the end of the session")


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
        (".ngrok2/ngrok.yml", "authtoken: TOKEN\n", "TOKEN"),
        (".ngrok2/ngrok.yml", "authtoken: [TOKEN", None),
        (".ngrok2/ngrok.yml", "agent: 3\nauthtoken: ' '\x00", None),
        (".ngrok2/other.yml", "authtoken: TOKEN\n", None),
    ],
)
def test_token_is_found_where_ngrok_keeps_it(home, path, content, token, monkeypatch):
    (home / path).parent.mkdir(parents=True)
    (home / path).write_text(content)
    with contextlib.nullcontext() if token else pytest.raises(UserError, match=r"NGROK_AUTHTOKEN.*add-authtoken"):
        assert find_ngrok_token() == token
    monkeypatch.setenv("NGROK_AUTHTOKEN", "another\n")
    assert find_ngrok_token() == "another"


@pytest.mark.peers
def test_tunnel_that_breaks_is_reported_once_and_so_is_its_return(tmp_path, caplog):
    with local_peer(tmp_path, "run") as peer:
        port = int(peer.dht.get_visible_maddrs()[0]["tcp"])
        with Forwarder(port) as forwarder:
            watch = TunnelWatch(f"localhost:{forwarder.port}", f"127.0.0.1:{port}", "mend it", period=0.05)
            caplog.set_level(logging.INFO, logger="lib.peer.tunnel")
            watch.start()
            wait_until(lambda: forwarder.bytes_passed, 120, "a probe")
            forwarder.break_down()
            wait_until(lambda: "mend it" in caplog.text, 120, "a warning")
            forwarder.repair()
            wait_until(lambda: "again" in caplog.text, 120, "the good news")
            forwarder.target_port = get_free_port()  # no server at this port
            wait_until(lambda: caplog.text.count("mend it") == 2, 120, "another warning")
            watch.stop()
            watch.join(10)
    assert [record.levelno for record in caplog.records if record.name == "lib.peer.tunnel"] == [
        logging.WARNING, logging.INFO, logging.WARNING,
    ]  # fmt: skip


def test_tunnel_of_an_absent_peer_is_not_reported(caplog):
    watch = TunnelWatch(f"127.0.0.1:{get_free_port()}", f"127.0.0.1:{get_free_port()}", "mend it", period=0.01)
    threading.Timer(0.3, watch.stop).start()
    watch.run()
    assert "mend it" not in caplog.text


def test_tunnel_leads_to_where_the_peer_listens():
    assert find_local_endpoint(["/ip4/0.0.0.0/tcp/8080", "/ip4/10.0.0.1/tcp/80"], 80) == "10.0.0.1:80"
    assert find_local_endpoint(["/ip4/0.0.0.0/tcp/80"], 80) == "127.0.0.1:80"
    assert find_local_endpoint(["/ip6/::/tcp/80"], 80) == "[::1]:80"


def test_local_addresses_are_those_of_the_interfaces(monkeypatch):
    interfaces = {
        "lo": [(2, "127.0.0.1"), (10, "::1")],
        "eth0": [(2, "192.168.1.5"), (10, "fd00::5"), (10, "fe80::5%eth0"), (17, "02:42:ac:11:00:02")],
    }
    monkeypatch.setattr(
        "psutil.net_if_addrs",
        lambda: {
            name: [types.SimpleNamespace(family=family, address=address) for family, address in addresses]
            for name, addresses in interfaces.items()
        },
    )
    assert find_local_maddrs(["/ip4/0.0.0.0/tcp/7", "/ip6/::/tcp/7"]) == [
        "/ip4/192.168.1.5/tcp/7",
        "/ip6/fd00::5/tcp/7",
    ]
    assert find_local_maddrs(["/ip4/10.0.0.1/tcp/7"]) == ["/ip4/10.0.0.1/tcp/7"]
    del interfaces["eth0"]
    assert find_local_maddrs(["/ip4/0.0.0.0/tcp/7"]) == ["/ip4/127.0.0.1/tcp/7"]


@pytest.mark.parametrize(
    ("endpoint", "maddr"),
    [
        ("bore.pub:7", "/dns4/bore.pub/tcp/7"),
        ("203.0.113.9:7", "/ip4/203.0.113.9/tcp/7"),
        ("[2001:db8::1]:7", "/ip6/2001:db8::1/tcp/7"),
    ],
)
def test_tunnel_is_announced_first_and_with_what_the_user_announces(endpoint, maddr):
    others = ["/ip4/192.168.1.5/tcp/80"]
    args = BaseTrainingArguments(announce_tunnel=endpoint, host_maddrs=["/ip4/0.0.0.0/tcp/80"], announce_maddrs=others)
    with open_tunnel(args):
        assert args.announce_maddrs == [maddr, *others]


def test_nothing_is_changed_without_a_tunnel():
    args = BaseTrainingArguments()
    with open_tunnel(args):
        assert args == BaseTrainingArguments()


def test_both_ways_to_join_are_printed(caplog):
    from hivemind.utils.multiaddr import Multiaddr

    caplog.set_level(logging.INFO)
    maddrs = [
        "/dns4/0.tcp.ngrok.io/tcp/12345/p2p/ID",
        "/ip4/192.168.1.5/tcp/80/p2p/ID",
        "/ip4/127.0.0.1/tcp/80/p2p/ID",
    ]
    maddrs = [maddr.replace("ID", "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N") for maddr in maddrs]
    log_visible_maddrs([Multiaddr(maddr) for maddr in maddrs], only_p2p=False)
    lines = [line for line in caplog.messages if "--initial_peers" in line]
    assert len(lines) == 2
    assert maddrs[0] in lines[0] and "over the Internet" in lines[0]
    assert maddrs[1] in lines[1] and maddrs[2] not in lines[1]
