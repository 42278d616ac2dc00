"""Fixtures of the tests of the training state."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from cotrain.averaging.base import SafeAverager
from cotrain.averaging.progress import ProgressTracker
from tests.support.offline import Donors


@pytest.fixture
def offline(monkeypatch) -> None:
    """Keep averagers and progress trackers from starting their processes and threads, see tests/support/offline.py."""
    monkeypatch.setattr(SafeAverager, "run_in_background", lambda _averager, **_options: None)
    monkeypatch.setattr(ProgressTracker, "start", lambda _tracker: None)


@pytest.fixture
def donors(monkeypatch) -> Iterator[Donors]:
    """Peers in memory that download each other's state."""
    monkeypatch.setattr("cotrain.averaging.state.MPFuture", Future)
    monkeypatch.setattr(SafeAverager, "LINGER_SECONDS", 0.1)
    with ThreadPoolExecutor(16) as pool:
        yield Donors(pool)
