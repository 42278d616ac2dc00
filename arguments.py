"""Flags that the scripts share: one dataclass per topic. What one machine decides is here, with help.

These dataclasses inherit the settings on which all peers of a run agree (cotrain/settings.py), and defaults, bounds
and checks, which the library needs, too (cotrain/options.py). The flags of a single script are in that script. Names
and defaults are those of hivemind's ALBERT example; cotrain/common/argument_parser.py translates older names.
"""

import os
from dataclasses import dataclass
from typing import Literal

from cotrain.common.flags import ArgumentsError, Flags, described, flag, is_page, require
from cotrain.options import (
    CollaborationOptions,
    DataOptions,
    LocalOptions,
    ModelOptions,
    PeerOptions,
    ProgressOptions,
    find_dataset,
)
from cotrain.settings import Compression


@dataclass
class BaseTrainingArguments(PeerOptions, group="Peer"):
    """How a peer finds the others and is found by them."""

    initial_peers: list[str] = described(
        "Multiaddresses of one or more running peers to join through, separated by spaces. Example: "
        "/ip4/203.0.113.1/tcp/31337/p2p/XXXX /dns4/example.org/tcp/7777/p2p/YYYY"
    )
    use_ipfs: bool = described(
        "Find initial_peers by the /p2p/XXXX part of their addresses, through IPFS. Slower than full addresses"
    )
    host_maddrs: list[str] = described(
        "Multiaddresses to listen on. Set a port to keep the address across restarts, e.g. /ip4/0.0.0.0/tcp/31337"
    )
    announce_maddrs: list[str] = described(
        "Multiaddresses at which other peers reach this one, if they differ from those it listens on (a "
        "forwarded port, a tunnel). Example: /dns4/0.tcp.ngrok.io/tcp/12345"
    )
    tunnel: Literal["none", "ngrok"] = described(
        "Open a tunnel and announce its address, so that others can join through a peer behind a firewall or NAT. "
        "ngrok needs its SDK and an account; the authtoken is read from NGROK_AUTHTOKEN or ngrok.yml"
    )
    announce_tunnel: str | None = described(
        "HOST:PORT of a tunnel or forwarded port that you have set up, announced in addition to the "
        "local addresses. It must lead to the port in --host_maddrs. Example: bore.pub:31337"
    )
    map_port: bool = described("Ask the router for a public port (UPnP or NAT-PMP), and so become reachable")
    use_auto_relay: bool = described(
        "Become reachable through relays, about 20 seconds after joining, if this peer is behind NAT or "
        "a firewall. Needs two public peers"
    )
    trusted_relays: list[str] = described(
        "Public peers of the run to use as relays with --use_auto_relay, as multiaddresses with a peer ID. Default: "
        "initial_peers. Traffic to peers behind NAT passes through one of them, unless there are four and the routers "
        "allow direct connections"
    )
    identity_path: str | None = described(
        "File with this peer's private key, created if it does not exist. With the same file a peer keeps its peer "
        "ID, address and contribution across restarts. Default: identity.key in --output_dir"
    )
    invitation: str | None = described("Invitation file of the organiser, see invite.py; it has this peer's identity")
    bootstrap_timeout: float = described("Give up joining after this many seconds if none of initial_peers answers")
    webhook_file: str | None = described(
        "File with the address of a webhook (Slack, Discord, or any JSON), to which monitor and trainer write when it "
        "matters, at most once an hour of a kind. The address is a secret: whoever has it may write there"
    )
    debug: bool = described("Log more, and show the traceback of a fatal error")


@dataclass
class ProgressTrackerArguments(ProgressOptions, group="Progress"):
    """How often a trainer asks the others for their progress."""

    min_refresh_period: float = described("Minimum seconds between two reads of the other peers' progress")
    max_refresh_period: float = described("Maximum seconds between two reads of the other peers' progress")
    default_refresh_period: float = described(
        "Seconds between two reads of the progress while no other peer reports any or a read has failed"
    )
    expected_drift_peers: float = described(
        "Number of peers that are assumed to join during one global step. Raise it if many join at once"
    )
    expected_drift_rate: float = described(
        "Fraction of the current number of peers that is assumed to join during one global step"
    )
    performance_ema_alpha: float = described(
        "Weight of the newest value in the moving average of samples per second, above 0 and at most 1"
    )
    metadata_expiration: float = described(
        "A peer's progress report expires after this many seconds without a new one"
    )


