"""Preview of prepared samples, before anyone trains on them: their text, with what is learnt marked."""

import itertools
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

PREVIEW_NAME = "preview.txt"  # in the folder of the dataset; an archive leaves it out
SHOWN_CHARS = 1500  # of a sample on the terminal
_GREEN, _BRACKETS = ("\033[32m", "\033[0m"), ("[[", "]]")
_CONTROL = re.compile(r"[^\n\t -~\xa0-\U0010ffff]")


def render_sample(sample: Mapping, tokenizer: PreTrainedTokenizerBase, marks: tuple[str, str], limit: int) -> str:
    """Return at most `limit` characters of a sample's text, with marks around what is learnt of conversations."""
    ids = np.asarray(sample["input_ids"])
    learnt, starts = (np.asarray(sample.get(name, 0 * ids)) for name in ("answer_mask", "start_mask"))
    text, size = f"--- {len(ids)} tokens{f', of them learnt: {learnt.sum()}' if learnt.any() else ''}\n", 0
    for (_, mark), run in itertools.groupby(zip(np.cumsum(starts), learnt, ids, strict=True), lambda x: x[:2]):
        part = _CONTROL.sub(
            "�", str(tokenizer.decode([int(token) for *_, token in run], clean_up_tokenization_spaces=False))
        )
        part = part[: limit - size] + " …" * (size + len(part) > limit)
        text, size = text + (f"{marks[0]}{part}{marks[1]}" if mark else part), size + len(part)
        if size >= limit:
            break
    return f"{text}\n"


def show_preview(samples: Sequence[Mapping], tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Print samples, with what is learnt in green or, where there are no colours, brackets; write them to a file."""
    marks = _GREEN if sys.stdout.isatty() and "NO_COLOR" not in os.environ else _BRACKETS
    print("".join(render_sample(sample, tokenizer, marks, SHOWN_CHARS) for sample in samples), end="")
    whole = "".join(render_sample(sample, tokenizer, _BRACKETS, sys.maxsize) for sample in samples)
    if samples:
        (folder / PREVIEW_NAME).write_text(whole, encoding="utf-8")
