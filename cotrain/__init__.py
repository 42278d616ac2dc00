"""Train one model together over the internet: what a script of your own imports."""

import os
import sys

# random.py or queue.py of the user, beside the scripts or in PYTHONPATH, must not hide Python's own modules.
sys.path.sort(key=lambda folder: folder.removesuffix("/lib-dynload") != os.path.dirname(os.__file__))

import importlib
import importlib.util
from importlib.machinery import PathFinder
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
if _is_script and sys.flags.optimize > 1:
    sys.exit(f"{Path(sys.argv[0]).name}: error: without docstrings transformers does not start: unset PYTHONOPTIMIZE")


def explain_hidden_module() -> str | None:
    """Return one line that names a file of the user which was imported in the place of an installed package."""
    folders = [folder for folder in sys.path if folder.endswith(("site-packages", "dist-packages"))]
    ours = {*sys.stdlib_module_names, "cotrain", "peerstep"}
    for name in [name for name in sys.modules if "." not in name and name not in ours]:
        file, spec = getattr(sys.modules[name], "__file__", None), PathFinder.find_spec(name, folders)
        if file and spec is not None and spec.origin not in (None, file):
            return f"'{file}' hides the package '{name}': rename it, or take its folder out of PYTHONPATH"
    return None


def _report_early(kind: type[BaseException], *error) -> None:
    """Report what ends a script during its imports, before `run_script`: Ctrl-C, or a hidden package."""
    if kind is KeyboardInterrupt:
        sys.exit(130)
    if (line := explain_hidden_module()) is not None:
        sys.exit(f"{Path(sys.argv[0]).name}: error: {line}")
    sys.__excepthook__(kind, *error)


if _is_script:
    sys.excepthook = _report_early
if os.isatty(2) and 0 in os.get_terminal_size(2):  # as in `script` or `docker exec -t`: tqdm would draw no bar
    os.environ.setdefault("TQDM_NCOLS", "80")
    os.environ.setdefault("TQDM_NROWS", "24")  # tqdm reads both when it is imported

# Imported at their first use: they take seconds, which scripts that only parse flags need not wait for.
_MODULES = {"Task": "cotrain.task", "join_run": "cotrain.join"}


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
