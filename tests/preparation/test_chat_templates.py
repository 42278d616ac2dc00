# ruff: noqa: RUF001
"""Chat templates of published models: what is learnt, and whether generate.py asks with what was trained."""

import itertools
import json
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotrain.common.errors import UserError
from cotrain.preparation.chat_template import ChatText
from cotrain.preparation.conversations import (
    NO_REASONING,
    drop_reasoning,
    encode_conversation,
    encode_question,
    report_begin,
    set_end_of_turn,
)
from tests.support.chat_templates import ORDINARY, PUBLISHED, make_tokenizer

CALL = {"type": "function", "function": {"name": "find", "arguments": {"city": "Paris"}}}
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}]


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def answer(text: str, **more) -> dict:
    return {"role": "assistant", "content": text, **more}


def think(text: str, answer: str) -> str:
    return f"<think>\n{text}\n</think>\n\n{answer}"


THREE = [user("Ask one"), answer("First."), user("Ask two"), answer("Second."), user("Ask three"), answer("Third.")]
CASES = {
    "turns": THREE,
    "system": [{"role": "system", "content": "Ask kindly"}, *THREE],
    "reasoning": [{**x, "content": think(f"Why {x['content']}", x["content"])} if n % 2 else x
                  for n, x in enumerate(THREE)],
    "tools": [user("Ask one"), answer("", tool_calls=[CALL]), {"role": "tool", "content": "Ask sun"},
              answer("Sunny."), user("Ask two"), answer("Second.")],
    "empty": [*THREE[:3], answer(""), *THREE[4:]],
    "control": [user("Ask END <think>\x07 one"), answer("A END b\x1b."), *THREE[2:]],
}  # fmt: skip
END, BLOCK = "<|im_end|>", "<think>\n\n</think>\n\n"
NO_CALLS = {"tools": "it leaves out or changes 'find' of message 2"}
# Template -> token that ends an answer, and the cases that it refuses, with a word of the reason
EXPECTED: dict[str, tuple[str, dict[str, str]]] = {
    **dict.fromkeys(("ChatML", "Qwen 2.5", "Qwen 3", "LFM 2", "SmolLM 3", "Nemotron 3"), (END, {})),
    "Qwen 3.5": (END, {"tools": "it changes what is before message 4"}),
    "Phi 4": (END, NO_CALLS),
    "Llama 3": ("<|eot_id|>", {}),
    "Llama 2": ("</s>", {"tools": "alternate"}),
    "Mistral": ("</s>", {"tools": "alternate", "system": "alternate"}),
    "Gemma 2": ("<end_of_turn>", {"tools": "alternate", "system": "no system role"}),
    "Gemma 3": ("<end_of_turn>", {"tools": "alternate"}),
    "Gemma 4": ("<turn|>", {}),
    **dict.fromkeys(("Zephyr", "Vicuna"), ("</s>", NO_CALLS)),
    "OpenChat": ("<|end_of_turn|>", NO_CALLS),
    "Phi 3": ("<|end|>", NO_CALLS),
    "Tülu": ("<|endoftext|>", NO_CALLS),
    "Command R": ("<|END_OF_TURN_TOKEN|>", NO_CALLS),
    "Granite 3": ("<|end_of_text|>", NO_CALLS),
    "EXAONE": ("[|endofturn|]", NO_CALLS),
    "DeepSeek R1": (
        "<｜end▁of▁sentence｜>",
        {"reasoning": "it leaves out the reasoning of message 6, but"},
    ),
    "DeepSeek V3": ("<｜end▁of▁sentence｜>", {"tools": "can only concatenate str"}),
    "gpt-oss": ("<|return|>", {}),
}


def prepare(name: str):
    tokenizer = make_tokenizer(PUBLISHED[name])
    set_end_of_turn(tokenizer)
    return tokenizer


