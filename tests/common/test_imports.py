"""Allowed imports of the files at the root; the contracts of lib's packages are in pyproject.toml."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPTS = {path.stem for path in ROOT.glob("*.py")} - {"arguments", "utils", "callback"}
# For each file or package: the files at the root that it may import, and lib's packages for files at the root.
MAY_IMPORT = {
    "arguments": {"lib.common"},
    "utils": {"arguments", "lib.averaging", "lib.common"},
    "callback": {"arguments", "utils", "lib.training", "lib.common"},
    "lib.common": set(),
    "lib.averaging": {"arguments"},
    "lib.peer": {"arguments", "utils"},
    "lib.data": {"arguments"},
    "lib.training": {"arguments", "utils"},
    "lib.monitoring": {"arguments", "utils"},
}
LIB = {"lib.common", "lib.averaging", "lib.peer", "lib.data", "lib.training", "lib.monitoring"}
MAY_IMPORT |= dict.fromkeys(SCRIPTS, {"arguments", "utils", "callback"} | LIB)


def find_imports(path: Path) -> set[str]:
    """Return the files at the root and the packages of lib that a module imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    packages = {".".join(name.split(".")[:2]) for name in names if name.startswith("lib.")}
    return packages & LIB | names & {*SCRIPTS, "arguments", "utils", "callback"}


def test_imports_go_down():
    for name in MAY_IMPORT:
        paths = [ROOT / f"{name}.py"] if name not in LIB else (ROOT / name.replace(".", "/")).glob("*.py")
        allowed = MAY_IMPORT[name] | (LIB if name in LIB else set())  # within lib: pyproject.toml
        wrong = {str(path): find_imports(path) - allowed for path in paths}
        assert not any(wrong.values()), wrong
