"""Command-line parser of the scripts: fills their dataclasses and translates the flags of older examples.

Scripts import it in `main`: transformers takes a second, in which Ctrl-C already ends them with one line.
"""

import argparse
import difflib
import itertools
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import transformers
import yaml
from transformers.hf_argparser import HfArgumentParser

from cotrain.common.errors import UserError
from cotrain.common.flags import MARKS, ArgumentsError, endpoint_to_maddrs, require

# Flags of older examples (moshpit-sgd, hivemind before 1.1, transformers before 5) and versions -> their names now.
_OLD_NAMES = {
    "--experiment_prefix": "--run_id",
    "--averaging_expiration": "--matchmaking_time",
    "--compression": "--gradient_compression",
    "--averaging_compression": "--gradient_compression",
    "--model_config_path": "--model_name_or_path",
    "--store_checkpoins": "--store_checkpoints",
    "--tokenizer": "--tokenizer_path",
    "--no_cuda": "--use_cpu",
    "--repo_url": "--repo_id",
    "--dht_listen_on": "--host_maddrs",
    "--listen_on": "--host_maddrs",
    "--endpoint": "--announce_maddrs",
}
_OLD_ENDPOINTS = {"--dht_listen_on", "--listen_on", "--endpoint"}  # in gRPC's notation, such as '[::]:*'
# Flags without an effect -> the explanation in the warning. Their values are dropped.
_IGNORED_NAMES = {
    "--overwrite_output_dir": "training resumes from a checkpoint in --output_dir; choose another folder to start "
    "from scratch",
    "--logging_dir": "the monitor draws the training curves, see its --report_to",
    "--fp16_opt_level": "mixed precision is torch's, see --fp16 and --bf16",
    "--do_train": "a trainer always trains",
    **dict.fromkeys(
        ("--do_eval", "--eval_strategy", "--evaluation_strategy", "--eval_steps", "--per_device_eval_batch_size"),
        "run_evaluator.py evaluates the model of the run",
    ),
    **dict.fromkeys(("--report_to", "--run_name"), "the monitor draws the training curves, see its --report_to"),
    **dict.fromkeys(
        ("--dataloader_pin_memory", "--remove_unused_columns", "--save_strategy", "--logging_strategy"),
        "the trainer chooses it by itself",
    ),
    **dict.fromkeys(("--bandwidth", "--batch_size_lead"), "only trainers take part in rounds"),
    "--client_mode": "a monitor or evaluator works behind a firewall without it; for others to join through a monitor "
    "there, pass --tunnel ngrok or --announce_tunnel HOST:PORT",
    "--trainer_uuid": "the identity file identifies a peer, see --identity_path",
}
_REFUSED_NAMES = {
    "--max_steps": "pass --max_global_steps (when to leave) or --total_steps (the learning-rate schedule)",
    "--num_train_epochs": "peers draw samples in a random order, without epochs: pass --max_global_steps (when to "
    "leave) or --total_steps (the learning-rate schedule)",
    "--assist_in_averaging": "start run_trainer.py on this machine, with an open port; a CPU is enough",
    "--repo_path": "pass --output_dir (where the checkpoints are kept)",
}
# Configurations that transformers hosted before 2020
_OLD_CONFIG = re.compile(r"https://s3\.amazonaws\.com/models\.huggingface\.co/bert/(.+)-config\.json")


def translate_old_names(args: Sequence[str], known_flags: set[str]) -> tuple[list[str], list[str]]:
    """Translate the flags of older examples, but for those in `known_flags`, which the script has.

    :returns: the translated command line, and a warning for each flag that was translated or ignored
    :raises ArgumentsError: if a flag or value has no translation
    """
    translated, warnings = [], []
    queue = [part for arg in args for part in (arg.split("=", 1) if arg.startswith("--") else [arg])]
    while queue:
        arg = queue.pop(0)
        values = []
        while arg.startswith("--") and queue and not queue[0].startswith("--"):
            values.append(queue.pop(0))
        if arg not in known_flags:
            if arg in _REFUSED_NAMES:
                raise ArgumentsError(f"{arg} is no longer supported: {_REFUSED_NAMES[arg]}")
            if arg in _IGNORED_NAMES:
                warnings.append(f"{arg} is ignored: {_IGNORED_NAMES[arg]}")
                continue
            if (new_name := _OLD_NAMES.get(arg)) in known_flags:
                is_endpoint = arg in _OLD_ENDPOINTS
                if is_endpoint:
                    values = [maddr for value in values for maddr in endpoint_to_maddrs(arg, value)]
                warnings.append(f"{arg} is now {new_name}" + (f": {' '.join(values)}" if is_endpoint else ""))
                arg = new_name
        if arg == "--model_name_or_path":
            values = [_OLD_CONFIG.sub(r"\1", value) for value in values]
        translated += [arg, *values]
    return translated, warnings


