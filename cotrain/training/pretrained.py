"""Loading of a finished checkpoint, to use its model.

Checkpoints may come from strangers: weights are read from safetensors only, and code in a checkpoint is never run.
"""

from pathlib import Path

from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerBase

from cotrain.common.errors import UserError, first_line
from cotrain.data.tokenizers import load_tokenizer
from cotrain.models.model import get_objective, read_config, set_objective
from cotrain.models.objectives import OBJECTIVES
from cotrain.training.checkpoints import list_checkpoints

_REMEDY = "pass a folder with config.json, model.safetensors and a tokenizer, or an --output_dir with a checkpoint"


def find_checkpoint(folder: Path) -> Path:
    """Return a folder if it is a checkpoint, otherwise the newest complete checkpoint in it.

    :raises UserError: if there is none
    """
    for path in (folder, *list_checkpoints(folder)):
        has_files = all((path / name).is_file() for name in ("config.json", "tokenizer_config.json"))
        if has_files and any(path.glob("model.safetensors*")):
            return path
    fault = f"there is no complete checkpoint in '{folder}'" if folder.is_dir() else f"there is no folder '{folder}'"
    raise UserError(f"CHECKPOINT: {fault}; {_REMEDY}")


def load_checkpoint(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load model and tokenizer of a checkpoint.

    :raises UserError: if it is no checkpoint of a supported model
    """
    config = read_config(str(folder), flag="CHECKPOINT")
    tokenizer = load_tokenizer(str(folder), flag="CHECKPOINT", remedy=_REMEDY)
    set_objective(config, tokenizer)
    auto_class = AutoModelForCausalLM if OBJECTIVES[get_objective(config)].is_causal else AutoModelForMaskedLM
    try:
        model, info = auto_class.from_pretrained(
            folder, config=config, trust_remote_code=False, use_safetensors=True, output_loading_info=True
        )
    except Exception as error:
        reason = first_line(error)
        raise UserError(f"CHECKPOINT: the weights of '{folder}' cannot be read ({reason}); {_REMEDY}") from None
    if info["missing_keys"]:
        missing = ", ".join(sorted(info["missing_keys"])[:3])
        raise UserError(f"CHECKPOINT: '{folder}' lacks weights of a language model ({missing}); {_REMEDY}")
    return model.float().eval(), tokenizer
