"""What one machine decides about its part in a run, as values; the flags for them are in arguments.py, with help."""

import base64
import glob
import hashlib
import json
import os
from collections.abc import Collection
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

from cotrain.common.alerts import read_webhook
from cotrain.common.errors import UserError
from cotrain.common.flags import (
    ArgumentsError,
    Flags,
    check_announced,
    check_hours,
    check_maddr,
    check_peer,
    endpoint_to_maddrs,
    flag,
    parse_size,
    require,
    require_apart,
    split_peers,
)
from cotrain.common.stand_ins import find_damage
from cotrain.common.weights import check_model
from cotrain.settings import Compression, Hyperparameters, ModelSettings, RunSettings, StepSettings

# Of prepared data. The second is for WikiText and ALBERT, as in hivemind's example; older versions used it for all.
DATASET_FOLDERS = ("data/tokenized", "data/albert_tokenized_wikitext")
DEFAULT_BATCH_SIZE = 4  # of a micro-batch on a CPU
DEFAULT_ACCUMULATION = 2  # micro-batches of a local step


def _check_invitation(path: str) -> None:
    """Raise ArgumentsError if a file is no invitation. What it states is checked later, see load_invitation."""
    require(Path(path).is_file(), f"--invitation: there is no file '{path}'; pass the file of the organiser")
    try:
        base64.b64decode(json.loads(Path(path).read_text(encoding="utf-8-sig"))["token"])
    except (ValueError, LookupError, TypeError):
        raise ArgumentsError(f"--invitation: '{path}' is not an invitation; ask the organiser for another") from None


@dataclass
class PeerOptions(RunSettings):
    """How a peer finds the others and is found by them."""

    initial_peers: list[str] = field(default_factory=list)
    use_ipfs: bool = False
    host_maddrs: list[str] = field(default_factory=lambda: ["/ip4/0.0.0.0/tcp/0"])
    announce_maddrs: list[str] = field(default_factory=list)
    tunnel: Literal["none", "ngrok"] = "none"
    announce_tunnel: str | None = None
    map_port: bool = False
    use_auto_relay: bool = False
    trusted_relays: list[str] = field(default_factory=list)
    identity_path: str | None = None
    invitation: str | None = None
    bootstrap_timeout: float = 60.0
    webhook_file: str | None = None
    debug: bool = False

    def __post_init__(self):
        super().__post_init__()
        read_webhook(self.webhook_file)
        for name in ("initial_peers", "trusted_relays"):
            values = getattr(self, name)
            peers = split_peers(" ".join(values))
            setattr(self, name, peers)
            require(bool(peers) or not values, f"--{name} is empty: pass an address, or leave the flag out")
            for peer in peers:
                check_peer(f"--{name}", peer)
        if self.invitation is not None and self.identity_path is not None:
            raise ArgumentsError("--invitation contains an identity: drop --identity_path")
        if self.invitation is not None:
            _check_invitation(self.invitation)
        if self.identity_path is not None and (path := Path(self.identity_path)).exists():
            is_key = path.is_file() and path.read_bytes().startswith(b"\x08\x00\x12")  # libp2p's RSA
            require(is_key, f"--identity_path: '{path}' is not a peer's private key; remove it, or pass another")
        if self.use_ipfs and any("/tcp/" in peer for peer in self.initial_peers):
            raise ArgumentsError("--use_ipfs needs no host and port: pass only the /p2p/XXXX part in --initial_peers")
        require(self.use_auto_relay or not self.trusted_relays, "--trusted_relays also needs --use_auto_relay")
        self.use_relay = self.use_relay or self.use_auto_relay
        if self.use_auto_relay and not self.use_ipfs:
            self.trusted_relays = self.trusted_relays or self.initial_peers
        for maddr in self.announce_maddrs:
            check_announced("--announce_maddrs", maddr)
        if self.tunnel != "none" and self.announce_tunnel is not None:
            raise ArgumentsError("--tunnel opens a tunnel, --announce_tunnel announces an existing one: pass only one")
        tcp_ports = {check_maddr("--host_maddrs", maddr).get("tcp") for maddr in self.host_maddrs} - {None}
        if self.tunnel != "none" and not tcp_ports:
            raise ArgumentsError("--tunnel needs a TCP port: add /ip4/0.0.0.0/tcp/0 to --host_maddrs")
        if self.announce_tunnel is not None:
            self.announce_tunnel = self.announce_tunnel.removeprefix("tcp://")  # as ngrok and others print it
            for maddr in endpoint_to_maddrs("--announce_tunnel", self.announce_tunnel):
                check_announced("--announce_tunnel", maddr)
            if not tcp_ports - {"0"}:
                remedy = "pass --host_maddrs /ip4/0.0.0.0/tcp/PORT with the port that the tunnel leads to"
                raise ArgumentsError(f"--announce_tunnel needs a fixed local port: {remedy}")


