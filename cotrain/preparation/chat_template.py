"""A conversation as the chat template of a tokenizer writes it: text, token ids, where answers begin and end."""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import mark_control_tokens, render_jinja_template

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # a template that marks what the model writes
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")  # as transformers takes them
_THINK, _END = (rf"[<\[]{slash}think(?:ing)?[>\]]" for slash in ("", "/"))
_REASONING_TOKEN = re.compile(f"{_THINK}|{_END}", re.IGNORECASE)
_OPENER, _EMPTY = re.compile(rf"{_THINK}\s*\Z", re.IGNORECASE), re.compile(rf"\s*{_THINK}\s*{_END}\n*", re.IGNORECASE)
_BLANK = "\U000f1234"  # for private use: in the place of what the model does not write
_MARKS = re.compile("[\U000f0000\U000f0001]")  # that transformers puts around special tokens in a message


def find_reasoning(message: dict) -> str:
    """Return the reasoning of an answer, from a separate key or from `content`; empty without any."""
    stated = next((message[key] for key in REASONING_KEYS if isinstance(message.get(key), str)), "")
    parts = _REASONING_TOKEN.split(message.get("content") or "", maxsplit=2)
    return stated.strip() or (parts[-2].strip() if len(parts) > 1 else "")


@lru_cache(maxsize=2)
def _control_tokens(tokenizer: PreTrainedTokenizerBase, template: str) -> tuple[re.Pattern, re.Pattern, re.Pattern]:
    """Return what finds the special tokens, those that are text in an answer, and those that are text elsewhere.

    An answer writes the tokens around its reasoning and its calls of tools itself.
    """
    added = tokenizer.added_tokens_decoder.values()
    special = [x.content for x in added if x.special]
    others = [x.content for x in added if x.content in template and x.content.strip() and not x.special]
    lists = special, [x for x in special if not _REASONING_TOKEN.fullmatch(x)], special + others
    first, second, third = (
        re.compile("|".join(map(re.escape, sorted(x, key=len, reverse=True))) or "(?!)") for x in lists
    )
    return first, second, third


def _encode_plain(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids of a text, as the tokenizer does. Its own call takes 1.8 times as long, for its bookkeeping."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        batch: Any = tokenizer(text, add_special_tokens=False, verbose=False)
        return batch["input_ids"]
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = False
    return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids


_encode_again = lru_cache(maxsize=256)(_encode_plain)  # headers of answers


@lru_cache(maxsize=2)
def _earlier_end(tokenizer: PreTrainedTokenizerBase, template: str) -> int | None:
    """Return the id of the special token after an answer that is not the last one. Of gpt-oss it is another token."""
    pair = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "ANSWER"}]
    text = str(tokenizer.apply_chat_template(pair * 2, tokenize=False, chat_template=template))
    token = _control_tokens(tokenizer, template)[0].search(text.split("ANSWER")[1])
    number: Any = token and tokenizer.convert_tokens_to_ids(token[0])
    return number


