"""What is trained: tokenizer, configuration and model.

Trainer, monitor and evaluator build them here and nowhere else, or the states that they exchange would not fit.
"""

import hashlib
import json
from pathlib import Path

import torch
from transformers import (
    AlbertForPreTraining,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from arguments import ModelArguments
from errors import UserError

disable_progress_bar()  # of reading and writing weights, which takes a second

CONFIGS = Path(__file__).parent / "configs"

# model type -> the objective that its data must have been prepared for (see data.py), and the class to train
OBJECTIVES = {"albert": "mlm_sop", "bert": "mlm", "roberta": "mlm", "distilbert": "mlm", "gpt2": "clm"}
_MODEL_CLASSES = {"mlm_sop": AlbertForPreTraining, "mlm": AutoModelForMaskedLM, "clm": AutoModelForCausalLM}


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from anything that prints the same everywhere. Python's `hash` is salted in each process."""
    digest = hashlib.sha256("\n".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder.

    :raises UserError: if there is none, or it cannot be read
    """
    if not Path(path).is_dir():
        raise UserError(
            f"--tokenizer_path: there is no folder '{path}'; run ./tokenize_wikitext103.py, or copy the folder from "
            f"the machine that ran it"
        )
    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:
        raise UserError(
            f"--tokenizer_path: '{path}' holds no tokenizer that can be read ({_first_line(error)})"
        ) from None


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
            f"--model_name_or_path: no model configuration at '{name}' ({_first_line(error)}); pass a config.json, a "
            f"folder that has one, or one of {', '.join(sorted(p.stem for p in CONFIGS.glob('*.json')))}"
        ) from None
    if config.model_type not in OBJECTIVES:
        raise UserError(
            f"--model_name_or_path: '{name}' is a {config.model_type} model; supported are {', '.join(OBJECTIVES)}"
        )
    config.vocab_size = len(tokenizer)
    for token in ("pad", "bos", "eos"):
        setattr(config, f"{token}_token_id", getattr(tokenizer, f"{token}_token_id"))
    return config


def get_objective(config: PretrainedConfig) -> str:
    return OBJECTIVES[config.model_type]


def check_sequence_length(config: PretrainedConfig, length: int) -> None:
    """Raise UserError if the model has too few positions for sequences of this length."""
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", length)
    if config.model_type == "roberta":
        positions -= 2  # its first positions are reserved for padding
    if length > positions:
        raise UserError(
            f"the sequences have {length} tokens, but the model has {positions} positions: prepare the data with "
            f"--max_seq_length {positions}, or choose another --model_name_or_path"
        )


def build_model(config: PretrainedConfig, run_id: str) -> PreTrainedModel:
    """A model with initial weights that depend on the run's name alone, so that peers that start together start alike.

    Its loss is a mean over the micro-batch.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed("initial weights", run_id))
        model_class = _MODEL_CLASSES[get_objective(config)]
        build = model_class if model_class is AlbertForPreTraining else model_class.from_config
        model = build(config)
    # transformers believes that a `forward` with **kwargs divides its loss by the number of items in the accumulated
    # batch, and does not divide by the accumulation steps itself. ALBERT's does not: loss and gradients came out
    # multiplied by gradient_accumulation_steps.
    model.accepts_loss_kwargs = False
    return model.to(torch.float32)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
