"""Imports of the files at the root go down; the contracts of lib's packages are in pyproject.toml."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
BELOW_UTILS = ("lib.common", "arguments", "lib.averaging", "lib.data")
LAYERS = (*BELOW_UTILS, "utils", "lib.peer", "lib.training", "lib.monitoring", "callback")
SCRIPTS = {path.stem for path in ROOT.glob("*.py")} - set(LAYERS)


def find_imports(path: Path) -> set[str]:
    """Return the files at the root and the packages of lib that a module imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {".".join(name.split(".")[:2]) if name.startswith("lib.") else name for name in names if name}


def test_imports_go_down():
    for number, layer in enumerate(LAYERS):
        is_lib = layer.startswith("lib.")
        paths = (ROOT / layer.replace(".", "/")).glob("*.py") if is_lib else [ROOT / f"{layer}.py"]
        above = {name for name in LAYERS[number + 1 :] if not (is_lib and name.startswith("lib."))}
        wrong = {str(path): find_imports(path) & (above | SCRIPTS) for path in paths}
        assert not any(wrong.values()), wrong
    assert not any(find_imports(ROOT / f"{name}.py") & SCRIPTS for name in SCRIPTS), "a script imports another one"
