"""Completion of texts by a model: the most likely words for each mask, the continuation, or the answer."""

from collections.abc import Callable, Sequence

import torch
from hivemind.utils import get_logger
from transformers import (
    AlbertForMaskedLM,
    AlbertForPreTraining,
    Pipeline,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TextStreamer,
    pipeline,
)

from cotrain.common.errors import UserError, describe
from cotrain.models.model import get_objective, max_tokens
from cotrain.models.objectives import OBJECTIVES
from cotrain.monitoring.contributors import one_line
from cotrain.monitoring.reporters import Reporters
from cotrain.preparation.conversations import SURROGATE, encode_question
from cotrain.preparation.encoding import TextEncoder, leading_ids
from cotrain.task import Task
from cotrain.tasks.text import TextTask

logger = get_logger(__name__)

MASK = "[MASK]"  # accepted whatever the tokenizer calls its mask token
MAX_NEW_TOKENS = 20


def is_causal(config: PretrainedConfig) -> bool:
    """Whether a model continues a text instead of filling its masks."""
    return OBJECTIVES[get_objective(config)].is_causal


def encode_prompt(text: str | list, tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> list[int]:
    """Return the token ids of a text as prepared data has it; for conversations, of a message, or of messages."""
    if OBJECTIVES[get_objective(config, tokenizer)].has_answers:
        messages = text if isinstance(text, list) else [{"role": "user", "content": text}]
        return encode_question(messages, tokenizer)
    if is_causal(config):
        return [*leading_ids(tokenizer), *TextEncoder(tokenizer).encode([text])[0].tolist()]
    return tokenizer(text, verbose=False)["input_ids"]  # without a warning about the length, which is checked


def check_text(text: str, tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, flag: str) -> float:
    """Return how many tokens a causal model can add to a text, after checking that a model can complete it.

    :param flag: the argument that the text comes from
    :raises UserError: if the text is empty, too long, or lacks the mask that the model is to fill
    """
    if not text.strip():
        raise UserError(f"{flag}: the sentence is empty; pass some words")
    if SURROGATE.search(text):  # as Python has a byte that is not UTF-8
        raise UserError(f"{flag}: the sentence is not in UTF-8; set the terminal to UTF-8, or write it there")
    limit = positions = max_tokens(config)
    if is_causal(config):
        limit -= MAX_NEW_TOKENS
    elif tokenizer.mask_token is None:
        raise UserError(f"{flag}: the tokenizer has no mask token to fill; use the tokenizer of the model")
    else:
        text = text.replace(MASK, tokenizer.mask_token)
        if tokenizer.mask_token not in text:
            raise UserError(f"{flag}: there is no mask in '{text}'; put {MASK} in the place of a word")
    num_tokens = len(encode_prompt(text, tokenizer, config))
    if num_tokens > limit:
        raise UserError(f"{flag}: the sentence has {num_tokens} tokens, the model takes {limit}; pass a shorter one")
    return positions - num_tokens


def open_completer(task: Task, model: torch.nn.Module, texts: Sequence[str]) -> Pipeline:
    """Build the pipeline for the texts of --sample_text; UserError if the task or a text is not suitable."""
    if not isinstance(task, TextTask):
        raise UserError("--sample_text completes texts by a language model: drop it, or drop --task")
    for text in texts:
        check_text(text, task.tokenizer, task.config, "--sample_text")
    return build_pipeline(model, task.tokenizer)


def build_pipeline(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, device: torch.device | str = "cpu"
) -> Pipeline:
    """Build transformers' pipeline that completes texts. It sees later changes of the model's parameters."""
    if hasattr(model, "peft_config"):
        model = model.get_base_model()  # with its adapters: the pipeline does not know peft's class
    if isinstance(model, AlbertForPreTraining):  # which the pipeline does not support
        pretrained, model = model, AlbertForMaskedLM(model.config)
        model.albert, model.predictions = pretrained.albert, pretrained.predictions
    task = "text-generation" if is_causal(model.config) else "fill-mask"
    return pipeline(task, model.eval(), tokenizer=tokenizer, device=device)


def fill_masks(completer: Pipeline, text: str, number: int = 5) -> list[list[tuple[str, float]]]:
    """Return the `number` most likely tokens for each mask in a text with their probabilities, most likely first.

    The tokens are quoted. Each mask is filled as if the others stayed masks.
    """
    tokenizer = completer.tokenizer
    fillings = completer(text.replace(MASK, tokenizer.mask_token), top_k=number)
    masks = fillings if isinstance(fillings[0], list) else [fillings]
    return [[(_quote(filling, tokenizer), filling["score"]) for filling in mask] for mask in masks]


class _Writer(TextStreamer):
    """Writes a text as it is generated, without control characters and white space around it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], object]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.write, self.written, self.text = write, "", ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text
        shown = "".join(c for c in self.text.strip() if c.isprintable() or c in "\n\t")
        self.write(shown[len(self.written) :])
        self.written = shown


def continue_text(
    completer: Pipeline,
    text: str | list[dict],
    max_new_tokens: int = MAX_NEW_TOKENS,
    write: Callable[[str], object] = str,
    **options: object,
) -> str:
    """Return the text that follows, or the answer, by greedy decoding; without control characters.

    :param text: for a model of conversations, also messages
    :param write: is called with each part as it is generated
    :param options: of `generate` in transformers
    """
    tokenizer, model = completer.tokenizer, completer.model
    ids = torch.tensor([encode_prompt(text, tokenizer, model.config)], device=model.device)
    options = {"do_sample": False, "eos_token_id": tokenizer.eos_token_id, "max_new_tokens": max_new_tokens, **options}
    writer = _Writer(tokenizer, write)
    (output,) = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, streamer=writer, **options)
    writer.text = ""  # decoded at once: a streamer cannot decode half of a character
    writer.on_finalized_text(tokenizer.decode(output[ids.shape[1] :], skip_special_tokens=True))
    return writer.written


def complete(completer: Pipeline, text: str) -> str:
    """Return the completion of a text in one line."""
    if completer.task == "text-generation":
        return one_line(continue_text(completer, text))
    masks = fill_masks(completer, text)
    return "; ".join(", ".join(f"{token} {probability:.1%}" for token, probability in mask) for mask in masks)


def report_samples(completer: Pipeline, texts: Sequence[str], reporter: Reporters, step: int) -> None:
    """Report the completions of texts in the log, and as a table in the dashboard. A failure is a warning."""
    try:
        rows = [(text, complete(completer, text)) for text in texts]
    except Exception as error:
        logger.warning(f"Could not complete the texts of --sample_text at step #{step}: {describe(error)}")
        return
    for text, completion in rows:
        logger.info(f"Step #{step}\t{text} -> {completion}")
    reporter.report_table("sample texts", ("text", "completion"), rows, step)


def _quote(filling: dict, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the quoted text of a token within a sentence: "▁" is a space, and "##ing" is written without its mark."""
    text = tokenizer.convert_tokens_to_string(["a", tokenizer.convert_ids_to_tokens(filling["token"])])[1:]
    return repr(one_line(text) or text)
