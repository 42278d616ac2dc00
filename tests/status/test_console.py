"""The status panel on a terminal: log lines of the trainer and of its child processes stay whole above it."""

import functools
import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from cotrain.status.console import StatusPanel, open_panel
from tests.status.test_status import make_status
from tests.support.peers import ROOT

NUM_LINES = 20
COLUMNS = 120
CODES = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")


def run_on_terminal(*args: object) -> str:
    """Run panel_trainer.py with stdout and stderr on a terminal; return all that it writes."""
    terminal, side = pty.openpty()
    command = [sys.executable, str(ROOT / "tests" / "support" / "panel_trainer.py"), *map(str, args)]
    env = {**os.environ, "TERM": "xterm", "COLUMNS": str(COLUMNS), "LINES": "40"}
    process = subprocess.Popen(command, stdin=side, stdout=side, stderr=side, env=env)
    os.close(side)
    written = b""
    while True:
        try:
            written += os.read(terminal, 65536)
        except OSError:  # the last process has closed the terminal
            break
    os.close(terminal)
    assert process.wait(60) == 0, written.decode()
    return written.decode()


def display(text: str) -> list[str]:
    """Return the lines that a terminal shows at last. Lines are as long as they are: none is wrapped."""
    lines, row, column = [""], 0, 0
    for parameters, code, control, plain in CODES.findall(text):
        if control == "\r":
            column = 0
        elif control == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif code == "A":
            row -= int(parameters or 1)
            assert row >= 0
        elif code == "K":
            assert parameters == "2"
            lines[row] = ""
        elif code:
            assert code in "mhl", code  # colours, cursor
        else:
            lines[row] = lines[row][:column].ljust(column) + plain + lines[row][column + len(plain) :]
            column += len(plain)
    return lines


def assert_lines_are_whole(lines: list[str]) -> None:
    for name in ("trainer", "early child", "late child"):
        for number in range(NUM_LINES):
            found = [line for line in lines if f" {name} {number} " in line]
            assert len(found) == 1 and re.fullmatch(rf".*\] {name} {number} (long ?){{60}}", found[0].strip()), found
    assert lines.count("to stdout") == 1


@pytest.mark.programs
def test_panel_stays_below_whole_log_lines_until_the_trainer_stops(tmp_path: Path):
    written = run_on_terminal(tmp_path, NUM_LINES)
    assert written.count("quick-otter-3f2a in run run") > 10, "drawn again and again"
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l"), "the cursor is visible"
    lines = display(written)
    assert_lines_are_whole(lines)
    (panel,) = [row for row, line in enumerate(lines) if "quick-otter-3f2a" in line]
    below = lines[panel:]
    assert not [line for line in below if "long" in line or "to stdout" in line]
    assert all(len(line.rstrip()) <= COLUMNS for line in below)
    (stopping,) = [row for row, line in enumerate(below) if "Stopping. A second Ctrl-C" in line]
    assert "the last line" in below[stopping + 1]


@pytest.mark.parametrize(
    ("disable", "is_terminal", "term", "shown"),
    [(False, True, "xterm", True), (True, True, "xterm", False), (False, False, "xterm", False),
     (False, True, "dumb", False)],
)  # fmt: skip
def test_panel_needs_a_terminal_and_can_be_switched_off(monkeypatch, disable, is_terminal, term, shown):
    monkeypatch.setenv("TERM", term)
    stderr = io.StringIO()
    stderr.isatty = lambda: is_terminal
    monkeypatch.setattr(sys, "stderr", stderr)
    assert (open_panel(disable) is not None) == shown


@pytest.mark.parametrize(
    "words", ["[link=http://evil.example]click[/link]", "[/x]", "\x1b]8;;http://evil.example\x07click"]
)
def test_what_others_wrote_is_shown_as_it_is(words, monkeypatch):
    """It was read as markup: a stranger's hyperlink, or an error that ended the thread of the panel."""
    output = io.StringIO()
    console = functools.partial(Console, file=output, force_terminal=True, width=120)
    monkeypatch.setattr("cotrain.status.console.Console", console)
    panel = StatusPanel()
    panel.show(make_status(last_miss=(7, words)))
    panel.close()
    shown = words.replace("\x1b", "").replace("\x07", "")
    assert f"#7: {shown}" in output.getvalue() and "\x1b]8" not in output.getvalue()
