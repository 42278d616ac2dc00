"""Encoding of text into token ids, as fast as the tokenizer allows."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # the import takes seconds, and unreadable text should be reported before
    from transformers import PreTrainedTokenizerBase

# Words that an encoder remembers: about 150 MB. 19 MB of Wikipedia have 70,000 different ones, 2 GB some millions.
MAX_WORDS = 500_000
# Their tokens never cross a space: transformers builds the normalizer and the pre-tokenizer from the class alone.
_WORD_TOKENIZERS = {"AlbertTokenizer", "BertTokenizer", "GPT2Tokenizer", "RobertaTokenizer"}
# Byte-level BPE encodes a word together with the space before it.
_BYTE_TOKENIZERS = {"GPT2Tokenizer", "RobertaTokenizer"}
_WORD = re.compile(" ?[^ ]+")


class TextEncoder:
    """Encodes text to the tokenizer's own ids, without special tokens around it.

    A special token in the text ("[SEP]") is encoded as ordinary text, so that it is not mistaken for a real one. The
    exception is "<unk>", which WikiText writes for rare words.

    If tokens never cross a space, each different word is encoded once. Most of a text are words that occurred before:
    a core looks up 4 million tokens a second; the tokenizer encodes 0.25 million.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        names = ("bos", "eos", "sep", "cls", "pad", "mask")
        self._reserved = {getattr(tokenizer, f"{name}_token_id") for name in names} - {None}
        added = set(tokenizer.get_added_vocab()) - set(tokenizer.all_special_tokens)  # may contain spaces
        name = type(tokenizer).__name__
        self.is_by_word, self._has_bytes = name in _WORD_TOKENIZERS and not added, name in _BYTE_TOKENIZERS
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self.is_by_word:
            self._backend.no_truncation()
        self._words = _Words(self._encode_whole)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Return the ids of each text, int32."""
        if len(self._words) > MAX_WORDS:
            self._words.clear()
        return list(map(self._encode_words if self.is_by_word else self._encode_whole, texts))

    def _encode_words(self, text: str) -> np.ndarray:
        words = _WORD.findall(text) if self._has_bytes else text.split(" ")
        ids = b"".join(map(self._words.__getitem__, words))
        if "  " in text or text[-1:] == " " or not self._words.dependent.isdisjoint(words):
            return self._encode_whole(text)
        return np.frombuffer(ids, dtype=np.int32)

    def _encode_whole(self, text: str) -> np.ndarray:
        if self.is_by_word:  # without transformers' bookkeeping, which takes four times as long as a word
            ids = self._backend.encode(text, add_special_tokens=False).ids
        else:
            ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if not self._reserved.isdisjoint(ids):
            options = {"add_special_tokens": False, "verbose": False, "split_special_tokens": True}
            ids = self.tokenizer(text, **options)["input_ids"]
            if self._backend is not None:
                self._backend.encode_special_tokens = False  # transformers leaves it at True
        return np.array(ids, dtype=np.int32)


class _Words(dict[str, bytes]):
    """Ids of the words that have occurred; a new word is encoded when it is looked up.

    `dependent`: words whose ids depend on the text around them
    """

    def __init__(self, encode: Callable[[str], np.ndarray]):
        super().__init__()
        self._encode = encode
        self.dependent: set[str] = set()

    def __missing__(self, word: str) -> bytes:
        if _is_dependent(word.removeprefix(" ")):
            self.dependent.add(word)
        ids = self[word] = self._encode(word).tobytes()
        return ids


def _is_dependent(word: str) -> bool:
    """Whether a word may be encoded in another way alone than in its text."""
    if not word or word[0].isspace() or word[-1].isspace():
        return True  # several characters of white space may be one token
    category = unicodedata.category(word[0])
    return category == "Cf" or category.startswith("M")  # such a character joins the space before it
