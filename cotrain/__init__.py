"""Train one model together over the internet: what a script of your own imports."""

import importlib
import importlib.util
import os
import sys
from pathlib import Path

_FOLDER = Path(__file__).parents[1]
_is_script = Path(sys.argv[0]).resolve().parent == _FOLDER
if _is_script and importlib.util.find_spec("psutil") is None:
    # A script of this folder, in a terminal without its environment: the imports would end with a traceback.
    _install = "" if (_FOLDER / ".venv").exists() else "make install && "
    sys.exit(
        f"{Path(sys.argv[0]).name}: error: {sys.executable} lacks the packages in requirements.txt; "
        f"run this first: cd {_FOLDER} && {_install}source .venv/bin/activate"
    )
if _is_script:  # Ctrl-C during the imports, before `run_script`
    sys.excepthook = lambda kind, *error: (
        sys.exit(130) if kind is KeyboardInterrupt else sys.__excepthook__(kind, *error)
    )
if os.isatty(2) and 0 in os.get_terminal_size(2):  # as in `script` or `docker exec -t`: tqdm would draw no bar
    os.environ.setdefault("TQDM_NCOLS", "80")
    os.environ.setdefault("TQDM_NROWS", "24")  # tqdm reads both when it is imported

# Imported at their first use: they take seconds, which scripts that only parse flags need not wait for.
_MODULES = {"Task": "cotrain.task", "join_run": "cotrain.join"}


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
