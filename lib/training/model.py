"""What is trained: tokenizer, configuration and model.

Trainer, monitor and evaluator build them here and nowhere else, or the states that they exchange would not fit.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.albert.modeling_albert import AlbertLayer
from transformers.utils.logging import disable_progress_bar

from arguments import ModelArguments
from lib.common.errors import UserError, first_line
from lib.common.objectives import OBJECTIVE_OF_MODEL, OBJECTIVES

disable_progress_bar()  # of reading and writing weights, which takes a second

CONFIGS = Path(__file__).parents[2] / "configs"


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from anything that prints the same everywhere. Python's `hash` is salted in each process."""
    digest = hashlib.sha256("\n".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def load_tokenizer(
    name: str,
    flag: str = "--tokenizer_path",
    remedy: str = "run ./tokenize_wikitext103.py, or copy the folder from the machine that ran it",
    use_hub: bool = False,
    cache_dir: str | None = None,
) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder.

    :param flag, remedy: what named it and what to do about a wrong name, for the message
    :param use_hub: whether a name that is no folder is looked up on the Hugging Face Hub
    :raises UserError: if there is none, or it cannot be read
    """
    is_folder = Path(name).is_dir()
    if not is_folder and (not use_hub or name.startswith((".", "/", "~"))):
        raise UserError(f"{flag}: there is no folder '{name}'; {remedy}")
    try:
        # Else it asks a person at the terminal whether it may run code
        return AutoTokenizer.from_pretrained(name, cache_dir=cache_dir, trust_remote_code=False)
    except Exception as error:
        what = "holds no tokenizer that can be read" if is_folder else "is neither a folder here nor on the Hub"
        raise UserError(f"{flag}: '{name}' {what} ({first_line(error)}); {remedy}") from None


def load_config(args: ModelArguments, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    """The model's configuration, with the tokenizer's vocabulary and special tokens.

    :raises UserError: if there is none at `args.model_name_or_path`, or the model family is not supported
    """
    name = args.model_name_or_path
    path = CONFIGS / f"{name}.json" if (CONFIGS / f"{name}.json").is_file() else Path(name)
    try:
        if path.is_file():
            fields = json.loads(path.read_text())
            config = AutoConfig.for_model(**fields)
        else:
            config = AutoConfig.from_pretrained(name, cache_dir=args.cache_dir)
    except Exception as error:
        raise UserError(
            f"--model_name_or_path: no model configuration at '{name}' ({first_line(error)}); pass a config.json, a "
            f"folder that has one, or one of {', '.join(sorted(p.stem for p in CONFIGS.glob('*.json')))}"
        ) from None
    if config.model_type not in OBJECTIVE_OF_MODEL:
        raise UserError(
            f"--model_name_or_path: '{name}' is a {config.model_type} model; supported are "
            f"{', '.join(OBJECTIVE_OF_MODEL)}"
        )
    if not args.from_pretrained:
        config.vocab_size = len(tokenizer)
    elif config.vocab_size < len(tokenizer):  # more is common: rounded up
        raise UserError(
            f"--from_pretrained: the model at '{name}' has a vocabulary of {config.vocab_size}, the tokenizer of "
            f"{len(tokenizer)}: prepare the data with the model's own, ./tokenize_wikitext103.py --tokenizer {name}"
        )
    for token in ("pad", "bos", "eos"):
        setattr(config, f"{token}_token_id", getattr(tokenizer, f"{token}_token_id"))
    return config


def get_objective(config: PretrainedConfig) -> str:
    """The name of the objective that a model is trained for, see lib/common/objectives.py."""
    return OBJECTIVE_OF_MODEL[config.model_type]


def get_model_class(config: PretrainedConfig) -> type:
    """The class that trains it, and that loads it from a checkpoint."""
    return getattr(transformers, OBJECTIVES[get_objective(config)].model_class)


def make_model(config: PretrainedConfig, args: ModelArguments, run_id: str) -> PreTrainedModel:
    """The model that a trainer begins with, from scratch or from pretrained weights."""
    return load_pretrained_model(config, args, run_id) if args.from_pretrained else build_model(config, run_id)


def build_model(config: PretrainedConfig, run_id: str) -> PreTrainedModel:
    """A model with initial weights that depend on the run's name alone, so that peers that start together start alike.

    Its loss is a mean over the micro-batch.
    """
    with _seeded_by(run_id):
        model_class = get_model_class(config)
        build = getattr(model_class, "from_config", model_class)  # of an Auto class, or of one model
        return _prepare(build(config))


def load_pretrained_model(config: PretrainedConfig, args: ModelArguments, run_id: str) -> PreTrainedModel:
    """The model with the weights at `args.model_name_or_path`; layers that they lack begin as in `build_model`.

    :raises UserError: if there are none, or they do not fit
    """
    name = args.model_name_or_path
    if Path(name).is_file():
        raise UserError(f"--from_pretrained: '{name}' is a configuration; pass the folder that has its weights too")
    try:
        with _seeded_by(run_id):
            model_class = get_model_class(config)
            return _prepare(model_class.from_pretrained(name, config=config, cache_dir=args.cache_dir))
    except Exception as error:
        raise UserError(f"--from_pretrained: no weights that fit at '{name}' ({first_line(error)})") from None


class CheckpointedAlbertLayer(AlbertLayer):
    """Keeps its input only and computes the rest again in the backward pass. transformers can do so for the other
    families, but not for ALBERT."""

    def forward(self, *args, **kwargs):
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(*args, **kwargs)
        return checkpoint(super().forward, *args, use_reentrant=False, **kwargs)


def enable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Trade time for memory: recompute activations instead of keeping them."""
    albert_layers = [module for module in model.modules() if type(module) is AlbertLayer]
    for layer in albert_layers:
        layer.__class__ = CheckpointedAlbertLayer  # not another `forward`, which DataParallel's replicas would share
    if not albert_layers:
        model.activation_checkpointing_enable()


@contextlib.contextmanager
def _seeded_by(run_id: str) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed("initial weights", run_id))
        yield


def _prepare(model: PreTrainedModel) -> PreTrainedModel:
    # transformers believes that a `forward` with **kwargs divides its loss by the number of items in the accumulated
    # batch, and does not divide by the accumulation steps itself. ALBERT's does not: loss and gradients came out
    # multiplied by gradient_accumulation_steps.
    model.accepts_loss_kwargs = False
    return model.to(torch.float32)
