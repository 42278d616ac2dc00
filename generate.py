#!/usr/bin/env python3
"""Try a trained model: it fills in [MASK], continues a text, or answers, whichever it was trained for.

    ./generate.py monitor_outputs "The capital of [MASK] is Paris."

The first argument is a checkpoint, or an output folder with checkpoints.
"""

from dataclasses import dataclass
from pathlib import Path

from cotrain.common.errors import run_script
from cotrain.common.flags import Flags, flag

POSITIONAL = {
    "CHECKPOINT": "Checkpoint, or output folder, of which the newest complete checkpoint is taken",
    "TEXT": "Sentence with one [MASK] or more; for a causal model, the beginning of a text, or a question",
}


@dataclass
class GenerateArguments(Flags, group="Output"):
    """Output of the script."""

    number: int = flag(5, "Number of words to print for each mask")
    max_new_tokens: int = flag(200, "Longest continuation or answer in tokens")
    debug: bool = flag(False, "Show the traceback of a fatal error")


def main() -> None:
    from cotrain.common.argument_parser import ArgumentParser

    args, positional = ArgumentParser([GenerateArguments], __doc__, POSITIONAL).parse().arguments
    # Seconds of imports, which --help and a wrong flag need not wait for.
    from transformers.utils.logging import set_verbosity_error

    from cotrain.models.model import get_objective
    from cotrain.monitoring.samples import build_pipeline, check_text, continue_text, fill_masks, is_causal
    from cotrain.training.pretrained import find_checkpoint, load_checkpoint

    set_verbosity_error()  # silence "unused weights": the sentence-order head
    text, folder = positional.TEXT, Path(positional.CHECKPOINT)
    checkpoint = find_checkpoint(folder)
    if checkpoint != folder:
        print(f"Checkpoint: {checkpoint}")
    model, tokenizer = load_checkpoint(checkpoint)
    room = check_text(text, tokenizer, model.config, "TEXT")
    completer = build_pipeline(model, tokenizer)
    if is_causal(model.config):
        beginning = "" if get_objective(model.config, tokenizer) == "chat" else f"{text} … "
        print(beginning + continue_text(completer, text, min(args.max_new_tokens, room)))
        return
    masks = fill_masks(completer, text, min(args.number, model.config.vocab_size))
    for place, words in enumerate(masks, 1):
        print(f"Mask {place} of {len(masks)}:" if len(masks) > 1 else text)
        for word, probability in words:
            print(f"{probability:8.2%}  {word}")


if __name__ == "__main__":
    run_script(main)
