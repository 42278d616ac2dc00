"""Simulated time for threads and coroutines of one process: faster than the machine's, and never ahead of their work.

All waits of peerstep last as long as in real life, in simulated seconds. No peer is late because a test is:

- SimulatedTime is for peers with threads. It stands while they or the event loop work, then leaps to what is due next.
- LeapingClock is the same for coroutines without other threads.
"""

import asyncio
import contextvars
import heapq
import itertools
import math
import os
import selectors
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.thread import _WorkItem
from contextlib import suppress
from functools import partial
from types import ModuleType

import pytest

EPOCH = 1.8e9  # `time.time` at the start, in simulated time
EXECUTOR = "Executor"  # name of the threads that work for all owners

owner: contextvars.ContextVar = contextvars.ContextVar("owner", default=None)  # peer that runs this code


class _Selector(selectors.DefaultSelector):
    """Selector whose timeouts are simulated seconds: the time passes once no thread works."""

    clock: "SimulatedTime"

    def select(self, timeout: float | None = None) -> list:
        is_quiet = timeout != 0 and self.clock.is_quiet  # the order matters: what worked has left a message before
        if (events := super().select(0)) or timeout == 0 or (is_quiet and self.clock.leap(timeout)):
            return events
        return super().select(None)


class _Loop(asyncio.SelectorEventLoop):
    """Event loop whose times are simulated seconds."""

    def __init__(self, clock: "SimulatedTime"):
        super().__init__(selector := _Selector())
        selector.clock, self.time = clock, clock.read

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
    """Selector of a LeapingLoop."""

    loop: "LeapingLoop"

    def select(self, timeout: float | None = None) -> list:
        if not timeout or self.loop.num_working:
            return super().select(None if timeout else timeout)
        if not (events := super().select(0)):
            self.loop.clock.now += timeout
        return events


class LeapingLoop(asyncio.SelectorEventLoop):
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


class _LeapingPolicy(asyncio.DefaultEventLoopPolicy):
    """Makes loops with the time of a LeapingClock."""

    def __init__(self, clock: "LeapingClock"):
        super().__init__()
        self._loop_factory = partial(LeapingLoop, clock)


class LeapingClock:
    """Clock of the averaging code, and of all event loops that are created while it is installed."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return EPOCH + self.now

    def install(self, patches: pytest.MonkeyPatch) -> None:
        names = {"monotonic": self.monotonic, "perf_counter": self.monotonic, "time": self.time}
        replace_modules(patches, {"time": _Module(time, **names)})
        policy = _LeapingPolicy(self)
        policy.set_event_loop(None)  # none but that of `asyncio.run`
        patches.setattr(asyncio.events, "_event_loop_policy", policy)


class _Lock(threading.Semaphore):
    """Lock whose waiters rest, as those of a condition."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        return super().acquire(blocking, None if timeout < 0 else timeout)


class _RLock(threading._PyRLock):
    """The same, of a thread that may hold it already."""

    def __init__(self):
        super().__init__()
        self._block = _Lock()


