"""The bandwidth that this peer claims, and its measurement during a round, without extra traffic."""

import asyncio
import math
import multiprocessing
import time

import psutil
from hivemind.utils import get_logger

from peerstep.rounds.reducer import Delivery

logger = get_logger(__name__)

# Time over which a rate is measured. In a shorter one, what routers queue (up to 0.5 s of a link) counts for more.
RATE_SECONDS = 2.0
# Of its rate, at which a peer sends that is too slow to reduce: acknowledgements of what it receives need the rest.
# With 4 Mbit/s beside three of 20, it received 32 to 61 % of rounds at the whole rate, and all of them at 76 % of it.
QUIET_FRACTION = 0.75
# Mbit/s that a peer claims before a round has measured its link: less than nearly all links have, so that it reduces
# nothing beside others. That makes a round 3 to 13 % longer (16 to 3 equal peers, computed). With a claim of 14.7, the
# median upload of the world's fixed lines, a link of 4 Mbit/s beside links of 20 would make it 3.5 times as long.
FIRST_CLAIM = 1.0
MAX_MEASURED = 100.0  # Mbit/s: a link inside a house may have more, and tell nothing of that to the other peers
LEAST_CLAIM = 1 / 64  # of a peer's bandwidth
PACED_MBITS = 50.0  # below this bandwidth a peer sends its values at that rate, if they take longer than a moment


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


class BandwidthClaim:
    """What this peer claims as its bandwidth in Mbit/s. The averager's process changes it, the trainer reads `value`.

    :param stated: by its owner; None: the largest rate at which this machine has sent in a round
    """

    def __init__(self, stated: float | None):
        self.bandwidth, self._is_measured = stated or FIRST_CLAIM, stated is None
        self._is_known = stated is not None
        self._value = multiprocessing.RawValue("d", self.bandwidth)
        self._delivery = Delivery(0)  # of the newest round

    @property
    def value(self) -> float:
        return self._value.value

    def pace(self, reduces: bool) -> float:
        """Return the bytes per second at which this peer sends its values; infinity for any."""
        if not self._is_known or self.bandwidth >= PACED_MBITS:
            return math.inf
        return self.bandwidth * 125_000 * (1.0 if reduces else QUIET_FRACTION)

    def adapt(self, delivery: Delivery) -> None:
        """Claim half as much after a round in which most members did not receive this peer's averages in time.

        A link may be slower than before, or have other users. After other rounds the claim grows by 5 %.

        :param delivery: of the round that begins
        """
        before, self._delivery = self._delivery, delivery
        claim = min(self.bandwidth, self.value * (0.5 if before.is_poor else 1.05))
        self._value.value = max(claim, self.bandwidth * LEAST_CLAIM)
        if before.is_poor:
            logger.info(f"Most members did not receive this peer's averages: claiming {self.value:.1f} Mbit/s")

    def record_rate(self, rate: float) -> None:
        """Claim a rate at which this machine has sent, in Mbit/s, if it is the largest one so far."""
        if not self._is_measured:
            return
        if not self._is_known or rate > self.bandwidth:
            self.bandwidth = self._value.value = min(max(rate, FIRST_CLAIM), MAX_MEASURED)
        if not self._is_known:
            self._is_known = True
            logger.info(f"Claiming a bandwidth of {self.bandwidth:.1f} Mbit/s, as measured in this round")
