"""Training session: joining, reporting, and recovery from broken parameters.

A joining trainer waits for the training state if reports show a run, and one Byzantine peer does not prevent it.
"""

from types import SimpleNamespace

import pytest
import torch

import utils
from arguments import CollaborationArguments
from lib.common.errors import UserError
from lib.common.names import derive_name
from lib.training import session as session_module
from lib.training.session import TrainingSession
from tests.support.fakes import FAKE_PEER, FakeTracker, make_session


class FakeOptimizer:
    """Fake optimizer whose state downloads succeed at given attempts; `epochs`: reports of the other live trainers."""

    def __init__(self, epochs: list[int], succeeds_at: int | None):
        self.local_epoch, self.last_step, self.target_batch_size = 0, None, 8
        self.pop_steps = list
        self.attempts, self.succeeds_at = 0, succeeds_at
        self.tracker = FakeTracker(others=[(epoch, 1.0) for epoch in epochs])

    def load_state_from_peers(self) -> bool:
        self.attempts += 1
        if self.attempts == self.succeeds_at:
            self.local_epoch = 7
        return self.attempts == self.succeeds_at


@pytest.fixture
def join(tmp_path, monkeypatch):
    """Let a session join with a fake optimizer and a clock without real waiting."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(utils, "store_record", lambda *args: None)
    fake_time = SimpleNamespace(
        monotonic=lambda: clock.now, time=lambda: clock.now, sleep=lambda s: setattr(clock, "now", clock.now + s)
    )
    monkeypatch.setattr(session_module, "time", fake_time)
    args = CollaborationArguments(run_id="run", load_state_timeout=20.0)

    def join(optimizer: FakeOptimizer) -> FakeOptimizer:
        session = TrainingSession(FAKE_PEER, optimizer, torch.nn.Linear(2, 2), args, tmp_path, lambda: False)
        try:
            session.join()
        finally:
            session.close()
        return optimizer

    return join


def test_first_trainer_of_a_run_begins_at_once(join):
    assert join(FakeOptimizer([], None)).attempts == 1
    assert join(FakeOptimizer([0, 1], None)).attempts == 1, "the others begin, too"


def test_download_that_fails_is_tried_again_while_reports_show_a_run(join):
    optimizer = join(FakeOptimizer([7, 7], succeeds_at=5))
    assert (optimizer.attempts, optimizer.local_epoch) == (5, 7)


def test_trainer_that_cannot_get_the_state_of_a_run_ends_with_one_line(join):
    """Otherwise the trainer would start from scratch beside the run."""
    with pytest.raises(UserError, match="2 trainers of this run are at step #7 or later") as error:
        join(FakeOptimizer([7, 9], None))
    assert "--load_state_timeout" in str(error.value) and "\n" not in str(error.value)


def test_one_byzantine_peer_does_not_prevent_joining(join):
    optimizer = join(FakeOptimizer([10**6, 0, 1], None))
    assert (optimizer.attempts, optimizer.local_epoch) == (TrainingSession.MAX_JOIN_ATTEMPTS, 0)


@pytest.mark.parametrize(
    ("backup", "offered", "expected"),
    [(6, None, 6), (6, 8, 8), (None, 8, 8), (8, 6, 8)],
    ids=["only a backup", "peers have a newer one", "only peers", "the backup is newer"],
)
def test_broken_parameters_are_rolled_back_to_the_newest_valid_state(tmp_path, backup, offered, expected):
    session = make_session(tmp_path, offered)
    if backup is not None:
        session.backup.write({"epoch": backup, "optimizer_metadata": []}, [])
    with torch.no_grad():
        session.model.weight[0, 0] = float("nan")
    assert session.after_local_step()
    assert session.model.weight[0, 0] == expected
    session.close()


def test_recovery_does_not_loop(tmp_path):
    session = make_session(tmp_path, offered=8)
    with torch.no_grad():
        for _ in range(session.MAX_RECOVERIES):
            session.model.weight[0, 0] = float("nan")
            assert session.after_local_step()
        session.model.weight[0, 0] = float("nan")
        with pytest.raises(UserError, match="learning_rate"):
            session.after_local_step()
    session.close()


def test_rollback_without_a_state_is_a_one_line_error(tmp_path):
    session = make_session(tmp_path, offered=None)
    with torch.no_grad():
        session.model.weight[0, 0] = float("inf")
    with pytest.raises(UserError, match="no valid state"):
        session.after_local_step()
    session.close()


def test_peer_without_a_name_gets_one_from_its_id(tmp_path, monkeypatch):
    session, stored = make_session(tmp_path, offered=None), []
    monkeypatch.setattr(utils, "store_record", lambda _dht, _key, _subkey, value, _lifetime: stored.append(value))
    session.introduce(leaving=False)
    assert stored[0]["username"] == session.name == derive_name("QmFake")
    session.close()
    args = CollaborationArguments(run_id="run", username="alice")
    assert TrainingSession(FAKE_PEER, session.optimizer, session.model, args, tmp_path, bool).name == "alice"


def test_two_steps_within_one_local_step_are_both_reported(tmp_path, monkeypatch):
    """Their samples were used in training, but the report of the first step was missing."""
    session, published = make_session(tmp_path, offered=None), []
    monkeypatch.setattr(session, "publish", published.append)
    monkeypatch.setattr(session, "introduce", lambda leaving: None)
    monkeypatch.setattr(session, "publish_rounds", lambda: None)
    session.optimizer.local_epoch = 11
    session.optimizer.is_synchronized_with_peers = lambda: True
    session.optimizer.local_progress = SimpleNamespace(samples_per_second=1.0)
    session.optimizer.pop_steps = lambda: [(10, 64), (11, 32)]
    session.loss_meter.add(torch.tensor(2.0))
    assert session.after_local_step()
    assert [(entry.step, entry.samples_accumulated, entry.mini_steps) for entry in published] == [
        (10, 64, 1),
        (11, 32, 0),
    ]
    assert session.total_samples_processed == 96 and session.last_reported_step == 11
    session.close()


def test_leaving_trainer_logs_what_it_gave(tmp_path, caplog):
    caplog.set_level("INFO")
    session = make_session(tmp_path, offered=None)
    session.optimizer.finish_pending_update = session.optimizer.stop_averaging = lambda: None
    session.status.begin_at(8)
    session.optimizer.round_log.write({"step": 9, "samples": 64, "outcome": "alone", "error": "", "weights": {}})
    session.leave()
    assert "You contributed 64 samples to 1 global step in 0.0 hours" in caplog.text
    session.close()


def test_trainer_ends_with_the_run_and_waits_for_the_last_checkpoint(tmp_path, monkeypatch):
    session, asked = make_session(tmp_path, offered=None), []
    monkeypatch.setattr(session, "introduce", lambda leaving: asked.append(leaving))
    monkeypatch.setattr(utils, "get_dictionary", lambda dht, key: asked.append(key) or {})
    session.optimizer.finish_pending_update = session.optimizer.stop_averaging = lambda: None
    session.args.ends_at = "2100-01-02T12:30"
    assert session.after_local_step()
    session.leave()
    assert asked == [], "it was stopped before the end"
    now = session.args.end_time
    monkeypatch.setattr(session_module, "time", SimpleNamespace(monotonic=lambda: 0.0, time=lambda: now))
    assert not session.after_local_step()
    session.leave()
    assert asked == [True, "run_monitor"]
    session.close()
