"""Packing of text into samples: complete, in order, and determined by the seed."""

import itertools
from collections import Counter
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain.preparation import corpus
from cotrain.preparation.corpus import Documents, find_layout, hold_out, split_documents
from cotrain.preparation.encoding import TextEncoder
from cotrain.preparation.packing import (
    SCHEMAS,
    PackingConfig,
    build_samples,
    pack_contiguous,
    pack_full_sequences,
    pack_pairs,
    split_sentences,
)
from cotrain.preparation.sources import open_sample
from cotrain.preparation.tokenizer_training import train_tokenizer

CLS, SEP = 2, 3

WIKITEXT = """
 = Valkyria = 

 Valkyria is a game . It is long .

 = = Gameplay = =

 = = = Battles = = =

 There are battles .

 = Constant k filter =

 The prototype has a frequency of
 = 1 henry and capacitance C =
 1 farad .

"""


@pytest.fixture(scope="module")
def documents() -> list[str]:
    return list(split_documents(open_sample().parts["train"][0]()))


@pytest.fixture(scope="module")
def encoder(documents) -> TextEncoder:
    return TextEncoder(train_tokenizer(documents, "mlm_sop", vocab_size=1000, max_seq_length=64))


def pack(sentences, max_seq_length=16, seed=0):
    sentences = [np.array(sentence, dtype=np.int32) for sentence in sentences]
    return list(pack_pairs(sentences, max_seq_length, CLS, SEP, seed))


def segments(sample) -> tuple[list[int], list[int]]:
    """Return A and B in the order of the text."""
    ids = sample["input_ids"]
    first_sep = int(np.flatnonzero(sample["special_tokens_mask"])[1])
    a, b = ids[1:first_sep].tolist(), ids[first_sep + 1 : -1].tolist()
    return (b, a) if sample["sentence_order_label"] else (a, b)


# --- documents -------------------------------------------------------------------------------------------------------


def test_articles_begin_at_titles_but_not_at_sections_or_formulas():
    rows = WIKITEXT.split("\n")
    articles = list(split_documents(rows, find_layout(rows, has_lines=False)))
    assert [article.split("\n")[0] for article in articles] == ["= Valkyria =", "= Constant k filter ="]
    assert "\n".join(articles).split("\n") == [line.strip() for line in WIKITEXT.split("\n") if line.strip()]


@pytest.mark.parametrize(
    ("rows", "documents"),
    [
        (["", "One.", "Two.", " ", "", "= Three =", "", "Four."], ["One.\nTwo.", "= Three =", "Four."]),
        ([], []),
        (["", " \t", "\n"], []),
    ],
)
def test_documents_end_at_blank_lines(rows, documents):
    assert list(split_documents(rows)) == documents


@pytest.mark.parametrize(
    "rows", [["A tweet.", "Another review."], ["One.", "def f():\n    if x:\n\n        y()", "Four."], ["= A =", "b"]]
)
def test_a_row_of_a_dataset_is_a_document(rows):
    assert find_layout(rows, has_lines=False) == "rows"
    assert list(split_documents(["", *rows, " "], "rows")) == rows


@pytest.mark.parametrize("space", [" ", ""])
def test_endless_lines_and_documents_are_cut(monkeypatch, space):
    monkeypatch.setattr(corpus, "MAX_LINE_CHARS", 50)
    monkeypatch.setattr(corpus, "MAX_DOCUMENT_CHARS", 1000)
    line = space.join(f"word{number}" for number in range(1000))
    documents = list(split_documents([line]))
    assert len(documents) > 5 and all(800 < len(document) <= 1050 for document in documents[:-1])
    pieces = "\n".join(documents).split("\n")
    assert all(0 < len(piece) <= 50 for piece in pieces) and space.join(pieces) == line


def test_hold_out_takes_a_fraction_and_leaves_the_rest():
    train, validation = hold_out(200, 0.05, seed=1)
    assert len(validation) == 10 and sorted([*train, *validation]) == list(range(200))
    assert not np.array_equal(validation, hold_out(200, 0.05, seed=2)[1])
    assert [len(part) for part in hold_out(2, 0.99, seed=0)] == [len(part) for part in hold_out(2, 0.01, 0)] == [1, 1]