@dataclass
class ProgressOptions(Flags):
    """How often a trainer asks the others for their progress."""

    min_refresh_period: float = flag(0.5, at_most="max_refresh_period")
    max_refresh_period: float = 30
    default_refresh_period: float = 3
    expected_drift_peers: float = flag(3, at_least=0)
    expected_drift_rate: float = flag(0.2, at_least=0)
    performance_ema_alpha: float = flag(0.1, at_most=1)
    metadata_expiration: float = flag(120, at_most=120)


@dataclass
class CollaborationOptions(StepSettings, PeerOptions):
    """What a trainer needs to know of the collaboration."""

    load_state_timeout: float = 600.0
    client_mode: bool = False
    batch_size_lead: int = flag(0, at_least=0, below="target_batch_size")
    bandwidth: float | None = None
    load_state_compression: Compression = "float16"
    delay_grad_averaging: bool = True
    delay_optimizer_step: bool = True
    statistics_expiration: float = flag(600, at_most=3600)
    backup_every_steps: int = 10
    max_global_steps: int | None = None
    leave_timeout: float = flag(90.0, at_least=0)
    username: str = ""
    max_traffic: str | None = None
    only_between: str | None = None
    pause_when_busy: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.only_between is not None:
            check_hours("--only_between", self.only_between)
        if self.max_traffic is not None:
            parse_size("--max_traffic", self.max_traffic)
        if self.delay_grad_averaging and not self.delay_optimizer_step:
            raise ArgumentsError("--no_delay_optimizer_step also needs --no_delay_grad_averaging")
        is_reachable = self.use_auto_relay or self.tunnel != "none" or self.announce_tunnel is not None
        if self.client_mode and is_reachable:
            others = "--use_auto_relay, --tunnel and --announce_tunnel"
            raise ArgumentsError(f"--client_mode accepts no connections, and {others} are for them")
        require(len(self.username) <= 64, "--username must have at most 64 characters")
        require(self.username.isprintable(), "--username must be one line, without control characters")

    @property
    def longest_wait(self) -> float:
        """Seconds without a local step after which a trainer hangs: longer than any of its waits."""
        return self.load_state_timeout + self.averaging_timeout + 600.0


@dataclass
class ModelOptions(ModelSettings):
    """What is trained, for trainer, monitor and evaluator."""

    # None or False at a peer without data, such as a monitor; fields of DataOptions at others
    dataset_path: ClassVar[str | None] = None
    own_data: ClassVar[str | None] = None
    own_share: ClassVar[float | None] = None
    load_in_4bit: ClassVar[bool] = False

    tokenizer_path: str = "data/tokenizer"
    cache_dir: str | None = "data/cache"
    task: str | None = None

    def __post_init__(self):
        super().__post_init__()
        is_text = self.task is None or self.lora_rank is None
        require(is_text, "--lora_rank is for language models: drop it, and use peft in the file of --task")
        name = self.model_name_or_path
        is_there = not name.startswith((".", "/", "~")) or Path(name).exists()
        require(is_there, f"--model_name_or_path: there is no file or folder '{name}'; pass its path")
        if self.from_pretrained and Path(name).is_dir():
            check_model("--model_name_or_path", Path(name))
        if self.task is not None:
            require(Path(self.task).is_file(), f"--task: there is no file '{self.task}'; pass its path")

    @property
    def lacks_tokenizer(self) -> bool:
        """Whether the tokenizer of a language model is neither on this machine nor in an archive to download."""
        return self.task is None and self.dataset_url is None and not Path(self.tokenizer_path).is_dir()

    def check_tokenizer(self, stated: Collection[str]) -> None:
        """Raise UserError if the folder of the tokenizer is damaged, or was stated and is not there."""
        files = () if self.task or self.dataset_url else Path(self.tokenizer_path).glob("*.json")
        for damage in filter(None, map(find_damage, files)):
            raise UserError(f"--tokenizer_path: {damage}; pass one that ./tokenize_wikitext103.py wrote")
        if self.lacks_tokenizer and "tokenizer_path" in stated:
            remedy = "run ./tokenize_wikitext103.py, or pass --dataset_url, or --initial_peers to join a run"
            raise UserError(f"--tokenizer_path: there is no folder '{self.tokenizer_path}'; {remedy}")

    @property
    def task_sha256(self) -> str | None:
        """SHA-256 of the file of --task, by which the peers of a run find that they have the same one.

        It does not depend on the line ends, which an editor or Git for Windows may have changed.
        """
        if self.task is None:
            return None
        return hashlib.sha256(Path(self.task).read_bytes().replace(b"\r\n", b"\n")).hexdigest()


