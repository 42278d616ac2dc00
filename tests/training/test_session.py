"""Training session: joining, reporting, and recovery from broken parameters.

A joining trainer waits for the training state if reports show a run, and one Byzantine peer does not prevent it.
"""

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.p2p import PeerID
from hivemind.utils.crypto import RSAPrivateKey

import utils
from cotrain.common.errors import UserError
from cotrain.dht.metrics_schema import StepMetrics
from cotrain.status.client_mode import ClientModeAlarm
from cotrain.training import checkpoints, recovery
from cotrain.training import session as session_module
from cotrain.training.session import TrainingSession
from cotrain.training.start import LAST_STEP_SECONDS
from peerstep.reports import records as dht_records
from peerstep.reports.records import signer_of
from peerstep.step.coordinator import Outcome, StepRecord
from tests.support.fakes import FakeTracker, make_session, make_state, storing_peer

INITIAL_PEER = b"\x12\x20" + bytes(32)


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """A clock without real waiting, in the session; `now` is its time."""
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = clock.time = lambda: clock.now
    clock.sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)
    monkeypatch.setattr(session_module, "time", clock)
    return clock


@pytest.fixture
def session(tmp_path) -> Iterator[TrainingSession]:
    """A session at step 9 that publishes to `stored`, and whose optimizer completes the steps in `steps`."""
    stored: dict = {}
    session = make_session(tmp_path, offered=8, peer=storing_peer(stored))
    session.stored, session.steps = stored, []
    optimizer = session.optimizer
    optimizer.local_progress = SimpleNamespace(samples_per_second=1.0)
    optimizer.pop_records = lambda: [session.steps.pop(0) for _ in range(len(session.steps))]
    optimizer.finish_pending_update = optimizer.stop_averaging = lambda: None
    yield session
    session.status.close()


def published_history(session: TrainingSession) -> list[list]:
    return session.stored["run_trainers"][b"key"].value["history"]


def spoil(session: TrainingSession, value: float = float("nan")) -> None:
    """Make a parameter NaN or Inf."""
    with torch.no_grad():
        session.model.weight[0, 0] = value


@pytest.mark.parametrize(
    ("reported", "succeeds_at", "misfits", "expected"),
    [
        ([], None, [], (1, 0)),
        ([0, 1], None, [], (1, 0)),
        ([7, 7], 5, [], (5, 7)),
        ([10**6, 0, 1], None, [], (TrainingSession.MAX_JOIN_ATTEMPTS, 0)),
        ([0], None, [INITIAL_PEER, b"stranger"], (1, 0)),
        ([], None, [b"stranger"], (TrainingSession.MAX_JOIN_ATTEMPTS, 0)),
        ([], None, [INITIAL_PEER, b"stranger"], "the 2 trainers of this run have another model"),
        ([7, 9], None, [], "2 trainers of this run are at step #7 or later.*--load_state_timeout"),
    ],
    ids=[
        "first trainer", "the others begin, too", "failed downloads are tried again", "one Byzantine peer",
        "trainers of another model keep nobody out", "a stranger's report ends no trainer",
        "only trainers of another model, an initial peer among them", "no state of a run",
    ],
)  # fmt: skip
def test_trainer_joins(session, clock, monkeypatch, reported, succeeds_at, misfits, expected):
    """A trainer that would start from scratch beside the run, and look as if it took part, ends with one line.

    Not if strangers alone say so: one key with a report of another model kept each run from beginning.

    :param reported: steps of the other trainers
    :param succeeds_at: attempt at which the download of their state, of step 7, succeeds
    :param expected: attempts, and the step after joining; or the error
    """
    optimizer, attempts = session.optimizer, []

    def load_state_from_peers() -> bool:
        attempts.append(None)
        if len(attempts) == succeeds_at:
            optimizer.local_epoch = 7
        return len(attempts) == succeeds_at

    optimizer.load_state_from_peers, optimizer.local_epoch = load_state_from_peers, 0
    optimizer.tracker = FakeTracker(others=[(step, 1.0) for step in reported])
    optimizer.tracker.misfits, session.args.load_state_timeout = set(misfits), 20.0
    session.args.initial_peers = [f"/ip4/127.0.0.1/tcp/1/p2p/{PeerID(INITIAL_PEER).to_base58()}"]
    if isinstance(expected, tuple):
        session.join()
        assert (len(attempts), optimizer.local_epoch) == expected
    else:
        with pytest.raises(UserError, match=expected) as error:
            session.join()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("saved", "offered", "expected"),
    [(6, None, 6), (6, 8, 8), (None, 8, 8), (8, 6, 8)],
    ids=["only a checkpoint", "peers have a newer one", "only peers", "the checkpoint is newer"],
)
def test_broken_parameters_are_rolled_back_to_the_newest_valid_state(session, saved, offered, expected):
    session.optimizer.state_averager.offered = offered
    if saved is not None:
        checkpoints.save_checkpoint(
            session.recovery.folder, session.recovery.task, session.model, make_state(saved), {}
        )
    spoil(session)
    assert session.after_local_step()
    assert session.model.weight[0, 0] == expected


