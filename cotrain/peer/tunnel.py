"""A tunnel that makes a peer behind a firewall or NAT reachable: ngrok's, or one that the user runs.

Enter `open_tunnel` before `open_peer`, and before the data is downloaded: a wrong token ends the script. The tunnel's
address is announced in addition to the local addresses, so that peers of the same network still connect directly.
"""

import asyncio
import contextlib
import logging
import multiprocessing
import os
import re
import socket
from collections.abc import Iterator
from ipaddress import ip_address
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
from hivemind.utils import get_logger

from cotrain.common.errors import INSTALL, TemporaryError, UserError
from cotrain.common.flags import endpoint_to_maddrs
from cotrain.options import PeerOptions
from cotrain.peer.addresses import fix_tcp_port

logger = get_logger(__name__)

NGROK_INSTALL = INSTALL["ngrok"]
SESSION_LIMIT = "ERR_NGROK_108"  # the account has as many sessions as it may have
NGROK_TIMEOUT = 30.0  # seconds for opening a tunnel; the SDK itself sets no limit


@contextlib.contextmanager
def open_tunnel(args: PeerOptions) -> Iterator[None]:
    """Keep the tunnel open that the flags ask for. Fixes the port in `args.host_maddrs`, and announces the tunnel."""
    if args.tunnel == "none" and args.announce_tunnel is None:
        yield
        return
    args.host_maddrs, port = fix_tcp_port(args.host_maddrs)
    local = find_local_endpoint(args.host_maddrs, port)
    with ngrok_tunnel(local) if args.tunnel == "ngrok" else contextlib.nullcontext(args.announce_tunnel) as endpoint:
        # hivemind announces these addresses only: include those that a peer without a tunnel would announce.
        args.announce_maddrs = [
            *endpoint_to_maddrs("--announce_tunnel", endpoint),
            *(args.announce_maddrs or find_local_maddrs(args.host_maddrs)),
        ]
        yield


def find_local_endpoint(host_maddrs: list[str], port: int) -> str:
    """Return the HOST:PORT at which this machine reaches the peer. The tunnel must lead there."""
    _, version, host, *_ = next(maddr for maddr in host_maddrs if f"/tcp/{port}/" in f"{maddr}/").split("/")
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]:{port}" if version == "ip6" else f"{host}:{port}"


def find_local_maddrs(host_maddrs: list[str]) -> list[str]:
    """Return the LAN addresses of a peer that listens on `host_maddrs`: "all interfaces" is replaced by theirs."""
    families = {"0.0.0.0": socket.AF_INET, "::": socket.AF_INET6}
    interfaces = [address for addresses in psutil.net_if_addrs().values() for address in addresses]
    found = []
    for maddr in host_maddrs:
        host = maddr.split("/")[2]
        hosts = [host]
        if host in families:
            hosts = [ip_address(address.address) for address in interfaces if address.family == families[host]]
            hosts = [str(address) for address in hosts if not (address.is_loopback or address.is_link_local)]
        found += [maddr.replace(host, address, 1) for address in hosts]
    return found


@contextlib.contextmanager
def ngrok_tunnel(local: str) -> Iterator[str]:
    """Open a TCP tunnel of ngrok to `local`, and yield its public HOST:PORT.

    ngrok's SDK runs in a separate process: its threads abort an interpreter that is shutting down, and each process
    that is forked later would keep its connections open.

    :raises UserError: if ngrok is not installed, has no token, refuses, or does not answer in NGROK_TIMEOUT
    """
    token = find_ngrok_token()
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    process = fork.Process(target=_hold_ngrok_tunnel, args=(token, local, theirs), name="ngrok", daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(NGROK_TIMEOUT):
            raise TemporaryError(f"--tunnel ngrok: no answer within {NGROK_TIMEOUT:.0f} seconds")
        try:
            url, complaint = ours.recv()
        except EOFError:
            raise UserError(f"--tunnel ngrok needs ngrok's SDK: {NGROK_INSTALL}") from None
        if SESSION_LIMIT in complaint:
            remedy = "another peer uses this token, or one that was killed counts for another minute"
            raise TemporaryError(f"--tunnel ngrok: {complaint}; {remedy}")
        if complaint:
            raise UserError(f"--tunnel ngrok: {complaint}")
        logger.info(f"Ngrok tunnel created: {url}")
        yield url.removeprefix("tcp://")
    finally:
        with contextlib.suppress(OSError):  # the process may have died
            ours.send("close")
        process.join(3)
        process.kill()
        process.join()


def _hold_ngrok_tunnel(token: str, local: str, parent: Connection) -> None:
    """Open a tunnel, send (URL, error message) to the parent, and close the tunnel when the parent asks.

    Sends nothing if the SDK is not installed, or too old.
    """
    with contextlib.suppress(ImportError, AttributeError):
        import ngrok

        logging.getLogger("ngrok").setLevel(logging.WARNING)
        try:
            asyncio.run(_forward(ngrok, token, local, parent))
        except ValueError as error:  # the only type that the SDK raises: (what failed, ngrok's message[, code])
            message = " ".join(" ".join(map(str, error.args)).split())
            parent.send(("", message.replace(token, "...")))  # ngrok quotes a token that it rejects


async def _forward(ngrok, token: str, local: str, parent: Connection) -> None:
    session = await ngrok.SessionBuilder().authtoken(token).connect()
    listener = await session.tcp_endpoint().listen_and_forward(f"tcp://{local}")
    parent.send((listener.url(), ""))
    with contextlib.suppress(EOFError):
        parent.recv()
    with contextlib.suppress(TimeoutError, ValueError):  # ngrok may no longer answer
        await asyncio.wait_for(listener.close(), 2.0)  # which frees the address at once


def find_ngrok_token() -> str:
    """Return the account's token: NGROK_AUTHTOKEN, or that in the file of `ngrok config add-authtoken`.

    :raises UserError: if there is neither
    """
    path = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "ngrok" / "ngrok.yml"
    token = os.environ.get("NGROK_AUTHTOKEN", "").strip()
    if not token and path.is_file():
        # Not parsed as YAML, whose error messages quote the line with the token.
        match = re.search(r"^\s*authtoken:\s*[\"']?(\w+)[\"']?\s*$", path.read_text("utf-8", "replace"), re.M)
        token = match[1] if match else ""
    if not token:
        raise UserError(
            "--tunnel ngrok needs the authtoken of an account, see https://dashboard.ngrok.com/get-started/"
            "your-authtoken: `export NGROK_AUTHTOKEN=...`, or `ngrok config add-authtoken`"
        )
    return token
