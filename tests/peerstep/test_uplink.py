"""The measurement of a peer's upload, and what it claims by it."""

import asyncio
import math

import pytest

from peerstep.rounds import uplink
from peerstep.rounds.reducer import Delivery
from peerstep.rounds.uplink import FIRST_CLAIM, MAX_MEASURED, BandwidthClaim, UplinkMeter


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


def test_largest_measured_rate_is_claimed(caplog):
    caplog.set_level("INFO")
    claim, claims = BandwidthClaim(None), []
    assert claim.pace(reduces=True) == math.inf, "it is not known yet"
    for rate in (0.3, 20.0, 4.0, 30.0, 500.0):
        claim.record_rate(rate)
        claims.append(claim.value)
    assert claims == [FIRST_CLAIM, 20.0, 20.0, 30.0, MAX_MEASURED]
    assert len(caplog.records) == 1


def test_claim_is_halved_after_poor_deliveries_and_grows_slowly():
    claim, claims = BandwidthClaim(64.0), []
    for failed in (0, 2, 1, *[2] * 9, 0):  # of 3 receivers, in the rounds one after the other
        claim.adapt(Delivery(3, failed))
        claims.append(claim.value)
    assert claims[:5] == [64.0, 64.0, 32.0, pytest.approx(33.6), pytest.approx(16.8)]
    assert claims[-1] == 1.0
    claim.record_rate(500.0)
    assert claim.value == 1.0, "it is stated"