@pytest.mark.parametrize(("offered", "num_recoveries"), [(8, recovery.MAX_ATTEMPTS), (None, 0)])
def test_recovery_ends_with_one_line(session, offered, num_recoveries):
    """If no state can be downloaded, or after several rollbacks without a global step."""
    session.optimizer.state_averager.offered = offered
    for _ in range(num_recoveries):
        spoil(session)
        assert session.after_local_step()
    spoil(session, float("inf"))
    with pytest.raises(UserError, match="no valid state .* --learning_rate"):
        session.after_local_step()


def test_peer_without_a_name_gets_one_from_its_id(tmp_path):
    stored: dict = {}
    session = make_session(tmp_path, offered=None, peer=storing_peer(stored))
    session.publisher.publish()
    assert stored["run_trainers"][b"key"].value["username"] == session.publisher.name == "peer-QmFake"
    session.status.close()
    assert make_session(tmp_path, offered=None, username="alice").publisher.name == "alice"


def test_record_names_who_gave_samples_in_the_newest_rounds(session):
    """A peer that reduces nothing knows only the group."""
    group = [f"Qm{number:07d}" for number in range(40)]
    for weights, members in (({}, group), ({group[0]: 64.0, group[1]: 1e-6}, group[:3]), ({}, group[2:4])):
        session.optimizer.on_round({"weights": weights, "group": members})
    session.publisher.publish()
    names = session.stored["run_trainers"][b"key"].value["members"]
    assert len(names) == len(set(names)) == 32 and set(names[:2]) == {"0000002", "0000003"} and names[2] == "0000000"


def test_two_steps_within_one_local_step_are_both_reported(session):
    """Their samples were used in training, but the report of the first step was missing."""
    session.optimizer.local_epoch = 11
    session.steps += [StepRecord(10, Outcome.AVERAGED, 64), StepRecord(11, Outcome.ALONE, 32)]
    for loss in (2.0, 4.0):
        session.loss_meter.add(torch.tensor(loss))
    assert session.after_local_step()
    rows = [(step, samples, loss, mini_steps) for step, _, samples, loss, mini_steps, *_ in published_history(session)]
    assert rows == [(10, 64, 6.0, 2), (11, 32, 0.0, 0)]
    assert session.status.applied == 96


def test_step_takes_two_records(session):
    """Each is sent to five nodes."""
    session.peer.dht.store = Mock()
    session.on_report = partial(utils.publish_metrics, session.peer, 60.0)
    session.steps = [StepRecord(10, Outcome.AVERAGED, 64)]
    assert session.after_local_step()
    assert sorted(stored.args[0] for stored in session.peer.dht.store.call_args_list) == [
        "run_metrics",
        "run_trainers",
    ]


def test_checkpoint_is_saved_every_so_many_global_steps(session, monkeypatch):
    saved = []
    monkeypatch.setattr(session.recovery, "save_checkpoint", lambda: saved.append(step))
    session.args.backup_every_steps = 5
    for step in range(10, 21):
        session.steps = [StepRecord(step, Outcome.AVERAGED, 4)]
        session.after_local_step()
    assert saved == [10, 15, 20]


def test_global_step_ends_a_series_of_recoveries(session):
    """Otherwise the fourth rollback of a month would end the trainer."""
    for step in range(10, 10 + 2 * recovery.MAX_ATTEMPTS):
        spoil(session)
        assert session.after_local_step()
        session.steps = [StepRecord(step, Outcome.AVERAGED, 4)]
        assert session.after_local_step()


def test_trainer_that_is_asked_to_stop_says_goodbye(session):
    session.optimizer.say_goodbye = Mock()
    assert session.after_local_step() and not session.optimizer.say_goodbye.called
    session.should_stop = lambda: True
    assert not session.after_local_step() and session.optimizer.say_goodbye.called


