#!/usr/bin/env python3
"""Try a trained model: it fills in [MASK], continues a text, or answers, whichever it was trained for.

    ./generate.py monitor_outputs "The capital of [MASK] is Paris."
    ./generate.py monitor_outputs

The first argument is a checkpoint, or an output folder with checkpoints. Without a text, the script asks for one after
another: a model of conversations remembers the earlier ones.
"""

from cotrain.common.errors import UserError, announce_imports, first_line, run_script  # isort: skip
import contextlib
import itertools
import shutil
import sys
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cotrain.common.flags import Flags, flag
from cotrain.common.run_folder import find_checkpoint

POSITIONAL = {
    "CHECKPOINT": "Checkpoint, or output folder, of which the newest complete checkpoint is taken",
    "[TEXT]": "Sentence with one [MASK] or more; for a causal model, the beginning of a text, or a question. Default: "
    "what is piped into the script, or a conversation on the terminal",
}
EMPTY = "(an empty answer)"
MIN_ROOM = 20  # tokens that are left for an answer


@dataclass
class GenerateArguments(Flags, group="Output"):
    """Output of the script."""

    number: int = flag(5, "Number of words to print for each mask")
    max_new_tokens: int = flag(200, "Longest continuation or answer in tokens")
    system: str | None = flag(None, "Instructions to a model of conversations, before the first message")
    temperature: float = flag(0.0, "Above 0: choose tokens at random, the more so the higher it is", at_least=0)
    top_p: float = flag(1.0, "With --temperature: choose among the likeliest tokens of this probability", at_most=1)
    seed: int | None = flag(None, "Random seed for --temperature. Default: another one each time", at_least=0)
    compare: bool = flag(False, "Show the answer of the base beside that of the model with adapters")
    use_cpu: bool = flag(False, "Do not use a GPU")
    debug: bool = flag(False, "Show the traceback of a fatal error")


def show_columns(left: str, right: str) -> None:
    """Print two texts side by side, as wide as the terminal."""
    width = (shutil.get_terminal_size().columns - 3) // 2
    columns = (
        [part for line in text.split("\n") for part in textwrap.wrap(line, width) or [""]] for text in (left, right)
    )
    for one, other in itertools.zip_longest(*columns, fillvalue=""):
        print(f"{one:<{width}} | {other}".rstrip())


class Talk:
    """A causal model that continues texts, or answers: one of conversations remembers what was said."""

    def __init__(self, model, tokenizer, args: GenerateArguments):
        from cotrain.models.device import find_device
        from cotrain.models.model import get_objective, max_tokens
        from cotrain.monitoring.samples import build_pipeline

        if args.compare and not hasattr(model, "peft_config"):
            raise UserError("--compare: this model has no adapters, hence no base beside it; drop the flag")
        self.model, self.args, self.limit = model, args, max_tokens(model.config)
        self.completer = build_pipeline(model, tokenizer, find_device(args.use_cpu))
        self.is_chat = get_objective(model.config, tokenizer) == "chat"
        self.system = [] if args.system is None else [{"role": "system", "content": args.system}]
        self.turns: list[list[dict]] = [[], []]  # of the model, and of the base
        self.options = {"do_sample": args.temperature > 0}
        if args.temperature > 0:
            self.options |= {"temperature": args.temperature, "top_p": args.top_p, "top_k": 0}

    def reply(self, text: str) -> None:
        """Print the answer as it is generated; with --compare, that of the base and that of the model in columns."""
        if not self.args.compare:
            write = partial(print, end="", flush=True)
            write("" if self.is_chat else f"{text} … ")
            print("" if self._answer(text, self.turns[0], write) else EMPTY)
            return
        with self.model.disable_adapter():
            base = self._answer(text, self.turns[1])
        show_columns(f"BASE\n{base or EMPTY}", f"TUNED\n{self._answer(text, self.turns[0]) or EMPTY}")

    def _answer(self, text: str, turns: list[dict], write: Callable[[str], object] = str) -> str:
        from cotrain.monitoring.samples import check_text, continue_text, encode_prompt

        config, tokenizer = self.model.config, self.completer.tokenizer
        room, prompt = check_text(text, tokenizer, config, "TEXT"), text
        while self.is_chat:
            prompt = [*self.system, *turns, {"role": "user", "content": text}]
            try:
                room = self.limit - len(encode_prompt(prompt, tokenizer, config))
            except Exception as error:
                raise UserError(f"the model's chat template does not take this ({first_line(error):.200})") from None
            if room >= MIN_ROOM or not turns:
                break
            print("(The model forgets the first messages: the conversation is too long for it.)", file=sys.stderr)
            del turns[:2]
        if room < 1:
            raise UserError("--system: the instructions are too long for the model; pass shorter ones")
        room = min(self.args.max_new_tokens, room)
        answer = continue_text(self.completer, prompt, room, write, **self.options)
        turns += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        return answer


def show_masks(model, tokenizer, number: int, text: str) -> None:
    """Print the likeliest words for each mask in a text."""
    from cotrain.monitoring.samples import build_pipeline, check_text, fill_masks

    check_text(text, tokenizer, model.config, "TEXT")
    masks = fill_masks(build_pipeline(model, tokenizer), text, min(number, model.config.vocab_size))
    for place, words in enumerate(masks, 1):
        print(f"Mask {place} of {len(masks)}:" if len(masks) > 1 else text)
        for word, probability in words:
            print(f"{probability:8.2%}  {word}")


def converse(reply: Callable[[str], None]) -> None:
    """Reply to one line after another, until Ctrl-D. Ctrl-C ends an answer."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  arrow keys
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            return print()
        try:
            if text:
                reply(text)
        except UserError as error:
            print(f"error: {error}")
        except KeyboardInterrupt:
            print(" (stopped)")


def main() -> None:
    from cotrain.common.argument_parser import ArgumentParser

    args, positional = ArgumentParser([GenerateArguments], __doc__, POSITIONAL).parse().arguments
    text, folder = positional.TEXT, Path(positional.CHECKPOINT)
    checkpoint = find_checkpoint(folder)
    announce_imports()
    import torch
    from transformers.utils.logging import set_verbosity_error

    from cotrain.monitoring.samples import is_causal
    from cotrain.training.pretrained import load_checkpoint

    set_verbosity_error()  # silence "unused weights": the sentence-order head
    warnings.simplefilter("ignore")
    if checkpoint != folder:
        print(f"Checkpoint: {checkpoint}")
    model, tokenizer = load_checkpoint(checkpoint)
    if args.seed is not None:
        torch.manual_seed(args.seed)
    reply = (
        Talk(model, tokenizer, args).reply
        if is_causal(model.config)
        else partial(show_masks, model, tokenizer, args.number)
    )
    if text is None and sys.stdin.isatty():
        converse(reply)
    else:
        reply(sys.stdin.read().strip() if text is None else text)


if __name__ == "__main__":
    run_script(main)
