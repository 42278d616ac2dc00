"""Train one model together over the internet: what a script of your own imports."""

import importlib

# Imported at their first use: they take seconds, which scripts that only parse flags need not wait for.
_MODULES = {"Task": "cotrain.task", "join_run": "cotrain.join"}


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
