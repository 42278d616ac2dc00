"""Loading and checks of existing tokenizers."""

import json
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer
from tokenizers.normalizers import BertNormalizer
from transformers import PreTrainedTokenizerBase
from transformers.utils import cached_file

from cotrain.common.errors import UserError
from cotrain.common.hub_cache import find_downloads
from cotrain.common.stand_ins import find_stand_in
from cotrain.models.objectives import OBJECTIVES

# As published tokenizers write them
_SPECIAL_TOKENS = {
    "cls_token": ("[CLS]", "<s>"), "sep_token": ("[SEP]", "</s>"), "mask_token": ("[MASK]", "<mask>"),
    "unk_token": ("[UNK]", "<unk>"), "pad_token": ("[PAD]", "<pad>", "<|pad|>"), "bos_token": ("<s>", "<bos>"),
    "eos_token": ("</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>"),
}  # fmt: skip

# What is read of a tokenizer in a folder that a run may have brought: flags, numbers and tokens, no name of a file.
MAX_NUMBER = 10_000
_OPTIONS = (
    "add_bos_token add_eos_token add_prefix_space added_tokens_decoder additional_special_tokens chat_control_tokens "
    "chat_template clean_text clean_up_tokenization_spaces do_basic_tokenize do_clean_text do_lower_case do_lowercase "
    "do_lowercase_and_remove_accent do_subword_tokenize do_upper_case do_word_tokenize errors extra_ids "
    "extra_special_tokens id2lang keep_accents lang2id langs language_codes legacy legacy_behaviour model_input_names "
    "model_max_length never_split normalization normalize num_madeup_words objective offset padding_side remove_space "
    "source_lang spaces_between_special_tokens split_by_punct split_special_tokens src_lang strip_accents "
    "subword_tokenizer_type target_lang tgt_lang tokenize_chinese_chars trim_offsets truncation_side unk_id "
    "use_default_system_prompt word_tokenizer_type wordpieces_prefix"
)
_FILES = {
    "tokenizer_file": "tokenizer.json", "added_tokens_file": "added_tokens.json",
    "chat_template_file": "chat_template.jinja",
}  # fmt: skip


class FolderError(ValueError):
    """What is wrong with a tokenizer's folder, in words for its user."""


