"""Dialing the initial peers again, and the clock that they give."""

import math
import multiprocessing
import time
from types import SimpleNamespace

import pytest

from peerstep.peer import clock, redial
from peerstep.peer.clock import correct_clock, run_time
from peerstep.peer.redial import BootstrapRedialer, ClockJumps, set_run_clock
from peerstep.reports.records import get_dictionary, store_record
from tests.support.engine import local_peer
from tests.support.processes import wait_until

NOW = 1.8e9  # the right time, in tests of fake peers


class Answers:
    """DHT whose initial peers answer with the differences of their clocks to the run's clock here."""

    def __init__(self, *answers: list[float | None] | type[Exception]):
        self.answers = iter(answers)

    def run_coroutine(self, _function, return_future: bool) -> SimpleNamespace:
        if (answer := next(self.answers)) is TimeoutError:
            raise answer
        return SimpleNamespace(result=lambda timeout: answer)


@pytest.fixture(autouse=True)
def right_clock(monkeypatch):
    monkeypatch.setattr(redial, "clock_jumps", ClockJumps())
    yield
    correct_clock(0.0)


def test_peers_that_do_not_answer_are_dialed_more_often():
    dht = Answers([0.0, 0.1], [None, 0.0], TimeoutError, [0.0, 0.0])
    thread = BootstrapRedialer(dht, ["/ip4/192.0.2.1/tcp/1/p2p/Qm"] * 2)
    periods = [thread.period]
    for _ in range(4):
        thread.work()
        periods.append(thread.period)
    assert periods == [10.0, 10.0, 2.0, 2.0, 10.0]


@pytest.mark.parametrize(
    ("answers", "offset"),
    [
        ([600.0], 600.0), ([-5.0], -5.0), ([0.9], 0.0), ([], 0.0), ([None], 0.0),
        ([0.1, 0.2, 1e9], 0.0),  # one of three lies
        ([600.0, None, 600.2], 600.0), ([7200.0, 0.1], 0.0), ([math.inf], 0.0), ([math.nan, 600.0], 600.0),
        ([1e300], 97200.0), ([-1e300], -97200.0),
    ],
)  # fmt: skip
def test_clock_of_the_run_is_the_median_of_the_initial_peers(answers, offset, monkeypatch):
    for module in (clock, redial):
        monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: NOW, monotonic=time.monotonic))
    set_run_clock(Answers(answers), ["/ip4/192.0.2.1/tcp/1/p2p/Qm"] * len(answers))
    assert run_time() - NOW == pytest.approx(offset, abs=0.1)


def test_clock_that_is_a_year_off_is_named_as_it_is(monkeypatch, caplog):
    """The warning said 97200 s, as far as the clock is corrected."""
    for module in (clock, redial):
        monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: NOW, monotonic=time.monotonic))
    set_run_clock(Answers([365 * 86400.0]), ["/ip4/192.0.2.1/tcp/1/p2p/Qm"])
    assert "clock is 31536000.0 s behind the run's: using that of the run (up to 27 hours)" in caplog.text


def test_clock_is_named_once_and_followed_when_it_is_set(monkeypatch, caplog):
    """A laptop sleeps: its clock is 600 s late afterwards, until it is set."""
    system = SimpleNamespace(error=-600.0)
    for module in (clock, redial):
        monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: NOW + system.error, monotonic=time.monotonic))
    peers = ["/ip4/192.0.2.1/tcp/1/p2p/Qm"]

    def ask() -> None:
        set_run_clock(Answers([NOW - run_time()]), peers)

    for _ in range(3):
        ask()
    set_run_clock(Answers([5.0]), peers)  # answers that change are no news
    ask()
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "This machine's clock is 600.0 s behind the run's"
    ]
    assert run_time() == pytest.approx(NOW, abs=0.1)
    system.error = 0.0
    ask()
    assert run_time() == pytest.approx(NOW, abs=0.1) and len(caplog.records) == 1


def test_clock_that_jumps_again_and_again_is_named_every_ten_minutes(monkeypatch, caplog):
    """In WSL a clock may fall behind and be set every few seconds, all night: 360 warnings in an hour."""
    system = SimpleNamespace(error=0.0, seconds=0.0)
    now = SimpleNamespace(time=lambda: NOW + system.error, monotonic=lambda: system.seconds)
    for module in (clock, redial):
        monkeypatch.setattr(module, "time", now)
    for system.seconds in range(0, 3600, 5):
        system.error = -2.0 * (system.seconds % 10 > 0)
        set_run_clock(Answers([NOW - run_time()]), ["/ip4/192.0.2.1/tcp/1/p2p/Qm"])
        assert run_time() == pytest.approx(NOW, abs=0.1), "it is corrected each time"
    assert len(caplog.records) == 6
    assert "behind the run's, and became wrong 60 times since the last warning: using" in caplog.text


@pytest.mark.peers
@pytest.mark.parametrize("error", [600.0, -30.0])
def test_peer_with_a_wrong_clock_joins_reads_and_is_read(tmp_path, monkeypatch, error):
    right, key = time.time, "run_state_averager.all_averagers"
    with local_peer(tmp_path / "one", "run") as one:
        store_record(one.dht, key, one.public_key, 7.0, 60)
        address = str(one.dht.get_visible_maddrs()[0])
        # From now on this process, and those that it forks, are of a machine whose clock is wrong.
        wrong = SimpleNamespace(time=lambda: right() + error, monotonic=time.monotonic)
        for module in (clock, redial):
            monkeypatch.setattr(module, "time", wrong)
        monkeypatch.setattr(clock, "offset", multiprocessing.RawValue("d", 0.0))
        with local_peer(tmp_path / "two", "run", (address,)) as two:
            assert run_time() == pytest.approx(right(), abs=15.0)
            store_record(two.dht, key, two.public_key, 7.0, 60)
            for peer in (one, two):
                wait_until(lambda dht=peer.dht: len(get_dictionary(dht, key)) == 2, 120, "both records")
