"""The built-in tasks: a language model of transformers, on text that tokenize_wikitext103.py has prepared."""

import math
from functools import cached_property
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from cotrain.arguments import DatasetArguments, ModelArguments, SampleArguments
from cotrain.common.errors import UserError
from cotrain.data.download import fetch_data
from cotrain.data.loading import build_collator, load_datasets, load_manifest
from cotrain.data.tokenizers import load_tokenizer
from cotrain.models.model import get_objective, initialize_model, load_config, load_pretrained
from cotrain.models.objectives import OBJECTIVES
from cotrain.task import Metric, Task

Batch = dict[str, torch.Tensor]


def build_text_task(
    args: ModelArguments, sample_args: SampleArguments, has_weights: bool = False, disable_tqdm: bool = False
) -> "TextTask":
    """Build the task for a model of transformers, after downloading its data if it is missing.

    :param args: DatasetArguments, or those of a monitor, which loads no samples
    :param has_weights: begin with the weights of --from_pretrained; other peers than trainers download the state
    :raises UserError: if something is missing or does not fit
    """
    if isinstance(args, DatasetArguments):
        fetch_data(args, disable_tqdm)
    tokenizer = load_tokenizer(args.tokenizer_path)
    config = load_config(args, tokenizer)
    return choose_class(config)(args, sample_args, tokenizer, config, has_weights)


def choose_class(config: PretrainedConfig) -> "type[TextTask]":
    objective = OBJECTIVES[get_objective(config)]
    masked = SentenceOrderTask if objective.has_sentence_order else MaskedTask
    return CausalTask if objective.is_causal else masked


class TextTask(Task):
    """A language model and prepared text; see `build_text_task` for the parameters."""

    pipeline_tag: str  # name of the task on the Hugging Face Hub

    def __init__(
        self,
        args: ModelArguments,
        sample_args: SampleArguments,
        tokenizer: PreTrainedTokenizerBase,
        config: PretrainedConfig,
        has_weights: bool,
    ):
        self.args, self.sample_args, self.tokenizer, self.config = args, sample_args, tokenizer, config
        self.has_weights = has_weights and args.from_pretrained

    def build_model(self) -> PreTrainedModel:
        return load_pretrained(self.config, self.args) if self.has_weights else initialize_model(self.config)

    def load_samples(self, split: str) -> Dataset:
        """Load the prepared samples; UserError if they do not match model, tokenizer and flags."""
        manifest = load_manifest(self.args, self.tokenizer, self.config)
        if (length := self.sample_args.seq_length) not in (None, manifest.max_seq_length):
            raise UserError(
                f"--seq_length {length}: the data has sequences of {manifest.max_seq_length} tokens; drop the flag, "
                f"or make other data with ./tokenize_wikitext103.py --max_seq_length {length}"
            )
        return load_datasets(self.args.dataset_path)[split]

    @cached_property
    def _collator(self):
        return build_collator(get_objective(self.config), self.tokenizer, self.sample_args.mlm_probability)

    def collate(self, samples: list[dict]) -> Batch:
        return dict(self._collator(samples))

    def save_pretrained(self, model: PreTrainedModel, folder: Path) -> None:
        model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


class CausalTask(TextTask):
    """Prediction of each next token."""

    pipeline_tag = "text-generation"

    def evaluate(self, model: PreTrainedModel, batch: Batch) -> dict[str, Metric]:
        loss, _ = measure(model(**batch).logits[:, :-1], batch["labels"][:, 1:])
        return {"loss": loss}

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        return {**means, "perplexity": math.exp(min(20.0, means["loss"]))}


class MaskedTask(TextTask):
    """Prediction of masked tokens."""

    pipeline_tag = "fill-mask"

    def load_samples(self, split: str) -> Dataset:
        samples = super().load_samples(split)
        return MaskedSamples(samples, super().collate) if split == "validation" else samples

    def collate(self, samples: list[dict]) -> Batch:
        if "labels" not in samples[0]:
            return super().collate(samples)
        padding = {"input_ids": self.tokenizer.pad_token_id, "labels": -100}
        return {name: _stack([sample[name] for sample in samples], padding.get(name, 0)) for name in samples[0]}

    def evaluate(self, model: PreTrainedModel, batch: Batch) -> dict[str, Metric]:
        loss, accuracy = measure(model(**batch).logits, batch["labels"])
        return {"loss": loss, "mlm_accuracy": accuracy}


class SentenceOrderTask(MaskedTask):
    """Prediction of masked tokens, and of whether two segments are swapped.

    The loss is the mean over the masked tokens plus the mean over the samples. Trainers report the same loss, except
    for their weighting of micro-batches.
    """

    def evaluate(self, model: PreTrainedModel, batch: Batch) -> dict[str, Metric]:
        outputs = model(**batch)
        mlm_loss, mlm_accuracy = measure(outputs.prediction_logits, batch["labels"])
        sop_loss, sop_accuracy = measure(outputs.sop_logits, batch["sentence_order_label"])
        losses = {"mlm_loss": mlm_loss, "sop_loss": sop_loss}
        return {**losses, "mlm_accuracy": mlm_accuracy, "sop_accuracy": sop_accuracy}

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        return {"loss": means.pop("mlm_loss") + means.pop("sop_loss"), **means}


class MaskedSamples(Dataset):
    """Validation samples whose masked tokens depend on the index of the sample only, not on its batch."""

    def __init__(self, samples: Dataset, collate):
        self.samples, self.collate = samples, collate

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Batch:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(index)
            return {name: values[0] for name, values in self.collate([self.samples[index]]).items()}


def _stack(values: list[torch.Tensor], padding: int) -> torch.Tensor:
    """Stack the samples' values of a column: numbers, or sequences, which are padded to the longest one."""
    return pad_sequence(values, batch_first=True, padding_value=padding) if values[0].ndim else torch.stack(values)


def measure(logits: torch.Tensor, labels: torch.Tensor) -> tuple[Metric, Metric]:
    """Return cross-entropy and accuracy.

    :param logits: [..., classes]; :param labels: [...], -100 where there is nothing to predict
    """
    logits, labels = logits.flatten(end_dim=-2), labels.flatten()
    logits, labels = logits[labels != -100].float(), labels[labels != -100]
    count = len(labels)
    correct = int((logits.argmax(dim=-1) == labels).sum())
    return (cross_entropy(logits, labels, reduction="sum") / max(1, count), count), (correct / max(1, count), count)