@dataclass
class CollaborationArguments(BaseTrainingArguments, CollaborationOptions, group="Collaboration"):
    """What a trainer needs to know of the collaboration."""

    load_state_timeout: float = described("Give up on downloading the state from others after this many seconds")
    client_mode: bool = described(
        "Accept no incoming connections, for peers behind NAT or a firewall. Not all trainers may do so"
    )
    batch_size_lead: int = described(
        "Begin looking for a group at the latest this many samples before target_batch_size; see --matchmaking_time"
    )
    bandwidth: float | None = described(
        "Upload of this peer in Mbit/s, which decides its fraction of the work in all-reduce. Default: little in the "
        "first round, then the largest rate at which this machine has sent in a round, at most 100"
    )
    load_state_compression: Compression = described("How this peer compresses the state that others download")
    delay_grad_averaging: bool = described("Average gradients in the background while computing the next ones")
    delay_optimizer_step: bool = described(
        "Run the optimizer step in the background; its result comes a local step late"
    )
    statistics_expiration: float = described("Metrics expire after this many seconds without an update")
    backup_every_steps: int = described(
        "Save a checkpoint every this many global steps, for a rollback if the parameters become NaN or Inf"
    )
    max_global_steps: int | None = described("Leave at this global step of the run. Default: train until stopped")
    leave_timeout: float = described(
        "After max_global_steps, wait at most this many seconds for a monitor to save that step"
    )
    username: str = described(
        "Name in the public list of contributors, at most 64 characters. Default: one derived from the peer ID"
    )
    max_traffic: str | None = described(
        "Leave before this machine has sent and received so much in a calendar month, such as 50GB. Other programs "
        "count, too, while the trainer runs"
    )
    only_between: str | None = described(
        "Train between these two local times only, such as 22:00-07:00, and pause in the rest of the day"
    )
    pause_when_busy: bool = described(
        "Pause while another program computes on the GPU, such as a game. For NVIDIA's; pip install nvidia-ml-py first"
    )


@dataclass
class ModelArguments(ModelOptions, group="Model and data"):
    """What is trained, and where its data comes from. Trainer, monitor and evaluator must agree on it."""

    tokenizer_path: str = described("Folder with the tokenizer, written by tokenize_wikitext103.py")
    cache_dir: str | None = described("Folder for downloads from the Hub. What HF_HOME has already is used, too")
    task: str | None = described(
        "Python file with a model, samples and a loss of your own, instead of a language model: see docs/own-model.md "
        "and examples/digits.py. All peers of the run need the same file. It is a program: read a file from somebody "
        "else first. Flags for text, such as --model_name_or_path and --dataset_path, have no effect then"
    )


@dataclass
class DatasetArguments(ModelArguments, DataOptions, group="Model and data"):
    """What is trained, for peers that have the data."""

    dataset_path: str = described(
        "Folder with the tokenized dataset, written by tokenize_wikitext103.py. Default: data/tokenized or "
        "data/albert_tokenized_wikitext, the newer"
    )
    load_in_4bit: bool = described(
        "With --lora_rank: keep the base model in 4 bits, on a GPU, with bitsandbytes (pip install it first)"
    )
    own_data: str | None = described(
        "Your own text or conversations: a file, 'FOLDER/*.txt' or a folder. They stay on this machine; peers "
        "average only the gradients or local updates that result: see docs/own-data.md"
    )
    own_share: float | None = described(
        "Fraction of the samples from --own_data. Default: half; all if the run has none, or has them in shards"
    )
    data_cache: str = described(
        "Size on disk of the shards to keep, if the data is in shards: those in use, and as many of the next as fit"
    )


