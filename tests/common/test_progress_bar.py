"""Progress bars: a line every ten seconds where the output is no terminal."""

import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from cotrain.common.progress_bar import ProgressBar


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch):
    """Seconds of `time.time` for tqdm, in a list; no thread of tqdm looks at them."""
    seconds = [1.8e9]
    monkeypatch.setattr("tqdm.std.time", lambda: seconds[0])
    monkeypatch.setattr(ProgressBar, "monitor_interval", 0)
    return seconds


def run(clock, seconds: int) -> None:
    with ProgressBar(desc="Reading", unit=" rows", total=10 * seconds) as progress:
        for _ in range(10 * seconds):
            clock[0] += 0.1
            progress.update()


def test_log_has_a_line_every_ten_seconds(clock, monkeypatch):
    monkeypatch.setattr("sys.stderr", log := io.StringIO())
    run(clock, 35)
    lines = log.getvalue().splitlines()
    assert len(lines) in (2, 3) and all(line.startswith("Reading:") for line in lines) and "\r" not in log.getvalue()
    run(clock, 8)
    assert log.getvalue().splitlines() == lines


def test_terminal_has_a_bar(clock, monkeypatch):
    monkeypatch.setattr("sys.stderr", terminal := _Terminal())
    run(clock, 35)
    assert terminal.getvalue().count("\r") > 50 and "100%" in terminal.getvalue()


BAR = """
from cotrain.common.progress_bar import ProgressBar
for _ in ProgressBar(range(3), desc="Reading", mininterval=0): pass
"""


@pytest.mark.parametrize(("rows", "columns"), [(0, 0), (0, 80), (24, 0), (24, 80), (10, 40)])
def test_terminal_that_states_no_size_has_a_bar(rows, columns):
    """`script` and `docker exec -t` without -i give 0 rows of 0 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    folder = Path(__file__).parents[2]
    program = subprocess.Popen([sys.executable, "-c", BAR], cwd=folder, stdout=theirs, stderr=theirs)
    os.close(theirs)
    output = b""
    try:
        while data := os.read(ours, 2**16):
            output += data
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert program.wait(120) == 0 and b"Reading: " in output
    assert all(len(line.decode()) <= (columns or 80) for line in output.split(b"\r"))