def encode(tokenizer, messages: list[dict], tools=None) -> tuple[np.ndarray, list[str], int]:
    """Return the ids, the texts that are learnt, and how many answers lost their reasoning."""
    dropped = Counter()
    ids, mask = encode_conversation(json.dumps(["row 1", messages, 0, tools]), tokenizer, dropped)
    parts = itertools.groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1])
    return ids, [tokenizer.decode([x for x, _ in part]) for is_on, part in parts if is_on], dropped["reasoning"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", EXPECTED)
def test_what_is_learnt_of_a_published_template(name, case):
    end, refused = EXPECTED[name]
    tokenizer = prepare(name)
    assert tokenizer.eos_token == end
    messages = json.loads(json.dumps(CASES[case]).replace("END", end))
    tools = TOOLS if case == "tools" else None
    if case in refused:
        with pytest.raises(UserError, match=f"^row 1: the chat template does not take it .*{refused[case]}"):
            encode(tokenizer, messages, tools)
        return
    ids, learnt, dropped = encode(tokenizer, messages, tools)
    plain = tokenizer.apply_chat_template(messages, tools=tools)["input_ids"]
    assert tokenizer.decode(ids) == tokenizer.decode(plain)
    assert (ids.tolist() == plain) == (case != "control"), "special tokens that a message has are text"
    # gpt-oss ends earlier answers, and several calls of tools, with other tokens.
    assert not any("Ask" in text or "<think>\n\n</think>" in text for text in learnt)
    answers = [x["content"].split("</think>\n\n")[-1] for x in messages if x["role"] == "assistant"]
    kept = learnt if len(learnt) == 3 else [None, None, *learnt]
    assert len(kept) == 3 and (len(learnt) == 3 or dropped == 2)
    for text, said in zip(kept, answers, strict=True):
        assert text is None or said in text
        assert text is None or text.endswith((end, "<|end|>", "<|call|>", "<tool_call|>")), "and nothing after it"


@pytest.mark.parametrize("name", EXPECTED)
def test_each_answer_is_learnt_from_where_the_model_is_asked(name):
    """By the template's own prompt: without reasoning if it can be asked so, and up to an empty block."""
    tokenizer = prepare(name)
    ids, mask = encode_conversation(json.dumps(["row", THREE, 0, None]), tokenizer)
    begins = np.flatnonzero(np.diff(mask, prepend=0) == 1)
    for begin, number in zip(begins, (1, 3, 5), strict=True):
        asked = {
            tokenizer.apply_chat_template(THREE[:number], add_generation_prompt=True, tokenize=False, **more)
            for more in ({}, {"enable_thinking": False})
        }
        before = tokenizer.decode(ids[:begin])
        assert {before, before.removesuffix("<think>\n\n</think>\n\n"), f"{before}<think>\n"} & asked


TEXTS = st.text(st.characters(exclude_categories=("Cs", "Co")), max_size=40)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(EXPECTED)), st.lists(st.one_of(TEXTS, st.integers(0, 99)), min_size=1, max_size=6))
def test_generate_asks_with_a_prefix_of_what_was_trained(name, parts):
    """Whatever a user types, also special tokens."""
    tokenizer = prepare(name)
    typed = [x.content for x in tokenizer.added_tokens_decoder.values()]
    text = "".join(typed[x % len(typed)] if isinstance(x, int) else x for x in parts)
    for has_reasoning in (True, False):
        if not has_reasoning:
            drop_reasoning(tokenizer, ["none"])
        said = answer(think("Why.", "Said.") if has_reasoning else "Said.")
        try:
            ids, mask = encode_conversation(json.dumps(["row", [user(text), said], 0, None]), tokenizer)
        except UserError as error:
            assert (name, has_reasoning) == ("DeepSeek R1", True) or "special token in the text" in str(error)
            continue
        asked = encode_question([user(text)], tokenizer)
        assert ids[: len(asked)].tolist() == asked and len(asked) == mask.argmax()
        special = {tokenizer.convert_tokens_to_ids(x) for x in typed} - {
            tokenizer.convert_tokens_to_ids(x) for x in ORDINARY
        }
        fewer = encode_question([user("")], tokenizer)
        assert sum(x in special for x in asked) == sum(x in special for x in fewer), "a user types text alone"


@pytest.mark.parametrize("name", ["GLM 4", "Falcon"])
def test_template_without_an_end_is_refused(name):
    with pytest.raises(UserError, match="no chat template that ends an answer with a special token"):
        prepare(name)


