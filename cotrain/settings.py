"""Settings of a run, on which all of its peers agree: the organiser states them, and the others adopt them.

They are flags of the scripts and parameters of `join_run`, with help at the setting and checks in `__post_init__`.
Names and defaults are those of hivemind's ALBERT example. What one machine decides is in cotrain/options.py.
"""

import math
import re
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from cotrain.common.flags import (
    MAX_PAGE_LENGTH,
    ArgumentsError,
    Flags,
    check_web_address,
    is_page,
    require,
    setting,
)

BASE_FOLDER = "data/model"  # of pretrained weights in the archive of the data

Compression = Literal["none", "float16", "scaled_float16"]
GradientCompression = Literal[Compression, "blockwise8", "blockwise4", "topk"]


@dataclass
class RunSettings(Flags, group="Run"):
    """Name and end of the run."""

    run_id: str = setting(
        "albert", "The run's name, the same for all of its peers. It seeds the initial weights. Must not contain '.'"
    )
    use_relay: bool = setting(
        False,
        "Reach peers behind NAT or firewalls through relays and, if this peer is public, serve as one: to any peer of "
        "libp2p, 4 GiB per connection. For runs with --use_auto_relay",
        optional=True,
    )
    page: str | None = setting(
        None,
        "Address of a web page with the run's curves, which trainers print. Default of the monitor: the page of "
        "--space_id or --report_to wandb",
        optional=True,
    )
    ends_at: str | None = setting(
        None, "End of the run in UTC, such as 2027-04-28T23:59: trainers and monitor save a last checkpoint and exit"
    )

    def __post_init__(self):
        super().__post_init__()
        is_name = self.run_id.strip() != "" and self.run_id.isprintable() and len(self.run_id) <= 100
        require(is_name, "--run_id must be one line of 1 to 100 printable characters")
        require("." not in self.run_id, f"--run_id '{self.run_id}' must not contain '.'; write '-' instead")
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
class StepSettings(Flags, group="Collaboration"):
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
    weigh_equally: bool = setting(
        False, "In a round each peer with samples weighs the same, instead of by its samples: see docs/own-data.md"
    )


def check_compression(compression: str, local_updates: bool) -> None:
    """Raise ArgumentsError for a compression of gradients that needs local updates, without them."""
    require(
        compression != "topk" or local_updates,
        "--gradient_compression topk also needs --local_updates: a step of Adam needs all of a gradient",
    )


@dataclass
class ModelSettings(Flags, group="Model and data"):
    """What is trained, and where its data comes from."""

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
    dataset_url: str | None = setting(
        None,
        "Address of what tokenize_wikitext103.py --archive wrote, an archive or the manifest of shards: http(s), "
        "hf://datasets/NAME/REPOSITORY/PATH or s3://BUCKET/PATH. It is unpacked to dataset_path and tokenizer_path if "
        "one of them is missing",
    )
    dataset_sha256: str | None = setting(
        None, "SHA-256 of the file at --dataset_url, without which an interrupted download starts again"
    )
    dataset_head_sha256: str | None = setting(
        None, "SHA-256 of the small files of that archive if it has more than 1 GB: a monitor then downloads no others"
    )
    takes_own_data: bool = setting(
        False,
        "Trainers may train on --own_data, which nobody sees. By default they may not, so that the organiser can say "
        "what the model has learnt. Nobody can check what a trainer trains on: it is a rule for the honest",
    )
    own_validation: bool = setting(
        True, "Each trainer with --own_data publishes the loss on its held-out part, besides that of the evaluator"
    )

    def __post_init__(self):
        super().__post_init__()
        self.from_pretrained |= self.lora_rank is not None
        require(
            self.lora_rank is not None or self.lora_targets == "all-linear", "--lora_targets also needs --lora_rank"
        )
        require(self.lora_rank is not None or not self.lora_tokens, "--lora_tokens also needs --lora_rank")
        if self.dataset_url is not None:
            self.dataset_url = to_web_address(self.dataset_url)
            check_web_address("--dataset_url", self.dataset_url)
        for name in ("dataset_sha256", "dataset_head_sha256"):
            if (digest := getattr(self, name)) is not None:
                require(self.dataset_url is not None, f"--{name} also needs --dataset_url")
                is_hex = re.fullmatch("[0-9a-f]{64}", digest.lower()) is not None
                require(is_hex, f"--{name} must be 64 hexadecimal digits, as tokenize_wikitext103.py prints them")
                setattr(self, name, digest.lower())


def to_web_address(url: str) -> str:
    """Return the web address of a public file of a dataset on the Hugging Face Hub, or in S3; others are unchanged."""
    if match := re.fullmatch(r"hf://datasets/([\w.-]+/[\w.-]+)(?:@([\w.-]+))?/([\w./-]+)", url):
        repository, revision, path = match.groups()
        return f"https://huggingface.co/datasets/{repository}/resolve/{revision or 'main'}/{path}"
    return re.sub(r"^s3://([a-z0-9.-]+)/", r"https://\1.s3.amazonaws.com/", url)


@dataclass
class Hyperparameters(Flags, group="Hyper-parameters"):
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


SETTINGS = (RunSettings, StepSettings, ModelSettings, Hyperparameters)
