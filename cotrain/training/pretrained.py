"""Loading of a finished checkpoint, to use its model.

Checkpoints may come from strangers: weights are read from safetensors only, and code in a checkpoint is never run.
"""

from pathlib import Path

from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerBase

from cotrain.common.errors import UserError, first_line
from cotrain.data.tokenizers import load_tokenizer
from cotrain.models.model import get_objective, read_config, set_objective
from cotrain.models.objectives import OBJECTIVES
from cotrain.training.checkpoints import list_checkpoints

ADAPTERS = "adapter_config.json"  # of peft
_REMEDY = "pass a folder with config.json, model.safetensors and a tokenizer, or an --output_dir with a checkpoint"


def find_checkpoint(folder: Path) -> Path:
    """Return a folder if it is a checkpoint, otherwise the newest complete checkpoint in it.

    :raises UserError: if there is none
    """
    for path in (folder, *list_checkpoints(folder)):
        has_files = any((path / name).is_file() for name in ("config.json", ADAPTERS))
        if has_files and (path / "tokenizer_config.json").is_file() and any(path.glob("*model.safetensors*")):
            return path
    fault = f"there is no complete checkpoint in '{folder}'" if folder.is_dir() else f"there is no folder '{folder}'"
    raise UserError(f"CHECKPOINT: {fault}; {_REMEDY}")


def load_checkpoint(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load model and tokenizer of a checkpoint.

    :raises UserError: if it is no checkpoint of a supported model
    """
    tokenizer = load_tokenizer(str(folder), flag="CHECKPOINT", remedy=_REMEDY)
    source, options = str(folder), {}
    if (folder / ADAPTERS).is_file():
        from peft import LoraConfig, PeftModel, get_peft_model_state_dict  # seconds

        try:
            adapters = LoraConfig.from_pretrained(folder)
            source, options = adapters.base_model_name_or_path, {"revision": adapters.revision, "dtype": "auto"}
            with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
                names = set(file.keys())
            if not (isinstance(adapters, LoraConfig) and isinstance(source, str)):
                raise ValueError("they are of another kind, or name no base model")
            if Path(source).is_absolute() and not Path(source).is_dir():
                raise ValueError(f"their base is not at '{source}': copy it there, or write its path in {ADAPTERS}")
        except Exception as error:
            raise UserError(f"CHECKPOINT: the adapters in '{folder}' cannot be read ({first_line(error)})") from None
    config = read_config(source, flag="CHECKPOINT", **options)
    set_objective(config, tokenizer)
    auto_class = AutoModelForCausalLM if OBJECTIVES[get_objective(config)].is_causal else AutoModelForMaskedLM
    try:
        model, info = auto_class.from_pretrained(
            source, config=config, trust_remote_code=False, use_safetensors=True, output_loading_info=True, **options
        )
        if options:
            model = PeftModel.from_pretrained(model, folder)
            if names != set(get_peft_model_state_dict(model)):
                raise ValueError("adapters are missing")
    except Exception as error:
        reason = first_line(error)
        raise UserError(f"CHECKPOINT: the weights of '{folder}' cannot be read ({reason}); {_REMEDY}") from None
    if info["missing_keys"]:
        missing = ", ".join(sorted(info["missing_keys"])[:3])
        raise UserError(f"CHECKPOINT: '{folder}' lacks weights of a language model ({missing}); {_REMEDY}")
    return (model if options else model.float()).eval(), tokenizer
