"""Connections to the other peers of the run: direct ones, and those through a relay."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from hivemind.dht import DHT
from hivemind.utils import get_logger

from lib.common.names import derive_name
from lib.common.threads import PeriodicThread
from lib.peer.address_book import list_addresses

logger = get_logger(__name__)

FIRST_SECONDS, READ_SECONDS = 5.0, 30.0  # before the first and between two reads


@dataclass(frozen=True)
class Connections:
    """Names of the connected peers of the run. A peer with both kinds of connection is direct: libp2p prefers that."""

    direct: list[str]
    relayed: list[str]


class ConnectionWatcher(PeriodicThread):
    """Reads now and then how this peer is connected to the other peers of the run.

    `newest` is None before the first read and after a failed one.

    :param find_peers: returns the peer IDs of the run's other peers, in base58. Peers of other runs and, with
        --use_ipfs, strangers are connected, too
    """

    def __init__(self, dht: DHT, find_peers: Callable[[], Collection[str]]):
        super().__init__(FIRST_SECONDS)
        self.dht, self.find_peers = dht, find_peers
        self.newest: Connections | None = None

    def work(self) -> None:
        self.period = READ_SECONDS
        try:
            addresses = list_addresses(self.dht)
        except Exception as error:
            logger.debug(f"Could not list the connections: {error!r}")
            self.newest = None
            return
        self.newest = classify(addresses, self.find_peers())


def classify(addresses: Iterable[str], peers: Collection[str]) -> Connections:
    """Return the connections to some peers.

    :param addresses: the address of each connection. libp2p's daemon gives a relayed one the address of the relay,
        followed by /p2p-circuit, at both ends: /ip4/…/tcp/…/p2p/RELAY/p2p-circuit/p2p/PEER
    :param peers: peer IDs in base58
    """
    is_direct: dict[str, bool] = {}
    for address in addresses:
        peer_id = address.rpartition("/")[2]
        if peer_id in peers:
            is_direct[peer_id] = is_direct.get(peer_id, False) or "/p2p-circuit" not in address
    return Connections(
        direct=sorted(derive_name(peer_id) for peer_id, direct in is_direct.items() if direct),
        relayed=sorted(derive_name(peer_id) for peer_id, direct in is_direct.items() if not direct),
    )
