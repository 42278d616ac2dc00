"""Base class of a peer's two averagers: a process that serves other peers and survives their faults.

Workarounds for hivemind 1.1.12: weak references to tasks, SIGINT ignored in the calling process, too many threads,
streams closed too early.
"""

import asyncio
import multiprocessing
from typing import Any, AsyncIterator, TypeVar  # noqa: UP035  hivemind does not recognize that of collections.abc

import torch
from hivemind.averaging.averager import DecentralizedAverager
from hivemind.utils import get_logger, switch_to_uvloop

from peerstep.peer.node import Inbox
from peerstep.peer.processes import return_free_memory

logger = get_logger(__name__)
Message = TypeVar("Message")


def switch_to_safe_loop() -> asyncio.AbstractEventLoop:
    """Install hivemind's event loop, with a strong reference to each task until the task is done.

    asyncio keeps only weak references to tasks, and nothing else references a round that waits for its trigger.
    """
    loop, tasks = switch_to_uvloop(), set()

    def create_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **kwargs) -> asyncio.Task:
        task = asyncio.Task(coroutine, loop=loop, **kwargs)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    loop.set_task_factory(create_task)
    return loop


class SafeAverager(DecentralizedAverager):
    """hivemind's averager process, with the workarounds that both averagers need."""

    _parent_pid = None  # `__del__` shuts down what it takes for started, also if `__init__` has not come so far
    LINGER_SECONDS = 5.0  # time for the caller to close the stream after the last answer

    def run_in_background(self, await_ready: bool = True, timeout: float | None = None) -> None:
        """Start the process, and leave SIGINT enabled in the calling process."""
        return_free_memory()
        self.beats = multiprocessing.RawValue("Q", 0)
        self.start()
        if await_ready:
            self.wait_until_ready(timeout)

    def run(self) -> None:
        """Serve this averager, in its process, with one OpenMP thread per caller.

        By default each of up to 32 threads would start one for each core. Of 70 processes that were forked while
        another thread computed with two, 4 hung in their first operation; of 240 with this limit, none.
        """
        torch.set_num_threads(1)
        self._inner_pipe = Inbox(self._inner_pipe, self.beats)  # pyright: ignore[reportArgumentType]
        super().run()

    async def _keep_stream_open(self, messages: AsyncIterator[Message]) -> AsyncIterator[Message]:
        """Forward all messages, then give the caller time to close the stream.

        When a handler ends, libp2p's daemon closes its stream for reading, which its reader takes for an error. It may
        then reset the stream, and the caller's daemon discards undelivered messages: in one round of some 700.
        """
        has_sent = False
        async for message in messages:
            yield message
            has_sent = True
        if has_sent:  # the sleep is cancelled when the caller closes the stream
            await asyncio.sleep(self.LINGER_SECONDS)
