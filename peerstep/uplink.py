"""Measurement of the upload rate during a round, without extra traffic."""

import asyncio
import time

import psutil

# Time over which a rate is measured. In a shorter one, what routers queue (up to 0.5 s of a link) counts for more.
RATE_SECONDS = 2.0


def sent_bytes() -> dict[str, int]:
    """Return the bytes that each network interface of this machine has sent."""
    return {name: counters.bytes_sent for name, counters in psutil.net_io_counters(pernic=True).items()}


class UplinkMeter:
    """Measures how fast this machine sends, until `stop`: `rate` is the largest rate of RATE_SECONDS, in Mbit/s.

    It is that of one network interface: through a VPN, each byte passes two. Buffers in this machine do not count, but
    other programs do. Without enough data for RATE_SECONDS, the rate is lower than the link's.
    """

    def __init__(self):
        self.rate = 0.0
        self._begin()

    def _begin(self) -> None:
        self._sent, self._since = sent_bytes(), time.monotonic()
        self._timer = asyncio.get_running_loop().call_later(RATE_SECONDS, self._measure)

    def _measure(self) -> None:
        self.stop()
        self._begin()

    def stop(self) -> None:
        """End the measurement with the time that has passed, if it has a larger rate."""
        self._timer.cancel()
        seconds = max(RATE_SECONDS, time.monotonic() - self._since)
        sent = [count - self._sent.get(name, count) for name, count in sent_bytes().items()]
        self.rate = max(self.rate, 8e-6 * max(sent, default=0) / seconds)
