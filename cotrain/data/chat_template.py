"""A conversation as the chat template of a tokenizer writes it: text, token ids, where answers begin and end."""

import re
from functools import cached_property, lru_cache

import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import mark_control_tokens, render_jinja_template

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # a template that marks what the model writes
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")  # as transformers takes them
_THINK, _END = (rf"[<\[]{slash}think(?:ing)?[>\]]" for slash in ("", "/"))
_REASONING_TOKEN = re.compile(f"{_THINK}|{_END}", re.IGNORECASE)
_OPENER, _EMPTY = re.compile(rf"{_THINK}\s*\Z", re.IGNORECASE), re.compile(rf"{_THINK}\s*{_END}\n*", re.IGNORECASE)
_BLANK = "\U000f1234"  # for private use: in the place of what the model does not write
_MARKS = re.compile("[\U000f0000\U000f0001]")  # that transformers puts around special tokens in a message


def find_reasoning(message: dict) -> str:
    """Return the reasoning of an answer, of its own key or within `content`; empty if there is none."""
    stated = next((message[key] for key in REASONING_KEYS if isinstance(message.get(key), str)), "")
    parts = _REASONING_TOKEN.split(message.get("content") or "", maxsplit=2)
    return stated.strip() or (parts[-2].strip() if len(parts) > 1 else "")


@lru_cache(maxsize=2)
def _control_tokens(tokenizer: PreTrainedTokenizerBase, template: str) -> tuple[re.Pattern, re.Pattern, list[int]]:
    """Return what finds tokens that are text in other messages, and in answers; and the ids of special tokens.

    An answer writes the tokens around its reasoning and its calls of tools itself.
    """
    added = tokenizer.added_tokens_decoder
    special = [x.content for x in added.values() if x.special]
    others = [x.content for x in added.values() if x.content in template and x.content.strip() and not x.special]
    lists = special + others, [x for x in special if not _REASONING_TOKEN.fullmatch(x)]
    find = (re.compile("|".join(map(re.escape, sorted(x, key=len, reverse=True))) or "(?!)") for x in lists)
    return *find, [number for number, token in added.items() if token.special]


@lru_cache(maxsize=256)
def _encode_plain(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


@lru_cache(maxsize=2)
def _earlier_end(tokenizer: PreTrainedTokenizerBase, template: str) -> int | None:
    """Return the id of the special token after an answer that is not the last one. Of gpt-oss it is another token."""
    pair = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "ANSWER"}]
    text = tokenizer.apply_chat_template(pair * 2, tokenize=False, chat_template=template)
    after = _encode_plain(tokenizer, text.split("ANSWER")[1])
    return next((number for number in after if number in _control_tokens(tokenizer, template)[2]), None)


class ChatText:
    """Text and token ids of messages. These are the ids of `apply_chat_template`, but for special tokens in messages.

    A special token in a message is encoded as text. So is one of the template, such as <think>, unless in an answer.

    :ivar ids: int32
    :raises Exception: if the template does not take the messages
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, messages: list[dict], tools: list[dict] | None = None):
        self.tokenizer, self.template = tokenizer, tokenizer.get_chat_template(tools=tools)
        others, answers, special = _control_tokens(tokenizer, self.template)
        roles = [message.get("role") for message in messages]
        self.messages = [
            mark_control_tokens(message, answers if role == "assistant" else others)
            for role, message in zip(roles, messages, strict=True)
        ]
        self.tools = mark_control_tokens(tools, others)
        self.is_marked = (self.messages, self.tools) != (messages, tools)
        self.marks: list[tuple[int, int]] = []  # where a template with `{% generation %}` says that the model writes
        if GENERATION.search(self.template):
            options = {**tokenizer.special_tokens_map, "return_assistant_tokens_mask": True}
            given = [{key: value for key, value in x.items() if value is not None} for x in self.messages]
            (self.text,), (self.marks,) = render_jinja_template([given], self.tools, None, self.template, **options)
        else:
            self.text = self.render(self.messages)
        if self.is_marked and _MARKS.sub("", self.text) != tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False
        ):
            raise ValueError("a special token in the text of a message changes what the template writes")
        options = {"sanitize_control_tokens": True} if self.is_marked else {}
        batch = tokenizer(self.text, add_special_tokens=False, verbose=False, **options)
        self.ids = np.array(batch["input_ids"], dtype=np.int32)
        # The first character of each token, if the tokenizer tells
        encoding = None if self.is_marked or not batch.encodings else batch.encodings[0]
        self._starts = None if encoding is None else np.array([start for start, _ in encoding.offsets], dtype=np.int64)
        self._special = np.flatnonzero(np.isin(self.ids, special))

    def render(self, messages: list[dict], **options) -> str:
        return self.tokenizer.apply_chat_template(messages, tools=self.tools, tokenize=False, **options)

    def encode(self, text: str) -> list[int]:
        if not self.is_marked:
            return _encode_plain(self.tokenizer, text)
        options = {"add_special_tokens": False, "verbose": False, "sanitize_control_tokens": True}
        return self.tokenizer(text, **options)["input_ids"]

    def index(self, position: int) -> int:
        """Return the number of the first token that begins at a character or after it."""
        if self._starts is None:
            return len(self.encode(self.text[:position]))
        return int(np.searchsorted(self._starts, position))

    def find_start(self, number: int) -> tuple[int, int]:
        """Return where answer `number` begins, as a token and as a character: after what the model is asked with.

        An empty block of reasoning belongs to the question: the model is not to write one.

        :raises ValueError: if the question is not what stands before the answer
        """
        for prompt in self._prompts(number):
            if self.text.startswith(prompt):
                opener = _OPENER.search(prompt, max(0, len(prompt) - 40))
                empty = _EMPTY.match(self.text, opener.start() if opener else len(prompt))
                prompt = self.text[: max(len(prompt), empty.end() if empty else 0)]
                start = self._match(prompt)
                if start is not None:
                    return start, len(prompt)
        raise ValueError(f"it changes what is before message {number + 1}: that is not what the model is asked with")

    def _prompts(self, number: int):
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
        begins = {0}
        if self._starts is not None:  # tokens after a special one do not depend on those before it
            count = np.searchsorted(self._special, self.index(len(prompt)))
            begins.add(int(self._special[count - 1]) if count else 0)
        for begin in sorted(begins, reverse=True):
            tail = self.encode(prompt[self._starts[begin] if begin else 0 :])
            stop = begin + len(tail)
            if self.ids[begin:stop].tolist() == tail:
                return stop
            if tail and self.ids[begin : stop - 1].tolist() == tail[:-1]:
                joined, last = self.ids[stop - 1 : stop - 1 + len(tail)].tolist(), tail[-1]
                texts = self.tokenizer.convert_ids_to_tokens([last, *joined])
                missing = len(texts[0])
                for count, (number, text) in enumerate(zip(joined, texts[1:], strict=True), 1):
                    missing -= len(text)
                    if self.tokenizer.decode([number]).strip():
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
