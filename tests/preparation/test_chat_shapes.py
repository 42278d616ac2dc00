"""Conversations in the shapes in which others publish them, and what is left out."""

import csv
import io
import json
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

import tokenize_wikitext103
from cotrain.common.errors import UserError
from cotrain.data.loading import load_split
from cotrain.data.tokenizers import load_tokenizer
from cotrain.preparation.chat_shapes import ChatReader
from cotrain.preparation.conversations import encode_conversation, read_conversations
from cotrain.preparation.preview import PREVIEW_NAME
from cotrain.preparation.sources import open_files
from tests.preparation.test_conversations import learn, prepare_tokenizer
from tests.preparation.test_tokenize_script import arguments
from tests.support.conversations import chat, make_chat_tokenizer

CALL = {"type": "function", "function": {"name": "get", "arguments": {"city": "Oslo"}}}
TOOL = {"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties": {}}}}
BARE_TOOL = json.dumps([TOOL["function"]])


def share(*turns: tuple[str, str], **others) -> dict:
    return {"conversations": [{"from": role, "value": text} for role, text in turns], **others}


def message(role: str, content: str, **others) -> dict:
    return {"role": role, "content": content, **others}


HI = [message("user", "Hi"), message("assistant", "Ho")]
BRIEF = [message("system", "Be brief."), *HI]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, {"role": "assistant", "content": ["H", "o"]}]
LLAMA_FACTORY_CALLS = share(
    ("human", "Hi"), ("function_call", '{"name": "get", "arguments": {"city": "Oslo"}}'), ("observation", "3"),
    ("gpt", "Ho"), system="Be brief.", tools=BARE_TOOL,
)  # fmt: skip
OPENAI_CALL = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": '{"city": "Oslo"}'}}
SHAPES = {  # name -> row, messages, shape
    "TRL messages": ({"messages": HI}, HI, "messages"),
    "TRL prompt and completion": ({"prompt": "Hi", "completion": "Ho"}, HI, "prompt and completion"),
    "TRL of messages": ({"prompt": HI[:1], "completion": HI[1:]}, HI, "prompt and completion"),
    "UltraChat 200k": ({"prompt": "Hi", "prompt_id": "x", "messages": HI}, HI, "messages"),
    "OpenAI": ({"messages": [*HI[:1], HI[1] | {"weight": 1}]}, HI, "messages"),
    "OpenAI parts": ({"messages": PARTS}, HI, "messages"),
    "Anthropic": ({"system": "Be brief.", "messages": HI}, BRIEF, "messages"),
    "Cohere": ({"messages": [message("User", "Hi"), message("Chatbot", "Ho")]}, HI, "messages"),
    "Gemini": (
        {"systemInstruction": {"role": "system", "parts": [{"text": "Be brief."}]},
         "contents": [{"role": "user", "parts": [{"text": "Hi"}]}, {"role": "model", "parts": [{"text": "Ho"}]}]},
        BRIEF, "Gemini (contents)",
    ),
    "ShareGPT": (share(("human", "Hi"), ("gpt", "Ho")), HI, "ShareGPT (conversations)"),
    "ShareGPT, system": (share(("system", "Be brief."), ("human", "Hi"), ("gpt", "Ho")), BRIEF, "ShareGPT"),
    "LLaMA-Factory's column system": (share(("human", "Hi"), ("gpt", "Ho"), system="Be brief."), BRIEF, "ShareGPT"),
    "LLaMA-Factory's calls": (
        LLAMA_FACTORY_CALLS,
        [*BRIEF[:2], message("assistant", "", tool_calls=[CALL]), message("tool", "3"), HI[1]], "ShareGPT",
    ),
    "unsloth": ({"conversations": HI, "source": "x", "score": 5.2}, HI, "ShareGPT"),
    "a list of texts, as LIMA": ({"conversations": ["Hi", "Ho"], "source": "x"}, HI, "ShareGPT"),
    "an object of lists": ({"messages": {"role": ["user", "assistant"], "content": ["Hi", "Ho"]}}, HI, "messages"),
    "a bare list": (HI, HI, "messages"),
    "Alpaca": ({"instruction": "Hi", "input": "", "output": "Ho"}, HI, "Alpaca (instruction, input, output)"),
    "Alpaca, input": (
        {"instruction": "Add", "input": "1 2", "output": "3"},
        [message("user", "Add\n1 2"), message("assistant", "3")], "Alpaca",
    ),
    "Alpaca of LLaMA-Factory": (
        {"instruction": "Hi", "input": None, "output": "Ho", "system": "Be brief.", "history": [["a", "b"]]},
        [BRIEF[0], *chat("a", "b")["messages"], *HI], "Alpaca",
    ),
    "Alpaca without input": ({"instruction": "Hi", "output": "Ho", "text": "### Instruction: Hi"}, HI, "Alpaca"),
    "Dolly": (
        {"instruction": "Sum up", "context": "a b", "response": "a", "category": "x"},
        [message("user", "Sum up\na b"), message("assistant", "a")], "Dolly",
    ),
    "Axolotl's oasst": ({"INSTRUCTION": "Hi", "RESPONSE": "Ho"}, HI, "Dolly"),
    "SQL with its table": (
        {"question": "How many?", "context": "CREATE TABLE", "answer": "Ho"},
        [message("user", "How many?\nCREATE TABLE"), message("assistant", "Ho")], "question and answer with context",
    ),
    "Dolly's columns, but for one": (
        {"instruction": "Add", "input": "1 2", "response": "3"},
        [message("user", "Add\n1 2"), message("assistant", "3")], "Dolly (instruction, context, response) with input",
    ),
    "HotpotQA, of another context": ({"question": "Hi", "context": {"title": ["x"]}, "answer": "Ho"}, HI, "question"),
    "OpenAI's developer": ({"messages": [message("developer", "Be brief."), *HI]}, BRIEF, "messages"),
    "GSM8K": ({"question": "Hi", "answer": "Ho"}, HI, "question and answer"),
    "OpenOrca": ({"id": "1", "system_prompt": "Be brief.", "question": "Hi", "response": "Ho"}, BRIEF, "OpenOrca"),
    "MetaMath": ({"query": "Hi", "response": "Ho", "type": "x"}, HI, "query and response"),
    "OpenAI's calls": (
        {"messages": [HI[0], {"role": "assistant", "content": None, "tool_calls": [OPENAI_CALL]},
                      message("tool", "3", tool_call_id="c1"), HI[1]], "tools": [TOOL]},
        [HI[0], {"role": "assistant", "tool_calls": [CALL | {"id": "c1"}]}, message("tool", "3", tool_call_id="c1"),
         HI[1]], "messages",
    ),
    "reasoning": (
        {"messages": [HI[0], HI[1] | {"reasoning_content": "why", "thinking": None}]},
        [HI[0], HI[1] | {"reasoning_content": "why"}], "messages",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_each_shape_becomes_messages(name):
    row, messages, shape = SHAPES[name]
    reader = ChatReader()
    (document,) = read_conversations("f", [json.loads(json.dumps(row))], reader)
    assert json.loads(document)[1] == messages and not reader.faults
    ((found, count),) = reader.shapes.items()
    assert found.startswith(shape) and count == 1


def test_columns_that_are_not_learnt_are_named(tmp_path, capsys):
    """A column with the reasons of each answer, or with the table that is asked about, was left out without a word."""
    reader = ChatReader()
    row = {"Question": "Hi", "Complex_CoT": "why", "Response": "Ho", "system": "Be brief.", "empty": "", "n": None}
    list(read_conversations("f", [row, row | {"score": 3}, {"messages": HI}], reader))
    reader.report("f", 1.0)
    assert capsys.readouterr().out.splitlines()[1:] == ["f: not learnt are the columns complex_cot, score"]


@pytest.mark.parametrize(
    "row", [{**share(("human", "q"), ("gpt", "a")), "tools": BARE_TOOL}, {"messages": HI, "tools": [TOOL]}]
)
def test_tools_have_the_form_of_openai(row):
    (document,) = read_conversations("f", [row])
    assert json.loads(document)[3] in ([TOOL], [{"type": "function", "function": TOOL["function"]}])
    (document,) = read_conversations("f", [{"messages": HI, "tools": []}])
    assert json.loads(document)[3] is None


# --- what is learnt --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["chatml", "marked"])
@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}, {"loss_weight": 0.0}, {"loss": False}])
@pytest.mark.parametrize("shape", ["messages", "conversations"])
def test_an_answer_of_weight_0_is_not_learnt(style, mark, shape):
    row = chat("Q", "bad", "again", "good")
    row["messages"][1] |= mark
    row["messages"][3] |= dict.fromkeys(mark, 1)
    assert learn(style, {shape: row["messages"]})[1] == ["good<|im_end|>"]


