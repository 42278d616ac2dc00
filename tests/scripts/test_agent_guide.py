"""docs/agent-guide.md and docs/troubleshooting.md: the code prints the lines, and writes the files and fields."""

import json
import re
from pathlib import Path

import pytest

from lib.averaging.round_log import describe_round
from lib.common.errors import TEMPORARY
from lib.common.heartbeat import PERIOD, VARIABLE, Heartbeat
from run_forever import USAGE
from tests.support.messages import is_printed
from tests.support.peers import ROOT

GUIDE, TROUBLESHOOTING = ROOT / "docs/agent-guide.md", ROOT / "docs/troubleshooting.md"
CODE = "\n".join(path.read_text() for path in (ROOT / "lib").rglob("*.py"))


def read_table(page: Path, heading: str) -> list[str]:
    """Return the first cells of the tables of a page whose first column has this heading."""
    tables = re.findall(rf"^\| {heading}[^|]*\|.*\n\|[-|]+\n((?:\|.*\n)+)", page.read_text(), re.MULTILINE)
    return [re.match(r"\| (.*?) \|", row)[1].strip("`") for table in tables for row in table.splitlines()]


LINES = [(page.stem, line) for page in (GUIDE, TROUBLESHOOTING) for line in read_table(page, "line")]


@pytest.mark.parametrize(("page", "line"), LINES)
def test_line_is_printed(page, line):
    assert is_printed(line)


def test_lines_are_found():
    assert len(LINES) > 30
    assert not any(
        map(is_printed, ["Averaged the gradients with 17 peers", "Step 40", "Missed the round of step #41"])
    )


def test_the_line_after_a_signal_is_printed():
    (line,) = re.findall(r"`(SIGINT: [^`]*)`", GUIDE.read_text())
    assert is_printed(" ".join(line.split()))


def test_exit_codes():
    signals = {128 + number for number in (2, 15)}  # StopSignal
    assert {int(code) for code in read_table(GUIDE, "exit code")} == {0, 1, USAGE, TEMPORARY} | signals


def test_fields_of_the_round_log():
    own = {name for name in read_table(GUIDE, "field") if f'"{name}":' in CODE}
    assert own == set(read_table(GUIDE, "field")) and len(own) == 9
    assert own & describe_round(None).keys() == {"group", "received", "missed", "seconds"}


def test_outcomes():
    named = re.search(r"\| `outcome` \|.*", GUIDE.read_text())[0]
    assert all(f'= "{name}"' in CODE for name in re.findall(r"`(\w+)`", named)[1:])


def test_files():
    names = read_table(GUIDE, "file")
    assert len(names) == 6
    assert all(re.sub(r"\d+", "", name) in CODE for name in names), names


def test_heartbeat(tmp_path):
    Heartbeat(tmp_path / "beat", longest_wait=1.0).work()
    text = " ".join(GUIDE.read_text().split())
    assert all(f"`{name}`" in text for name in [VARIABLE, *json.loads((tmp_path / "beat").read_text())])
    assert f"every {PERIOD:.0f} seconds" in text


def test_python_example():
    (example,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    names: dict = {}
    exec(example, names)
    assert names["row"] is not None
