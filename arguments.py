"""Flags that scripts share: one dataclass per topic, with help at the flag and checks in `__post_init__`.

The flags of a single script are in that script. Names and defaults are those of hivemind's ALBERT example; names of
older examples are translated in lib/common/argument_parser.py.
"""

import re
from dataclasses import dataclass, field
from typing import Literal

from lib.common.checks import (
    check_endpoint,
    check_maddr,
    check_peer,
    check_web_address,
    require,
    require_apart,
    require_not_negative,
    require_positive,
)

Compression = Literal["none", "float16", "scaled_float16", "uniform8", "quantile8"]
GradientCompression = Literal[Compression, "blockwise8", "blockwise4"]
STATE_COMPRESSIONS = ("none", "float16", "scaled_float16")


@dataclass
class BaseTrainingArguments:
    """How a peer finds the others and is found by them."""

    _argument_group_name = "Peer"

    run_id: str = field(
        default="albert",
        metadata={
            "help": "Unique name of this training run, the same for all of its peers. It also seeds the initial "
            "weights, so that peers that start together have equal weights. Must not contain '.'"
        },
    )
    initial_peers: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Multiaddresses of one or more running peers to join through, separated by spaces. Example: "
            "/ip4/203.0.113.1/tcp/31337/p2p/XXXX /dns4/example.org/tcp/7777/p2p/YYYY"
        },
    )
    use_ipfs: bool = field(
        default=False,
        metadata={
            "help": "Find initial_peers through IPFS, which needs only the /p2p/XXXX part of their addresses. "
            "Connecting takes longer than with full addresses"
        },
    )
    host_maddrs: list[str] = field(
        default_factory=lambda: ["/ip4/0.0.0.0/tcp/0"],
        metadata={
            "help": "Multiaddresses to listen on. The default is any free TCP port on all IPv4 interfaces; set a "
            "port to keep the same address across restarts, e.g. /ip4/0.0.0.0/tcp/31337"
        },
    )
    announce_maddrs: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Multiaddresses at which other peers reach this one, if they differ from those it listens on (a "
            "forwarded port, a tunnel). Example: /dns4/0.tcp.ngrok.io/tcp/12345"
        },
    )
    tunnel: Literal["none", "ngrok"] = field(
        default="none",
        metadata={
            "help": "Open a tunnel and announce its address, so that other peers can join through this one although "
            "it is behind a firewall or NAT. ngrok needs its SDK and an account; the authtoken is read from "
            "NGROK_AUTHTOKEN or ngrok.yml"
        },
    )
    announce_tunnel: str | None = field(
        default=None,
        metadata={
            "help": "HOST:PORT of a tunnel or forwarded port that you have set up, announced in addition to the "
            "local addresses. It must lead to the port in --host_maddrs. Example: bore.pub:31337"
        },
    )
    use_relay: bool = field(
        default=True,
        metadata={"help": "Reach peers behind NAT or firewalls through relays, and relay for others"},
    )
    use_auto_relay: bool = field(
        default=False,
        metadata={
            "help": "Become reachable through relays, about 20 seconds after joining, if this peer is behind NAT or "
            "a firewall. Needs two public peers"
        },
    )
    trusted_relays: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Public peers of the run to use as relays with --use_auto_relay, as multiaddresses with a peer "
            "ID. Default: initial_peers. All traffic between this peer and other peers behind NAT passes through "
            "one of them, unless there are four and the routers allow direct connections"
        },
    )
    identity_path: str | None = field(
        default=None,
        metadata={
            "help": "File with this peer's private key, created if it does not exist. The key determines the peer "
            "ID: a peer that restarts with the same file keeps its address and counts as the same contributor. "
            "Default: identity.key in --output_dir"
        },
    )
    invitation: str | None = field(
        default=None,
        metadata={
            "help": "Invitation file from the organiser, for a run that only invited peers may join; see invite.py. "
            "It contains this peer's identity"
        },
    )
    revocations: str | None = field(
        default=None,
        metadata={
            "help": "File with the organiser's list of revoked invitations, written by invite.py revoke. This peer "
            "sends the list to all other peers. The file may be created later and is read again when it changes"
        },
    )
    bootstrap_timeout: float = field(
        default=60.0,
        metadata={"help": "Give up joining after this many seconds if none of initial_peers answers"},
    )
    debug: bool = field(default=False, metadata={"help": "Log more, and show the traceback of a fatal error"})

    def __post_init__(self):
        require(bool(self.run_id.strip()), "--run_id must not be empty")
        require("." not in self.run_id, f"--run_id '{self.run_id}' must not contain '.'; write '-' instead")
        for flag in ("initial_peers", "trusted_relays"):
            peers = [peer for value in getattr(self, flag) for peer in value.split(",") if peer]
            setattr(self, flag, peers)
            for peer in peers:
                check_peer(f"--{flag}", peer)
        require(
            self.invitation is None or self.identity_path is None,
            "--invitation contains an identity: drop --identity_path",
        )
        require(self.revocations is None or self.invitation is not None, "--revocations also needs --invitation")
        require(not (self.use_ipfs and self.initial_peers and any("/tcp/" in peer for peer in self.initial_peers)),
                 "--use_ipfs needs no host and port: pass only the /p2p/XXXX part in --initial_peers")  # fmt: skip
        require(self.use_auto_relay or not self.trusted_relays, "--trusted_relays also needs --use_auto_relay")
        require(self.use_relay or not self.use_auto_relay, "--use_auto_relay needs relays: drop --no_use_relay")
        if self.use_auto_relay and not self.use_ipfs:
            self.trusted_relays = self.trusted_relays or self.initial_peers
        for flag in ("host_maddrs", "announce_maddrs"):
            for maddr in getattr(self, flag):
                protocols = check_maddr(f"--{flag}", maddr)
                if flag == "announce_maddrs":
                    port = protocols.get("tcp", protocols.get("udp"))
                    require(port != "0", f"--announce_maddrs: '{maddr}' needs the port that other peers dial, not 0")
        self._check_tunnel()
        require_positive(self, "bootstrap_timeout")

    def _check_tunnel(self) -> None:
        require(
            self.tunnel == "none" or self.announce_tunnel is None,
            "--tunnel opens a tunnel, --announce_tunnel announces an existing one: pass one of the two",
        )
        tcp_ports = {check_maddr("--host_maddrs", maddr).get("tcp") for maddr in self.host_maddrs} - {None}
        require(
            self.tunnel == "none" or bool(tcp_ports),
            "--tunnel needs a TCP port: add /ip4/0.0.0.0/tcp/0 to --host_maddrs",
        )
        if self.announce_tunnel is not None:
            self.announce_tunnel = self.announce_tunnel.removeprefix("tcp://")  # as ngrok and others print it
            check_endpoint("--announce_tunnel", self.announce_tunnel)
            require(
                bool(tcp_ports - {"0"}),
                "--announce_tunnel needs a fixed local port: pass --host_maddrs /ip4/0.0.0.0/tcp/PORT with the "
                "port that the tunnel leads to",
            )


