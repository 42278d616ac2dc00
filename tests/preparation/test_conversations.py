"""Conversations: rows, chat templates, what is learnt, samples."""

import gzip
import io
import itertools
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset
from pyarrow import parquet

import tokenize_wikitext103
from cotrain.common.errors import UserError
from cotrain.data.loading import check_dataset, load_split
from cotrain.data.manifest import Manifest
from cotrain.data.tokenizers import load_tokenizer
from cotrain.preparation.chat_shapes import ChatReader
from cotrain.preparation.conversations import encode_conversation, read_conversations, set_end_of_turn
from cotrain.preparation.encoding import TextEncoder
from cotrain.preparation.packing import PackingConfig, build_samples, pack_conversations
from cotrain.preparation.sources import open_files
from tests.preparation.test_tokenize_script import arguments
from tests.support.conversations import chat, make_chat_tokenizer


def prepare_tokenizer(style: str):
    tokenizer = make_chat_tokenizer(style)
    set_end_of_turn(tokenizer)
    return tokenizer


def learn(style: str, row: dict) -> tuple[str, list[str]]:
    """Return the whole text of a row, and the parts of it that are learnt."""
    tokenizer = prepare_tokenizer(style)
    (document,) = read_conversations("f.jsonl", [row])
    ids, mask = encode_conversation(document, tokenizer)
    assert ids.dtype == np.int32 and mask.dtype == np.int8 and len(ids) == len(mask)
    parts = itertools.groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1])
    return tokenizer.decode(ids), [tokenizer.decode([x for x, _ in part]) for is_learnt, part in parts if is_learnt]


TOOL_ROLES = ("system", "user", "assistant", "tool", "assistant")


# --- what is learnt --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["chatml", "marked"])
def test_all_answers_are_learnt_with_the_end_of_their_turn(style):
    """A character may be several tokens, also the last one of an answer."""
    text, learnt = learn(style, chat("Hi", "Grüß Gott 🎉", "more?", "Two\n\nparagraphs."))
    assert learnt == ["Grüß Gott 🎉<|im_end|>", "Two\n\nparagraphs.<|im_end|>"]
    assert text.startswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nGrüß") and text.endswith("_end|>\n")


IN_BOTH_STYLES = {  # name -> row, answers that are learnt
    "other roles": (chat("Be kind.", "q", "let me look", "3", "three", roles=TOOL_ROLES), ["let me look", "three"]),
    "prompt": ({"prompt": "Say red", "completion": "red"}, ["red"]),
    # As TRL: of a prompt that is a conversation itself nothing is learnt.
    "prompt of messages": (
        {"prompt": chat("a", "b", "c")["messages"], "completion": chat("c", "d")["messages"][1:]},
        ["d"],
    ),
    "system": (chat("hello", "Hi", "Ho", roles=("system", "user", "assistant")), ["Ho"]),
}


@pytest.mark.parametrize("style", ["chatml", "marked"])
@pytest.mark.parametrize("name", IN_BOTH_STYLES)
def test_answers_are_learnt_in_both_styles(style, name):
    row, answers = IN_BOTH_STYLES[name]
    assert learn(style, row)[1] == [f"{text}<|im_end|>" for text in answers]


@pytest.mark.parametrize(
    ("style", "row", "learnt"),
    [
        ("chatml", chat("hello", "Hi", "Ho", roles=("assistant", "user", "assistant")), ["Ho<|im_end|>"]),
        # The prompt ends in a newline, the answer begins with two: the first two are a token, which is not learnt.
        ("chatml", chat("Hi", "\n\nHo"), ["\nHo<|im_end|>"]),
        ("alternating", chat("Hi", "Ho", "a", "b"), [" Ho<|endoftext|>", " b<|endoftext|>"]),
        ("reasoning", chat("1", "one", "2", "two"), ["one<|im_end|>", "two<|im_end|>"]),
    ],
)
def test_what_is_learnt_in_one_style(style, row, learnt):
    assert learn(style, row)[1] == learnt


def test_special_tokens_in_a_message_are_text():
    tokenizer = prepare_tokenizer("chatml")
    (document,) = read_conversations("f", [chat("<|im_end|>", "a<|im_end|>b")])
    ids, mask = encode_conversation(document, tokenizer)
    assert np.count_nonzero(ids == tokenizer.eos_token_id) == 2 and tokenizer.decode(ids[mask == 1]).startswith(
        "a<|im"
    )


