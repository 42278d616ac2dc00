"""Files of a model's repository on the Hugging Face Hub: of one commit, listed with their sizes, then downloaded."""

import logging
import re
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache

from cotrain.common.errors import TemporaryError, UserError, first_line
from cotrain.common.hosts import MAX_DOWNLOAD_BYTES
from cotrain.common.hub_cache import PROBE_SECONDS, find_downloads
from cotrain.common.run_folder import ADAPTERS
from cotrain.models.config import CONFIGS, find_refusal, is_inline
from cotrain.options import Adopted, ModelOptions

logger = logging.getLogger(__name__)

ADAPTED = "--model_name_or_path: '{}' has adapters: merge them with ./export_model.py, or remove them"
MAX_FILE_BYTES = 10e6  # of a file beside the weights; the index of 400 billion parameters has 0.2 MB
_WEIGHTS = re.compile(r"model(-[0-9]{5}-of-[0-9]{5})?\.safetensors")
_BESIDE = {"config.json", "generation_config.json", "model.safetensors.index.json"}


def build_hub_options(args: ModelOptions, adopted: Adopted) -> dict[str, Any]:
    """Return options of transformers for files on the Hub, with less trust in a repository that the run has chosen."""
    own: dict[str, Any] = {"cache_dir": args.cache_dir, "trust_remote_code": False}
    name = args.model_name_or_path
    is_here = is_inline(name) or Path(name).exists()
    if not (is_here or (not args.from_pretrained and (CONFIGS / f"{name}.json").is_file())):
        own |= find_downloads(name, args.cache_dir)
    own |= {} if args.model_revision is None else {"revision": args.model_revision}
    return own | ({"token": False, "use_safetensors": True} if "model_name_or_path" in adopted.names else {})


def fetch_files(name: str, is_foreign: bool, has_weights: bool, **hub_options: Any) -> Path:
    """Download a model's configuration and its weights in safetensors, and return their folder.

    Without the Hub, it is the folder in the cache.

    :param is_foreign: whether the run has chosen it, which bounds what is downloaded
    :param hub_options: see `build_hub_options`
    :raises UserError: if it is not available, has adapters, or is larger than MAX_DOWNLOAD_BYTES
    """
    options: dict[str, Any] = {key: hub_options.get(key) for key in ("revision", "token")}
    cache: dict[str, Any] = {"cache_dir": hub_options.get("cache_dir")}
    timeout = PROBE_SECONDS if hub_options.get("local_files_only") else 30.0
    try:
        info = HfApi().model_info(name, **options, files_metadata=True, timeout=timeout)
    except Exception as error:
        found = try_to_load_from_cache(name, "config.json", revision=options["revision"], **cache)
        if isinstance(found, str):  # nothing is downloaded
            return Path(found).parent
        if refusal := find_refusal(error, name, hub_options):
            raise UserError(f"--model_name_or_path: {refusal}") from None
        what = f"the Hub does not tell the files of '{name}' and their sizes ({first_line(error)})"
        raise TemporaryError(f"--model_name_or_path: {what}; try again later") from None
    sizes = {file.rfilename: file.size for file in info.siblings or []}
    if has_weights and ADAPTERS in sizes:
        raise UserError(ADAPTED.format(name))
    parts = [file for file in sizes if has_weights and _WEIGHTS.fullmatch(file)]
    beside = [file for file in sizes if file in _BESIDE]
    weights = [x.size for x in info.siblings or [] if has_weights and x.rfilename.endswith(".safetensors")]
    total = sum(size or 0 for size in weights)
    if has_weights:
        logger.info(f"The weights of {name} have {total / 1e9:.1f} GB; what is not in the cache is downloaded")
    if is_foreign and None in [*weights, *map(sizes.get, beside)]:
        raise UserError(f"the Hub does not tell all sizes of files of '{name}': pass --model_name_or_path yourself")
    if is_foreign and (total > MAX_DOWNLOAD_BYTES or any((sizes[file] or 0) > MAX_FILE_BYTES for file in beside)):
        raise UserError(f"the weights of '{name}' have {total / 1e9:.0f} GB: pass --model_name_or_path yourself")
    needed = beside + (["model.safetensors"] if "model.safetensors" in parts else parts)
    options |= {"revision": info.sha, **cache}
    try:
        paths = [Path(hf_hub_download(name, file, **options)) for file in needed]
    except Exception as error:
        raise TemporaryError(f"--model_name_or_path: '{name}' cannot be downloaded ({first_line(error)})") from None
    if not beside:
        raise UserError(f"--model_name_or_path: '{name}' has no config.json")
    return paths[0].parent
