"""The settings of a run, stated once by the organiser and adopted by all peers.

The monitor signs what its flags or its --run_config file state, and publishes it in the DHT under a key that names no
run. In a run without a monitor, the trainer that starts without --initial_peers does so. Every trainer publishes the
signed text again, so that the run does not need its organiser. A newcomer reads all of these texts. It trusts an
organiser that is one of its --initial_peers; otherwise one that an initial peer vouches for. Settings are data: they
become flags, which are parsed and checked like those of a command line.
"""

import ipaddress
import json
import shlex
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import msgpack
from hivemind.p2p import PeerID
from hivemind.utils import get_logger
from hivemind.utils.crypto import RSAPrivateKey, RSAPublicKey

from cotrain.common.argument_parser import CommandLine
from cotrain.common.errors import TemporaryError, UserError, require_packages
from cotrain.common.flags import MAX_FLAG, check_maddr, find_settings, has_secret
from cotrain.common.json_file import JsonFile, write_json
from cotrain.common.logs import setup_logging
from cotrain.common.signals import StopSignal, ignore_launcher
from cotrain.dht.run_records import record_schemas
from cotrain.models.config import is_inline, is_published_name, to_published_model
from cotrain.options import NOTHING, Adopted, ModelOptions, PeerOptions, TrainerOptions
from cotrain.peer.addresses import peer_id_in
from cotrain.peer.peer import find_own_id, start_peer
from cotrain.settings import SETTINGS as SETTINGS_CLASSES
from peerstep.local_peer import LocalPeer
from peerstep.peer.clock import run_time
from peerstep.peer.processes import guard_children
from peerstep.reports.progress_report import PROTOCOL
from peerstep.reports.records import get_dictionary, peer_id_of, signer_of, store_record

logger = get_logger(__name__)

KEY = "run_config"
KEPT_FILE = "run_config.json"  # in the output folder: the signed settings that were taken
MAX_SETTINGS_LENGTH = 2200  # of the signed text; with keys and signatures, a record has 3.4 KB, see RunValidator
MAX_CLOCK_LEAD = 3600.0  # seconds by which the time of a signature may be ahead of the run's clock
TASK = "task_sha256"  # setting of a run with a --task: it names the version of the file, which no peer sends
SETTINGS = find_settings(SETTINGS_CLASSES) | {TASK}
OPTIONAL_SETTINGS = find_settings(SETTINGS_CLASSES, optional_only=True)
COMMON_SETTINGS = SETTINGS - OPTIONAL_SETTINGS

Setting = str | int | float | bool | None