def find_dataset() -> str:
    """Return the folder of DATASET_FOLDERS that was written last."""
    marks = {folder: Path(folder, "manifest.json") for folder in DATASET_FOLDERS}
    return max(DATASET_FOLDERS, key=lambda folder: marks[folder].stat().st_mtime if marks[folder].exists() else 0)


@dataclass
class DataOptions(ModelOptions):
    """What is trained, for peers that have the data."""

    dataset_path: str = field(default_factory=find_dataset)
    load_in_4bit: bool = False
    data_cache: str = "2GB"
    own_data: str | None = None
    own_share: float | None = flag(None, at_most=1)

    def __post_init__(self):
        super().__post_init__()
        require(self.own_share is None or self.own_data is not None, "--own_share also needs --own_data")
        if self.own_data is not None:
            require(self.task is None, "--own_data is text: drop it, and load your samples in the file of --task")
            files = filter(os.path.isfile, glob.iglob(self.own_data, recursive=True))
            is_there = Path(self.own_data).exists() or any(files)
            require(is_there, f"--own_data: there is no file '{self.own_data}'; pass text, conversations or a folder")
        parse_size("--data_cache", self.data_cache)
        require(self.lora_rank is not None or not self.load_in_4bit, "--load_in_4bit also needs --lora_rank")
        if self.dataset_url is not None:
            require_apart("dataset_path", self.dataset_path, "tokenizer_path", self.tokenizer_path)


@dataclass
class LocalOptions(Hyperparameters):
    """How this peer computes gradients."""

    per_device_train_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    fp16: bool = False
    bf16: bool = False
    fp32: bool = False
    gradient_checkpointing: bool = False
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2", "flex_attention"] | None = None
    torch_compile: bool = False
    use_cpu: bool = False
    dataloader_num_workers: int = flag(2, at_least=0)
    seed: int = flag(42, at_least=0)
    output_dir: str = "outputs"
    save_steps: int = 500
    save_total_limit: int = 2
    logging_steps: int = 100
    logging_first_step: bool = True
    disable_tqdm: bool = False

    def __post_init__(self):
        super().__post_init__()
        require(self.fp16 + self.bf16 + self.fp32 <= 1, "choose one of --fp16, --bf16 and --fp32")

    def batch_size_per_step(self, num_devices: int) -> int:
        """Samples that this peer adds between two reports: micro-batch x devices x accumulation."""
        return (
            (self.per_device_train_batch_size or DEFAULT_BATCH_SIZE)
            * max(1, num_devices)
            * (self.gradient_accumulation_steps or DEFAULT_ACCUMULATION)
        )


@dataclass(frozen=True)
class Adopted:
    """What the run has chosen for this peer: its organiser is a stranger, who gets less trust than the user.

    :ivar names: of the settings
    :ivar near: addresses of the initial peers, in whose network the data may be
    """

    names: frozenset[str] = frozenset()
    near: tuple[IPv4Address | IPv6Address, ...] = ()


NOTHING = Adopted()  # the user has chosen all settings


class TrainerOptions(NamedTuple):
    """What a trainer needs: settings of the run and options of the machine, by topic."""

    training: LocalOptions
    dataset: DataOptions
    collaboration: CollaborationOptions
    tracker: ProgressOptions
    adopted: Adopted


TRAINER_OPTIONS = (LocalOptions, DataOptions, CollaborationOptions, ProgressOptions)