@pytest.mark.parametrize(("train_on", "learnt"), [("all", "b<|im_end|>d<|im_end|>"), ("last", "d<|im_end|>")])
@pytest.mark.parametrize("style", ["chatml", "marked"])
def test_the_last_answer_alone(style, train_on, learnt):
    tokenizer = prepare_tokenizer(style)
    (document,) = read_conversations("f", [chat("a", "b", "c", "d")], ChatReader(train_on))
    ids, mask = encode_conversation(document, tokenizer)
    assert tokenizer.decode(ids[mask == 1]) == learnt


PREFERENCES = {
    "TRL": {"prompt": "Hi", "chosen": "Ho", "rejected": "no"},
    "TRL of messages": {"prompt": HI[:1], "chosen": HI[1:], "rejected": [message("assistant", "no")]},
    "TRL without a prompt": {"chosen": HI, "rejected": [HI[0], message("assistant", "no")]},
    "UltraFeedback": {"prompt": "Hi", "messages": HI, "chosen": HI, "rejected": [HI[0], message("assistant", "no")]},
    "KTO": {"prompt": "Hi", "completion": "Ho", "label": True},
    "KTO of LLaMA-Factory": {"messages": HI, "label": True},
    "KTO in a CSV": {"prompt": "Hi", "completion": "Ho", "label": "True"},
    "LLaMA-Factory": share(
        ("human", "Hi"), chosen={"from": "gpt", "value": "Ho"}, rejected={"from": "gpt", "value": "no"}
    ),
    "Alpaca": {"instruction": "Hi", "input": "", "chosen": "Ho", "rejected": "no"},
    "OpenAI": {"input": {"messages": HI[:1]}, "preferred_output": HI[1:], "non_preferred_output": HI[1:]},
}  # fmt: skip


