"""The flags of a script: their declaration, and checks of their values."""

import ipaddress
import operator
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from urllib3.util import parse_url

from cotrain.common.errors import UserError


class ArgumentsError(UserError, ValueError):
    """An invalid flag value. The message names the flag, what is wrong with it, and what to pass instead."""


def require(condition: bool, message: str) -> None:
    """Raise ArgumentsError with a message unless a condition holds."""
    if not condition:
        raise ArgumentsError(message)


_BOUNDS = {"above": operator.gt, "at_least": operator.ge, "below": operator.lt, "at_most": operator.le}
MARKS = {"setting", *_BOUNDS}  # metadata that are not for argparse
MAX_FLAG = 2**31 - 1  # of a flag without an upper bound: protobuf's int32; 68 years, if it is a time in seconds


def flag(default: Any, help: str = "", **metadata: Any) -> Any:
    """Return the field of a dataclass that is a flag of a script.

    :param default: a value, a function that makes it (`list`), or `dataclasses.MISSING` if the flag is required
    :param metadata: bounds of a number (`above`, `at_least`, `below`, `at_most`; by default above 0 and at most
        MAX_FLAG), each a number or the name of another flag, and options of transformers' HfArgumentParser
    """
    kind = "default_factory" if callable(default) else "default"
    return field(**{kind: default}, metadata={"help": help, **metadata})


def setting(default: Any, help: str, *, optional: bool = False, **metadata: Any) -> Any:
    """Return a flag of which all peers of a run need the same value: the organiser publishes it, trainers adopt it.

    :param optional: trainers may choose another value
    """
    return flag(default, help, setting="optional" if optional else "common", **metadata)


@dataclass(frozen=True)
class Description:
    """The help of a flag whose default and bounds are those of the base class."""

    metadata: dict[str, Any]


def described(help: str, **metadata: Any) -> Any:
    """Return the help of a flag that a base class of its dataclass has declared, with its default and bounds."""
    return Description({"help": help, **metadata})


class Flags:
    """Base of the dataclasses of flags, which checks the bounds of their numbers. `group`: their heading in --help."""

    def __init_subclass__(cls, group: str | None = None):
        """Set the heading of the flags in --help, by default that of the base class, and complete described flags."""
        if group is not None:
            cls._argument_group_name = group  # HfArgumentParser's name
        for name, value in vars(cls).copy().items():
            if isinstance(value, Description):
                bases = [base for base in cls.__mro__[1:] if is_dataclass(base)]
                declared = next(option for base in bases for option in fields(base) if option.name == name)
                metadata = {**declared.metadata, **value.metadata}
                default: Any = {"default": declared.default, "default_factory": declared.default_factory}
                setattr(cls, name, field(**default, metadata=metadata))

    def __post_init__(self):
        for option in fields(self):
            value, declared = getattr(self, option.name), option.metadata
            bounds = {name: declared[name] for name in _BOUNDS if name in declared}
            if bounds.keys().isdisjoint(("above", "at_least")):
                bounds["above"] = 0
            bounds.setdefault("at_most", MAX_FLAG)  # excludes infinity, too
            for name, bound in bounds.items() if type(value) in (int, float) else ():
                limit = getattr(self, bound) if isinstance(bound, str) else bound
                what = f"{name.replace('_', ' ')} {limit if limit is bound else f'--{bound} {limit}'}"
                require(_BOUNDS[name](value, limit), f"--{option.name} must be {what}, got {value}")
        folder = Path(getattr(self, "output_dir", "."))
        file = next(filter(os.path.isfile, (folder, *folder.parents)), None)
        require(file is None, f"--output_dir: '{file}' is a file; choose another folder")


def find_settings(dataclass_types: Sequence[type], *, optional_only: bool = False) -> frozenset[str]:
    """Return the names of the flags that are settings of a run."""
    kinds = {"optional"} if optional_only else {"optional", "common"}
    found = (option for dataclass_type in dataclass_types for option in fields(dataclass_type))
    return frozenset(option.name for option in found if option.metadata.get("setting") in kinds)


# --- checks of values ------------------------------------------------------------------------------------------------


