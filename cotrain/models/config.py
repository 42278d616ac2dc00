"""Reading of model configurations, which may come from a stranger: the organiser of a run, or a repository on the Hub.

transformers' configuration class of a model type keeps each field that it is given, and its models read some that the
class does not declare (`head_dim`). So each field is passed on, except those that load code, files or other models.
"""

import dataclasses
import inspect
import json
import math
import re
from pathlib import Path

from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
from transformers import CONFIG_MAPPING, PretrainedConfig, modeling_rope_utils
from transformers.models.auto import modeling_auto

from cotrain.common.errors import UserError, first_line
from cotrain.models.objectives import OBJECTIVES
from cotrain.settings import BASE_FOLDER

CONFIGS = Path(__file__).parents[1] / "configs"
# Bounds of what costs memory or time before the model is measured, see `build_without_weights`.
MAX_WHOLE_NUMBER = 2**24  # of a whole number, which code may count to; Llama 4 has 10 * 2**20 positions
MAX_LAYERS = 256
MAX_ITEMS = 512  # in a list or a nested object; DeBERTa's and Llama's have a handful, `layer_types` one for each layer
MAX_NESTING = 6  # of nesting: text_config, rope_parameters, the kind of layer, long_factor, number, and the whole
_HUB_NAME = re.compile(r"\w[\w.-]{,95}(/\w[\w.-]{,95})?", re.ASCII)
# No path, address or name of a repository, and no type that is built by timm; but OPT's "</s>", Nemotron-H's "M-M*-"
_STRING = re.compile(r"(?!timm_)(</(?=\w+>)|:(?= )|[^/\\:\x00-\x1f]){0,256}")
_LAYERS = re.compile(r"(\w+_)?layers?|num_hidden_groups|inner_group_num|attention_types")
# What each configuration has of its base class: methods, `attribute_map`, names of files, types of tensors, labels.
# And what names code, files or other models: remote code, kernels (which may be those of a repository), weights of
# other formats, arguments of timm.create_model, pretrained parts. A leading underscore stands for one of these, too.
_OF_THE_MODEL = {"model_type", "chunk_size_feed_forward", "is_encoder_decoder", "per_layer_config", "rope_scaling"}
_LEFT_OUT = set(dir(PretrainedConfig)) - _OF_THE_MODEL | {
    "auto_map", "attn_implementation", "experts_implementation", "quantization_config", "compression_config",
    "transformers_weights", "fusion_config", "distributed_config", "model_args", "task_specific_params",
    "backbone", "backbone_config", "backbone_kwargs", "use_pretrained_backbone",
}  # fmt: skip

Field = str | int | float | bool | list | dict | None


def is_published_name(name: str) -> bool:
    """Whether each peer can find a model by this name: built in, in the archive of the data, or on the Hub."""
    is_name = _HUB_NAME.fullmatch(name) is not None  # a configuration itself is too long for a file's name
    return is_name and (name == BASE_FOLDER or (CONFIGS / f"{name}.json").is_file() or not Path(name).exists())


def is_inline(name: str) -> bool:
    """Whether a value of --model_name_or_path is the configuration itself, as JSON."""
    return name.startswith("{")


def to_published_model(name: str) -> str:
    """Return a value of --model_name_or_path for the other peers: the name, or the configuration in a file as JSON."""
    if is_published_name(name):
        return name
    fields = read_fields(name)
    defaults = {field.name: field.default for field in dataclasses.fields(CONFIG_MAPPING[fields["model_type"]])}
    stated = {key: value for key, value in fields.items() if key not in defaults or value != defaults[key]}
    return json.dumps(stated, separators=(",", ":"), sort_keys=True)


