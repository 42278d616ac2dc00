"""What any peer needs of the DHT: the records that peers publish and their validators, starting a peer, its addresses.

Knows nothing of models.
"""

import asyncio
import atexit
import hashlib
import logging
import os
import re
import shutil
import socket
import struct
import sys
import tempfile
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from pathlib import Path

import msgpack
import psutil
import pydantic.v1 as pydantic  # hivemind's schemas are pydantic v1 models, a v2 model raises
import requests
from hivemind.dht import DHT
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.node import DHTNode
from hivemind.dht.schema import BytesWithPublicKey, SchemaValidator
from hivemind.dht.validation import CompositeValidator, DHTRecord, RecordValidatorBase
from hivemind.p2p import P2P, P2PDaemonError, PeerID
from hivemind.utils import MPFuture, MSGPackSerializer, get_dht_time, get_logger
from hivemind.utils.crypto import RSAPrivateKey
from hivemind.utils.logging import TextStyle, use_hivemind_log_handler
from hivemind.utils.multiaddr import Multiaddr
from tqdm import tqdm

from arguments import BaseTrainingArguments
from lib.common.errors import UserError
from lib.common.processes import keep_memory_shared, start_shared_memory_manager
from lib.peer.admission import InvitedDHT, load_admission
from lib.peer.dht import SafeDHT, use_only_trusted_relays
from lib.peer.invitations import read_private_key, write_private_key

logger = get_logger(__name__)

# A trainer's history holds as many steps as fit a record of 4 KiB, the most that hivemind's control pipe takes in one
# piece when several threads write to it: 64 entries of about 30 bytes, its keys and its signature.
HISTORY_LENGTH = 64

_Step = pydantic.conint(strict=True, ge=0, lt=2**31)
_Count = pydantic.conint(strict=True, ge=0, le=10**9)
_Rate = pydantic.confloat(strict=True, ge=0.0, le=1e9)  # bounds also refuse NaN and infinity
_Share = pydantic.confloat(strict=True, ge=0.0, le=1.0)
_Sum = pydantic.confloat(strict=True, ge=-1e9, le=1e9)


class LocalMetrics(pydantic.BaseModel):
    """What a trainer reports after each global step; the record of hivemind's own ALBERT example.

    `step`: the global step that was reached; `samples_accumulated`: samples that this peer contributed to it;
    `loss`: the sum of the losses of `mini_steps` micro-batches.
    """

    step: _Step
    samples_per_second: _Rate
    samples_accumulated: _Count
    loss: _Sum
    mini_steps: _Count


class MonitorStatus(pydantic.BaseModel):
    """What a monitor tells the trainers. `checkpoint_step`: the newest step that it has on disk, -1 if none."""

    stores_checkpoints: pydantic.StrictBool
    checkpoint_step: pydantic.conint(strict=True, ge=-1, lt=2**31)


class PeerInfo(pydantic.BaseModel):
    """What a trainer tells of itself. `leaving`: it has made its last step and waits for a monitor to save it.

    `target_batch_size`: samples of a global step; may be missing.
    """

    username: pydantic.constr(strict=True, max_length=64)
    leaving: pydantic.StrictBool
    target_batch_size: pydantic.conint(strict=True, ge=1, le=10**9) | None = None

    def dict(self, **options) -> dict:
        """The fields that are set: a validated record must come out as it went in, without the optional field, too."""
        return super().dict(**{**options, "exclude_unset": True})


class Evaluation(pydantic.BaseModel):
    """What an evaluator found for the parameters of a global step, on `samples` samples that nobody trains on. Values
    that the objective does not have are None."""

    step: _Step
    samples: _Count
    loss: _Rate
    perplexity: _Rate | None
    mlm_accuracy: _Share | None
    sop_accuracy: _Share | None


