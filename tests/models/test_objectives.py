"""Only the registry of objectives names objectives."""

import ast
from pathlib import Path

from cotrain.models.objectives import OBJECTIVES
from tests.support.peers import ROOT


def test_only_the_registry_names_objectives():
    def names(path: Path) -> set[str]:
        constants = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        return constants & OBJECTIVES.keys()

    files = [*ROOT.glob("*.py"), *(ROOT / "cotrain").rglob("*.py"), *(ROOT / "deploy").rglob("*.py")]
    assert [str(path.relative_to(ROOT)) for path in files if names(path)] == ["cotrain/models/objectives.py"]
