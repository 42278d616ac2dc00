"""Builders of the configuration and the model.

Trainers, monitors and evaluators must all use these builders: peers can exchange training states only between equal
models.
"""

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch
import transformers
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.albert.modeling_albert import AlbertLayer
from transformers.utils.logging import disable_progress_bar

from cotrain.arguments import ModelArguments
from cotrain.common.errors import UserError, first_line
from cotrain.models.config import is_inline, read_fields
from cotrain.models.objectives import OBJECTIVE_OF_MODEL, OBJECTIVES

disable_progress_bar()  # reading and writing weights takes only a second


def derive_seed(*parts: object) -> int:
    """Derive a 63-bit seed from the printed form of some values. Python's `hash` is salted in each process."""
    digest = hashlib.sha256("\n".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def read_config(name: str, flag: str = "--model_name_or_path", cache_dir: str | None = None) -> PretrainedConfig:
    """Read a model configuration; arguments and errors as for `read_fields`."""
    fields = read_fields(name, flag, cache_dir)
    try:
        return AutoConfig.for_model(**fields)
    except Exception as error:
        raise UserError(f"{flag}: the model configuration is not valid: {' '.join(str(error).split())}") from None


def load_config(args: ModelArguments, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    """Load the model configuration and set the tokenizer's vocabulary size and special tokens in it.

    :raises UserError: if there is no configuration at `args.model_name_or_path`, the model family is not supported,
        pretrained weights have a smaller vocabulary than the tokenizer, or the weights do not fit into memory
    """
    config = read_config(args.model_name_or_path, cache_dir=args.cache_dir)
    if not args.from_pretrained:
        config.vocab_size = len(tokenizer)
    elif config.vocab_size < len(tokenizer):  # a larger one is common: models round it up
        name = args.model_name_or_path
        raise UserError(
            f"--from_pretrained: the model at '{name}' has a vocabulary of {config.vocab_size}, the tokenizer of "
            f"{len(tokenizer)}: prepare the data with the model's own, ./tokenize_wikitext103.py --tokenizer {name}"
        )
    for token in ("pad", "bos", "eos"):
        setattr(config, f"{token}_token_id", getattr(tokenizer, f"{token}_token_id"))
    check_size(config)
    return config


def check_size(config: PretrainedConfig) -> None:
    """Build the model without weights first: a stranger may have chosen it.

    :raises UserError: if it cannot be built, or the weights alone exceed this machine's memory
    """
    try:
        with torch.device("meta"):
            weights, memory = 4e-9 * _build(config).num_parameters(), 1e-9 * psutil.virtual_memory().total
    except Exception as error:
        raise UserError(f"--model_name_or_path: the model cannot be built: {error!r:.200}") from None
    if weights > memory:
        raise UserError(f"the weights of the model need {weights:.0f} GB; this machine has {memory:.0f} GB of memory")


def get_objective(config: PretrainedConfig) -> str:
    """Return the name of the model's objective, see cotrain/models/objectives.py."""
    return OBJECTIVE_OF_MODEL[config.model_type]


def get_model_class(config: PretrainedConfig) -> type:
    """Return the transformers class that trains the model and loads its checkpoints."""
    return getattr(transformers, OBJECTIVES[get_objective(config)].model_class)


def build_model(config: PretrainedConfig, run_id: str) -> PreTrainedModel:
    """Build a model with initial weights that are seeded by the run ID alone, hence equal on all peers.

    The loss of the model is a mean over the micro-batch.
    """
    with seeded_by(run_id):
        return initialize_model(config)


def initialize_model(config: PretrainedConfig) -> PreTrainedModel:
    return _build(config).to(torch.float32)


def _build(config: PretrainedConfig) -> PreTrainedModel:
    model_class = get_model_class(config)
    build = getattr(model_class, "from_config", model_class)  # Auto classes are built by `from_config`
    return build(config)


def load_pretrained(config: PretrainedConfig, args: ModelArguments) -> PreTrainedModel:
    """Build a model from pretrained weights. Layers without are initialized.

    :raises UserError: if there are no weights, or they do not fit the configuration
    """
    name = args.model_name_or_path
    if is_inline(name) or Path(name).is_file():
        raise UserError(
            f"--from_pretrained: '{name:.200}' is a configuration; pass a folder that also contains the weights"
        )
    try:
        model = get_model_class(config).from_pretrained(name, config=config, cache_dir=args.cache_dir)
        return model.to(torch.float32)
    except Exception as error:
        raise UserError(f"--from_pretrained: no weights that fit at '{name}' ({first_line(error)})") from None


class CheckpointedAlbertLayer(AlbertLayer):
    """AlbertLayer that stores only its input and recomputes the activations in the backward pass.

    transformers supports gradient checkpointing for the other families, but not for ALBERT.
    """

    def forward(self, *args, **kwargs):
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(*args, **kwargs)
        return checkpoint(super().forward, *args, use_reentrant=False, **kwargs)


def enable_gradient_checkpointing(model: torch.nn.Module) -> None:
    albert_layers = [module for module in model.modules() if type(module) is AlbertLayer]
    for layer in albert_layers:
        layer.__class__ = CheckpointedAlbertLayer  # DataParallel's replicas would share a replaced `forward`
    if not (albert_layers or hasattr(model, "activation_checkpointing_enable")):
        raise UserError("--gradient_checkpointing: this model does not support it; drop the flag")
    if not albert_layers:
        model.activation_checkpointing_enable()


@contextlib.contextmanager
def seeded_by(run_id: str) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed("initial weights", run_id))
        yield