class MetricSchema(pydantic.BaseModel):
    """The keys of a run, without its prefix: each a dictionary from the signer's public key to a record."""

    metrics: dict[BytesWithPublicKey, LocalMetrics]
    # [step, samples_per_second, samples_accumulated, loss, mini_steps] of the newest steps
    history: dict[
        BytesWithPublicKey,
        pydantic.conlist(
            pydantic.conlist(pydantic.StrictInt | pydantic.StrictFloat, min_items=5, max_items=5),
            max_items=HISTORY_LENGTH,
        ),
    ]
    monitor: dict[BytesWithPublicKey, MonitorStatus]
    peers: dict[BytesWithPublicKey, PeerInfo]
    evaluation: dict[BytesWithPublicKey, Evaluation]
    # Checked where it is read, see lib/averaging/progress.py: peers of another protocol shall be told so
    training_progress: dict[BytesWithPublicKey, dict | None]


# What hivemind's averagers declare: whether a peer looks for a group, and the priority (its step) of the state that it
# offers, None if it no longer does. Their keys are no names of Python's, hence no class.
_Priority = pydantic.confloat(strict=True, ge=0.0, lt=2**31) | _Step | None
AveragerSchema = pydantic.create_model(
    "AveragerSchema",
    **{
        "state_averager.all_averagers": (dict[pydantic.StrictBytes, _Priority], ...),
    },
)


class RefusesWhatItCannotRead(RecordValidatorBase):
    """hivemind's validators raise on some malformed keys and values instead of refusing them."""

    def validate(self, record: DHTRecord) -> bool:
        try:
            return super().validate(record)
        except Exception as error:
            logger.debug(f"Refused a malformed record: {error!r}")
            return False


class SignatureValidator(RefusesWhatItCannotRead, RSASignatureValidator):
    """A record under a subkey with a public key must be signed with the private one."""


class RunSchemaValidator(RefusesWhatItCannotRead, SchemaValidator):
    """A record under a key of the run must look like MetricSchema or AveragerSchema says."""


class ReadableValidator(RecordValidatorBase):
    """Refuses records that break their readers, under any key.

    hivemind unpacks values in a callback whose exceptions are lost: with one value that is no msgpack under a key,
    `dht.get` of that key never returns. One byte stopped matchmaking and downloads for a day. A record without a
    subkey makes nodes refuse all records with one under the same key for as long as it lives.
    """

    MAX_DEPTH = 8  # nested lists and dictionaries in a value; a history, the deepest record, has 2

    def validate(self, record: DHTRecord) -> bool:
        try:
            subkey, value = (msgpack.unpackb(packed, ext_hook=_refuse) for packed in (record.subkey, record.value))
        except Exception as error:
            logger.debug(f"Refused a record that cannot be read: {error!r}")
            return False
        return isinstance(subkey, bytes | str) and _is_plain(value, self.MAX_DEPTH)

    @property
    def priority(self) -> int:
        return 7  # sees values as readers do, without their signature, and before LimitValidator counts them

    def merge_with(self, other: RecordValidatorBase) -> bool:
        return isinstance(other, ReadableValidator)


def _refuse(type_code: int, _data: bytes) -> object:
    raise ValueError(f"extension type {type_code}, which no record has")


def _is_plain(value: object, depth: int) -> bool:
    """Whether a value consists of numbers, texts and at most `depth` nested lists and dictionaries of them."""
    if isinstance(value, list):
        children = value
    elif isinstance(value, dict):
        children = [*value.keys(), *value.values()]
    else:
        return value is None or isinstance(value, bool | int | float | str | bytes)
    return depth > 0 and all(_is_plain(child, depth - 1) for child in children)


class _BoundedExtensions:
    """Stops hivemind's serializer from unpacking extension types inside of each other without end.

    Each level takes some 20 KB of the C stack: 2 KB from a stranger, 300 levels, end the process with a segmentation
    fault. A dictionary of records, the deepest of ours, has 1.
    """

    MAX_DEPTH = 8

    def __init__(self, unpack):
        self._unpack, self._local = unpack, threading.local()

    def __call__(self, type_code: int, data: bytes) -> object:
        depth = getattr(self._local, "depth", 0)
        if depth >= self.MAX_DEPTH:
            raise ValueError("extension types are nested too deeply")
        self._local.depth = depth + 1
        try:
            return self._unpack(type_code, data)
        finally:
            self._local.depth = depth


