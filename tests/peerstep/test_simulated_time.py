"""The clock of simulations: it waits for work, and links carry as much as they say."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from types import SimpleNamespace

import pytest

from peerstep.progress import tracker
from tests.support.simulated_network import LATENCY, Network, Node

WORK_SECONDS = 0.05  # of the machine, for which a thread works: 4 simulated seconds at 80 times the machine's speed


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(1, 0.16) as network:
        network.time.go()
        yield network


def test_clock_stands_while_a_thread_works(network):
    clock, seen = network.time, []

    def work() -> None:
        for _ in range(5):
            clock.sleep(0.16)
            began = clock.read()
            time.sleep(WORK_SECONDS)
            seen.append(clock.read() - began)

    threads = [Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    clock.sleep(10.0)
    assert seen == [0.0] * 10


def test_clock_stands_while_an_executor_works_and_passes_while_work_waits(network):
    clock, lock = network.time, tracker.threading.Lock()  # as the averaging code sees the module

    def hold() -> float:
        with lock:
            clock.sleep(3.2)
            time.sleep(WORK_SECONDS)
            return clock.read()

    def follow() -> float:
        clock.sleep(0.16)
        with lock:
            return clock.read()

    with ThreadPoolExecutor(2) as pool:
        results = [pool.submit(hold), pool.submit(follow)]
        assert [result.result() for result in results] == pytest.approx([3.2, 3.2])


def test_short_waits_in_a_row_pass(network):
    event, count = tracker.threading.Event(), 0
    while network.time.read() < 1.6:
        event.wait(1e-15)
        count += 1
    assert count == 10


def test_link_carries_small_parts_at_its_rate(network):
    sender, receiver = (Node(network, rate, client=False, clock=0.0) for rate in (1600.0, 400.0))

    async def parts() -> AsyncIterator:
        for _ in range(20):
            yield SimpleNamespace(tensor_part=SimpleNamespace(buffer=bytes(80)))

    async def receive() -> float:
        assert len([part async for part in network.carry(sender, receiver, parts())]) == 20
        return network.time.read()

    seconds = asyncio.run_coroutine_threadsafe(receive(), network.time.loop).result()
    assert seconds == pytest.approx(20 * 80 / 1600.0 + LATENCY, abs=0.01)
