"""Checks of flag values. Each raises ArgumentsError with one line that names the flag, the fault and the remedy."""

import ipaddress
import math
import re
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit


class ArgumentsError(ValueError):
    """An invalid flag value. The message names the flag, what is wrong with it, and what to pass instead."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ArgumentsError(message)


def require_positive(arguments: object, *names: str) -> None:
    for name in names:
        value = getattr(arguments, name)
        require(value is None or value > 0, f"--{name} must be above zero, got {value}")


def require_not_negative(arguments: object, *names: str) -> None:
    for name in names:
        value = getattr(arguments, name)
        require(value is None or value >= 0, f"--{name} must not be negative, got {value}")


def require_apart(name: str, path: str, other_name: str, other_path: str) -> None:
    """Check that neither of two folders, which are written at the same time, is inside the other."""
    resolved, other = Path(path).resolve(), Path(other_path).resolve()
    require(
        not (resolved.is_relative_to(other) or other.is_relative_to(resolved)),
        f"--{name} '{path}' and --{other_name} '{other_path}' must not be inside each other",
    )


def check_web_address(flag: str, url: str) -> None:
    """Check that a value is an HTTP or HTTPS URL. The message omits the URL, which may contain a password."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    require(
        valid,
        f"{flag} must be an http(s) address like https://example.org/data.tar.gz; serve it by HTTP, not FTP",
    )


_PAGE = re.compile(r"https?://[\w.-]+(:\d{1,5})?(/[\w./?&=%~#+:,@-]*)?", re.ASCII)
_MAX_PAGE_LENGTH = 200


def is_page(url: object) -> bool:
    """Return whether a value is an HTTP or HTTPS URL that can be printed and published: short, and without secrets."""
    return isinstance(url, str) and len(url) <= _MAX_PAGE_LENGTH and _PAGE.fullmatch(url) is not None


def check_page(flag: str, url: str | None) -> None:
    require(
        url is None or is_page(url),
        f"{flag} must be an address like https://huggingface.co/spaces/NAME/SPACE, without a password, of at most "
        f"{_MAX_PAGE_LENGTH} letters, digits and ./?&=%~#+:,@-",
    )


def parse_end(flag: str, value: str | None) -> float:
    """Return the time (`time.time`) of a date in ISO 8601, by default in UTC; infinity without a date."""
    if value is None:
        return math.inf
    try:
        end = datetime.fromisoformat(value)
    except ValueError:
        raise ArgumentsError(f"{flag}: '{value}' is not a date; pass one like 2027-04-28T23:59") from None
    return (end if end.tzinfo else end.replace(tzinfo=UTC)).timestamp()


# A multiaddress is a list of /name/value pairs; a few names have no value. These checks need no libp2p daemon.
_PEER_ID = re.compile(r"(12D3KooW|Qm|16Uiu2|1|bafz)[1-9A-HJ-NP-Za-km-z]{20,}")
HOST_PORT = re.compile(r"(?P<host>\[[0-9a-fA-F:]*\]|[^/\s:]+):(?P<port>\d+|\*)")
_VALUELESS_PROTOCOLS = {"quic", "quic-v1", "ws", "wss", "tls", "noise", "p2p-circuit", "http", "https", "webtransport"}
_PROTOCOLS_WITH_VALUE = {"ip4", "ip6", "dns", "dns4", "dns6", "dnsaddr", "tcp", "udp", "p2p", "ipfs", "certhash"}


def check_maddr(flag: str, maddr: str) -> dict[str, str]:
    """Check a multiaddress and return its protocols with their values ("" for a protocol without a value)."""
    example = "it looks like /ip4/203.0.113.1/tcp/31337"
    require(maddr.startswith("/"), f"{flag}: '{maddr}' is not a multiaddress; {example}")
    parts = maddr.strip("/").split("/")
    protocols: dict[str, str] = {}
    while parts:
        name = parts.pop(0)
        if name in _VALUELESS_PROTOCOLS:
            protocols[name] = ""
            continue
        require(name in _PROTOCOLS_WITH_VALUE, f"{flag}: '{maddr}' has an unknown part '{name}'; {example}")
        require(bool(parts), f"{flag}: '{maddr}' ends after '{name}', its value is missing; {example}")
        protocols[name] = parts.pop(0)
    for name, version in (("ip4", 4), ("ip6", 6)):
        if name in protocols:
            try:
                valid = ipaddress.ip_address(protocols[name]).version == version
            except ValueError:
                valid = False
            require(valid, f"{flag}: '{protocols[name]}' in '{maddr}' is not an IPv{version} address")
    for name in ("tcp", "udp"):
        if name in protocols:
            port = protocols[name]
            require(port.isdigit() and int(port) <= 65535, f"{flag}: '{port}' in '{maddr}' is not a port")
    return protocols


def check_endpoint(flag: str, endpoint: str) -> None:
    """Check that a value is HOST:PORT, with a host that peers can dial and a port from 1 to 65535."""
    match = HOST_PORT.fullmatch(endpoint)
    require(match is not None, f"{flag}: '{endpoint}' is not HOST:PORT; it looks like bore.pub:31337")
    host, port = match["host"].strip("[]"), match["port"]
    require(
        port.isdigit() and 0 < int(port) <= 65535,
        f"{flag}: '{endpoint}' needs the port of the tunnel's public end, from 1 to 65535",
    )
    if ":" in host or re.fullmatch(r"[\d.]+", host):
        try:
            valid = not ipaddress.ip_address(host).is_unspecified
        except ValueError:
            valid = False
        require(valid, f"{flag}: '{host}' is not an address that other peers can reach")
    else:
        require(bool(re.fullmatch(r"[\w.-]+", host, re.ASCII)), f"{flag}: '{host}' is not a valid host name")


def check_peer(flag: str, maddr: str) -> None:
    if HOST_PORT.fullmatch(maddr):
        host, port = maddr.rsplit(":", 1)
        raise ArgumentsError(
            f"{flag}: '{maddr}' lacks the peer ID. Copy the whole address from the first lines that the peer prints: "
            f"/ip4/{host}/tcp/{port}/p2p/PEER_ID"
        )
    protocols = check_maddr(flag, maddr)
    peer_id = protocols.get("p2p", protocols.get("ipfs"))
    require(
        peer_id is not None,
        f"{flag}: '{maddr}' lacks the peer ID. Copy the whole address that the peer prints: "
        f"{maddr.rstrip('/')}/p2p/PEER_ID",
    )
    require(
        bool(_PEER_ID.fullmatch(peer_id)),
        f"{flag}: '{peer_id}' in '{maddr}' is not a peer ID. Copy the whole address that the peer prints",
    )


_HUB_ADDRESS = r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/"
_REPO_ID = re.compile(rf"(?:{_HUB_ADDRESS})?(?P<repo_id>\w[\w.-]*/\w[\w.-]{{0,95}}?)(?:\.git)?/?", re.ASCII)


def parse_repo_id(flag: str, value: str) -> str:
    """Return NAME/MODEL of a repository on the Hugging Face Hub.

    :param value: NAME/MODEL, or the repository's URL
    """
    match = _REPO_ID.fullmatch(value)
    is_valid = match is not None and not re.search(r"--|\.\.|[.-](/|$)", match["repo_id"])
    require(is_valid, f"{flag}: '{value}' is not a repository on the Hugging Face Hub; pass NAME/MODEL")
    return match["repo_id"]