class ChatText:
    """Text and token ids of messages. These are the ids of `apply_chat_template`, but for special tokens in messages.

    A special token in a message is encoded as text. So is one of the template, such as <think>, unless in an answer.

    :ivar ids: int32
    :raises Exception: if the template does not take the messages
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, messages: list[dict], tools: list[dict] | None = None):
        self.tokenizer, self.template = tokenizer, tokenizer.get_chat_template(tools=tools)
        special, answers, others = _control_tokens(tokenizer, self.template)
        given = [{key: value for key, value in x.items() if value is not None} for x in messages]
        self.messages = [mark_control_tokens(x, answers if x.get("role") == "assistant" else others) for x in given]
        self.tools, self._names = mark_control_tokens(tools, others), tokenizer.special_tokens_map
        self.is_marked = (self.messages, self.tools) != (given, tools)
        has_marks = GENERATION.search(self.template) is not None
        (self.text,), marks = self._render(self.messages, return_assistant_tokens_mask=has_marks)
        # Characters from and to which a template with `{% generation %}` says that the model writes
        self.marks: list[tuple[int, int]] = marks[0] if has_marks else []
        if self.is_marked:
            plain = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
            if _MARKS.sub("", self.text) != plain:
                raise ValueError("a special token in the text of a message changes what the template writes")
        ids = self.encode(self.text, _encode_plain)
        # Special tokens divide the text: the ids after one do not depend on what is before it
        found = [] if self.is_marked else [(x.start(), x[0]) for x in special.finditer(self.text)]
        numbers: Any = tokenizer.convert_tokens_to_ids([text for _, text in found])
        known = set(numbers)
        self.indices = [index for index, number in enumerate(ids) if number in known]  # tokens
        self.places = [place for place, _ in found]  # characters
        if [ids[index] for index in self.indices] != numbers:
            self.places = []
        self.ids = np.array(ids, dtype=np.int32)

    def _render(self, messages: list[dict], **options) -> tuple[list[str], list]:
        names: dict[str, Any] = self._names
        rendered: Any = render_jinja_template([messages], self.tools, None, self.template, **options, **names)
        return rendered

    def render(self, messages: list[dict], **options) -> str:
        return self._render(messages, **options)[0][0]

    def encode(self, text: str, encode: Callable = _encode_again) -> list[int]:
        if not self.is_marked:
            return encode(self.tokenizer, text)
        options: Any = {"add_special_tokens": False, "verbose": False, "sanitize_control_tokens": True}
        batch: Any = self.tokenizer(text, **options)
        return batch["input_ids"]

    def last_special(self, position: int) -> tuple[int, int]:
        """Return the last special token before a character, as token and character; (0, 0) if there is none."""
        count = bisect_left(self.places, position)
        return (self.indices[count - 1], self.places[count - 1]) if count else (0, 0)

    def index(self, position: int) -> int:
        """Return the number of tokens before a character."""
        token, place = self.last_special(position)
        return token + len(self.encode(self.text[place:position]))

    def find_start(self, number: int) -> tuple[int, int]:
        """Return where answer `number` begins, as a token and as a character: after what the model is asked with.

        An empty block of reasoning belongs to the question: the model is not to write one.

        :raises ValueError: if the question is not what stands before the answer, or that block is before reasoning
        """
        reasoning = find_reasoning(self.messages[number])
        for prompt in self._prompts(number):
            if self.text.startswith(prompt):
                opener = _OPENER.search(prompt, max(0, len(prompt) - 40))
                empty = _EMPTY.match(self.text, opener.start() if opener else len(prompt))
                if empty and reasoning and reasoning in self.text:
                    raise ValueError(
                        f"it writes an empty block before the reasoning of message {number + 1}: state that by its key"
                    )
                prompt = self.text[: max(len(prompt), empty.end() if empty else 0)]
                start = self._match(prompt)
                if start is not None:
                    return start, len(prompt)
        if reasoning not in self.text:
            raise ValueError(f"it leaves out the reasoning of message {number + 1}, but asks for it")
        raise ValueError(f"it changes what is before message {number + 1}: that is not what the model is asked with")

    def _prompts(self, number: int) -> Iterator[str]:
        """Yield what the model may be asked with for answer `number`: without reasoning, if the answer has none."""
        has_reasoning = find_reasoning(self.messages[number]) != ""
        switches = ({"enable_thinking": has_reasoning}, {}, {"enable_thinking": True})
        for options in switches if "enable_thinking" in self.template else ({},):
            yield (prompt := self.render(self.messages[:number], add_generation_prompt=True, **options))
        if not has_reasoning and (opener := _OPENER.search(prompt)):
            yield prompt[: opener.start()]

    def _match(self, prompt: str) -> int | None:
        """Return the number of tokens of a prompt if they are the first ones; None if not.

        The last one may be joined or divided in another way if it is white space, and so are those in its place. They
        are not learnt.
        """
        for begin, place in dict.fromkeys((self.last_special(len(prompt)), (0, 0))):
            tail = self.encode(prompt[place:])
            stop = begin + len(tail)
            if self.ids[begin:stop].tolist() == tail:
                return stop
            if tail and self.ids[begin : stop - 1].tolist() == tail[:-1]:
                joined, last = self.ids[stop - 1 : stop - 1 + len(tail)].tolist(), tail[-1]
                texts = self.tokenizer.convert_ids_to_tokens([last, *joined])
                missing = len(texts[0])
                for count, (number, text) in enumerate(zip(joined, texts[1:], strict=True), 1):
                    missing -= len(text)
                    if str(self.tokenizer.decode([number])).strip():
                        break
                    if missing <= 0:
                        return stop - 1 + count
        return None

    @cached_property
    def _others(self) -> dict[int, int]:
        """Return where each text that is no answer begins: message -> character. Of the first system message: no."""
        blank, numbers = list(self.messages), []
        for number, message in enumerate(self.messages):
            if message["role"] not in ("assistant", "system") and message.get("content"):
                blank[number] = {**message, "content": _BLANK}
                numbers.append(number)
        begins, position = {}, 0
        for number, piece in zip(numbers, self.render(blank).split(_BLANK), strict=False):
            position = self.text.find(piece, position) + len(piece)
            begins[number] = position
            if position < len(piece):
                raise ValueError(f"it does not show where message {number + 1} begins")
        return begins

    def check_answer(self, number: int, part: str) -> None:
        """Raise ValueError if a part of the text lacks what answer `number` says, or the tools that it calls."""
        message = self.messages[number]
        calls = [call.get("function", call)["name"] for call in message.get("tool_calls") or ()]
        said = _REASONING_TOKEN.split(message.get("content") or "")[-1].strip()
        if lost := [x for x in (said, *calls) if x not in part]:
            raise ValueError(f"it leaves out or changes {lost[0]!r:.40} of message {number + 1}")

    def find_stop(self, number: int, start: int, limit: int) -> int:
        """Return the token after an answer, whose first one is `start`: after the token that ends a turn.

        :param limit: the character at which the next answer begins
        :raises ValueError: if that token is missing
        """
        if number + 1 < len(self.messages) and self.messages[number + 1]["role"] != "assistant":
            after = (begin for other, begin in self._others.items() if other > number)
            limit = min(limit, next(after, limit))
        part = self.ids[start : len(self.ids) if limit == len(self.text) else self.index(limit)]
        ends = np.flatnonzero(part == self.tokenizer.eos_token_id)
        if len(ends):
            return start + int(ends[0]) + 1
        turn = self.render(self.messages[: number + 1])
        if self.text.startswith(turn):  # as calls of tools, which another token ends
            return self.index(len(turn))
        ends = np.flatnonzero(part == _earlier_end(self.tokenizer, self.template))
        if len(ends):
            return start + int(ends[-1]) + 1
        raise ValueError(f"it does not show where message {number + 1} ends")
