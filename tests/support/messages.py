"""The messages in the source code: each string and f-string, without their values."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from tests.support.peers import ROOT

MIN_LETTERS = 5  # of a template: f"{name}: {value}" has none and would match any line
TABLE = ROOT / "lib/common/diagnosis.py"  # is compared with the other files


@dataclass(frozen=True)
class Template:
    """A string of the code.

    :param text: its text, with … for each value
    """

    text: str

    @property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(".*".join(map(re.escape, self.text.split("…"))), re.DOTALL)


def _texts(tree: ast.AST) -> Iterator[str]:
    """Yield the strings of a module, but for docstrings and the parts of f-strings."""
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    parts |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield re.sub(r"\{\w*\}", "…", node.value)  # of str.format


@cache
def read_templates() -> tuple[Template, ...]:
    """Return the templates of the scripts, of lib/ and of hivemind."""
    (hivemind,) = find_spec("hivemind").submodule_search_locations
    paths = [*ROOT.glob("*.py"), *(ROOT / "lib").rglob("*.py"), *Path(hivemind).rglob("*.py")]
    texts = (text for path in paths if path != TABLE for text in _texts(ast.parse(path.read_text())))
    texts = {" ".join(text.split()) for text in texts}
    return tuple(Template(text) for text in texts if len(re.findall(r"\w", text.replace("…", ""))) >= MIN_LETTERS)


def is_printed(line: str) -> bool:
    """Whether some template makes this line; … in the line stands for any value."""
    return any(template.pattern.fullmatch(line) for template in read_templates())
