"""Simulated time for threads and coroutines of one process: faster than the machine's, and never ahead of their work.

All waits of peerstep last as long as in real life, in simulated seconds. No peer is late because a test is:

- The clock of SimulatedTime ticks, for peers with threads. It ticks only after the event loop has done what was due.
- LeapingClock is for coroutines without other threads. It stands while they work, and then leaps to what is due next.
"""

import asyncio
import contextvars
import heapq
import itertools
import math
import selectors
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from types import ModuleType

import pytest

TICK = 0.002  # seconds of the machine between two ticks
EPOCH = 1.8e9  # `time.time` at the start, in simulated time
EXECUTOR = "Executor"  # name of the threads that work for all owners

owner: contextvars.ContextVar = contextvars.ContextVar("owner", default=None)  # peer that runs this code


class _Selector(selectors.DefaultSelector):
    """Selector whose timeouts are simulated seconds."""

    factor = 1.0

    def select(self, timeout: float | None = None) -> list:
        return super().select(None if timeout is None else timeout / self.factor)


class _Loop(asyncio.SelectorEventLoop):
    """Event loop whose times are simulated seconds."""

    def __init__(self, clock: "SimulatedTime"):
        selector = _Selector()
        selector.factor = clock.factor
        super().__init__(selector)
        self.time = clock.read

    def create_task(self, *args, **kwargs) -> asyncio.Task:
        """Let an owner that has `tasks` know each of its own, so that it can end them."""
        task = super().create_task(*args, **kwargs)
        context = kwargs.get("context")
        peer = owner.get() if context is None else context.get(owner)
        if (tasks := getattr(peer, "tasks", None)) is not None:
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        return task


class _Module:
    """Stands for a module, with other values of some names."""

    def __init__(self, module: ModuleType, **names):
        self._module = module
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> object:
        return getattr(self._module, name)


def replace_modules(patches: pytest.MonkeyPatch, replaced: dict[str, _Module]) -> None:
    """Let the averaging code use other modules than `time`, or also `threading`."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(("peerstep.", "peerstep.peer.clock", "hivemind.utils.performance_ema")):
            for name, facade in replaced.items():
                if vars(module).get(name) in (time, threading):
                    patches.setattr(module, name, facade)


class _LeapingSelector(selectors.DefaultSelector):
    """Selector of a _LeapingLoop."""

    loop: "_LeapingLoop"

    def select(self, timeout: float | None = None) -> list:
        if not timeout or self.loop.num_working:
            return super().select(None if timeout else timeout)
        if not (events := super().select(0)):
            self.loop.clock.now += timeout
        return events


class _LeapingLoop(asyncio.SelectorEventLoop):
    """Event loop with the time of a LeapingClock. `num_working` counts what its executors do for it."""

    def __init__(self, clock: "LeapingClock"):
        super().__init__(selector := _LeapingSelector())
        selector.loop, self.clock, self.num_working = self, clock, 0

    def time(self) -> float:
        return self.clock.now

    def run_in_executor(self, *work) -> asyncio.Future:
        future = super().run_in_executor(*work)
        self.num_working += 1
        future.add_done_callback(self._finish)
        return future

    def _finish(self, _future: asyncio.Future) -> None:
        self.num_working -= 1

    async def shutdown_default_executor(self, *args) -> None:
        self.num_working += 1
        await super().shutdown_default_executor(*args)


class LeapingClock:
    """Clock of the averaging code, and of all event loops that are created while it is installed."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return EPOCH + self.now

    def install(self, patches: pytest.MonkeyPatch) -> None:
        replace_modules(patches, {"time": _Module(time, monotonic=self.monotonic, time=self.time)})
        policy = asyncio.DefaultEventLoopPolicy()
        policy._loop_factory = partial(_LeapingLoop, self)
        policy.set_event_loop(None)  # none but that of `asyncio.run`
        patches.setattr(asyncio.events, "_event_loop_policy", policy)


