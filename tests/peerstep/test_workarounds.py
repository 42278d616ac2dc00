"""Tests of workarounds for hivemind that need no round."""

import asyncio
import gc
import math
import weakref
from types import SimpleNamespace

import pytest
from hivemind.utils import MPFuture

from peerstep.optimizer import CollaborativeOptimizer
from peerstep.peer.averager_process import SafeAverager, switch_to_safe_loop
from peerstep.reports.records import get_dictionary
from peerstep.rounds.matchmaking import RoundControl


def test_scaler_of_hivemind_is_refused():
    """accelerate's wrapper hides hivemind's scaler from the optimizer, which would use scaled gradients."""
    with pytest.raises(ValueError, match=r"torch\.amp\.GradScaler"):
        CollaborativeOptimizer.step(SimpleNamespace(), grad_scaler=object())


def make_control() -> tuple[RoundControl, MPFuture]:
    """Return the handle of a round, and the future by which it is cancelled."""
    trigger, cancel = MPFuture(), MPFuture()  # the first one of a process must not be the control
    control = RoundControl(scheduled_time=0.0, deadline=math.inf, allow_retries=False, weight=3.0, data_for_gather=b"")
    control.step = 2**40
    control.attach(trigger, cancel)
    return control, cancel


def test_round_that_ends_while_it_is_called_off_raises_nothing():
    control, cancel = make_control()
    control.allow_allreduce()
    cancel.set_result(None)
    with pytest.raises(Exception, match="CANCEL|FINISHED|state"):
        control.cancel()
    control.call_off()


def test_round_that_has_timed_out_is_called_off_without_a_warning():
    """A laptop wakes up after the timeout of the search for a group."""
    control, _ = make_control()
    control.set_exception(TimeoutError())
    assert not control.triggered
    control.call_off()
    assert control.triggered, "or hivemind warns when the handle is deleted"


def test_rounds_and_averagers_that_were_not_finished_are_deleted_in_silence():
    """The averager may die before it accepts the round, and memory may lack while it is built."""
    control = RoundControl(scheduled_time=0.0, deadline=math.inf, allow_retries=False, weight=3.0, data_for_gather=b"")
    control.__del__()
    SafeAverager.__new__(SafeAverager).__del__()


def test_task_to_which_nothing_refers_survives_the_garbage_collector():
    """A round that waits for its trigger is such a task."""
    policy, loop = asyncio.get_event_loop_policy(), switch_to_safe_loop()

    async def wait_for_nothing() -> None:
        await loop.create_future()

    task = weakref.ref(loop.create_task(wait_for_nothing()))
    loop.run_until_complete(asyncio.sleep(0))
    gc.collect()
    try:
        assert task() is not None
    finally:
        asyncio.set_event_loop_policy(policy)
    task().cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


def test_handle_of_a_round_keeps_its_values_apart():
    control, _ = make_control()
    control.weight = 7.0
    assert (control.step, control.weight) == (2**40, 7.0)


def test_reading_from_a_dht_that_has_died_ends(monkeypatch):
    """hivemind's `get` without `return_future` never returns then."""
    monkeypatch.setattr("peerstep.reports.records.READ_TIMEOUT", 0.1)
    dht = SimpleNamespace(get=lambda key, latest, return_future=False: MPFuture())
    assert get_dictionary(dht, "key") == {}
