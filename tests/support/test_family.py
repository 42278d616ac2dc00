"""Tests of Family: it sees all descendants, including those that outlive their parent."""

import subprocess
import sys

import pytest

from tests.support.family import Family
from tests.support.peers import wait_until

# Starts a child, which starts another one; the child ends at the first line of the input, the grandchild at no time.
PROGRAM = """
import subprocess, sys
code = "import subprocess, sys; subprocess.Popen(['sleep', '600']); sys.stdin.read(1)"
child = subprocess.Popen([sys.executable, "-S", "-c", code])
child.wait()
sys.exit(0)
"""


@pytest.fixture
def start():
    """Return a function that starts a process, which ends with the test."""
    started = []

    def start(*command: str) -> subprocess.Popen:
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE))
        return started[-1]

    yield start
    for process in started:
        process.stdin.close()
        process.kill()
        process.wait()


def test_descendants_are_seen_and_outlive_their_parents(start):
    program = start(sys.executable, "-S", "-c", PROGRAM)
    family, stranger = Family(program.pid), start("sleep", "600")
    wait_until(lambda: len(family.alive()) == 3, 60, "child and grandchild")
    assert family.alive()[0].pid == program.pid and stranger.pid not in [process.pid for process in family.alive()]
    program.stdin.close()
    assert program.wait(60) == 0
    (sleeper,) = family.alive()
    assert sleeper.name() == "sleep"
    sleeper.kill()
    wait_until(lambda: not family.alive(), 15, "the end of the grandchild")


def test_process_that_has_ended(start):
    program = start("true")
    assert program.wait(60) == 0
    assert Family(program.pid).alive() == []
