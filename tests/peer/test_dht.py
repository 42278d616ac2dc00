"""The workarounds for hivemind's DHT and for libp2p's daemon."""

import multiprocessing
import os
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from hivemind.utils import MPFuture

from lib.peer.dht import RelayedP2P, use_own_socket_folder
from lib.peer.peer import _end
from tests.support.peers import local_peer

RELAY = "/ip4/127.0.0.1/tcp/31337/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


@pytest.mark.peers
def test_daemon_uses_the_relays_that_it_is_given_and_no_others(tmp_path):
    """libp2p would take none before it knows four or has waited for three minutes."""
    with local_peer(tmp_path, "run", use_auto_relay=True, trusted_relays=[RELAY]) as peer:
        (daemon,) = psutil.Process(peer.dht.pid).children()
        assert {f"-trustedRelays={RELAY}", "-relayDiscovery=0"} <= set(daemon.cmdline())


@pytest.mark.peers
def test_sockets_are_in_a_folder_of_this_process(tmp_path):
    before = set(Path("/tmp").glob("hivemind-*.sock"))
    with local_peer(tmp_path, "run") as peer:
        folder = Path(tempfile.gettempdir()) / f"hivemind-sockets-{os.getpid()}"
        (daemon,) = psutil.Process(peer.dht.pid).children()
        assert any(f"/unix{folder}/" in argument for argument in daemon.cmdline())
        assert any(folder.iterdir())
    assert set(Path("/tmp").glob("hivemind-*.sock")) <= before


def test_socket_folders_of_processes_that_were_killed_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(RelayedP2P, "_UNIX_SOCKET_PREFIX", "")
    process = multiprocessing.Process(target=time.sleep, args=(0,))
    process.start()
    process.join()
    (tmp_path / f"hivemind-sockets-{process.pid}").mkdir()
    (tmp_path / f"hivemind-sockets-{os.getppid()}").mkdir()
    use_own_socket_folder()
    assert {int(path.name.rsplit("-", 1)[-1]) for path in tmp_path.iterdir()} == {os.getpid(), os.getppid()}


def hold_the_lock(has_lock) -> None:
    with MPFuture._update_lock:
        has_lock.set()
        time.sleep(600)


def test_dht_that_is_killed_leaves_no_lock_to_the_next():
    has_lock = multiprocessing.Event()
    process = multiprocessing.Process(target=hold_the_lock, args=(has_lock,), daemon=True)
    process.start()
    assert has_lock.wait(30)
    _end(process)
    assert not process.is_alive() and MPFuture._update_lock.acquire(timeout=1)
    MPFuture._update_lock.release()
