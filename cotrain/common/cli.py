"""The command line of a script. The parser is imported when it is needed: transformers takes a second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cotrain.common.argument_parser import CommandLine


def parse_command_line(
    dataclass_types: Sequence[type],
    description: str,
    args: Sequence[str] | None = None,
    positional: Mapping[str, str] | None = None,
) -> CommandLine:
    """Parse the command line into one instance of each dataclass; exit with code 2 on a usage error.

    :param description: the script's docstring, whose first line --help shows
    :param positional: name -> help text of the arguments without a flag. They are returned last, as a namespace
    """
    from cotrain.common.argument_parser import ArgumentParser

    return ArgumentParser(dataclass_types, description, positional).parse(args)


def parse_arguments(dataclass_types: Sequence[type], description: str, *options, **named) -> tuple:
    """Return the instances alone; arguments as for `parse_command_line`."""
    return parse_command_line(dataclass_types, description, *options, **named).arguments
