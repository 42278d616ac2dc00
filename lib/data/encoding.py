"""Encoding of text into token ids, as fast as the tokenizer allows."""

from __future__ import annotations

import itertools
import json
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # the import takes seconds, and unreadable text should be reported before
    from transformers import PreTrainedTokenizerBase

# Words that an encoder remembers: about 100 MB. 19 MB of Wikipedia have 70,000 different ones, 2 GB some millions.
MAX_WORDS = 500_000
# Normalizers that change a word in the same way whatever stands beyond the spaces around it
_WORDWISE_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "StripAccents", "Lowercase", "Precompiled", "BertNormalizer"}


@dataclass(frozen=True)
class Encoded:
    """Token ids of several texts.

    :param ids: of all texts, one after the other, int32
    :param lengths: number of tokens of each text
    """

    ids: np.ndarray
    lengths: np.ndarray

    def split(self) -> list[np.ndarray]:
        """Return the ids of each text."""
        return divide(self.ids, self.lengths)


def divide(values: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    """Divide an array into consecutive parts of these lengths."""
    return np.split(values, np.cumsum(lengths)[:-1]) if len(lengths) else []


class TextEncoder:
    """Encodes with any tokenizer, without special tokens around a text.

    A special token in the text ("[SEP]") is encoded as ordinary text, so that it is not mistaken for a real one. The
    exception is "<unk>", which WikiText writes for rare words.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        names = ("bos", "eos", "sep", "cls", "pad", "mask")
        self._reserved = {getattr(tokenizer, f"{name}_token_id") for name in names} - {None}

    def encode(self, texts: list[str]) -> Encoded:
        ids = self._encode_lists(texts)
        lengths = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
        flat = np.fromiter(itertools.chain.from_iterable(ids), dtype=np.int32, count=int(lengths.sum()))
        return Encoded(flat, lengths)

    def _encode_lists(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        ids = self._tokenize(texts)
        for number, sequence in enumerate(ids):
            if not self._reserved.isdisjoint(sequence):
                (ids[number],) = self._tokenize([texts[number]], split_special_tokens=True)
        return ids

    def _tokenize(self, texts: list[str], split_special_tokens: bool = False) -> list[list[int]]:
        options = {"add_special_tokens": False, "return_attention_mask": False, "return_token_type_ids": False}
        return self.tokenizer(texts, **options, verbose=False, split_special_tokens=split_special_tokens)["input_ids"]


class WordEncoder(TextEncoder):
    """Encodes each different word once, for tokenizers whose tokens never cross a space; same ids as TextEncoder's.

    Most of a text are words that occurred before, and looking them up is faster than any tokenizer: a core finds 3.6
    million tokens a second. sentencepiece's own encoder, without normalization, finds 2.6 million on the same core,
    and tokenizers 0.25 million.

    :param prefix: " " if a word's tokens include the space before it, as in byte-level BPE; else ""
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prefix: str):
        super().__init__(tokenizer)
        self._prefix = prefix
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._forget()

    def _forget(self) -> None:
        self._numbers: dict[str, int] = {}  # a word, with its prefix -> its position in the two arrays below
        # Position 0 is for words that depend on what stands around them.
        self._starts = self._lengths = np.zeros(1, dtype=np.int64)
        self._ids = np.zeros(0, dtype=np.int32)

    def encode(self, texts: list[str]) -> Encoded:
        if len(self._numbers) > MAX_WORDS:
            self._forget()
        words = [self._split(text) for text in texts]
        all_words = list(itertools.chain.from_iterable(words))
        numbers = list(map(self._numbers.get, all_words))
        if None in numbers:
            is_unknown = [number is None for number in numbers]
            self._learn(list(dict.fromkeys(itertools.compress(all_words, is_unknown))))
            numbers = list(map(self._numbers.get, all_words))
        numbers = np.array(numbers, dtype=np.int64)
        lengths = self._lengths[numbers]
        ends = np.concatenate([[0], np.cumsum(lengths)])
        positions = np.repeat(self._starts[numbers] - ends[:-1], lengths) + np.arange(ends[-1])
        ends_of_texts = np.cumsum([0, *map(len, words)])
        encoded = Encoded(self._ids[positions], np.diff(ends[ends_of_texts]))
        if numbers.all():
            return encoded
        is_whole = np.logical_or.reduceat(numbers == 0, ends_of_texts[:-1])
        return self._encode_wholes(texts, np.flatnonzero(is_whole), encoded)

    def _encode_wholes(self, texts: list[str], numbers: np.ndarray, encoded: Encoded) -> Encoded:
        """Encode some of the texts as a whole.

        :param numbers: which texts
        :param encoded: of all texts, by their words
        """
        wholes = super().encode([texts[number] for number in numbers])
        lengths, ends = encoded.lengths.copy(), np.cumsum(encoded.lengths)
        lengths[numbers] = wholes.lengths
        parts, begin = [], 0
        for number, whole in zip(numbers, wholes.split(), strict=True):
            parts += [encoded.ids[begin : ends[number] - encoded.lengths[number]], whole]
            begin = ends[number]
        return Encoded(np.concatenate([*parts, encoded.ids[begin:]]), lengths)

    def _tokenize(self, texts: list[str], split_special_tokens: bool = False) -> list[list[int]]:
        # Without transformers' bookkeeping, which takes half as long as the encoding of a word
        self._backend.encode_special_tokens = split_special_tokens
        return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def _split(self, text: str) -> list[str]:
        if not self._prefix:
            return text.split(" ")
        first, *rest = text.split(" ")
        return [first, *(self._prefix + word for word in rest)]

    def _learn(self, words: list[str]) -> None:
        separable = [word for word in words if _is_separable(word.removeprefix(self._prefix))]
        self._numbers.update(dict.fromkeys(words, 0))
        self._numbers.update(zip(separable, itertools.count(len(self._lengths))))
        learnt = super().encode(separable)
        self._starts = np.concatenate([self._starts, len(self._ids) + np.cumsum(learnt.lengths) - learnt.lengths])
        self._lengths = np.concatenate([self._lengths, learnt.lengths])
        self._ids = np.concatenate([self._ids, learnt.ids])


