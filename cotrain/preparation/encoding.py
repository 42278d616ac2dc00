"""Encoding of text into token ids, as fast as the tokenizer allows."""

import re
import unicodedata
from functools import cache

import numpy as np
from transformers import PreTrainedTokenizerBase

# Words that an encoder remembers: about 150 MB. 19 MB of Wikipedia have 70,000 different ones, 2 GB some millions.
MAX_WORDS = 500_000
# Their tokens never cross a space: transformers builds the normalizer and the pre-tokenizer from the class alone.
_WORD_TOKENIZERS = {"AlbertTokenizer", "BertTokenizer", "GPT2Tokenizer", "RobertaTokenizer"}
# Byte-level BPE encodes a word together with the space before it.
_BYTE_TOKENIZERS = {"GPT2Tokenizer", "RobertaTokenizer"}
_WORD = re.compile(" ?[^ ]+")


def leading_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the id of the token such as <s> that the tokenizer puts before a text: in clm, before each document."""
    begin = tokenizer.bos_token_id
    is_put = begin is not None and begin != tokenizer.cls_token_id and tokenizer("a")["input_ids"][0] == begin
    return [begin] if is_put else []


class TextEncoder:
    """Encodes text to the tokenizer's own ids, without special tokens around it.

    A special token in the text ("[SEP]") is encoded as ordinary text, so that it is not mistaken for a real one. The
    exception is "<unk>", which WikiText writes for rare words.

    If tokens never cross a space, each different word is encoded once. Most of a text are words that occurred before:
    a core looks up 4 million tokens a second; the tokenizer encodes 0.25 million.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        # None for GPT-2, which has no unknown tokens; its `unk_token` is the end-of-text token.
        self.unknown_id = None if tokenizer.unk_token_id == tokenizer.eos_token_id else tokenizer.unk_token_id
        names = ("bos", "eos", "sep", "cls", "pad", "mask")
        self._reserved = {getattr(tokenizer, f"{name}_token_id") for name in names} - {None}
        added = set(tokenizer.get_added_vocab()) - set(tokenizer.all_special_tokens)  # may contain spaces
        name = type(tokenizer).__name__
        self.is_by_word, self._has_bytes = name in _WORD_TOKENIZERS and not added, name in _BYTE_TOKENIZERS
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self.is_by_word:
            self._backend.no_truncation()
        self.look_up = cache(self._encode_word)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Return the ids of each text, int32."""
        if self.look_up.cache_info().currsize > MAX_WORDS:  # `lru_cache` with a bound takes a quarter longer
            self.look_up.cache_clear()
        return list(map(self._encode_words if self.is_by_word else self._encode_whole, texts))

    def _encode_words(self, text: str) -> np.ndarray:
        words = list(map(self.look_up, _WORD.findall(text) if self._has_bytes else text.split(" ")))
        if None in words or "  " in text or text[-1:] == " ":
            return self._encode_whole(text)
        return np.frombuffer(b"".join(words), dtype=np.int32)

    def _encode_word(self, word: str) -> bytes | None:
        """Return the ids of a word; None if they may depend on the text around it."""
        bare = word.removeprefix(" ")
        if not bare or bare[0].isspace() or bare[-1].isspace():
            return None  # several characters of white space may be one token
        category = unicodedata.category(bare[0])
        if category == "Cf" or category.startswith("M"):
            return None  # such a character joins the space before it
        return self._encode_whole(word).tobytes()

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
