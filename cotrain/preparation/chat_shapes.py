"""Shapes in which conversations are published, and how a row of each becomes messages of {role, content, …}."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher
from typing import Any

from cotrain.common.errors import UserError

# Name, and the columns of the messages or the prompt, of text after the prompt, and of the answer. A row has the first
# shape of which it has the prompt and the answer. Case does not count. In each shape, a text in _EXTRA may follow one
# of the prompt.
SHAPES = (
    ("preference data (prompt, chosen)", "prompt", "", "chosen"),
    ("preference data of Alpaca (instruction, input, chosen)", "instruction", "input", "chosen"),
    ("preference data (question, chosen)", "question", "", "chosen"),
    ("preference data of ShareGPT (conversations, chosen)", "conversations", "", "chosen"),
    ("preference data of OpenAI (input, preferred_output)", "input", "", "preferred_output"),
    ("preference data (chosen)", "chosen", "", ""),
    ("messages", "messages", "", ""),
    ("ShareGPT (conversations)", "conversations", "", ""),
    ("ShareGPT (conversation)", "conversation", "", ""),
    ("Gemini (contents)", "contents", "", ""),
    ("prompt and completion", "prompt", "", "completion"),
    ("Alpaca (instruction, input, output)", "instruction", "input", "output"),
    ("Dolly (instruction, context, response)", "instruction", "context", "response"),
    ("prompt and response", "prompt", "", "response"),
    ("question and answer", "question", "", "answer"),
    ("OpenOrca (question, response)", "question", "", "response"),
    ("query and response", "query", "", "response"),
    ("input and output", "input", "", "output"),
)
_EXTRA = ("input", "context")
_BAD = ("rejected", "rejected_response", "non_preferred_output")
_SYSTEM = ("system", "system_prompt", "systeminstruction")
_OTHERS = ("history", "tools", "functions", "kto_tag", "label")
_ROLE, _CONTENT = ("role", "from"), ("content", "value", "text", "parts")
_WEIGHT = ("weight", "loss_weight", "train", "training", "loss")
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt", "chatbot", "bot", "bing", "bard"), "assistant"),
    **dict.fromkeys(("observation", "tool", "tool_response", "function", "function_response", "ipython"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "call"),
    **dict.fromkeys(("developer", "system"), "system"),
}
MAX_NAMED = 8  # columns in a line


class ChatReader:
    """Reads rows as conversations. Counts them by shape, and those that are left out.

    :param train_on: "all" answers of a conversation, or the "last"
    :param chosen_only: whether to take the good answers of preference data, which are refused otherwise
    """

    def __init__(self, train_on: str = "all", chosen_only: bool = False):
        self.train_on, self.chosen_only = train_on, chosen_only
        self.num_rows = 0
        self.shapes: Counter[str] = Counter()
        self.unused: Counter[str] = Counter()  # rows with something in a column that is not learnt, by its name
        self.faults: list[str] = []  # "'FILE', row 3: REASON"

    def convert(self, place: str, row: Any) -> tuple[list[dict], int, list[dict] | None] | None:
        """Return the messages of a row, the length of the prompt in them, and the tools; None for a bad answer.

        :raises ValueError: if the row is no conversation, with the reason
        :raises UserError: if it is preference data, unless `chosen_only`
        """
        self.num_rows += 1
        row = {"messages": row} if isinstance(row, list) else row
        if not isinstance(row, Mapping) or None in row:
            raise ValueError("more values than columns" if isinstance(row, Mapping) else "no JSON object")
        row = {name.lower(): value for name, value in row.items() if value is not None}
        label = {"true": 1, "1": 1, "false": 0, "0": 0}.get(str(row.get("kto_tag", row.get("label"))).lower())
        is_pair = _find(row, _BAD) is not None
        if not self.chosen_only and (is_pair or label is not None):
            what = f"{place} is preference data ({'a good and a bad answer' if is_pair else 'a label'})"
            raise UserError(f"{what}, whose bad answers would be learnt; pass --chosen_only to learn the good ones")
        name, prompt, extra, answer = _find_shape(row)
        extras = [x for x in (extra, *_EXTRA) if x in row and x != prompt and (x == extra or isinstance(row[x], str))]
        extra = extras[0] if extras and answer and isinstance(row[prompt], str) else ""
        if label == 0:
            return None
        given = _read_turns(row[prompt], "user" if answer else None)
        learnt = _read_turns(row[answer], "assistant") if answer else []
        if extra:
            given[0]["content"] = "\n".join(filter(str.strip, (row[prompt], row[extra])))  # as LLaMA-Factory
        if learnt and learnt[0]["role"] != "assistant":  # the answer is the whole conversation
            given = []
        given = [*_read_turns(row.get("history", []), None), *given]
        if (system := _find(row, _SYSTEM)) and all(message["role"] != "system" for message in given + learnt):
            given = [*_read_turns(system, "system"), *given]
        for message in given + learnt:
            if "content" in message:
                message["content"] = unify_line_ends(message["content"])
        num_given = len(given) if learnt and not isinstance(row[prompt], str) else 0
        self._mark(given + learnt, num_given)
        tools = [_wrap_tool(tool) for tool in _parse(row.get("tools", row.get("functions", [])))]
        self.shapes[name + f" with {extra}" * (bool(extra) and extra not in name)] += 1
        self.unused.update(x for x in row if row[x] and x not in (prompt, extra, answer, *_OTHERS, *_SYSTEM, *_BAD))
        return given + learnt, num_given, tools or None

    def _mark(self, messages: list[dict], num_given: int) -> None:
        """Mark the answers that are not learnt; ValueError if none is left, or one is empty."""
        answers = [n for n, x in enumerate(messages) if n >= num_given and x["role"] == "assistant"]
        for number in answers[:-1] if self.train_on == "last" else ():
            messages[number]["weight"] = 0
        if not (answers := [number for number in answers if messages[number].get("weight", 1)]):
            raise ValueError("no answer to learn")
        for number in answers:
            values = (value for name, value in messages[number].items() if name not in ("role", "weight", "name"))
            if not any(value.strip() if isinstance(value, str) else value for value in values):
                raise ValueError(f"message {number + 1}, an answer, is empty")

    def report(self, name: str, max_left_out: float) -> None:
        """Print the shapes that were found, and the rows that are left out; UserError if these are too many."""
        counts = ", ".join(f"{count:,} rows are {shape}" for shape, count in self.shapes.most_common())
        print(f"{name}: {counts or 'no row is a conversation'}")
        if self.unused:
            columns = ", ".join(f"{column:.30}" for column, _ in self.unused.most_common(MAX_NAMED))
            print(f"{name}: not learnt are the columns {columns}{', …' * (len(self.unused) > MAX_NAMED)}")
        report_left_out(self.faults, self.num_rows, max_left_out)


def report_left_out(faults: list[str], total: int, max_left_out: float) -> None:
    """Print how many of `total` rows are left out, and the first three reasons; UserError if these are too many."""
    what = f"{len(faults):,} of {total:,} rows are left out: {'; '.join(faults[:3])}{'; …' * (len(faults) > 3)}"
    if len(faults) > max_left_out * total:
        share = -(-len(faults) * 100 // total) / 100
        remedy = f", or pass --max_left_out {share} to leave them out" if len(faults) < total else ""
        raise UserError(f"{what}. Correct them{remedy}")
    if faults:
        print(what)


def unify_line_ends(text: str) -> str:
    """Return a text with the line ends of Linux: those of Windows would be learnt."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _find(row: Mapping, names: Iterable[str]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _find_shape(row: Mapping) -> tuple[str, str, str, str]:
    """Return the row of SHAPES; ValueError that names the nearest one if there is none."""
    found = (shape for shape in SHAPES if shape[1] in row and (not shape[3] or shape[3] in row))
    if (shape := next(found, None)) is None:
        others = SHAPES[6:]  # without preferences
        near = max(others, key=lambda x: SequenceMatcher(None, " ".join(row), f"{x[1]} {x[3]}").ratio())[0]
        raise ValueError(f"its columns ({', '.join(row):.100}) are no known shape; the nearest is {near}")
    return shape