def read_settings(path: str) -> Iterator[tuple[str, list[str] | str]]:
    """Yield the names and values in a YAML file: texts or lists of texts, since YAML's types turn 010 into 8.

    :raises ArgumentsError: if the file cannot be read, or a value is empty, nested, or looks like a flag
    """
    try:
        root = yaml.compose(Path(path).read_bytes(), Loader=yaml.BaseLoader)
    except OSError as error:
        raise ArgumentsError(f"the file cannot be read ({error.strerror})") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        what = ": ".join(filter(None, (error.context, error.problem)))
        fault = "a tab: write spaces" if r"'\t'" in what else f"{what}; write lines such as 'run_id: my-albert'"
        raise ArgumentsError(f"the file is not YAML: {where}{fault}") from None
    except (yaml.YAMLError, RecursionError):
        raise ArgumentsError("the file is not YAML: it is not text in UTF-8, or has hundreds of brackets") from None
    require(isinstance(root, yaml.MappingNode), "the file must have lines such as 'run_id: my-albert'")
    for key, value in root.value:
        require(isinstance(key, yaml.ScalarNode), "a name is nested: write lines such as 'run_id: my-albert'")
        parts = value.value if isinstance(value, yaml.SequenceNode) else [value]
        for part in (key, *parts):
            require(isinstance(part, yaml.ScalarNode), f"--{key.value} is nested: write one text, or a list of texts")
            require(part.value.lower() not in ("", "~", "null"), f"--{key.value} has no value")
            require(not part.value.startswith("-"), f"--{key.value}: '{part.value}' must not begin with '-'")
        yield key.value, value.value if parts == [value] else [part.value for part in parts]


def expand_home(word: str) -> str:
    """Replace ~/ at the beginning of a value by the home folder. Shells do so only at the beginning of a word."""
    flag, sign, value = word.partition("=") if word.startswith("--") else ("", "", word)
    return f"{flag}{sign}{os.path.expanduser(value)}" if value.startswith("~/") else word


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line: an instance of each dataclass of the script, and the names of the flags it contains."""

    parser: "ArgumentParser"
    words: list[str]
    arguments: tuple
    stated: frozenset[str]

    def with_settings(self, settings: Mapping[str, object]) -> tuple:
        """Return the arguments with other values (flag -> value), checked as those of a command line."""
        self.parser.source = "the settings of the run: "
        flags = self.parser.known_flags
        known = [item for item in settings.items() if f"--{item[0]}" in flags and item[1] is not None]
        return self.parser.parse(self.words + self.parser.to_words(known)).arguments

    @property
    def values(self) -> dict[str, object]:
        """The flags of the command line, with their values."""
        return {name: getattr(args, name) for args in self.arguments for name in self.stated if hasattr(args, name)}


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the defaults of flags, and the commands of a docstring as they stand there."""