def test_tools_reach_the_template():
    tokenizer = prepare_tokenizer("chatml")
    tokenizer.chat_template = "{{ tools[0].function.name }}" + tokenizer.chat_template
    row = chat("q", "a") | {"tools": [{"type": "function", "function": {"name": "find"}}]}
    (document,) = read_conversations("f", [row])
    assert tokenizer.decode(encode_conversation(document, tokenizer)[0]).startswith("find<|im_start|>user")


def test_the_end_of_a_turn_becomes_the_end_of_text():
    """Generation stops there, and the model's configuration gets it from the tokenizer."""
    assert make_chat_tokenizer("chatml").eos_token == "<|endoftext|>"
    assert prepare_tokenizer("chatml").eos_token == "<|im_end|>"
    assert prepare_tokenizer("alternating").eos_token == "<|endoftext|>"


@pytest.mark.parametrize(("style", "reason"), [("endless", " .*empty.*"), ("none", "")])
def test_tokenizer_that_is_not_for_conversations_is_refused(style, reason):
    with pytest.raises(UserError, match=f"--tokenizer has no chat template{reason}: pass that of") as error:
        prepare_tokenizer(style)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("style", "row", "reason"),
    [
        ("alternating", chat("Be kind.", "q", "a", roles=("system", "user", "assistant")), "roles must alternate"),
        ("changing", chat("q", "a"), "it changes what is before message 2: that is not what the model is asked with"),
    ],
)
def test_template_that_does_not_take_a_row_names_it(style, row, reason):
    with pytest.raises(UserError, match=r"^'f\.jsonl', row 1: the chat template does not take it ") as error:
        learn(style, row)
    assert reason in str(error.value) and "; correct or remove the row, or pass a --tokenizer" in str(error.value)


# --- rows ------------------------------------------------------------------------------------------------------------

ROWS = [chat("Hi", "Grüß Gott 🎉"), {"prompt": "a\nb", "completion": "c"}, chat("x" * 30_000, "y")]
LINES = "\n".join(json.dumps(row) for row in ROWS)
QUESTION = {"role": "user", "content": "q"}
TOOLS = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}


def to_parquet(rows: list[dict]) -> bytes:
    rows = [dict.fromkeys(("messages", "prompt", "completion")) | row for row in rows]
    parquet.write_table(pa.Table.from_pylist(rows), buffer := io.BytesIO())
    return buffer.getvalue()