@dataclass
class AveragerArguments:
    """How groups of peers form."""

    _argument_group_name = "Groups"

    target_group_size: int = field(
        default=256,
        metadata={"help": "Maximum number of peers in one group. A full group starts its round immediately"},
    )

    def __post_init__(self):
        require(self.target_group_size >= 2, f"--target_group_size must be 2 or more, got {self.target_group_size}")


@dataclass
class ProgressTrackerArguments:
    """How often a trainer asks the others for their progress."""

    _argument_group_name = "Progress"

    min_refresh_period: float = field(
        default=0.5, metadata={"help": "Minimum seconds between two reads of the other peers' progress"}
    )
    max_refresh_period: float = field(
        default=30, metadata={"help": "Maximum seconds between two reads of the other peers' progress"}
    )
    default_refresh_period: float = field(
        default=3,
        metadata={
            "help": "Seconds between two reads of the progress while no other peer reports any or a read has failed"
        },
    )
    expected_drift_peers: float = field(
        default=3,
        metadata={
            "help": "Number of peers that are assumed to join during one global step. Raise it if "
            "many peers join at once"
        },
    )
    expected_drift_rate: float = field(
        default=0.2,
        metadata={"help": "Fraction of the current number of peers that is assumed to join during one global step"},
    )
    performance_ema_alpha: float = field(
        default=0.1,
        metadata={
            "help": "Weight of the newest measurement in the moving average of samples per "
            "second, above 0 and at most 1"
        },
    )
    metadata_expiration: float = field(
        default=120, metadata={"help": "A peer's progress report expires after this many seconds without a new one"}
    )

    def __post_init__(self):
        require_positive(self, "min_refresh_period", "max_refresh_period", "default_refresh_period",
                          "metadata_expiration")  # fmt: skip
        require_not_negative(self, "expected_drift_peers", "expected_drift_rate")
        require(0 < self.performance_ema_alpha <= 1, "--performance_ema_alpha must be above 0 and at most 1")
        require(
            self.min_refresh_period <= self.max_refresh_period,
            f"--min_refresh_period {self.min_refresh_period} exceeds --max_refresh_period {self.max_refresh_period}",
        )