class SimulatedTime:
    """Clock, event loop and waits of a simulation. The owner of a thread or a task is inherited by what it starts.

    The clock stands while a thread works: it leaps once all threads wait and the event loop has nothing to do. Nothing
    depends on how fast the machine is, or on what else it does.

    An owner has the attribute `clock`, the seconds by which its wall clock is wrong, and the method `check`. Each wait
    and each look at a clock in a thread calls it: it blocks while the owner is frozen, and raises SystemExit once the
    owner has ended.

    :param grain: seconds; threads wake at multiples of it. They look at something every 0.05 s or so, which is
      most of the work; the times of the event loop are exact, or links would carry less
    """

    def __init__(self, grain: float):
        self.grain, self._now = grain, 0.0
        self._runs, self.threads = False, []
        # Threads whose work the clock waits for, and those of them that do not wait themselves
        self._counted, self._working = set(), set()
        # Times until which threads wait, with their conditions, and the lock of this heap and of the sets
        self._waiters, self._numbers, self._lock = [], itertools.count(), threading.Lock()
        self._patches = pytest.MonkeyPatch()
        self._cores = os.sched_getaffinity(0) if hasattr(os, "sched_setaffinity") else set()  # not on macOS
        self.loop = _Loop(self)
        self.loop.set_default_executor(ThreadPoolExecutor(4, EXECUTOR))
        self._loop_thread = threading.Thread(target=self.loop.run_forever, name="Loop", daemon=True)

    def read(self) -> float:
        """Return the simulated seconds since the start."""
        return self._now

    # Who works

    @property
    def is_quiet(self) -> bool:
        """Whether the clock may leap if the event loop has nothing to do."""
        return self._runs and not self._working

    def count(self, work: object) -> None:
        """Let the clock stand while something works, such as a thread, from now on until it rests or is dropped."""
        with self._lock:
            self._counted.add(work)
            self._working.add(work)

    def drop(self, work: object) -> None:
        """Record that something has ended."""
        self._counted.discard(work)
        self.rest(work)

    def rest(self, work: object) -> None:
        """Record that a thread waits for others, or for a time."""
        with self._lock:
            self._working.discard(work)
            is_quiet = self.is_quiet
        if is_quiet:
            self.go()

    def resume(self, work: object) -> None:
        """Record that a thread is about to continue. Who wakes it calls this."""
        with self._lock:
            if work in self._counted:
                self._working.add(work)

    def leap(self, seconds: float | None) -> bool:
        """Let time pass until the next thread is due, for at most `seconds`; return False if nothing is ever due."""
        with self._lock:
            until = self._waiters[0][0] if self._waiters else math.inf
        until = min(until, math.inf if seconds is None else self._now + seconds)
        if math.isinf(until):
            return False
        self._now = until
        self.wake(self._now)
        return True

    def wake(self, until: float = math.inf) -> None:
        """Wake the threads that wait until this time or an earlier one."""
        due = []
        with self._lock:
            while self._waiters and self._waiters[0][0] <= until:
                due.append(heapq.heappop(self._waiters)[2])
        for condition in due:
            with condition:
                condition.notify_all()

    def pause(self, until: float, condition: threading.Condition, is_over: Callable[[], bool] = lambda: False) -> None:
        """Wait until a time, or until something is over, of which the condition is notified."""
        if self._now < until < math.inf:
            until = self.grain * math.ceil(until / self.grain)
            until += self.grain * (until <= self._now)  # rounded; a thread may wait for 1e-12 s again and again
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
        self.pause(self._now + seconds, threading.Condition())

    def _check(self) -> None:
        if (peer := owner.get()) is not None and threading.current_thread() is not self._loop_thread:
            peer.check()

    def _event_class(simulation) -> type[threading.Event]:
        class Event(threading.Event):
            """Event whose timeouts are simulated seconds."""

            def wait(self, timeout: float | None = None) -> bool:
                until = math.inf if timeout is None else simulation.read() + timeout
                simulation.pause(until, self._cond, self.is_set)
                return self.is_set()

        return Event

    def _condition_class(simulation) -> type[threading.Condition]:
        class Condition(threading.Condition):
            """Condition whose waiters rest. Events, futures and locks of the simulation are made of it."""

            def __init__(self, *args):
                super().__init__(*args)
                self._sleepers: list[threading.Thread] = []

            def wait(self, timeout: float | None = None) -> bool:
                self._sleepers.append(thread := threading.current_thread())
                simulation.rest(thread)
                try:
                    return super().wait(timeout)
                finally:
                    simulation.resume(thread)
                    with suppress(ValueError):  # after its timeout
                        self._sleepers.remove(thread)

            def notify(self, n: int = 1) -> None:
                for thread in self._sleepers[:n]:
                    simulation.resume(thread)
                del self._sleepers[:n]
                super().notify(n)

        return Condition

    def _join(self, thread: threading.Thread, timeout: float | None) -> None:
        """Wait in simulated seconds for a thread that may wait itself."""
        until = math.inf if timeout is None else self._now + timeout
        while threading.current_thread() in self._counted and thread in self._counted and self._now < until:
            self.sleep(0.1)

    # Start and end

    def go(self) -> None:
        """Let the clock run from now on, if it stands."""
        self._runs = True
        self.loop.call_soon_threadsafe(lambda: None)  # wakes it

    def start(self) -> None:
        """Let the averaging code, and the threads that it starts, use this clock, which stands at zero."""
        self._use_one_core()
        self._patches.setattr(threading, "Condition", self._condition_class())
        names = {"monotonic": self.monotonic, "perf_counter": self.monotonic, "time": self.time, "sleep": self.sleep}
        replaced = {
            "time": _Module(time, **names),
            "threading": _Module(threading, Event=self._event_class(), Lock=_Lock, RLock=_RLock),
        }
        replace_modules(self._patches, replaced)
        self._loop_thread.start()
        self._count_threads()
        self._count_executors()
        self.count(threading.current_thread())

    def _use_one_core(self) -> None:
        """Run this thread, and those that it starts, on one core, another one for each worker of the tests.

        They wake each other all the time: on two cores, 46 scenarios took 85 CPU seconds instead of 67.
        """
        if self._cores:
            number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
            os.sched_setaffinity(0, {sorted(self._cores)[number % len(self._cores)]})

    def _count_threads(self) -> None:
        """Count the threads that start from now on, without executors' and hivemind's, which wait for pipes."""
        start, join = threading.Thread.start, threading.Thread.join

        def start_counted(thread: threading.Thread) -> None:
            if not getattr(thread._target, "__module__", "").startswith(("concurrent.", "hivemind.")):
                self.threads.append(thread)
                self.count(thread)
            is_owned = owner.get() is not None and not thread.name.startswith(EXECUTOR)
            context = contextvars.copy_context() if is_owned else contextvars.Context()
            thread.run = partial(self._run, context, thread.run)
            start(thread)

        def join_simulated(thread: threading.Thread, timeout: float | None = None) -> None:
            self._join(thread, timeout)
            join(thread, timeout)

        self._patches.setattr(threading.Thread, "start", start_counted)
        self._patches.setattr(threading.Thread, "join", join_simulated)

    def _count_executors(self) -> None:
        """Count what executors do, from now on."""
        init, run = _WorkItem.__init__, _WorkItem.run

        def init_counted(item: _WorkItem, *args) -> None:
            init(item, *args)
            self.count(item)

        def run_counted(item: _WorkItem) -> None:
            self.count(thread := threading.current_thread())
            self.drop(item)
            try:
                run(item)
            finally:
                self.drop(thread)

        self._patches.setattr(_WorkItem, "__init__", init_counted)
        self._patches.setattr(_WorkItem, "run", run_counted)

    def _run(self, context: contextvars.Context, run: Callable[[], None]) -> None:
        try:
            with suppress(SystemExit):  # the owner has ended
                context.run(run)
        finally:
            self.drop(threading.current_thread())

    def stop(self) -> None:
        """Stop the clock and the loop, once all owners have ended; their threads are joined."""
        self.drop(threading.current_thread())
        self.go()
        for thread in self.threads:
            thread.join(10.0)
        alive = [thread.name for thread in self.threads if thread.is_alive()]
        self._runs = False
        asyncio.run_coroutine_threadsafe(self._cancel_tasks(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._loop_thread.join()
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        if self._cores:
            os.sched_setaffinity(0, self._cores)
        self._patches.undo()
        assert not alive, f"threads that did not end: {alive}"

    async def _cancel_tasks(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
