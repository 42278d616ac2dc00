"""Addresses of a peer: which to announce, and which to give to other peers."""

import errno
import socket
import time
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path

import requests
from accelerate.utils.other import get_free_port
from hivemind.p2p import PeerID
from hivemind.utils import get_logger
from hivemind.utils.logging import TextStyle
from hivemind.utils.multiaddr import Multiaddr

from cotrain.common.errors import TemporaryError, UserError, first_line
from cotrain.common.flags import check_maddr
from cotrain.common.json_file import write_json
from cotrain.options import PeerOptions

logger = get_logger(__name__)

PORT_SECONDS = 10.0  # for the end of a peer that has been stopped and listens on the same port


def await_ports(host_maddrs: Sequence[str]) -> None:
    """Wait until no program listens on the TCP ports; UserError after PORT_SECONDS.

    libp2p's sockets share a port: each connection would reach one of two peers.
    """
    deadline = time.monotonic() + PORT_SECONDS
    for maddr in host_maddrs:
        _, version, host, kind, port, *_ = f"{maddr}//".split("/")
        while kind == "tcp" and port != "0" and _is_in_use(version, host, int(port)):
            if time.monotonic() > deadline:
                raise UserError(f"cannot listen on --host_maddrs {maddr}: the port is in use; pass another")
            time.sleep(0.5)


def _is_in_use(version: str, host: str, port: int) -> bool:
    try:
        family = socket.AF_INET6 if version == "ip6" else socket.AF_INET
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


def fix_tcp_port(host_maddrs: Sequence[str]) -> tuple[list[str], int]:
    """Replace port 0 (any) by one that is free now, and can be announced; return the addresses and the port."""
    ports = {int(Multiaddr(maddr)["tcp"]) for maddr in host_maddrs if "/tcp/" in maddr} - {0}
    port = min(ports) if ports else get_free_port()
    return [maddr.replace("/tcp/0", f"/tcp/{port}") for maddr in host_maddrs], port


def announce_public_ip(args: PeerOptions, service: str) -> None:
    """Announce this machine's public IP address, which a web service returns, with the port of the peer.

    :raises TemporaryError: if the service returns no address within 10 seconds
    """
    try:
        response = requests.get(service, timeout=10.0)
        response.raise_for_status()
        address = ip_address(response.text.strip())
    except (requests.RequestException, ValueError) as error:
        raise TemporaryError(
            f"--use_google_dns: {service} did not return an address ({first_line(error, limit=120)}). Pass it: "
            "--host_maddrs /ip4/0.0.0.0/tcp/PORT --announce_maddrs /ip4/YOUR_IP/tcp/PORT"
        ) from None
    args.host_maddrs, port = fix_tcp_port(args.host_maddrs)
    args.announce_maddrs = [*args.announce_maddrs, f"/ip{address.version}/{address}/tcp/{port}"]
    logger.info(f"Public IP address of this machine: {address}, port {port}")


def _address_scope(maddr: Multiaddr) -> int:
    """Return the scope of an address: 3 internet, 2 local network, 1 this machine."""
    protocols = {protocol.name for protocol in maddr.protocols()}
    if protocols & {"dns", "dns4", "dns6", "dnsaddr"}:
        return 3
    address = next((ip_address(maddr[name]) for name in ("ip4", "ip6") if name in protocols), None)
    if address is None or address.is_loopback or address.is_link_local:
        return 1
    return 3 if address.is_global else 2


def choose_maddrs(visible_maddrs: Sequence[Multiaddr], only_p2p: bool = False, least: int = 1) -> list[str]:
    """Return the addresses to give to other peers: those of the widest scope, or only the peer ID for IPFS.

    :param least: no address is returned if the widest scope is less, see `_address_scope`
    """
    if only_p2p:
        return sorted({f"/p2p/{maddr['p2p']}" for maddr in visible_maddrs})
    widest = max(map(_address_scope, visible_maddrs), default=0)
    return list(dict.fromkeys(str(maddr) for maddr in visible_maddrs if _address_scope(maddr) == widest >= least))


def peer_id_in(initial_peer: str) -> PeerID:
    """Return the peer ID of an address in --initial_peers."""
    protocols = check_maddr("--initial_peers", initial_peer)
    return PeerID.from_base58(protocols.get("p2p") or protocols["ipfs"])


def log_visible_maddrs(visible_maddrs: Sequence[Multiaddr], only_p2p: bool, file: Path | None = None) -> None:
    """Log how other peers join through this peer.

    :param file: also written for programs, such as run_local_demo.py
    """
    if file is not None:
        write_json(file, {"initial_peers": choose_maddrs(visible_maddrs, only_p2p)})
    scopes = [_address_scope(maddr) for maddr in visible_maddrs]
    scope = 3 if only_p2p else max(scopes, default=0)
    where = {3: "over the Internet", 2: "in this network"}.get(scope, "on this machine")
    logger.info(
        f"Running a DHT peer. To connect other peers to this one {where}, use {TextStyle.BOLD}{TextStyle.BLUE}"
        f"--initial_peers {' '.join(choose_maddrs(visible_maddrs, only_p2p))}{TextStyle.RESET}"
    )
    if scope == 3 and not only_p2p and min(scopes) < 3:
        nearer = choose_maddrs([maddr for maddr in visible_maddrs if _address_scope(maddr) < 3])
        logger.info(f"Peers in the same network may also use --initial_peers {' '.join(nearer)}")
    logger.info(f"Full list of visible multiaddresses: {' '.join(map(str, visible_maddrs))}")
    if scope == 2:
        logger.info("Peers outside this network need a public address: see --tunnel and --announce_tunnel")
