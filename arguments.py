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


@dataclass
class BaseTrainingArguments:
    """How a peer finds the others and is found by them."""

    _argument_group_name = "Peer"

    run_id: str = field(
        default="albert",
        metadata={
            "help": "A unique name of this training run, the same for each of its peers. Also decides the initial "
            "weights, so that peers that start together start alike. Must not contain '.'"
        },
    )
    initial_peers: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Multiaddresses of one or several peers that will welcome you into the collaboration, separated "
            "by spaces. Example: /ip4/203.0.113.1/tcp/31337/p2p/XXXX /dns4/example.org/tcp/7777/p2p/YYYY"
        },
    )
    use_ipfs: bool = field(
        default=False,
        metadata={
            "help": "Find initial_peers through IPFS: then only the /p2p/XXXX part of their addresses is needed. "
            "Slower to connect than an address"
        },
    )
    host_maddrs: list[str] = field(
        default_factory=lambda: ["/ip4/0.0.0.0/tcp/0"],
        metadata={
            "help": "Multiaddresses to listen on. The default is any free TCP port on all IPv4 interfaces; give a "
            "port for an address that stays, e.g. /ip4/0.0.0.0/tcp/31337"
        },
    )
    announce_maddrs: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Multiaddresses under which others reach this peer, where they differ from those it listens on "
            "(a forwarded port, a tunnel). Example: /dns4/0.tcp.ngrok.io/tcp/12345"
        },
    )
    tunnel: Literal["none", "ngrok"] = field(
        default="none",
        metadata={
            "help": "Open a tunnel, for a peer behind a firewall or NAT that others are to join through, and announce "
            "it. ngrok: needs its SDK and an account, whose token is taken from NGROK_AUTHTOKEN or ngrok.yml"
        },
    )
    announce_tunnel: str | None = field(
        default=None,
        metadata={
            "help": "HOST:PORT of a tunnel or forwarded port that you have set up yourself, to be announced beside "
            "the local addresses. It must lead to the port in --host_maddrs. Example: bore.pub:31337"
        },
    )
    use_relay: bool = field(default=True, metadata={"help": "Reach peers behind NAT or firewalls through relays"})
    use_auto_relay: bool = field(
        default=False,
        metadata={
            "help": "Become reachable through relays, some 20 seconds after joining, if this peer is itself behind "
            "NAT or a firewall. Needs two public peers"
        },
    )
    trusted_relays: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Public peers of the run to use as relays with --use_auto_relay, as multiaddresses with a peer "
            "ID. Default: initial_peers. All that others exchange with this peer passes through one of them"
        },
    )
    identity_path: str | None = field(
        default=None,
        metadata={
            "help": "File with this peer's private key, written if it does not exist. A peer that restarts with the "
            "same file keeps its peer ID, hence its address, and counts as the same contributor. "
            "Default: identity.key in --output_dir"
        },
    )
    invitation: str | None = field(
        default=None,
        metadata={
            "help": "File from the organiser of a run that is not open to everybody, see invite.py. It brings this "
            "peer's identity along"
        },
    )
    revocations: str | None = field(
        default=None,
        metadata={
            "help": "File with the revoked invitations, from the organiser (invite.py revoke). This peer passes it on "
            "to all others. It is read again when it changes, and need not exist yet"
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
            "--invitation brings an identity along: drop --identity_path",
        )
        require(self.revocations is None or self.invitation is not None, "--revocations needs --invitation, too")
        require(not (self.use_ipfs and self.initial_peers and any("/tcp/" in peer for peer in self.initial_peers)),
                 "--use_ipfs needs no host and port: pass only the /p2p/XXXX part in --initial_peers")  # fmt: skip
        require(self.use_auto_relay or not self.trusted_relays, "--trusted_relays needs --use_auto_relay, too")
        require(self.use_relay or not self.use_auto_relay, "--use_auto_relay does not go with --no_use_relay")
        if self.use_auto_relay and not self.use_ipfs:
            self.trusted_relays = self.trusted_relays or self.initial_peers
        for flag in ("host_maddrs", "announce_maddrs"):
            for maddr in getattr(self, flag):
                protocols = check_maddr(f"--{flag}", maddr)
                if flag == "announce_maddrs":
                    port = protocols.get("tcp", protocols.get("udp"))
                    require(port != "0", f"--announce_maddrs: '{maddr}' needs the real port, 0 means any")
        self._check_tunnel()
        require_positive(self, "bootstrap_timeout")

    def _check_tunnel(self) -> None:
        require(
            self.tunnel == "none" or self.announce_tunnel is None,
            "--tunnel and --announce_tunnel exclude each other: the first opens a tunnel, the second names yours",
        )
        tcp_ports = {check_maddr("--host_maddrs", maddr).get("tcp") for maddr in self.host_maddrs} - {None}
        require(
            self.tunnel == "none" or bool(tcp_ports),
            "--tunnel leads to a TCP port, and there is none in --host_maddrs",
        )
        if self.announce_tunnel is not None:
            self.announce_tunnel = self.announce_tunnel.removeprefix("tcp://")  # as ngrok and others print it
            check_endpoint("--announce_tunnel", self.announce_tunnel)
            require(
                bool(tcp_ports - {"0"}),
                "--announce_tunnel needs the port that the tunnel leads to, not just any free one: pass --host_maddrs "
                "/ip4/0.0.0.0/tcp/PORT with that port",
            )


@dataclass
class AveragerArguments:
    """How groups of peers form."""

    _argument_group_name = "Groups"

    target_group_size: int = field(
        default=256, metadata={"help": "Maximum group size for all-reduce. A group that is full starts at once"}
    )

    def __post_init__(self):
        require(self.target_group_size >= 2, f"--target_group_size must be 2 or more, got {self.target_group_size}")


@dataclass
class ProgressTrackerArguments:
    """How often a trainer asks the others for their progress."""

    _argument_group_name = "Progress"

    min_refresh_period: float = field(
        default=0.5, metadata={"help": "Wait for at least this many seconds before fetching new collaboration state"}
    )
    max_refresh_period: float = field(
        default=30, metadata={"help": "Wait for at most this many seconds before fetching new collaboration state"}
    )
    default_refresh_period: float = field(
        default=3, metadata={"help": "Attempt to fetch collaboration state every this often until successful"}
    )
    expected_drift_peers: float = field(
        default=3, metadata={"help": "Trainer assumes that this many new peers can join per step"}
    )
    expected_drift_rate: float = field(
        default=0.2, metadata={"help": "Trainer assumes that this fraction of current size can join per step"}
    )
    performance_ema_alpha: float = field(
        default=0.1, metadata={"help": "Smoothing of the estimated samples per second, between 0 and 1"}
    )
    metadata_expiration: float = field(
        default=120, metadata={"help": "A peer that has not reported for this many seconds no longer counts"}
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
        default=60.0, metadata={"help": "Give up on an averaging step after this many seconds"}
    )
    matchmaking_time: float = field(
        default=5.0,
        metadata={
            "help": "When looking for a group, wait for others for at least this many seconds. A few more help where "
            "latency is high; hivemind needs more than 3"
        },
    )
    average_state_every: int = field(
        default=1,
        metadata={"help": "Average parameters with the others every this many steps (gradients: every step)"},
    )
    averaging_compression: Compression = field(
        default="float16", metadata={"help": "How gradients and parameters are compressed while peers average them"}
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
        default=600, metadata={"help": "Reported metrics are forgotten if not updated for this many seconds"}
    )
    backup_every_steps: int = field(
        default=10,
        metadata={"help": "Back up the training state every this many global steps, to return to if it breaks"},
    )
    max_global_steps: int | None = field(
        default=None,
        metadata={"help": "Leave once the collaboration has made this many steps. Default: train until stopped"},
    )
    leave_timeout: float = field(
        default=90.0,
        metadata={"help": "After max_global_steps, wait this many seconds for a monitor to take the last checkpoint"},
    )
    username: str = field(default="", metadata={"help": "A name to be shown in the list of contributors. Public"})

    def __post_init__(self):
        BaseTrainingArguments.__post_init__(self)
        OptimizerArguments.__post_init__(self)
        require(
            not (self.client_mode and self.use_auto_relay),
            "--client_mode accepts no connections, --use_auto_relay asks for them: pass one of the two",
        )
        require_positive(self, "statistics_expiration", "backup_every_steps", "max_global_steps")
        require_not_negative(self, "leave_timeout")
        require(len(self.username) <= 64, "--username must have at most 64 characters")
        for flag, is_set in (("tunnel", self.tunnel != "none"), ("announce_tunnel", self.announce_tunnel is not None)):
            require(
                not (self.client_mode and is_set),
                f"--client_mode accepts no connections, so --{flag} is of no use: drop one of them",
            )


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
            "help": "Begin with the weights at --model_name_or_path, a folder or a name on the Hub, instead of from "
            "scratch. Every trainer of the run must do so"
        },
    )
    tokenizer_path: str = field(
        default="data/tokenizer", metadata={"help": "Folder of the tokenizer, as tokenize_wikitext103.py wrote it"}
    )
    cache_dir: str | None = field(default="data/cache", metadata={"help": "Folder for downloads from the Hub"})


