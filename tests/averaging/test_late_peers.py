"""Tests of peers that join, leave, miss a step or are slow: their contributions and the averages they receive."""

import threading

import pytest
import torch
from hivemind.utils import PerformanceEMA, get_dht_time

from tests.support.peers import wait_until
from tests.support.swarm import SAMPLES, Replay, Trainer, assert_equal_parameters, flat

# Joining and leaving


def test_fresh_peer_offers_no_state_and_trained_one_does(build_swarm):
    swarm = build_swarm()
    trainers = swarm.add_several(False, False)
    assert not any(trainer.optimizer.load_state_from_peers() for trainer in trainers)
    assert not any(trainer.optimizer.state_averager.allow_state_sharing for trainer in trainers)
    swarm.global_step(6, 6)
    assert all(trainer.optimizer.state_averager.allow_state_sharing for trainer in trainers)
    newcomer = swarm.add()
    newcomer.join()
    assert newcomer.version == newcomer.optimizer.local_epoch == 1
    assert_equal_parameters([newcomer], trainers[0].parameters)


def test_peer_that_announced_departure_is_not_counted(build_swarm):
    swarm = build_swarm()
    staying, leaving = swarm.add_several(False, False)
    auxiliary_peer = swarm.add_auxiliary_peer()
    swarm.global_step(6, 6)
    wait_until(lambda: len(staying.tracker.others) == 2, 60, "both others")
    leaving.optimizer.say_goodbye()
    auxiliary_peer.stop()
    wait_until(lambda: not staying.tracker.others, 30, "the goodbyes")
    assert staying.tracker.global_progress.num_peers == 1


def test_lone_peer_reads_reports_often(build_swarm):
    """A slow first local step predicts global steps of hours, for which reports are read only twice a minute."""
    swarm = build_swarm(target_batch_size=1000)
    first, second = swarm.add_several(False, False)
    for trainer in (first, second):
        trainer.tracker.max_refresh_period = 30.0
        trainer.tracker.performance_ema.samples_per_second = 0.1

    def seconds_to_look() -> float:
        return first.tracker.global_progress.next_fetch_time - get_dht_time()

    first.local_step(swarm.take(1))
    assert first.tracker.refresh()
    assert seconds_to_look() <= first.tracker.default_refresh_period
    second.local_step(swarm.take(1))
    wait_until(lambda: first.tracker.other_trainers, 10, "that the first knows the second")
    wait_until(lambda: seconds_to_look() > 2, 30, "that it looks less often: the step is not due soon")
    first.tracker.complete_step(1, 0)  # the other trainer may have completed it, too
    assert seconds_to_look() < 1


def test_joining_within_a_step_does_not_set_others_back(build_swarm):
    swarm, replay = build_swarm(), Replay()
    trainers = swarm.add_several(False, False)
    replay.step(swarm.global_step(6, 6))
    newcomer = swarm.add()
    swarm.meet()
    with trainers[1].hold():
        swarm.compute(6, 6, trainers=trainers)
        wait_until(lambda: trainers[0].tracker.local_progress.epoch == 2, 60, "the search for a group")
        newcomer.join()
        assert newcomer.version == 1
    expected = replay.step(swarm.wait_for(2, trainers))
    newcomer.join()
    assert newcomer.version == 2
    assert_equal_parameters([*trainers, newcomer], expected)
    assert [len(trainer.entry["group"]) for trainer in trainers] == [2, 2]


def test_step_is_no_longer_due_after_its_download(build_swarm):
    swarm = build_swarm()
    trainers = swarm.add_several(False, False)
    newcomer = swarm.add()
    newcomer.tracker.refresh()
    newcomer.tracker.default_refresh_period = newcomer.tracker.max_refresh_period = 1000.0
    newcomer.tracker.min_refresh_period = 1000.0
    with trainers[0].hold(), trainers[1].hold():
        swarm.compute(6, 6, trainers=trainers)
        wait_until(lambda: newcomer.tracker.refresh() and newcomer.tracker.seconds_to_step == 0, 60, "a step is due")
    swarm.wait_for(1, trainers)
    assert newcomer.tracker.seconds_to_step == 0, "it has looked meanwhile"
    wait_until(newcomer.optimizer.load_state_from_peers, 30, "the offer of a state")
    assert newcomer.optimizer.local_epoch == 1 and newcomer.tracker.seconds_to_step > 0


# Missing a step


def assert_received_what_it_lacked(trainer: Trainer, parameters: torch.Tensor, expected: torch.Tensor) -> None:
    """Check that a trainer that missed an update started its step from the other peers' parameters.

    Its optimizer statistics lack the update, so early in a run its step differs in direction, but not in size.

    :param parameters, expected: the other peers' parameters before and after the step
    """
    assert (flat(trainer.averager.averaged_parameters) - parameters).abs().max() < 1e-5
    assert (trainer.parameters - expected).norm() < 0.7 * (expected - parameters).norm()
    assert trainer.optimizer.missed_updates == 0


