"""The size of a vocabulary. Importing this module takes no time, unlike torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the largest token ID + 1. `len(tokenizer)` is less if a vocabulary has gaps, or the same line twice."""
    return 1 + max(tokenizer.get_vocab().values())
