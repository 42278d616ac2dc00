"""The fast encoder gives the tokenizer's own ids, whatever the text."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import trainers
from transformers import BertTokenizer, PreTrainedTokenizerFast

from cotrain.preparation import encoding
from cotrain.preparation.corpus import split_documents
from cotrain.preparation.encoding import TextEncoder
from cotrain.preparation.sources import open_sample
from cotrain.preparation.tokenizer_training import train_tokenizer

# Pieces that break encoders: white space of all kinds, special tokens, accents with and without a letter, characters
# of no width, ligatures that are several words, scripts without spaces, emoji of several characters.
PIECES = [
    "the", "The", "import", "x", "'s", "``", "''", " ", "  ", "\n", "\t", "\r\n", "\x1c", "\x85", "\xa0", "\u3000",
    "\u2028", "\u200b", "\u200c", "\u200d", "\ufeff", "\u0301", "e\u0301", "é", "\ufe0f", "[SEP]", "[MASK]", "<unk>",
    "<|endoftext|>", "<s>", "<mask>", "[PAD]", "##", "▁", "▁▁", "Ġ", "ﬁ", "ﷺ", "½", "中文", "日本", "한국", "नि", "ß",
    "İ", "👩‍👩‍👧", "🇩🇪", "\x00", "\u05d0\u05b7", "...", "--", "3.5", "@-@",
]  # fmt: skip
RESERVED = ("[CLS]", "[SEP]", "[MASK]", "[PAD]", "<pad>", "<s>", "</s>", "<mask>", "<|endoftext|>", "<|pad|>")
TEXTS = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=5)), max_size=12).map("".join)


@pytest.fixture(scope="module")
def documents() -> list[str]:
    return list(split_documents(open_sample().parts["train"][0]()))


@pytest.fixture(scope="module", params=["mlm_sop", "mlm, wordpiece", "mlm", "clm"])
def tokenizer(request, documents):
    if request.param == "mlm, wordpiece":
        return make_wordpiece(documents[:100])
    return train_tokenizer(documents[:100], request.param, vocab_size=1000, max_seq_length=64)


def make_wordpiece(documents: list[str]) -> BertTokenizer:
    """Return a tokenizer of BERT's kind, such as one from the Hub."""
    backend = BertTokenizer().backend_tokenizer
    special_tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=1000, special_tokens=special_tokens, show_progress=False)
    backend.train_from_iterator(documents, trainer)
    return BertTokenizer(vocab=backend.get_vocab())


@pytest.fixture(scope="module")
def encoders(tokenizer) -> tuple[TextEncoder, TextEncoder]:
    """Return an encoder of whole texts, and one that looks words up."""
    slow = TextEncoder(tokenizer)
    slow.is_by_word = False
    return slow, TextEncoder(tokenizer)


def texts_of(encoded) -> list[list[int]]:
    return [ids.tolist() for ids in encoded]


def test_real_text(encoders, documents):
    slow, fast = encoders
    assert fast.is_by_word
    expected = texts_of(slow.encode(documents))
    assert texts_of(fast.encode(documents)) == expected
    assert texts_of(fast.encode(documents)) == expected  # all words are known now
    assert texts_of(fast.encode(documents[5:6])) == expected[5:6]


@settings(max_examples=100, deadline=None)
@example(texts=["a \u200db", "a \u0301b", "a   b", "a \n b", "a\x1cb", "", " ", "a ", " a"])
@example(texts=["the [SEP] and[MASK]", "<unk><unk> a<unk>b <unk>", "ﷺ x", "\x1c \x1c"])
@example(texts=["8 88 888 8888 88888 1000 10000 aaaaaaa", "888 İ888 ﬁ888 x888"])
@given(texts=st.lists(TEXTS, max_size=6))
def test_hostile_text(encoders, texts):
    slow, fast = encoders
    # Beside another special token, TextEncoder splits "<unk>", too.
    texts = [text for text in texts if "<unk>" not in text or not any(name in text for name in RESERVED)]
    for text, ids, expected in zip(texts, texts_of(fast.encode(texts)), texts_of(slow.encode(texts)), strict=True):
        assert ids == expected, repr(text)


def test_text_that_spells_a_special_token_is_text(encoders):
    for encoder in encoders:
        tokenizer = encoder.tokenizer
        mask = tokenizer.mask_token or tokenizer.eos_token
        assert tokenizer.convert_tokens_to_ids(mask) not in encoder.encode([f"the {mask} and{mask} tokens"])[0]
        if "<unk>" in tokenizer.get_vocab():
            assert encoder.encode(["the <unk> token"])[0].tolist().count(tokenizer.unk_token_id) == 1


def test_forgetting_words_changes_nothing(encoders, documents, monkeypatch):
    slow, fast = encoders
    monkeypatch.setattr(encoding, "MAX_WORDS", 50)
    for document in documents[:10]:
        assert texts_of(fast.encode([document])) == texts_of(slow.encode([document]))
    assert fast.look_up.cache_info().currsize < 5000


def test_tokens_that_may_cross_spaces_are_not_looked_up_by_word(documents):
    tokenizer = train_tokenizer(documents[:100], "clm", vocab_size=1000, max_seq_length=64)
    assert TextEncoder(tokenizer).is_by_word
    other = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)  # of a class that is not known
    assert not TextEncoder(other).is_by_word
    tokenizer.add_tokens(["of the"])
    encoder = TextEncoder(tokenizer)
    assert not encoder.is_by_word and len(tokenizer) - 1 in encoder.encode(["the value of the list"])[0]
