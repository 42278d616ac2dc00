"""Addresses of other peers, remembered across restarts.

A trainer that restarts while its initial peers are away joins through one of these. They are addresses at which this
peer has seen others. Some are the outgoing ports of peers that have dialed it, which accept no connections.
"""

import re
import socket
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hivemind.dht import DHT
from hivemind.dht.node import DHTNode
from hivemind.utils import get_logger

from lib.common.checks import ArgumentsError, check_peer
from lib.common.json_file import JsonFile, write_json
from lib.common.threads import PeriodicThread

logger = get_logger(__name__)

MAX_ADDRESSES = 32
DIAL_TIMEOUT = 3.0
_TCP_ADDRESS = re.compile(r"/ip[46]/([^/]+)/tcp/(\d+)/p2p/\w+")  # no relays, which come and go


class AddressBook(PeriodicThread):
    """Writes the addresses of connected peers to `known_peers.json` in a peer's folder, once a minute."""

    def __init__(self, dht: DHT, folder: Path):
        super().__init__(period=10.0)  # the first time
        self.dht, self.path = dht, path_in(folder)

    def work(self) -> None:
        try:
            found = list_addresses(self.dht)
            addresses = select(found)
            if addresses:
                write_json(self.path, addresses)
                self.period = 60.0
        except Exception as error:  # also a full disk: the addresses are of use only after a restart
            logger.debug(f"Could not remember the addresses of other peers: {error!r}")


def list_addresses(dht: DHT) -> list[str]:
    """Return the address of each connection, which ends in the peer ID."""
    return dht.run_coroutine(_list_addresses, return_future=True).result(timeout=10.0)


async def _list_addresses(_dht: DHT, node: DHTNode) -> list[str]:
    """Runs in the DHT process."""
    return [f"{maddr}/p2p/{peer.peer_id}" for peer in await node.p2p.list_peers() for maddr in peer.addrs]


def path_in(folder: Path) -> Path:
    return folder / "known_peers.json"


def select(addresses: Iterable[str]) -> list[str]:
    """Return the addresses that can be dialed without a relay, without duplicates, at most MAX_ADDRESSES."""
    return list(dict.fromkeys(address for address in addresses if _TCP_ADDRESS.fullmatch(address)))[:MAX_ADDRESSES]


def find_reachable(folder: Path) -> list[str]:
    """Return the remembered addresses whose ports accept connections now. Takes at most DIAL_TIMEOUT seconds."""
    addresses = JsonFile(path_in(folder)).load(_parse) or []
    with ThreadPoolExecutor(MAX_ADDRESSES) as pool:
        return [address for address, answers in zip(addresses, pool.map(_answers, addresses), strict=True) if answers]


def _parse(content: object) -> list[str]:
    addresses = select(content)
    try:
        for address in addresses:
            check_peer("known_peers.json", address)
    except ArgumentsError as error:
        raise ValueError(str(error)) from None
    return addresses


def _answers(address: str) -> bool:
    host, port = _TCP_ADDRESS.fullmatch(address).groups()
    try:
        socket.create_connection((host, int(port)), timeout=DIAL_TIMEOUT).close()
    except OSError:
        return False
    return True