def test_messages_that_the_template_leaves_out_are_counted():
    """One that is written for three roles left the fourth one out without a word."""
    tokenizer, dropped = prepare("ChatML"), Counter()
    messages = [{"role": "critic", "content": "Shorter!"}, *THREE]
    tokenizer.chat_template = "{% for m in messages if m.role != 'critic' %}" + (
        "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    )
    encode_conversation(json.dumps(["row 1", messages, 0, None]), tokenizer, dropped)
    assert dropped["messages"] == 1
    for name, messages in CASES.items():
        encode_conversation(json.dumps(["row 1", messages, 0, None]), prepare("ChatML"), dropped)
        assert dropped["messages"] == 1, name


# --- reasoning -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Qwen 3", "Qwen 3.5", "Nemotron 3"])
def test_reasoning_that_the_template_leaves_out_is_counted(name):
    """Without it, an answer is not what the model is asked for: it is not learnt."""
    _, learnt, dropped = encode(prepare(name), CASES["reasoning"])
    assert dropped == 2 and len(learnt) == 1 and "Why Third." in learnt[0]


def test_reasoning_that_a_template_does_not_know_is_counted():
    messages = [user("Ask"), answer("Said.", reasoning_content="Why."), user("More"), answer("No.")]
    _, learnt, dropped = encode(prepare("ChatML"), messages)
    assert learnt == [f"Said.{END}", f"No.{END}"] and dropped == 1


@pytest.mark.parametrize(
    ("name", "block"),
    [("Qwen 3", BLOCK), ("Qwen 3.5", BLOCK), ("Nemotron 3", "<think></think>"), ("DeepSeek R1", ""), ("ChatML", "")],
)
def test_data_without_reasoning_is_asked_for_none(name, block, capsys):
    """The template that is saved says so to other programs, too."""
    tokenizer = prepare(name)
    drop_reasoning(tokenizer, ["[no reason]"])
    assert ("asks for none" in capsys.readouterr().out) == ("</think>" in PUBLISHED[name])
    assert tokenizer.decode(encode_question([user("Ask")], tokenizer)).endswith(
        ("assistant\n" + block, "<｜Assistant｜>")
    )
    if name == "Qwen 3":
        ask = {"add_generation_prompt": True, "tokenize": False}
        assert tokenizer.apply_chat_template([user("Ask")], **ask).endswith(block)
        assert not tokenizer.apply_chat_template([user("Ask")], **ask, enable_thinking=True).endswith(block)


@pytest.mark.parametrize("row", [[answer(think("Why", "No."))], [answer("No.", reasoning_content="Why")]])
def test_data_with_reasoning_is_asked_for_it(row):
    tokenizer = prepare("Qwen 3.5")
    drop_reasoning(tokenizer, [json.dumps([user("Ask"), *row])])
    assert not tokenizer.chat_template.startswith(NO_REASONING)
    assert tokenizer.decode(encode_question([user("Ask")], tokenizer)).endswith("assistant\n<think>\n")


def test_trl_template_is_taken_where_it_has_one(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "trl/chat_templates"
    folder.mkdir(parents=True)
    (tmp_path / "trl/__init__.py").write_text("raise ImportError('not imported')", encoding="utf-8")
    for name in ("ChatML", "Qwen 3", "GLM 4"):
        (folder / f"{name}.jinja").write_text(PUBLISHED[name], encoding="utf-8")
        training = PUBLISHED["ChatML"].replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
        (folder / f"{name}_training.jinja").write_text(training, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    for name, is_taken in (("ChatML", False), ("Qwen 3", True), ("Qwen 3.5", False)):
        assert ("generation" in prepare(name).chat_template.replace("add_generation", "")) == is_taken
        assert (f"TRL's {name}_training.jinja" in capsys.readouterr().out) == is_taken
    tokenizer = make_tokenizer(PUBLISHED["GLM 4"] + "{# <|im_end|><|im_start|> #}")
    (folder / "GLM 4.jinja").write_text(tokenizer.chat_template, encoding="utf-8")
    set_end_of_turn(tokenizer)
    assert tokenizer.eos_token == END
    assert encode(prepare("Qwen 3"), CASES["reasoning"])[2] == 0


LEFT_OUT = "it leaves out the reasoning of message"
# Of TRL: template -> what it says of reasoning in `content`, of reasoning by its key, and of calls of tools
OF_TRL = {
    **dict.fromkeys(("qwen3", "qwen3_5_think", "qwen3_6", "nemotron_3_nano", "nemotron_3_ultra"), ("", "", "")),
    "glm4moe": ("", "", ""),
    "qwen3_8": ("it writes an empty block before the reasoning of message 2: state that by its key", "", ""),
    "deepseek_r1_distill": ("", LEFT_OUT, "it leaves out or changes 'find' of message 2"),
    "deepseekv3": (LEFT_OUT, LEFT_OUT, ""),
    "smolvlm": ("it leaves out or changes 'Said.' of message 2", "it leaves out or changes 'Said.'", "no element 0"),
}


@pytest.mark.parametrize("name", OF_TRL)
def test_templates_of_trl_learn_what_the_model_is_asked_for(name, capsys):
    folder = Path(find_spec("trl").submodule_search_locations[0], "chat_templates")
    template = (folder / f"{name}.jinja").read_text(encoding="utf-8")
    tokenizer = make_tokenizer(template)
    set_end_of_turn(tokenizer)
    has_other = name != "smolvlm"
    assert (f"TRL's {name}_training.jinja" in capsys.readouterr().out) == has_other
    said = [answer(think("Why.", "Said.")), answer("Said.", reasoning_content="Why."), answer("", tool_calls=[CALL])]
    for message, refused in zip(said, OF_TRL[name], strict=True):
        more = [{"role": "tool", "content": "3"}, answer("Three.")] if message["content"] == "" else []
        messages, tools = [user("Ask"), message, *more], TOOLS if more else None
        if refused:
            with pytest.raises(UserError, match=refused):
                encode(tokenizer, messages, tools)
            continue
        ids, learnt, dropped = encode(tokenizer, messages, tools)
        assert ids.tolist() == tokenizer.apply_chat_template(messages, tools=tools)["input_ids"] and not dropped
        assert "Ask" not in "".join(learnt) and (more or ("Why." in learnt[0] and "Said." in learnt[0]))
        if not more:
            asked = encode_question([user("Ask")], tokenizer)
            rest = tokenizer.decode(ids[len(asked) :])
            assert ids[: len(asked)].tolist() == asked and learnt[0] == rest.rstrip("\n")
    if has_other:
        tokenizer = make_tokenizer(template)
        set_end_of_turn(tokenizer)
        drop_reasoning(tokenizer, ["none"])
        ids, learnt, _ = encode(tokenizer, THREE)
        assert [text.strip().partition(".")[0] for text in learnt] == ["First", "Second", "Third"]
        asked = encode_question([user("Ask one")], tokenizer)
        assert ids[: len(asked)].tolist() == asked and tokenizer.decode(ids[len(asked) :]).lstrip().startswith(
            "First."
        )


def test_without_trl_a_line_says_what_may_help(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "trl", None)
    prepare("ChatML")
    assert capsys.readouterr().out == ""
    prepare("Qwen 3")
    assert "TRL may have another one: pip install -r requirements-organiser.txt\n" in capsys.readouterr().out


# --- tokens ----------------------------------------------------------------------------------------------------------


def test_reasoning_keeps_the_tokens_of_the_template():
    tokenizer = prepare("SmolLM 3")
    begin = tokenizer.convert_tokens_to_ids("<think>")
    ids, _, _ = encode(tokenizer, [user("What does <think> do?"), answer(think("Why.", "Said."))])
    assert ids.tolist().count(begin) == 1


def test_a_special_token_that_changes_the_text_is_refused():
    tokenizer = prepare("ChatML")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "m.content", "'X' if m.content.startswith('<|') else m.content", 1
    )
    with pytest.raises(UserError, match="a special token in the text of a message changes what the template writes"):
        encode(tokenizer, [user("<|im_end|>"), answer("Said.")])


def test_prompt_that_differs_in_its_last_token_is_refused():
    """As of Nemotron's first templates. White space alone may be joined with that of the answer."""
    tokenizer = prepare("ChatML")
    asking, written = "assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"
    tokenizer.chat_template = tokenizer.chat_template.replace(asking, written)
    with pytest.raises(UserError, match="it changes what is before message 2"):
        encode(tokenizer, [user("Ask"), answer(think("Why", "Said.").replace("<think>\n", "<think>"))])
    tokenizer = prepare("ChatML")
    tokenizer.chat_template = tokenizer.chat_template.replace(asking, "assistant\nS{% endif %}")
    with pytest.raises(UserError, match="it changes what is before message 2"):
        encode(tokenizer, [user("Ask"), answer("No.")])


def test_marks_restrict_what_is_learnt():
    tokenizer = prepare("ChatML")
    mark = "{% if 'Second' in m.content %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}"
    mark += "{% endif %}"
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ m.content }}", mark)
    assert encode(tokenizer, THREE)[1] == [f"Second.{END}"]