def _parse(value: Any) -> list:
    """Return a list, which CSV and some datasets have as JSON."""
    value = json.loads(value) if isinstance(value, str) and value.strip() else value or []
    if not isinstance(value, list):
        raise TypeError(f"{type(value).__name__}, not a list")
    return value


def _read_turns(value: Any, role: str | None) -> list[dict]:
    """Return messages: of a text one of `role`, of texts in a list, or pairs, those of user and assistant in turn."""
    if isinstance(value, Mapping):
        value = value.get("messages", value)  # OpenAI's preferences
    if isinstance(value, Mapping):
        is_table = all(isinstance(x, list) for x in value.values())  # a Sequence of `datasets`: an object of lists
        value = [dict(zip(value, x, strict=True)) for x in zip(*value.values(), strict=True)] if is_table else [value]
    if isinstance(value, str) and role is not None:
        return [{"role": role, "content": value}]
    turns = [x for turn in _parse(value) for x in (turn if isinstance(turn, list) else [turn])]
    return [
        {"role": ("user", "assistant")[n % 2], "content": x} if isinstance(x, str) else _read_message(n, x)
        for n, x in enumerate(turns)
    ]


def _read_message(index: int, turn: Any) -> dict:
    """Return a message with the names of OpenAI; ValueError if its types are wrong."""
    role = _find(turn, _ROLE) if isinstance(turn, Mapping) else None
    if not isinstance(role, str):
        raise ValueError(f"message {index + 1} has no role")
    role, content, weight = _ROLES.get(role.lower(), role), _find(turn, _CONTENT), _find(turn, _WEIGHT)
    others = {key: x for key, x in turn.items() if key not in _ROLE + _CONTENT + _WEIGHT and x is not None}
    if isinstance(content, list):
        parts = [x if isinstance(x, str) else _find(x, ("text", "value", "content")) for x in content]
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else parts
    if not isinstance(content, str) and not (content is None and others.get("tool_calls")):
        kind = "parts that are no text" if isinstance(content, list) else type(content).__name__
        raise ValueError(f"message {index + 1} has {kind.replace('NoneType', 'nothing')} in place of a text")
    if role == "call":
        calls = json.loads(content or "")
        others["tool_calls"] = [_wrap_tool(call) for call in (calls if isinstance(calls, list) else [calls])]
        role, content = "assistant", ""
    for call in others.get("tool_calls", ()):
        function = call.get("function", call)
        if isinstance(function.get("arguments"), str):  # as OpenAI's; templates take an object
            function["arguments"] = json.loads(function["arguments"] or "{}")
    if weight is not None and role == "assistant":
        if float(weight) not in (0, 1):
            raise ValueError(f"message {index + 1} has the weight {weight!r:.20}; 0 and 1 are supported")
        others |= {} if float(weight) else {"weight": 0}
    return {"role": role, **({} if content is None else {"content": content}), **others}


def _wrap_tool(tool: dict) -> dict:
    """Return the schema of a tool, or a call, in the form of OpenAI."""
    return {"type": "function", "function": tool} if "name" in tool and "function" not in tool else tool


def drop_nulls(value: Any) -> Any:
    """Return a value of an Arrow table without the nulls that fill the fields of other rows."""
    if isinstance(value, dict):
        return {name: drop_nulls(x) for name, x in value.items() if x is not None}
    return [drop_nulls(x) for x in value] if isinstance(value, list) else value