@pytest.mark.parametrize("is_initial_peer", [True, False], ids=["initial peer", "organiser"])
@pytest.mark.parametrize(
    ("saved", "num_reads"), [([-1, 8, 9], 3), ([9], 1), ([8] * 1000, None)], ids=["late", "at once", "never"]
)
def test_trainer_leaves_when_the_monitors_have_saved_the_last_step(
    session, clock, monkeypatch, caplog, saved, num_reads, is_initial_peer
):
    """It waits neither for a monitor that stores no checkpoints nor for that of a stranger."""
    reads, steps = [], iter(saved)

    def read(_dht, key: str) -> dict:
        reads.append(key)
        records = ({"stores_checkpoints": True, "checkpoint_step": next(steps)},
                   {"stores_checkpoints": False, "checkpoint_step": -1},
                   {"stores_checkpoints": True, "checkpoint_step": -1})  # fmt: skip
        return dict(zip(subkeys, (SimpleNamespace(value=value) for value in records), strict=True))

    subkeys = [RSASignatureValidator(RSAPrivateKey()).local_public_key for _ in range(3)]
    monitor, other = map(signer_of, subkeys[:2])
    if is_initial_peer:
        session.args.initial_peers = [f"/ip4/127.0.0.1/tcp/1/p2p/{peer}" for peer in (monitor, other)]
    else:
        session.publisher.relay = SimpleNamespace(config=SimpleNamespace(organiser=monitor), publish=lambda: None)
    monkeypatch.setattr(dht_records, "get_dictionary", read)
    session.args.max_global_steps, session.args.leave_timeout = 9, 90.0
    session.leave()
    assert set(reads) == {"run_monitor"}
    assert len(reads) == num_reads if num_reads else clock.now == 90.0
    assert ("No monitor has saved step #9 yet" in caplog.text) == (num_reads is None)


@pytest.mark.parametrize("error", [None, TimeoutError])
def test_trainer_waits_until_its_last_step_is_stored(session, error):
    """All peers leave in the evening: the DHT asks some that are gone, and the trainer ended before it was done."""
    session.peer.dht.store = Mock(**{"return_value.result.side_effect": error})
    session.publisher.history.append(
        StepMetrics(step=9, samples_per_second=1.0, samples_accumulated=8, loss=3.0, mini_steps=1)
    )
    session.leave()
    (stored,) = session.peer.dht.store.call_args_list
    assert stored.args[0] == "run_trainers" and stored.args[1]["history"][-1][0] == 9
    session.peer.dht.store.return_value.result.assert_called_once_with(timeout=session.MAX_STORE_SECONDS)


@pytest.mark.parametrize(("modes", "warns"), [([True], False), ([True, False], False), ([True, True], True)])
def test_run_of_clients_only_is_warned_about_once(caplog, modes, warns):
    """A lone trainer has no peer to average with."""
    alarm = ClientModeAlarm()
    for _ in range(2):
        alarm.check(modes)
    assert caplog.text.count("trainers are in client mode") == warns


def test_trainer_ends_with_the_run_and_waits_for_the_last_checkpoint(session, clock, monkeypatch):
    asked = []
    others = {b"other": SimpleNamespace(value={})}
    answers = {"run_training_progress": others, "run_monitor": {}}
    monkeypatch.setattr(dht_records, "get_dictionary", lambda dht, key: asked.append(key) or answers[key])
    session.args.ends_at = "2100-01-02T12:30"
    assert session.after_local_step()
    session.leave()
    assert not session.stored["run_trainers"][b"key"].value["leaving"], "it was stopped before the end"
    clock.now = session.args.end_time
    assert not session.after_local_step()
    session.leave()
    assert session.stored["run_trainers"][b"key"].value["leaving"] and asked == [
        "run_training_progress",
        "run_monitor",
    ]


@pytest.mark.parametrize("other", ["left", "trains", "none"])
def test_trainers_that_all_leave_wait_until_a_monitor_has_their_last_step(session, clock, monkeypatch, caplog, other):
    """The monitor's checkpoint was four steps old when everybody had left."""
    saved = iter([5, 8, 9, 9])
    subkey = RSASignatureValidator(RSAPrivateKey()).local_public_key
    reports = {session.peer.public_key: {}, b"other": {} if other == "trains" else None}
    if other == "none":
        del reports[b"other"]

    def read(_dht, key: str) -> dict:
        if key == "run_monitor":
            return {subkey: SimpleNamespace(value={"stores_checkpoints": True, "checkpoint_step": next(saved)})}
        return {name: SimpleNamespace(value=value) for name, value in reports.items()}

    monkeypatch.setattr(dht_records, "get_dictionary", read)
    session.publisher.relay = SimpleNamespace(
        config=SimpleNamespace(organiser=signer_of(subkey)), publish=lambda: None
    )
    session.should_stop = lambda: True
    session.leave()
    assert session.stored["run_trainers"][b"key"].value["leaving"] == (other != "trains")
    assert next(saved, None) == (5 if other == "trains" else 9)


