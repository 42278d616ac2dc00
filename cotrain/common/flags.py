"""Declaration of the scripts' flags."""

import operator
from dataclasses import field, fields
from typing import Any

from cotrain.common.checks import require

_BOUNDS = {"above": operator.gt, "at_least": operator.ge, "below": operator.lt, "at_most": operator.le}
MARKS = {"setting", "optional", *_BOUNDS}  # metadata that are not for argparse


def flag(default: Any, help: str, *, setting: bool = False, optional: bool = False, **metadata: Any) -> Any:
    """Return the field of a dataclass that is a flag of a script.

    :param default: a value, a function that makes it (`list`), or `dataclasses.MISSING` if the flag is required
    :param setting: all peers of a run need the same value: the organiser publishes it, and trainers adopt it
    :param optional: of a setting: trainers may choose another value
    :param metadata: bounds of a number (`above`, `at_least`, `below`, `at_most`; without a lower one it is above 0),
        and options of transformers' HfArgumentParser
    """
    kind = "default_factory" if callable(default) else "default"
    return field(**{kind: default}, metadata={"help": help, "setting": setting, "optional": optional, **metadata})


class Flags:
    """Base of the dataclasses of flags, which checks the bounds of their numbers."""

    def __post_init__(self):
        for option in fields(self):
            value, declared = getattr(self, option.name), option.metadata
            bounds = {name: declared[name] for name in _BOUNDS if name in declared}
            if bounds.keys().isdisjoint(("above", "at_least")):
                bounds["above"] = 0
            for name, bound in bounds.items() if type(value) in (int, float) else ():
                words = name.replace("_", " ")
                require(_BOUNDS[name](value, bound), f"--{option.name} must be {words} {bound}, got {value}")


def find_settings(dataclass_types: list[type], *, optional_only: bool = False) -> frozenset[str]:
    """Return the names of the flags that are settings of a run."""
    mark = "optional" if optional_only else "setting"
    found = (option for dataclass_type in dataclass_types for option in fields(dataclass_type))
    return frozenset(option.name for option in found if option.metadata.get(mark))