@dataclass
class OptimizerArguments:
    """How the collaboration takes its steps. Every peer of a run should use the same values, but for client_mode,
    bandwidth and batch_size_lead."""

    _argument_group_name = "Collaboration"

    target_batch_size: int = field(
        default=4096,
        metadata={"help": "Perform an optimizer step after all peers together accumulate this many samples"},
    )
    client_mode: bool = field(
        default=False,
        metadata={
            "help": "Accept no incoming connections, for peers behind NAT or a firewall (Colab, Kaggle). At least one "
            "trainer of the run must not be in client mode"
        },
    )
    batch_size_lead: int = field(
        default=0,
        metadata={"help": "Begin looking for a group in advance, this many samples before target_batch_size"},
    )
    bandwidth: float = field(
        default=100.0,
        metadata={"help": "Network bandwidth of this peer in Mbit/s (decides its fraction of the work in all-reduce)"},
    )
    averaging_timeout: float = field(
        default=60.0,
        metadata={
            "help": "Abort an averaging round after this many seconds. Set it to about twice the time of a round"
        },
    )
    matchmaking_time: float = field(
        default=5.0,
        metadata={
            "help": "The search for a group begins this many seconds before a step is due, and the leader waits at "
            "most this long for a late peer. Raise it if latency is high; hivemind needs more than 3"
        },
    )
    average_state_every: int = field(
        default=1,
        metadata={"help": "Average parameters every this many global steps (gradients: every step)"},
    )
    gradient_compression: GradientCompression = field(
        default="float16",
        metadata={
            "help": "How peers compress gradients or pseudo-gradients while they average them. The number is that of "
            "the bits; blockwise8 has a smaller error than uniform8 and quantile8"
        },
    )
    state_compression: str = field(
        default="float16",
        metadata={
            "help": "How peers compress parameters while they average them: none, float16 or scaled_float16. 8 bits "
            "are less accurate than the parameters that the peers have"
        },
    )
    load_state_compression: Compression = field(
        default="float16", metadata={"help": "How this peer compresses its state for peers that download it"}
    )
    load_state_timeout: float = field(
        default=600.0, metadata={"help": "Give up on downloading the state from others after this many seconds"}
    )
    delay_grad_averaging: bool = field(
        default=True, metadata={"help": "Average gradients in the background while computing the next ones"}
    )
    delay_optimizer_step: bool = field(
        default=True,
        metadata={"help": "Run the optimizer step in the background; its result is used one local step late"},
    )

    def __post_init__(self):
        require_positive(self, "target_batch_size", "bandwidth", "averaging_timeout", "load_state_timeout",
                          "average_state_every")  # fmt: skip
        require_not_negative(self, "batch_size_lead")
        require(
            self.state_compression in STATE_COMPRESSIONS,
            f"--state_compression must be {', '.join(STATE_COMPRESSIONS[:-1])} or {STATE_COMPRESSIONS[-1]}, got "
            f"{self.state_compression}: 8 bits are less accurate than the parameters that the peers have",
        )
        require(
            self.batch_size_lead < self.target_batch_size,
            f"--batch_size_lead {self.batch_size_lead} must be smaller than "
            f"--target_batch_size {self.target_batch_size}",
        )
        require(
            self.matchmaking_time > 3,
            f"--matchmaking_time must be above 3 seconds (hivemind's request timeout), got {self.matchmaking_time}",
        )
        require(
            self.delay_optimizer_step or not self.delay_grad_averaging,
            "--no_delay_optimizer_step also needs --no_delay_grad_averaging",
        )