@dataclass
class DatasetArguments(ModelArguments):
    """What it is trained on."""

    _argument_group_name = "Model and data"

    dataset_path: str = field(
        default="data/albert_tokenized_wikitext",
        metadata={"help": "Folder of the tokenized dataset, as tokenize_wikitext103.py wrote it"},
    )
    dataset_url: str | None = field(
        default=None,
        metadata={
            "help": "Where dataset or tokenizer is not there yet: download the archive that tokenize_wikitext103.py "
            "--archive wrote from this http(s) address, and unpack it to dataset_path and tokenizer_path"
        },
    )
    dataset_sha256: str | None = field(
        default=None,
        metadata={"help": "SHA-256 of that archive. Default: as the .sha256 file beside it says"},
    )

    def __post_init__(self):
        if self.dataset_url is not None:
            check_web_address("--dataset_url", self.dataset_url)
            require_apart("dataset_path", self.dataset_path, "tokenizer_path", self.tokenizer_path)
        if self.dataset_sha256 is not None:
            require(self.dataset_url is not None, "--dataset_sha256 also needs --dataset_url")
            self.dataset_sha256 = self.dataset_sha256.lower()
            require(
                bool(re.fullmatch("[0-9a-f]{64}", self.dataset_sha256)),
                "--dataset_sha256 must be 64 hexadecimal digits, as in the .sha256 file beside the archive",
            )


