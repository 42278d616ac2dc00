"""Periodic background threads."""

import os
import threading
import time

from lib.common.processes import Watchdog
from lib.common.threads import PeriodicThread


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


def test_stopped_before_it_begins_it_does_nothing():
    thread = Counting(period=0.0)
    thread.stop()
    thread.run()
    assert thread.number == 0


class Child:
    """Fake process that dies on request."""

    def __init__(self):
        self.pid, self.lives = os.getpid(), True

    def is_alive(self) -> bool:
        return self.lives


def test_watchdog_tells_of_a_death_once():
    child, messages = Child(), []
    watchdog = Watchdog({"DHT": Child(), "averager": child}, period=0.01, on_death=messages.append)
    watchdog.start()
    child.lives = False
    watchdog.join(60)
    assert not watchdog.is_alive() and len(messages) == 1 and messages[0].startswith("The averager process has died")
