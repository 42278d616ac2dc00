"""The measurement of a peer's upload, and what it claims by it."""

import asyncio
from types import SimpleNamespace

import pytest

from peerstep import uplink
from peerstep.reducer import Delivery
from peerstep.rounds import FIRST_CLAIM, MAX_MEASURED, RoundAverager
from peerstep.uplink import UplinkMeter


async def test_largest_rate_of_one_interface_is_measured(clock, monkeypatch):
    """A short round counts as one of the full time: what it sends may still be in a queue of the router."""
    sent = {"lo": 0, "wan": 0}
    monkeypatch.setattr(uplink, "sent_bytes", lambda: dict(sent))
    meter = UplinkMeter()
    for lo, wan in ((1000, 0), (50_000, 100_000), (0, 10_000)):
        sent["lo"] += lo
        sent["wan"] += wan
        sent["tun"] = 10**9  # appears while it is measured
        await asyncio.sleep(uplink.RATE_SECONDS + 0.1)
    meter.stop()
    assert meter.rate == pytest.approx(8e-6 * 100_000 / uplink.RATE_SECONDS, rel=0.3)
    sent["wan"] += 1000
    short = UplinkMeter()
    sent["wan"] += 1000
    short.stop()
    assert short.rate == pytest.approx(8e-6 * 1000 / uplink.RATE_SECONDS)


def make_averager(bandwidth: float | None) -> RoundAverager:
    averager = RoundAverager.__new__(RoundAverager)
    averager.bandwidth = bandwidth or FIRST_CLAIM
    averager._measures, averager._is_known = bandwidth is None, bandwidth is not None
    averager.claim, averager._delivery = SimpleNamespace(value=averager.bandwidth), Delivery(0)
    return averager


def test_largest_measured_rate_is_claimed(caplog):
    caplog.set_level("INFO")
    averager, claims = make_averager(None), []
    for rate in (0.3, 20.0, 4.0, 30.0, 500.0):
        averager._claim_measured(rate)
        claims.append(averager.claim.value)
    assert claims == [FIRST_CLAIM, 20.0, 20.0, 30.0, MAX_MEASURED]
    assert len(caplog.records) == 1 and averager._is_known


def test_claim_is_halved_after_poor_deliveries_and_grows_slowly():
    averager, claims = make_averager(64.0), []
    for failed in (0, 2, 1, *[2] * 9, 0):  # of 3 receivers, in the rounds one after the other
        averager._adapt_claim(Delivery(3, failed))
        claims.append(averager.claim.value)
    assert claims[:5] == [64.0, 64.0, 32.0, pytest.approx(33.6), pytest.approx(16.8)]
    assert claims[-1] == 1.0
