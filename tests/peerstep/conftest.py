"""Fixtures of the tests of the training state."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from peerstep.peer.averager_process import SafeAverager
from peerstep.progress.tracker import ProgressTracker
from tests.support.offline import Answer, Donors
from tests.support.simulated_time import LeapingClock


@pytest.fixture
def offline(monkeypatch) -> None:
    """Keep averagers and progress trackers from starting their processes and threads, see tests/support/offline.py."""
    monkeypatch.setattr(SafeAverager, "run_in_background", lambda _averager, **_options: None)
    monkeypatch.setattr(ProgressTracker, "start", lambda _tracker: None)


@pytest.fixture
def clock(monkeypatch) -> LeapingClock:
    """Simulated time for coroutines: those of the test, and those that it runs with `asyncio.run`."""
    clock = LeapingClock()
    clock.install(monkeypatch)
    return clock


@pytest.fixture
def donors(monkeypatch, clock) -> Iterator[Donors]:
    """Peers in memory that download each other's state."""
    monkeypatch.setattr("peerstep.state.averager.MPFuture", Answer)
    with ThreadPoolExecutor(16) as pool:
        yield Donors(pool)