@dataclass(frozen=True)
class RunConfig:
    """Settings that an organiser has signed. A model of None means pretrained weights in a folder of the organiser."""

    settings: dict[str, Setting]
    protocol: int  # of rounds and progress reports
    organiser: PeerID  # the signer
    publisher: PeerID
    signed_at: float  # run_time
    record: dict[str, object]

    @classmethod
    def sign(cls, stated: Mapping[str, Any], private_key: RSAPrivateKey) -> "RunConfig":
        """Sign the settings of a run; other flags in `stated` are left out.

        :raises UserError: if they are too long, contain a password, or the model's configuration cannot be read
        """
        settings = {name: stated[name] for name in sorted(SETTINGS & stated.keys())}
        if (model := settings.get("model_name_or_path")) is not None:
            is_pretrained = settings.get("from_pretrained", False) or settings.get("lora_rank") is not None
            is_folder = is_pretrained and not is_published_name(model)
            model = settings["model_name_or_path"] = None if is_folder else to_published_model(model)
        check_safe(settings)
        text = json.dumps({"protocol": PROTOCOL, "time": run_time(), "settings": settings}, separators=(",", ":"))
        if len(text) > MAX_SETTINGS_LENGTH:
            advice = "; put the model's configuration on the Hub, and pass its name" if is_inline(model or "") else ""
            raise UserError(f"the settings of the run have {len(text)} characters of {MAX_SETTINGS_LENGTH}{advice}")
        public_key = private_key.get_public_key()
        record = {"text": text, "public_key": public_key.to_bytes(), "signature": private_key.sign(text.encode())}
        return cls.parse(record, publisher=peer_id_of(public_key))

    @classmethod
    def parse(cls, record: Any, publisher: PeerID) -> "RunConfig":
        """Check the signature, size, names and types of a record; raise ValueError if something is wrong."""
        try:
            text, key, signature = record["text"], record["public_key"], record["signature"]
            if len(text) > MAX_SETTINGS_LENGTH or len(key) > 1024 or len(signature) > 1024:
                raise ValueError("too long")
            public_key = RSAPublicKey.from_bytes(key)
            if not public_key.verify(text.encode(), signature):
                raise ValueError("the signature is wrong")
            content = json.loads(text)
            settings, protocol = dict(content["settings"]), content["protocol"]
            wrong = [name for name, value in settings.items() if name not in SETTINGS or not _is_plain(value)]
            if wrong or "run_id" not in settings or type(protocol) is not int:
                raise ValueError(f"wrong or missing settings: {wrong}")
            if not content["time"] <= run_time() + MAX_CLOCK_LEAD:  # it would outlast what the organiser signs later
                raise ValueError("signed in the future")
            record = {"text": text, "public_key": key, "signature": signature}  # only what is signed is passed on
            return cls(settings, protocol, peer_id_of(public_key), publisher, float(content["time"]), record)
        except Exception as error:
            raise ValueError(f"not a run configuration: {error!r:.100}") from None

    def keep(self, path: Path) -> None:
        """Write the signed settings to a file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"from": self.publisher.to_base58(), "record": msgpack.packb(self.record).hex()})

    @classmethod
    def load(cls, path: Path) -> "RunConfig | None":
        """Return the settings in a file of `keep`."""
        return JsonFile(path).load(
            lambda kept: cls.parse(msgpack.unpackb(bytes.fromhex(kept["record"])), PeerID.from_base58(kept["from"]))
        )


def check_safe(settings: Mapping[str, Setting]) -> None:
    """Raise UserError for a name of the model, or an address of the data, that a stranger could misuse.

    Where they lead is checked when they are used, by `load_config` and `GuardedAdapter`.
    """
    model, url = settings.get("model_name_or_path"), settings.get("dataset_url")
    if model is not None and not (is_inline(str(model)) or is_published_name(str(model))):
        raise UserError(f"this run's --model_name_or_path '{model!s:.80}' is not a name: refused")
    if url and has_secret(str(url)):
        raise UserError("the run's --dataset_url has a user, a password or a signature: use a public address")


def _is_plain(value: object) -> bool:
    """Whether a value can stand on a command line."""
    if isinstance(value, str):
        limit = MAX_SETTINGS_LENGTH if is_inline(value) else 1000
        return value.isprintable() and not value.startswith("-") and len(value) <= limit
    return value is None or (isinstance(value, bool | int | float) and abs(value) <= MAX_FLAG)  # not NaN, Infinity


def choose(
    records: Mapping[bytes, object],
    initial_peers: Collection[PeerID],
    known: PeerID | None = None,
    run_id: str | None = None,
) -> RunConfig | None:
    """Return the newest configuration of the organiser to believe.

    :param records: subkey of the publisher -> record
    :param initial_peers: an organiser among these peers is believed; otherwise one whose settings one of them
        publishes; otherwise the known one
    :param known: the organiser that was believed before
    :param run_id: prefer configurations of this run
    """
    configs = []
    for subkey, record in records.items():
        try:
            configs.append(RunConfig.parse(record, signer_of(subkey)))
        except ValueError as error:
            logger.debug(f"Ignoring a run configuration: {error}")
    ranks = {
        (c.settings["run_id"] == run_id, c.organiser in initial_peers, c.publisher in initial_peers, c.signed_at): c
        for c in configs
        if c.organiser in {known, *initial_peers} or c.publisher in initial_peers
    }
    if not ranks:
        return None
    best = ranks[max(ranks)]
    of_run = [c for c in configs if (c.organiser, c.settings["run_id"]) == (best.organiser, best.settings["run_id"])]
    return replace(max(of_run, key=lambda config: config.signed_at), publisher=best.publisher)


@dataclass(frozen=True)
class Entry:
    """How a script enters a run.

    :ivar arguments: those of the script, with the settings of the run
    :ivar adopted: which of these the run has chosen
    :ivar config: the settings of the run; None if there are none, or this peer states them
    :ivar is_organiser: whether this peer signs its settings
    :ivar is_alone: whether no initial peer answers
    """

    arguments: tuple
    adopted: Adopted = NOTHING
    config: RunConfig | None = None
    is_organiser: bool = False
    is_alone: bool = False

    def to_options(self) -> TrainerOptions:
        """Return the arguments of a trainer's script."""
        return TrainerOptions._make((*self.arguments, self.adopted))


