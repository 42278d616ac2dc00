"""Connections to a web server that a stranger may have chosen."""

import ipaddress
import socket
from collections.abc import Iterable

from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection

from cotrain.common.errors import UserError

MAX_DOWNLOAD_BYTES = 20e9  # of an archive, or of weights, that the user has not chosen
NAT64 = ipaddress.ip_network("64:ff9b::/96")
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class GuardedAdapter(HTTPAdapter):
    """Transport of requests that connects to the internet and to trusted private networks only, also by redirects.

    :param near: addresses of peers in trusted networks; None: the network that the first connection leads to is one
    """

    def __init__(self, near: Iterable[Address] | None):
        self.near = near
        super().__init__()

    def get_connection_with_tls_context(self, *args, **options):
        pool = super().get_connection_with_tls_context(*args, **options)
        pool.ConnectionCls = GuardedTLSConnection if pool.scheme == "https" else GuardedConnection
        pool.conn_kw["adapter"] = self
        return pool


class GuardedConnection(HTTPConnection):
    """Checks the address of its socket before anything is sent, whatever the DNS and the parsers of URLs say."""

    def __init__(self, *args, adapter: GuardedAdapter, **options):
        super().__init__(*args, **options)
        self._adapter = adapter

    def _new_conn(self) -> socket.socket:
        connected = super()._new_conn()
        address = ipaddress.ip_address(connected.getpeername()[0].partition("%")[0])
        address = _embedded(address)
        if self._adapter.near is None:
            self._adapter.near = [address]
        elif not (address.is_global or _is_near(address, self._adapter.near)):
            connected.close()
            text = "is not on the internet: refused; if you trust it, pass the address yourself"
            raise UserError(f"--dataset_url leads to {address}, which {text}")
        return connected


class GuardedTLSConnection(GuardedConnection, HTTPSConnection):
    pass


def _embedded(address: Address) -> Address:
    """Return the IPv4 address that an IPv6 address stands for, if there is one: mapped, or behind NAT64."""
    if address in NAT64:
        return ipaddress.IPv4Address(int(address) % 2**32)
    return getattr(address, "ipv4_mapped", None) or address


def _is_near(address: Address, peers: Iterable[Address]) -> bool:
    """Whether an address is in this machine as one of some peers is, or in the private network of one: /24 or /64."""
    if address.is_loopback:
        return any(peer.is_loopback for peer in peers)
    networks = (ipaddress.ip_network((peer, 24 if peer.version == 4 else 64), strict=False) for peer in peers)
    return address.is_private and not address.is_link_local and any(address in network for network in networks)
