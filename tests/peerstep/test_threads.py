"""Periodic background threads."""

import multiprocessing
import os
import resource
import threading
import time
from multiprocessing import RawValue
from multiprocessing.connection import Connection
from types import SimpleNamespace

import psutil
import pytest
import torch

from peerstep.errors import PeerError
from peerstep.local_peer import supervise
from peerstep.peer import processes
from peerstep.peer.processes import EXIT_TEMPORARY, Watchdog
from peerstep.peer.threads import PeriodicThread
from tests.support.engine import local_optimizer, local_peer
from tests.support.processes import wait_until


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
        self.pid, self.lives, self.beats = os.getpid(), True, RawValue("Q", 0)

    def is_alive(self) -> bool:
        return self.lives


@pytest.fixture
def ended(monkeypatch):
    """Record the exit codes with which a watchdog would end this process."""
    codes = []
    monkeypatch.setattr("os._exit", codes.append)
    return codes


def test_death_of_a_child_ends_the_process(ended, caplog):
    child = Child()
    watchdog = Watchdog({"DHT": Child(), "averager": child})
    watchdog.work()
    assert ended == []
    child.lives = False
    watchdog.work()
    assert ended == [EXIT_TEMPORARY] and "The averager process has died" in caplog.text
    watchdog.stop()
    watchdog.work()
    assert len(ended) == 1, "it was asked to stop"


def test_signal_to_all_processes_is_no_fault(ended, caplog, monkeypatch):
    """As of systemd: it was "out of memory?", exit code 75, and a hint about GPUs."""
    child = Child()
    monkeypatch.setattr("peerstep.local_peer.exit_after", lambda *_: None)
    monkeypatch.setattr(Watchdog, "start", lambda self: None)
    processes.stop_requested.set()
    with pytest.raises(SystemExit) as exit_info, supervise({"DHT": child}, seconds=1.0, exit_code=1) as watchdog:
        child.lives = False
        watchdog.work()
        raise OSError("handle is closed")
    processes.stop_requested.clear()
    assert ended == [0] == [exit_info.value.code]
    assert "The signal has also ended the DHT process: ending at once" in caplog.text and "memory" not in caplog.text


def test_hang_ends_the_process(ended, caplog, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(processes.time, "monotonic", lambda: clock.now)
    watchdog = Watchdog({}, longest_wait=600.0)
    for clock.now in (599.0, 1198.0):
        watchdog.work()
        watchdog.record_work()
    clock.now = 1799.0
    watchdog.work()
    assert ended == [EXIT_TEMPORARY] and "Nothing was done for 600 seconds: this peer hangs" in caplog.text


def test_child_that_hangs_ends_the_process_and_a_pause_of_all_does_not(ended, caplog, monkeypatch):
    clock, child, other = SimpleNamespace(now=0.0), Child(), Child()
    monkeypatch.setattr(processes.time, "monotonic", lambda: clock.now)
    watchdog = Watchdog({"DHT": other, "averager": child})
    for check in range(3 * Watchdog.MAX_SILENCE):
        other.beats.value += 1
        child.beats.value += check % (Watchdog.MAX_SILENCE - 1) == 0
        clock.now += 1000.0  # nobody works while the machine sleeps, the watchdog does not either
        watchdog.work()
    assert ended == []
    for _ in range(Watchdog.MAX_SILENCE):
        other.beats.value += 1
        watchdog.work()
    assert set(ended) == {EXIT_TEMPORARY} and "The averager process hangs or was stopped" in caplog.text


@pytest.mark.peers
def test_stopped_children_are_noticed(monkeypatch, tmp_path):
    ended = []
    monkeypatch.setattr(processes, "end_process", lambda *end: ended.append(end))
    model = torch.nn.Linear(2, 2)
    with local_peer(tmp_path, "run") as peer, local_optimizer(model, peer, 4, target_batch_size=4) as optimizer:
        children = {"DHT": peer.dht, **optimizer.processes}
        assert len(children) == 3
        for name, child in children.items():
            watchdog, process = Watchdog({name: child}), psutil.Process(child.pid)
            enough = child.beats.value + 2
            wait_until(lambda child=child, enough=enough: child.beats.value >= enough, 120, "beats of an idle child")
            process.suspend()
            wait_until(lambda process=process: process.status() == psutil.STATUS_STOPPED, 60, "its stop")
            for _ in range(Watchdog.MAX_SILENCE + 1):
                assert ended == []
                watchdog.work()
            process.resume()
            code, message, _ = ended.pop()
            assert code == EXIT_TEMPORARY and f"The {name} process hangs or was stopped" in message


@pytest.mark.parametrize(
    ("lives", "error", "raised", "code"),
    [
        (True, ValueError("a bug"), ValueError, 1),
        (True, PeerError("a wrong file"), PeerError, 1),
        (True, PeerError("nobody answers", retryable=True), PeerError, EXIT_TEMPORARY),
        (False, OSError("handle is closed"), PeerError, EXIT_TEMPORARY),
        (False, PeerError("the parameters are not finite"), PeerError, EXIT_TEMPORARY),
    ],
)
def test_error_that_follows_from_a_death_may_pass(monkeypatch, lives, error, raised, code):
    """The exit code is also that of a process whose shutdown takes too long."""
    codes = []
    monkeypatch.setattr("peerstep.local_peer.exit_after", lambda _seconds, code, _why: codes.append(code))
    monkeypatch.setattr(Watchdog, "start", lambda self: None)
    child = Child()
    with pytest.raises(raised), supervise({"DHT": child}, seconds=1.0, exit_code=1):
        child.lives = lives
        raise error
    assert codes == [code]


def count_faults(result: Connection) -> None:
    """Send the page faults of a local step whose tensors have 128 MB, before and after free memory is kept."""

    def count() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        blocks = [bytearray(2**24) for _ in range(8)]
        del blocks
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    for option in (-1, -3):  # the library's defaults, which another test may have changed in the parent
        processes.libc.mallopt(option, 2**17)
    before = [count() for _ in range(3)][-1]
    processes.keep_free_memory()
    result.send((before, [count() for _ in range(3)][-1]))


def test_memory_of_a_local_step_is_kept_for_the_next_one():
    """In another process, which ends with what it changes."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    (child := context.Process(target=count_faults, args=(sender,))).start()
    sender.close()
    before, after = receiver.recv()
    child.join(120)
    assert before > 10_000 and after < 100