@dataclass
class LocalTrainingArguments(LocalOptions, group="Local training"):
    """How this peer computes gradients. `hf_trainer.build_training_arguments` hands the flags to transformers."""

    per_device_train_batch_size: int | None = described(
        "Samples per micro-batch and device. Default: what fits the memory of the GPU, on a CPU 4, and for a local "
        "step of at most 1/32 of the target"
    )
    gradient_accumulation_steps: int | None = described(
        "Micro-batches per local step. The trainer reports its progress after each local step. Default: 2, or what "
        "leaves a local step of at most 1/32 of the target"
    )
    fp16: bool = described("Mixed precision with float16 (GPU only)")
    bf16: bool = described("Mixed precision with bfloat16")
    fp32: bool = described("Do not use mixed precision. Default: bf16 on GPUs that have it, else fp16; on CPU fp32")
    gradient_checkpointing: bool = described("Recompute activations: about a third slower, much less GPU memory")
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2", "flex_attention"] | None = described(
        "How attention is computed. Default: transformers' choice for the model, mostly sdpa"
    )
    torch_compile: bool = described("Compile the model for this device: a slow start, then faster. One GPU at most")
    use_cpu: bool = described("Do not use a GPU")
    dataloader_num_workers: int = described("Processes that prepare batches; 0: the main process does")
    seed: int = described(
        "Random seed. With the peer ID, it determines the order of this peer's samples and its dropout"
    )
    output_dir: str = described("Folder for this peer's checkpoints and identity")
    save_steps: int = described("Also save a checkpoint every this many local steps")
    save_total_limit: int = described("Keep this many checkpoints")
    logging_steps: int = described("Log the local loss every this many local steps")
    logging_first_step: bool = described("Log the first local step too")
    disable_tqdm: bool = described("Show no progress bar on the terminal")
    status: bool = flag(
        False, "Print the status of the trainer of this --output_dir, and exit: with code 0 if it runs, else with 1"
    )
    pause: bool = flag(
        False,
        "Let the trainer of this --output_dir free the GPU after its local step, and stay in the run until --resume",
    )
    resume: bool = flag(False, "Let the trainer of this --output_dir continue after --pause")
    check: bool = flag(
        False, "Try everything that this trainer needs, print what is wrong and what to do, and exit, with code 0 or 1"
    )


TRAINER_ARGUMENTS = (LocalTrainingArguments, DatasetArguments, CollaborationArguments, ProgressTrackerArguments)


@dataclass
class ReportingArguments(Flags, group="Reporting"):
    """Where curves are drawn."""

    report_to: Literal["none", "wandb", "trackio", "tensorboard"] = flag(
        "none",
        "Dashboard for the training curves, in addition to metrics.jsonl: wandb (records offline "
        "without an account), trackio (local, no account), or tensorboard (install the package first)",
    )
    wandb_project: str | None = flag(None, "Name of the Weights & Biases project; implies --report_to wandb")
    server_url: str | None = flag(
        None, "Address of your trackio server for the curves; its token is in the environment: TRACKIO_WRITE_TOKEN"
    )

    def __post_init__(self):
        super().__post_init__()
        if self.server_url is not None:  # which is published; no message repeats it
            is_plain = is_page(self.server_url) and not {"?", "#"}.intersection(self.server_url)
            require(is_plain, "--server_url must be an address like https://curves.example.org, without a token")
            require("TRACKIO_WRITE_TOKEN" in os.environ, "--server_url needs TRACKIO_WRITE_TOKEN in the environment")
            self.require_trackio("server_url")
        if self.wandb_project is not None:
            if self.report_to not in ("none", "wandb"):
                raise ArgumentsError(f"--wandb_project needs wandb: drop it, or drop --report_to {self.report_to}")
            if wrong := set("/\\#?%:").intersection(self.wandb_project):
                raise ArgumentsError(f"--wandb_project {self.wandb_project}: wandb allows no '{min(wrong)}' in a name")
            self.report_to = "wandb"

    def require_trackio(self, name: str) -> None:
        """Report to trackio, which keeps the curves where flag `name` says: a variable for another place is unset."""
        if self.report_to not in ("none", "trackio"):
            raise ArgumentsError(f"--{name} needs trackio: drop --report_to {self.report_to}")
        places = ("space_id", "server_url", "serve_page")
        require([getattr(self, x, None) for x in places].count(None) > 1, f"pass one of --{', --'.join(places)}")
        for place in places:
            os.environ.pop(f"TRACKIO_{place.upper()}", None)
        self.report_to = "trackio"