@pytest.mark.parametrize("name", PREFERENCES)
def test_of_preference_data_the_good_answers_are_learnt_on_demand(name):
    row = PREFERENCES[name]
    with pytest.raises(UserError, match=r"^'f', row 1 is preference data \(a.*; pass --chosen_only"):
        list(read_conversations("f", [row]))
    reader = ChatReader(chosen_only=True)
    bad = [{**row, "label": False}] if "label" in row else []
    (document,) = read_conversations("f", [*bad, row], reader)
    assert json.loads(document)[1] == HI and not reader.faults


@pytest.mark.parametrize("others", [{"label": "positive"}, {"label": 7}, {"rejected": None}, {"label": None}])
def test_other_labels_are_no_preference(others):
    (document,) = read_conversations("f", [{"prompt": "Hi", "completion": "Ho", **others}])
    assert json.loads(document)[1] == HI


# --- files -----------------------------------------------------------------------------------------------------------


def tool(name: str, **properties) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


def test_parquet_has_no_fields_of_other_rows(tmp_path):
    """Arrow fills the arguments of each tool with those of all others, as null."""
    call = {"role": "assistant", "tool_calls": [CALL]}
    rows = [
        {"messages": HI, "tools": [tool("get", city={"type": "string"})]},
        {"messages": [*HI, HI[0], call], "tools": [tool("add", x={"type": "integer"}, y={"type": "integer"})]},
        {"messages": HI, "tools": []},
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    Dataset.from_list(rows).to_parquet(str(tmp_path / "t.parquet"))
    documents = {}
    for name in ("t.jsonl", "t.parquet"):
        (part,) = open_files(str(tmp_path / name), tmp_path, None, None).parts["train"]
        documents[name] = [json.loads(document)[1:] for document in part()]
    assert documents["t.jsonl"] == documents["t.parquet"] and len(documents["t.jsonl"]) == 3


def prepare(folder: Path, name: str, rows: list | str, **flags) -> dict:
    """Prepare rows; return what is learnt of each sample."""
    text = rows if isinstance(rows, str) else "\n".join(map(json.dumps, rows))
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")
    make_chat_tokenizer(flags.pop("style", "chatml")).save_pretrained(folder / "model")
    source = {"train_file": str(folder / name), "tokenizer": str(folder / "model"), "objective": "chat"}
    tokenize_wikitext103.prepare(arguments(folder, **{**source, "max_seq_length": 256, "overwrite": True, **flags}))
    tokenizer, texts = load_tokenizer(str(folder / "tokenizer")), []
    for split in ("train", "validation"):
        for sample in load_split(folder / "dataset", split):
            texts.append(
                tokenizer.decode([x for x, m in zip(sample["input_ids"], sample["answer_mask"], strict=True) if m])
            )
    return "".join(texts)


def test_words_of_a_csv_are_answers(tmp_path):
    words = ["NA", "null", "None", "007", "true"]
    csv.writer(text := io.StringIO()).writerows([("prompt", "completion"), *((f"q{word}", word) for word in words)])
    learnt = prepare(tmp_path, "t.csv", text.getvalue())
    assert sorted(learnt.split("<|im_end|>")) == sorted(["", *words])


def test_alpaca_with_its_shape_in_one_line(tmp_path, capsys):
    rows = [{"instruction": f"Say {n}", "input": "", "output": f"{n}"} for n in range(40)]
    learnt = prepare(tmp_path, "t.json", json.dumps(rows, indent=2))
    assert sorted(map(int, filter(None, learnt.split("<|im_end|>")))) == list(range(40))
    assert "t.json: 40 rows are Alpaca (instruction, input, output)\n" in capsys.readouterr().out


def test_a_dataset_of_the_hub(tmp_path, monkeypatch, capsys):
    sets = DatasetDict({"train": Dataset.from_list([share(("human", f"{n}"), ("gpt", "Ho")) for n in range(20)])})
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **kwargs: sets)
    prepare(tmp_path, "t.json", "[]", train_file=None, dataset_name="me/chats", sample=False)
    assert "me/chats: 20 rows are ShareGPT (conversations)" in capsys.readouterr().out


