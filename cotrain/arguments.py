"""Flags that scripts share: one dataclass per topic, with help at the flag and checks in `__post_init__`.

The flags of a single script are in that script. Names and defaults are those of hivemind's ALBERT example; names of
older examples are translated in cotrain/common/argument_parser.py.
"""

import hashlib
import json
import math
import re
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from cotrain.common.flags import (
    MAX_PAGE_LENGTH,
    ArgumentsError,
    Flags,
    check_announced,
    check_maddr,
    check_peer,
    check_web_address,
    endpoint_to_maddrs,
    flag,
    is_page,
    require,
    require_apart,
    setting,
)

# Of prepared data. The second is for WikiText and ALBERT, as in hivemind's example; older versions used it for all.
DATASET_FOLDERS = ("data/tokenized", "data/albert_tokenized_wikitext")
BASE_FOLDER = "data/model"  # of pretrained weights in the archive of the data

Compression = Literal["none", "float16", "scaled_float16"]
GradientCompression = Literal[Compression, "blockwise8", "blockwise4", "topk"]


def weight_files(folder: Path) -> list[str]:
    """Return the names of the safetensors files of the model in a folder; ArgumentsError if its index is damaged."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file() or not index.is_file():
        return ["model.safetensors"]
    try:
        names = sorted({*json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
        return [index.with_name(name).name for name in names]  # raises ValueError for what is in another folder
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ArgumentsError(f"'{index}' is damaged, or no index of files beside it; copy the model again") from None


def check_compression(compression: str, local_updates: bool) -> None:
    """Raise ArgumentsError for a compression of gradients that needs local updates, without them."""
    require(
        compression != "topk" or local_updates,
        "--gradient_compression topk also needs --local_updates: a step of Adam needs all of a gradient",
    )


@dataclass
class BaseTrainingArguments(Flags, group="Peer"):
    """How a peer finds the others and is found by them."""

    run_id: str = setting(
        "albert", "The run's name, the same for all of its peers. It seeds the initial weights. Must not contain '.'"
    )
    initial_peers: list[str] = flag(
        list,
        "Multiaddresses of one or more running peers to join through, separated by spaces. Example: "
        "/ip4/203.0.113.1/tcp/31337/p2p/XXXX /dns4/example.org/tcp/7777/p2p/YYYY",
    )
    use_ipfs: bool = flag(
        False, "Find initial_peers by the /p2p/XXXX part of their addresses, through IPFS. Slower than full addresses"
    )
    host_maddrs: list[str] = flag(
        lambda: ["/ip4/0.0.0.0/tcp/0"],
        "Multiaddresses to listen on. Set a port to keep the address across restarts, e.g. /ip4/0.0.0.0/tcp/31337",
    )
    announce_maddrs: list[str] = flag(
        list,
        "Multiaddresses at which other peers reach this one, if they differ from those it listens on (a "
        "forwarded port, a tunnel). Example: /dns4/0.tcp.ngrok.io/tcp/12345",
    )
    tunnel: Literal["none", "ngrok"] = flag(
        "none",
        "Open a tunnel and announce its address, so that others can join through a peer behind a firewall or NAT. "
        "ngrok needs its SDK and an account; the authtoken is read from NGROK_AUTHTOKEN or ngrok.yml",
    )
    announce_tunnel: str | None = flag(
        None,
        "HOST:PORT of a tunnel or forwarded port that you have set up, announced in addition to the "
        "local addresses. It must lead to the port in --host_maddrs. Example: bore.pub:31337",
    )
    use_relay: bool = setting(
        False,
        "Reach peers behind NAT or firewalls through relays and, if this peer is public, serve as one: to any peer of "
        "libp2p, 4 GiB per connection. For runs with --use_auto_relay",
        optional=True,
    )
    map_port: bool = flag(False, "Ask the router for a public port (UPnP or NAT-PMP), and so become reachable")
    use_auto_relay: bool = flag(
        False,
        "Become reachable through relays, about 20 seconds after joining, if this peer is behind NAT or "
        "a firewall. Needs two public peers",
    )
    trusted_relays: list[str] = flag(
        list,
        "Public peers of the run to use as relays with --use_auto_relay, as multiaddresses with a peer ID. Default: "
        "initial_peers. Traffic to peers behind NAT passes through one of them, unless there are four and the routers "
        "allow direct connections",
    )
    identity_path: str | None = flag(
        None,
        "File with this peer's private key, created if it does not exist. With the same file a peer keeps its peer "
        "ID, address and contribution across restarts. Default: identity.key in --output_dir",
    )
    invitation: str | None = flag(None, "Invitation file of the organiser, see invite.py; it has this peer's identity")
    bootstrap_timeout: float = flag(60.0, "Give up joining after this many seconds if none of initial_peers answers")
    page: str | None = setting(
        None,
        "Address of a web page with the run's curves, which trainers print. Default of the monitor: the page of "
        "--space_id or --report_to wandb",
        optional=True,
    )
    ends_at: str | None = setting(
        None, "End of the run in UTC, such as 2027-04-28T23:59: trainers and monitor save a last checkpoint and exit"
    )
    debug: bool = flag(False, "Log more, and show the traceback of a fatal error")

    def __post_init__(self):
        super().__post_init__()
        is_name = self.run_id.strip() != "" and self.run_id.isprintable() and len(self.run_id) <= 100
        require(is_name, "--run_id must be one line of 1 to 100 printable characters")
        require("." not in self.run_id, f"--run_id '{self.run_id}' must not contain '.'; write '-' instead")
        for name in ("initial_peers", "trusted_relays"):
            peers = [peer for value in getattr(self, name) for peer in value.split(",") if peer]
            setattr(self, name, peers)
            for peer in peers:
                check_peer(f"--{name}", peer)
        if self.invitation is not None and self.identity_path is not None:
            raise ArgumentsError("--invitation contains an identity: drop --identity_path")
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
        what = f"without a password, of at most {MAX_PAGE_LENGTH} letters, digits and ./?&=%~#+:,@-"
        is_valid = self.page is None or is_page(self.page)
        require(is_valid, f"--page must be an address like https://huggingface.co/spaces/NAME/SPACE, {what}")
        require(self.end_time > time.time(), f"--ends_at: the run has ended at {self.ends_at}")

    @property
    def end_time(self) -> float:
        """End of the run (`time.time`), in UTC unless --ends_at states an offset; infinity if there is none.

        :raises ArgumentsError: if --ends_at is not a date
        """
        if self.ends_at is None:
            return math.inf
        try:
            end = datetime.fromisoformat(self.ends_at)
        except ValueError:
            raise ArgumentsError(
                f"--ends_at: '{self.ends_at}' is not a date; pass one like 2027-04-28T23:59"
            ) from None
        return (end if end.tzinfo else end.replace(tzinfo=UTC)).timestamp()


@dataclass
class ProgressTrackerArguments(Flags, group="Progress"):
    """How often a trainer asks the others for their progress."""

    min_refresh_period: float = flag(
        0.5, "Minimum seconds between two reads of the other peers' progress", at_most="max_refresh_period"
    )
    max_refresh_period: float = flag(30, "Maximum seconds between two reads of the other peers' progress")
    default_refresh_period: float = flag(
        3, "Seconds between two reads of the progress while no other peer reports any or a read has failed"
    )
    expected_drift_peers: float = flag(
        3, "Number of peers that are assumed to join during one global step. Raise it if many join at once", at_least=0
    )
    expected_drift_rate: float = flag(
        0.2, "Fraction of the current number of peers that is assumed to join during one global step", at_least=0
    )
    performance_ema_alpha: float = flag(
        0.1, "Weight of the newest value in the moving average of samples per second, above 0 and at most 1", at_most=1
    )
    metadata_expiration: float = flag(
        120, "A peer's progress report expires after this many seconds without a new one", at_most=120
    )


@dataclass
class OptimizerArguments(Flags, group="Collaboration"):
    """How the collaboration takes its steps."""

    target_batch_size: int = setting(4096, "Take an optimizer step once all peers together have this many samples")
    target_group_size: int = setting(
        256, "Maximum number of peers in one group. A full group starts its round immediately", at_least=2
    )
    averaging_timeout: float = setting(
        60.0,
        "End an averaging round after this many seconds, with what has arrived: about twice the time of a round",
        at_most=7200,
        optional=True,
    )
    matchmaking_time: float = setting(
        5.0,
        "Search for a group this many seconds before a step is due, and wait at most this long for a late peer. "
        "Raise it if latency is high; hivemind needs more than 3",
        above=3,
        at_most=600,
        optional=True,
    )
    average_state_every: int = setting(8, "Average parameters every this many global steps (gradients: every step)")
    gradient_compression: GradientCompression = setting(
        "float16",
        "How peers compress gradients or pseudo-gradients while they average them; the number is that of the bits. "
        "topk: with --local_updates, some 0.6 bits, for slow connections; see docs/tuning.md",
    )
    state_compression: Compression = setting("float16", "How peers compress parameters while they average them")
    load_state_timeout: float = flag(600.0, "Give up on downloading the state from others after this many seconds")


@dataclass
class CollaborationArguments(OptimizerArguments, BaseTrainingArguments):
    """What a trainer needs to know of the collaboration."""

    client_mode: bool = flag(
        False, "Accept no incoming connections, for peers behind NAT or a firewall. Not all trainers may do so"
    )
    batch_size_lead: int = flag(
        0,
        "Begin looking for a group at the latest this many samples before target_batch_size; see --matchmaking_time",
        at_least=0,
        below="target_batch_size",
    )
    bandwidth: float | None = flag(
        None,
        "Upload of this peer in Mbit/s, which decides its fraction of the work in all-reduce. Default: little in the "
        "first round, then the largest rate at which this machine has sent in a round, at most 100",
    )
    load_state_compression: Compression = flag("float16", "How this peer compresses the state that others download")
    delay_grad_averaging: bool = flag(True, "Average gradients in the background while computing the next ones")
    delay_optimizer_step: bool = flag(
        True, "Run the optimizer step in the background; its result comes a local step late"
    )
    statistics_expiration: float = flag(600, "Metrics expire after this many seconds without an update", at_most=3600)
    backup_every_steps: int = flag(
        10, "Save a checkpoint every this many global steps, for a rollback if the parameters become NaN or Inf"
    )
    max_global_steps: int | None = flag(None, "Leave at this global step of the run. Default: train until stopped")
    leave_timeout: float = flag(
        90.0, "After max_global_steps, wait at most this many seconds for a monitor to save that step", at_least=0
    )
    username: str = flag(
        "", "Name in the public list of contributors, at most 64 characters. Default: one derived from the peer ID"
    )

    max_traffic: str | None = flag(
        None,
        "Leave before this machine has sent and received so much in a calendar month, such as 50GB. Other programs "
        "count, too, while the trainer runs",
    )

    def __post_init__(self):
        super().__post_init__()
        if self.max_traffic is not None:
            parse_size("--max_traffic", self.max_traffic)
        if self.delay_grad_averaging and not self.delay_optimizer_step:
            raise ArgumentsError("--no_delay_optimizer_step also needs --no_delay_grad_averaging")
        is_reachable = self.use_auto_relay or self.tunnel != "none" or self.announce_tunnel is not None
        if self.client_mode and is_reachable:
            others = "--use_auto_relay, --tunnel and --announce_tunnel"
            raise ArgumentsError(f"--client_mode accepts no connections, and {others} are for them")
        require(len(self.username) <= 64, "--username must have at most 64 characters")

    @property
    def longest_wait(self) -> float:
        """Seconds without a local step after which a trainer hangs: longer than any of its waits."""
        return self.load_state_timeout + self.averaging_timeout + 600.0


@dataclass
class ModelArguments(Flags, group="Model and data"):
    """What is trained, and where its data comes from. Trainer, monitor and evaluator must agree on it."""

    # Flags of the peers that have the data, see DatasetArguments
    dataset_path: ClassVar[str | None] = None
    load_in_4bit: ClassVar[bool] = False

    model_name_or_path: str = setting(
        "albert-large-v2",
        "A causal or masked language model of transformers: a config.json, a folder that has one, or a name on the "
        "Hugging Face Hub. Built in: albert-large-v2, albert-tiny, bert-base-uncased, roberta-base, "
        "distilbert-base-uncased, modernbert-base, gpt2, smollm2-135m. data/model: that in --dataset_url",
        aliases=["--config_path"],
    )
    from_pretrained: bool = setting(
        False, "Start from the weights at --model_name_or_path, a folder or a name on the Hub, on every trainer"
    )
    model_revision: str | None = setting(
        None, "Commit of --model_name_or_path on the Hub. Default: the newest when the run begins, with --lora_rank"
    )
    lora_rank: int | None = setting(
        None,
        "Fine-tune with adapters (LoRA) of this rank, such as 16, which implies --from_pretrained. The weights at "
        "--model_name_or_path stay as they are: see docs/fine-tuning.md",
        at_most=1024,
    )
    lora_alpha: float | None = setting(None, "Scale of the adapters. Default: twice --lora_rank")
    lora_targets: str = setting("all-linear", "Layers with adapters: all-linear, or names such as q_proj,v_proj")
    lora_tokens: str = setting("", "Tokens whose embeddings are trained with the adapters: <|im_start|>,<|im_end|>")
    seq_length: int | None = setting(None, "Sequence length in tokens. Default: that of the prepared data")
    mlm_probability: float = setting(0.15, "Fraction of tokens to predict in masked LM", below=1)
    tokenizer_path: str = flag("data/tokenizer", "Folder with the tokenizer, written by tokenize_wikitext103.py")
    dataset_url: str | None = setting(
        None,
        "Address of what tokenize_wikitext103.py --archive wrote, an archive or the manifest of shards: http(s), "
        "hf://datasets/NAME/REPOSITORY/PATH or s3://BUCKET/PATH. It is unpacked to dataset_path and tokenizer_path if "
        "one of them is missing",
    )
    dataset_sha256: str | None = setting(
        None, "SHA-256 of the file at --dataset_url, without which an interrupted download starts again"
    )
    cache_dir: str | None = flag("data/cache", "Folder for downloads from the Hub")
    task: str | None = flag(
        None,
        "Python file with a model, samples and a loss of your own, instead of a language model: see docs/own-model.md "
        "and examples/digits.py. All peers of the run need the same file. It is a program: read a file from somebody "
        "else first. Flags for text, such as --model_name_or_path and --dataset_path, have no effect then",
    )

    def __post_init__(self):
        super().__post_init__()
        self.from_pretrained |= self.lora_rank is not None
        require(self.lora_rank or self.lora_targets == "all-linear", "--lora_targets also needs --lora_rank")
        require(self.lora_rank or not self.lora_tokens, "--lora_tokens also needs --lora_rank")
        is_text = self.task is None or self.lora_rank is None
        require(is_text, "--lora_rank is for language models: drop it, and use peft in the file of --task")
        if self.task is not None:
            require(Path(self.task).is_file(), f"--task: there is no file '{self.task}'; pass its path")
        if self.dataset_url is not None:
            self.dataset_url = to_web_address(self.dataset_url)
            check_web_address("--dataset_url", self.dataset_url)
        if self.dataset_sha256 is not None:
            require(self.dataset_url is not None, "--dataset_sha256 also needs --dataset_url")
            self.dataset_sha256 = self.dataset_sha256.lower()
            is_hex = re.fullmatch("[0-9a-f]{64}", self.dataset_sha256) is not None
            require(is_hex, "--dataset_sha256 must be 64 hexadecimal digits, as tokenize_wikitext103.py prints them")

    @property
    def lacks_tokenizer(self) -> bool:
        """Whether the tokenizer of a language model is neither on this machine nor in an archive to download."""
        return self.task is None and self.dataset_url is None and not Path(self.tokenizer_path).is_dir()

    @property
    def hub_options(self) -> dict[str, Any]:
        """Options of transformers for files on the Hub, with less trust in a repository that the run has chosen."""
        own: dict[str, Any] = {"cache_dir": self.cache_dir, "trust_remote_code": False}
        own |= {} if self.model_revision is None else {"revision": self.model_revision}
        return own | ({"token": False, "use_safetensors": True} if "model_name_or_path" in self.adopted else {})

    @property
    def task_sha256(self) -> str | None:
        """SHA-256 of the file of --task, by which the peers of a run find that they have the same one.

        It does not depend on the line ends, which an editor or Git for Windows may have changed.
        """
        if self.task is None:
            return None
        return hashlib.sha256(Path(self.task).read_bytes().replace(b"\r\n", b"\n")).hexdigest()


def to_web_address(url: str) -> str:
    """Return the web address of a public file of a dataset on the Hugging Face Hub, or in S3; others are unchanged."""
    if match := re.fullmatch(r"hf://datasets/([\w.-]+/[\w.-]+)(?:@([\w.-]+))?/([\w./-]+)", url):
        repository, revision, path = match.groups()
        return f"https://huggingface.co/datasets/{repository}/resolve/{revision or 'main'}/{path}"
    return re.sub(r"^s3://([a-z0-9.-]+)/", r"https://\1.s3.amazonaws.com/", url)


def parse_size(flag: str, value: str) -> int:
    """Return the bytes of a size such as 256MB or 1.5GB."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?) ?([kMGT])B", value)
    require(match is not None, f"{flag} must be a size such as 256MB or 2GB, got '{value}'")
    return int(float(match[1]) * 1000 ** " kMGT".index(match[2]))


