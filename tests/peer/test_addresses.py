"""How connections are counted. tests/peer/test_nat.py has real relays."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from cotrain.peer.addresses import count_connections

NEAR, FAR, BOTH, STRANGER = "QmNear", "QmFar", "QmBoth", "QmStranger"
RELAY = "/ip4/1.2.3.1/tcp/31337/p2p/QmRelay"
ADDRESSES = [
    f"/ip4/1.2.3.3/tcp/41861/p2p/{NEAR}",
    f"{RELAY}/p2p-circuit/p2p/{FAR}",  # as libp2p's daemon gives it at both ends of a relayed connection
    f"{RELAY}/p2p-circuit/p2p/{BOTH}",
    f"/ip4/1.2.3.5/tcp/1/p2p/{BOTH}",
    f"/ip4/1.2.3.6/tcp/1/p2p/{STRANGER}",
    RELAY,
]


@pytest.mark.parametrize(
    ("known", "counts"), [({NEAR, FAR, BOTH, "QmAway"}, (2, 1)), ({BOTH}, (1, 0)), ({FAR}, (0, 1)), (set(), (0, 0))]
)
def test_connections_of_the_peers_of_the_run(known, counts):
    future = Future()
    future.set_result(ADDRESSES)
    dht = SimpleNamespace(run_coroutine=lambda _coroutine, return_future: future)
    assert count_connections(dht, known) == counts


def test_connections_are_unknown_if_the_dht_does_not_answer():
    dht = SimpleNamespace(run_coroutine=lambda _coroutine, return_future: Future())
    assert count_connections(dht, {NEAR}, timeout=0.01) is None
