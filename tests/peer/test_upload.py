"""Measurement of the upload: the bounds of the service, and two real peers."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import wraps

import pytest

from lib.common.names import derive_name
from lib.peer.upload import (
    BUSY,
    MAX_BANDWIDTH,
    READY,
    RECEIVED,
    START_TIMEOUT,
    UPLOAD_BYTES,
    WARM_UP_BYTES,
    Upload,
    UploadError,
    UploadSink,
    measure_bandwidth,
    measure_upload,
)
from tests.support.fakes import FakeUploads
from tests.support.peers import local_peer

MIB = 2**20
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

    def announce(self, num_bytes: int) -> None:
        self.reader.feed_data(num_bytes.to_bytes(4, "big"))

    def send(self, num_bytes: int) -> None:
        self.announce(num_bytes)
        self.reader.feed_data(bytes(num_bytes))

    async def end(self) -> bytes:
        """Close the stream and return all answers."""
        self.reader.feed_eof()
        await self.task
        assert self.is_closed
        return self.answers


def run_async(test: Callable[[], Coroutine]) -> Callable[[], None]:
    """Make a test of a coroutine function."""

    @wraps(test)
    def run() -> None:
        asyncio.run(test())

    return run


@run_async
async def test_large_request_is_refused_before_its_first_byte():
    for num_bytes in (5 * MIB + 1, 2**32 - 1):
        caller = Caller(UploadSink())
        caller.announce(num_bytes)
        await caller.task
        assert caller.answers == BUSY and caller.is_closed


@run_async
async def test_all_requests_of_a_minute_are_bounded():
    for num_bytes, number in ((0, 512), (1000, 512), (4 * MIB, 8)):
        sink = UploadSink()
        for answers in number * [READY + RECEIVED] + [BUSY]:
            caller = Caller(sink)
            caller.send(num_bytes)
            assert await caller.end() == answers
        sink._period_ends_at = 0.0
        caller = Caller(sink)
        caller.send(UPLOAD_BYTES)
        assert await caller.end() == READY + RECEIVED, "a minute later"


@run_async
async def test_few_callers_at_a_time():
    sink = UploadSink()
    callers = [Caller(sink) for _ in range(5)]
    await asyncio.sleep(0)
    for caller in callers:
        await caller.end()
    assert [caller.answers for caller in callers] == [b"", b"", b"", b"", BUSY]
    assert not sink._num_callers


@run_async
async def test_caller_that_stops_sending_is_dropped():
    sink = UploadSink()
    sink.TIMEOUT = 0.1
    caller = Caller(sink)
    caller.announce(1000)
    caller.reader.feed_data(bytes(999))
    await caller.task
    assert caller.is_closed and caller.answers == READY and not sink._num_callers


@pytest.mark.peers
def test_upload_between_two_peers(tmp_path, monkeypatch):
    """A peer in client mode measures its upload, and offers no service itself."""
    monkeypatch.setattr(UploadSink, "MAX_TOTAL", 5 * MIB)
    with local_peer(tmp_path / "one", "run") as first:
        address = str(first.dht.get_visible_maddrs()[0])
        with local_peer(tmp_path / "two", "run", (address,), client_mode=True) as second:
            upload, name = measure_upload(second.dht, [address])
            assert name == derive_name(str(first.dht.peer_id))
            assert upload.num_bytes == UPLOAD_BYTES and 1 < upload.mbits_per_second < 1e5
            with pytest.raises(UploadError, match="an older version"):
                measure_upload(first.dht, [f"/p2p/{second.dht.peer_id}"])
            # Of two initial peers, the first one is gone.
            assert measure_bandwidth(second.dht, [GONE, address]) == min(MAX_BANDWIDTH, upload.mbits_per_second)
            with pytest.raises(UploadError, match="no more uploads now"):
                measure_upload(second.dht, [address])
            with pytest.raises(UploadError, match="no connection"):
                measure_upload(second.dht, [GONE])


@pytest.mark.parametrize(
    ("results", "bandwidth", "message"),
    [
        ([Upload(2 * MIB, 2.0)], 8.388608, "Using --bandwidth 8.4: the upload to "),
        ([Upload(2 * MIB, 0.01)], 100.0, "has 1,677.7 Mbit/s"),
        (["it is away", Upload(2 * MIB, 2.0)], 8.388608, "Using --bandwidth 8.4"),
        (["it is away", "it has refused"], 100.0, "Using --bandwidth 100: the upload is not measured, "),
    ],
)
def test_bandwidth_is_the_measured_upload(caplog, results, bandwidth, message):
    caplog.set_level("INFO")
    assert measure_bandwidth(FakeUploads(*results), [GONE, GONE]) == bandwidth
    assert message in caplog.text and len(caplog.records) == 1


@pytest.mark.peers
@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_slow_upload_is_measured_in_bounded_time(tmp_path, monkeypatch, seconds):
    """At 2 Mbit/s the first bytes take a second; at none, the start of a trainer is delayed by START_TIMEOUT."""
    delay = seconds or 60.0

    async def discard(self, reader, num_bytes: int) -> None:
        await reader.readexactly(num_bytes)
        await asyncio.sleep(delay * num_bytes / WARM_UP_BYTES)

    monkeypatch.setattr(UploadSink, "_discard", discard)
    with local_peer(tmp_path / "one", "run") as first:
        address = str(first.dht.get_visible_maddrs()[0])
        with local_peer(tmp_path / "two", "run", (address,), client_mode=True) as second:
            started = time.monotonic()
            bandwidth = measure_bandwidth(second.dht, [address])
            assert time.monotonic() < started + START_TIMEOUT + 2.0
            assert bandwidth == pytest.approx(2.1, rel=0.2) if seconds else bandwidth == MAX_BANDWIDTH
