"""Comparison of text with what a tokenizer gives back of it."""

import itertools
import unicodedata
from collections import Counter

import numpy as np

from cotrain.common.errors import UserError
from cotrain.data.corpus import Documents
from cotrain.data.encoding import TextEncoder

MIN_CHARS = 50_000
MAX_LOSS = 0.01


def _count_chars(texts: list[str]) -> Counter[str]:
    """Count characters but white space, whatever their case, their form (NFKC), and the kind of double quotes."""
    plain = (text.replace("``", '"').replace("''", '"').casefold() for text in texts)
    return Counter(itertools.chain.from_iterable("".join(unicodedata.normalize("NFKC", x).split()) for x in plain))


def check_losses(encoder: TextEncoder, corpus: dict[str, Documents], seed: int, flag: str, is_allowed: bool) -> None:
    """Print what the tokenizer, from `flag`, loses of MIN_CHARS of each split, or of 1 % of it if that is more.

    :raises UserError: if that is more than MAX_LOSS of the characters or tokens, and not allowed
    """
    tokenizer = encoder.tokenizer
    samples = (documents.sample(max(MIN_CHARS, documents.num_chars // 100), seed) for documents in corpus.values())
    # WikiText has <unk> itself.
    texts = [text.replace(tokenizer.unk_token or "", "") for text in itertools.chain.from_iterable(samples)]
    ids = encoder.encode(texts)
    decoded = tokenizer.batch_decode(ids, skip_special_tokens=True)
    before, after, tokens = _count_chars(texts), _count_chars(decoded), np.concatenate(ids)
    num_tokens, num_unknown = len(tokens), np.count_nonzero(tokens == encoder.unknown_id)
    had_capitals, has_capitals = (any(x != x.lower() for x in part) for part in (texts, decoded))
    lost, num_chars = before - after, before.total()
    examples = ", ".join(f"'{char}' (U+{ord(char):04X}) {count:,} times" for char, count in lost.most_common(5))
    what = f"the tokenizer loses {lost.total():,} of {num_chars:,} characters{examples and f': {examples}'}; "
    what += f"{num_unknown:,} of {num_tokens:,} tokens are unknown"
    what += "; it has no capital letters" * (had_capitals and not has_capitals)
    # BERT's tokenizers drop what has no width, such as joiners: 1 % of Bengali. That is counted, but no error.
    num_lost = sum(count for char, count in lost.items() if unicodedata.category(char) != "Cf")
    fraction = max(num_lost / max(1, num_chars), num_unknown / max(1, num_tokens))
    if fraction > MAX_LOSS and not is_allowed:
        remedy = "choose a tokenizer for this text, or pass --allow_lost_text"
        raise UserError(f"{flag}: {fraction:.1%} of the text would be lost: {what}; {remedy}")
    print(f"Of a sample of the text, {what}")