def require_apart(name: str, path: str, other_name: str, other_path: str) -> None:
    """Raise ArgumentsError if one of two folders, which are written at the same time, is inside the other."""
    resolved, other = Path(path).resolve(), Path(other_path).resolve()
    if resolved.is_relative_to(other) or other.is_relative_to(resolved):
        raise ArgumentsError(f"--{name} '{path}' and --{other_name} '{other_path}' must not be inside each other")


def parse_size(flag: str, value: str) -> int:
    """Return the bytes of a size such as 256MB or 1.5GB."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?) ?([kMGT])B", value)
    require(match is not None, f"{flag} must be a size such as 256MB or 2GB, got '{value}'")
    return int(float(match[1]) * 1000 ** " kMGT".index(match[2]))


def format_size(size: float) -> str:
    """Return a number of bytes in the largest unit of which there is one."""
    unit, length = next((pair for pair in (("GB", 1e9), ("MB", 1e6)) if size >= pair[1]), ("kB", 1e3))
    return f"{size / length:,.1f} {unit}"


def check_hours(flag: str, value: str) -> None:
    """Check that a value is two times of a day such as 22:00-07:00."""
    time_of_day = r"([01]\d|2[0-3]):[0-5]\d"
    is_valid = re.fullmatch(f"{time_of_day}-{time_of_day}", value) is not None
    require(is_valid, f"{flag} must be two times of the day such as 22:00-07:00, got '{value}'")


def check_web_address(flag: str, url: str) -> None:
    """Check that a value is an HTTP or HTTPS URL. The message omits the URL, which may contain a password."""
    try:
        parts = parse_url(url)
        is_plain = url.isprintable() and "\\" not in url  # parsers disagree about the host otherwise
        valid = is_plain and parts.scheme in ("http", "https") and bool(parts.host) and parts.port != 0
    except ValueError:
        valid = False
    require(valid, f"{flag} must be an http(s) address like https://example.org/data.tar.gz; FTP is not supported")


_SECRET = re.compile(r"(?i)\b(x-amz-\w+|x-goog-\w+|signature|sig|\w*token|password)=")


def has_secret(url: str) -> bool:
    """Whether a URL has a user, a password or a signature."""
    parts = parse_url(url)
    return parts.auth is not None or _SECRET.search(parts.query or "") is not None


_PAGE = re.compile(r"https?://[\w.-]+(:\d{1,5})?(/[\w./?&=%~#+:,@-]*)?", re.ASCII)
MAX_PAGE_LENGTH = 200


def is_page(url: object) -> bool:
    """Return whether a value is an HTTP or HTTPS URL that can be printed and published: short, and without secrets."""
    return isinstance(url, str) and len(url) <= MAX_PAGE_LENGTH and _PAGE.fullmatch(url) is not None


# A multiaddress is a list of /name/value pairs; a few names have no value. These checks need no libp2p daemon.
# The IDs of RSA, Ed25519 and secp256k1 keys, in base58. libp2p's daemon does not start with one that is cut off.
PEER_ID = re.compile(r"((Qm|12D3KooW)[1-9A-HJ-NP-Za-km-z]{44}|16Uiu2[1-9A-HJ-NP-Za-km-z]{47})")
HOST_PORT = re.compile(r"(?P<host>\[[0-9a-fA-F:]*\]|[\w.-]+):(?P<port>\d+|\*)", re.ASCII)
_VALUELESS_PROTOCOLS = {"quic", "quic-v1", "ws", "wss", "tls", "noise", "p2p-circuit", "http", "https", "webtransport"}
_PROTOCOLS_WITH_VALUE = {"ip4", "ip6", "dns", "dns4", "dns6", "dnsaddr", "tcp", "udp", "p2p", "ipfs", "certhash"}


def _is_ip(text: str, version: int) -> bool:
    try:
        return ipaddress.ip_address(text).version == version
    except ValueError:
        return False


def check_maddr(flag: str, maddr: str) -> dict[str, str]:
    """Check a multiaddress and return its protocols with their values ("" for a protocol without a value)."""
    example = "it looks like /ip4/203.0.113.1/tcp/31337"
    require(maddr.startswith("/"), f"{flag}: '{maddr}' is not a multiaddress; {example}")
    parts = iter(maddr.strip("/").split("/"))
    protocols = {}
    for name in parts:
        protocols[name] = value = "" if name in _VALUELESS_PROTOCOLS else next(parts, None)
        if name in _PROTOCOLS_WITH_VALUE:
            require(value is not None, f"{flag}: '{maddr}' ends after '{name}', its value is missing; {example}")
        else:
            require(name in _VALUELESS_PROTOCOLS, f"{flag}: '{maddr}' has an unknown part '{name}'; {example}")
        is_second = name in ("ip4", "ip6", "dns", "dns4", "dns6") and "p2p" in protocols
        require(not is_second, f"{flag}: '{maddr}' is two addresses in one; put a space or a comma before '/{name}'")
        if name in ("ip4", "ip6"):
            require(_is_ip(value, int(name[-1])), f"{flag}: '{value}' in '{maddr}' is not an IPv{name[-1]} address")
        if name in ("tcp", "udp"):
            require(value.isdigit() and int(value) <= 65535, f"{flag}: '{value}' in '{maddr}' is not a port")
    return protocols


def split_peers(text: str) -> list[str]:
    """Return the addresses in a text that was copied from a chat or a log: with quotes, line breaks, words before."""
    words = [word.strip("'\"`“”„[]<>();.:\\") for word in re.split(r"[\s,]+", re.sub(r"(?<=/)\s+(?=\w)", "", text))]
    return [word for word in words if "/" in word or ":" in word] or sorted({*words} - {"", "--initial_peers"})


def endpoint_to_maddrs(flag: str, endpoint: str) -> list[str]:
    """Translate host:port notation to multiaddresses: '[::]:*' (all interfaces, any port) to /ip4 and /ip6."""
    match = HOST_PORT.fullmatch(endpoint)
    require(match is not None, f"{flag}: '{endpoint}' is not HOST:PORT; it looks like bore.pub:31337")
    host, port = match["host"].strip("[]"), match["port"].replace("*", "0")
    if host == "::":
        return [f"/ip4/0.0.0.0/tcp/{port}", f"/ip6/::/tcp/{port}"]
    kind = "ip6" if ":" in host else "dns4" if re.search("[A-Za-z]", host) else "ip4"
    return [f"/{kind}/{host}/tcp/{port}"]


def check_announced(flag: str, maddr: str) -> None:
    """Check that a multiaddress has a host and a port that other peers can dial."""
    protocols = check_maddr(flag, maddr)
    require(protocols.get("ip4") != "0.0.0.0", f"{flag}: '{maddr}' is not a host that other peers can reach")
    port = protocols.get("tcp", protocols.get("udp"))
    require(port != "0", f"{flag}: '{maddr}' needs the port that other peers dial, not 0")


def check_peer(flag: str, maddr: str) -> None:
    """Check that a value is the address of a peer, with its ID; ArgumentsError with the address as it should be."""
    copy = "Copy the whole address that the peer prints"
    endpoint = HOST_PORT.fullmatch(maddr)  # the notation of older examples
    is_address = endpoint is not None or maddr.startswith("/")
    require(is_address, f"{flag}: '{maddr}' is no address. {copy}: /ip4/203.0.113.1/tcp/31337/p2p/PEER_ID")
    protocols = {} if endpoint else check_maddr(flag, maddr)
    peer_id = protocols.get("p2p", protocols.get("ipfs"))
    address = f"/ip4/{endpoint['host']}/tcp/{endpoint['port']}" if endpoint else maddr.rstrip("/")
    require(peer_id is not None, f"{flag}: '{maddr}' lacks the peer ID. {copy}: {address}/p2p/PEER_ID")
    require(bool(PEER_ID.fullmatch(peer_id)), f"{flag}: '{peer_id}' in '{maddr}' is not a peer ID. {copy}")


_HUB_ADDRESS = r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/"
_REPO_ID = re.compile(rf"(?:{_HUB_ADDRESS})?(?P<repo_id>\w[\w.-]*/\w[\w.-]{{0,95}}?)(?:\.git)?/?", re.ASCII)


def parse_repo_id(flag: str, value: str) -> str:
    """Return NAME/MODEL of a repository on the Hugging Face Hub, from that or from its URL."""
    match = _REPO_ID.fullmatch(value)
    is_valid = match is not None and not re.search(r"--|\.\.|[.-](/|$)", match["repo_id"])
    require(is_valid, f"{flag}: '{value}' is not a repository on the Hugging Face Hub; pass NAME/MODEL")
    return match["repo_id"]