def test_stopped_trainer_waits_for_a_monitor_for_some_seconds_only(session, clock, monkeypatch, caplog):
    subkey = RSASignatureValidator(RSAPrivateKey()).local_public_key
    status = SimpleNamespace(value={"stores_checkpoints": True, "checkpoint_step": 0})
    monkeypatch.setattr(dht_records, "get_dictionary", lambda _, key: {subkey: status} if "monitor" in key else {})
    session.publisher.relay = SimpleNamespace(
        config=SimpleNamespace(organiser=signer_of(subkey)), publish=lambda: None
    )
    session.should_stop, began_at = (lambda: True), clock.now
    session.leave()
    assert clock.now - began_at == LAST_STEP_SECONDS and "No monitor has saved step #9" in caplog.text


@pytest.mark.parametrize("own_limit", [None, 99, 12])
def test_trainer_ends_with_the_schedule(session, clock, monkeypatch, caplog, own_limit):
    """It says so, thanks once, and waits for the last checkpoint, also if its own limit is later."""
    caplog.set_level("INFO")
    monkeypatch.setattr(dht_records, "get_dictionary", lambda dht, key: {})
    session.arguments.training.total_steps, session.args.max_global_steps = 12, own_limit
    session.optimizer.last_step = None
    session.optimizer.share_state = session.optimizer.begin_at = Mock()
    session.optimizer.load_state_from_peers = lambda: True
    session.join()
    assert session.optimizer.last_step == 12, "nobody takes a step beyond it"
    assert session.after_local_step()
    session.steps.append(StepRecord(12, Outcome.AVERAGED, 8))
    session.optimizer.num_computed = 8
    session.status.record_local_step()
    session.optimizer.local_epoch = 12
    assert not session.after_local_step()
    (session.recovery.folder / "checkpoint-12").mkdir(parents=True)
    session.leave()
    assert (
        f"Step #12 is the last of the schedule: the run has ended. The model is in '{session.recovery.folder}"
        in caplog.text
    )
    assert caplog.text.count("Thank you") == 1
    assert session.stored["run_trainers"][b"key"].value["leaving"]


def test_late_trainer_is_told_that_the_run_has_ended(session, monkeypatch, caplog):
    """It has the last state, gave nothing, and is thanked for nothing."""
    caplog.set_level("INFO")
    monkeypatch.setattr(dht_records, "get_dictionary", lambda dht, key: {})
    session.arguments.training.total_steps = 9
    session.args.leave_timeout = 0.0
    assert not session.after_local_step()
    session.leave()
    assert "Step #9 is the last of the schedule: the run has ended." in caplog.text
    assert "Thank you" not in caplog.text


def test_trainer_goes_on_after_the_schedule_if_asked_to(session, monkeypatch):
    others = {b"other": SimpleNamespace(value={})}
    monkeypatch.setattr(dht_records, "get_dictionary", lambda dht, key: others)
    session.arguments.training.total_steps, session.arguments.training.after_last_step = 9, "continue"
    assert session.after_local_step() and session.last_step is None
    session.leave()
    assert not session.stored["run_trainers"][b"key"].value["leaving"]


@pytest.mark.parametrize(
    ("flags", "has_bf16", "remedy"),
    [
        ("fp16", True, "overflow in fp16. Pass --bf16"),
        ("fp16", False, "overflow in fp16. Pass --fp32"),
        ("fp32", True, "check"),
    ],
)
def test_peer_whose_gradients_all_overflow_is_told_what_to_do(session, monkeypatch, caplog, flags, has_bf16, remedy):
    """GradScaler leaves out each local step, and neither the optimizer nor the Trainer hears of it."""
    dtype = torch.float16 if flags == "fp16" else None
    monkeypatch.setattr(recovery, "autocast_dtype", lambda args, device: dtype)
    monkeypatch.setattr(recovery, "supports_bf16", lambda device: has_bf16)
    for _ in range(49):
        session.after_local_step()
    assert "finite gradients" not in caplog.text
    session.after_local_step()
    assert "None of the last 50 local steps had finite gradients" in caplog.text and remedy in caplog.text
    caplog.clear()
    session.optimizer.num_computed += 8
    session.after_local_step()
    for _ in range(49):
        session.after_local_step()
    assert "finite gradients" not in caplog.text