@dataclass
class CollaborationArguments(OptimizerArguments, BaseTrainingArguments):
    """What a trainer needs to know of the collaboration."""

    _argument_group_name = "Collaboration"

    statistics_expiration: float = field(
        default=600, metadata={"help": "Reported metrics expire after this many seconds without an update"}
    )
    backup_every_steps: int = field(
        default=10,
        metadata={
            "help": "Back up the training state every this many global steps, for a rollback if the "
            "parameters become NaN or Inf"
        },
    )
    max_global_steps: int | None = field(
        default=None,
        metadata={"help": "Leave once the run has reached this global step. Default: train until stopped"},
    )
    leave_timeout: float = field(
        default=90.0,
        metadata={
            "help": "After max_global_steps, wait at most this many seconds until a monitor has saved the "
            "last checkpoint"
        },
    )
    username: str = field(
        default="",
        metadata={
            "help": "Name to show in the public list of contributors, at most 64 characters. Default: two words and "
            "four digits that are derived from the peer ID, such as quick-otter-3f2a"
        },
    )

    def __post_init__(self):
        BaseTrainingArguments.__post_init__(self)
        OptimizerArguments.__post_init__(self)
        require(
            not (self.client_mode and self.use_auto_relay),
            "--client_mode accepts no connections and --use_auto_relay needs them: pass one of the two",
        )
        require_positive(self, "statistics_expiration", "backup_every_steps", "max_global_steps")
        require_not_negative(self, "leave_timeout")
        require(len(self.username) <= 64, "--username must have at most 64 characters")
        for flag, is_set in (("tunnel", self.tunnel != "none"), ("announce_tunnel", self.announce_tunnel is not None)):
            require(
                not (self.client_mode and is_set),
                f"--client_mode accepts no connections, so --{flag} has no effect: drop one of the two",
            )

    @property
    def longest_wait(self) -> float:
        """Seconds without a local step after which a trainer hangs: longer than any of its waits."""
        return self.load_state_timeout + self.averaging_timeout + 600.0


@dataclass
class ModelArguments:
    """What is trained. Trainer, monitor and evaluator must agree on it; they build it with the same functions."""

    _argument_group_name = "Model"

    model_name_or_path: str = field(
        default="albert-large-v2",
        metadata={
            "help": "Model configuration: a config.json, a folder that has one, or a name on the Hugging Face Hub. "
            "ALBERT, BERT, RoBERTa, DistilBERT and GPT-2 are supported. Built in: albert-large-v2, albert-tiny, "
            "bert-base-uncased, roberta-base, distilbert-base-uncased, gpt2",
            "aliases": ["--config_path"],
        },
    )
    from_pretrained: bool = field(
        default=False,
        metadata={
            "help": "Start from the weights at --model_name_or_path, a folder or a name on the Hub, instead of "
            "random weights. Pass it to every trainer of the run"
        },
    )
    tokenizer_path: str = field(
        default="data/tokenizer", metadata={"help": "Folder with the tokenizer, written by tokenize_wikitext103.py"}
    )
    cache_dir: str | None = field(default="data/cache", metadata={"help": "Folder for downloads from the Hub"})


@dataclass
class DataSourceArguments:
    """Where the prepared data comes from."""

    _argument_group_name = "Data"

    dataset_url: str | None = field(
        default=None,
        metadata={
            "help": "http(s) address of an archive written by tokenize_wikitext103.py --archive. If the dataset or "
            "the tokenizer is missing, the archive is downloaded and unpacked to dataset_path and "
            "tokenizer_path"
        },
    )
    dataset_sha256: str | None = field(
        default=None,
        metadata={
            "help": "SHA-256 of the archive at --dataset_url. Default: read from the .sha256 file next to the archive"
        },
    )

    def __post_init__(self):
        if self.dataset_url is not None:
            check_web_address("--dataset_url", self.dataset_url)
        if self.dataset_sha256 is not None:
            require(self.dataset_url is not None, "--dataset_sha256 also needs --dataset_url")
            self.dataset_sha256 = self.dataset_sha256.lower()
            require(
                bool(re.fullmatch("[0-9a-f]{64}", self.dataset_sha256)),
                "--dataset_sha256 must be 64 hexadecimal digits, as in the .sha256 file beside the archive",
            )