@dataclass
class HyperparameterArguments:
    """The hyper-parameters of the run, which are for target_batch_size. Every peer should use the same values."""

    _argument_group_name = "Hyper-parameters"

    optimizer: Literal["lamb", "adamw"] = field(
        default="lamb",
        metadata={
            "help": "LAMB is for large batches. AdamW wants a much smaller --learning_rate (1e-4 or so) and an "
            "--adam_epsilon of 1e-8"
        },
    )
    total_steps: int = field(
        default=125_000, metadata={"help": "Length of the learning-rate schedule in global steps; training may go on"}
    )
    warmup_steps: int = field(default=5000, metadata={"help": "Linear warm-up in global steps"})
    learning_rate: float = field(default=0.00176, metadata={"help": "Peak learning rate, for target_batch_size"})
    adam_beta1: float = field(default=0.9, metadata={"help": "Decay of the first moment"})
    adam_beta2: float = field(default=0.999, metadata={"help": "Decay of the second moment"})
    adam_epsilon: float = field(default=1e-6, metadata={"help": "Added to the root of the second moment"})
    weight_decay: float = field(default=0.01, metadata={"help": "Weight decay; biases and norms have none"})
    clamp_value: float = field(default=10000.0, metadata={"help": "LAMB: weight norms are clamped to this value"})

    def __post_init__(self):
        require_positive(self, "total_steps", "learning_rate", "adam_epsilon", "clamp_value")
        require_not_negative(self, "warmup_steps", "weight_decay")
        require(
            self.warmup_steps <= self.total_steps,
            f"--warmup_steps {self.warmup_steps} exceeds --total_steps {self.total_steps}",
        )
        for name in ("adam_beta1", "adam_beta2"):
            require(0 <= getattr(self, name) < 1, f"--{name} must be at least 0 and below 1: {getattr(self, name)}")


