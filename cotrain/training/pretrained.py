"""Loading of a finished checkpoint, to use its model.

Checkpoints may come from strangers: weights are read from safetensors only, and code in a checkpoint is never run.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import transformers
from safetensors import safe_open
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cotrain.common.errors import UserError, first_line
from cotrain.common.hub_cache import find_downloads
from cotrain.common.run_folder import ADAPTERS, CHECKPOINT_REMEDY
from cotrain.data.tokenizers import load_tokenizer
from cotrain.models.config import find_model_classes
from cotrain.models.hub import ADAPTED, fetch_files
from cotrain.models.model import get_objective, read_config, set_objective
from cotrain.models.objectives import OBJECTIVES
from cotrain.models.pretrained import open_weights, set_generation

if TYPE_CHECKING:
    from peft import LoraConfig

MAX_FLOAT = 10**9  # parameters of a model without adapters that is computed in float32, whatever it was saved in
# Others of peft's name files, repositories or modules to import: `megatron_core`, `corda_config`, `auto_mapping`
_ADAPTER_FIELDS = (
    "base_model_name_or_path revision r lora_alpha lora_dropout target_modules exclude_modules fan_in_fan_out bias "
    "task_type modules_to_save rank_pattern alpha_pattern use_rslora use_dora layers_to_transform layers_pattern "
    "trainable_token_indices"
)


def find_base(folder: Path) -> tuple[str, "LoraConfig | None"]:
    """Return the base of the adapters in a checkpoint, and their configuration; without any, the checkpoint and None.

    :raises UserError: if there are adapters that cannot be read, or their base is not there
    """
    if not (folder / ADAPTERS).is_file():
        return str(folder), None
    from peft import LoraConfig  # seconds

    try:
        fields = json.loads((folder / ADAPTERS).read_text(encoding="utf-8"))
        if fields["peft_type"] != "LORA":
            raise ValueError("they are of another kind")
        adapters = LoraConfig(**{key: fields[key] for key in _ADAPTER_FIELDS.split() if key in fields})
        source = adapters.base_model_name_or_path
        with safe_open(folder / "adapter_model.safetensors", framework="pt"):
            pass
        if not isinstance(source, str):
            raise ValueError("they name no base model")
        if source.startswith(("/", ".", "~")) and not Path(source).is_dir():
            raise ValueError(f"their base is not at '{source}': copy it there, or write its path in {ADAPTERS}")
    except Exception as error:
        raise UserError(f"CHECKPOINT: the adapters in '{folder}' cannot be read ({first_line(error)})") from None
    return source, adapters


def load_checkpoint(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load model and tokenizer of a checkpoint.

    :raises UserError: if it is no checkpoint of a supported model
    """
    tokenizer = load_tokenizer(str(folder), flag="CHECKPOINT", remedy=CHECKPOINT_REMEDY)
    source, adapters = find_base(folder)
    is_here = Path(source).is_dir()
    options = {} if is_here or adapters is None else {"revision": adapters.revision, **find_downloads(source, None)}
    base = Path(source) if is_here else fetch_files(source, is_foreign=False, has_weights=True, **options)
    config = read_config(str(base), flag="CHECKPOINT")
    set_objective(config, tokenizer)
    classes = find_model_classes(config.model_type)
    model_class = getattr(transformers, classes["clm" if OBJECTIVES[get_objective(config)].is_causal else "mlm"])
    try:
        if adapters is not None and (base / ADAPTERS).is_file():
            raise ValueError(ADAPTED.format(source))
        model, info = open_weights(model_class, config, base, dtype="auto")
        set_generation(model, tokenizer)
        if adapters is not None:
            from peft import PeftModel, get_peft_model_state_dict  # seconds

            with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
                names = set(file.keys())
            try:
                model = PeftModel.from_pretrained(model, folder, config=adapters)
            except RuntimeError:  # torch names each weight
                raise ValueError(f"its adapters are of another base than '{source}'") from None
            if names != set(get_peft_model_state_dict(model)):
                raise ValueError("adapters are missing")
    except Exception as error:
        what = f"the weights of '{folder}' cannot be read ({first_line(error)})"
        raise UserError(f"CHECKPOINT: {what}; {CHECKPOINT_REMEDY}") from None
    if not all(parameter.isfinite().all() for parameter in model.parameters()):
        raise UserError(f"CHECKPOINT: weights of '{folder}' are NaN or Inf; {CHECKPOINT_REMEDY}")
    if info["missing_keys"]:
        missing = ", ".join(sorted(info["missing_keys"])[:3])
        raise UserError(f"CHECKPOINT: '{folder}' lacks weights of a language model ({missing}); {CHECKPOINT_REMEDY}")
    is_small = adapters is None and model.num_parameters() < MAX_FLOAT  # an export in bf16 may be large
    return (model.float() if is_small else model).eval(), tokenizer
