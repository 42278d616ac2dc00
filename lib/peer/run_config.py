"""The settings of a run, which its organiser states once and every other peer takes over.

The monitor signs what its flags or its --run_config file state, and publishes it in the DHT under a key that names no
run. Every trainer publishes the signed text again, so that the run does not need its organiser. A newcomer that knows
an address alone reads all of these texts. It believes the one whose organiser's peer ID is in its --initial_peers, or
else the one that one of these peers publishes. Settings are data: they become flags, which are parsed and checked like
those of a command line.
"""

import ipaddress
import json
import re
import tempfile
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from hivemind.dht import DHT
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.p2p import PeerID
from hivemind.utils import get_logger
from hivemind.utils.crypto import RSAPrivateKey, RSAPublicKey

from arguments import (
    AveragerArguments,
    BaseTrainingArguments,
    CollaborationArguments,
    DatasetArguments,
    LocalTrainingArguments,
)
from lib.averaging.rounds import PROTOCOL
from lib.common.argument_parser import CommandLine
from lib.common.checks import check_maddr, check_web_address
from lib.common.errors import TemporaryError, UserError
from lib.common.flags import find_settings
from lib.common.hosts import Address, find_addresses
from lib.common.json_file import JsonFile, write_json
from lib.common.logs import setup_logging
from lib.common.processes import StopSignal
from lib.peer.address_book import find_reachable
from lib.peer.addresses import peer_id_in
from lib.peer.invitations import peer_id_of
from lib.peer.peer import Peer, start_peer
from utils import get_dictionary, store_record

logger = get_logger(__name__)

KEY = "run_config"
ORGANISER_FILE = "organiser.json"  # in the output folder: peer ID of the organiser whose settings were taken
MAX_CHARACTERS = 1600  # of the signed text; with keys and signatures, a record has 2.8 KB, see LimitValidator
_ARGUMENTS = [CollaborationArguments, AveragerArguments, DatasetArguments, LocalTrainingArguments]
SETTINGS = find_settings(_ARGUMENTS)
OPTIONAL_SETTINGS = find_settings(_ARGUMENTS, optional_only=True)
_MODEL_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)  # a built-in model, or one on the Hub

Setting = str | int | float | bool | None


class RunConfigError(ValueError):
    """A record is not a run configuration, or its signature is wrong. The message is the reason."""


@dataclass(frozen=True)
class RunConfig:
    """Settings that an organiser has signed.

    :param settings: flag -> value; a model of None is a file of the organiser, which each peer must have
    :param protocol: version of rounds and progress reports
    :param organiser: peer ID of the signer
    :param signed_at: `time.time`
    :param record: the signed record
    """

    settings: dict[str, Setting]
    protocol: int
    organiser: PeerID
    signed_at: float
    record: dict[str, object]

    @classmethod
    def sign(cls, stated: dict[str, object], private_key: RSAPrivateKey) -> "RunConfig":
        """Sign the settings of a run.

        :param stated: flag -> value; flags that are no settings of a run are left out
        :raises UserError: if they are too long
        """
        settings = {name: stated[name] for name in SETTINGS if name in stated}
        if "model_name_or_path" in settings and not _MODEL_NAME.fullmatch(settings["model_name_or_path"]):
            settings["model_name_or_path"] = None
        text = json.dumps({"protocol": PROTOCOL, "time": time.time(), "settings": settings})
        if len(text) > MAX_CHARACTERS:
            raise UserError(f"the settings of the run have {len(text)} characters, the limit is {MAX_CHARACTERS}")
        public_key = private_key.get_public_key()
        return cls.parse(
            {"text": text, "public_key": public_key.to_bytes(), "signature": private_key.sign(text.encode())}
        )

    @classmethod
    def parse(cls, record: object) -> "RunConfig":
        """Check a record of the DHT: signature, size, names and types.

        :raises RunConfigError: if something is wrong
        """
        try:
            text, key, signature = record["text"], record["public_key"], record["signature"]
            if len(text) > MAX_CHARACTERS or len(key) > 1024 or len(signature) > 1024:
                raise RunConfigError("too long")
            public_key = RSAPublicKey.from_bytes(key)
            if not public_key.verify(text.encode(), signature):
                raise RunConfigError("the signature is wrong")
            content = json.loads(text)
            settings = content["settings"]
            config = cls(settings, content["protocol"], peer_id_of(public_key), float(content["time"]), dict(record))
        except RunConfigError:
            raise
        except Exception as error:
            raise RunConfigError(f"malformed: {error!r:.100}") from None
        if type(config.protocol) is not int or not isinstance(settings, dict) or "run_id" not in settings:
            raise RunConfigError("it lacks the protocol or the run ID")
        for name, value in settings.items():
            if name not in SETTINGS or not _is_plain(value):
                raise RunConfigError(f"it has a wrong setting: {name!r:.40}")
        return config

    def check_safe(self, initial_peers: Iterable[str]) -> None:
        """Check what a stranger could misuse: the name of the model and the address of the data.

        :param initial_peers: addresses of the peers that this peer has asked. The data may be in this machine or in a
            private network only if one of these peers is there
        :raises UserError: if a value is not safe
        """
        model, url = self.settings.get("model_name_or_path"), self.settings.get("dataset_url")
        if model is not None and not _MODEL_NAME.fullmatch(str(model)):
            raise UserError(f"this run's --model_name_or_path '{model!s:.80}' is not a name: refused")
        if url is None:
            return
        check_web_address("this run's --dataset_url", str(url))
        for address in find_addresses(urlsplit(str(url)).hostname):
            if not (address.is_global or _is_near(address, initial_peers)):
                raise UserError(
                    f"this run's --dataset_url leads to {address}, which is not on the internet: refused; if you "
                    "trust it, pass the --dataset_url yourself, with --run_id and the other flags of the run"
                )