MSGPackSerializer._decode_ext_types = staticmethod(_BoundedExtensions(MSGPackSerializer._decode_ext_types))


class LimitValidator(RecordValidatorBase):
    """Refuses records that are larger or meant to live longer than any of ours, under whatever key, and more subkeys
    than any run has peers: what a dictionary holds must fit into one answer of 4 MiB, or nobody can read it.

    :param max_subkeys: of one key; whoever is there first stays
    """

    MAX_KEYS = 1000  # keys whose subkeys are counted

    def __init__(self, max_bytes: int = 8192, max_lifetime: float = 86400.0, max_subkeys: int = 1000):
        self.max_bytes, self.max_lifetime, self.max_subkeys = max_bytes, max_lifetime, max_subkeys
        self._subkeys: dict[bytes, dict[bytes, float]] = {}  # key -> subkey -> expiration

    def validate(self, record: DHTRecord) -> bool:
        now = get_dht_time()
        if len(record.value) + len(record.subkey or b"") > self.max_bytes:
            return False
        if not record.expiration_time <= now + self.max_lifetime:  # NaN, too, after which nothing expires any more
            return False
        return not record.subkey or self._has_room(record, now)

    def _has_room(self, record: DHTRecord, now: float) -> bool:
        if record.key not in self._subkeys and len(self._subkeys) >= self.MAX_KEYS:
            self._subkeys.pop(next(iter(self._subkeys)))
        known = self._subkeys.setdefault(record.key, {})
        if record.subkey not in known and len(known) >= self.max_subkeys:
            for subkey in [subkey for subkey, expiration in known.items() if expiration < now]:
                del known[subkey]
            if len(known) >= self.max_subkeys:
                return False
        known[record.subkey] = max(record.expiration_time, known.get(record.subkey, 0.0))
        return True

    @property
    def priority(self) -> int:
        return 5  # after the signature: one that is forged must not take up room

    def merge_with(self, other: RecordValidatorBase) -> bool:
        return isinstance(other, LimitValidator)


class RunValidator(CompositeValidator):
    """All validators of a run's records, in hivemind's order. Remembers which records it has found valid.

    A peer that reads a dictionary receives each record in it from each node that it asks. With 16 peers, checking
    them took 60 % of the DHT's time.
    """

    MAX_KNOWN = 8192  # of 100 bytes each

    def __init__(self, validators: Iterable[RecordValidatorBase]):
        super().__init__(validators)
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def validate(self, record: DHTRecord) -> bool:
        digest = _digest(record)
        if digest in self._known:
            self._known.move_to_end(digest)
            return True
        if not super().validate(record):
            return False
        self._known[digest] = None
        if len(self._known) > self.MAX_KNOWN:
            self._known.popitem(last=False)
        return True

    def merge_with(self, other: RecordValidatorBase) -> bool:
        return isinstance(other, RunValidator)


def _digest(record: DHTRecord) -> bytes:
    digest = hashlib.blake2b(struct.pack("d", record.expiration_time), digest_size=20)
    for part in (record.key, record.subkey or b"", record.value):
        digest.update(struct.pack("q", len(part)) + part)
    return digest.digest()


def make_validators(run_id: str, private_key: RSAPrivateKey | None = None) -> tuple[list[RecordValidatorBase], bytes]:
    """The validators of a run's records, and the subkey (owner tag with public key) that our own are signed under."""
    signature_validator = SignatureValidator(private_key)
    schemas = [RunSchemaValidator(schema, prefix=run_id) for schema in (MetricSchema, AveragerSchema)]
    validators = [LimitValidator(), ReadableValidator(), *schemas, signature_validator]
    return [RunValidator(validators)], signature_validator.local_public_key


