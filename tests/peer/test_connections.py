"""How connections are classified, and when they are read. tests/peer/test_nat.py has real relays."""

from types import SimpleNamespace

from lib.common.names import derive_name
from lib.peer.address_book import _list_addresses
from lib.peer.connections import READ_SECONDS, Connections, ConnectionWatcher, classify

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


def test_connections_of_the_peers_of_the_run():
    found = classify(ADDRESSES, {NEAR, FAR, BOTH, "QmAway"})
    assert found.relayed == [derive_name(FAR)]
    assert found.direct == sorted(map(derive_name, (NEAR, BOTH)))
    assert classify(ADDRESSES[::-1], {BOTH}) == Connections(direct=[derive_name(BOTH)], relayed=[])


def test_watcher_reads_seldom_and_never_waits_without_a_bound():
    answers, calls = iter([TimeoutError(), ADDRESSES, RuntimeError()]), []

    def answer(timeout: float) -> list[str]:
        calls.append(timeout)
        if isinstance(found := next(answers), Exception):
            raise found
        return found

    def run_coroutine(coroutine, return_future: bool) -> SimpleNamespace:
        assert coroutine is _list_addresses and return_future
        return SimpleNamespace(result=answer)

    watcher = ConnectionWatcher(SimpleNamespace(run_coroutine=run_coroutine), lambda: {NEAR})
    seen = []
    for _ in range(3):
        watcher.work()
        seen.append(watcher.newest)
    assert seen == [None, Connections([derive_name(NEAR)], []), None]
    assert watcher.period == READ_SECONDS and max(calls) <= 10