def find_run_config(command_line: CommandLine, stop: StopSignal, is_monitor: bool = False) -> Entry:
    """Find the settings of the run that --initial_peers lead to, if there are any.

    The settings are kept in the output folder: after a restart, other peers than the initial ones may relay them. The
    call also prepares the process of the script: its log, its environment and its children.

    :param is_monitor: start even if no initial peer answers, and state settings if this is the organiser
    :raises UserError: if a flag differs from the settings, these are not safe, or a package is not installed
    :raises TemporaryError: if there are none, and the command line does not state the run either
    """
    ignore_launcher()
    guard_children()
    require_packages(command_line.arguments)
    (peer_args,) = [args for args in command_line.arguments if isinstance(args, PeerOptions)]
    setup_logging(peer_args.debug)
    if not peer_args.initial_peers:
        return Entry(command_line.arguments, is_organiser=True)
    stated, run_id = command_line.stated, command_line.values.get("run_id")
    path = _find_kept_file(command_line.arguments)
    kept = RunConfig.load(path)
    if kept is not None and run_id not in (None, kept.settings["run_id"]):
        kept = None  # the folder was that of another run
    organiser = None if kept is None else kept.organiser
    config = fault = None
    try:
        config = _visit(peer_args, organiser, run_id, stop)
    except TemporaryError as error:
        fault = error
    if config is None and is_monitor and kept is not None:
        # Only if these peers had them: others may be of another run.
        config = kept if {organiser, kept.publisher} & set(map(peer_id_in, peer_args.initial_peers)) else None
    if fault is not None:
        if not is_monitor or (config is None and not stated & COMMON_SETTINGS):
            raise fault
        logger.warning(f"{fault}. Starting without them, and dialing them again periodically")
    elif config is None:
        if kept is not None and not is_monitor:
            raise TemporaryError(f"no peer has the settings that organiser {organiser} stated; is a trainer running?")
        if "run_id" not in stated:
            raise TemporaryError(
                "the initial peers publish no settings of a run; try again later, or pass --run_id and all others"
            )
        logger.info("The initial peers publish no settings of a run: using the command line's settings")
    is_organiser = is_monitor and config is not None and config.organiser == find_own_id(peer_args, path.parent)
    if config is None or (is_organiser and stated & COMMON_SETTINGS):
        is_organiser |= fault is not None or "run_config" in stated
        return Entry(command_line.arguments, is_organiser=is_organiser, is_alone=fault is not None)
    arguments, adopted = _take(config, command_line, peer_args.initial_peers)
    config.keep(path)
    if kept is not None and organiser != config.organiser and kept.settings["run_id"] == config.settings["run_id"]:
        logger.warning(f"The organiser has changed: it was {organiser}, and is {config.organiser} now")
    vouched = "" if config.organiser in (config.publisher, organiser) else f", vouched for by {config.publisher}"
    logger.info(f"Joining run {config.settings['run_id']} of organiser {config.organiser}{vouched}")
    return Entry(arguments, adopted, config, is_alone=fault is not None)


def _find_kept_file(arguments: Iterable[Any]) -> Path:
    """Return the file of `RunConfig.keep` in a script's output folder."""
    (path,) = [Path(args.output_dir, KEPT_FILE) for args in arguments if hasattr(args, "output_dir")]
    return path


def _take(config: RunConfig, command_line: CommandLine, initial_peers: Iterable[str]) -> tuple[tuple, Adopted]:
    """Return the arguments of a command line with the settings of a run, and which of these it lacked."""
    if config.protocol != PROTOCOL:
        raise UserError(
            f"the run has protocol {config.protocol}, this checkout {PROTOCOL}: use the organiser's version"
        )
    adopted = {name: value for name, value in config.settings.items() if name not in command_line.stated}
    if adopted.get("model_name_or_path", "") is None and not _has_no_model(command_line.arguments):
        raise UserError(
            "this run starts from weights in a folder of the organiser: ask for it, and pass --model_name_or_path"
        )
    arguments = command_line.with_settings(adopted)
    check_safe(adopted)
    refuse_differences(config, arguments)
    maddrs = [check_maddr("--initial_peers", maddr) for maddr in initial_peers]
    near = [ipaddress.ip_address(maddr[name]) for maddr in maddrs for name in ("ip4", "ip6") if name in maddr]
    return arguments, Adopted(frozenset(adopted), tuple(near))


def _has_no_model(arguments: Iterable[object]) -> bool:
    """Whether the arguments are those of a monitor without checkpoints."""
    return not all(getattr(args, "store_checkpoints", True) for args in arguments)


