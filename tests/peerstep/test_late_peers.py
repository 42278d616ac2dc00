"""Tests of peers that miss a step: their contributions and the averages they receive."""

import torch

from tests.support.swarm import Replay, Trainer, assert_equal_parameters, flat


def assert_received_what_it_lacked(trainer: Trainer, parameters: torch.Tensor, expected: torch.Tensor) -> None:
    """Check that a trainer that missed an update started its step from the other peers' parameters.

    Its optimizer statistics lack the update, so early in a run its step differs in direction, but not in size.

    :param parameters, expected: the other peers' parameters before and after the step
    """
    assert (flat(trainer.averager.averaged_parameters) - parameters).abs().max() < 1e-5
    assert (trainer.parameters - expected).norm() < 0.7 * (expected - parameters).norm()
    assert trainer.optimizer.distance == 0


def test_peer_that_misses_a_round_gives_its_samples_to_the_next(build_swarm):
    swarm, replay = build_swarm(matchmaking_time=10.0), Replay()
    swarm.add_several(False, False, False)
    late, *_ = swarm.in_order(step=1)  # it should have led
    others = [trainer for trainer in swarm.trainers if trainer is not late]
    with late.hold():
        swarm.compute(4, 5, 3)
        num_late = dict(zip(swarm.trainers, (4, 5, 3), strict=True))[late]
        replay.step(swarm.wait_for(1, others))
    late.wait_for(1)
    assert late.entry["outcome"] == "missed" and late.entry["distance"] == 1
    assert [list(trainer.optimizer.pace.recent_rounds) for trainer in (late, *others)] == [[False]] * 3
    assert late.optimizer.accumulator.num_samples == late.tracker.local_progress.samples_accumulated == num_late
    assert not late.optimizer.state_averager.allow_state_sharing, "it offers a state that lacks an update"
    swarm.meet()
    swarm.compute(*(12 - num_late - 4, 2, 2), trainers=[others[0], others[1], late])
    expected = replay.step(swarm.wait_for(2))
    assert_equal_parameters(others, expected)
    assert_received_what_it_lacked(late, replay.parameters(1), expected)
    assert late.entry["samples"] == num_late + 2
    for trainer in swarm.trainers:
        assert trainer.entry["outcome"] == "averaged" and len(trainer.entry["group"]) == 3
        assert trainer.entry["weights"].get(late.name, num_late + 2) == num_late + 2
    late.version = 0  # its model has no update yet
    expected = replay.step(swarm.global_step(4, 4, 4))
    assert_equal_parameters(others, expected)
    assert_received_what_it_lacked(late, replay.parameters(2), expected)
