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


def test_scripts_take_flags_and_records_from_the_modules_beside_them():
    """Somebody who copies a script copies `arguments` and `utils` with it."""
    inner = {"cotrain.arguments", "cotrain.dht.metrics_schema", "cotrain.dht.run_records", "peerstep.records"}
    assert not {path.name: found for path in ROOT.glob("*.py")
                if path.stem in SCRIPTS | {"callback"} and (found := find_imports(path) & inner)}  # fmt: skip


def test_each_peer_states_its_records():
    peers = {"run_trainer", "run_custom_trainer", "run_training_monitor", "run_evaluator"}
    assert peers == {path.stem for path in ROOT.glob("*.py") if path.stem in SCRIPTS and "utils" in find_imports(path)}


def test_trainers_use_only_the_public_names_of_the_engine():
    """And what ends its child processes."""
    for path in (ROOT / "run_trainer.py", ROOT / "run_custom_trainer.py", ROOT / "cotrain" / "join.py"):
        inner = {name for name in find_imports(path) if name.startswith("peerstep.")}
        assert inner <= {"peerstep.processes"}, path


def test_no_script_is_imported():
    assert not any(find_imports(path) & SCRIPTS for path in ROOT.glob("*.py"))