def find_dataset() -> str:
    """Return the folder of DATASET_FOLDERS that was written last."""
    marks = {folder: Path(folder, "manifest.json") for folder in DATASET_FOLDERS}
    return max(DATASET_FOLDERS, key=lambda folder: marks[folder].stat().st_mtime if marks[folder].exists() else 0)


@dataclass
class DatasetArguments(ModelArguments):
    """What is trained, for peers that have the data."""

    dataset_path: str = flag(
        find_dataset,
        "Folder with the tokenized dataset, written by tokenize_wikitext103.py. Default: data/tokenized or "
        "data/albert_tokenized_wikitext, the newer",
    )

    load_in_4bit: bool = flag(
        False, "With --lora_rank: keep the base model in 4 bits, on a GPU, with bitsandbytes (pip install it first)"
    )
    data_cache: str = flag(
        "2GB",
        "Size on disk of the shards to keep, if the data is in shards: those in use, and as many of the next as fit",
    )

    def __post_init__(self):
        super().__post_init__()
        parse_size("--data_cache", self.data_cache)
        require(self.lora_rank is not None or not self.load_in_4bit, "--load_in_4bit also needs --lora_rank")
        if self.dataset_url is not None:
            require_apart("dataset_path", self.dataset_path, "tokenizer_path", self.tokenizer_path)