def load_identity(path: Path, flag: str = "--identity_path") -> RSAPrivateKey:
    """Read a peer's private key, or make one. It gives the peer its ID and signs its records, so that a peer that
    restarts is known as the same one.

    :raises UserError: if the file is not a private key
    """
    if not path.exists():
        write_private_key(RSAPrivateKey(), path)
    try:
        return read_private_key(path)
    except OSError:
        raise
    except Exception:
        raise UserError(
            f"{flag}: '{path}' is not a peer's private key; remove it (a new one is written) or pass another"
        ) from None


@dataclass
class Peer:
    """A running DHT peer and who it is."""

    dht: DHT
    private_key: RSAPrivateKey
    public_key: bytes  # the subkey of its signed records


def start_peer(
    args: BaseTrainingArguments,
    identity_path: Path,
    client_mode: bool,
    should_stop: threading.Event,
    may_start_alone: bool = False,
) -> Peer:
    """Start a DHT peer and join the others, trying again until `args.bootstrap_timeout` seconds have passed.

    :param should_stop: gives up early when set
    :param may_start_alone: without the others if none of them answers in this time
    :raises UserError: if no initial peer can be reached, or an address cannot be listened on
    """
    start_shared_memory_manager()
    keep_memory_shared()
    _use_own_socket_folder()
    build_dht = SafeDHT
    if args.invitation is not None:
        revocations = None if args.revocations is None else Path(args.revocations)
        admission = load_admission(Path(args.invitation), revocations, identity_path.parent)
        identity_path = identity_path.with_name("invited.key")
        write_private_key(admission.invitation.private_key, identity_path)
        build_dht = partial(InvitedDHT, admission=admission)
    use_only_trusted_relays()
    private_key = load_identity(identity_path)
    validators, public_key = make_validators(args.run_id, private_key)
    if args.initial_peers:
        logger.info(f"Joining the collaboration through {', '.join(args.initial_peers)}")
    deadline = get_dht_time() + args.bootstrap_timeout
    has_warned, initial_peers = False, args.initial_peers
    while True:
        dht = build_dht(
            initial_peers=initial_peers,
            host_maddrs=args.host_maddrs,
            announce_maddrs=args.announce_maddrs or None,
            use_ipfs=args.use_ipfs,
            use_relay=args.use_relay,
            use_auto_relay=args.use_auto_relay,
            trusted_relays=args.trusted_relays or None,
            identity_path=str(identity_path),
            client_mode=client_mode,
            record_validators=validators,
            startup_timeout=args.bootstrap_timeout,
            shutdown_timeout=5,
            start=True,
            await_ready=False,
        )
        try:
            _wait_until_ready(dht, deadline, should_stop)
            return Peer(dht, private_key, public_key)
        except Exception as error:
            _end(dht)
            if should_stop.is_set():
                raise SystemExit(0) from None
            reason = _explain_start_failure(error, args)
            if reason is None and initial_peers and may_start_alone and get_dht_time() + 3 > deadline:
                logger.warning(f"{_unreachable(args)}. Starting without them, and dialing them again now and then")
                initial_peers, deadline = [], get_dht_time() + args.bootstrap_timeout
                continue
            if reason is not None or get_dht_time() + 3 > deadline:
                raise UserError(reason or _unreachable(args)) from None
            if not has_warned:
                logger.warning(f"{_unreachable(args)}. Trying for {args.bootstrap_timeout:.0f} seconds")
                has_warned = True
            should_stop.wait(3)


def _use_own_socket_folder() -> None:
    """hivemind leaves its Unix sockets in /tmp, two or more a start: put them into a folder that goes with us, or with
    the next peer if we are killed."""
    parent = Path(tempfile.gettempdir())
    for folder in parent.glob("hivemind-sockets-*"):
        if not psutil.pid_exists(int(folder.name.rsplit("-", 1)[-1])):
            shutil.rmtree(folder, ignore_errors=True)
    folder = parent / f"hivemind-sockets-{os.getpid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    P2P._UNIX_SOCKET_PREFIX = f"/unix{folder}/"
    atexit.register(shutil.rmtree, folder, ignore_errors=True)


