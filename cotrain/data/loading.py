"""Loading of the prepared data in trainers and evaluators: datasets and collators."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import datasets
from transformers import BatchEncoding, DataCollatorForLanguageModeling, PretrainedConfig, PreTrainedTokenizerBase

from cotrain.arguments import DatasetArguments, LocalTrainingArguments
from cotrain.common.errors import UserError, first_line
from cotrain.data.manifest import REMEDY, Manifest, tokenizer_sha256
from cotrain.models.model import get_objective, max_tokens
from cotrain.models.objectives import OBJECTIVES, SPLITS

PAD_TO_MULTIPLE_OF = 8  # tensor cores are fastest with such shapes


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


@dataclass
class CausalCollator:
    """Pads samples and builds labels for causal LM (the model shifts them).

    transformers' collator recognizes padding by its token. Where that is the end-of-text token, as for GPT-2, a model
    would not learn to end a text.
    """

    tokenizer: PreTrainedTokenizerBase  # as transformers' collator has it

    def __call__(self, samples: list[dict]) -> BatchEncoding:
        batch = self.tokenizer.pad(samples, pad_to_multiple_of=PAD_TO_MULTIPLE_OF, return_tensors="pt")
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return batch


def build_collator(
    objective: str, tokenizer: PreTrainedTokenizerBase, mlm_probability: float = 0.15
) -> Callable[[list[dict]], BatchEncoding]:
    """Build a collator: it pads samples to a batch and, for masked LM, selects the tokens to predict.

    A batch has LongTensors of shape [samples, tokens]: `input_ids`, `attention_mask`, `labels` (-100: not predicted);
    for sentence order also `token_type_ids`, and `sentence_order_label` of shape [samples]. Of the tokens to predict,
    80 % are replaced by [MASK] and 10 % by a random token; special tokens are never selected.
    """
    if OBJECTIVES[objective].is_causal:
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token  # any token works: padding is neither attended to nor predicted
        return CausalCollator(tokenizer)
    return DataCollatorForLanguageModeling(
        tokenizer, mlm_probability=mlm_probability, pad_to_multiple_of=PAD_TO_MULTIPLE_OF
    )


def load_training_data(
    dataset_args: DatasetArguments,
    training_args: LocalTrainingArguments,
    tokenizer: PreTrainedTokenizerBase,
    config: PretrainedConfig,
) -> tuple[datasets.Dataset, Callable[[list[dict]], BatchEncoding]]:
    """Load the training samples and build their collator; UserError if they do not match the other arguments."""
    manifest = _load_manifest(dataset_args, tokenizer, config)
    if (length := training_args.seq_length) not in (None, manifest.max_seq_length):
        raise UserError(
            f"--seq_length {length}: the data has sequences of {manifest.max_seq_length} tokens; drop the flag, "
            f"or make other data with ./tokenize_wikitext103.py --max_seq_length {length}"
        )
    dataset = load_datasets(dataset_args.dataset_path)["train"]
    if len(dataset) < training_args.per_device_train_batch_size:
        raise UserError(
            f"--dataset_path: '{dataset_args.dataset_path}' has {len(dataset)} samples to train on, fewer than "
            f"--per_device_train_batch_size {training_args.per_device_train_batch_size}"
        )
    return dataset, build_collator(manifest.objective, tokenizer, training_args.mlm_probability)


def load_validation_data(
    dataset_args: DatasetArguments,
    mlm_probability: float,
    tokenizer: PreTrainedTokenizerBase,
    config: PretrainedConfig,
) -> tuple[datasets.Dataset, Callable[[list[dict]], BatchEncoding]]:
    """Load the validation samples, and build their collator; see `load_training_data`."""
    manifest = _load_manifest(dataset_args, tokenizer, config)
    dataset = load_datasets(dataset_args.dataset_path)["validation"]
    return dataset, build_collator(manifest.objective, tokenizer, mlm_probability)


def _load_manifest(
    dataset_args: DatasetArguments, tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig
) -> Manifest:
    """Load the manifest, and check it against the tokenizer and the model."""
    manifest = Manifest.load(dataset_args.dataset_path)
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
