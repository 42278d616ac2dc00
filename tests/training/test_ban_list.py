"""The ban list of a peer persists across restarts."""

import json
import time

import pytest
from hivemind.p2p import PeerID

from lib.training.ban_list import BanList

ONE, OTHER = (
    PeerID.from_base58(name)
    for name in ("QmcH4MyH7czQHqJJb4A9y68eHv3yTSUc5uRpf8JXU6H7wu", "QmZcRSgpd9N8ZbRZBH3HqDEgHS7eAWz8GHHkBauBxqwYLY")
)


class FakeAverager:
    """Fake averager that stores bans."""

    def __init__(self):
        self.banned: dict[bytes, float] = {}

    def banned_peers(self) -> dict[bytes, float]:
        return dict(self.banned)

    def ban(self, peers: dict[bytes, float]) -> None:
        self.banned.update(peers)


def test_bans_hold_after_a_restart(tmp_path):
    before, after = FakeAverager(), FakeAverager()
    file = BanList(tmp_path, before)
    assert before.banned == {}
    file.save()
    assert list(tmp_path.iterdir()) == [], "nothing to remember"
    for peer_id in (ONE, OTHER):
        before.ban({peer_id.to_bytes(): time.time() + 60})
        file.save()
    BanList(tmp_path, after)
    assert after.banned == before.banned


def test_no_ban_is_longer_than_a_new_one_though_the_clock_was_wrong(tmp_path):
    optimizer = FakeAverager()
    (tmp_path / "banned_peers.json").write_text(json.dumps({ONE.to_base58(): time.time() + 1e6}))
    BanList(tmp_path, optimizer)
    assert time.time() + 500 < optimizer.banned[ONE.to_bytes()] < time.time() + 700


@pytest.mark.parametrize("content", ["", "{", "[1]", "null", '{"Qm": "x"}', '{"Qm": null}', '{"0l": 1}', "\udcff"])
def test_file_that_cannot_be_read_is_skipped(tmp_path, content):
    path = tmp_path / "banned_peers.json"
    path.write_text(content, errors="surrogateescape")
    optimizer = FakeAverager()
    file = BanList(tmp_path, optimizer)
    assert optimizer.banned == {}
    assert path.with_name("banned_peers.json.old").read_text(errors="surrogateescape") == content
    optimizer.ban({ONE.to_bytes(): time.time() + 60})
    file.save()
    assert ONE.to_base58() in path.read_text()


def test_file_that_cannot_be_written_is_a_warning(tmp_path):
    (tmp_path / "banned_peers.json" / "folder").mkdir(parents=True)
    optimizer = FakeAverager()
    file = BanList(tmp_path, optimizer)
    optimizer.ban({ONE.to_bytes(): time.time() + 60})
    file.save()
    assert [path.name for path in tmp_path.iterdir()] == ["banned_peers.json"], "nothing half done is left"