@dataclass
class LocalTrainingArguments(HyperparameterArguments):
    """How this peer computes gradients.

    hivemind's example inherits these from transformers' TrainingArguments. Listing the ones that mean something here
    keeps `--help` short and fast; `hf_trainer.build_training_arguments` hands them to transformers.
    """

    _argument_group_name = "Local training"

    per_device_train_batch_size: int = field(
        default=4, metadata={"help": "Micro-batch per device. Aim at 0.5 to 1 seconds a micro-batch"}
    )
    gradient_accumulation_steps: int = field(
        default=2, metadata={"help": "Micro-batches between two reports of progress to the others"}
    )
    seq_length: int | None = field(
        default=None, metadata={"help": "Sequence length in tokens. Default: that of the prepared data"}
    )
    max_grad_norm: float = field(
        default=1.0,
        metadata={"help": "Bound on the norm of the gradient that this peer contributes to a global step; 0: none"},
    )
    mlm_probability: float = field(default=0.15, metadata={"help": "Fraction of tokens to predict in masked LM"})
    fp16: bool = field(default=False, metadata={"help": "Mixed precision with float16 (GPU only)"})
    bf16: bool = field(default=False, metadata={"help": "Mixed precision with bfloat16"})
    fp32: bool = field(
        default=False,
        metadata={"help": "No mixed precision. Default: bf16 on GPUs that have it, else fp16; on CPU fp32"},
    )
    gradient_checkpointing: bool = field(
        default=False, metadata={"help": "Recompute activations: about a third slower, much less GPU memory"}
    )
    use_cpu: bool = field(default=False, metadata={"help": "Do not use a GPU"})
    dataloader_num_workers: int = field(default=2, metadata={"help": "Processes that prepare batches; 0: none"})
    seed: int = field(
        default=42,
        metadata={"help": "Together with the peer ID, decides the order of this peer's samples and its dropout"},
    )
    output_dir: str = field(
        default="outputs", metadata={"help": "Folder for this peer's checkpoints, backups and identity"}
    )
    save_steps: int = field(default=500, metadata={"help": "Save a checkpoint every this many local steps"})
    save_total_limit: int = field(default=2, metadata={"help": "Keep this many checkpoints"})
    logging_steps: int = field(default=100, metadata={"help": "Log the local loss every this many local steps"})
    logging_first_step: bool = field(default=True, metadata={"help": "Log the first local step too"})
    disable_tqdm: bool = field(default=False, metadata={"help": "No progress bar"})

    def __post_init__(self):
        super().__post_init__()
        require_positive(self, "per_device_train_batch_size", "gradient_accumulation_steps", "seq_length",
                          "save_steps", "save_total_limit", "logging_steps")  # fmt: skip
        require_not_negative(self, "max_grad_norm", "dataloader_num_workers", "seed")
        require(0 < self.mlm_probability < 1, f"--mlm_probability must be between 0 and 1: {self.mlm_probability}")
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
            "help": "Where to draw the curves, beside metrics.jsonl: wandb (an account; without one it records "
            "offline), trackio (a local dashboard, no account), or one whose package you install: tensorboard, "
            "mlflow, dvclive (in the output folder)"
        },
    )
    wandb_project: str | None = field(
        default=None, metadata={"help": "Name of the Weights & Biases project; implies --report_to wandb"}
    )

    def __post_init__(self):
        if self.wandb_project is not None:
            require(
                self.report_to in ("none", "wandb"),
                f"--wandb_project reports to wandb; drop it or drop --report_to {self.report_to}",
            )
            self.report_to = "wandb"
