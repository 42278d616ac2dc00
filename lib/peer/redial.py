"""Periodic dialing of the initial peers."""

import asyncio
from collections.abc import Sequence
from functools import partial

from hivemind.dht import DHT
from hivemind.dht.node import DHTNode
from hivemind.p2p import PeerID
from hivemind.utils import get_logger
from hivemind.utils.multiaddr import Multiaddr

from lib.common.threads import PeriodicThread
from lib.peer.addresses import find_tcp_endpoint

logger = get_logger(__name__)


class BootstrapRedialer(PeriodicThread):
    """Dials the initial peers every `longest_period` seconds, and more often while one of them does not answer.

    hivemind forgets a peer that was unreachable. Without redialing, a monitor restarted at the same address would know
    no other peer, and the next trainer that joins through it would start a second run, at step 0 or at the monitor's
    last checkpoint.
    """

    def __init__(self, dht: DHT, initial_peers: Sequence[str], longest_period: float = 10.0):
        super().__init__(longest_period)
        self.dht, self.initial_peers, self.longest_period = dht, list(initial_peers), longest_period

    def work(self) -> None:
        try:
            call = partial(_redial, maddrs=self.initial_peers, timeout=self.longest_period / 2)
            all_answer = self.dht.run_coroutine(call, return_future=True).result(timeout=2 * self.longest_period)
        except Exception as error:
            logger.debug(f"Could not reach the initial peers: {error!r}")
            all_answer = False
        self.period = self.longest_period if all_answer else self.longest_period / 5


async def _redial(_dht: DHT, node: DHTNode, maddrs: list[str], timeout: float) -> bool:
    """Connect to each address and ping the peer, which then adds this peer to its routing table.

    Runs in the DHT process.

    :param timeout: seconds for each peer
    :returns: whether all peers answer
    """
    return all(await asyncio.gather(*(_dial(node, Multiaddr(maddr), timeout) for maddr in maddrs)))


async def _dial(node: DHTNode, maddr: Multiaddr, timeout: float) -> bool:
    peer_id = PeerID.from_base58(maddr["p2p"])
    try:
        async with asyncio.timeout(timeout):
            # After each failed dial, libp2p refuses the next for longer, soon for minutes: first check the port.
            if (endpoint := find_tcp_endpoint(maddr)) is not None:
                _, writer = await asyncio.open_connection(*endpoint)
                writer.close()
            await node.p2p._client.connect(peer_id, [maddr.decapsulate(f"/p2p/{maddr['p2p']}")])
            return await node.protocol.call_ping(peer_id) is not None
    except Exception as error:
        logger.debug(f"Initial peer {maddr} does not answer: {error!r}")
        return False
