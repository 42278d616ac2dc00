"""What modules may import and patch, and how large they may be; contracts of the packages are in pyproject.toml.

Only the packages of ALLOWED patch hivemind or import its private names, see docs/upgrading-hivemind.md. Ruff finds the
uses of private attributes.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALLOWED = {ROOT / "peerstep", ROOT / "cotrain" / "admission", ROOT / "cotrain" / "peer"}
SCRIPTS = {path.stem for path in ROOT.glob("*.py")} - {"arguments", "callback", "utils"}  # these are shared


def find_imports(path: Path) -> set[str | None]:
    """Return the modules that a module imports."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module for node in nodes if isinstance(node, ast.ImportFrom)}


def test_no_script_is_imported_by_another():
    assert not any(find_imports(path) & SCRIPTS for path in ROOT.glob("*.py"))


def test_scripts_take_flags_and_records_from_the_modules_beside_them():
    """Somebody who copies a script copies `arguments` and `utils` with it."""
    inner = {"cotrain.dht.metrics_schema", "cotrain.dht.run_records", "peerstep.reports.records"}
    found = {path.stem: find_imports(path) for path in ROOT.glob("*.py")}
    assert not {name for name in SCRIPTS | {"callback"} if found[name] & inner}
    peers = {"run_trainer", "run_custom_trainer", "run_training_monitor", "run_evaluator"}
    assert peers == {name for name in SCRIPTS if "utils" in found[name]}, "each peer states its records"


def test_trainers_use_only_the_public_names_of_the_engine():
    """And what ends its child processes."""
    for path in (ROOT / "run_trainer.py", ROOT / "run_custom_trainer.py", ROOT / "cotrain" / "join.py"):
        inner = {name for name in find_imports(path) if name and name.startswith("peerstep.")}
        assert inner <= {"peerstep.peer.processes"}, path


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
    folders = [ROOT / name for name in ("cotrain", "peerstep", "deploy")]
    paths = [*ROOT.glob("*.py"), *(path for folder in folders for path in folder.rglob("*.py"))]
    paths = [path for path in paths if not ALLOWED & {*path.parents}]
    wrong = {path.name: find_patches(path.read_text(encoding="utf-8")) for path in paths}
    assert not any(wrong.values()), "move this to peerstep, with a row in docs/upgrading-hivemind.md"


@pytest.mark.programs
def test_benchmarks_and_trials_can_be_imported():
    """`make test` does not run them: the evening once imported a function that was no more."""
    files = sorted([*ROOT.glob("benchmarks/*.py"), *ROOT.glob("tests/support/*.py")])
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {', '.join(names)}"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


# Above the limits of a class: 300 lines, and 15 attributes
TOO_LARGE = {
    "RoundAverager": "an averager of hivemind has both of its processes in one class",
    "TrainingStateAverager": "the same, and hivemind's own attributes, which it sets",
}


def count_attributes(node: ast.ClassDef) -> int:
    """Return the number of attributes that the methods of a class assign to `self`."""
    parts = (part for part in ast.walk(node) if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store))
    return len({part.attr for part in parts if root_of(part) == "self" and isinstance(part.value, ast.Name)})


def test_what_a_reader_has_to_keep_in_mind_is_bounded():
    """No function has more than 60 lines or 12 parameters, and few classes are larger than the limits."""
    paths = [*ROOT.glob("*.py"), *(ROOT / "cotrain").rglob("*.py"), *(ROOT / "peerstep").rglob("*.py")]
    nodes = [node for path in paths if "build" not in path.parts for node in ast.walk(ast.parse(path.read_text()))]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    large = {x.name for x in classes if x.end_lineno - x.lineno >= 300 or count_attributes(x) > 15}
    assert large == TOO_LARGE.keys()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            assert node.end_lineno - node.lineno < 60, f"{node.name} has more than 60 lines"
            assert len(set(names) - {"self", "cls"}) <= 12, f"{node.name} has more than 12 parameters"
