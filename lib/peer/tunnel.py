"""A tunnel that makes a peer behind a firewall or NAT reachable: ngrok's, or one that the user runs.

Enter `open_tunnel` before the peer starts. The tunnel's address is announced in addition to the local addresses, so
that peers of the same network still connect directly.
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

from arguments import BaseTrainingArguments
from lib.common.argument_parser import endpoint_to_maddrs
from lib.common.errors import TemporaryError, UserError
from lib.common.threads import PeriodicThread
from lib.peer.addresses import fix_tcp_port

logger = get_logger(__name__)

NGROK_INSTALL = "pip install ngrok==1.4.0"  # the version that was tested
NGROK_TIMEOUT = 30.0  # seconds for opening a tunnel; the SDK itself sets no limit
_ANOTHER = "or run another tunnel and pass --announce_tunnel HOST:PORT"


@contextlib.contextmanager
def open_tunnel(args: BaseTrainingArguments) -> Iterator[None]:
    """Make the peer that is about to start reachable through a tunnel while the context is open.

    Does nothing without --tunnel and --announce_tunnel. Otherwise sets a fixed port in `args.host_maddrs`, and adds
    the tunnel to `args.announce_maddrs`.

    :raises UserError: if no tunnel is available
    """
    with contextlib.ExitStack() as stack:
        if args.tunnel != "none" or args.announce_tunnel is not None:
            args.host_maddrs, port = fix_tcp_port(args.host_maddrs)
            local = find_local_endpoint(args.host_maddrs, port)
            if args.tunnel == "ngrok":
                endpoint = stack.enter_context(ngrok_tunnel(local))
                remedy = "ngrok reconnects after a short interruption; after a longer one restart this peer"
            else:
                endpoint = args.announce_tunnel
                remedy = f"check that it is running and leads to {local} (some routers do not answer from inside)"
            # hivemind announces these addresses only: include those that a peer without a tunnel would announce.
            args.announce_maddrs = [
                *endpoint_to_maddrs("--announce_tunnel", endpoint),
                *(args.announce_maddrs or find_local_maddrs(args.host_maddrs)),
            ]
            watch = TunnelWatch(endpoint, local, remedy)
            watch.start()
            stack.callback(watch.stop)
        yield


def find_local_endpoint(host_maddrs: list[str], port: int) -> str:
    """Return the HOST:PORT at which this machine reaches the peer. The tunnel must lead there."""
    _, version, host, *_ = next(maddr for maddr in host_maddrs if f"/tcp/{port}/" in f"{maddr}/").split("/")
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]:{port}" if version == "ip6" else f"{host}:{port}"


def find_local_maddrs(host_maddrs: list[str]) -> list[str]:
    """Return the LAN addresses of a peer that listens on `host_maddrs`.

    "All interfaces" is replaced by the addresses of the interfaces; by the loopback address if there is no other.
    """
    families = {"ip4": socket.AF_INET, "ip6": socket.AF_INET6}
    interfaces = [address for addresses in psutil.net_if_addrs().values() for address in addresses]
    found = []
    for maddr in host_maddrs:
        _, version, host, *rest = maddr.split("/")
        if version not in families or not ip_address(host).is_unspecified:
            found.append(maddr)
            continue
        hosts = [address.address for address in interfaces if address.family == families[version]]
        hosts = [host for host in hosts if "%" not in host]  # without IPv6 link-local addresses
        outside = [host for host in hosts if not ip_address(host).is_loopback]
        found += ["/".join(("", version, host, *rest)) for host in outside or hosts]
    return found


# ngrok


@contextlib.contextmanager
def ngrok_tunnel(local: str) -> Iterator[str]:
    """Open a TCP tunnel of ngrok to `local`, yield its public HOST:PORT, and close it afterwards.

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
        url = _receive_url(ours)
        logger.info(f"Ngrok tunnel created: {url}")
        try:
            yield url.removeprefix("tcp://")
        finally:
            with contextlib.suppress(OSError):  # the process may have died
                ours.send("close")
            process.join(5)
    finally:
        process.kill()
        process.join()


def _receive_url(connection: Connection) -> str:
    if not connection.poll(NGROK_TIMEOUT):
        raise TemporaryError(_unreachable(f"no answer within {NGROK_TIMEOUT:.0f} seconds"))
    try:
        url, complaint = connection.recv()
    except EOFError:
        raise UserError(f"--tunnel ngrok: ngrok's SDK has crashed; reinstall it: {NGROK_INSTALL}") from None
    if complaint:
        raise UserError(complaint)
    return url


