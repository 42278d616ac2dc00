"""Loading of the prepared data in trainers and evaluators."""

from pathlib import Path

import datasets
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from cotrain.common.errors import UserError, first_line
from cotrain.data.manifest import REMEDY, Manifest, tokenizer_sha256
from cotrain.models.model import get_objective, max_tokens
from cotrain.models.objectives import OBJECTIVES, SPLITS


def load_datasets(dataset_path: str | Path) -> datasets.DatasetDict:
    """Load the splits "train" and "validation"; UserError if one is missing, damaged, or not as in the manifest."""
    manifest = Manifest.load(dataset_path)
    try:
        splits = datasets.DatasetDict.load_from_disk(str(dataset_path))
    except Exception as error:  # an interrupted copy raises anything from OSError to ArrowInvalid
        raise UserError(f"--dataset_path: '{dataset_path}' cannot be read ({first_line(error)}); {REMEDY}") from error
    columns = set(OBJECTIVES[manifest.objective].columns)
    for split in SPLITS:
        expected = manifest.splits.get(split, {}).get("instances")
        if split not in splits or len(splits[split]) != expected or set(splits[split].column_names) != columns:
            raise UserError(f"--dataset_path: '{dataset_path}' is damaged (split '{split}'); {REMEDY}")
    return splits


def load_manifest(dataset_path: str, tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> Manifest:
    """Load the manifest; UserError if tokenizer or model do not match it."""
    manifest = Manifest.load(dataset_path)
    objective = get_objective(config)
    if objective != manifest.objective:
        raise UserError(
            f"--model_name_or_path: this model is trained with the objective {objective}, but the data was made for "
            f"{manifest.objective}; choose another model, or make other data with ./tokenize_wikitext103.py "
            f"--objective {objective}"
        )
    if tokenizer_sha256(tokenizer) != manifest.tokenizer_sha256:
        raise UserError(
            f"--tokenizer_path: this tokenizer ({len(tokenizer)} tokens) is not the one that the data was made "
            f"with ({manifest.tokenizer_class}, {manifest.vocab_size} tokens); take both from the same archive"
        )
    length, positions = manifest.max_seq_length, max_tokens(config)
    if length > positions:
        raise UserError(
            f"the sequences have {length} tokens, but the model has {positions} positions: prepare the data with "
            f"--max_seq_length {positions}, or choose another --model_name_or_path"
        )
    return manifest
