"""Scenarios of trainers with a monitor, see tests/peerstep/test_scenarios.py. All seconds are simulated."""

from collections.abc import Iterator

import pytest
import torch

from peerstep.reports.marks import MAX_DIFFERENT, different_marks
from tests.peerstep.test_scenarios import add_trainers
from tests.support.monitored import MonitoredScenario
from tests.support.scenario import BATCH

pytestmark = [pytest.mark.peers, pytest.mark.usefixtures("patches")]


def test_monitor_of_the_smaller_side_follows_the_run_to_a_lower_step(tmp_path):
    with MonitoredScenario(17, target_batch_size=160) as scenario:
        larger, smaller = add_trainers(scenario, 3), [scenario.add(speed=0.8), scenario.add(speed=0.7)]
        monitor = scenario.add_monitor(tmp_path)
        scenario.reach(2)
        scenario.partition({*smaller, monitor})
        for peer in smaller:
            peer.batch = 5 * BATCH
        scenario.wait_until(lambda: min(scenario.steps_of(*smaller)) > max(scenario.steps_of(*larger)) + 8, 300.0)
        monitor.refresh(min(scenario.steps_of(*smaller)))
        saved = monitor.keeper.saved_step
        for peer in smaller:
            peer.batch = BATCH
        scenario.heal()
        scenario.unite()
        step = min(scenario.steps_of())
        assert step < saved - 2
        monitor.refresh(step)
        assert step - 1 <= monitor.keeper.saved_step <= step + 1
        newcomer = scenario.add()
        scenario.unite(*larger, newcomer)
        different = different_marks(monitor.keeper.averager.marks, larger[0].marks)
        assert different is not None and len(different) <= MAX_DIFFERENT, "its state is of the run's history"
        assert not any(peer.downloads for peer in larger) and len(newcomer.downloads) == 1


def test_false_donor_speaks_for_nobody(tmp_path):
    """The attacker claims that its state is two steps newer than it is. Each trainer asked it first, each time."""
    with MonitoredScenario(21, target_batch_size=160) as scenario:
        honest = [*add_trainers(scenario, 3), scenario.add(speed=0.5, uplink=5000.0)]
        attacker, monitor = scenario.add(speed=0.7), scenario.add_monitor(tmp_path)
        averager = attacker.optimizer.state_averager
        serialize, offer = averager.to_messages, averager.offer

        def change(metadata: dict, tensors: list[torch.Tensor]) -> Iterator[bytes]:
            false = [torch.cat([tensors[0][:1] + 3.5, tensors[0][1:]]), *tensors[1:]]  # one of 200 parameters
            return serialize(metadata | {"epoch": metadata["epoch"] + 2}, false)

        averager.to_messages, averager.offer = change, lambda priority: offer(priority=priority + 2)
        scenario.reach(3, *honest)
        for step in (4, 7, 10, 13):
            scenario.reach(step, *honest)
            scenario.wait_until(lambda step=step: monitor.refresh(step) or monitor.keeper.saved_step >= step - 2, 60.0)
            saved = monitor.keeper.saved_step
            scenario.reach(saved, *honest)
            true = [peer.history[saved] for peer in honest if saved in peer.history]
            assert true and all((monitor.keeper.model.weight - other).abs().max() < 0.05 for other in true)
        newcomers = [scenario.add() for _ in range(2)]
        scenario.wait_until(lambda: all(peer.has_joined for peer in newcomers), 60.0)
        for peer in newcomers:
            taken = peer.downloads[0][1]
            assert (peer.loaded[0] - honest[0].history[taken])[0].abs() < 0.05
        scenario.unite(*honest, *newcomers)


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("progress", [0, 1], ids=["two steps ahead", "one step ahead"])
def test_laptop_returns_with_a_later_step_than_that_of_the_revived_run(tmp_path, number, progress):
    """All trainers leave two steps after the monitor's checkpoint, and new ones continue from it."""
    with MonitoredScenario(16, target_batch_size=40 * number) as scenario:
        old, monitor = add_trainers(scenario, number), scenario.add_monitor(tmp_path)
        scenario.reach(14)
        # As a monitor does, try again after a download that has failed, which happens on a busy machine.
        scenario.wait_until(lambda: monitor.refresh(max(scenario.steps_of())) or monitor.keeper.saved_step >= 14, 60.0)
        saved = monitor.keeper.saved_step
        scenario.reach(saved + 2)
        state = old[-1].state
        for peer in old:
            peer.leave()
        new = add_trainers(scenario, number)
        scenario.wait_until(lambda: all(peer.has_joined for peer in new), 60.0)
        assert {taken for peer in new for _, taken in peer.downloads} == {saved}
        scenario.reach(saved + progress, *new)
        began, laptop = max(scenario.steps_of(*new)), scenario.add(speed=0.6, uplink=3000.0, state=state)
        # Histories that differ in one mark are averaged in the next round with parameters, here every second one.
        scenario.wait_until(lambda: len({peer.marks[-1] for peer in (*new, laptop)}) == 1, 100.0)
        assert max(scenario.steps_of(*new, laptop)) <= began + 5
        # Optimizer statistics are not averaged: updates of equal parameters differed by up to 0.0052, before by 0.013.
        scenario.unite(*new, laptop, tolerance=0.009)
        assert all(len(peer.downloads) == 1 for peer in new), "the larger side has followed"