def _hold_ngrok_tunnel(token: str, local: str, parent: Connection) -> None:
    """Open a tunnel, send (URL, error message) to the parent, and close the tunnel when the parent asks.

    Runs in a separate process.
    """
    try:
        import ngrok

        logging.getLogger("ngrok").setLevel(logging.WARNING)
        session, listener = asyncio.run(_connect(ngrok, token, local))
    except (ImportError, AttributeError):  # not installed, or too old
        return parent.send(("", f"--tunnel ngrok needs ngrok's SDK: {NGROK_INSTALL}"))
    except ValueError as error:  # the only type that the SDK raises: (what failed, ngrok's message[, code])
        return parent.send(("", _explain(error, token)))
    parent.send((listener.url(), ""))
    with contextlib.suppress(EOFError):
        parent.recv()
    asyncio.run(_disconnect(session, listener))


def find_ngrok_token() -> str:
    """Return the account's token: NGROK_AUTHTOKEN, or that in a file of `ngrok config add-authtoken`.

    :raises UserError: if there is no token
    """
    if token := os.environ.get("NGROK_AUTHTOKEN", "").strip():
        return token
    home = Path.home()
    config_home = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    for path in (config_home / "ngrok" / "ngrok.yml", home / ".ngrok2" / "ngrok.yml"):
        # Not parsed as YAML, whose error messages quote the line with the token.
        text = path.read_text(errors="replace") if path.is_file() else ""
        if match := re.search(r"^\s*authtoken:\s*[\"']?(\w+)[\"']?\s*$", text, re.MULTILINE):
            return match[1]
    raise UserError(
        "--tunnel ngrok needs the authtoken of an ngrok account: copy it from "
        "https://dashboard.ngrok.com/get-started/your-authtoken and `export NGROK_AUTHTOKEN=...`, or save it with "
        "`ngrok config add-authtoken`"
    )


async def _connect(ngrok, token: str, local: str) -> tuple:
    session = await ngrok.SessionBuilder().authtoken(token).connect()
    return session, await session.tcp_endpoint().listen_and_forward(f"tcp://{local}")


async def _disconnect(session, listener) -> None:
    """Close the tunnel, which frees the address at once. ngrok may no longer answer."""
    for part in (listener, session):
        with contextlib.suppress(TimeoutError, ValueError):
            await asyncio.wait_for(part.close(), 2.0)


def _explain(error: ValueError, token: str) -> str:
    """Return ngrok's message, which says what to do, and its code; without a code ngrok has not answered."""
    _, text, code = (*map(str, error.args), "", "")[:3]
    if not code:
        return _unreachable(text or str(error))
    text = " ".join(text.split()).replace(token, "...")  # ngrok quotes a token that it rejects
    return f"--tunnel ngrok: {text} (see https://ngrok.com/docs/errors/{code.lower()}), {_ANOTHER}"


def _unreachable(reason: str) -> str:
    return (
        f"--tunnel ngrok: ngrok is not reachable ({reason}). Check that this machine may connect to "
        f"connect.ngrok-agent.com:443, {_ANOTHER}"
    )


# Supervision


def probe(endpoint: str, timeout: float = 10.0) -> str:
    """Check whether a peer answers at HOST:PORT. libp2p sends a greeting on each connection.

    :param timeout: seconds
    :returns: why no peer can be reached; empty if a peer answers
    """
    host, port = endpoint.rsplit(":", 1)
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout) as connection:
            greeting = connection.recv(64)
    except OSError as error:
        return (error.strerror or str(error) or type(error).__name__).lower()
    return "" if b"/multistream/" in greeting else "no peer at the other end"


class TunnelWatch(PeriodicThread):
    """Logs when a tunnel no longer leads to this peer, and when it does again.

    :param endpoint: HOST:PORT of the tunnel's public end
    :param local: HOST:PORT of the peer; nothing is logged while the peer does not answer there
    :param remedy: what the user can do about a broken tunnel
    :param period: seconds between two checks
    """

    def __init__(self, endpoint: str, local: str, remedy: str, period: float = 30.0):
        super().__init__(period)
        self.endpoint, self.local, self.remedy = endpoint, local, remedy
        self._failures = 0  # consecutive

    def work(self) -> None:
        if probe(self.local):
            return
        reason = probe(self.endpoint)
        if self.stopped.is_set():
            return
        if not reason and self._failures >= 2:
            logger.info(f"Peers can join through the tunnel {self.endpoint} again")
        self._failures = self._failures + 1 if reason else 0
        if self._failures == 2:  # a single failure may be a lost packet
            logger.warning(f"Nobody can join through the tunnel {self.endpoint} ({reason}): {self.remedy}")