def _wait_until_ready(dht: DHT, deadline: float, should_stop: threading.Event) -> None:
    """Wait for the DHT process in short turns, so that a signal or its death ends the wait."""
    while True:
        try:
            return dht.wait_until_ready(timeout=0.5)
        except TimeoutError:
            if should_stop.is_set() or get_dht_time() > deadline:
                raise
            if not dht.is_alive():
                raise RuntimeError("the DHT process ended before it was ready") from None


def _end(dht: DHT) -> None:
    """End a DHT process that did not get ready, such that another one can start."""
    dht.join(2)  # after an error it ends by itself
    if dht.is_alive():
        dht.kill()
        dht.join(5)
        MPFuture.reset_backend()  # it may have died with hivemind's lock in its hands, which the next would wait for


def _unreachable(args: BaseTrainingArguments) -> str:
    if not args.initial_peers:
        return f"no peer could be started within --bootstrap_timeout {args.bootstrap_timeout:.0f} seconds; raise it"
    return (
        f"none of --initial_peers answers: {' '.join(args.initial_peers)}. Check that they run, that the address and "
        f"peer ID are the ones they print now, that no firewall is in between, and that you pass the --invitation of "
        f"the run if it needs one"
    )


def _explain_start_failure(error: Exception, args: BaseTrainingArguments) -> str | None:
    """One line for a failure that trying again does not cure; None for one that it may."""
    text = " ".join(str(error).split())
    if "failed to listen" in text or "address already in use" in text or "cannot assign" in text:
        return (
            f"cannot listen on --host_maddrs {' '.join(args.host_maddrs)}: port in use or not this machine's address"
        )
    if "already taken" in text and not args.initial_peers:
        return text
    if isinstance(error, P2PDaemonError) and "bootstrap" not in text and "taken" not in text:
        return f"the p2p daemon did not start: {text}"
    return None


# Addresses


def get_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def fix_tcp_port(host_maddrs: Sequence[str]) -> tuple[list[str], int]:
    """Replace port 0 (any) by one that is free now, since a port must be known before it can be announced."""
    ports = {int(Multiaddr(maddr)["tcp"]) for maddr in host_maddrs if "/tcp/" in maddr} - {0}
    port = min(ports) if ports else get_free_port()
    return [maddr.replace("/tcp/0", f"/tcp/{port}") for maddr in host_maddrs], port


def look_up_public_ip(service: str, timeout: float = 10.0) -> str:
    """Ask a web service for the address that it sees us under.

    :raises UserError: if it does not answer with an IP address
    """
    try:
        response = requests.get(service, timeout=timeout)
        response.raise_for_status()
        return str(ip_address(response.text.strip()))
    except (requests.RequestException, ValueError) as error:
        reason = str(error).split("\n")[0][:120]
        raise UserError(
            f"--use_google_dns: {service} did not tell this machine's IP address ({reason}). Pass it yourself: "
            f"--host_maddrs /ip4/0.0.0.0/tcp/PORT --announce_maddrs /ip4/YOUR_IP/tcp/PORT"
        ) from None


def announce_public_ip(args: BaseTrainingArguments, service: str) -> None:
    """Announce this machine's public IP with the port that it really listens on."""
    address = look_up_public_ip(service)
    args.host_maddrs, port = fix_tcp_port(args.host_maddrs)
    args.announce_maddrs = [*args.announce_maddrs, f"/ip{ip_address(address).version}/{address}/tcp/{port}"]
    logger.info(f"Public IP address of this machine: {address}, port {port}")


def _reach(maddr: Multiaddr) -> int:
    """How far away peers may be that an address is good for: 3 the internet, 2 the local network, 1 this machine."""
    protocols = {protocol.name for protocol in maddr.protocols()}
    if protocols & {"dns", "dns4", "dns6", "dnsaddr"}:
        return 3
    address = next((ip_address(maddr[name]) for name in ("ip4", "ip6") if name in protocols), None)
    if address is None or address.is_loopback or address.is_link_local:
        return 1
    return 3 if address.is_global else 2