def _is_separable(word: str) -> bool:
    """Whether a word is encoded in the same way alone as in its text."""
    if not word or word[0].isspace() or word[-1].isspace():
        return False  # several characters of white space may be one token
    category = unicodedata.category(word[0])
    return category != "Cf" and not category.startswith("M")  # such a character joins the space before it


def build_encoder(tokenizer: PreTrainedTokenizerBase) -> TextEncoder:
    """Return the fastest encoder that gives the tokenizer's own ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    prefix = None if backend is None else _find_prefix(json.loads(backend.to_str()))
    return TextEncoder(tokenizer) if prefix is None else WordEncoder(tokenizer, prefix)


def _find_prefix(settings: dict) -> str | None:
    """Return what stands before each word but the first (see WordEncoder); None if tokens may cross spaces.

    :param settings: content of tokenizer.json
    """
    if not all(_is_wordwise(normalizer) for normalizer in _flatten(settings["normalizer"], "normalizers")):
        return None
    if any(
        " " in token["content"]
        or ((token["lstrip"] or token["rstrip"] or token["single_word"]) and not token["special"])
        for token in settings["added_tokens"]
    ):
        return None
    for part in _flatten(settings["pre_tokenizer"], "pretokenizers"):
        match part:
            case {"type": "WhitespaceSplit" | "Whitespace" | "BertPreTokenizer"}:
                return ""
            case {"type": "Metaspace", "split": True, "prepend_scheme": "always"}:
                return ""
            case {"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}:
                return " "
    return None


def _is_wordwise(normalizer: dict) -> bool:
    if normalizer["type"] == "Replace":
        pattern = normalizer["pattern"]
        # Several spaces in a row are replaced by one: WordEncoder looks up no words of such a text.
        return " " not in pattern.get("String", " ") or pattern.get("Regex") == " {2,}"
    return normalizer["type"] in _WORDWISE_NORMALIZERS


def _flatten(part: dict | None, name: str) -> list[dict]:
    """Return the members of a sequence of normalizers or pre-tokenizers; of a single one, itself."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [member for inner in part[name] for member in _flatten(inner, name)]
    return [part]
