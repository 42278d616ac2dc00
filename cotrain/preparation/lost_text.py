"""Check of how much of the text a tokenizer loses."""

import itertools
import unicodedata
from collections import Counter

import numpy as np

from cotrain.common.errors import UserError
from cotrain.preparation.corpus import Corpus
from cotrain.preparation.encoding import TextEncoder

MIN_CHARS, MAX_CHARS, MAX_LOSS = 50_000, 10_000_000, 0.01  # of the text that a tokenizer is tried on


def _count_chars(texts: list[str]) -> Counter[str]:
    """Count characters but white space, whatever their case, their form (NFKC), and the kind of double quotes."""
    plain = (text.replace("``", '"').replace("''", '"').casefold() for text in texts)
    return Counter(itertools.chain.from_iterable("".join(unicodedata.normalize("NFKC", x).split()) for x in plain))


def check_losses(encoder: TextEncoder, corpus: dict[str, Corpus], seed: int, flag: str, is_allowed: bool) -> None:
    """Print what the tokenizer, from `flag`, loses of 1 % of each split, at least MIN_CHARS and at most MAX_CHARS.

    :raises UserError: if that is more than MAX_LOSS of the characters or tokens, and not allowed
    """
    tokenizer = encoder.tokenizer
    samples = (
        part.sample(min(max(MIN_CHARS, part.lengths.sum() // 100), MAX_CHARS // len(parts)), seed)
        for parts in corpus.values()
        for part in parts
    )
    # WikiText has <unk> itself. On one line, the encoder has its fast way, which leaves the words to the workers.
    unknown = tokenizer.unk_token or ""
    texts = [" ".join(text.replace(unknown, "").split()) for text in itertools.chain.from_iterable(samples)]
    ids = [encoder.encode([text])[0] for text in texts]  # all at once take 260 MB
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
