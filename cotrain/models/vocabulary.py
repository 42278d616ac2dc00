"""What identifies a vocabulary: its size and its digest. Importing this module imports no torch."""

import hashlib
import json

from transformers import PreTrainedTokenizerBase


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the largest token ID + 1. `len(tokenizer)` is less if a vocabulary has gaps, or the same line twice."""
    return 1 + max(tokenizer.get_vocab().values())


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the SHA-256 of the tokens with their ids."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()
