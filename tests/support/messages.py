"""The messages in the source code: each string and f-string, without their values."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from tests.support.peers import ROOT

MIN_LETTERS = 4  # of a template, as in "Step #…": f"{name}: {value}" has none and would match any line
MIN_SHARE = 0.5  # of a line's letters that the template has: "… sent …" would match too many


@dataclass(frozen=True)
class Template:
    """A string of the code.

    :param text: its text, with … for each value
    """

    text: str

    @property
    def letters(self) -> int:
        return len(re.findall(r"\w", self.text))

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
    """Return the templates of the scripts, of lib/ and deploy/, and of hivemind's DHT and averaging.

    lib/averaging replaces hivemind's optimizer, which has some of the same messages.
    """
    (hivemind,) = find_spec("hivemind").submodule_search_locations
    folders = (ROOT / "lib", ROOT / "deploy", *(Path(hivemind) / name for name in ("averaging", "dht", "p2p")))
    paths = [*ROOT.glob("*.py"), *(path for folder in folders for path in folder.rglob("*.py"))]
    texts = (text for path in paths for text in _texts(ast.parse(path.read_text())))
    texts = {" ".join(text.split()) for text in texts}
    return tuple(template for template in map(Template, texts) if template.letters >= MIN_LETTERS)


def is_printed(line: str) -> bool:
    """Whether some template makes this line; … in the line stands for a part that is left out."""
    shown = Template(line)
    return any(
        (template.letters >= MIN_SHARE * shown.letters and template.pattern.fullmatch(line))
        or shown.pattern.fullmatch(template.text)
        for template in read_templates()
    )
