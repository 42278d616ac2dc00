"""A trainer that joins: it waits for the state of a run that reports show, and one liar does not bar it."""

from types import SimpleNamespace

import pytest
import torch

import callback as callback_module
import utils
from arguments import CollaborationArguments
from callback import CollaborativeCallback
from lib.common.errors import UserError


class FakeOptimizer:
    """Loads a state at the attempts that succeed; `epochs`: what the other live trainers report."""

    def __init__(self, epochs: list[int], succeeds_at: int | None):
        self.local_epoch, self.last_step, self.target_batch_size = 0, None, 8
        self.attempts, self.succeeds_at = 0, succeeds_at
        reports = [SimpleNamespace(epoch=epoch) for epoch in epochs]
        self.tracker = SimpleNamespace(
            refresh=lambda: True, alive=lambda peers: peers, other_trainers=reports, default_refresh_period=0.1
        )

    def banned_peers(self) -> dict:
        return {}

    def ban(self, peers: dict) -> None:
        pass

    def load_state_from_peers(self) -> bool:
        self.attempts += 1
        if self.attempts == self.succeeds_at:
            self.local_epoch = 7
        return self.attempts == self.succeeds_at


@pytest.fixture
def join(tmp_path, monkeypatch):
    """Let a callback join with a fake optimizer; time passes at once."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(utils, "store_record", lambda *args: None)
    fake_time = SimpleNamespace(
        monotonic=lambda: clock.now, time=lambda: clock.now, sleep=lambda s: setattr(clock, "now", clock.now + s)
    )
    monkeypatch.setattr(callback_module, "time", fake_time)
    peer = SimpleNamespace(dht=None, public_key=b"key")
    args = CollaborationArguments(run_id="run", load_state_timeout=20.0)

    def join(optimizer: FakeOptimizer) -> FakeOptimizer:
        callback = CollaborativeCallback(peer, optimizer, torch.nn.Linear(2, 2), args, tmp_path, lambda: False)
        try:
            callback.join()
        finally:
            callback.close()
        return optimizer

    return join


def test_first_trainer_of_a_run_begins_at_once(join):
    assert join(FakeOptimizer([], None)).attempts == 1
    assert join(FakeOptimizer([0, 1], None)).attempts == 1, "the others begin, too"


def test_download_that_fails_is_tried_again_while_reports_show_a_run(join):
    optimizer = join(FakeOptimizer([7, 7], succeeds_at=5))
    assert (optimizer.attempts, optimizer.local_epoch) == (5, 7)


def test_trainer_that_cannot_get_the_state_of_a_run_ends_with_one_line(join):
    """It would begin from scratch beside the run."""
    with pytest.raises(UserError, match="2 trainers of this run are at step #7 or later") as error:
        join(FakeOptimizer([7, 9], None))
    assert "--load_state_timeout" in str(error.value) and "\n" not in str(error.value)


def test_one_liar_bars_nobody(join):
    optimizer = join(FakeOptimizer([10**6, 0, 1], None))
    assert (optimizer.attempts, optimizer.local_epoch) == (CollaborativeCallback.MAX_JOIN_ATTEMPTS, 0)
