"""Fine-tuning with adapters (LoRA, Hu et al., 2021, https://arxiv.org/abs/2106.09685) by peft.

The parameters of the base model are frozen: they keep their precision, and peers do not exchange them.
"""

from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from cotrain.arguments import ModelArguments
from cotrain.common.errors import UserError, first_line
from cotrain.models.model import get_objective
from cotrain.models.objectives import OBJECTIVES


def add_adapters(base: PreTrainedModel, args: ModelArguments) -> PeftModel:
    """Freeze a model, and add adapters in float32 as --lora_rank and its like say.

    :param base: with its weights; or on the meta device for a peer that computes nothing, whose adapters are zeros
    :raises UserError: if no layer matches --lora_targets
    """
    name, targets = args.model_name_or_path, [target.strip() for target in args.lora_targets.split(",")]
    layers = [f".{layer}" for layer, _ in base.named_modules()]
    for target in targets if targets != ["all-linear"] else ():
        if not any(layer.endswith(f".{target}") for layer in layers):
            raise UserError(f"--lora_targets: the model has no layer '{target}'; pass all-linear, or names of layers")
    options = LoraConfig(
        r=args.lora_rank,
        lora_alpha=args.lora_alpha or 2 * args.lora_rank,
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
