"""Fine-tuning with adapters (LoRA, Hu et al., 2021, https://arxiv.org/abs/2106.09685) by peft.

The parameters of the base model are frozen: they keep their precision, and peers do not exchange them.
"""

import logging
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cotrain.common.errors import UserError, first_line
from cotrain.models.model import get_objective
from cotrain.models.objectives import OBJECTIVES
from cotrain.options import ModelOptions

logger = logging.getLogger(__name__)
UNTRAINED = 0.1  # of the median length of the rows of an embedding; Llama 3 has rows of 1e-23 for unused tokens


def find_untrained(base: PreTrainedModel, tokens: dict[str, int]) -> list[str]:
    """Return the tokens (name -> id) whose rows of the embedding are about zero, or equal to another row."""
    weight = base.get_input_embeddings().weight.detach()
    least = UNTRAINED * weight[:: max(1, len(weight) // 1000)].float().norm(dim=1).median()
    found = []
    for name, number in tokens.items():
        row = weight[number]
        near = (weight[:, :8] == row[:8]).all(dim=1).nonzero().flatten()  # of all rows a first, fast look
        if row.float().norm() <= least or (weight[near] == row).all(dim=1).sum() > 1:
            found.append(name)
    return found


def find_written(tokenizer: Any, but: list[str]) -> dict[str, int]:
    """Return the added tokens, name -> id, `but` some, that the chat template writes around question and answer."""
    if tokenizer.chat_template is None:
        return {}
    turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    encoded: Any = tokenizer.apply_chat_template(turns)
    ids = set(encoded["input_ids"])
    return {name: number for name, number in tokenizer.get_added_vocab().items() if number in ids and name not in but}


def add_adapters(base: PreTrainedModel, args: ModelOptions, tokenizer: PreTrainedTokenizerBase) -> PeftModel:
    """Freeze a model, and add adapters in float32 as --lora_rank and its like say. Name the rows that need training.

    :param base: with its weights; or on the meta device for a peer that computes nothing, whose adapters are zeros
    :raises UserError: if no layer matches --lora_targets, or the tokenizer lacks one of --lora_tokens
    """
    name, targets = args.model_name_or_path, [target.strip() for target in args.lora_targets.split(",")]
    layers = [f".{layer}" for layer, _ in base.named_modules()]
    for target in targets if targets != ["all-linear"] else ():
        if not any(layer.endswith(f".{target}") for layer in layers):
            raise UserError(f"--lora_targets: the model has no layer '{target}'; pass all-linear, or names of layers")
    tokens = [token for token in args.lora_tokens.split(",") if token]
    if missing := [token for token in tokens if token not in tokenizer.get_vocab()]:
        raise UserError(f"--lora_tokens: the tokenizer has no token '{missing[0]}'")
    if untrained := [] if base.device.type == "meta" else find_untrained(base, find_written(tokenizer, tokens)):
        what = f"The base was never trained on {','.join(untrained)}, which the chat template writes"
        remedy = f"the organiser can state --lora_tokens '{','.join([*tokens, *untrained])}'"
        logger.warning(f"{what}, and adapters leave it so: {remedy}")
    tables: list[Any] = [base.get_input_embeddings()]
    if not getattr(base.config.get_text_config(), "tie_word_embeddings", True):  # peft follows the tie
        tables.append(base.get_output_embeddings())
    numbers: Any = [tokenizer.convert_tokens_to_ids(token) for token in tokens]
    rows = {name: numbers for name, layer in base.named_modules() if layer in tables}
    rank = args.lora_rank or 0  # a caller has one
    options = LoraConfig(
        trainable_token_indices=rows if tokens else None,
        r=rank,
        lora_alpha=args.lora_alpha or 2 * rank,  # pyright: ignore[reportArgumentType]  peft takes any number
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        task_type="CAUSAL_LM" if OBJECTIVES[get_objective(base.config)].is_causal else None,
    )
    try:
        model = get_peft_model(base, options)
    except ValueError as error:
        raise UserError(f"--lora_targets {args.lora_targets}: {first_line(error):.200}") from None
    # What a checkpoint of the adapters names: the way back to the base
    options.base_model_name_or_path = str(Path(name).resolve()) if Path(name).is_dir() else name
    options.revision = args.model_revision
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and parameter.is_meta:
                setattr(module, key, torch.nn.Parameter(torch.zeros_like(parameter, device="cpu")))
    return model