def test_parameters_are_read_once_they_have_changed(session, monkeypatch):
    """The check waits for the GPU and reads all. Local steps between two global ones change none."""
    checks = []
    monkeypatch.setattr(recovery, "all_finite", lambda tensors: checks.append(True) or True)
    for _ in range(10):
        session.after_local_step()
    assert len(checks) == 1
    with torch.no_grad():
        for parameter in session.model.parameters():
            parameter.fill_(1.0)
    for _ in range(10):
        session.after_local_step()
    assert len(checks) == 2


@pytest.fixture
def pausing(session, clock, monkeypatch) -> TrainingSession:
    """A session whose optimizer records pauses in `calls`, and whose clock ends a pause after 400 seconds."""
    monkeypatch.setattr(dht_records, "get_dictionary", lambda dht, key: {})
    session.calls, optimizer = [], session.optimizer
    optimizer.tracker.pause_updates = lambda: session.calls.append("untimed") or nullcontext()
    optimizer.share_state = lambda: session.calls.append("share")
    optimizer.pause = lambda model: session.calls.append("pause")
    optimizer.resume = lambda model, device: session.calls.append(f"resume on {device}")
    optimizer.say_goodbye = lambda: None
    session.pause_rule = SimpleNamespace(find_reason=lambda now: "until --resume" if now < 400.0 else "")
    return session


def test_paused_trainer_stays_in_the_run_and_says_so(pausing, clock, caplog):
    """Its record would expire after --statistics_expiration, 600 seconds."""
    caplog.set_level(logging.INFO)
    said, store = [], pausing.peer.dht.store

    def note(key, value, *args, **options):
        said.append((clock.now, value["paused"]))
        return store(key, value, *args, **options)

    pausing.peer.dht.store = note
    assert pausing.after_local_step()
    times = [now for now, is_paused in said if is_paused]
    assert times[0] == 0.0 and max(b - a for a, b in pairwise([*times, 400.0])) <= 61.0
    assert said[-1] == (400.0, False) and pausing.status.paused == ""
    assert pausing.calls[:2] == ["pause", "untimed"] and pausing.calls[-1] == "resume on cpu"
    assert [r.message for r in caplog.records].count("Paused: until --resume") == 1


def test_trainer_that_is_stopped_while_it_pauses_leaves_the_device_alone(pausing, clock):
    """A game may have all of its memory."""
    pausing.should_stop = lambda: clock.now > 30.0
    assert not pausing.after_local_step() and clock.now < 40.0
    assert pausing.calls[0] == "pause" and "resume on cpu" not in pausing.calls
    assert pausing.status.update().paused == "until --resume"


def test_run_that_ends_meanwhile_ends_a_paused_trainer(pausing, clock, monkeypatch):
    """The organiser's monitor has saved the last step; others may say what they like. The monitor waits for all."""
    pausing.args.max_global_steps = 50
    statuses = {b"monitor": -1, b"stranger": 99}
    monkeypatch.setattr(session_module, "signer_of", lambda subkey: subkey)
    pausing.publisher.relay = SimpleNamespace(config=SimpleNamespace(organiser=b"monitor"), publish=lambda: None)

    def get_dictionary(_dht, key):
        statuses[b"monitor"] = 50 if clock.now > 100.0 else 49
        return {subkey: SimpleNamespace(value={"stores_checkpoints": True, "checkpoint_step": step})
                for subkey, step in statuses.items()}  # fmt: skip

    monkeypatch.setattr(dht_records, "get_dictionary", get_dictionary)
    assert not pausing.after_local_step()
    assert 100.0 < clock.now < 200.0 and "resume on cpu" not in pausing.calls


def test_trainer_that_starts_in_its_pause_computes_nothing_and_can_be_stopped(pausing, clock, monkeypatch):
    monkeypatch.setattr(pausing, "load_newest_state", lambda: True)
    pausing.optimizer.begin_at = lambda step, unsent: None
    pausing.should_stop = lambda: clock.now > 30.0
    with pytest.raises(SystemExit) as stopped:
        pausing.join()
    assert stopped.value.code == 0 and pausing.calls.count("resume on cpu") == 0