@dataclass
class HyperparameterArguments(Flags, group="Hyper-parameters"):
    """The hyper-parameters of the run, which are for target_batch_size."""

    optimizer: Literal["lamb", "adamw", "muon"] = setting(
        "lamb",
        "LAMB is for large batches; AdamW needs a much smaller --learning_rate (about 1e-4) and --adam_epsilon 1e-8; "
        "Muon, with AdamW for embeddings, head and vectors, the same or a few times more",
    )
    total_steps: int = setting(125_000, "Global steps of the learning-rate schedule, at whose end the run ends")
    after_last_step: Literal["end", "continue"] = setting(
        "end", "After --total_steps: trainers, monitor and evaluator exit; or continue, with the rate of the last step"
    )
    warmup_steps: int = setting(
        5000, "Global steps of linear warm-up, at whose end the rate is the peak", at_least=0, at_most="total_steps"
    )
    learning_rate: float = setting(0.00176, "Peak learning rate, for target_batch_size")
    adam_beta1: float = setting(0.9, "Decay of the first moment", at_least=0, below=1)
    adam_beta2: float = setting(0.999, "Decay of the second moment", at_least=0, below=1)
    adam_epsilon: float = setting(1e-6, "Added to the root of the second moment")
    weight_decay: float = setting(0.01, "Weight decay; biases and norms have none", at_least=0)
    clamp_value: float = setting(10000.0, "LAMB: weight norms are clamped to this value")
    max_grad_norm: float = setting(
        1.0,
        "Norm to which the averaged gradient of a global step is clipped, or with --local_updates the gradient of a "
        "local step; 0: none",
        at_least=0,
    )
    local_updates: bool = setting(
        False,
        "DiLoCo, for slow connections: each local step is an optimizer step, and peers average their changes once per "
        "global step. Choose a --target_batch_size of 30 to 500 local steps of each peer, and a --learning_rate for "
        "the batch of one local step, see docs/tuning.md",
    )
    outer_learning_rate: float = setting(0.7, "With --local_updates: learning rate of the global step")
    outer_momentum: float = setting(
        0.5, "With --local_updates: Nesterov momentum of global steps, 0.9 in long runs; see docs/tuning.md", below=1
    )
    max_update_norm: float = setting(
        1.0, "With --local_updates: bound on a peer's change, relative to the parameters' norm; 0: none", at_least=0
    )

    @property
    def last_step(self) -> int | None:
        """The global step at which the run ends; None if it has no end."""
        return self.total_steps if self.after_last_step == "end" else None


