"""Scenarios of many unequal peers, see tests/support/scenario.py. All seconds are simulated."""

import pytest

from tests.support.scenario import Peer, Scenario


def measure(seconds: float, thin_uplink: bool) -> tuple[list[Peer], list[int], list[int]]:
    """Train with three trainers, and a fourth that needs twice the timeout for a round.

    :returns: the three, and what they have done in the given time: steps, and samples in steps
    """
    with Scenario(1, factor=40.0, target_batch_size=96, averaging_timeout=20.0) as scenario:
        trainers = [scenario.add(speed=0.6 + 0.1 * number, uplink=3000.0 * 2**number) for number in range(3)]
        if thin_uplink:
            scenario.add(speed=0.2, uplink=40.0, clock=1.0)
        scenario.reach(3, *trainers)
        before = [(peer.step, peer.applied_samples) for peer in trainers]
        scenario.wait(seconds)
        steps = [peer.step - step for peer, (step, _) in zip(trainers, before, strict=True)]
        samples = [peer.applied_samples - samples for peer, (_, samples) in zip(trainers, before, strict=True)]
    return trainers, steps, samples


def test_thin_uplink_costs_the_others_neither_steps_nor_samples():
    _, steps_without, samples_without = measure(100.0, thin_uplink=False)
    trainers, steps, samples = measure(100.0, thin_uplink=True)
    edge = len(trainers)  # one step each may end just after the time
    assert sum(steps) >= 0.9 * sum(steps_without) - edge, (steps, steps_without)
    assert sum(samples) >= (0.9 - edge / sum(steps_without)) * sum(samples_without), (samples, samples_without)
    assert min(peer.received for peer in trainers) >= 0.98, [peer.received for peer in trainers]


@pytest.mark.parametrize("number", [16, pytest.param(64, marks=pytest.mark.long)])
def test_many_trainers_take_three_complete_steps(number):
    with Scenario(2, target_batch_size=40 * number) as scenario:
        peers = [scenario.add(speed=2.0 + index % 3, client=index % 8 > 2) for index in range(number)]
        scenario.reach(3)
        assert scenario.have_one_history()
        assert all(entry["received"] == 1 and len(entry["group"]) == number for entry in peers[0].rounds[1:3])