def read_fields(
    name: str, flag: str = "--model_name_or_path", has_weights: bool = False, **hub_options
) -> dict[str, Field]:
    """Read and check the fields of a model configuration.

    :param name: JSON, path of a config.json or of a folder that has one, or a name in configs/ or on the Hub
    :param has_weights: whether the weights there are read, too
    :param hub_options: see `ModelOptions.hub_options`
    :raises UserError: if there is none, the model family is not supported, or a value is out of bounds
    """
    built_in = CONFIGS / f"{name}.json"
    file = built_in if not is_inline(name) and built_in.is_file() else Path(name)
    try:
        if is_inline(name) or file.is_file():
            text = name if is_inline(name) else file.read_text(encoding="utf-8-sig")
            fields = PretrainedConfig._decode_special_floats(json.loads(text))  # noqa: SLF001  no public name
        else:
            fields, _ = PretrainedConfig.get_config_dict(name, **hub_options)
        model_type = fields["model_type"]
    except Exception as error:
        if (refusal := find_refusal(error, name, hub_options)) is not None:
            raise UserError(f"{flag}: {refusal}") from None
        remedy = "pass a config.json, a folder that has one, or one of "
        remedy += ", ".join(sorted(path.stem for path in CONFIGS.glob("*.json")))
        is_here = is_inline(name) or file.exists()
        reason = first_line(error) if is_here else "the Hub does not answer, or has no model of that name"
        reason = "it has no config.json" if file.is_dir() and not (file / "config.json").is_file() else reason
        raise UserError(f"{flag}: no model configuration at '{name:.200}' ({reason}); {remedy}") from None
    if not (isinstance(model_type, str) and (classes := find_model_classes(model_type))):
        what = "those that transformers builds for causal or masked language modelling, such as llama or modernbert"
        raise UserError(f"{flag}: '{name:.200}' is a {model_type!s:.40} model; supported are {what}")
    if has_weights and fields.get("quantization_config"):  # it is left out, and with it the scales of the weights
        raise UserError(f"{flag}: the weights of '{name:.200}' are quantized: pass the model in bf16 or float32")
    part, text = CONFIG_MAPPING[model_type].sub_configs_defaults.get("text_config"), fields.get("text_config", {})
    if part is not None and isinstance(text, dict) and find_model_classes(part.model_type) == classes:
        model_type, fields = part.model_type, text  # as AutoModelForCausalLM does
    return {**_keep_fields(fields, CONFIG_MAPPING[model_type], flag), "model_type": model_type}


def find_refusal(error: BaseException | None, name: str, hub_options: dict[str, object]) -> str | None:
    """Return why the Hub refuses a repository, and the remedy, in one line; None if an error has another reason."""
    while error is not None and not isinstance(error, RepositoryNotFoundError | RevisionNotFoundError):
        error = error.__cause__ or error.__context__
    if isinstance(error, GatedRepoError):
        own = "" if hub_options.get("token") is None else f", and pass --model_name_or_path {name} yourself"
        what = f"'{name}' is for people who have accepted its licence"
        return f"{what}: accept its licence at https://huggingface.co/{name}, run `hf auth login`{own}"
    if isinstance(error, RevisionNotFoundError):
        return f"'{name}' has no revision {hub_options.get('revision')}: ask for its commit"
    if error is not None:
        return f"the Hub has no public repository '{name}': check the name, or run `hf auth login` for a private one"
    return None


def find_model_classes(model_type: str) -> dict[str, str]:
    """Return the objectives that a model type is trained with, its default first, and transformers' class for each."""
    tables = {name: objective.model_classes for name, objective in OBJECTIVES.items()}
    tables |= {name: getattr(modeling_auto, table) for name, table in tables.items() if isinstance(table, str)}
    return {name: table[model_type] for name, table in tables.items() if model_type in table}


def _keep_fields(fields: dict[str, object], config_class: type[PretrainedConfig], flag: str) -> dict[str, Field]:
    """Return the fields of a configuration that may be passed on to its class.

    :raises UserError: if one is out of bounds that the code of the model type names; others are left out
    """
    kept = {}
    files = [*Path(inspect.getfile(config_class)).parent.glob("*.py"), Path(inspect.getfile(modeling_rope_utils))]
    for key, value in fields.items():
        try:
            kept |= _check_value(key, {key: value})
        except ValueError:
            use = re.compile(rf"[.\"']{re.escape(key)}\b|^    {re.escape(key)}:", re.MULTILINE)
            if any(use.search(file.read_text(encoding="utf-8")) for file in files):
                reason = f"'{key}' is {value!r:.40} in the model configuration, which is out of bounds"
                raise UserError(f"{flag}: {reason}") from None
    return kept


def _check_value(key: str, value: object, depth: int = MAX_NESTING) -> Field:
    """Return the value of a field, without what is left out of nested objects; ValueError if it is out of bounds.

    Numbers may be negative, -1 often stands for none. Those of type float may be infinite: nothing counts to them.
    """
    if isinstance(value, list) and depth and len(value) <= MAX_ITEMS:
        return [_check_value(key, item, depth - 1) for item in value]
    if isinstance(value, dict) and depth and len(value) <= MAX_ITEMS and all(map(_STRING.fullmatch, value)):
        kept = (name for name in value if not (name.startswith("_") or name in _LEFT_OUT))
        return {name: _check_value(name, value[name], depth - 1) for name in kept}
    if isinstance(value, int | float):
        is_free = isinstance(value, float) or "theta" in key  # a base period of rotary embeddings
        is_bounded = abs(value) <= (
            MAX_LAYERS if _LAYERS.fullmatch(key) else math.inf if is_free else MAX_WHOLE_NUMBER
        )
    else:
        is_bounded = value is None or (isinstance(value, str) and _STRING.fullmatch(value))
    if not is_bounded:
        raise ValueError(key)
    return value