def _visit(args: PeerOptions, organiser: PeerID | None, run_id: str | None, stop: StopSignal) -> RunConfig | None:
    """Join the run for a moment, with a new identity, and return its configuration."""
    with tempfile.TemporaryDirectory() as folder, stop.deferred():
        visitor = replace(
            args,
            identity_path=None,
            host_maddrs=["/ip4/127.0.0.1/tcp/0"],
            announce_maddrs=[],
            announce_tunnel=None,
            use_auto_relay=False,  # takes four seconds more
            trusted_relays=[],
        )
        with start_peer(
            visitor, record_schemas(visitor.run_id), Path(folder) / "identity.key", True, stop.event
        ) as peer:
            records = {subkey: record.value for subkey, record in get_dictionary(peer.dht, KEY).items()}
            return choose(records, set(map(peer_id_in, args.initial_peers)), organiser, run_id)


def refuse_differences(config: RunConfig, arguments: Iterable[Any]) -> None:
    """Raise UserError if a peer's arguments differ from the settings of the run. None differs from no value."""
    run_id, expected = config.settings["run_id"], config.settings.get(TASK)
    for args in arguments if not _has_no_model(arguments) else ():
        own = getattr(args, TASK, expected)
        if own != expected and expected is None:
            raise UserError(f"--task: run {run_id} trains a language model, without a task of its own: drop the flag")
        if own != expected:
            fault = "--task is missing" if own is None else f"--task: '{args.task}' is another version, SHA-256 {own}"
            remedy = "ask the organiser for the file, read it, and pass --task FILE"
            raise UserError(f"{fault}; run {run_id} has the task with SHA-256 {expected}: {remedy}")
    for args, (name, value) in product(arguments, config.settings.items()):
        own = getattr(args, name, None)
        if own in (None, value) or value is None or name in {TASK, *OPTIONAL_SETTINGS}:
            continue
        if name != "model_name_or_path" or to_published_model(own) != value:
            raise UserError(
                f"--{name} is {own} here and {value} in run {run_id}: drop the flag, or pass "
                f"--{name} {shlex.quote(str(value))}"
            )


@dataclass
class RunConfigRelay:
    """Publishes a run's signed settings, so that newcomers find them at any peer."""

    peer: LocalPeer
    config: RunConfig | None
    lifetime: float  # seconds until the record expires
    is_organiser: bool = False  # whether this peer signs the settings, and may change them
    _stored: tuple[RunConfig | None, float] = (None, 0.0)  # what was published last, and when it is due again

    @classmethod
    def of_run(cls, peer: LocalPeer, args: TrainerOptions) -> "RunConfigRelay":
        """Return the relay of a trainer that has joined a run, or begins one and is its organiser."""
        relay = cls(peer, None, args.collaboration.statistics_expiration)
        if not args.collaboration.initial_peers:
            stated = {name: getattr(part, name) for part in args for name in SETTINGS if hasattr(part, name)}
            try:
                relay.config = RunConfig.sign(stated, peer.private_key)
            except UserError as error:
                logger.warning(f"Newcomers need the flags of this trainer, which publishes no settings: {error}")
            return relay
        relay.config = RunConfig.load(_find_kept_file(args))
        return relay

    @classmethod
    def of_monitor(
        cls, peer: LocalPeer, entry: Entry, stated: Mapping[str, object], lifetime: float
    ) -> "RunConfigRelay":
        """Return the relay of a monitor, which as the organiser signs the flags that its command line states.

        :raises UserError: if they cannot be published
        """
        if not entry.is_organiser:
            return cls(peer, entry.config, lifetime)
        (model,) = [args for args in entry.arguments if isinstance(args, ModelOptions)]
        found = {TASK: model.task_sha256, "model_revision": model.model_revision}  # the revision that was loaded
        own = {"run_id": peer.run_id, **stated, **{name: x for name, x in found.items() if x is not None}}
        return cls(peer, RunConfig.sign(own, peer.private_key), lifetime, is_organiser=True)

    def publish(self, page: str | None = None) -> None:
        """Publish the settings, if there are any, once in a third of their lifetime and whenever they have changed.

        :param page: setting of the run that the organiser may learn after its start
        """
        if self.is_organiser and self.config is not None and self.config.settings.get("page") != page:
            self.config = RunConfig.sign({**self.config.settings, "page": page}, self.peer.private_key)
        stored, due_at = self._stored
        if self.config is not None and (self.config is not stored or time.monotonic() >= due_at):
            self._stored = self.config, time.monotonic() + self.lifetime / 3
            store_record(self.peer.dht, KEY, self.peer.public_key, self.config.record, self.lifetime)
