"""Periodic background threads."""

import os
import threading
import time
from types import SimpleNamespace

import pytest

from cotrain.common import processes
from cotrain.common.errors import TEMPORARY, TemporaryError, UserError
from cotrain.common.processes import Watchdog
from cotrain.common.threads import PeriodicThread
from cotrain.peer.peer import supervise


class Counting(PeriodicThread):
    def __init__(self, period: float):
        super().__init__(period)
        self.number = 0
        self.reached = threading.Event()

    def work(self) -> None:
        self.number += 1
        if self.number == 3:
            self.period = 60.0
            self.reached.set()


def test_works_until_it_is_stopped_and_may_change_its_period():
    thread = Counting(period=0.01)
    assert thread.daemon and thread.name == "Counting"
    thread.start()
    assert thread.reached.wait(60)
    started = time.monotonic()
    thread.stop()  # within the period of a minute
    thread.join(30)
    assert not thread.is_alive() and time.monotonic() - started < 30 and thread.number == 3


class Child:
    """Fake process that dies on request."""

    def __init__(self):
        self.pid, self.lives = os.getpid(), True

    def is_alive(self) -> bool:
        return self.lives


@pytest.fixture
def ended(monkeypatch):
    """Record the exit codes with which a watchdog would end this process."""
    codes = []
    monkeypatch.setattr(processes.os, "_exit", codes.append)
    return codes


def test_death_of_a_child_ends_the_process(ended, caplog):
    child = Child()
    watchdog = Watchdog({"DHT": Child(), "averager": child})
    watchdog.work()
    assert ended == []
    child.lives = False
    watchdog.work()
    assert ended == [TEMPORARY] and "The averager process has died" in caplog.text
    watchdog.stop()
    watchdog.work()
    assert len(ended) == 1, "it was asked to stop"


def test_hang_ends_the_process(ended, caplog, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(processes.time, "monotonic", lambda: clock.now)
    watchdog = Watchdog({}, longest_wait=600.0)
    for clock.now in (599.0, 1198.0):
        watchdog.work()
        watchdog.record_work()
    clock.now = 1799.0
    watchdog.work()
    assert ended == [TEMPORARY] and "Nothing was done for 600 seconds: this peer hangs" in caplog.text


@pytest.mark.parametrize(
    ("lives", "error", "raised", "code"),
    [
        (True, ValueError("a bug"), ValueError, 1),
        (True, UserError("a wrong file"), UserError, 1),
        (True, TemporaryError("nobody answers"), TemporaryError, TEMPORARY),
        (False, OSError("handle is closed"), TemporaryError, TEMPORARY),
        (False, UserError("the parameters are not finite"), UserError, TEMPORARY),
    ],
)
def test_error_that_follows_from_a_death_may_pass(monkeypatch, lives, error, raised, code):
    """The exit code is also that of a process whose shutdown takes too long."""
    codes = []
    monkeypatch.setattr("cotrain.peer.peer.exit_after", lambda _seconds, code, _why: codes.append(code))
    monkeypatch.setattr(Watchdog, "start", lambda self: None)
    child = Child()
    with pytest.raises(raised), supervise({"DHT": child}, seconds=1.0, exit_code=1):
        child.lives = lives
        raise error
    assert codes == [code]
