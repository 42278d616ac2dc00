"""Every flag of every script: one dataclass a concern, its documentation at the flag, its checks in `__post_init__`.

Names and defaults are those of hivemind's ALBERT example; the names of older examples are translated in cli.py.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from lib.common.checks import (
    check_endpoint,
    check_maddr,
    check_peer,
    check_web_address,
    parse_repo_id,
    require,
    require_apart,
    require_not_negative,
    require_positive,
)
from lib.common.objectives import DEFAULT_OBJECTIVE, OBJECTIVES

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
        metadata={"help": "Network bandwidth of this peer in Mbit/s (decides its share of the work in all-reduce)"},
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
    keeps `--help` short and fast; `trainer.build_training_arguments` hands them to transformers.
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
    mlm_probability: float = field(default=0.15, metadata={"help": "Share of tokens to predict in masked LM"})
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


@dataclass
class TrainingMonitorArguments(ReportingArguments):
    """What the monitor watches, keeps and reports."""

    _argument_group_name = "Monitor"

    output_dir: str = field(
        default="monitor_outputs", metadata={"help": "Folder for metrics.jsonl, checkpoints and the identity"}
    )
    refresh_period: float = field(default=30, metadata={"help": "Seconds between two looks at the trainers' metrics"})
    use_google_dns: bool = field(
        default=False,
        metadata={
            "help": "Find out this machine's public IP address and announce it. The name is historical: a web service "
            "is asked, see --public_ip_service"
        },
    )
    public_ip_service: str = field(
        default="https://api.ipify.org", metadata={"help": "Web service that answers with the caller's IP address"}
    )
    store_checkpoints: bool = field(
        default=True, metadata={"help": "Download the state from trainers now and then, and keep it on disk"}
    )
    save_checkpoint_step_interval: int = field(default=5, metadata={"help": "Global steps between two checkpoints"})
    save_total_limit: int = field(default=2, metadata={"help": "Keep this many checkpoints"})
    assist_in_averaging: bool = field(
        default=False,
        metadata={
            "help": "Help the trainers average with this machine's bandwidth, without computing gradients. Pass their "
            "--target_batch_size and --averaging_compression, too"
        },
    )
    assistant_maddrs: list[str] = field(
        default_factory=lambda: ["/ip4/0.0.0.0/tcp/0"],
        metadata={
            "help": "Multiaddresses that the assistant listens on, another port than the monitor's; open it as well"
        },
    )
    repo_id: str | None = field(
        default=None,
        metadata={
            "help": "Upload the newest checkpoint, with a model card, to this repository on the Hugging Face Hub: "
            "NAME/MODEL. Needs a token that may write: `hf auth login` or HF_TOKEN"
        },
    )
    upload_interval: float = field(default=3600.0, metadata={"help": "Seconds between two uploads"})
    private_repo: bool = field(default=False, metadata={"help": "Make the repository private if it has to be created"})
    upload_training_state: bool = field(
        default=False,
        metadata={"help": "Upload the optimizer's state too, for a run to be revived; three times the size"},
    )
    license: str | None = field(
        default=None, metadata={"help": "License of the model for its card, as the Hub names it, e.g. apache-2.0"}
    )
    language: str | None = field(
        default=None, metadata={"help": "Language of the model for its card, as in ISO 639-1, e.g. en"}
    )

    assistant_invitation: str | None = field(
        default=None, metadata={"help": "The assistant's own --invitation, if the run needs one"}
    )

    def __post_init__(self):
        super().__post_init__()
        require_positive(self, "refresh_period", "save_checkpoint_step_interval", "save_total_limit")
        require_not_negative(self, "upload_interval")
        for maddr in self.assistant_maddrs:
            check_maddr("--assistant_maddrs", maddr)
        if self.repo_id is not None:
            self.repo_id = parse_repo_id("--repo_id", self.repo_id)
            require(self.store_checkpoints, "--repo_id uploads checkpoints: drop --no_store_checkpoints")


@dataclass
class EvaluatorArguments(ReportingArguments):
    """What the evaluator computes, and when."""

    _argument_group_name = "Evaluation"

    output_dir: str = field(
        default="evaluator_outputs", metadata={"help": "Folder for evaluations.jsonl and the identity"}
    )
    evaluation_interval: float = field(
        default=300.0, metadata={"help": "Evaluate every this many seconds, if the collaboration has made a step"}
    )
    evaluation_steps: int | None = field(
        default=None, metadata={"help": "Evaluate every this many global steps instead"}
    )
    per_device_eval_batch_size: int = field(default=16, metadata={"help": "Samples that are evaluated at once"})
    max_eval_samples: int | None = field(
        default=None, metadata={"help": "Evaluate the first so many samples of the split 'validation'. Default: all"}
    )
    mlm_probability: float = field(
        default=0.15, metadata={"help": "Share of tokens to predict in masked LM; the same ones each time"}
    )
    use_cpu: bool = field(default=False, metadata={"help": "Do not use a GPU"})
    refresh_period: float = field(default=10, metadata={"help": "Seconds between two looks at the trainers' metrics"})
    load_state_timeout: float = field(
        default=600.0, metadata={"help": "Give up on downloading the state from trainers after this many seconds"}
    )
    max_global_steps: int | None = field(
        default=None, metadata={"help": "End once this step, or a later one, is evaluated. Default: when stopped"}
    )
    disable_tqdm: bool = field(default=False, metadata={"help": "No progress bar"})

    def __post_init__(self):
        super().__post_init__()
        require_positive(self, "evaluation_interval", "evaluation_steps", "per_device_eval_batch_size",
                          "max_eval_samples", "refresh_period", "load_state_timeout", "max_global_steps")  # fmt: skip
        require(0 < self.mlm_probability < 1, f"--mlm_probability must be between 0 and 1: {self.mlm_probability}")


@dataclass
class TokenizationArguments:
    """From text to a dataset that every trainer can load."""

    _argument_group_name = "Tokenization"

    dataset_name: str = field(
        default="Salesforce/wikitext", metadata={"help": "Dataset on the Hugging Face Hub, with a column 'text'"}
    )
    dataset_config_name: str | None = field(
        default=None, metadata={"help": "Its configuration. Default: wikitext-103-v1 for WikiText, else none"}
    )
    train_file: str | None = field(
        default=None,
        metadata={
            "help": "A text file of your own instead, UTF-8. Documents end at blank lines or, as in WikiText, at "
            "titles"
        },
    )
    validation_file: str | None = field(
        default=None, metadata={"help": "A text file for validation. Default: a share of the documents is held out"}
    )
    sample: bool = field(
        default=False,
        metadata={"help": "Use the text that every Python carries (the topics of its documentation): no download"},
    )
    validation_share: float = field(
        default=0.05, metadata={"help": "Share of the documents that is held out where the source has no validation"}
    )
    tokenizer: str = field(
        default="albert-large-v2", metadata={"help": "Tokenizer: a name on the Hugging Face Hub or a local folder"}
    )
    train_tokenizer: bool = field(
        default=False, metadata={"help": "Train a tokenizer on the text instead: nothing to download"}
    )
    tokenizer_type: Literal["sentencepiece", "wordpiece", "bpe"] | None = field(
        default=None,
        metadata={
            "help": "Kind of tokenizer for --train_tokenizer: sentencepiece (ALBERT's), wordpiece (BERT's) or bpe "
            "(GPT-2's for a causal objective, else RoBERTa's). Default: by objective, in this order"
        },
    )
    vocab_size: int = field(default=30000, metadata={"help": "Size of the vocabulary for --train_tokenizer"})
    objective: Literal[tuple(OBJECTIVES)] = field(
        default=DEFAULT_OBJECTIVE,
        metadata={
            "help": "What the data is to train: "
            + ", ".join(f"{objective.name} ({objective.short_description})" for objective in OBJECTIVES.values())
        },
    )
    language: str = field(
        default="en", metadata={"help": "Language of the text, as in ISO 639-1: decides where sentences end"}
    )
    max_seq_length: int = field(default=512, metadata={"help": "Tokens in an instance, special tokens included"})
    output_path: str = field(
        default="data/albert_tokenized_wikitext",
        metadata={"help": "Folder for the tokenized dataset", "aliases": ["--dataset_path"]},
    )
    tokenizer_path: str = field(default="data/tokenizer", metadata={"help": "Folder for the tokenizer"})
    cache_dir: str | None = field(default="data/cache", metadata={"help": "Folder for downloads and work in hand"})
    archive: str | None = field(
        default=None, metadata={"help": "Also pack dataset, tokenizer and manifest into this .tar.gz for hosting"}
    )
    num_proc: int = field(default=2, metadata={"help": "Processes. The result does not depend on it"})
    seed: int = field(
        default=0, metadata={"help": "Decides where segments are split and swapped, and what is held out"}
    )
    overwrite: bool = field(default=False, metadata={"help": "Replace a dataset that is already there"})
    debug: bool = field(default=False, metadata={"help": "Log more, and show the traceback of a fatal error"})

    def __post_init__(self):
        if self.tokenizer_type is None:
            self.tokenizer_type = OBJECTIVES[self.objective].tokenizer_type
        require_positive(self, "vocab_size", "num_proc")
        require_not_negative(self, "seed")
        require_apart("output_path", self.output_path, "tokenizer_path", self.tokenizer_path)
        require(self.max_seq_length >= 8, f"--max_seq_length must be 8 or more, got {self.max_seq_length}")
        require(0 < self.validation_share < 1, f"--validation_share must be between 0 and 1: {self.validation_share}")
        require(not (self.sample and self.train_file), "--sample and --train_file exclude each other")
        require(
            self.validation_file is None or self.train_file is not None, "--validation_file also needs --train_file"
        )
        for flag in ("train_file", "validation_file"):
            path = getattr(self, flag)
            require(path is None or Path(path).is_file(), f"--{flag}: there is no file '{path}'")
        require(
            self.archive is None or self.archive.endswith((".tar.gz", ".tgz")),
            f"--archive must end in .tar.gz, got '{self.archive}'",
        )
        if self.dataset_config_name is None and self.dataset_name.endswith("wikitext"):
            self.dataset_config_name = "wikitext-103-v1"


@dataclass
class InvitationArguments:
    """Who is invited."""

    _argument_group_name = "Invitation"

    username: str = field(metadata={"help": "Whom it is for"})
    output: str = field(metadata={"help": "File to write"})
    authority: str = field(
        default="authority.key", metadata={"help": "The organiser's private key, made if it is not there"}
    )
    days: float = field(default=365.0, metadata={"help": "How long it holds"})
    debug: bool = field(default=False, metadata={"help": "Show the traceback of a fatal error"})

    def __post_init__(self):
        require_positive(self, "days")
        require(bool(self.username.strip()), "--username must not be empty")
        require(len(self.username) <= 64, "--username must have at most 64 characters")


@dataclass
class RevocationArguments:
    """Which invitations no longer hold."""

    _argument_group_name = "Revocation"

    username: str | None = field(default=None, metadata={"help": "Revoke all invitations of this user"})
    invitation: str | None = field(default=None, metadata={"help": "Revoke the invitation in this file"})
    authority: str = field(
        default="authority.key",
        metadata={"help": "The organiser's private key. The list is written beside it, as authority.revoked"},
    )
    debug: bool = field(default=False, metadata={"help": "Show the traceback of a fatal error"})

    def __post_init__(self):
        require((self.username is None) != (self.invitation is None), "pass either --username or --invitation")


@dataclass
class DemoArguments:
    """A collaboration of several trainers on one machine."""

    _argument_group_name = "Demo"

    train_file: str | None = field(
        default=None, metadata={"help": "A text file of your own, UTF-8. Default: the documentation of Python"}
    )
    vocab_size: int = field(
        default=2000, metadata={"help": "Tokens of the tokenizer that is trained on the text. Short texts need fewer"}
    )
    trainers: int = field(default=2, metadata={"help": "Number of trainers. Each keeps one core busy"})
    max_global_steps: int = field(default=10, metadata={"help": "Stop after this many steps of the collaboration"})
    output_dir: str = field(
        default="demo", metadata={"help": "Folder for all that is made. What a previous demo left there is removed"}
    )
    debug: bool = field(default=False, metadata={"help": "Show the traceback of a fatal error"})

    def __post_init__(self):
        require_positive(self, "vocab_size")
        require(self.trainers >= 2, f"--trainers must be 2 or more, got {self.trainers}: one has nobody to train with")
        require(
            self.max_global_steps >= 2,
            f"--max_global_steps must be 2 or more, got {self.max_global_steps}: the loss of the first step is that "
            f"of the initial weights",
        )
        require(
            self.train_file is None or Path(self.train_file).is_file(),
            f"--train_file: there is no file '{self.train_file}'",
        )
