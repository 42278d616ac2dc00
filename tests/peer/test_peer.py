"""Peers as the scripts start them."""

import shutil
from types import SimpleNamespace

import psutil
import pytest

import cotrain.peer
from cotrain.common.errors import TemporaryError
from cotrain.peer import peer as peer_module
from peerstep import local_peer as local_peer_module
from peerstep.local_peer import end_dht
from peerstep.reports.records import get_dictionary
from tests.peerstep.test_upstream import TESTED, overridden_modules
from tests.support.peers import local_peer


@pytest.mark.peers
def test_client_listens_nowhere_and_asks_no_router_for_a_port(tmp_path):
    with local_peer(tmp_path / "one", "run") as one:
        address = str(one.dht.get_visible_maddrs()[0])
        for name, options in {"two": {"client_mode": True, "map_port": True}, "three": {}}.items():
            with local_peer(tmp_path / name, "run", (address,), **options) as peer:
                (daemon,) = psutil.Process(peer.dht.pid).children()
                listening = [c for c in daemon.net_connections("inet") if c.status == psutil.CONN_LISTEN]
                assert bool(listening) == (name == "three") and "-natPortMap=0" in daemon.cmdline()
                assert get_dictionary(peer.dht, "run_monitor") == {}


@pytest.mark.peers
def test_identity_that_another_peer_uses_is_named(tmp_path, monkeypatch):
    """The time for retries is over after the first attempt, however long that takes."""
    ended = []
    monkeypatch.setattr(peer_module, "time", SimpleNamespace(monotonic=lambda: 1000.0 * len(ended)))
    with local_peer(tmp_path / "one", "run") as first:
        address = str(first.dht.get_visible_maddrs()[0])
        monkeypatch.setattr(local_peer_module, "end_dht", lambda dht: ended.append(end_dht(dht)))
        copy = shutil.copytree(tmp_path / "one", tmp_path / "three")
        with (
            pytest.raises(TemporaryError, match=f"Identity from `{copy}/identity.key` is already taken"),
            local_peer(copy, "run", (address,)),
        ):
            pass


def test_modules_of_hivemind_that_cotrain_overrides_have_digests():
    assert not {name: ours for name, ours in overridden_modules(cotrain.peer) if name not in TESTED}
