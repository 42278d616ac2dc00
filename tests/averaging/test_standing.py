"""Tests of whose gradients and parameters count in a round, by what the members claim."""

import pytest
from hivemind.averaging.allreduce import AveragingMode

from cotrain.averaging.matchmaking import Claims
from cotrain.averaging.standing import Standing

NODE, CLIENT, AUXILIARY = AveragingMode.NODE, AveragingMode.CLIENT, AveragingMode.AUX


@pytest.mark.parametrize(
    ("members", "lacking", "counting", "gives"),
    [
        ([(NODE, 0.0), (NODE, 0.4), (CLIENT, 0.0)], "000", "111", "000"),  # nobody lacks any
        ([(NODE, 0.0), (NODE, 1.0), (CLIENT, 2.0)], "000", "100", "000"),
        ([(NODE, 0.0), (NODE, 6.0), (CLIENT, 0.0)], "010", "101", "100"),
        ([(NODE, 7.0), (NODE, 6.0), (NODE, 9.0)], "001", "010", "010"),  # only differences count
        ([(NODE, 3.0, True), (NODE, 3.0, True)], "00", "11", "00"),
        ([(NODE, 0.0, True), (NODE, 0.0), (NODE, 5.0)], "001", "010", "010"),
        ([(CLIENT, 0.0), (NODE, 5.0)], "01", "10", "00"),  # a client can give nothing
        ([(AUXILIARY, 0.0), (NODE, 5.0), (NODE, 9.0)], "001", "010", "010"),
    ],
)
def test_members_that_lack_updates_have_no_weight_and_receive_parameters(members, lacking, counting, gives):
    standing = Standing([Claims(100.0, *member) for member in members])
    shares = [float(mode != CLIENT) for mode, *_ in members]
    found = standing.lacking, standing.counting, map(bool, standing.shares_to_give(shares))
    assert ["".join(str(int(flag)) for flag in flags) for flags in found] == [lacking, counting, gives]