class ArgumentParser(HfArgumentParser):
    """transformers' dataclass parser, with translated old flags and one-line usage errors."""

    def __init__(
        self, dataclass_types: Sequence[type], description: str | None, positional: Mapping[str, str] | None = None
    ):
        """Make a parser that returns one instance of each dataclass.

        :param description: the script's docstring, which --help shows
        :param positional: name -> help text of the arguments without a flag, [NAME] if it may be missing. They are
            returned last, as a namespace
        """
        names = positional or {}
        super().__init__(
            dataclass_types,
            usage=" ".join(["%(prog)s", *names, "[--FLAG VALUE ...]"]),  # argparse would list some hundred flags
            description=(description or "").strip(),
            formatter_class=HelpFormatter,
            allow_abbrev=False,
        )
        self.source = ""  # of the values that an error message is about
        for name, text in names.items():
            self.add_argument(name.strip("[]"), help=text, nargs="?" if name.startswith("[") else None)

    @staticmethod
    def _parse_dataclass_field(parser, field):
        # transformers passes all of a field's metadata to argparse, which does not know all of it.
        field = copy(field)
        field.metadata = {name: value for name, value in field.metadata.items() if name not in MARKS}
        HfArgumentParser._parse_dataclass_field(parser, field)  # noqa: SLF001

    @property
    def known_flags(self) -> set[str]:
        return {option for action in self._actions for option in action.option_strings}

    def error(self, message: str) -> NoReturn:
        message = re.sub("invalid (int|float) value: ('.*')", r"\2 is not a number; write it as in 1024", message)
        line = " ".join(f"{self.source}{message:.500}".split())
        print(f"{Path(sys.argv[0]).name}: error: {line} (see --help)", file=sys.stderr)
        sys.exit(2)

    def _explain_unknown(self, name: str) -> str:
        """Return what is wrong with a flag that the script does not have."""
        # Importing transformers' class takes 4 CPU seconds.
        fields = Path(transformers.__file__).with_name("training_args.py").read_text(encoding="utf-8")
        if re.search(rf"^    {re.escape(name.removeprefix('--'))}: ", fields, re.MULTILINE):
            return f"{name} is a flag of transformers' Trainer that has no counterpart here: leave it out"
        similar = difflib.get_close_matches(name, self.known_flags, n=1)
        return f"unknown argument '{name}'" + (f", did you mean {similar[0]}?" if similar else "")

    def to_words(self, settings: Iterable[tuple[str, object]]) -> list[str]:
        """Return flags and their values as words of a command line.

        :raises ArgumentsError: if a flag is stated twice, or does not take one value or a list of values
        """
        words, stated = [], set()
        for name, value in settings:
            is_list = isinstance(value, list | tuple)
            flag, _ = translate_old_names([f"--{name}"], self.known_flags)
            if flag and (action := self._option_string_actions.get(flag[0])) is not None:
                require(action.nargs != 0 and action.dest != "run_config", f"--{name} is for the command line only")
                require(action.nargs == "+" or not is_list, f"--{name} takes one value, not a list")
                require(action.dest not in stated, f"--{action.dest} is stated twice")
                stated.add(action.dest)
            words += [f"--{name}", *map(str, value if is_list else [value])]
        return words

    def parse(self, args: Sequence[str] | None = None) -> CommandLine:
        """Parse a command line, by default that of the process; exit with one line and code 2 on a usage error.

        The flags in the file of --run_config count as if they stood before the others.
        """
        try:
            if args is None:
                lost = next((word for word in sys.argv[1:] if re.match(r"\s+(--|$)", word)), None)
                remedy = "a backslash must be the last character of its line: remove what follows it, or the backslash"
                require(lost is None, f"'{lost}' begins with a blank: {remedy}")
                args = [expand_home(word) for word in sys.argv[1:]]
            words, warnings = translate_old_names(args, self.known_flags)
            options = {"--run_config", "--run-config"} & self.known_flags
            paths = [path for word, path in itertools.pairwise(words) if word in options]
            require(len(paths) < 2, "--run_config takes one file")
            for path in paths:
                self.source = self.source or f"with --run_config '{path}': "
                args = [*map(expand_home, map(os.path.expandvars, self.to_words(read_settings(path)))), *args]
                words, warnings = translate_old_names(args, self.known_flags)
            *dataclasses, unknown = self.parse_args_into_dataclasses(
                words, return_remaining_strings=True, look_for_args_file=False
            )
        except ArgumentsError as error:
            self.error(str(error))
        if unknown:
            self.error(self._explain_unknown(unknown[0].split("=")[0]))
        for warning in warnings:
            print(f"warning: {warning}", file=sys.stderr)
        stated = {action.dest for action in self._actions if not set(words).isdisjoint(action.option_strings)}
        return CommandLine(self, words, tuple(dataclasses), frozenset(stated))


def parse_arguments(
    dataclass_types: Sequence[type], description: str | None, args: Sequence[str] | None = None
) -> tuple:
    """Return one instance of each dataclass, see `ArgumentParser`."""
    return ArgumentParser(dataclass_types, description).parse(args).arguments


class KeywordParser(ArgumentParser):
    """Parser of keyword arguments that are named as the flags. A wrong one raises UserError."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.description}: {self.source}{message}")

    def parse_keywords(self, values: Mapping[str, object]) -> CommandLine:
        """Parse arguments; None and an empty list stand for the default."""
        names = {action.dest for action in self._actions}
        for name in values.keys() - names:
            similar = " or ".join(difflib.get_close_matches(name, names)) or "one that run_trainer.py --help lists"
            self.error(f"unknown argument '{name}', did you mean {similar}?")
        return self.parse(self.to_words(item for item in values.items() if item[1] not in (None, [], ())))
