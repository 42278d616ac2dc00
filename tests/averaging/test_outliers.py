"""Tests of the bound on pseudo-gradients by those of the other peers."""

import pytest

from cotrain.averaging.outliers import MAX_RATIO, TOLERANCE, OutlierFilter

RARE = [{0: 1.0, 1: 1.0, 2: 100.0 if part % 5 == 4 else 1.0} for part in range(20)]


@pytest.mark.parametrize(
    ("parts", "samples", "factors", "senders"),
    [
        ([{0: 1.0, 1: 0.5, 2: 2.0, 3: 1.3}] * 20, 10.0, {}, []),  # honest peers
        ([{0: 1.0, 1: 2.0, 2: 3.0, 3: 100.0}] * 3, 10.0, {3: TOLERANCE * 2.0 / 100}, [3]),  # the others' median
        (RARE, 10.0, {}, []),  # rows of an embedding that only one peer's samples have
        # One peer claims ten times the samples of the others: its norm may be four times as large, bound 16.
        ([{0: 1.0, 1: 1.0, 2: 15.0}], 100.0, {}, []),
        ([{0: 1.0, 1: 1.0, 2: 100.0}], 100.0, {2: TOLERANCE * MAX_RATIO / 100}, [2]),
        ([{0: 1.0, 1: 1e6}], 10.0, {}, []),  # of two, none is the larger one
    ],
)
def test_sender_that_is_always_too_large_is_scaled_down(parts, samples, factors, senders):
    outliers, weights = OutlierFilter(), {**dict.fromkeys(range(4), 10.0), 2: samples}
    assert [outliers.clip_factors(norms, weights) for norms in parts] == [factors] * len(parts)
    assert outliers.senders == senders
