"""The built-in task: a language model of transformers, on text that tokenize_wikitext103.py has prepared."""

import math
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from transformers import DataCollatorForLanguageModeling, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from cotrain.arguments import ModelArguments
from cotrain.common.errors import UserError
from cotrain.data.download import fetch_data
from cotrain.data.loading import load_datasets, load_manifest
from cotrain.data.shards import ShardedSamples
from cotrain.data.tokenizers import load_tokenizer
from cotrain.models.model import build_without_weights, get_objective, initialize_model, load_config, max_tokens
from cotrain.models.objectives import OBJECTIVES
from cotrain.task import Metric, Task

Batch = dict[str, torch.Tensor]


def build_text_task(args: ModelArguments, has_weights: bool = False, disable_tqdm: bool = False) -> "TextTask":
    """Build the task of --model_name_or_path, after downloading its data if it is missing.

    :param has_weights: begin with the weights of --from_pretrained; other peers than trainers download the state
    :raises UserError: if something is missing or does not fit
    """
    fetch_data(args, disable_tqdm)
    tokenizer = load_tokenizer(args.tokenizer_path)
    return TextTask(args, tokenizer, load_config(args, tokenizer), has_weights and args.from_pretrained)


class TextTask(Task):
    """A language model, and text that is prepared for the objective of the model, see cotrain/models/objectives.py."""

    def __init__(
        self, args: ModelArguments, tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig,
        has_weights: bool = False,
    ):  # fmt: skip
        self.args, self.tokenizer, self.config = args, tokenizer, config
        self.has_weights, self.objective = has_weights, OBJECTIVES[get_objective(config)]
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token  # any token works: padding is neither attended to nor predicted

    def build_model(self) -> PreTrainedModel:
        from cotrain.models.pretrained import load_pretrained  # of both imports, peft takes seconds

        if self.args.lora_rank is None:
            return load_pretrained(self.config, self.args) if self.has_weights else initialize_model(self.config)
        from cotrain.models.adapters import add_adapters

        build = partial(load_pretrained, args=self.args) if self.has_weights else build_without_weights
        return add_adapters(build(self.config), self.args)

    def load_samples(self, split: str) -> Dataset:
        if self.args.dataset_path is None:
            raise UserError("--dataset_path is missing: this peer has no data, such as a monitor")
        objective, longest = get_objective(self.config), max_tokens(self.config)
        manifest = load_manifest(self.args.dataset_path, self.tokenizer, objective, longest)
        if (length := self.args.seq_length) not in (None, manifest.max_seq_length):
            raise UserError(
                f"--seq_length {length}: the data has sequences of {manifest.max_seq_length} tokens; drop the flag, "
                f"or make other data with ./tokenize_wikitext103.py --max_seq_length {length}"
            )
        if split == "train" and manifest.shards:
            return ShardedSamples(self.args, manifest)
        return load_datasets(self.args.dataset_path, [split])[split]

    def collate(self, samples: list[dict]) -> Batch:
        """Pad samples to a multiple of 8 tokens, and for masked LM select the tokens to predict.

        A batch has LongTensors of shape [samples, tokens]: `input_ids`, `attention_mask`, `labels` (-100: not
        predicted); for sentence order also `token_type_ids`, and `sentence_order_label` of shape [samples]. Of the
        tokens to predict, 80 % are replaced by [MASK] and 10 % by a random token; special tokens are never selected.
        """
        is_masked, probability = not self.objective.is_causal, self.args.mlm_probability
        pad = partial(DataCollatorForLanguageModeling, pad_to_multiple_of=8)  # tensor cores are fastest then
        batch = dict(pad(self.tokenizer, mlm=is_masked, mlm_probability=probability)(samples))
        if not is_masked:
            # transformers recognizes padding by its token. Where that is the end-of-text token, as for GPT-2, a model
            # would not learn to end a text.
            batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return batch

    def evaluate(self, model: PreTrainedModel, batch: Batch) -> dict[str, Metric]:
        outputs, labels = model(**batch), batch["labels"]
        if self.objective.is_causal:
            loss, _ = measure(outputs.logits[:, :-1], labels[:, 1:])  # each token predicts the next
            return {"loss": loss}
        if not self.objective.has_sentence_order:
            loss, accuracy = measure(outputs.logits, labels)
            return {"loss": loss, "mlm_accuracy": accuracy}
        loss, accuracy = measure(outputs.prediction_logits, labels)
        order_loss, order_accuracy = measure(outputs.sop_logits, batch["sentence_order_label"])
        return {"loss": loss, "order_loss": order_loss, "mlm_accuracy": accuracy, "sop_accuracy": order_accuracy}

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        """Add the losses. Trainers report the same loss, except for their weighting of micro-batches."""
        loss = means.pop("loss") + means.pop("order_loss", 0.0)
        return {"loss": loss, **(means or {"perplexity": math.exp(min(20.0, loss))})}

    def save_pretrained(self, model: PreTrainedModel, folder: Path) -> None:
        # For embeddings that were resized, which these are not, peft asks the Hub.
        model.save_pretrained(folder, **({} if self.args.lora_rank is None else {"save_embedding_layers": False}))
        self.tokenizer.save_pretrained(folder)


def measure(logits: torch.Tensor, labels: torch.Tensor) -> tuple[Metric, Metric]:
    """Return cross-entropy and accuracy.

    :param logits: [..., classes]; :param labels: [...], -100 where there is nothing to predict
    """
    logits, labels = logits.flatten(end_dim=-2), labels.flatten()
    logits, labels = logits[labels != -100].float(), labels[labels != -100]
    count, correct = len(labels), int((logits.argmax(dim=-1) == labels).sum())
    return (cross_entropy(logits, labels, reduction="sum") / max(1, count), count), (correct / max(1, count), count)
