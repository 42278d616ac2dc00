"""Whom a peer has stopped averaging with, across restarts."""

import json
import time

import pytest
from hivemind.p2p import PeerID
from shunned import ShunnedPeers

ONE, OTHER = (
    PeerID.from_base58(name)
    for name in ("QmcH4MyH7czQHqJJb4A9y68eHv3yTSUc5uRpf8JXU6H7wu", "QmZcRSgpd9N8ZbRZBH3HqDEgHS7eAWz8GHHkBauBxqwYLY")
)


class FakeOptimizer:
    """Knows whom to shun."""

    def __init__(self):
        self.shunned: dict[bytes, float] = {}

    def shunned_peers(self) -> dict[bytes, float]:
        return dict(self.shunned)

    def shun(self, peers: dict[bytes, float]) -> None:
        self.shunned.update(peers)


def test_whom_a_peer_shuns_it_shuns_after_a_restart(tmp_path):
    before, after = FakeOptimizer(), FakeOptimizer()
    file = ShunnedPeers(tmp_path, before)
    assert before.shunned == {}
    file.save()
    assert list(tmp_path.iterdir()) == [], "nobody to remember"
    for peer_id in (ONE, OTHER):
        before.shun({peer_id.to_bytes(): time.time() + 60})
        file.save()
    ShunnedPeers(tmp_path, after)
    assert after.shunned == before.shunned


def test_nobody_is_shunned_for_longer_than_at_first_though_the_clock_was_wrong(tmp_path):
    optimizer = FakeOptimizer()
    (tmp_path / "shunned_peers.json").write_text(json.dumps({ONE.to_base58(): time.time() + 1e6}))
    ShunnedPeers(tmp_path, optimizer)
    assert time.time() + 500 < optimizer.shunned[ONE.to_bytes()] < time.time() + 700


@pytest.mark.parametrize("content", ["", "{", "[1]", "null", '{"Qm": "x"}', '{"Qm": null}', '{"0l": 1}', "\udcff"])
def test_file_that_cannot_be_read_is_skipped(tmp_path, content):
    path = tmp_path / "shunned_peers.json"
    path.write_text(content, errors="surrogateescape")
    optimizer = FakeOptimizer()
    file = ShunnedPeers(tmp_path, optimizer)
    assert optimizer.shunned == {}
    optimizer.shun({ONE.to_bytes(): time.time() + 60})
    file.save()
    assert ONE.to_base58() in path.read_text()


def test_file_that_cannot_be_written_stops_nobody(tmp_path):
    (tmp_path / "shunned_peers.json" / "folder").mkdir(parents=True)
    optimizer = FakeOptimizer()
    file = ShunnedPeers(tmp_path, optimizer)
    optimizer.shun({ONE.to_bytes(): time.time() + 60})
    file.save()
    assert [path.name for path in tmp_path.iterdir()] == ["shunned_peers.json"], "nothing half done is left"
