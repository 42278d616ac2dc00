"""Measurement of the upload: the bounds of the service, and two real peers."""

import asyncio
import time
from unittest.mock import AsyncMock, Mock

import pytest

from cotrain.common.names import derive_name
from cotrain.peer import upload as upload_module
from cotrain.peer.upload import (
    BUSY,
    CHUNK_BYTES,
    MAX_BANDWIDTH,
    NUM_CHUNKS,
    READY,
    RECEIVED,
    START_TIMEOUT,
    WARM_UP_CHUNKS,
    UploadError,
    UploadSink,
    measure_bandwidth,
    measure_upload,
)
from tests.support.fakes import FakeUploads
from tests.support.peers import local_peer

GONE = "/ip4/127.0.0.1/tcp/9/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


class Caller:
    """Caller of a service in this process."""

    def __init__(self, sink: UploadSink):
        self.reader, self.answers, self.is_closed = asyncio.StreamReader(), b"", False
        self.task = asyncio.create_task(sink.handle(None, self.reader, self))

    def write(self, data: bytes) -> None:
        """Take an answer of the service."""
        self.answers += data

    def close(self) -> None:
        self.is_closed = True

    async def send(self, num_chunks: int) -> bytes:
        """Send some chunks, close the stream, and return all answers."""
        self.reader.feed_data(bytes(num_chunks * CHUNK_BYTES))
        self.reader.feed_eof()
        await self.task
        assert self.is_closed
        return self.answers


async def overload() -> None:
    sink = UploadSink()
    for num_chunks in (0, 1, *(sink.MAX_UPLOADS - 2) * [NUM_CHUNKS + 1]):
        assert await Caller(sink).send(num_chunks) == READY + min(num_chunks, NUM_CHUNKS) * RECEIVED
    assert await Caller(sink).send(1) == BUSY
    sink._period_ends_at = 0.0
    assert await Caller(sink).send(1) == READY + RECEIVED, "a minute later"


async def call_together() -> None:
    sink = UploadSink()
    callers = [Caller(sink) for _ in range(5)]
    await asyncio.sleep(0)
    assert [await caller.send(0) for caller in callers] == [READY, READY, READY, READY, BUSY]
    assert not sink._num_callers


async def stop_sending() -> None:
    sink = UploadSink()
    sink.TIMEOUT = 0.1
    caller = Caller(sink)
    caller.reader.feed_data(bytes(CHUNK_BYTES - 1))
    await caller.task
    assert caller.is_closed and caller.answers == READY and not sink._num_callers


@pytest.mark.parametrize("abuse", [overload, call_together, stop_sending])
def test_service_is_bounded(abuse):
    asyncio.run(abuse())


@pytest.mark.peers
def test_upload_between_two_peers(tmp_path, monkeypatch):
    """A peer in client mode measures its upload, and offers no service itself."""
    monkeypatch.setattr(UploadSink, "MAX_UPLOADS", 2)
    with local_peer(tmp_path / "one", "run") as first:
        address = str(first.dht.get_visible_maddrs()[0])
        with local_peer(tmp_path / "two", "run", (address,), client_mode=True) as second:
            upload, name = measure_upload(second.dht, [address])
            assert name == derive_name(str(first.dht.peer_id))
            assert upload > 1
            with pytest.raises(UploadError, match="protocols not supported"):
                measure_upload(first.dht, [f"/p2p/{second.dht.peer_id}"])
            # Of two initial peers, the first one is gone.
            assert measure_bandwidth(second.dht, [GONE, address]) == min(MAX_BANDWIDTH, upload)
            with pytest.raises(UploadError, match="no more uploads now"):
                measure_upload(second.dht, [address])
            with pytest.raises(UploadError, match="no connection"):
                measure_upload(second.dht, [GONE])


@pytest.mark.parametrize(
    ("results", "bandwidth", "message"),
    [
        ([8.39], 8.39, "Using --bandwidth 8.4: the upload to "),
        ([1677.72], 100.0, "has 1,677.7 Mbit/s"),
        (["it is away", "it has refused"], 100.0, "Using --bandwidth 100: the upload is not measured, "),
    ],
)
def test_bandwidth_is_the_measured_upload(caplog, results, bandwidth, message):
    caplog.set_level("INFO")
    assert measure_bandwidth(FakeUploads(*results), [GONE, GONE]) == bandwidth
    assert message in caplog.text and len(caplog.records) == 1


def test_upload_of_two_mib_in_two_seconds(monkeypatch):
    times = [0.0] * NUM_CHUNKS + [2.0]
    monkeypatch.setattr(upload_module, "time", Mock(monotonic=Mock(side_effect=times)))
    assert asyncio.run(upload_module._send(AsyncMock(), Mock(), 5.0)) == pytest.approx(8.388608)


@pytest.mark.peers
@pytest.mark.parametrize(("seconds", "expected"), [(1.0, 2.1), (8.0, 0.26), (0.0, MAX_BANDWIDTH)])
def test_slow_upload_is_measured_in_bounded_time(tmp_path, monkeypatch, seconds, expected):
    """At 2 Mbit/s the first bytes take a second; at none, the start of a trainer is delayed by START_TIMEOUT."""
    readexactly = asyncio.StreamReader.readexactly

    async def read_slowly(reader: asyncio.StreamReader, num_bytes: int) -> bytes:
        if num_bytes == CHUNK_BYTES:
            await asyncio.sleep((seconds or 60.0) / WARM_UP_CHUNKS)
        return await readexactly(reader, num_bytes)

    monkeypatch.setattr(asyncio.StreamReader, "readexactly", read_slowly)
    with local_peer(tmp_path / "one", "run") as first:
        address = str(first.dht.get_visible_maddrs()[0])
        with local_peer(tmp_path / "two", "run", (address,), client_mode=True) as second:
            started = time.monotonic()
            bandwidth = measure_bandwidth(second.dht, [address])
            assert time.monotonic() < started + START_TIMEOUT + 2.0
            assert bandwidth == pytest.approx(expected, rel=0.2)
