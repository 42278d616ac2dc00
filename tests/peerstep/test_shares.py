"""Tests of whose gradients and parameters count in a round, by what the members claim."""

import pytest

from peerstep.rounds.claims import Claims
from peerstep.rounds.shares import Standing, divide

NODE, CLIENT = 100.0, 0.0


@pytest.mark.parametrize(
    ("members", "lacking", "trusted", "gives"),
    [
        ([(NODE, 0.0), (NODE, 0.4), (CLIENT, 0.0)], "000", "111", "000"),  # nobody lacks any
        ([(NODE, 0.0), (NODE, 1.0), (CLIENT, 2.0)], "000", "110", "000"),
        ([(NODE, 0.0), (NODE, 6.0), (CLIENT, 0.0)], "010", "101", "100"),
        ([(NODE, 7.0), (NODE, 6.0), (NODE, 9.5)], "001", "110", "110"),  # only differences count
        ([(NODE, 3.0), (NODE, 3.0), (NODE, 3.0), (NODE, 0.0)], "0000", "1111", "0000"),  # one claim decides nothing
        ([(NODE, 3.0), (NODE, 3.0), (NODE, 0.0)], "000", "111", "000"),
        ([(NODE, 3.0), (NODE, 3.0), (NODE, 0.0), (NODE, 0.0)], "1100", "0011", "0011"),  # as many claims as others
        ([(NODE, 3.0, True), (NODE, 3.0, True)], "00", "11", "00"),
        ([(NODE, 0.0, True), (NODE, 0.0), (NODE, 5.0)], "001", "010", "010"),
        ([(CLIENT, 0.0), (NODE, 5.0)], "01", "10", "00"),  # a client can give nothing
    ],
)
def test_members_that_lack_updates_have_no_weight_and_receive_parameters(members, lacking, trusted, gives):
    standing = Standing([Claims(*member) for member in members])
    shares = [bandwidth for bandwidth, *_ in members]
    found = standing.lacking, standing.trusted, map(bool, standing.shares_to_give(shares))
    assert ["".join(str(int(flag)) for flag in flags) for flags in found] == [lacking, trusted, gives]
    assert min(standing.distances) == 0, "reports and claims have no negative ones"


@pytest.mark.parametrize(
    ("marks", "gives"),
    [("AAAA", "1100"), ("ABBA", "0100"), ("ABAB", "1000"), ("ABCA", "0100"), ("  AA", "1100")],
    ids=["one", "of most", "of most with a client", "the larger of two", "of no client"],
)
def test_only_members_of_one_history_give_parameters(marks, gives):
    """Two nodes and a client that lack nothing, and a node that does: its mark has no vote."""
    claims = [(NODE, 0.0), (NODE, 0.4), (CLIENT, 0.0), (NODE, 9.0)]
    marked = zip(claims, marks, strict=True)
    standing = Standing([Claims(*of_peer, mark=mark.encode() * 6) for of_peer, mark in marked])
    shares = standing.shares_to_give([bandwidth for bandwidth, _ in claims])
    assert "".join(str(int(bool(share))) for share in shares) == gives


@pytest.mark.parametrize(
    ("bandwidths", "expected"),
    [
        ([100.0] * 4, [1 / 4] * 4),
        ([100.0, 100.0, 0.0], [1 / 2, 1 / 2, 0]),
        ([100.0, 0.0, 0.0], [1, 0, 0]),
        ([10.0, 50.0], [0, 1]),
        ([100.0, 50.0, 50.0], [2 / 3, 1 / 6, 1 / 6]),  # at most twice an equal share
        ([20.0, 20.0, 20.0, 4.0], [1 / 3, 1 / 3, 1 / 3, 0]),  # it needs longer for its own values
        ([100.0, 100.0, 100.0, 80.0], [0.29, 0.29, 0.29, 0.13]),
        ([100.0, 100.0, 100.0, 1e9], [1 / 6, 1 / 6, 1 / 6, 1 / 2]),
        ([100.0, 100.0, 100.0, 1e-9], [1 / 3, 1 / 3, 1 / 3, 0]),
        ([5.0] * 16 + [1e9], [14 / 15 / 16] * 16 + [2 / 17]),
    ],
)
def test_shares_are_by_bandwidth_and_no_claim_takes_more_than_two_equal_ones(bandwidths, expected):
    shares = divide(bandwidths)
    assert [share / sum(shares) for share in shares] == pytest.approx(expected, abs=0.01)
    assert sum(shares) == pytest.approx(1e6, rel=1e-4) and divide([7 * b for b in bandwidths]) == shares