def choose_maddrs(visible_maddrs: Sequence[Multiaddr], only_p2p: bool = False) -> list[str]:
    """The addresses to hand to others: those that reach farthest, or the peer ID alone for IPFS."""
    if only_p2p:
        return sorted({f"/p2p/{maddr['p2p']}" for maddr in visible_maddrs})
    farthest = max((_reach(maddr) for maddr in visible_maddrs), default=0)
    return list(dict.fromkeys(str(maddr) for maddr in visible_maddrs if _reach(maddr) == farthest))


def choose_internet_maddrs(visible_maddrs: Sequence[Multiaddr], only_p2p: bool = False) -> list[str]:
    """The addresses to hand to the public: none if they are good on this machine or network alone."""
    is_reachable = only_p2p or any(_reach(maddr) == 3 for maddr in visible_maddrs)
    return choose_maddrs(visible_maddrs, only_p2p) if is_reachable else []


def log_visible_maddrs(visible_maddrs: Sequence[Multiaddr], only_p2p: bool) -> None:
    """Print how others join through this peer."""
    chosen = choose_maddrs(visible_maddrs, only_p2p)
    reach = 3 if only_p2p else max((_reach(maddr) for maddr in visible_maddrs), default=0)
    where = {3: "over the Internet", 2: "in this network"}.get(reach, "on this machine")
    logger.info(
        f"Running a DHT peer. To connect other peers to this one {where}, use "
        f"{TextStyle.BOLD}{TextStyle.BLUE}--initial_peers {' '.join(chosen)}{TextStyle.RESET}"
    )
    if reach == 3 and not only_p2p:
        nearer = choose_maddrs([maddr for maddr in visible_maddrs if _reach(maddr) < 3])
        if nearer:
            logger.info(f"Peers in the same network may also use --initial_peers {' '.join(nearer)}")
    logger.info(f"Full list of visible multiaddresses: {' '.join(map(str, visible_maddrs))}")
    if reach == 2:
        logger.info("Peers outside this network need a public address: see --tunnel and --announce_tunnel")


class KeepInTouch(threading.Thread):
    """Dials the initial peers again every `period` seconds, and more often while one of them does not answer.

    hivemind forgets a peer that was away: a monitor that restarts at the same address would know no one, and the next
    trainer that joins through it would begin a second run at step 0, or at that of the monitor's last checkpoint.
    """

    def __init__(self, dht: DHT, initial_peers: Sequence[str], period: float = 10.0):
        super().__init__(name="KeepInTouch", daemon=True)
        self.dht, self.initial_peers, self.period = dht, list(initial_peers), period
        self.stopped = threading.Event()

    def run(self) -> None:
        all_answer = True
        while not self.stopped.wait(self.period if all_answer else self.period / 5):
            try:
                call = partial(_redial, maddrs=self.initial_peers, timeout=self.period / 2)
                all_answer = self.dht.run_coroutine(call, return_future=True).result(timeout=2 * self.period)
            except Exception as error:
                logger.debug(f"Could not reach the initial peers: {error!r}")
                all_answer = False

    def stop(self) -> None:
        self.stopped.set()


async def _redial(_dht: DHT, node: DHTNode, maddrs: list[str], timeout: float) -> bool:
    """Runs in the DHT process: connect to each address again and introduce ourselves to its routing table.

    :returns: whether all of them answer
    """
    return all(await asyncio.gather(*(_dial(node, Multiaddr(maddr), timeout) for maddr in maddrs)))


async def _dial(node: DHTNode, maddr: Multiaddr, timeout: float) -> bool:
    peer_id = PeerID.from_base58(maddr["p2p"])
    try:
        # After each dial that fails libp2p refuses the next for longer, soon for minutes: see first whether it listens
        if (endpoint := _find_tcp_endpoint(maddr)) is not None:
            _, writer = await asyncio.wait_for(asyncio.open_connection(*endpoint), timeout)
            writer.close()
        await asyncio.wait_for(node.p2p._client.connect(peer_id, [maddr.decapsulate(f"/p2p/{maddr['p2p']}")]), timeout)
        return await asyncio.wait_for(node.protocol.call_ping(peer_id), timeout) is not None
    except Exception as error:
        logger.debug(f"Initial peer {maddr} does not answer: {error!r}")
        return False


