"""The built-in task: a language model of transformers, on text that tokenize_wikitext103.py has prepared."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import DataCollatorForLanguageModeling, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import ModelOutput

from cotrain.common.errors import UserError
from cotrain.data.download import fetch_data
from cotrain.data.loading import load_manifest, load_split
from cotrain.data.manifest import Manifest
from cotrain.data.own_samples import OwnSamples
from cotrain.data.shards import ShardedSamples
from cotrain.data.tokenizers import load_tokenizer
from cotrain.models.model import build_without_weights, get_objective, initialize_model, load_config, max_tokens
from cotrain.models.objectives import OBJECTIVES
from cotrain.models.pretrained import digest_weights, load_pretrained, set_generation
from cotrain.options import Adopted, ModelOptions
from cotrain.task import Metric, Task

Batch = dict[str, torch.Tensor]
ROW_BYTES = 2**26  # of logits in float32, whose loss the evaluator computes at once
MAX_LOGIT_BYTES = 10**9  # of logits in float32, of a batch of the evaluator


def build_text_task(
    args: ModelOptions, adopted: Adopted, has_weights: bool = False, disable_tqdm: bool = False,
    device: torch.device | None = None,
) -> "TextTask":  # fmt: skip
    """Build the task of --model_name_or_path, after downloading its data if it is missing.

    :param has_weights: begin with the weights of --from_pretrained; other peers than trainers download the state
    :param device: where the base of adapters is loaded, and tried
    :raises UserError: if something is missing or does not fit
    """
    fetch_data(args, adopted, disable_tqdm, has_weights and args.from_pretrained)
    tokenizer = load_tokenizer(args.tokenizer_path)
    config = load_config(args, adopted, tokenizer)
    return TextTask(args, adopted, tokenizer, config, has_weights and args.from_pretrained, device)


class TextTask(Task):
    """A language model, and text that is prepared for the objective of the model, see cotrain/models/objectives.py."""

    def __init__(
        self, args: ModelOptions, adopted: Adopted, tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig,
        has_weights: bool = False, device: torch.device | None = None,
    ):  # fmt: skip
        self.args, self.adopted, self.tokenizer, self.config, self.device = args, adopted, tokenizer, config, device
        self.has_weights, self.objective = has_weights, OBJECTIVES[get_objective(config, tokenizer)]
        self.own_path: Path | None = None  # of the prepared --own_data
        self.is_packed = False  # whether a row of a batch has several conversations
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token  # any token works: padding is neither attended to nor predicted

    def build_model(self) -> PreTrainedModel:
        load = partial(load_pretrained, args=self.args, adopted=self.adopted, device=self.device)
        if self.args.lora_rank is None:
            model = load(self.config) if self.has_weights else initialize_model(self.config)
        else:
            from cotrain.models.adapters import add_adapters  # seconds, for peft

            build = load if self.has_weights else build_without_weights
            model = add_adapters(build(self.config), self.args, self.tokenizer)
        self.is_packed = self.objective.has_answers and keeps_apart(model)
        return model

    def load_manifest(self) -> Manifest:
        """Return the description of the run's data; UserError if it does not fit the model."""
        if self.args.dataset_path is None:
            raise UserError("--dataset_path is missing: this peer, such as a monitor, has no prepared data")
        objective, longest = get_objective(self.config, self.tokenizer), max_tokens(self.config)
        manifest = load_manifest(self.args.dataset_path, self.tokenizer, objective, longest)
        if (length := self.args.seq_length) not in (None, manifest.max_seq_length):
            raise UserError(
                f"--seq_length {length}: the data has sequences of {manifest.max_seq_length} tokens; drop the flag, "
                f"or make other data with ./tokenize_wikitext103.py --max_seq_length {length}"
            )
        return manifest

    @property
    def schema(self) -> str:
        """Digests of the tokenizer and, of adapters, of the frozen base."""
        base = "" if self.args.lora_rank is None else digest_weights(self.args, self.adopted)
        return self.load_manifest().tokenizer_sha256[:8] + base

    def load_samples(self, split: str) -> Any:
        """Load the run's samples, or this trainer's own ones: for training mixed with the run's, if it has some."""
        manifest, share = self.load_manifest(), self.args.own_share
        own = None if self.own_path is None else load_split(self.own_path, split)
        if own is not None and split != "train":
            return own
        if own is not None and (not manifest.splits or share == 1 or (manifest.shards and share is None)):
            return OwnSamples(own)
        if split not in manifest.splits:
            raise UserError(f"this run has no samples to share for '{split}': trainers pass --own_data FILE")
        if own is not None and manifest.shards:
            raise UserError(f"--own_share {share:g}: samples in shards, as this run's, do not mix; pass --own_share 1")
        if split == "train" and manifest.shards:
            return ShardedSamples(self.args, self.adopted, manifest)
        samples = load_split(self.args.dataset_path, split)
        return samples if own is None else OwnSamples(own, samples, share or 0.5)

    def collate(self, samples: list[dict]) -> Batch:
        """Pad samples to a multiple of 8 tokens, and for masked LM select the tokens to predict.

        A batch has LongTensors of shape [samples, tokens]: `input_ids`, `attention_mask`, `labels` (-100: not
        predicted); for sentence order also `token_type_ids`, and `sentence_order_label` of shape [samples]. Of the
        tokens to predict, 80 % are replaced by [MASK] and 10 % by a random token; special tokens are never selected.
        """
        if self.objective.has_answers:
            return self._collate_conversations(samples)
        is_masked, probability = not self.objective.is_causal, self.args.mlm_probability
        pad = partial(DataCollatorForLanguageModeling, pad_to_multiple_of=8)  # tensor cores are fastest then
        batch = dict(pad(self.tokenizer, mlm=is_masked, mlm_probability=probability)(samples))
        if is_masked:
            ensure_prediction(batch, self.tokenizer)
        else:
            # transformers recognizes padding by its token. Where that is the end-of-text token, as for GPT-2, a model
            # would not learn to end a text.
            batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return batch

    def _collate_conversations(self, samples: list[dict]) -> Batch:
        """Pad samples. Only answers have labels, and `position_ids` start again at each conversation.

        transformers keeps them apart by these, unless there is an `attention_mask` or a cache. For a model that does
        not support this, each conversation is a row.
        """
        rows = [torch.tensor([sample[name] for name in self.objective.columns]).T for sample in samples]
        if not self.is_packed:
            rows = [part for row in rows for part in row.tensor_split(row[:, 2].nonzero().flatten()[1:])]
        ids, answers, starts = pad_sequence(rows, batch_first=True, padding_value=-1).unbind(dim=-1)
        batch = {"input_ids": ids.clamp(min=0), "labels": ids.masked_fill(answers != 1, -100)}
        if self.is_packed:  # each padding token becomes a separate conversation
            positions = torch.arange(ids.shape[1])
            batch["position_ids"] = positions - (positions * (starts != 0)).cummax(dim=1).values
        return batch

    def _run(self, model: PreTrainedModel, batch: Batch) -> ModelOutput:
        if not self.is_packed:
            return model(**batch)
        if "flash" in str(model.config._attn_implementation):  # noqa: SLF001  it keeps them apart in one row only
            batch = {name: tensor.reshape(1, -1) for name, tensor in batch.items()}
        return model(**batch, use_cache=False)

    def compute_loss(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        return self._run(model, batch).loss

    def weigh(self, batch: Batch) -> float | torch.Tensor:
        """Count the predicted tokens. With sentence order, which each sample has once, all weigh the same."""
        if self.objective.has_sentence_order:
            return super().weigh(batch)
        labels = batch["labels"][:, 1:] if self.objective.is_causal else batch["labels"]
        return (labels != -100).sum()

    def evaluate(self, model: PreTrainedModel, batch: Batch) -> dict[str, Metric]:
        # With labels, transformers would compute a second loss, in float32.
        inputs = {name: tensor for name, tensor in batch.items() if name not in ("labels", "sentence_order_label")}
        outputs, labels = self._run(model, inputs), batch["labels"]
        if self.objective.is_causal:
            logits, labels = outputs.logits[:, :-1], labels[:, 1:]  # each token predicts the next
            metrics = {"loss": measure(logits, labels)[0]}
            return metrics | ({"exact_match": match_answers(logits, labels)} if self.objective.has_answers else {})
        if not self.objective.has_sentence_order:
            loss, accuracy = measure(outputs.logits, labels)
            return {"loss": loss, "mlm_accuracy": accuracy}
        loss, accuracy = measure(outputs.prediction_logits, labels)
        order_loss, order_accuracy = measure(outputs.sop_logits, batch["sentence_order_label"])
        return {"loss": loss, "order_loss": order_loss, "mlm_accuracy": accuracy, "sop_accuracy": order_accuracy}

    def eval_batch_size(self) -> int:
        """Return the samples of a batch whose logits fit into MAX_LOGIT_BYTES in float32, at most 16."""
        if self.args.dataset_path is None:  # the samples are not text on a disk
            return super().eval_batch_size()
        length = Manifest.load(self.args.dataset_path).max_seq_length
        return max(1, min(16, MAX_LOGIT_BYTES // (4 * length * self.config.get_text_config().vocab_size)))

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        """Add the losses. Trainers report the same loss."""
        loss = means.pop("loss") + means.pop("order_loss", 0.0)
        return {"loss": loss, **(means or {"perplexity": math.exp(min(20.0, loss))})}

    def save_pretrained(self, model: PreTrainedModel, folder: Path) -> None:
        base = model if self.args.lora_rank is None else model.get_base_model()
        set_generation(base, self.tokenizer)
        # For embeddings that were resized, which these are not, peft asks the Hub.
        model.save_pretrained(folder, **({} if base is model else {"save_embedding_layers": False}))
        if base.can_generate():  # peft does not save its settings
            base.generation_config.save_pretrained(folder)
        (folder / "README.md").unlink(missing_ok=True)  # peft's form to fill in
        self.tokenizer.save_pretrained(folder)


def ensure_prediction(batch: Batch, tokenizer: PreTrainedTokenizerBase) -> None:
    """Select a random token to predict if a batch has none: its loss would be NaN.

    Of micro-batches of one sample of 12 tokens, one in five has none.
    """
    ids, labels = batch["input_ids"], batch["labels"]
    if (labels != -100).any():
        return
    places = (~torch.isin(ids, torch.tensor(tokenizer.all_special_ids))).nonzero()
    if len(places):
        place = tuple(places[torch.randint(len(places), ())])
        labels[place] = ids[place]
        ids[place] = tokenizer.mask_token_id


def measure(logits: torch.Tensor, labels: torch.Tensor) -> tuple[Metric, Metric]:
    """Return cross-entropy and accuracy.

    :param logits: [..., classes]; :param labels: [...], -100 where there is nothing to predict
    """
    places = (labels != -100).nonzero()
    total, correct, count = 0.0, 0, len(places)
    for chosen in places.split(max(1, ROW_BYTES // (4 * logits.shape[-1]))):
        rows, answers = logits[chosen.unbind(dim=-1)].float(), labels[chosen.unbind(dim=-1)]
        total += float(cross_entropy(rows, answers, reduction="sum"))
        correct += int((rows.argmax(dim=-1) == answers).sum())
    return (total / max(1, count), count), (correct / max(1, count), count)


def match_answers(logits: torch.Tensor, labels: torch.Tensor) -> Metric:
    """Return the share of answers that greedy decoding generates, token by token, and their number.

    It does so if each token of an answer is the most likely one after those before it, by induction: one forward pass
    tells. An answer is a run of labels [rows, tokens] other than -100.
    """
    is_learnt = labels != -100
    begins = is_learnt & ~torch.nn.functional.pad(is_learnt, (1, 0))[:, :-1]
    numbers, is_wrong = begins.flatten().cumsum(0), is_learnt & (logits.argmax(dim=-1) != labels)
    count = int(begins.sum())
    return 1 - len(numbers[is_wrong.flatten()].unique()) / max(1, count), count


@torch.no_grad()
def keeps_apart(model: PreTrainedModel) -> bool:
    """Try whether `position_ids` that start again at 0 divide a sequence into parts that are computed as if alone.

    Attention does that as a rule, a recurrent state does not. Measured, relative to the logits: another first part
    changes the second by 1e-7 (rounding of experts), or by 2e-4 and more; computing it alone, in bf16, by 0.005.
    """
    parts = torch.tensor([[1, 1, 1, 1], [2, 2, 1, 2], [2, 1, 2, 2]], device=model.device)
    options = {"use_cache": False, "position_ids": torch.arange(4, device=model.device).repeat(1, 2)}
    try:
        alone = model.eval()(input_ids=parts[2:]).logits
        one, two = (model(input_ids=parts[[n, 2]].view(1, 8), **options).logits[:, 4:] for n in range(2))
        return bool((one - two).norm() < 1e-5 * alone.norm() and (one - alone).norm() < 1e-2 * alone.norm())
    except Exception:  # it takes no positions, or has no weights
        return False
    finally:
        model.train()
