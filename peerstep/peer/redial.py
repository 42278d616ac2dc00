"""Periodic dialing of the initial peers, which also give the run's clock."""

import asyncio
import math
import re
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from hivemind.dht import DHT
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import get_logger
from hivemind.utils.multiaddr import Multiaddr

from peerstep.peer.clock import correct_clock, run_time
from peerstep.peer.node import RunNode
from peerstep.peer.threads import PeriodicThread

logger = get_logger(__name__)

DIAL_TIMEOUT = 5.0  # seconds for an initial peer
MAX_CLOCK_ERROR = 1.0  # seconds; hivemind allows 3
MAX_CORRECTION = 27 * 3600.0  # seconds; a wrong time zone is 26 hours off. With more, initial peers could end bans


class ClockJumps:
    """Warns when this machine's clock becomes wrong, at most once in WARN_SECONDS: in WSL it may jump every minute."""

    WARN_SECONDS = 600.0

    def __init__(self):
        self._number, self._warn_at = 0, -math.inf  # without a warning; `time.monotonic`

    def warn(self, offset: float) -> None:
        self._number += 1
        if time.monotonic() < self._warn_at:
            return
        times = f", and became wrong {self._number} times since the last warning" if self._number > 1 else ""
        logger.warning(
            f"This machine's clock is {abs(offset):.1f} s {'behind' if offset > 0 else 'ahead of'} the run's{times}: "
            "using that of the run (up to 27 hours). Set it, for example with `sudo timedatectl set-ntp true`"
        )
        self._number, self._warn_at = 0, time.monotonic() + self.WARN_SECONDS


clock_jumps = ClockJumps()


class BootstrapRedialer(PeriodicThread):
    """Dials the initial peers every PERIOD seconds, and more often while one of them does not answer.

    hivemind forgets a peer that was unreachable: the next trainer that joins through a restarted monitor would start a
    second run.
    """

    PERIOD, PERIOD_WITHOUT_ANSWER = 10.0, 2.0

    def __init__(self, dht: DHT, initial_peers: Sequence[str]):
        super().__init__(self.PERIOD)
        self.dht, self.initial_peers = dht, list(initial_peers)

    def work(self) -> None:
        all_answer = set_run_clock(self.dht, self.initial_peers)
        self.period = self.PERIOD if all_answer else self.PERIOD_WITHOUT_ANSWER


def set_run_clock(dht: DHT, initial_peers: Sequence[str]) -> bool:
    """Dial the initial peers, and set the run's clock to the median of theirs if this machine's differs.

    :returns: whether all initial peers answer
    """
    try:
        call: Any = partial(dial_all, maddrs=initial_peers)
        offsets = dht.run_coroutine(call, return_future=True).result(timeout=4 * DIAL_TIMEOUT)  # pyright: ignore[reportAttributeAccessIssue]
    except Exception as error:
        logger.debug(f"Could not reach the initial peers: {error!r}")
        return False
    known = [offset for offset in offsets if offset is not None and math.isfinite(offset)]
    votes = known + [0.0] * (1 - len(known) % 2)  # of an even number, this machine's clock decides
    if abs(change := statistics.median(votes)) > MAX_CLOCK_ERROR:
        before = run_time() - time.time()
        offset = min(max(before + change, -MAX_CORRECTION), MAX_CORRECTION)
        correct_clock(offset)
        if abs(offset) > MAX_CLOCK_ERROR >= abs(before):  # once, whatever the initial peers answer later
            clock_jumps.warn(before + change)
    return None not in offsets


async def dial_all(_dht: DHT, node: RunNode, maddrs: Sequence[str]) -> list[float | None]:
    """Connect to each address and ping the peer, which then adds this peer to its routing table. In the DHT process.

    :returns: the seconds by which each peer's clock of the run is ahead of this peer's; None if it does not answer
    """
    node.initial_peers.update(PeerID.from_base58(Multiaddr(maddr)["p2p"]) for maddr in maddrs)
    return await asyncio.gather(*(_dial(node, Multiaddr(maddr)) for maddr in maddrs))


async def _dial(node: RunNode, maddr: Multiaddr) -> float | None:
    peer_id = PeerID.from_base58(maddr["p2p"])
    try:
        async with asyncio.timeout(DIAL_TIMEOUT):
            # After each failed dial, libp2p refuses the next for longer, soon for minutes: first check the port.
            if (endpoint := find_tcp_endpoint(maddr)) is not None:
                _, writer = await asyncio.open_connection(*endpoint)
                writer.close()
            await node.p2p._client.connect(peer_id, [maddr.decapsulate(f"/p2p/{maddr['p2p']}")])  # pyright: ignore[reportAttributeAccessIssue]
            if await node.protocol.call_ping(peer_id) is None:
                return None
            asked_at, started = run_time(), time.monotonic()
            answer = await node.protocol.get_stub(peer_id).rpc_ping(dht_pb2.PingRequest())
        # The answer was given at any time meanwhile. On a busy link two peers would push each other's clocks forward.
        uncertainty = (time.monotonic() - started) / 2
        offset = answer.dht_time - asked_at - uncertainty  # pyright: ignore[reportOptionalMemberAccess]
        return math.copysign(max(0.0, abs(offset) - uncertainty), offset)
    except Exception as error:
        logger.debug(f"Initial peer {maddr} does not answer: {error!r}")
        return None


def find_tcp_endpoint(maddr: Multiaddr | str) -> tuple[str, int] | None:
    """Return host and port of an address such as /ip4/192.0.2.1/tcp/31337/...; None for other addresses."""
    match = re.match(r"/(?:ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/(\d+)", str(maddr))
    return (match[1], int(match[2])) if match else None
