"""Progress bars: a line every ten seconds where the output is no terminal."""

import io

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