def load_tokenizer(
    name: str,
    flag: str = "--tokenizer_path",
    remedy: str = "pass --dataset_url, run ./tokenize_wikitext103.py, or copy the folder from the machine that ran it",
    use_hub: bool = False,
    cache_dir: str | None = None,
) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder, or raise UserError.

    :param flag: the flag that `name` comes from
    :param remedy: what to do about a wrong name
    :param use_hub: whether the user has chosen it for the preparation: transformers reads it as it is, and a name that
        is no folder is looked up on the Hub. Otherwise a stranger may have written the folder, see `_read_folder`
    """
    is_folder = Path(name).is_dir()
    if not is_folder and (not use_hub or name.startswith((".", "/", "~"))):
        raise UserError(f"{flag}: there is no folder '{name}'; {remedy}")
    options: dict[str, Any] = {"token": None if use_hub else False} | (
        {} if is_folder else find_downloads(name, cache_dir)
    )
    try:
        for file in Path(name).glob("*"):
            if file.is_file() and (stand_in := find_stand_in(file)):
                raise FolderError(f"{file.name} is {': '.join(stand_in)}")
        path = cached_file(name, "tokenizer_config.json", **options, _raise_exceptions_for_missing_entries=False)
        config = json.loads(Path(path).read_text(encoding="utf-8")) if path else _guess_config(Path(name))
        # AutoTokenizer would import torch, only to find the class: 2 seconds.
        tokenizer_class = getattr(transformers, config.pop("tokenizer_class", None) or "", None)
        if not (isinstance(tokenizer_class, type) and issubclass(tokenizer_class, PreTrainedTokenizerBase)):
            if "auto_map" in config:
                raise FolderError("it has code with it, which is never run")
            tokenizer_class = transformers.AutoTokenizer
        if use_hub:
            # The default of trust_remote_code asks at the terminal whether the repository's code may run.
            options |= {**({} if path else config), "trust_remote_code": False}
            tokenizer = tokenizer_class.from_pretrained(name, **options)
        else:
            tokenizer = _read_folder(Path(name), tokenizer_class, config)
        if is_folder:
            _check_files(Path(name), tokenizer.vocab_files_names)
        return tokenizer
    except Exception as error:
        from cotrain.models.config import find_refusal  # seconds, for torch

        what = "holds no tokenizer that can be read"
        if isinstance(error, FolderError):
            reason = str(error)
        elif is_folder:
            reason = _find_fault(Path(name))
        else:
            what = "is neither a folder here nor on the Hub"
            reason = find_refusal(error, name, options) or "the Hub does not answer, or has no tokenizer of that name"
        raise UserError(f"{flag}: '{name}' {what} ({reason}); {remedy}") from None


def _check_files(folder: Path, names: dict[str, str]) -> None:
    """Raise ValueError if there is no vocabulary: transformers would make a tokenizer of the special tokens alone.

    :param names: `vocab_files_names` of the tokenizer's class; empty for ByT5, which has no vocabulary
    """
    found = {file.name for file in folder.glob("*") if file.is_file()}
    known = {"tokenizer.json", "tekken.json", *names.values()}
    if names and not found & known and not any(name.endswith(".model") for name in found):
        raise ValueError("no vocabulary")


def _find_fault(folder: Path) -> str:
    """Name the files of a folder from which no tokenizer can be read: the errors of the libraries do not."""
    for file in sorted(folder.glob("*.json")):
        if file.is_dir():
            return f"{file.name} is a folder, not a file"
        try:
            is_complete = isinstance(json.loads(file.read_text(encoding="utf-8")), dict)
        except (OSError, ValueError):
            is_complete = False
        if not is_complete:
            return f"{file.name} is damaged or incomplete"
    vocabularies = {"tokenizer.json", "vocab.json", "vocab.txt", "merges.txt"}
    names = sorted(file.name for file in folder.glob("*") if file.name in vocabularies or file.suffix == ".model")
    if not names:
        return "it has no file with a vocabulary, such as tokenizer.json or spiece.model"
    return f"no tokenizer can be made of {' and '.join(names)}: damaged, of another class, or a file is missing"


def _read_folder(folder: Path, tokenizer_class: type, config: dict[str, object]) -> PreTrainedTokenizerBase:
    """Build a tokenizer from the files in a folder that its class names, tokenizer.json first, and from _OPTIONS.

    `from_pretrained` passes all of tokenizer_config.json to the class, also names of files: `init_inputs` is read as a
    vocabulary, wherever it is, and so are `sp_model_kwargs`, `mecab_kwargs` and `merges`.
    """
    if tokenizer_class is transformers.AutoTokenizer:
        tokenizer_class = _find_class(folder / "config.json")
    special = folder / "special_tokens_map.json"  # of older versions; transformers takes any option from it
    if special.is_file() and "added_tokens_decoder" not in config:
        for key, token in json.loads(special.read_text(encoding="utf-8")).items():
            config[key] = {"__type": "AddedToken", **token} if isinstance(token, dict) else token
    names = {**tokenizer_class.vocab_files_names, **_FILES}
    if not (folder / "tokenizer.json").is_file():  # published beside it, or alone
        names.setdefault("vocab_file", "tokenizer.model")
    files = {key: str(folder / file) for key, file in names.items() if (folder / file).is_file()}
    kept = {key: value for key, value in config.items() if key in _OPTIONS.split() or key.endswith("_token")}
    if any(type(value) is int and value > MAX_NUMBER for key, value in kept.items() if key != "model_max_length"):
        raise FolderError("a number in its tokenizer_config.json is too large")
    return tokenizer_class._from_pretrained(files, str(folder), kept, _is_local=True, local_files_only=True)  # noqa: SLF001


def _find_class(config: Path) -> type:
    """Return the class of the tokenizers of a model type, as AutoTokenizer does; the general one if none is stated."""
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES  # seconds, for torch

    model_type = json.loads(config.read_text(encoding="utf-8")).get("model_type") if config.is_file() else None
    return getattr(transformers, TOKENIZER_MAPPING_NAMES.get(model_type) or "PreTrainedTokenizerFast")


def _guess_config(folder: Path) -> dict[str, str | bool | None]:
    """Return what a missing tokenizer_config.json would state, as far as the other files of a folder tell.

    :raises FolderError: if they do not tell the class
    """
    files = {path.name: path for path in folder.glob("*")}
    if "tokenizer.json" in files and "config.json" not in files:
        tokens = Tokenizer.from_file(str(files["tokenizer.json"])).get_vocab()
        special = {key: next(filter(tokens.__contains__, names), None) for key, names in _SPECIAL_TOKENS.items()}
        return {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    if "vocab.txt" in files:
        words = [x for x in files["vocab.txt"].read_text(encoding="utf-8").splitlines() if not x.startswith("[")]
        lower = BertNormalizer(handle_chinese_chars=False).normalize_str  # drops accents and vowel signs, too
        options = {"do_lower_case": sum(word != lower(word) for word in words) < 0.01 * len(words)}
        return options if "config.json" in files else {"tokenizer_class": "BertTokenizer", **options}
    if "config.json" in files:
        return {}  # AutoTokenizer takes the class of the model's type
    if {"vocab.json", "merges.txt"} <= files.keys():
        is_roberta = '"<mask>"' in files["vocab.json"].read_text(encoding="utf-8")
        return {"tokenizer_class": "RobertaTokenizer" if is_roberta else "GPT2Tokenizer"}
    if "spiece.model" in files and b"[MASK]" in files["spiece.model"].read_bytes():
        return {"tokenizer_class": "AlbertTokenizer"}
    if any(name.endswith(".model") for name in files):
        example = '{"tokenizer_class": "T5Tokenizer"}, "LlamaTokenizer" or "XLMRobertaTokenizer"'
        raise FolderError(f"its class is not known: write it into a file tokenizer_config.json, such as {example}")
    return {}


def check_special_tokens(tokenizer: PreTrainedTokenizerBase, objective: str) -> None:
    """Raise UserError if the tokenizer lacks a special token that the objective needs."""
    required = ("eos",) if OBJECTIVES[objective].is_causal else ("cls", "sep", "pad", "mask")
    missing = [name for name in required if getattr(tokenizer, f"{name}_token") is None]
    if missing:
        what = f"the special tokens {', '.join(missing)}, which {type(tokenizer).__name__} lacks"
        example = f'{{"{missing[0]}_token": "</s>"}}'
        remedy = f"state them in its tokenizer_config.json, such as {example}, or choose another --tokenizer"
        raise UserError(f"--objective {objective} needs a tokenizer with {what}: {remedy}")
