"""The settings of a run, signed by its organiser, and which of several to believe.

Settings are data: they become flags, which are parsed and checked like those of a command line.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgpack
from hivemind.p2p import PeerID
from hivemind.utils import get_logger
from hivemind.utils.crypto import RSAPrivateKey, RSAPublicKey

from cotrain.common.errors import UserError
from cotrain.common.flags import MAX_FLAG, find_settings, has_secret
from cotrain.common.json_file import JsonFile, write_json
from cotrain.models.config import is_inline, is_published_name, to_published_model
from cotrain.settings import SETTINGS as SETTINGS_CLASSES
from peerstep.peer.clock import run_time
from peerstep.reports.progress_report import PROTOCOL
from peerstep.reports.records import peer_id_of, signer_of

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
            known = SETTINGS if protocol == PROTOCOL else settings.keys()  # with another, a peer only says so
            wrong = [name for name, value in settings.items() if name not in known or not _is_plain(value)]
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


def find_kept_file(arguments: Iterable[Any]) -> Path:
    """Return the file of `RunConfig.keep` in a script's output folder."""
    (path,) = [Path(args.output_dir, KEPT_FILE) for args in arguments if hasattr(args, "output_dir")]
    return path
