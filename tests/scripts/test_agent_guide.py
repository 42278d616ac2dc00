"""docs/agent-guide.md and docs/troubleshooting.md: the code prints the lines, and the example runs."""

import re
from pathlib import Path

from tests.support.messages import is_printed
from tests.support.peers import ROOT

GUIDE, TROUBLESHOOTING = ROOT / "docs/agent-guide.md", ROOT / "docs/troubleshooting.md"


def read_table(page: Path, heading: str) -> list[str]:
    """Return the first cells of the tables of a page whose first column has this heading."""
    tables = re.findall(rf"^\| {heading}[^|]*\|.*\n\|[-|]+\n((?:\|.*\n)+)", page.read_text(), re.MULTILINE)
    return [re.match(r"\| (.*?) \|", row)[1].strip("`") for table in tables for row in table.splitlines()]


def test_lines_are_printed():
    lines = [line for page in (GUIDE, TROUBLESHOOTING) for line in read_table(page, "line")]
    (after_a_signal,) = re.findall(r"`(SIGINT: [^`]*)`", GUIDE.read_text())
    missing = [line for line in [*lines, " ".join(after_a_signal.split())] if not is_printed(line)]
    assert len(lines) > 30 and not missing, missing


def test_files_and_fields_are_those_of_the_code():
    code = "\n".join(path.read_text() for path in (ROOT / "cotrain").rglob("*.py"))
    files = [re.sub(r"\d+", "", name) for name in read_table(GUIDE, "file")]
    fields = [f'"{name}":' for name in read_table(GUIDE, "field")]
    assert files and fields
    missing = [name for name in [*files, *fields] if name not in code]
    assert not missing, missing


def test_python_example():
    (example,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    names: dict = {}
    exec(example, names)
    assert names["row"] is not None
