"""Conversations: rows with messages, and their token ids by the chat template of a tokenizer."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from cotrain.common.errors import INSTALL, UserError, first_line
from cotrain.preparation.chat_shapes import ChatReader
from cotrain.preparation.chat_template import ChatText, find_reasoning
from cotrain.preparation.corpus import Conversation
from cotrain.preparation.encoding import leading_ids

# A default, which a caller may change
NO_REASONING = "{%- set enable_thinking = enable_thinking | default(false) -%}"
_REASONING = re.compile(r'"(?:reasoning_content|thinking|reasoning)": "[^"]|</think')
SURROGATE = re.compile(r"[\ud800-\udfff]")


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
            if SURROGATE.search(document):
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

    A template that leaves out reasoning, or ends no answer, is replaced by TRL's for training, if TRL has one for it.

    :raises UserError: if there is no template, or no such token
    """
    if not tokenizer.chat_template:
        raise UserError("--tokenizer has no chat template: pass that of a model for conversations, an instruct one")
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "ANSWER"}]
    try:
        tokenizer.chat_template = tokenizer.get_chat_template()  # of several the default
        for replace in (take_training_template, None):
            after = tokenizer.apply_chat_template(messages, tokenize=False).rpartition("ANSWER")[2].lstrip()
            ends = [token for token in tokenizer.get_added_vocab() if after.startswith(token)]
            if replace is None or (ends and "</think>" not in tokenizer.chat_template) or not replace(tokenizer):
                break
        tokenizer.eos_token = max(ends, key=len)
    except Exception as error:
        fault = f"no chat template that ends an answer with a special token ({first_line(error):.114})"
        raise UserError(f"--tokenizer has {fault}: pass that of a model for conversations, an instruct one") from None


def take_training_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Replace the chat template by what TRL made of it for training, and say so. Return whether there is one.

    TRL's files are read without importing it, which takes seconds.
    """
    if (package := find_spec("trl")) is None:
        print(f"The chat template does not write all that is learnt. TRL may have another one: {INSTALL['trl']}")
        return False
    folders = package.submodule_search_locations or ()
    for path in [path for folder in folders for path in sorted(Path(folder).glob("chat_templates/*.jinja"))]:
        training = path.with_stem(f"{path.stem}_training")
        if path.read_text(encoding="utf-8").rstrip() == tokenizer.chat_template.rstrip() and training.exists():
            tokenizer.chat_template = training.read_text(encoding="utf-8")
            print(f"Chat template: TRL's {training.name}, as that of --tokenizer does not write all that is learnt")
            return True
    return False


def encode_conversation(
    document: str, tokenizer: PreTrainedTokenizerBase, dropped: Counter[str] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the token ids of a document of `read_conversations`, and a mask: 1 in the answers after its prompt.

    The end-of-text token after an answer belongs to it, and nothing after that.

    :param dropped: counts the answers whose "reasoning" the template leaves out, which are learnt if it always does,
        and the "messages" of others that it leaves out
    :raises UserError: if the template does not take the messages, or does not show which tokens are answers
    """
    place, messages, num_given, tools = json.loads(document)
    dropped = Counter() if dropped is None else dropped
    try:
        chat = ChatText(tokenizer, messages, tools)
        mask, limit = np.zeros(len(chat.ids), dtype=np.int8), len(chat.text)
        # What a tool says may be written as JSON
        others = (message for message in chat.messages if message["role"] not in ("assistant", "tool"))
        dropped["messages"] += sum((message.get("content") or "").strip() not in chat.text for message in others)
        for number in range(len(messages) - 1, max(1, num_given) - 1, -1):
            if messages[number]["role"] != "assistant" or not messages[number].get("weight", 1):
                continue
            reasoning = find_reasoning(chat.messages[number])
            if reasoning not in chat.text:
                dropped["reasoning"] += 1
                if reasoning in chat.render(chat.messages[: number + 1]):
                    continue  # of the last answer it is written: without it, the answer is not what is asked for
            start, position = chat.find_start(number)
            stop = chat.find_stop(number, start, limit)
            chat.check_answer(number, chat.text[position:limit])
            inside = [begin for begin, end in chat.marks if end > position and begin < limit]
            if inside or not chat.marks:
                mask[max(start, chat.index(min(inside, default=0))) : stop] = 1
            limit = position
    except Exception as error:
        remedy = "correct or remove the row, or pass a --tokenizer with another chat template"
        reason = first_line(error)
        if reason.endswith("has no attribute 'content'"):  # Jinja's; of messages only a call of a tool has none
            reason = "it takes no calls of tools"
        raise UserError(f"{place}: the chat template does not take it ({reason:.200}); {remedy}") from None
    return chat.ids, mask


def drop_reasoning(tokenizer: PreTrainedTokenizerBase, documents: Iterable[str]) -> None:
    """Let the chat template ask for no reasoning, if it can ask for some and no document has any."""
    template = tokenizer.chat_template
    if "</think>" in template and not any(map(_REASONING.search, documents)):
        tokenizer.chat_template = NO_REASONING + template
        turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}] * 2
        try:
            encode_conversation(json.dumps(["", turns, 0, None]), tokenizer)
        except UserError:  # it does not write what it asks with then
            tokenizer.chat_template = template
            return
        print("No answer has reasoning: the chat template that is saved asks for none, unless enable_thinking is true")


def report_begin(tokenizer: PreTrainedTokenizerBase) -> None:
    """Print if conversations begin in another way than the tokenizer begins other texts."""
    leading, is_written = leading_ids(tokenizer), "bos_token" in tokenizer.chat_template
    chat = ChatText(tokenizer, [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}])
    if chat.ids[: len(leading)].tolist() != leading:
        begin = tokenizer.decode(leading)
        print(f"Conversations are learnt and asked without {begin}: the chat template does not write it")
    elif not leading and is_written and chat.ids[0] == tokenizer.bos_token_id:
        print(f"Conversations begin with {tokenizer.bos_token}, which the tokenizer puts before no other text")


def encode_question(messages: list[dict], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids that a model answers: those before the answer in a conversation that it has learnt from."""
    has_reasoning = "</think>" in tokenizer.chat_template and not tokenizer.chat_template.startswith(NO_REASONING)
    answer = {"role": "assistant", "content": "<think>\nR\n</think>\n\nA" if has_reasoning else "A"}
    chat = ChatText(tokenizer, [*messages, answer])
    try:
        return chat.ids[: chat.find_start(len(messages))[0]].tolist()
    except ValueError:  # a template of which nothing can be learnt
        return chat.encode(chat.render(chat.messages[:-1], add_generation_prompt=True))