DEFAULT_BATCH_SIZE = 4  # of a micro-batch on a CPU


@dataclass
class LocalTrainingArguments(HyperparameterArguments, group="Local training"):
    """How this peer computes gradients. `hf_trainer.build_training_arguments` hands the flags to transformers."""

    per_device_train_batch_size: int | None = flag(
        None, "Samples per micro-batch and device. Default: what fits into the memory of the GPU; on a CPU 4"
    )
    gradient_accumulation_steps: int = flag(
        2, "Micro-batches per local step. The trainer reports its progress after each local step"
    )
    fp16: bool = flag(False, "Mixed precision with float16 (GPU only)")
    bf16: bool = flag(False, "Mixed precision with bfloat16")
    fp32: bool = flag(False, "Do not use mixed precision. Default: bf16 on GPUs that have it, else fp16; on CPU fp32")
    gradient_checkpointing: bool = flag(False, "Recompute activations: about a third slower, much less GPU memory")
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2", "flex_attention"] | None = flag(
        None, "How attention is computed. Default: transformers' choice for the model, mostly sdpa"
    )
    torch_compile: bool = flag(False, "Compile the model for this device: a slow start, then faster. One GPU at most")
    use_cpu: bool = flag(False, "Do not use a GPU")
    dataloader_num_workers: int = flag(2, "Processes that prepare batches; 0: the main process does", at_least=0)
    seed: int = flag(
        42, "Random seed. With the peer ID, it determines the order of this peer's samples and its dropout", at_least=0
    )
    output_dir: str = flag("outputs", "Folder for this peer's checkpoints and identity")
    save_steps: int = flag(500, "Also save a checkpoint every this many local steps")
    save_total_limit: int = flag(2, "Keep this many checkpoints")
    logging_steps: int = flag(100, "Log the local loss every this many local steps")
    logging_first_step: bool = flag(True, "Log the first local step too")
    disable_tqdm: bool = flag(False, "Show no progress bar on the terminal")
    status: bool = flag(
        False, "Print the status of the trainer of this --output_dir, and exit: with code 0 if it runs, else with 1"
    )
    check: bool = flag(
        False, "Try everything that this trainer needs, print what is wrong and what to do, and exit, with code 0 or 1"
    )

    def __post_init__(self):
        super().__post_init__()
        require(self.fp16 + self.bf16 + self.fp32 <= 1, "choose one of --fp16, --bf16 and --fp32")

    def batch_size_per_step(self, num_devices: int) -> int:
        """Samples that this peer adds between two reports: micro-batch x devices x accumulation."""
        return (
            (self.per_device_train_batch_size or DEFAULT_BATCH_SIZE)
            * max(1, num_devices)
            * self.gradient_accumulation_steps
        )


class TrainerArguments(NamedTuple):
    """The flags of run_trainer.py and run_custom_trainer.py."""

    training: LocalTrainingArguments
    dataset: DatasetArguments
    collaboration: CollaborationArguments
    tracker: ProgressTrackerArguments


TRAINER_ARGUMENTS = tuple(TrainerArguments.__annotations__.values())


@dataclass
class ReportingArguments(Flags, group="Reporting"):
    """Where curves are drawn."""

    report_to: Literal["none", "wandb", "trackio", "tensorboard"] = flag(
        "none",
        "Dashboard for the training curves, in addition to metrics.jsonl: wandb (records offline "
        "without an account), trackio (local, no account), or tensorboard (install the package first)",
    )
    wandb_project: str | None = flag(None, "Name of the Weights & Biases project; implies --report_to wandb")

    def __post_init__(self):
        super().__post_init__()
        if self.wandb_project is not None:
            if self.report_to not in ("none", "wandb"):
                raise ArgumentsError(f"--wandb_project needs wandb: drop it, or drop --report_to {self.report_to}")
            self.report_to = "wandb"