# --- what is left out ------------------------------------------------------------------------------------------------

GOOD = [chat(f"Say {n}", f"It is {n}.") for n in range(97)]
BAD = ["{", chat("Hi", ""), {"messages": [message("user", 3)]}]
UNLIKE = [chat("a", "b", "c", roles=("user", "user", "assistant"))] * 3  # the roles do not alternate


def lines(*rows) -> str:
    return "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)


@pytest.mark.parametrize(
    ("bad", "style", "reasons"),
    [
        (
            BAD,
            "chatml",
            ["row 2: no JSON object", "row 3: message 2, an answer, is empty", "row 4: message 1 has int"],
        ),
        (UNLIKE, "alternating", [f"row {n}: the chat template does not take it (roles must" for n in (2, 3, 4)]),
    ],
)
def test_few_bad_rows_are_left_out_and_many_are_an_error(tmp_path, capsys, bad, style, reasons):
    prepare(tmp_path, "t.jsonl", lines(GOOD[0], *bad, *GOOD[1:]), style=style)
    out = capsys.readouterr().out
    assert "3 of 100 rows are left out: 't.jsonl', row " in out and all(reason in out for reason in reasons)
    text = lines(GOOD[0], *bad, *bad, *GOOD[1:])
    with pytest.raises(
        UserError, match=r"6 of 103 rows are left out: .*; …\. Correct .* --max_left_out 0\.06 "
    ) as error:
        prepare(tmp_path, "t.jsonl", text, style=style)
    assert "\n" not in str(error.value) and reasons[0].partition(": ")[2] in str(error.value)
    prepare(tmp_path, "t.jsonl", text, style=style, max_left_out=0.06)


