"""Only the packages of ALLOWED patch hivemind or import its private names, see docs/upgrading-hivemind.md.

Ruff finds the uses of private attributes.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
ALLOWED = {ROOT / "cotrain" / name for name in ("admission", "averaging", "dht", "peer")}


def root_of(node: ast.AST) -> str | None:
    """Return the root name of an expression: `a` for a.b.c"""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def find_patches(source: str) -> set[str]:
    """Return the private names that a module imports from hivemind, and the attributes of hivemind that it assigns."""
    nodes = list(ast.walk(ast.parse(source)))
    imported, found = set(), set()
    for node in nodes:
        module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            path = f"{module}.{alias.name}".strip(".").split(".")
            if path[0] == "hivemind":
                imported.add(alias.asname or (path[-1] if module else path[0]))
                found |= {name for name in path if name.startswith("_")}
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del) and root_of(node) in imported:
            found.add(node.attr)
        elif isinstance(node, ast.Call) and root_of(node.func) == "setattr" and root_of(node.args[0]) in imported:
            found.add("setattr")
    return found


def test_only_the_workarounds_patch_hivemind():
    paths = {*ROOT.glob("*.py"), *(ROOT / "cotrain").rglob("*.py"), *(ROOT / "deploy").rglob("*.py")}
    wrong = {path.name: find_patches(path.read_text()) for path in paths if path.parent not in ALLOWED}
    assert not any(wrong.values()), (
        "move this to cotrain/averaging or cotrain/dht, with a row in docs/upgrading-hivemind.md"
    )
