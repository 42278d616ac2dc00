"""The command line of a script."""

from collections.abc import Sequence


def parse_arguments(dataclass_types: Sequence[type], description: str, args: Sequence[str] | None = None) -> tuple:
    """One instance of each dataclass from the command line. `description`: the script's docstring."""
    from lib.common.argument_parser import (
        ArgumentParser,  # takes a second, in which a script can already answer signals
    )

    return ArgumentParser(dataclass_types, description).parse(args)
