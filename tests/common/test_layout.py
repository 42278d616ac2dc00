"""Only lib/averaging and lib/peer use undocumented parts of hivemind, see docs/upgrading-hivemind.md."""

import ast
import importlib.util
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("lib", "deploy")  # benchmarks and tests may patch anything
ALLOWED = ("lib/averaging/", "lib/peer/")


def project_files() -> list[str]:
    paths = [*ROOT.glob("*.py"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))]
    return sorted(name for name in (str(path.relative_to(ROOT)) for path in paths) if not name.startswith(ALLOWED))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def defined_names(tree: ast.AST) -> set[str]:
    """Return names with a leading underscore of functions, classes, and assigned or annotated attributes."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return set(filter(is_private, names))


@cache
def names_of_hivemind() -> set[str]:
    (package,) = importlib.util.find_spec("hivemind").submodule_search_locations
    return set().union(*(defined_names(ast.parse(path.read_text())) for path in Path(package).rglob("*.py")))


def names_from_hivemind(tree: ast.AST) -> tuple[set[str], set[str]]:
    """Return a module's imports from hivemind: their local names, and their names in hivemind."""
    here, there = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hivemind":
            here |= {alias.asname or alias.name for alias in node.names}
            there |= {*node.module.split("."), *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Import):
            modules = [alias for alias in node.names if alias.name.split(".")[0] == "hivemind"]
            here |= {alias.asname or "hivemind" for alias in modules}
            there |= {part for alias in modules for part in alias.name.split(".")}
    return here, there


def root_of(node: ast.AST) -> str | None:
    """Return the root name of an expression: `a` for a.b.c"""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def find_private_uses(source: str) -> set[str]:
    """Return the private names of hivemind that a module imports, assigns to, or reads from any object."""
    tree = ast.parse(source)
    here, there = names_from_hivemind(tree)
    uses = set(filter(is_private, there))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del) and root_of(node) in here:
            uses.add(node.attr)
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "id", None) == "setattr"
            and root_of(node.args[0]) in here
        ):
            uses.add("setattr")
    own = defined_names(tree) - uses
    read = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return uses | (read & names_of_hivemind() - own)


def test_only_the_workarounds_use_what_hivemind_does_not_document():
    uses = {name: find_private_uses((ROOT / name).read_text()) for name in project_files()}
    wrong = {name: found for name, found in uses.items() if found}
    assert not wrong, f"move this to lib/averaging or lib/peer, with a row in docs/upgrading-hivemind.md: {wrong}"


def test_uses_are_found():
    for source, uses in [
        ("from hivemind.dht.node import _SearchState", {"_SearchState"}),
        ("from hivemind.averaging import averager as module\nmodule.Matchmaking = object", {"Matchmaking"}),
        ("import hivemind\nhivemind.p2p.P2P.HEADER_LEN = 1", {"HEADER_LEN"}),
        ("from hivemind.p2p import P2P\nP2P._UNIX_SOCKET_PREFIX = ''", {"_UNIX_SOCKET_PREFIX"}),
        ("from hivemind import DHT\nsetattr(DHT, 'run', print)", {"setattr"}),
        ("def stop(averager):\n    averager._outer_pipe.send(())", {"_outer_pipe"}),
        (
            "class A:\n    def __init__(self):\n        self._p2p = 1\n    def get(self):\n        return self._p2p",
            set(),
        ),
        ("from hivemind.dht import DHT\ndht = DHT(start=True)\ndht.shutdown()", set()),
    ]:
        assert find_private_uses(source) == uses, source