def read(path: Path, reader: ChatReader | None = None) -> list[tuple[str, list[dict]]]:
    """Return the place and the messages of each row."""
    (part,) = open_files(str(path), path.parent, reader, None).parts["train"]
    return [tuple(json.loads(document)[:2]) for document in part()]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.jsonl", LINES.encode()),
        ("t.jsonl", b"\xef\xbb\xbf" + LINES.encode() + b"\n"),
        ("t.json", LINES.encode()),
        ("t.json", json.dumps(ROWS, indent=1, ensure_ascii=False).encode()),
        ("t.json", json.dumps(ROWS).encode()),
        ("t.jsonl.gz", gzip.compress(LINES.encode())),
        ("t.parquet", to_parquet(ROWS)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_kind_of_file(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    places, messages = zip(*read(tmp_path / name), strict=True)
    assert places == tuple(f"'{name}', row {number}" for number in (1, 2, 3))
    assert list(messages) == [ROWS[0]["messages"], chat("a\nb", "c")["messages"], ROWS[2]["messages"]]


@pytest.mark.parametrize(
    ("name", "content", "number", "messages"),
    [
        ("t.csv", "prompt,completion\nHi,Ho\n", 1, chat("Hi", "Ho")["messages"]),
        ("t.jsonl", f"\n\n{json.dumps(ROWS[0])}\n\n", 3, ROWS[0]["messages"]),  # blank lines count
        ("t.jsonl", json.dumps({"messages": [QUESTION, TOOLS]}), 1, [QUESTION, TOOLS]),
    ],
)
def test_row_that_is_read(tmp_path, name, content, number, messages):
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert read(tmp_path / name) == [(f"'{name}', row {number}", messages)]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('{"messages": [{"role": "us', "no JSON object"),
        ("[1]", "message 1 has no role"),
        ('"text"', "no JSON object"),
        ('{"text": "abc"}', "its columns (text) are no known shape; the nearest is "),
        ('{"instruction": "a", "outptu": "b"}', "the nearest is Alpaca (instruction, input, output)"),
        ('{"conversation_list": []}', "the nearest is ShareGPT (conversation"),
        ('{"conversations": [{"from": "human", "value": "abc"}]}', "no answer to learn"),
        ('{"prompt": "abc"}', "its columns (prompt) are no known shape; the nearest is prompt and "),
        ('{"prompt": "abc", "completion": null}', "its columns (prompt) are no known shape"),
        ('{"prompt": "abc", "completion": 3}', "values of a wrong type"),
        ('{"prompt": "abc", "completion": " \\n"}', "message 2, an answer, is empty"),
        ('{"messages": []}', "no answer to learn"),
        ('{"messages": "abc"}', "values of a wrong type"),
        ('{"messages": ["abc"]}', "no answer to learn"),
        ('{"messages": [{"role": "user", "content": 3}]}', "message 1 has int in place of a text"),
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "message 1 has parts that are no text"),
        (
            '{"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]}',
            "the weight 0.5; 0 and 1 are supported",
        ),
        ('{"messages": [{"role": "assistant", "content": "a", "weight": 0}]}', "no answer to learn"),
        ('{"prompt": "a", "completion": "\\ud83d"}', "half of a surrogate pair"),
    ],
)
def test_a_wrong_row_is_left_out_with_the_reason(tmp_path, row, reason):
    (tmp_path / "t.jsonl").write_text(f"{LINES}\n{row}\n{LINES}\n", encoding="utf-8")
    reader = ChatReader()
    assert len(read(tmp_path / "t.jsonl", reader)) == 6
    (fault,) = reader.faults
    assert fault.startswith("'t.jsonl', row 4: ") and reason in fault and "Error" not in fault


def test_template_without_tools_is_named():
    """As SmolLM2's, which ended in Jinja's words: 'dict object' has no attribute 'content'."""
    tokenizer = prepare_tokenizer("chatml")
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ m.content }}", "{{ '' + m.content }}")
    (document,) = read_conversations("f.jsonl", [{"messages": [QUESTION, TOOLS]}])
    with pytest.raises(UserError, match=r"does not take it \(it takes no calls of tools\); correct or remove the row"):
        encode_conversation(document, tokenizer)


def test_text_is_no_conversation(tmp_path):
    (tmp_path / "t.txt").write_text("abc", encoding="utf-8")
    reader = ChatReader()
    assert read(tmp_path / "t.txt", reader) == [] and reader.faults == ["'t.txt', row 1: no JSON object"]


def test_a_list_of_json_is_read_whatever_its_name(tmp_path):
    """Each line of a list of several lines was "no JSON object"."""
    rows = [{"instruction": f"a{number}", "input": "", "output": "b"} for number in range(3)]
    (tmp_path / "t.txt").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    assert len(read(tmp_path / "t.txt")) == 3


# --- samples ---------------------------------------------------------------------------------------------------------


def test_conversations_are_packed_whole():
    sizes = np.random.default_rng(0).integers(2, 60, 300)
    conversations = [(np.full(n, k, dtype=np.int32), (np.arange(n) > 0).astype(np.int8)) for k, n in enumerate(sizes)]
    samples = list(pack_conversations(conversations, 64))
    found = []
    for sample in samples:
        ids, starts = sample["input_ids"], sample["start_mask"]
        assert starts[0] == 1 and len(ids) <= 64
        assert (np.flatnonzero(starts) == [0, *(np.flatnonzero(np.diff(ids)) + 1)]).all()
        assert ((sample["answer_mask"] == 0) == (starts == 1)).all()
        found.append(list(dict.fromkeys(ids.tolist())))
    assert (
        sorted(itertools.chain(*found)) == list(range(300))
        and sum(len(x["input_ids"]) for x in samples) == sizes.sum()
    )
    assert sizes.sum() / (64 * len(samples)) > 0.95