@dataclass
class DatasetArguments(ModelArguments, DataSourceArguments):
    """What it is trained on."""

    _argument_group_name = "Model and data"

    dataset_path: str = field(
        default="data/albert_tokenized_wikitext",
        metadata={"help": "Folder with the tokenized dataset, written by tokenize_wikitext103.py"},
    )

    def __post_init__(self):
        super().__post_init__()
        if self.dataset_url is not None:
            require_apart("dataset_path", self.dataset_path, "tokenizer_path", self.tokenizer_path)


@dataclass
class HyperparameterArguments:
    """The hyper-parameters of the run, which are for target_batch_size. Every peer should use the same values."""

    _argument_group_name = "Hyper-parameters"

    optimizer: Literal["lamb", "adamw"] = field(
        default="lamb",
        metadata={
            "help": "Optimizer. LAMB is for large batches; AdamW needs a much smaller --learning_rate (about 1e-4) "
            "and --adam_epsilon 1e-8"
        },
    )
    total_steps: int = field(
        default=125_000,
        metadata={"help": "Length of the learning-rate schedule in global steps; training may continue after its end"},
    )
    warmup_steps: int = field(default=5000, metadata={"help": "Linear warm-up in global steps"})
    learning_rate: float = field(default=0.00176, metadata={"help": "Peak learning rate, for target_batch_size"})
    adam_beta1: float = field(default=0.9, metadata={"help": "Decay of the first moment"})
    adam_beta2: float = field(default=0.999, metadata={"help": "Decay of the second moment"})
    adam_epsilon: float = field(default=1e-6, metadata={"help": "Added to the root of the second moment"})
    weight_decay: float = field(default=0.01, metadata={"help": "Weight decay; biases and norms have none"})
    clamp_value: float = field(default=10000.0, metadata={"help": "LAMB: weight norms are clamped to this value"})
    max_grad_norm: float = field(
        default=1.0,
        metadata={
            "help": "Bound on the norm of the gradient that a peer contributes to a global step, or with "
            "--local_updates of the gradient of each local step; 0: no bound"
        },
    )
    local_updates: bool = field(
        default=False,
        metadata={
            "help": "DiLoCo, for slow connections: each peer takes an optimizer step at each local step, and the "
            "peers average their changes once per global step. Choose a --target_batch_size of 30 to 500 local steps "
            "of each peer, and a --learning_rate for the batch of one local step. See docs/tuning.md"
        },
    )
    outer_learning_rate: float = field(
        default=0.7, metadata={"help": "With --local_updates: learning rate of the global step"}
    )
    outer_momentum: float = field(
        default=0.5,
        metadata={
            "help": "With --local_updates: Nesterov momentum of the global step. Published runs, which are long, use "
            "0.9; see docs/tuning.md"
        },
    )
    max_update_norm: float = field(
        default=1.0,
        metadata={
            "help": "With --local_updates: bound on the norm of the change that a peer contributes to a global step, "
            "relative to the norm of the parameters; 0: no bound"
        },
    )

    def __post_init__(self):
        require_positive(self, "total_steps", "learning_rate", "adam_epsilon", "clamp_value", "outer_learning_rate")
        require_not_negative(self, "warmup_steps", "weight_decay", "max_grad_norm", "max_update_norm")
        require(0 < self.outer_momentum < 1, f"--outer_momentum must be between 0 and 1: {self.outer_momentum}")
        require(
            self.warmup_steps <= self.total_steps,
            f"--warmup_steps {self.warmup_steps} exceeds --total_steps {self.total_steps}",
        )
        for name in ("adam_beta1", "adam_beta2"):
            require(0 <= getattr(self, name) < 1, f"--{name} must be at least 0 and below 1: {getattr(self, name)}")


@dataclass
class SampleArguments:
    """What a sample is."""

    _argument_group_name = "Samples"

    seq_length: int | None = field(
        default=None, metadata={"help": "Sequence length in tokens. Default: that of the prepared data"}
    )
    mlm_probability: float = field(default=0.15, metadata={"help": "Fraction of tokens to predict in masked LM"})

    def __post_init__(self):
        require_positive(self, "seq_length")
        require(0 < self.mlm_probability < 1, f"--mlm_probability must be between 0 and 1: {self.mlm_probability}")