@given(st.lists(st.integers(1, 50), max_size=30))
def test_groups_are_runs_of_all_documents(lengths):
    groups = Documents("", np.arange(len(lengths)), np.array(lengths, dtype=np.int64)).divide(60)
    assert [row for group in groups for row in group.rows] == list(range(len(lengths)))
    sizes = [group.lengths.sum() for group in groups]
    assert all(0 < size < 60 + 50 for size in sizes) and all(one + two >= 60 for one, two in itertools.pairwise(sizes))


# --- sentences and tokens --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("Dr. Smith left at 5 p.m. today. Did he? Yes!", ["Dr. Smith left at 5 p.m. today.", "Did he?", "Yes!"]),
        ("He ran 3 @.@ 5 miles . Then he slept .", ["He ran 3 @.@ 5 miles .", "Then he slept ."]),
        ("A line\nanother line", ["A line", "another line"]),
    ],
)
def test_sentences_of_plain_and_of_tokenized_text(text, sentences):
    assert split_sentences(text) == sentences


# --- mlm_sop ---------------------------------------------------------------------------------------------------------


def test_pairs_by_hand():
    document = [[10, 11], [12, 13, 14]]
    by_label = {}
    for seed in range(20):
        (sample,) = pack(document, seed=seed)
        by_label[sample["sentence_order_label"]] = {name: np.asarray(value).tolist() for name, value in sample.items()}
    assert by_label[0] == {
        "input_ids": [CLS, 10, 11, SEP, 12, 13, 14, SEP],
        "token_type_ids": [0, 0, 0, 0, 1, 1, 1, 1],
        "attention_mask": [1] * 8,
        "special_tokens_mask": [1, 0, 0, 1, 0, 0, 0, 1],
        "sentence_order_label": 0,
    }
    assert by_label[1] == {
        "input_ids": [CLS, 12, 13, 14, SEP, 10, 11, SEP],
        "token_type_ids": [0, 0, 0, 0, 0, 1, 1, 1],
        "attention_mask": [1] * 8,
        "special_tokens_mask": [1, 0, 0, 0, 1, 0, 0, 1],
        "sentence_order_label": 1,
    }


