"""Loading and checks of existing tokenizers."""

import json
from pathlib import Path

import transformers
from transformers import PreTrainedTokenizerBase
from transformers.utils import cached_file

from cotrain.common.errors import UserError, first_line
from cotrain.models.objectives import OBJECTIVES


def load_tokenizer(
    name: str,
    flag: str = "--tokenizer_path",
    remedy: str = "run ./tokenize_wikitext103.py, or copy the folder from the machine that ran it",
    use_hub: bool = False,
    cache_dir: str | None = None,
) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder, or raise UserError.

    :param flag: the flag that `name` comes from
    :param remedy: what to do about a wrong name
    :param use_hub: whether a name that is no folder is looked up on the Hub
    """
    is_folder = Path(name).is_dir()
    if not is_folder and (not use_hub or name.startswith((".", "/", "~"))):
        raise UserError(f"{flag}: there is no folder '{name}'; {remedy}")
    try:
        return _open_tokenizer(name, cache_dir, token=None if use_hub else False)
    except Exception as error:
        what = "holds no tokenizer that can be read" if is_folder else "is neither a folder here nor on the Hub"
        raise UserError(f"{flag}: '{name}' {what} ({first_line(error)}); {remedy}") from None


def _open_tokenizer(name: str, cache_dir: str | None, token: bool | None) -> PreTrainedTokenizerBase:
    """Load a tokenizer as AutoTokenizer does, which imports torch only to find the class: 2 seconds."""
    options = {"cache_dir": cache_dir, "token": token}
    path = cached_file(name, "tokenizer_config.json", **options, _raise_exceptions_for_missing_entries=False)
    config = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    tokenizer_class = getattr(transformers, config.get("tokenizer_class") or "", None)
    if not (isinstance(tokenizer_class, type) and issubclass(tokenizer_class, PreTrainedTokenizerBase)):
        if "auto_map" in config:
            raise ValueError("it has code with it, which is never run")
        tokenizer_class = transformers.AutoTokenizer
    # The default of trust_remote_code asks at the terminal whether the repository's code may run.
    return tokenizer_class.from_pretrained(name, **options, trust_remote_code=False)


def check_special_tokens(tokenizer: PreTrainedTokenizerBase, objective: str) -> None:
    """Raise UserError if the tokenizer lacks a special token that the objective needs."""
    required = ("eos",) if OBJECTIVES[objective].is_causal else ("cls", "sep", "pad", "mask")
    missing = [name for name in required if getattr(tokenizer, f"{name}_token") is None]
    if missing:
        raise UserError(
            f"--objective {objective} needs a tokenizer with the special tokens {', '.join(missing)}, which "
            f"{type(tokenizer).__name__} lacks; choose another --tokenizer"
        )
