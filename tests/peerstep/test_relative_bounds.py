"""Tests of the bounds by the other members of a round."""

import pytest

from peerstep.rounds.relative_bounds import LOOSE_RATIO, NormFilter, cap_weights, norm_ratio, weight_ratio


@pytest.mark.parametrize(
    ("weights", "capped"),
    [
        ([8, 64, 4096], [8, 64, 4096]),  # of three, two may be the ones that lie
        ([8, 8, 8, 4096], [8, 8, 8, 16]),
        ([1, 2, 3, 4], [1, 2, 3, 4]),  # unequal machines
        ([0, 0, 8, 64], [0, 0, 8, 16]),  # those that have computed nothing yet are no measure
        ([0, 0, 0, 64], [0, 0, 0, 64]),
        ([8] * 15 + [4096], [8] * 15 + [32]),
        ([8] * 8 + [4096] * 7, [8] * 8 + [32] * 7),
    ],
)
def test_weight_has_a_bound_by_the_median_of_the_others(weights, capped):
    assert list(cap_weights(dict(enumerate(weights)), len(weights) - 1).values()) == capped


def test_who_is_stuck_is_capped_and_no_measure():
    weights = {"a": 50, "b": 60, "c": 50, "liar": 4096}
    assert cap_weights(weights, 3, stuck={"liar"}) == {**weights, "liar": 100}
    assert cap_weights({"a": 50, "b": 60, "c": 1, "d": 1}, 3, stuck={"c", "d"}) == {"a": 50, "b": 60, "c": 1, "d": 1}


def test_bounds_hold_if_some_of_the_members_are_late():
    assert cap_weights({"a": 64, "b": 64, "liar": 4096}, 3)["liar"] == 128
    assert NormFilter(3).factors({0: 1.0, 1: 1.0, 2: 100.0}, {0: 64, 1: 64, 2: 64}, None, 0.0) == {2: 0.015}


def filtered(parts: list[dict[int, float]], weights: dict[int, float] | None = None, own_norm: float = 0.0):
    filter_ = NormFilter(len(parts[0]) - 1)
    weights = weights or dict.fromkeys(range(16), 10.0)
    return [filter_.factors(norms, weights, None, own_norm) for norms in parts], filter_.excessive


EQUAL = dict.fromkeys(range(4), 1.0)


@pytest.mark.parametrize(
    ("parts", "weights", "factors", "excessive"),
    [
        ([{0: 1.0, 1: 0.7, 2: 1.4, 3: 1.3}] * 20, None, [{}] * 20, set()),  # honest peers
        ([{**EQUAL, 3: 2.0}], None, [{3: 0.75}], set()),
        ([{**EQUAL, 3: 100.0}], None, [{3: 0.015}], {3}),
        # A large part of a sender whose others are small: rows of an embedding that only it has
        ([EQUAL] * 4 + [{**EQUAL, 3: 2.0}], None, [{}] * 5, set()),
        # Fewer samples: a noisier mean, which adds less
        ([{**EQUAL, 3: 2.0}], {0: 8, 1: 8, 2: 8, 3: 4}, [{}], set()),
        # Two senders: only a mistake is bounded, and the weights are believed
        ([{0: 1.0, 1: 3.0}], None, [{}], set()),
        ([{0: 1.0, 1: 1e6}], None, [{1: LOOSE_RATIO / 1e6}], {1}),
        ([{0: 1.0, 1: 1.0}], {0: 1, 1: 64}, [{}], set()),
        ([{0: 1.0, 1: 1.0, 2: 1.0}], {0: 1, 1: 64, 2: 64}, [{}], set()),
        ([{0: 1.0, 1: 1.0, 2: 1e6}], {0: 1e-5, 1: 64, 2: 64}, [{2: LOOSE_RATIO * 2**0.5 / 1e6}], {2}),
        ([{5: 1e6}], None, [{}], set()),
        ([{0: 0.0, 1: 1.0}], None, [{}], set()),  # rows of an embedding that only one has
    ],
)
def test_sender_that_adds_too_much_is_scaled_down(parts, weights, factors, excessive):
    found, reported = filtered(parts, weights)
    assert [{sender: pytest.approx(factor) for sender, factor in of_part.items()} for of_part in factors] == found
    assert reported == excessive


def test_sum_of_a_sender_has_a_bound_however_it_is_divided():
    """All in one part, or a little too much in each."""
    for parts in ([{**EQUAL, 3: 0.0}] * 9 + [{**EQUAL, 3: 1e3}], [{**EQUAL, 3: 4.0}] * 10):
        factors, _ = filtered(parts)
        used = sum((norms[3] * of_part.get(3, 1.0)) ** 2 for norms, of_part in zip(parts, factors, strict=True))
        assert used == pytest.approx(norm_ratio(3) ** 2 * 10)


def test_keys_that_send_nothing_make_no_honest_peer_an_outlier():
    zeros = {0: 1.0, 1: 1.0, **dict.fromkeys(range(2, 8), 0.0)}
    assert filtered([zeros], own_norm=10.0)[0] == [{}]


def test_one_sender_is_never_most_of_a_round():
    for number in range(3, 64):
        assert max(weight_ratio(number), norm_ratio(number)) < number