@given(lengths=st.lists(st.integers(0, 60), max_size=25), max_seq_length=st.integers(8, 40), seed=st.integers(0, 1000))
def test_pairs_hold_the_document_and_nothing_else(lengths, max_seq_length, seed):
    tokens = itertools.count(10)
    sentences = [[next(tokens) for _ in range(length)] for length in lengths]
    document = list(itertools.chain.from_iterable(sentences))
    beginnings = {sentence[0] for sentence in sentences if sentence}
    samples = pack(sentences, max_seq_length, seed)

    pairs = [segments(sample) for sample in samples]
    assert list(itertools.chain.from_iterable(a + b for a, b in pairs)) == (document if len(document) > 1 else [])
    assert len(samples) == (-(-len(document) // (max_seq_length - 3)) if len(document) > 1 else 0)
    if len(samples) > 1:  # the last one is not short
        assert len(samples[-1]["input_ids"]) - 3 >= max(2, (max_seq_length - 3) // 8)
    for number, (sample, (a, b)) in enumerate(zip(samples, pairs, strict=True)):
        assert a and b
        length = len(sample["input_ids"])
        assert length <= max_seq_length and (length == max_seq_length or number >= len(samples) - 2)
        assert all(len(sample[name]) == length for name in SCHEMAS["mlm_sop"].names[:-1])
        assert b[0] in beginnings or not beginnings & set((a + b)[1:])  # within a sentence only if needed
        special = sample["input_ids"][sample["special_tokens_mask"] == 1].tolist()
        assert special == [CLS, SEP, SEP] and sample["attention_mask"].all()


def test_half_of_the_pairs_are_swapped_and_splits_vary():
    document = [[token] * 3 for token in range(10, 30_000)]
    samples = pack(document, max_seq_length=33)
    assert len(samples) > 2900
    assert 0.47 < np.mean([sample["sentence_order_label"] for sample in samples]) < 0.53
    positions = Counter(len(segments(sample)[0]) // 3 for sample in samples)
    assert set(positions) == set(range(1, 10))  # 10 sentences in each
    assert min(positions.values()) > 0.7 * max(positions.values())


# --- mlm and clm -----------------------------------------------------------------------------------------------------


def test_full_sequences_by_hand():
    samples = list(pack_full_sequences([[10, 11], [], [12, 13, 14], [15]], max_seq_length=6, cls_id=CLS, sep_id=SEP))
    assert [sample["input_ids"].tolist() for sample in samples] == [
        [CLS, 10, 11, SEP, 12, SEP],
        [CLS, 13, 14, SEP, 15, SEP],
    ]
    assert [sample["special_tokens_mask"].tolist() for sample in samples] == [[1, 0, 0, 1, 0, 1]] * 2
    # No separator at the start of a sample.
    samples = list(pack_full_sequences([[10, 11, 12, 13], [14]], max_seq_length=6, cls_id=CLS, sep_id=SEP))
    assert [sample["input_ids"].tolist() for sample in samples] == [[CLS, 10, 11, 12, 13, SEP], [CLS, 14, SEP]]


@given(st.lists(st.lists(st.integers(10, 99), max_size=40), max_size=12), st.integers(8, 20))
def test_blocks_hold_every_token(documents, max_seq_length):
    text = list(itertools.chain.from_iterable(documents))

    sequences = list(pack_full_sequences(documents, max_seq_length, CLS, SEP))
    ids = [token for sample in sequences for token in sample["input_ids"][sample["special_tokens_mask"] == 0]]
    assert ids == text
    assert all(len(sample["input_ids"]) == max_seq_length for sample in sequences[:-1])
    assert all(sample["input_ids"][0] == CLS and sample["input_ids"][-1] == SEP for sample in sequences)

    blocks = list(pack_contiguous(documents, max_seq_length, eos_id=0))
    ids = [token for sample in blocks for token in sample["input_ids"]]
    stream = [token for document in documents if document for token in (*document, 0)]
    assert ids in (stream, stream[:-1])  # a remaining single token predicts nothing
    assert all(len(sample["input_ids"]) == max_seq_length for sample in blocks[:-1])


# --- everything ------------------------------------------------------------------------------------------------------


def test_samples_depend_on_the_document_and_the_seed_alone(documents, encoder):
    def make(texts, seed=0):
        return build_samples(texts, encoder, PackingConfig(max_seq_length=64, seed=seed))

    together, stats = make(documents[:20])
    alone = [make([text])[0].to_pylist() for text in documents[:20]]
    assert together.to_pylist() == list(itertools.chain.from_iterable(alone))
    similar, _ = make([f"One value {number}. Two." for number in range(20)])
    assert set(similar["sentence_order_label"].to_pylist()) == {0, 1}
    assert together.schema == SCHEMAS["mlm_sop"] and not together.equals(make(documents[:20], seed=1)[0])
    assert stats.instances == len(together) and stats.documents == 20 and stats.dropped_tokens == 0
    assert stats.tokens == sum(map(len, together["input_ids"].to_pylist()))


@pytest.mark.parametrize(
    ("config", "texts", "expected"),
    [
        (PackingConfig(), ["", "the", "One sentence. Another."], {"documents": 3, "dropped_documents": 2}),
        (PackingConfig("clm", max_seq_length=8), ["the " * 8], {"documents": 1, "tokens": 8}),  # the end of the text
        (PackingConfig("mlm"), ["", "the the", ""], {"dropped_documents": 2, "tokens": 4, "dropped_tokens": 0}),
    ],
)
def test_counts_of_what_is_dropped(encoder, config, texts, expected):
    _, stats = build_samples(texts, encoder, config)
    assert asdict(stats) | {"instances": 1, "dropped_tokens": 1} | expected == asdict(stats)
