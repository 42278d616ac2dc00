"""Encoding of text into token ids, as fast as the tokenizer allows."""

from __future__ import annotations

import itertools
import json
import string
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # the import takes seconds, and unreadable text should be reported before
    from tokenizers.normalizers import Normalizer
    from transformers import PreTrainedTokenizerBase

# Words that an encoder remembers: about 100 MB. 19 MB of Wikipedia have 70,000 different ones, 2 GB some millions.
MAX_WORDS = 500_000
FIRST = " "  # before the first word of a text, if the others have a prefix: no word contains a space
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


def _flatten_ids(ids: list[list[int]]) -> Encoded:
    lengths = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
    flat = np.fromiter(itertools.chain.from_iterable(ids), dtype=np.int32, count=int(lengths.sum()))
    return Encoded(flat, lengths)


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
        return _flatten_ids(self._encode_lists(texts))

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


class WordNumbers(dict):
    """Numbers words in the order in which they occur first: word -> number."""

    def __init__(self):
        super().__init__()
        self.unknown: list[str] = []  # the words that got their numbers since the last `take_unknown`

    def __missing__(self, word: str) -> int:
        number = self[word] = len(self)
        self.unknown.append(word)
        return number

    def take_unknown(self) -> list[str]:
        unknown, self.unknown = self.unknown, []
        return unknown


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
        self._numbers = WordNumbers()
        # By number of a word; a text with a word that is not separable is encoded as a whole.
        self._starts = self._lengths = np.zeros(0, dtype=np.int64)
        self._is_separable = np.zeros(0, dtype=bool)
        self._ids = np.zeros(0, dtype=np.int32)

    def encode(self, texts: list[str]) -> Encoded:
        if not texts:
            return super().encode(texts)
        if len(self._numbers) > MAX_WORDS:
            self._forget()
        words = " ".join(texts).split(" ")
        starts_of_texts = np.cumsum([0, *(text.count(" ") + 1 for text in texts)])
        if self._prefix:
            for start in starts_of_texts[:-1].tolist():
                words[start] = FIRST + words[start]
        numbers = np.fromiter(map(self._numbers.__getitem__, words), dtype=np.int64, count=len(words))
        if self._numbers.unknown:
            self._learn(self._numbers.take_unknown())
        lengths = self._lengths[numbers]
        ends = np.concatenate([[0], np.cumsum(lengths)])
        positions = np.repeat(self._starts[numbers] - ends[:-1], lengths) + np.arange(ends[-1])
        encoded = Encoded(self._ids[positions], np.diff(ends[starts_of_texts]))
        is_separable = self._is_separable[numbers]
        if is_separable.all():
            return encoded
        is_whole = ~np.logical_and.reduceat(is_separable, starts_of_texts[:-1])
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

    def _learn(self, words: list[str]) -> None:
        """Encode words that have occurred for the first time, in the order of their numbers."""
        if self._prefix:
            words = [word[1:] if word.startswith(FIRST) else self._prefix + word for word in words]
        is_separable = [_is_separable(word.removeprefix(self._prefix)) for word in words]
        learnt = self._encode_words([word if is_one else "" for word, is_one in zip(words, is_separable, strict=True)])
        self._starts = np.concatenate([self._starts, len(self._ids) + np.cumsum(learnt.lengths) - learnt.lengths])
        self._lengths = np.concatenate([self._lengths, learnt.lengths])
        self._is_separable = np.concatenate([self._is_separable, is_separable])
        self._ids = np.concatenate([self._ids, learnt.ids])

    def _encode_words(self, words: list[str]) -> Encoded:
        return super().encode(words)


class UnigramEncoder(WordEncoder):
    """Encodes words of ASCII letters and digits with the Unigram model alone, in half the time; same ids.

    Such words are normalized together and need no search for special tokens. sentencepiece's own encoder would take a
    tenth, but adds up scores in single precision: of equally likely segmentations it chooses another one ("8 88" or
    "88 8"), in 3 of 70,000 words.

    :param mark: the character that stands for the space before a word
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, mark: str):
        super().__init__(tokenizer, prefix="")
        self._mark = mark
        self._model = self._backend.model

    def _encode_words(self, words: list[str]) -> Encoded:
        is_plain = [word.isascii() and word.isalnum() for word in words]
        plain = iter(self._encode_plain(list(itertools.compress(words, is_plain))))
        others = iter(self._encode_lists([word for word, is_one in zip(words, is_plain, strict=True) if not is_one]))
        return _flatten_ids([next(plain if is_one else others) for is_one in is_plain])

    def _encode_plain(self, words: list[str]) -> list[list[int]]:
        text = " ".join(words)
        if self._backend.normalizer is not None:
            text = self._backend.normalizer.normalize_str(text)
        tokenize, mark = self._model.tokenize, self._mark
        return [[token.id for token in tokenize(mark + word)] for word in text.split(" ") if word]


def _is_separable(word: str) -> bool:
    """Whether a word is encoded in the same way alone as in its text."""
    if not word or word[0].isspace() or word[-1].isspace():
        return False  # several characters of white space may be one token
    category = unicodedata.category(word[0])
    return category != "Cf" and not category.startswith("M")  # such a character joins the space before it


def build_encoder(tokenizer: PreTrainedTokenizerBase) -> TextEncoder:
    """Return the fastest encoder that gives the tokenizer's own ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return TextEncoder(tokenizer)
    settings = json.loads(backend.to_str())
    prefix = _find_prefix(settings)
    if prefix is None:
        return TextEncoder(tokenizer)
    mark = _find_mark(settings)
    if mark is None or not _keeps_plain_words(settings, backend.normalizer):
        return WordEncoder(tokenizer, prefix)
    return UnigramEncoder(tokenizer, mark)


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
            case {"type": "Metaspace", "split": True, "prepend_scheme": "always"} if not settings["added_tokens"]:
                return ""  # otherwise a space before an added token is a token
            case {"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}:
                return " "
    return None


def _find_mark(settings: dict) -> str | None:
    """Return the character that stands for the space before a word of a Unigram model; None for other tokenizers."""
    if settings["model"]["type"] != "Unigram":
        return None
    parts = _flatten(settings["pre_tokenizer"], "pretokenizers")
    if [part["type"] for part in parts] not in (["Metaspace"], ["WhitespaceSplit", "Metaspace"]):
        return None
    return parts[-1]["replacement"] if parts[-1]["split"] and parts[-1]["prepend_scheme"] == "always" else None


def _keeps_plain_words(settings: dict, normalizer: Normalizer | None) -> bool:
    """Whether words of ASCII letters and digits hold no added token, and are normalized character by character."""
    replaced = [
        part["pattern"].get("String", " ")
        for part in _flatten(settings["normalizer"], "normalizers")
        if part["type"] == "Replace"
    ]
    if any(text.isalnum() for text in [*replaced, *(token["content"] for token in settings["added_tokens"])]):
        return False
    plain = string.ascii_letters + string.digits
    return normalizer is None or all(normalizer.normalize_str(character).isalnum() for character in plain)


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