def _find_tcp_endpoint(maddr: Multiaddr) -> tuple[str, int] | None:
    """Host and port of an address such as /ip4/192.0.2.1/tcp/31337/...; None if it begins otherwise."""
    match = re.match(r"/(?:ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/(\d+)", str(maddr))
    return (match[1], int(match[2])) if match else None


def get_dictionary(dht: DHT, key: str, timeout: float = 10.0) -> dict:
    """The newest records under a key: subkey -> ValueWithExpiration. Empty if there are none, or in case of trouble.

    The wait is bounded: `dht.get` alone never returns after the DHT process has died.
    """
    try:
        found = dht.get(key, latest=True, return_future=True).result(timeout=timeout)
    except Exception as error:
        logger.warning(f"Could not read {key} from the DHT: {error!r}")
        return {}
    return found.value if found is not None and isinstance(found.value, dict) else {}


def store_record(dht: DHT, key: str, public_key: bytes, value: object, lifetime: float) -> None:
    """Publish a signed record without waiting for the outcome."""
    dht.store(key, subkey=public_key, value=value, expiration_time=get_dht_time() + lifetime, return_future=True)


# Logging


class ClientModeAlarm:
    """Says now and then that nobody can average because every trainer is in client mode.

    hivemind counts the steps of trainers that can be reached only, and a client's state cannot be downloaded: neither
    a monitor nor an assistant takes the place of one trainer that is not in client mode.
    """

    def __init__(self, period: float = 300.0):
        self.period = period
        self._last_time = float("-inf")

    def check(self, num_peers: int, num_clients: int) -> None:
        """:param num_peers: trainers that are alive; a single one has nobody to average with in any case"""
        now = time.monotonic()
        if num_peers < 2 or num_clients < num_peers or now < self._last_time + self.period:
            return
        self._last_time = now
        logger.warning(
            f"All {num_peers} trainers are in client mode, so that nobody can average with anybody: start one without "
            f"--client_mode on a machine that others can reach, or with --tunnel or --announce_tunnel"
        )


class AboveProgressBar:
    """A stream for the log that does not tear a progress bar apart."""

    def write(self, text: str) -> None:
        tqdm.write(text, file=sys.stderr, end="")

    def flush(self) -> None:
        sys.stderr.flush()


def _renew_tqdm_lock() -> None:
    """A thread of the parent may have held the lock at the moment of the fork; it would never be released here."""
    tqdm.set_lock(threading.RLock())


class OneLineFilter(logging.Filter):
    """Makes one line of warning of what hivemind logs as an error with a traceback: that a round of averaging failed,
    a peer went away. With volunteers this happens all the time, and it carries on by itself."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name.startswith("hivemind.") and record.exc_info:
            record.exc_info, record.levelno, record.levelname = None, logging.WARNING, "WARN"
            record.msg = " ".join(f"{record.getMessage()}".split()) or "an operation failed"
            record.args = ()
        return True


def setup_logging(debug: bool = False) -> None:
    """One format for hivemind's log and ours, on stderr, above a progress bar if there is one."""
    use_hivemind_log_handler("in_root_logger")
    logging.getLogger().setLevel(logging.DEBUG if debug else logging.INFO)
    for noisy in ("httpx", "httpcore", "urllib3", "filelock", "matplotlib", "datasets", "fsspec"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr and sys.stderr.isatty():
            handler.setStream(AboveProgressBar())
            os.register_at_fork(after_in_child=_renew_tqdm_lock)
    # hivemind sets the schedule to the step of a state that it has loaded, without a step of the optimizer
    warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step\\(\\)` before")
    if not debug:
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # tasks of a peer that leaves
        for handler in logging.getLogger().handlers:
            handler.addFilter(OneLineFilter())
