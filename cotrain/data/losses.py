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


def _count_chars(text: str) -> Counter[str]:
    """Count characters but white space, whatever their case, their form (NFKC), and the kind of double quotes."""
    text = text.replace("``", '"').replace("''", '"').casefold()
    return Counter("".join(unicodedata.normalize("NFKC", text).split()))


def check_losses(encoder: TextEncoder, corpus: dict[str, Documents], seed: int, flag: str, is_allowed: bool) -> None:
    """Print what the tokenizer, from `flag`, loses of MIN_CHARS of each split, or of 1 % of it if that is more.

    :raises UserError: if that is more than MAX_LOSS of the characters or tokens, and not allowed
    """
    tokenizer = encoder.tokenizer
    before, after, num_tokens, num_unknown = Counter(), Counter(), 0, 0
    had_capitals = has_capitals = False
    samples = (documents.sample(max(MIN_CHARS, documents.num_chars // 100), seed) for documents in corpus.values())
    for document in itertools.chain.from_iterable(samples):
        text = document.replace(tokenizer.unk_token or "", "")  # WikiText has <unk> itself
        (ids,) = encoder.encode([text])
        decoded = tokenizer.decode(ids, skip_special_tokens=True)
        had_capitals |= text != text.lower()
        has_capitals |= decoded != decoded.lower()
        before += _count_chars(text)
        after += _count_chars(decoded)
        num_tokens += len(ids)
        num_unknown += int(np.count_nonzero(ids == encoder.unknown_id))
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
