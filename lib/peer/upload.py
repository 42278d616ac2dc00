"""Measurement of the upload to another peer: a service that receives bytes and discards them, and its caller.

Protocol: the caller announces a number of bytes in 4 bytes. The service answers READY or, if they are too many, BUSY.
It discards the bytes and then answers RECEIVED; a stream may carry several requests. Admission of invited peers is
below this service, as for all services, see `lib.peer.admission`.
"""

import asyncio
import os
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from functools import partial

from hivemind.dht import DHT
from hivemind.dht.node import DHTNode
from hivemind.p2p import P2PDaemonError, PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.utils import get_logger

from lib.common.errors import first_line
from lib.common.names import derive_name
from lib.peer.addresses import peer_id_in

logger = get_logger(__name__)

PROTOCOL = "collaboration.receive_upload.v1"
HEADER_BYTES = 4
READY, RECEIVED, BUSY = b"G", b"R", b"B"  # other bytes are errors of the admission
WARM_UP_BYTES = 256 * 2**10  # TCP sends slowly at first
UPLOAD_BYTES = 2 * 2**20
MAIN_SECONDS = 2.0  # for the bytes after the warm-up, at its speed; on slow links they are fewer than UPLOAD_BYTES
TIMEOUT = 60.0  # seconds for the caller
START_TIMEOUT = 5.0  # the same, when a trainer starts
# Mbit/s. Used if nothing is measured, and the most that is claimed: the few bytes cannot tell faster links apart.
MAX_BANDWIDTH = 100.0


class UploadError(Exception):
    """The upload to a peer cannot be measured. The message is the reason."""


class UploadSink:
    """Service that receives and discards bytes, within bounds for all callers together: peer IDs cost nothing."""

    MAX_REQUEST = 5 * 2**20  # a measurement has 2.25 MiB
    MAX_TOTAL = 32 * 2**20  # in a period: 4.5 Mbit/s
    MIN_CHARGE = 64 * 2**10  # for a request of few bytes; at most 512 requests in a period
    MAX_CALLERS = 4  # at the same time
    PERIOD = 60.0  # seconds
    TIMEOUT = 1.5 * TIMEOUT  # seconds for a caller
    CHUNK = 64 * 2**10

    def __init__(self):
        self._received, self._num_callers = 0, 0  # bytes in this period, and streams now
        self._period_ends_at = float("-inf")  # time.monotonic

    async def handle(self, _info: StreamInfo, reader: StreamReader, writer: StreamWriter) -> None:
        """Serve one stream of a caller."""
        with closing(writer):
            if self._num_callers >= self.MAX_CALLERS:
                writer.write(BUSY)
                return
            self._num_callers += 1
            try:
                async with asyncio.timeout(self.TIMEOUT):
                    while self._admit(num_bytes := await self._read_header(reader)):
                        writer.write(READY)
                        await self._discard(reader, num_bytes)
                        writer.write(RECEIVED)
                    writer.write(BUSY)
            except (OSError, EOFError, TimeoutError):
                pass  # the caller has what it needs, or has left
            finally:
                self._num_callers -= 1

    @staticmethod
    async def _read_header(reader: StreamReader) -> int:
        return int.from_bytes(await reader.readexactly(HEADER_BYTES), "big")

    async def _discard(self, reader: StreamReader, num_bytes: int) -> None:
        while num_bytes > 0:
            chunk = await reader.read(min(num_bytes, self.CHUNK))
            if not chunk:
                raise EOFError
            num_bytes -= len(chunk)

    def _admit(self, num_bytes: int) -> bool:
        """Count the bytes of a request if they are within the bounds."""
        if time.monotonic() >= self._period_ends_at:
            self._received, self._period_ends_at = 0, time.monotonic() + self.PERIOD
        charge = max(num_bytes, self.MIN_CHARGE)
        if num_bytes > self.MAX_REQUEST or self._received + charge > self.MAX_TOTAL:
            return False
        self._received += charge
        return True


def serve_uploads(dht: DHT) -> None:
    """Let other peers measure their upload to this one. Does not wait for the DHT process."""
    dht.run_coroutine(_serve, return_future=True)


async def _serve(_dht: DHT, node: DHTNode) -> None:
    await node.p2p.add_binary_stream_handler(PROTOCOL, UploadSink().handle)


@dataclass(frozen=True)
class Upload:
    """Bytes that another peer has received, and the seconds from the first of them to its answer."""

    num_bytes: int
    seconds: float

    @property
    def mbits_per_second(self) -> float:
        return 8e-6 * self.num_bytes / max(self.seconds, 1e-6)


def measure_upload(dht: DHT, initial_peers: Iterable[str], timeout: float = TIMEOUT) -> tuple[Upload, str]:
    """Send up to 2 MB to the first of some peers that takes them.

    :param initial_peers: multiaddresses with a peer ID
    :param timeout: seconds for all of them
    :returns: the measurement, and the name of the peer
    :raises UploadError: if none takes them
    """
    reasons, deadline = [], time.monotonic() + timeout
    for peer_id in map(peer_id_in, initial_peers):
        call = partial(_measure, peer_id=peer_id, timeout=max(0.1, deadline - time.monotonic()))
        try:
            upload = dht.run_coroutine(call, return_future=True).result(timeout=timeout + 2)
        except TimeoutError:
            upload = "the DHT process does not answer"
        if isinstance(upload, Upload):
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
    bandwidth = min(upload.mbits_per_second, MAX_BANDWIDTH)
    logger.info(f"Using --bandwidth {bandwidth:.1f}: the upload to {name} has {upload.mbits_per_second:,.1f} Mbit/s")
    return bandwidth


async def _measure(_dht: DHT, node: DHTNode, peer_id: PeerID, timeout: float) -> Upload | str:
    """Return the upload to a peer, or why it cannot be measured. Runs in the DHT process, which logs exceptions."""
    try:
        async with asyncio.timeout(timeout):
            _, reader, writer = await node.p2p.call_binary_stream_handler(peer_id, PROTOCOL)
            with closing(writer):
                first = await _send(reader, writer, WARM_UP_BYTES)
                num_bytes = min(UPLOAD_BYTES, int(MAIN_SECONDS * first.num_bytes / max(first.seconds, 1e-6)))
                return await _send(reader, writer, num_bytes) if num_bytes > WARM_UP_BYTES else first
    except UploadError as error:
        return str(error)
    except TimeoutError:
        return f"it has not received the bytes within {timeout:.0f} s"
    except P2PDaemonError as error:
        if "protocols not supported" in str(error):
            return "it has an older version of these scripts"
        return f"no connection ({first_line(error, limit=120)})"
    except (OSError, EOFError):
        return "it has closed the connection"


async def _send(reader: StreamReader, writer: StreamWriter, num_bytes: int) -> Upload:
    data = os.urandom(num_bytes)  # which no tunnel can compress
    writer.write(num_bytes.to_bytes(HEADER_BYTES, "big"))
    await _expect(READY, reader)
    started = time.monotonic()
    writer.write(data)
    await writer.drain()
    await _expect(RECEIVED, reader)
    return Upload(num_bytes, time.monotonic() - started)


async def _expect(expected: bytes, reader: StreamReader) -> None:
    answer = await reader.readexactly(1)
    if answer == BUSY:
        raise UploadError("it takes no more uploads now, try again in a minute")
    if answer != expected:
        raise UploadError("it has refused")
