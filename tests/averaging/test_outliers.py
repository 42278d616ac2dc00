"""Tests of the bound on pseudo-gradients by those of the other peers."""

import pytest

from cotrain.averaging.outliers import TOLERANCE, OutlierFilter

EQUAL = dict.fromkeys(range(4), 10.0)


def test_norms_of_honest_peers_are_left_alone():
    outliers = OutlierFilter()
    for _ in range(20):
        assert outliers.clip_factors({0: 1.0, 1: 0.5, 2: 2.0, 3: 1.3}, EQUAL) == {}
    assert outliers.senders == []


def test_sender_that_is_always_too_large_is_scaled_down_to_the_median_of_the_others():
    outliers = OutlierFilter()
    for _ in range(3):
        assert outliers.clip_factors({0: 1.0, 1: 2.0, 2: 3.0, 3: 100.0}, EQUAL) == {3: TOLERANCE * 2.0 / 100}
    assert outliers.senders == [3]


def test_a_rare_large_part_is_no_reason():
    """Rows of an embedding that only one peer's samples have."""
    outliers = OutlierFilter()
    for part in range(20):
        norms = {0: 1.0, 1: 1.0, 2: 100.0 if part % 5 == 4 else 1.0}
        assert outliers.clip_factors(norms, EQUAL) == {}
    assert outliers.senders == []


@pytest.mark.parametrize(("ratio", "is_outlier"), [(20.0, False), (30.0, False), (100.0, True)])
def test_peer_with_more_samples_may_have_a_larger_norm(ratio, is_outlier):
    """One peer has ten times the samples of the others: its norm may be ten times as large, with the tolerance 40."""
    outliers = OutlierFilter()
    outliers.clip_factors({0: 1.0, 1: 1.0, 2: ratio}, {0: 1.0, 1: 1.0, 2: 10.0})
    assert outliers.senders == ([2] if is_outlier else [])


def test_of_two_senders_none_is_the_larger_one():
    assert OutlierFilter().clip_factors({0: 1.0, 1: 1e6}, EQUAL) == {}
