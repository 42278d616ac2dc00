"""What the two averagers of a peer have in common: a process that serves other peers and survives their faults.

Workarounds for hivemind 1.1.12: weak references to tasks, SIGINT switched off in the caller, streams that close before
the caller has read them, a shutdown that fails in the middle of a round.
"""

import asyncio
from collections.abc import Coroutine
from typing import AsyncIterator  # noqa: UP035  hivemind does not recognize that of collections.abc

from google.protobuf.message import Message
from hivemind.averaging.averager import DecentralizedAverager
from hivemind.p2p import P2PContext
from hivemind.proto import averaging_pb2
from hivemind.utils import get_logger, switch_to_uvloop

logger = get_logger(__name__)


def switch_to_safe_loop() -> asyncio.AbstractEventLoop:
    """hivemind's event loop, which keeps a reference to each task until the task is done.

    asyncio keeps only weak references to tasks. Once the garbage collector has taken a round that waits for its
    trigger, the peer finds no group until it is restarted.
    """
    loop, tasks = switch_to_uvloop(), set()

    def create_task(loop: asyncio.AbstractEventLoop, coroutine: Coroutine, **kwargs) -> asyncio.Task:
        task = asyncio.Task(coroutine, loop=loop, **kwargs)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    loop.set_task_factory(create_task)
    return loop


class SafeAverager(DecentralizedAverager):
    """hivemind's averager process with the workarounds that both averagers need."""

    LINGER_SECONDS = 5.0  # how long after the last answer the caller may take to close the stream

    def run_in_background(self, await_ready: bool = True, timeout: float | None = None) -> None:
        """Start the process. hivemind would also ignore SIGINT in the calling process from here on."""
        self.start()
        if await_ready:
            self.wait_until_ready(timeout)

    async def _then_linger(
        self, messages: AsyncIterator[Message], seconds: float | None = None
    ) -> AsyncIterator[Message]:
        """Pass on all messages, then give the caller time to close the stream.

        When a handler ends, libp2p's daemon closes its stream for reading and for writing. The first wakes the reader
        there, which takes it for an error and may reset the stream before the second is done; the caller's daemon then
        discards what it has not passed on yet. One round of averaging in some 700 lost its results this way.
        """
        has_sent = False
        async for message in messages:
            yield message
            has_sent = True
        if has_sent:  # the sleep is cancelled when the caller closes the stream
            await asyncio.sleep(self.LINGER_SECONDS if seconds is None else seconds)

    async def rpc_download_state(
        self, request: averaging_pb2.DownloadRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        """Send our state to a peer, as in hivemind."""
        async for message in self._then_linger(super().rpc_download_state(request, context)):
            yield message

    async def _shutdown(self, _timeout: float | None) -> None:
        """Answer no more calls and break off the rounds under way; hivemind's raises if there is one."""
        if not self.client_mode:
            await self.remove_p2p_handlers(self._p2p, namespace=self.prefix)
        for running_round in self._running_groups.values():
            if running_round.done() and not running_round.cancelled():
                running_round.result().finalize(cancel=True)