def test_peer_that_misses_a_round_gives_its_samples_to_the_next(build_swarm):
    swarm, replay = build_swarm(matchmaking_time=10.0), Replay()
    swarm.add_several(False, False, False)
    late = swarm.trainers[swarm.in_order(step=1)[0]]  # it should have led
    others = [trainer for trainer in swarm.trainers if trainer is not late]
    with late.hold():
        swarm.compute(4, 5, 3)
        num_late = dict(zip(swarm.trainers, (4, 5, 3), strict=True))[late]
        replay.step(swarm.wait_for(1, others))
    late.wait_for(1)
    assert late.entry["outcome"] == "missed" and late.entry["missed_updates"] == 1
    assert [list(trainer.optimizer.recent_rounds) for trainer in (late, *others)] == [[False]] * 3
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


def test_peer_two_steps_behind_downloads_the_state(build_swarm):
    swarm, replay = build_swarm(), Replay()
    *others, late = swarm.add_several(False, False, False)
    with late.hold():
        swarm.compute(4, 5, 3)
        replay.step(swarm.wait_for(1, others))
        replay.step(swarm.global_step(6, 6, trainers=others))
        wait_until(lambda: late.tracker.global_epoch == 2, 60, "the reports of the others")
    late.local_step(swarm.take(1))  # notices that the other peers are ahead
    assert late.optimizer.local_epoch == late.optimizer.state_averager.applied_epoch == 2
    assert late.optimizer.accumulator.num_samples == 0
    assert_equal_parameters([late], replay.parameters())
    late.version = 2
    late.pop_contribution()  # the optimizer has dropped it
    assert_equal_parameters(swarm.trainers, replay.step(swarm.global_step(4, 4, 4)))


@pytest.mark.parametrize("num_steps", [1, 2])
def test_newcomer_joins_although_its_download_outlasts_a_step(build_swarm, num_steps):
    """A newcomer that lacks one update contributes gradients; a newcomer that lacks two only receives averages."""
    swarm, replay = build_swarm(), Replay()
    others = swarm.add_several(False, False)
    replay.step(swarm.global_step(6, 6))
    newcomer = swarm.add()
    load_state = newcomer.optimizer.state_averager.load_state_from_peers

    def load_slowly() -> bool:
        loaded = load_state()
        for _ in range(num_steps):
            replay.step(swarm.global_step(6, 6, trainers=others))
        return loaded

    newcomer.optimizer.state_averager.load_state_from_peers = load_slowly
    newcomer.join()
    assert newcomer.version == 1
    assert newcomer.optimizer.local_epoch == 1 + num_steps and newcomer.optimizer.missed_updates == num_steps
    before = replay.parameters()
    contributions = swarm.global_step(4, 4, 4)
    expected = replay.step(contributions if num_steps == 1 else contributions[:2])
    assert_equal_parameters(others, expected, 1e-5)
    assert newcomer.entry["outcome"] == "averaged"
    assert_received_what_it_lacked(newcomer, before, expected)


def test_peer_with_long_local_steps_contributes_to_each_round(build_swarm):
    """A local step takes longer than matchmaking, and most of a global step."""
    swarm = build_swarm(target_batch_size=40)
    slow, *others = swarm.add_several(False, False, False)
    is_over = threading.Event()

    def train(trainer: Trainer, seconds: float, size: int) -> None:
        trainer.tracker.performance_ema = PerformanceEMA()
        while not is_over.wait(seconds):
            trainer.local_step({name: values[:size] for name, values in SAMPLES.items()})

    loops = [swarm.pool.submit(train, slow, 4.0, 8), *(swarm.pool.submit(train, other, 0.3, 1) for other in others)]
    try:
        wait_until(lambda: all(trainer.completed >= 3 for trainer in swarm.trainers), 60, "three steps")
    finally:
        is_over.set()
    for loop in loops:
        loop.result(30)
    for trainer in swarm.trainers:
        entries = trainer.log.entries[:3]
        assert [entry["outcome"] for entry in entries] == ["averaged"] * 3
        assert all(len(entry["group"]) == 3 and entry["samples"] > 0 for entry in entries)


def test_clients_and_an_auxiliary_peer_complete_all_steps(build_swarm):
    swarm, replay = build_swarm(), Replay()
    swarm.add_several(True, True)
    auxiliary_peer = swarm.add_auxiliary_peer()
    for _ in range(4):
        expected = replay.step(swarm.global_step(5, 7))
        assert_equal_parameters(swarm.trainers, expected)
        for trainer in swarm.trainers:
            assert trainer.entry["outcome"] == "averaged" and trainer.entry["received"] == 1.0
    wait_until(lambda: len(auxiliary_peer.round_log.entries) == 4, 10, "the auxiliary peer's log")
    assert all(entry["outcome"] == "averaged" for entry in auxiliary_peer.round_log.entries)