@pytest.mark.parametrize("bad", [BAD[1:], UNLIKE])
def test_no_share_is_advised_where_all_rows_are_left_out(tmp_path, bad):
    """The advice was --max_left_out 1, which leaves no sample."""
    style = "alternating" if bad is UNLIKE else "chatml"
    with pytest.raises(UserError, match=r"(\d) of \1 rows are left out: .*\. Correct them$"):
        prepare(tmp_path, "t.jsonl", lines(*bad), style=style)


def test_no_share_is_advised_where_all_conversations_are_too_long(tmp_path):
    with pytest.raises(UserError, match=r"9 are left out; --max_seq_length \d+ keeps 99 % whole; pass it$"):
        prepare(tmp_path, "t.jsonl", [chat("Hi", "o" * 200)] * 9, max_seq_length=100)


def test_an_unknown_tokenizer_is_not_to_be_trained_for_conversations(tmp_path):
    """--train_tokenizer was advised, which chat refuses."""
    with pytest.raises(UserError, match=r"--tokenizer: .*pass another tokenizer, or go online$"):
        prepare(tmp_path, "t.jsonl", GOOD, tokenizer="./nowhere")


def test_too_many_long_conversations_name_a_length_that_keeps_99_percent(tmp_path, capsys):
    rows = [chat("Hi", "o" * (20 + number)) for number in range(200)]
    what = r"(\d+) of 200 conversations are longer than --max_seq_length 100: 0 are cut .*, \1 are left out; "
    with pytest.raises(
        UserError, match=what + r"--max_seq_length \d+ keeps 99 % whole; pass it, or --max_left_out"
    ) as error:
        prepare(tmp_path, "t.jsonl", rows, max_seq_length=100)
    length = int(str(error.value).rpartition("--max_seq_length ")[2].split()[0])
    capsys.readouterr()
    learnt = prepare(tmp_path, "t.jsonl", rows, max_seq_length=length)
    assert sorted(map(len, learnt.split("<|im_end|>")))[1:] == list(range(20, 218))  # 198 of 200
    assert f"2 of 200 conversations are longer than --max_seq_length {length}: 0 are cut" in capsys.readouterr().out


# --- preview ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_terminal", [False, True])
def test_what_is_learnt_is_shown(tmp_path, capsys, monkeypatch, is_terminal):
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    prepare(tmp_path, "t.jsonl", [chat("Hi \x1b[31m", f"Ho {n}") for n in range(30)], preview=1)
    out, text = capsys.readouterr().out, (tmp_path / "dataset" / PREVIEW_NAME).read_text(encoding="utf-8")
    begin, end = ("\033[32m", "\033[0m") if is_terminal else ("[[", "]]")
    answer = "<|im_start|>user\nHi �[31m<|im_end|>\n<|im_start|>assistant\n{}Ho "
    assert answer.format(begin) in out and answer.format("[[") in text
    assert out.count(begin) == out.count(end) == text.count("[[") > 3 and "\033[31m" not in out
    assert text.count("--- ") == 1 and "<|im_end|>]]" in text
    prepare(tmp_path, "t.jsonl", GOOD, preview=0)
    assert "[[" not in capsys.readouterr().out and not (tmp_path / "dataset" / PREVIEW_NAME).exists()
