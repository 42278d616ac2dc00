"""Conversations: rows with messages, and their token ids by the chat template of a tokenizer."""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np
from transformers import PreTrainedTokenizerBase

from cotrain.common.errors import UserError, first_line
from cotrain.data.chat_shapes import ChatReader
from cotrain.data.corpus import Conversation

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # a template that marks what the model writes
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def read_conversations(name: str, rows: Iterable, reader: ChatReader | None = None) -> Iterator[Conversation]:
    """Yield each row, an object or its JSON, as JSON of its place, messages, length of the prompt in them, and tools.

    :param reader: gets the faults of the rows that are left out
    :raises UserError: if the rows are preference data, see `ChatReader`
    """
    reader = ChatReader() if reader is None else reader
    for number, row in enumerate(rows, 1):
        if isinstance(row, str) and not row.strip():  # a blank line
            continue
        place = f"'{name}', row {number}"
        try:
            content = reader.convert(place, row)
            document = json.dumps([place, *(content or ())], ensure_ascii=False)
            if _SURROGATE.search(document):
                raise ValueError("half of a surrogate pair")
        except UserError:
            raise
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            reason = (
                first_line(error) if type(error) is ValueError else f"values of a wrong type ({first_line(error)})"
            )
            reader.faults.append(f"{place}: {reason:.160}")
            continue
        if content is not None:
            yield Conversation(document)


def set_end_of_turn(tokenizer: PreTrainedTokenizerBase) -> None:
    """Make the token that ends an answer in the chat template the end-of-text token: generation stops there.

    :raises UserError: if there is no template, or no such token
    """
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "ANSWER"}]
    try:
        tokenizer.chat_template = tokenizer.get_chat_template()  # of several the default
        after = tokenizer.apply_chat_template(messages, tokenize=False).rpartition("ANSWER")[2].lstrip()
        ends = [token for token in tokenizer.get_added_vocab() if after.startswith(token)]
        tokenizer.eos_token = max(ends, key=len)
    except Exception as error:
        fault = f"no chat template that ends an answer with a special token ({first_line(error):.114})"
        raise UserError(f"--tokenizer has {fault}: pass that of a model for conversations, an instruct one") from None


def encode_conversation(document: str, tokenizer: PreTrainedTokenizerBase) -> tuple[np.ndarray, np.ndarray]:
    """Return the token ids of a document of `read_conversations`, and a mask: 1 in the answers after its prompt.

    The end-of-text token after an answer belongs to it, and nothing after that.

    :raises UserError: if the template does not take the messages, or does not show which tokens are answers
    """
    place, messages, num_given, tools = json.loads(document)
    encode = partial(tokenizer.apply_chat_template, tools=tools, return_dict=True)
    try:
        find_answers = _read_marks if _GENERATION.search(tokenizer.chat_template) else _compare_prefixes
        ids, answers = find_answers(encode, messages, num_given)
    except Exception as error:
        remedy = "correct or remove the row, or pass a --tokenizer with another chat template"
        raise UserError(f"{place}: the chat template does not take it ({first_line(error):.200}); {remedy}") from None
    mask = np.zeros(len(ids), dtype=np.int8)
    for start, stop in answers:
        # transformers marks only the first token of a last character, which may be four, and not what follows it.
        ends = np.flatnonzero(ids[start : stop + 4] == tokenizer.eos_token_id)
        mask[start : start + ends[0] + 1 if len(ends) else stop] = 1
    return ids, mask


def _read_marks(encode: Callable, messages: list[dict], num_given: int) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Return the token ids of messages, and where each answer begins and ends, as the template marks them."""
    batch = encode(messages, return_assistant_tokens_mask=True)
    edges = np.diff([0, *batch["assistant_masks"], 0])
    num_read = len(encode(messages[:num_given])["input_ids"]) if num_given else 0
    answers = list(zip(np.flatnonzero(edges == 1), np.flatnonzero(edges == -1), strict=True))
    weights = [message.get("weight", 1) for message in messages if message["role"] == "assistant"]
    if 0 in weights:
        if len(answers) != len(weights):
            raise ValueError(f"it marks {len(answers)} of {len(weights)} answers, of which some have weight 0")
        answers = [answer for answer, weight in zip(answers, weights, strict=True) if weight]
    return np.array(batch["input_ids"], dtype=np.int32), [answer for answer in answers if answer[0] >= num_read]


def _compare_prefixes(
    encode: Callable, messages: list[dict], num_given: int
) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Do the same by comparison with shorter conversations. A special token in a message is encoded as plain text."""
    encode = partial(encode, sanitize_control_tokens=True)
    ids, answers = np.array(encode(messages)["input_ids"], dtype=np.int32), []
    for number in range(max(1, num_given), len(messages)):
        if messages[number]["role"] == "assistant" and messages[number].get("weight", 1):
            prompt = encode(messages[:number], add_generation_prompt=True)["input_ids"]
            turn = encode(messages[: number + 1])["input_ids"]
            # The last token of the prompt may be one with the first of the answer, as newlines are. It is not learnt.
            if not np.array_equal(prompt[:-1], ids[: len(prompt) - 1]):
                raise ValueError(f"it changes what is before message {number + 1}, and has no {{% generation %}}")
            # Templates may leave out the reasoning of all answers but the last: then an answer ends with its turn.
            answers.append((len(prompt), len(turn) if np.array_equal(turn, ids[: len(turn)]) else len(ids)))
    return ids, answers
