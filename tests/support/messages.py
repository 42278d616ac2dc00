"""The messages in the source code: each string and f-string, without their values."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from tests.support.processes import ROOT

MIN_LETTERS = 4  # of a template, as in "Step #…": f"{name}: {value}" has none and would match any line
MIN_SHARE = 0.5  # of a line's letters that the template has: "… sent …" would match too many


def _texts(tree: ast.AST) -> Iterator[str]:
    """Yield the strings of a module with … for each value, but for docstrings and the parts of f-strings."""
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    parts |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield re.sub(r"\{\w*\}", "…", node.value)  # of str.format


@cache
def read_templates() -> tuple[str, ...]:
    """Return the strings of the scripts, of cotrain/ and deploy/, and of hivemind's DHT and averaging.

    peerstep replaces hivemind's optimizer, which has some of the same messages.
    """
    (hivemind,) = find_spec("hivemind").submodule_search_locations
    own = (ROOT / name for name in ("cotrain", "peerstep", "deploy"))
    folders = (*own, *(Path(hivemind) / name for name in ("averaging", "dht", "p2p")))
    paths = [*ROOT.glob("*.py"), *(path for folder in folders for path in folder.rglob("*.py"))]
    texts = {" ".join(text.split()) for path in paths for text in _texts(ast.parse(path.read_text(encoding="utf-8")))}
    return tuple(text for text in texts if count_letters(text) >= MIN_LETTERS)


@cache
def count_letters(text: str) -> int:
    return len(re.findall(r"\w", text))


@cache
def pattern_of(template: str) -> re.Pattern:
    return re.compile(".*".join(map(re.escape, template.split("…"))), re.DOTALL)


def fits(template: str, line: str) -> bool:
    """Whether a line has the text of a template, with anything in place of each …"""
    return pattern_of(template).fullmatch(line) is not None


def is_printed(line: str) -> bool:
    """Whether some template makes this line; … in the line stands for a part that is left out."""
    least = MIN_SHARE * count_letters(line)
    return any(
        (count_letters(template) >= least and fits(template, line)) or fits(line, template)
        for template in read_templates()
    )
