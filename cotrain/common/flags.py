"""Declaration of the scripts' flags."""

from dataclasses import field, fields
from typing import Any


def flag(default: Any, help: str, *, setting: bool = False, optional: bool = False, **metadata: Any) -> Any:
    """Return the field of a dataclass that is a flag of a script.

    :param default: a value, a function that makes it (`list`), or `dataclasses.MISSING` if the flag is required
    :param setting: all peers of a run need the same value: the organiser publishes it, and trainers adopt it
    :param optional: of a setting: trainers may choose another value
    :param metadata: options of transformers' HfArgumentParser
    """
    kind = "default_factory" if callable(default) else "default"
    return field(**{kind: default}, metadata={"help": help, "setting": setting, "optional": optional, **metadata})


def find_settings(dataclass_types: list[type], *, optional_only: bool = False) -> frozenset[str]:
    """Return the names of the flags that are settings of a run."""
    mark = "optional" if optional_only else "setting"
    found = (option for dataclass_type in dataclass_types for option in fields(dataclass_type))
    return frozenset(option.name for option in found if option.metadata.get(mark))