@dataclass
class LocalTrainingArguments(HyperparameterArguments, SampleArguments):
    """How this peer computes gradients.

    hivemind's example inherits these from transformers' TrainingArguments. Listing the ones that mean something here
    keeps `--help` short and fast; `hf_trainer.build_training_arguments` hands them to transformers.
    """

    _argument_group_name = "Local training"

    per_device_train_batch_size: int = field(
        default=4,
        metadata={
            "help": "Samples per micro-batch and device. Choose it so that a micro-batch takes 0.5 to 1 seconds"
        },
    )
    gradient_accumulation_steps: int = field(
        default=2,
        metadata={"help": "Micro-batches per local step. The trainer reports its progress after each local step"},
    )
    fp16: bool = field(default=False, metadata={"help": "Mixed precision with float16 (GPU only)"})
    bf16: bool = field(default=False, metadata={"help": "Mixed precision with bfloat16"})
    fp32: bool = field(
        default=False,
        metadata={"help": "Do not use mixed precision. Default: bf16 on GPUs that support it, else fp16; on CPU fp32"},
    )
    gradient_checkpointing: bool = field(
        default=False, metadata={"help": "Recompute activations: about a third slower, much less GPU memory"}
    )
    use_cpu: bool = field(default=False, metadata={"help": "Do not use a GPU"})
    dataloader_num_workers: int = field(
        default=2, metadata={"help": "Processes that prepare batches; 0: the main process prepares them"}
    )
    seed: int = field(
        default=42,
        metadata={
            "help": "Random seed. With the peer ID, it determines the order of this peer's samples and its dropout"
        },
    )
    output_dir: str = field(
        default="outputs", metadata={"help": "Folder for this peer's checkpoints, backups and identity"}
    )
    save_steps: int = field(default=500, metadata={"help": "Save a checkpoint every this many local steps"})
    save_total_limit: int = field(default=2, metadata={"help": "Keep this many checkpoints"})
    logging_steps: int = field(default=100, metadata={"help": "Log the local loss every this many local steps"})
    logging_first_step: bool = field(default=True, metadata={"help": "Log the first local step too"})
    disable_tqdm: bool = field(
        default=False, metadata={"help": "Show no progress bar and no status panel on the terminal"}
    )
    status: bool = field(
        default=False,
        metadata={
            "help": "Print the status of the trainer that runs with this --output_dir, and exit: with code 0 if it "
            "runs, otherwise with 1"
        },
    )
    check: bool = field(
        default=False,
        metadata={
            "help": "Try everything that this trainer needs, print what is wrong and what to do, and exit without "
            "training: with code 0 if nothing is wrong, otherwise with 1"
        },
    )

    def __post_init__(self):
        HyperparameterArguments.__post_init__(self)
        SampleArguments.__post_init__(self)
        require_positive(self, "per_device_train_batch_size", "gradient_accumulation_steps", "save_steps",
                          "save_total_limit", "logging_steps")  # fmt: skip
        require_not_negative(self, "dataloader_num_workers", "seed")
        require(self.fp16 + self.bf16 + self.fp32 <= 1, "choose one of --fp16, --bf16 and --fp32")

    def batch_size_per_step(self, num_devices: int) -> int:
        """Samples that this peer adds between two reports: micro-batch x devices x accumulation."""
        return self.per_device_train_batch_size * max(1, num_devices) * self.gradient_accumulation_steps


# Those of run_trainer.py and run_custom_trainer.py
TRAINER_ARGUMENTS = (
    LocalTrainingArguments,
    DatasetArguments,
    CollaborationArguments,
    AveragerArguments,
    ProgressTrackerArguments,
)


@dataclass
class ReportingArguments:
    """Where curves are drawn."""

    _argument_group_name = "Reporting"

    report_to: Literal["none", "wandb", "trackio", "tensorboard", "mlflow", "dvclive"] = field(
        default="none",
        metadata={
            "help": "Dashboard for the training curves, in addition to metrics.jsonl: wandb (records offline "
            "without an account), trackio (local, no account), or tensorboard, mlflow or dvclive (in the "
            "output folder; install the package first)"
        },
    )
    wandb_project: str | None = field(
        default=None, metadata={"help": "Name of the Weights & Biases project; implies --report_to wandb"}
    )

    def __post_init__(self):
        if self.wandb_project is not None:
            require(
                self.report_to in ("none", "wandb"),
                f"--wandb_project needs --report_to wandb: drop it or drop --report_to {self.report_to}",
            )
            self.report_to = "wandb"
