"""Reading of model configurations, which may come from a stranger: the organiser of a run, or a repository on the Hub.

Only the fields that transformers' configuration class of a supported model declares are kept. Others can load foreign
code: `auto_map`, or `attn_implementation`, which transformers downloads as a kernel if it names a repository.
"""

import json
import math
import re
from pathlib import Path

from hivemind.utils import get_logger
from transformers import CONFIG_MAPPING, PretrainedConfig

from cotrain.common.errors import UserError, first_line
from cotrain.models.objectives import OBJECTIVE_OF_MODEL

logger = get_logger(__name__)

CONFIGS = Path(__file__).parents[1] / "configs"
MAX_NUMBER = 1_000_000  # a vocabulary
MAX_LAYERS = 256
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_LAYERS = re.compile(r"n_layers?|num_hidden_(layers|groups)|inner_group_num")
_BOOKKEEPING = {"architectures", "transformers_version", "torch_dtype", "dtype", "_name_or_path", "model_type"}

Field = str | int | float | bool | None


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


def read_fields(name: str, flag: str = "--model_name_or_path", cache_dir: str | None = None) -> dict[str, Field]:
    """Read and check the fields of a model configuration.

    :param name: JSON, path of a config.json or of a folder that has one, or a name in configs/ or on the Hub
    :raises UserError: if there is none, the model family is not supported, or a value is out of bounds
    """
    built_in = CONFIGS / f"{name}.json"
    try:
        if is_inline(name):
            fields = json.loads(name)
        elif (file := built_in if built_in.is_file() else Path(name)).is_file():
            fields = json.loads(file.read_text())
        else:
            fields, _ = PretrainedConfig.get_config_dict(name, cache_dir=cache_dir)
        model_type = fields["model_type"]
    except Exception as error:
        raise UserError(
            f"{flag}: no model configuration at '{name:.200}' ({first_line(error)}); pass a config.json, a "
            f"folder that has one, or one of {', '.join(sorted(p.stem for p in CONFIGS.glob('*.json')))}"
        ) from None
    if model_type not in OBJECTIVE_OF_MODEL:
        raise UserError(
            f"{flag}: '{name:.200}' is a {model_type!s:.40} model; supported are {', '.join(OBJECTIVE_OF_MODEL)}"
        )
    known = CONFIG_MAPPING[model_type].__annotations__
    if ignored := sorted(str(key) for key in fields if key not in _BOOKKEEPING | known.keys()):
        logger.warning(f"{flag}: ignoring {', '.join(ignored):.200} in the model configuration")
    kept = {key: value for key, value in fields.items() if key in known}
    for key, value in kept.items():
        is_bounded = 0 <= value <= MAX_NUMBER if isinstance(value, bool | int | float) else value is None
        if not (is_bounded or (isinstance(value, str) and re.fullmatch(r"\w{1,40}", value))):
            raise UserError(f"{flag}: '{key}' is {value!r:.40} in the model configuration, which is out of bounds")
    layers = math.prod(value for key, value in kept.items() if _LAYERS.fullmatch(key) and isinstance(value, int))
    if layers > MAX_LAYERS:
        raise UserError(f"{flag}: the model configuration has {layers} layers; at most {MAX_LAYERS} are allowed")
    return {"model_type": model_type, **kept}
