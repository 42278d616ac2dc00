"""What a model makes of a sentence: the most likely fillings of its masks, or the continuation of a causal model."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hivemind.utils import get_logger
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from lib.common.errors import UserError, describe
from lib.common.objectives import OBJECTIVES
from lib.monitoring.trackers import Reporters
from lib.training.model import get_objective

logger = get_logger(__name__)

MASK = "[MASK]"  # accepted whatever the tokenizer calls its mask token
MAX_NEW_TOKENS = 20


@dataclass(frozen=True)
class Filling:
    """A token in the place of a mask. `probability`: from 0 to 1."""

    token: str
    probability: float


def is_causal(config: PretrainedConfig) -> bool:
    """Whether a model continues a text instead of filling its masks."""
    return OBJECTIVES[get_objective(config)].is_causal


def check_text(text: str, tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, flag: str) -> None:
    """Check that a model can complete a text.

    :param flag: the argument that the text comes from, for the error message
    :raises UserError: if the text is empty, too long, or lacks the mask that the model is to fill
    """
    if not text.strip():
        raise UserError(f"{flag}: the sentence is empty; pass some words")
    if not is_causal(config) and tokenizer.mask_token is None:
        raise UserError(f"{flag}: the tokenizer has no mask token to fill; use the tokenizer of the model")
    if not is_causal(config) and MASK not in text and tokenizer.mask_token not in text:
        raise UserError(f"{flag}: there is no mask in '{text}'; put {MASK} in the place of a word")
    num_tokens = len(_encode(text, tokenizer, config)["input_ids"][0])
    limit = config.max_position_embeddings - (MAX_NEW_TOKENS if is_causal(config) else 0)
    if config.model_type == "roberta":
        limit -= config.pad_token_id + 1  # its positions begin after that of the padding
    if num_tokens > limit:
        raise UserError(f"{flag}: the sentence has {num_tokens} tokens, the model takes {limit}; pass a shorter one")


def fill_masks(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, number: int = 5
) -> list[list[Filling]]:
    """Return the `number` most likely fillings of each mask in a text, most likely first.

    Each mask is filled as if the others stayed masks.
    """
    inputs = _encode(text, tokenizer, model.config)
    with torch.inference_mode():
        outputs = model(**inputs)
    logits = outputs.prediction_logits if "prediction_logits" in outputs else outputs.logits  # ALBERT for pretraining
    is_mask = inputs["input_ids"][0] == tokenizer.mask_token_id
    best = logits[0, is_mask].float().softmax(dim=-1).topk(number)
    return [
        [Filling(_name(token, tokenizer), probability) for probability, token in zip(*row, strict=True)]
        for row in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]


def continue_text(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """Return the text that follows by greedy decoding, at most `MAX_NEW_TOKENS` tokens."""
    inputs = _encode(text, tokenizer, model.config)
    with torch.inference_mode():
        output = model.generate(
            **inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False, pad_token_id=tokenizer.eos_token_id
        )
    return _one_line(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def complete(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """Return what a model makes of a text in one line, for a log or a table. The model stays in its mode."""
    was_training = model.training
    model.eval()
    try:
        if is_causal(model.config):
            return continue_text(model, tokenizer, text)
        return "; ".join(
            ", ".join(f"{filling.token} {filling.probability:.1%}" for filling in fillings)
            for fillings in fill_masks(model, tokenizer, text)
        )
    finally:
        model.train(was_training)


class SampleReporter:
    """Reports what the model makes of some texts: one line each in the log, and a table in the dashboard.

    :param texts: checked by `check_text`
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], reporter: Reporters
    ):
        self.model, self.tokenizer, self.texts, self.reporter = model, tokenizer, texts, reporter

    def report(self, step: int) -> None:
        """Complete the texts. A failure is a warning.

        :param step: the global step of the model's parameters
        """
        try:
            rows = [(text, complete(self.model, self.tokenizer, text)) for text in self.texts]
        except Exception as error:
            logger.warning(f"Could not complete the texts of --sample_text at step #{step}: {describe(error)}")
            return
        for text, completion in rows:
            logger.info(f"Step #{step}\t{text} -> {completion}")
        self.reporter.report_table("samples", ("text", "completion"), rows, step)


def _encode(text: str, tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> dict[str, torch.Tensor]:
    if not is_causal(config):
        text = text.replace(MASK, tokenizer.mask_token)
    # Without its warning about the length, which `check_text` turns into an error.
    return dict(tokenizer(text, return_tensors="pt", verbose=False))


def _name(token: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of a token, or its name in the vocabulary if the text is blank: SentencePiece has "▁"."""
    return _one_line(tokenizer.decode([token])) or _one_line(tokenizer.convert_ids_to_tokens(token))


def _one_line(text: str) -> str:
    """Return a text without line breaks and control characters, which a tokenizer may contain."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