class SimulatedTime:
    """Clock, event loop and waits of a simulation. The owner of a thread or a task is inherited by what it starts.

    An owner has the attribute `clock`, the seconds by which its wall clock is wrong, and the method `check`. Each wait
    and each look at a clock in a thread calls it: it blocks while the owner is frozen, and raises SystemExit once the
    owner has ended.

    :param factor: simulated seconds in a second of an idle machine
    """

    def __init__(self, factor: float):
        self.factor, self._now = factor, 0.0
        self._stopped, self.threads = threading.Event(), []
        # Times until which threads wait, with their conditions, and the lock of this heap
        self._waiters, self._numbers, self._lock = [], itertools.count(), threading.Lock()
        self._patches = pytest.MonkeyPatch()
        self.loop = _Loop(self)
        self.loop.set_default_executor(ThreadPoolExecutor(4, EXECUTOR))
        self._loop_thread = threading.Thread(target=self.loop.run_forever, name="Loop", daemon=True)
        self._ticker = threading.Thread(target=self._tick, name="Ticker", daemon=True)

    def read(self) -> float:
        """Return the simulated seconds since the start."""
        return self._now

    def _tick(self) -> None:
        while not self._stopped.wait(TICK):
            done = threading.Event()
            self.loop.call_soon_threadsafe(done.set)
            done.wait(1.0)
            self._now += TICK * self.factor
            self.wake(self._now)

    def wake(self, until: float = math.inf) -> None:
        """Wake the threads that wait until this time or an earlier one."""
        due = []
        with self._lock:
            while self._waiters and self._waiters[0][0] <= until:
                due.append(heapq.heappop(self._waiters)[2])
        for condition in due:
            with condition:
                condition.notify_all()

    def _wait(self, until: float, condition: threading.Condition, is_over: Callable[[], bool] = lambda: False) -> None:
        """Wait until a time, or until something is over, of which the condition is notified."""
        while True:
            self._check()
            with condition:
                with self._lock:
                    heapq.heappush(self._waiters, (until, next(self._numbers), condition))
                if is_over() or self._now >= until:
                    return
                condition.wait()

    # What the code sees instead of the modules `time` and `threading`

    def monotonic(self) -> float:
        self._check()
        return self._now

    def time(self) -> float:
        return EPOCH + self._now + getattr(owner.get(), "clock", 0.0)

    def sleep(self, seconds: float) -> None:
        self._wait(self._now + seconds, threading.Condition())

    def _check(self) -> None:
        if (peer := owner.get()) is not None and threading.current_thread() is not self._loop_thread:
            peer.check()

    def _event_class(simulation) -> type[threading.Event]:
        class Event(threading.Event):
            """Event whose timeouts are simulated seconds."""

            def wait(self, timeout: float | None = None) -> bool:
                until = math.inf if timeout is None else simulation.read() + timeout
                simulation._wait(until, self._cond, self.is_set)
                return self.is_set()

        return Event

    def _timer(self, interval: float, function: Callable[[], None]) -> threading.Timer:
        return threading.Timer(interval / self.factor, function)

    def go(self) -> None:
        """Let the clock run from now on, if it stands."""
        if self._ticker.ident is None:
            self._ticker.start()

    def start(self) -> None:
        """Let the averaging code, and the threads that it starts, use this clock, which stands at zero."""
        names = {"monotonic": self.monotonic, "perf_counter": self.monotonic, "time": self.time, "sleep": self.sleep}
        replaced = {
            "time": _Module(time, **names),
            "threading": _Module(threading, Event=self._event_class(), Timer=self._timer),
        }
        replace_modules(self._patches, replaced)
        self._loop_thread.start()
        start = threading.Thread.start

        def start_with_owner(thread: threading.Thread) -> None:
            if owner.get() is not None and not thread.name.startswith(EXECUTOR):
                self.threads.append(thread)
                thread.run = partial(self._run_with_owner, contextvars.copy_context(), thread.run)
            start(thread)

        self._patches.setattr(threading.Thread, "start", start_with_owner)

    @staticmethod
    def _run_with_owner(context: contextvars.Context, run: Callable[[], None]) -> None:
        with suppress(SystemExit):  # the owner has ended
            context.run(run)

    def stop(self) -> None:
        """Stop the clock and the loop, once all owners have ended; their threads are joined."""
        for thread in self.threads:
            thread.join(10.0)
        alive = [thread.name for thread in self.threads if thread.is_alive()]
        self._stopped.set()
        self.go()
        self._ticker.join()
        asyncio.run_coroutine_threadsafe(self._cancel_tasks(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._loop_thread.join()
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        self._patches.undo()
        assert not alive, f"threads that did not end: {alive}"

    async def _cancel_tasks(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