def _is_plain(value: object) -> bool:
    """Whether a value can stand on a command line."""
    if isinstance(value, str):
        return value.isprintable() and not value.startswith("-") and len(value) <= 500
    return value is None or isinstance(value, bool | int | float)


def _is_near(address: Address, initial_peers: Iterable[str]) -> bool:
    """Whether one of the initial peers is in this machine, or in a private network as `address` is."""
    peers = []
    for maddr in initial_peers:
        protocols = check_maddr("--initial_peers", maddr)
        peers += [ipaddress.ip_address(protocols[name]) for name in ("ip4", "ip6") if name in protocols]
    if address.is_loopback:
        return any(peer.is_loopback for peer in peers)
    return address.is_private and not address.is_link_local and any(peer.is_private for peer in peers)


def choose(records: dict[bytes, object], trusted: Collection[PeerID]) -> tuple[RunConfig, PeerID] | None:
    """Return the configuration to believe, and the peer ID of its publisher.

    :param records: public key of the publisher, as a subkey of the DHT -> record
    :param trusted: peer IDs in --initial_peers. The newest configuration signed by one of them is believed, otherwise
        the newest one that one of them publishes
    """
    found = []
    for subkey, record in records.items():
        try:
            config, publisher = RunConfig.parse(record), _owner_of(subkey)
        except RunConfigError as error:
            logger.debug(f"Ignoring a run configuration: {error}")
            continue
        if config.organiser in trusted or publisher in trusted:
            found.append((config.organiser in trusted, config.signed_at, config, publisher))
    return max(found, key=lambda entry: entry[:2])[2:] if found else None


def _owner_of(subkey: object) -> PeerID:
    match = RSASignatureValidator._PUBLIC_KEY_RE.search(subkey if isinstance(subkey, bytes) else b"")
    if match is None:
        raise RunConfigError("nobody has signed the record")
    try:
        return peer_id_of(RSAPublicKey.from_bytes(match[1]))
    except Exception as error:
        raise RunConfigError(f"malformed public key: {error!r:.100}") from None


def _find(dht: DHT, initial_peers: Iterable[str], trusted: Collection[PeerID] = ()) -> tuple[RunConfig, PeerID] | None:
    """Read the configurations of all runs in the DHT, and return the one to believe, as `choose`."""
    records = {subkey: record.value for subkey, record in get_dictionary(dht, KEY).items()}
    return choose(records, {*trusted, *map(peer_id_in, initial_peers)})


# What the scripts call


