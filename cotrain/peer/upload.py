"""Measurement of the upload to another peer: a service that receives bytes and discards them, and its caller.

Protocol: the service answers READY or, if it serves too many, BUSY. It then takes NUM_CHUNKS chunks at most, discards
them, and answers RECEIVED to each. Admission of invited peers is below this service, as for all services, see
`cotrain.admission.admission`.
"""

import asyncio
import os
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Iterable
from contextlib import closing, suppress
from functools import partial

from hivemind.dht import DHT
from hivemind.dht.node import DHTNode
from hivemind.p2p import P2PDaemonError, PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.utils import get_logger

from cotrain.common.errors import first_line
from cotrain.common.names import derive_name
from cotrain.peer.addresses import peer_id_in

logger = get_logger(__name__)

PROTOCOL = "collaboration.receive_upload.v2"
READY, RECEIVED, BUSY = b"G", b"R", b"B"  # other bytes are errors of the admission
CHUNK_BYTES = 64 * 2**10
NUM_CHUNKS = 36  # 2.25 MiB
WARM_UP_CHUNKS = 4  # not measured: TCP sends slowly at first
MAX_SECONDS = 2.0  # for the chunks after the warm-up; on slow links they are fewer
TIMEOUT = 60.0  # seconds for the caller
START_TIMEOUT = 5.0  # the same, when a trainer starts
# Mbit/s. Used if nothing is measured, and the most that is claimed: the few bytes cannot tell faster links apart.
MAX_BANDWIDTH = 100.0


class UploadError(Exception):
    """No upload can be measured. The message is the reason."""


class UploadSink:
    """Service that receives and discards bytes, within bounds for all callers together: peer IDs cost nothing."""

    MAX_UPLOADS = 14  # in a period: 4.4 Mbit/s
    MAX_CALLERS = 4  # at the same time
    PERIOD = 60.0  # seconds
    TIMEOUT = 1.5 * TIMEOUT  # seconds for a caller

    def __init__(self):
        self._num_uploads, self._num_callers = 0, 0  # in this period, and now
        self._period_ends_at = float("-inf")  # time.monotonic

    async def handle(self, _info: StreamInfo, reader: StreamReader, writer: StreamWriter) -> None:
        """Serve one stream of a caller."""
        with closing(writer):
            if time.monotonic() >= self._period_ends_at:
                self._num_uploads, self._period_ends_at = 0, time.monotonic() + self.PERIOD
            if self._num_callers >= self.MAX_CALLERS or self._num_uploads >= self.MAX_UPLOADS:
                writer.write(BUSY)
                return
            self._num_uploads += 1
            self._num_callers += 1
            try:
                async with asyncio.timeout(self.TIMEOUT):
                    writer.write(READY)
                    for _ in range(NUM_CHUNKS):
                        await reader.readexactly(CHUNK_BYTES)
                        writer.write(RECEIVED)
            except (OSError, EOFError, TimeoutError):
                pass  # the caller has what it needs, or has left
            finally:
                self._num_callers -= 1


def serve_uploads(dht: DHT) -> None:
    """Offer the service to other peers, without waiting for the DHT process."""
    dht.run_coroutine(_serve, return_future=True)


async def _serve(_dht: DHT, node: DHTNode) -> None:
    await node.p2p.add_binary_stream_handler(PROTOCOL, UploadSink().handle)


def measure_upload(dht: DHT, initial_peers: Iterable[str], timeout: float = TIMEOUT) -> tuple[float, str]:
    """Send up to 2 MB to the first of some peers that takes them.

    :param timeout: seconds for all of them
    :returns: Mbit/s, and the name of the peer
    :raises UploadError: if none takes them
    """
    reasons, deadline = [], time.monotonic() + timeout
    for peer_id in map(peer_id_in, initial_peers):
        call = partial(_measure, peer_id=peer_id, timeout=max(0.1, deadline - time.monotonic()))
        try:
            upload = dht.run_coroutine(call, return_future=True).result(timeout=timeout + 2)
        except TimeoutError:
            upload = "the DHT process does not answer"
        if isinstance(upload, float):
            return upload, derive_name(str(peer_id))
        reasons.append(f"{derive_name(str(peer_id))}: {upload}")
    raise UploadError("; ".join(reasons) or "there are no initial peers")


def measure_bandwidth(dht: DHT, initial_peers: Iterable[str]) -> float:
    """Return the bandwidth to claim in rounds, in Mbit/s: the upload to an initial peer, at most MAX_BANDWIDTH."""
    try:
        upload, name = measure_upload(dht, initial_peers, START_TIMEOUT)
    except UploadError as error:
        logger.info(f"Using --bandwidth {MAX_BANDWIDTH:.0f}: the upload is not measured, {error}")
        return MAX_BANDWIDTH
    bandwidth = min(upload, MAX_BANDWIDTH)
    logger.info(f"Using --bandwidth {bandwidth:.1f}: the upload to {name} has {upload:,.1f} Mbit/s")
    return bandwidth


async def _measure(_dht: DHT, node: DHTNode, peer_id: PeerID, timeout: float) -> float | str:
    """Return the upload to a peer in Mbit/s, or why there is none. The DHT process would log an exception."""
    deadline = time.monotonic() + timeout
    try:
        async with asyncio.timeout(timeout + 1.0):
            _, reader, writer = await node.p2p.call_binary_stream_handler(peer_id, PROTOCOL)
            try:
                if (answer := await reader.readexactly(1)) != READY:
                    return "it takes no more uploads now, try again later" if answer == BUSY else "it has refused"
                return await _send(reader, writer, deadline - time.monotonic())
            finally:
                writer.transport.abort()  # `close` would first send what is left
    except TimeoutError:
        return f"it has not received the bytes within {timeout:.0f} s"
    except P2PDaemonError as error:
        return f"no connection ({first_line(error, limit=120)})"
    except (OSError, EOFError):
        return "it has closed the connection"


async def _send(reader: StreamReader, writer: StreamWriter, timeout: float) -> float:
    """Return the upload in Mbit/s. On a link so slow that `timeout` ends the warm-up, the warm-up counts.

    :raises TimeoutError: if no chunk has arrived
    """
    writer.write(os.urandom(NUM_CHUNKS * CHUNK_BYTES))  # which no tunnel can compress
    times = [time.monotonic()]  # of the start, and of each answer

    def is_measured() -> bool:
        return len(times) > WARM_UP_CHUNKS + 1 and times[-1] >= times[WARM_UP_CHUNKS] + MAX_SECONDS

    with suppress(TimeoutError):
        async with asyncio.timeout(timeout):
            while len(times) <= NUM_CHUNKS and not is_measured():
                await reader.readexactly(1)
                times.append(time.monotonic())
    measured = times[WARM_UP_CHUNKS:] if len(times) > WARM_UP_CHUNKS + 1 else times
    if len(measured) == 1:
        raise TimeoutError
    return 8e-6 * (len(measured) - 1) * CHUNK_BYTES / max(measured[-1] - measured[0], 1e-6)
