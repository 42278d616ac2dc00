"""Reading of model configurations, which may come from a stranger: the organiser of a run, or a repository on the Hub.

Only the fields that transformers' configuration class of a model type declares are kept. Others can load foreign code:
`auto_map`, or `attn_implementation`, which transformers downloads as a kernel if it names a repository.
"""

import json
import re
from pathlib import Path

from hivemind.utils import get_logger
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto import modeling_auto

from cotrain.common.errors import UserError, first_line
from cotrain.models.objectives import OBJECTIVES

logger = get_logger(__name__)

CONFIGS = Path(__file__).parents[1] / "configs"
MAX_NUMBER = 1_000_000  # a vocabulary, or the positions of Qwen3
MAX_THETA = 1e9  # base period of rotary embeddings; a configuration may write it without a decimal point
MAX_LAYERS = 256
MAX_ITEMS = 512  # in a list or a nested object; DeBERTa's and Llama's have a handful, `layer_types` one for each layer
MAX_DEPTH = 2  # of nesting: ModernBERT's rope_parameters have an object for each kind of layer
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_STRING = re.compile(r"[\w|]{1,40}", re.ASCII)  # DeBERTa's pos_att_type is "p2c|c2p"
_LAYERS = re.compile(r"(\w+_)?layers?|num_hidden_groups|inner_group_num")
_BOOKKEEPING = {"architectures", "transformers_version", "torch_dtype", "dtype", "_name_or_path", "model_type"}
# Read by transformers' classes without being declared: rotary embeddings in the format before version 5, ModernBERT's
# and Gemma's order of layers, and DeBERTa-v3's attention. Sizes and names of functions; none loads code.
_UNDECLARED = {
    "rope_theta", "rope_scaling", "rope_local_base_freq", "global_rope_theta", "local_rope_theta", "rotary_pct",
    "rotary_emb_base", "partial_rotary_factor", "global_attn_every_n_layers", "sliding_window_pattern",
    "position_buckets", "norm_rel_ebd", "share_att_key", "conv_kernel_size", "conv_act", "conv_groups",
}  # fmt: skip

Field = str | int | float | bool | list | dict | None


def is_published_name(name: str) -> bool:
    """Whether each peer can find a model by this name: a built-in one, or one on the Hub, instead of a local path."""
    is_built_in = (CONFIGS / f"{name}.json").is_file()
    return bool(_HUB_NAME.fullmatch(name)) and (is_built_in or not Path(name).exists())


def is_inline(name: str) -> bool:
    """Whether a value of --model_name_or_path is the configuration itself, as JSON."""
    return name.startswith("{")


def to_published_model(name: str) -> str:
    """Return a value of --model_name_or_path for the other peers: the name, or the configuration in a file as JSON."""
    return name if is_published_name(name) else json.dumps(read_fields(name), separators=(",", ":"), sort_keys=True)


def read_fields(name: str, flag: str = "--model_name_or_path", **hub_options) -> dict[str, Field]:
    """Read and check the fields of a model configuration.

    :param name: JSON, path of a config.json or of a folder that has one, or a name in configs/ or on the Hub
    :param hub_options: see `ModelArguments.hub_options`
    :raises UserError: if there is none, the model family is not supported, or a value is out of bounds
    """
    built_in = CONFIGS / f"{name}.json"
    try:
        if is_inline(name):
            fields = json.loads(name)
        elif (file := built_in if built_in.is_file() else Path(name)).is_file():
            fields = json.loads(file.read_text(encoding="utf-8"))
        else:
            fields, _ = PretrainedConfig.get_config_dict(name, **hub_options)
        model_type = fields["model_type"]
    except Exception as error:
        raise UserError(
            f"{flag}: no model configuration at '{name:.200}' ({first_line(error)}); pass a config.json, a "
            f"folder that has one, or one of {', '.join(sorted(p.stem for p in CONFIGS.glob('*.json')))}"
        ) from None
    if not (isinstance(model_type, str) and find_model_classes(model_type)):
        raise UserError(
            f"{flag}: '{name:.200}' is a {model_type!s:.40} model; supported are those that transformers builds for "
            "causal or masked language modelling, such as llama or modernbert"
        )
    return {"model_type": model_type, **_keep_fields(fields, CONFIG_MAPPING[model_type], flag)}


def find_model_classes(model_type: str) -> dict[str, str]:
    """Return the objectives that a model type is trained with, its default first, and transformers' class for each."""
    tables = {name: objective.model_classes for name, objective in OBJECTIVES.items()}
    tables |= {name: getattr(modeling_auto, table) for name, table in tables.items() if isinstance(table, str)}
    return {name: table[model_type] for name, table in tables.items() if model_type in table}


def _keep_fields(fields: dict[str, object], config_class: type[PretrainedConfig], flag: str) -> dict[str, Field]:
    """Return the fields that a configuration class reads, if they are within bounds."""
    known, parts = config_class.__annotations__.keys() | _UNDECLARED, getattr(config_class, "sub_configs", {})
    if ignored := sorted(str(key) for key in fields if key not in _BOOKKEEPING | known):
        logger.warning(f"{flag}: ignoring {', '.join(ignored):.200} in the model configuration")
    kept = {key: value for key, value in fields.items() if key in known}
    for key, value in kept.items():
        if key in parts and isinstance(value, dict):
            kept[key] = _keep_fields(value, parts[key], flag)
        elif not _is_bounded(key, value):
            raise UserError(f"{flag}: '{key}' is {value!r:.40} in the model configuration, which is out of bounds")
    return kept


def _is_bounded(key: str, value: object, depth: int = MAX_DEPTH) -> bool:
    """Whether the value of a field has a plausible size. Numbers may be negative: -1 often stands for none."""
    if isinstance(value, str):
        return bool(_STRING.fullmatch(value))
    if isinstance(value, int | float):
        limit = MAX_LAYERS if _LAYERS.fullmatch(key) else MAX_THETA if "theta" in key else MAX_NUMBER
        return abs(value) <= limit
    if isinstance(value, list | dict) and len(value) <= MAX_ITEMS and depth:
        items = value.items() if isinstance(value, dict) else ((key, item) for item in value)
        return all(_STRING.fullmatch(name) and _is_bounded(name, item, depth - 1) for name, item in items)
    return value is None
