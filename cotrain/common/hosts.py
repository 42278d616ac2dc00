"""IP addresses of hosts."""

import ipaddress
import socket

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def find_addresses(host: str) -> list[Address]:
    """Return the IP addresses of a host; none if its name is not known."""
    try:
        found = socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):
        return []
    addresses = [ipaddress.ip_address(entry[4][0].partition("%")[0]) for entry in found]
    return [getattr(address, "ipv4_mapped", None) or address for address in addresses]


def is_on_internet(host: str) -> bool:
    """Whether all addresses of a host are public ones; also if there are none."""
    return all(address.is_global for address in find_addresses(host))
