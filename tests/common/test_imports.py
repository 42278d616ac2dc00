"""No script imports another one; the contracts of the library's packages are in pyproject.toml."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHARED = {"arguments", "callback", "utils"}
SCRIPTS = {path.stem for path in ROOT.glob("*.py")} - SHARED


def find_imports(path: Path) -> set[str]:
    """Return the modules that a module imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def test_no_script_is_imported():
    assert not any(find_imports(path) & SCRIPTS for path in ROOT.glob("*.py"))