def adopt_run_config(line: CommandLine, stop: StopSignal) -> tuple:
    """Return the arguments of a script, with the settings of the run that --initial_peers lead to.

    Without --initial_peers, or with a --run_id, the command line states all settings itself. The organiser is
    remembered in the output folder: after a restart, other peers than the initial ones may tell the settings.

    :raises UserError: if a flag of the command line differs from the settings, or these are not safe
    """
    (peer_args,) = [args for args in line.arguments if isinstance(args, BaseTrainingArguments)]
    if not peer_args.initial_peers or "run_id" in line.stated:
        return line.arguments
    setup_logging(peer_args.debug)
    output_dir, organiser = _remembered_organiser(line.arguments)
    found = _visit(peer_args, output_dir, {organiser} - {None}, stop)
    if found is None and organiser is not None:
        raise TemporaryError(f"no peer has the settings that organiser {organiser} stated; is a trainer running?")
    if found is None:
        logger.info("The initial peers publish no settings of a run: those of the command line hold")
        return line.arguments
    config, publisher = found
    vouched = "" if config.organiser in (publisher, organiser) else f", as {publisher} says"
    logger.info(f"Joining run {config.settings['run_id']} of organiser {config.organiser}{vouched}")
    check_protocol(config)
    config.check_safe(peer_args.initial_peers)
    if config.settings.get("model_name_or_path", "") is None and "model_name_or_path" not in line.stated:
        raise UserError(
            "this run's model is a file of the organiser: ask for it and pass its path as --model_name_or_path"
        )
    adopted = line.with_settings({name: value for name, value in config.settings.items() if name not in line.stated})
    refuse_differences(config, adopted)
    output_dir.mkdir(parents=True, exist_ok=True)
    write_json(output_dir / ORGANISER_FILE, config.organiser.to_base58())
    return adopted


def _remembered_organiser(arguments: Iterable[object]) -> tuple[Path, PeerID | None]:
    """Return the output folder of a script, and the organiser whose settings it took before, if there is one."""
    (output_dir,) = [Path(args.output_dir) for args in arguments if hasattr(args, "output_dir")]
    return output_dir, JsonFile(output_dir / ORGANISER_FILE).load(PeerID.from_base58)


def _visit(
    args: BaseTrainingArguments, output_dir: Path, trusted: set[PeerID], stop: StopSignal
) -> tuple[RunConfig, PeerID] | None:
    """Join the run for a moment, with a new identity, and return its configuration, as `choose`."""
    with tempfile.TemporaryDirectory() as folder, stop.deferred():
        visitor = replace(args, identity_path=None, host_maddrs=["/ip4/127.0.0.1/tcp/0"], announce_maddrs=[])
        identity_path, known_peers = Path(folder) / "identity.key", partial(find_reachable, output_dir)
        peer = start_peer(visitor, identity_path, True, stop.event, find_known_peers=known_peers)
        try:
            return _find(peer.dht, args.initial_peers, trusted)
        finally:
            peer.dht.shutdown()


def check_protocol(config: RunConfig) -> None:
    """:raises UserError: if the run has another version of the protocol than this checkout"""
    if config.protocol != PROTOCOL:
        older, newer = ("this checkout", "the run") if config.protocol > PROTOCOL else ("the run", "this checkout")
        raise UserError(
            f"the run has protocol {config.protocol}, this checkout {PROTOCOL}: {older} is older than {newer}; use "
            "the version of this project that the organiser uses"
        )


def refuse_differences(config: RunConfig, arguments: Iterable[object]) -> None:
    """Compare a peer's arguments with the settings of the run. An argument of None differs from none of them.

    :raises UserError: if a value differs; the message names both
    """
    for name, value in config.settings.items():
        for args in arguments:
            own = getattr(args, name, None)
            if own not in (None, value) and value is not None and name not in OPTIONAL_SETTINGS:
                raise UserError(
                    f"--{name} is {own} here and {value} in run {config.settings['run_id']}: pass --{name} {value}, "
                    "or pass --initial_peers alone to take all settings from the run"
                )


class RunConfigRelay:
    """Publishes a run's signed settings, so that newcomers find them at any peer.

    :param lifetime: seconds until a record expires without the next `publish`
    """

    def __init__(self, peer: Peer, config: RunConfig | None, lifetime: float):
        self.peer, self.config, self.lifetime = peer, config, lifetime

    @classmethod
    def of_run(cls, peer: Peer, arguments: Iterable[object], args: CollaborationArguments) -> "RunConfigRelay":
        """Return the relay of a trainer that has joined a run.

        :param arguments: the trainer's arguments
        :raises UserError: if one of them differs from the run's settings
        """
        _, organiser = _remembered_organiser(arguments)
        found = _find(peer.dht, args.initial_peers, {organiser} - {None}) if args.initial_peers else None
        config = found and found[0]
        if config is not None and (run_id := config.settings["run_id"]) != args.run_id:
            logger.warning(f"The initial peers are of run {run_id}, and this trainer's --run_id is {args.run_id}")
            config = None
        if config is not None:
            check_protocol(config)
            refuse_differences(config, arguments)
        return cls(peer, config, args.statistics_expiration)

    def publish(self) -> None:
        """Publish the settings, if there are any. Does not wait for the result."""
        if self.config is not None:
            store_record(self.peer.dht, KEY, self.peer.public_key, self.config.record, self.lifetime)
