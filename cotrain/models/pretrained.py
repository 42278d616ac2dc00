"""Pretrained weights at --model_name_or_path, a folder or a repository of the Hugging Face Hub."""

import contextlib
import hashlib
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import (
    BitsAndBytesConfig,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file

from cotrain.common.errors import UserError, first_line
from cotrain.common.run_folder import ADAPTERS
from cotrain.common.stand_ins import find_stand_in
from cotrain.common.weights import weight_files
from cotrain.models.config import is_inline
from cotrain.models.device import supports_bf16
from cotrain.models.hub import ADAPTED, build_hub_options, fetch_files
from cotrain.models.model import get_model_class, get_objective, set_special_tokens, try_model
from cotrain.models.objectives import OBJECTIVES
from cotrain.options import Adopted, ModelOptions

SAMPLED = 1024  # elements at the beginning of each tensor that the digest covers


def load_pretrained(
    config: PretrainedConfig, args: ModelOptions, adopted: Adopted, device: torch.device | None = None
) -> PreTrainedModel:
    """Build a model from pretrained weights. Layers without are initialized.

    With --lora_rank it has the precision of the weights, on `device` if that is CUDA, and on a CPU their pages of the
    file. Otherwise it is in float32.

    :raises UserError: if there are none, they do not fit the configuration, they are adapters, or a
      run chose more than MAX_DOWNLOAD_BYTES of them
    """
    name = args.model_name_or_path
    if is_inline(name) or Path(name).is_file():
        remedy = "pass a folder that also contains the weights"
        raise UserError(f"--from_pretrained: '{name:.200}' is a configuration; {remedy}")
    is_foreign, hub_options = "model_name_or_path" in adopted.names, build_hub_options(args, adopted)
    folder = Path(name) if Path(name).is_dir() else fetch_files(name, is_foreign, True, **hub_options)
    if (folder / ADAPTERS).is_file():  # peft would follow the name of their base
        raise UserError(ADAPTED.format(name))
    options = {"dtype": "auto"} | (quantize() if args.load_in_4bit else {})
    if args.lora_rank is not None and device is not None and device.type == "cuda":  # else the CPU tries 16 GB of 8B
        options["device_map"] = {"": device}
    model_class = get_model_class(config)
    try:
        if is_foreign or args.lora_rank is not None or (folder / weight_files(folder)[0]).is_file():
            model, info = open_weights(model_class, config, folder, **options)
        else:  # files of torch, which the user has chosen
            options |= hub_options
            model, info = model_class.from_pretrained(name, config=config, output_loading_info=True, **options)
    except Exception as error:
        raise UserError(f"--from_pretrained: no weights that fit at '{name}' ({first_line(error)})") from None
    if args.lora_rank is not None and info["missing_keys"] and OBJECTIVES[get_objective(config)].is_causal:
        missing = ", ".join(sorted(info["missing_keys"])[:3])
        raise UserError(f"--lora_rank: the model at '{name}' lacks weights ({missing}): choose one with its head")
    return try_model(model if args.lora_rank is not None else model.to(torch.float32))


def open_weights(
    model_class: type, config: PretrainedConfig, folder: Path, **options: object
) -> tuple[PreTrainedModel, dict[str, object]]:
    """Build a model from the safetensors files in a folder; return it, and transformers' report of the loading.

    transformers gets tensors instead of the folder, in which it would follow adapters to a base anywhere.

    :raises UserError: if an index names files elsewhere
    :raises OSError: if a file is missing
    :raises ValueError: if a file is a pointer, or a page that a download saved
    """
    for file in weight_files(folder):
        if stand_in := find_stand_in(folder / file):
            raise ValueError(f"{file} is {': '.join(stand_in)}")
    tensors = {key: value for file in weight_files(folder) for key, value in load_file(folder / file).items()}
    if (folder / "generation_config.json").is_file():
        options["generation_config"] = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model_class.from_pretrained(None, config=config, state_dict=tensors, output_loading_info=True, **options)


def set_generation(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Let a model stop at the tokenizer's end-of-text token, which it was taught: that of its base may be another.

    Configuration and generation_config then agree with the tokenizer. Several tokens of a base stay if this is one.
    """
    for part in (model.config, model.config.get_text_config()):  # often the same
        set_special_tokens(part, tokenizer)
    if model.can_generate():
        options = model.generation_config
        ends = options.eos_token_id if isinstance(options.eos_token_id, list) else []
        set_special_tokens(options, tokenizer)
        if options.eos_token_id in ends:
            options.eos_token_id = ends
        with contextlib.suppress(ValueError):
            return options.validate(strict=True)
        options.do_sample = True  # Llama 2 states a temperature without it, which transformers loads and does not save


def quantize() -> dict[str, object]:
    """Return the options for a base in 4 bits (NF4 of QLoRA, https://arxiv.org/abs/2305.14314), on the first GPU."""
    if not torch.cuda.is_available():
        raise UserError("--load_in_4bit needs a GPU that bitsandbytes supports: drop the flag")
    if torch.cuda.device_count() > 1:
        raise UserError("--load_in_4bit uses one GPU: set CUDA_VISIBLE_DEVICES=0")
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if supports_bf16(torch.device("cuda", 0)) else torch.float16,
    )
    return {"quantization_config": config, "device_map": {"": 0}}


def digest_weights(args: ModelOptions, adopted: Adopted) -> str:
    """Return digits that tell other pretrained weights: of names, types, shapes and first elements of all tensors.

    Other files with the same tensors have the same digits. An 8-billion base takes seconds, since little is read.

    :raises UserError: if there are none in safetensors
    """
    name, options = args.model_name_or_path, build_hub_options(args, adopted)
    config = Path(name, "config.json") if Path(name).is_dir() else Path(cached_file(name, "config.json", **options))
    tensors = {}
    for path in filter(Path.is_file, map(config.with_name, weight_files(config.parent))):  # other precisions beside
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  it is no dictionary
                part = file.get_slice(key)
                sample = file.get_tensor(key).flatten()[:SAMPLED].view(torch.uint8).numpy().tobytes()
                tensors[key] = f"{part.get_dtype()} {part.get_shape()} {hashlib.sha256(sample).hexdigest()}"
    if not tensors:
        raise UserError(f"--lora_rank: '{name}' has no model.safetensors, or the parts that its index names")
    return hashlib.sha256(repr(sorted(tensors.items())).encode()).hexdigest()[:16]
