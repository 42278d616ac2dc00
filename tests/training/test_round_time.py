"""Tests of the formula for the time of a round."""

import pytest

from lib.training.round_time import FIXED_SECONDS, SLOWDOWN, round_seconds, tensor_bytes

ALBERT_LARGE = 17_847_474


@pytest.mark.parametrize(("peers", "copies"), [(2, 1.0), (4, 1.5), (8, 1.75), (64, 1.96875)])
def test_peer_sends_less_than_two_copies(peers, copies):
    assert tensor_bytes(1000, peers, bits=16) == copies * 2000


def test_round_has_a_fixed_part_and_one_for_the_link():
    assert round_seconds(ALBERT_LARGE, 1, 32, 10.0) == 0
    assert round_seconds(ALBERT_LARGE, 4, 32, 10.0) == pytest.approx(FIXED_SECONDS + SLOWDOWN * 85.67, abs=0.01)
    assert round_seconds(ALBERT_LARGE, 8, 32, 10.0) == pytest.approx(122, abs=0.5), "docs/tuning.md"


@pytest.mark.parametrize(
    ("peers", "bits", "upload", "measured"),
    [(4, 32, 5.0, 201), (4, 32, 20.0, 51), (4, 16, 10.0, 52), (4, 8, 10.0, 26)],
)
def test_formula_is_near_the_measured_points(peers, bits, upload, measured):
    """Of docs/tuning.md."""
    assert round_seconds(ALBERT_LARGE, peers, bits, upload) == pytest.approx(measured, rel=0.12)