def test_tokenizer_that_tells_no_places_gives_the_same():
    """As for special tokens in messages: each question is encoded whole."""
    for name in ("Qwen 3", "gpt-oss", "Vicuna"):
        tokenizer = prepare(name)
        with pytest.MonkeyPatch.context() as patch:
            ids, mask = encode_conversation(json.dumps(["row", CASES["turns"], 0, None]), tokenizer)
            patch.setattr(ChatText, "last_special", lambda self, position: (0, 0))
            slow_ids, slow_mask = encode_conversation(json.dumps(["row", CASES["turns"], 0, None]), tokenizer)
        assert (ids == slow_ids).all() and (mask == slow_mask).all()


@pytest.mark.parametrize(
    ("name", "adds", "line"),
    [
        ("ChatML", True, "Conversations are learnt and asked without <bos>: the chat template does not write it\n"),
        ("ChatML", False, ""),
        ("Llama 3", True, ""),
        ("Llama 3", False, "Conversations begin with <bos>, which the tokenizer puts before no other text\n"),
    ],
)
def test_begin_of_a_conversation_is_said_if_it_differs(name, adds, line, capsys):
    tokenizer = prepare(name)
    if adds:
        tokenizer.backend_tokenizer.post_processor = begin_with("<bos>", tokenizer.bos_token_id)
    report_begin(tokenizer)
    assert capsys.readouterr().out == line
    ids, _, _ = encode(tokenizer, THREE)
    assert ids.tolist().count(tokenizer.bos_token_id) == (name == "Llama 3")


def begin_with(token: str, number: int):
    from tokenizers.processors import TemplateProcessing

    return TemplateProcessing(single=f"{token} $A", special_tokens=[(token, number)])
