"""Connections of a peer to the other peers of its run: direct ones, and those through a relay."""

from collections.abc import Collection

from hivemind.dht import DHT
from hivemind.dht.node import DHTNode
from hivemind.utils import get_logger

logger = get_logger(__name__)


def count_connections(dht: DHT, peers: Collection[str], timeout: float = 3.0) -> tuple[int, int] | None:
    """Return how many peers are connected directly, and how many only through a relay; None if that is not known.

    :param peers: peer IDs in base58. Peers of other runs and, with --use_ipfs, strangers are connected, too
    """
    try:
        addresses = dht.run_coroutine(_list_addresses, return_future=True).result(timeout=timeout)
    except Exception as error:
        logger.debug(f"Could not list the connections: {error!r}")
        return None
    # libp2p's daemon gives a relayed connection this address at both ends:
    # /ip4/…/tcp/…/p2p/RELAY/p2p-circuit/p2p/PEER. libp2p prefers a direct one.
    connected = {address.rpartition("/")[2] for address in addresses} & set(peers)
    direct = {address.rpartition("/")[2] for address in addresses if "/p2p-circuit" not in address} & connected
    return len(direct), len(connected - direct)


async def _list_addresses(_dht: DHT, node: DHTNode) -> list[str]:
    """Return the address of each connection, which ends in the peer ID. Runs in the DHT process."""
    return [f"{maddr}/p2p/{peer.peer_id}" for peer in await node.p2p.list_peers() for maddr in peer.addrs]