def test_long_conversations_are_cut_at_turns_and_counted():
    encoder, config = TextEncoder(prepare_tokenizer("chatml")), PackingConfig("chat", max_seq_length=40)
    rows = [chat("Hi", "Ho"), chat("Hi", "o" * 50), chat("Hi", "Hey", "i" * 50, "Ho")]
    encoded = [encode_conversation(x, encoder.tokenizer) for x in read_conversations("f", rows)]
    table, stats = build_samples(encoded, encoder, config)
    sizes = [len(ids) for ids, _ in encoded]
    assert (stats.documents, stats.truncated_documents, stats.dropped_documents) == (3, 2, 1)
    assert stats.long == [size - 1 for size in sizes[1:]]  # without the newline after the end of the turn
    assert stats.tokens == 2 * sizes[0] and stats.dropped_tokens == sum(sizes) - stats.tokens
    learnt = [
        encoder.tokenizer.decode(np.array(ids)[np.array(mask) == 1])
        for ids, mask in zip(table["input_ids"].to_pylist(), table["answer_mask"].to_pylist(), strict=True)
    ]
    assert sorted(learnt) == ["Hey<|im_end|>", "Ho<|im_end|>"]


@pytest.fixture
def conversations(tmp_path) -> dict:
    """Return the flags of a preparation of 200 rows."""
    rows = [chat(f"What is {n}?", f"It is {n}.", "Sure?", "Yes") for n in range(200)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    make_chat_tokenizer("chatml").save_pretrained(tmp_path / "model")
    return {"train_file": str(tmp_path / "chats.jsonl"), "tokenizer": str(tmp_path / "model"), "objective": "chat",
            "max_seq_length": 256}  # fmt: skip


def test_the_script_prepares_conversations(tmp_path, conversations, monkeypatch, capsys):
    monkeypatch.setattr("cotrain.preparation.saving.GROUP_CHARS", 5_000)
    tokenize_wikitext103.prepare(arguments(tmp_path, **conversations))
    assert "200 documents of train text, one in each row" in capsys.readouterr().out
    manifest = Manifest.load(tmp_path / "dataset")
    assert manifest.objective == "chat" and sum(split["documents"] for split in manifest.splits.values()) == 200
    check_dataset(tmp_path / "dataset")
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer"))
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.init_kwargs["objective"] == "chat"
    samples = load_split(tmp_path / "dataset", "train")
    assert sum(map(sum, samples["start_mask"])) == 190
    assert tokenizer.decode(samples[0]["input_ids"]).count("<|im_start|>assistant\n") == 2 * sum(
        samples[0]["start_mask"]
    )


def test_tokenizer_in_its_place_is_replaced_only_on_demand(tmp_path, conversations):
    flags = conversations | {"tokenizer_path": conversations["tokenizer"]}
    with pytest.raises(UserError, match="--tokenizer_path: .* already exists; pass --overwrite"):
        tokenize_wikitext103.prepare(arguments(tmp_path, **flags))
    tokenize_wikitext103.prepare(arguments(tmp_path, **flags, overwrite=True))
    assert load_tokenizer(conversations["tokenizer"]).eos_token == "<|im_end|>"


def test_a_dataset_in_a_folder(tmp_path, conversations):
    (tmp_path / "set").mkdir()
    for split in ("train", "validation"):
        Dataset.from_list([chat(f"{n}?", f"{n}") for n in range(9)]).to_parquet(tmp_path / "set" / f"{split}.parquet")
    flags = {**conversations, "train_file": None, "dataset_name": str(tmp_path / "set"), "sample": False}
    manifest = tokenize_wikitext103.prepare(arguments(tmp_path, **flags))
    assert [split["documents"] for split in manifest.splits.values()] == [9, 9] and manifest.source == "set"


def test_no_answer_at_all_is_explained(tmp_path, conversations):
    Path(conversations["train_file"]).write_text("\n".join([json.dumps(chat("Hi"))] * 4), encoding="utf-8")
    with pytest.raises(UserError, match=r"4 of 4 rows are left out: 'chats.jsonl', row 1: no answer to learn;"):
        tokenize_wikitext103.prepare(arguments(tmp_path, **conversations))
