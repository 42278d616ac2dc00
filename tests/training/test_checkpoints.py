"""Checkpoints: a checkpoint is complete or absent, whatever interrupts its write."""

import errno
import fcntl
import itertools
import logging
import math
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_model
from transformers import AlbertForPreTraining

from cotrain.common.atomic_files import lock_folder, new_file, remove_leftovers
from cotrain.common.errors import UserError
from cotrain.monitoring.monitor import CheckpointKeeper
from cotrain.task import Task
from cotrain.training import checkpoints
from cotrain.training.check_machine import check_folders
from cotrain.training.checkpoints import SavedState
from cotrain.training.finding import attempt
from tests.support.engine import CONFIG
from tests.support.fakes import FakeAverager, make_session, make_state
from tests.support.models import build_model

MODEL = build_model(CONFIG, "run")


def save(folder: Path, step: int, **changes) -> Path:
    """Save a checkpoint of a step, perhaps with changes of its state."""
    return checkpoints.save_checkpoint(folder, Task(), MODEL, replace(make_state(step), **changes), {})


def restore(folder: Path) -> SavedState:
    return checkpoints.restore_newest(folder, "run", FakeAverager(step=0))


def names(folder: Path, pattern: str = "*") -> list[str]:
    return sorted(path.name for path in folder.glob(pattern))


def test_full_disk_is_named(tmp_path, monkeypatch):
    """The monitor's warning was "[enforce fail at inline_container.cc:672] . unexpected pos 1216832 vs 1216720"."""
    monkeypatch.setattr(checkpoints, "STATE_FILE", "/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        save(tmp_path, 7)
    assert names(tmp_path) == []


def test_checkpoint_opens_again(tmp_path):
    path = save(tmp_path, 7)
    assert AlbertForPreTraining.from_pretrained(path).config.vocab_size == 1000
    state = restore(tmp_path)
    assert state.step == 7 and torch.equal(state.tensors[0], make_state(7).tensors[0])
    assert torch.load(path / "training_state.pt", weights_only=True)["run_id"] == "run"


class Tied(torch.nn.Module):
    """A model of no library, with tied weights and with statistics."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.norm = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)
        self.last.weight = self.first.weight


def test_weights_of_any_module_open_again_and_are_replaced(tmp_path):
    for step in (7, 7):
        model = Tied()
        model.norm(torch.rand(4, 3))
        path = checkpoints.save_checkpoint(tmp_path, Task(), model, make_state(step), {})
    opened = Tied()
    load_model(opened, path / "model.safetensors")
    assert all(tensor.equal(model.state_dict()[name]) for name, tensor in opened.state_dict().items())
    assert opened.norm.num_batches_tracked == 1 and opened.last.weight is opened.first.weight
    assert names(path) == ["collaboration.json", "model.safetensors", "training_state.pt"]


def test_newest_is_by_step_and_old_ones_are_removed(tmp_path):
    for step in (9, 100, 20):
        save(tmp_path, step)
    assert [path.name for path in checkpoints.list_checkpoints(tmp_path)] == [
        "checkpoint-100", "checkpoint-20", "checkpoint-9"
    ]  # fmt: skip
    checkpoints.rotate_checkpoints(tmp_path / "checkpoint-100", keep=2)
    assert names(tmp_path) == ["checkpoint-100", "checkpoint-20"]


def test_first_checkpoint_of_each_hour_is_kept_within_a_limit(tmp_path):
    """Otherwise two saves of a bad state would remove all good checkpoints."""
    for step in range(24):  # four an hour, for six hours
        state = save(tmp_path, step) / checkpoints.STATE_FILE
        os.utime(state, (3600.0 * 1000 + 900 * step,) * 2)
        checkpoints.rotate_checkpoints(state.parent, keep=2, keep_hourly=3)
    assert names(tmp_path) == [f"checkpoint-{step}" for step in (12, 16, 20, 22, 23)]
    assert restore(tmp_path).step == 23


def test_what_cannot_be_read_is_skipped_and_the_one_before_is_used(tmp_path, caplog):
    for step in range(1, 7):
        save(tmp_path, step)
    newest = {step: tmp_path / f"checkpoint-{step}" / "training_state.pt" for step in range(1, 7)}
    newest[6].write_bytes(newest[6].read_bytes()[:-500])
    newest[5].write_bytes(b"not a checkpoint")
    newest[4].unlink()
    torch.save({"format": 99}, newest[3])
    torch.save({"format": 2, "run_id": "another", "metadata": {"epoch": 2}, "tensors": []}, newest[2])
    assert restore(tmp_path).step == 1
    assert len(caplog.messages) == 5 and all("checkpoint-" in message for message in caplog.messages)


def test_checkpoints_of_a_left_history_are_set_aside_within_a_limit(tmp_path, caplog):
    """Of later steps than the one just written, from before a rollback or on the other side of a divided run."""
    for step in (600, 700):
        save(tmp_path, step)
    for step in (10, 20, 30):
        checkpoints.rotate_checkpoints(save(tmp_path, step), keep=2)
    left = sorted(path.stem for path in tmp_path.glob("checkpoint-*.*"))
    assert names(tmp_path, "*-??") == ["checkpoint-20", "checkpoint-30"] and left == [
        "checkpoint-600",
        "checkpoint-700",
    ]
    (warning,) = caplog.messages
    assert "The run has gone back to step #10: set aside checkpoint-700 as checkpoint-700." in warning
    for step in (25, 15):
        checkpoints.rotate_checkpoints(save(tmp_path, step), keep=2)
    left = sorted(path.stem for path in tmp_path.glob("checkpoint-*.*"))
    assert names(tmp_path, "*-??") == ["checkpoint-15"] and left == ["checkpoint-20", "checkpoint-25"], (
        "the newest two"
    )


UNSENT = torch.full((100, 100), 0.5)


def test_local_updates_that_were_not_sent_are_beside_their_state(tmp_path):
    save(tmp_path, 7, unsent=[UNSENT])
    state = restore(tmp_path)
    assert state.step == 7 and torch.equal(state.unsent[0].float(), UNSENT)
    assert state.unsent[0].dtype == torch.bfloat16, "half of the bytes"
    save(tmp_path, 7)  # without any: they belong to what was replaced
    assert restore(tmp_path).unsent is None


@pytest.mark.parametrize("unsent", [UNSENT * math.nan, UNSENT * math.inf, UNSENT[:, :1]], ids=["NaN", "Inf", "shape"])
def test_local_updates_that_cannot_be_used_cost_one_warning_and_not_the_state(tmp_path, unsent, caplog):
    save(tmp_path, 7, unsent=[unsent])
    state = restore(tmp_path)
    assert state.step == 7 and state.unsent is None
    assert len(caplog.messages) == 1 and "without the updates that were not sent" in caplog.messages[0]


def test_checkpoint_of_another_program_is_not_replaced(tmp_path, caplog):
    """Such as of transformers' Trainer in the same --output_dir."""
    path = tmp_path / "checkpoint-5"
    path.mkdir()
    for name in ("config.json", "trainer_state.json"):
        (path / name).write_text("{}", encoding="utf-8")
    for step in (4, 5, 6):
        checkpoints.rotate_checkpoints(save(tmp_path, step), keep=1)
    aside, kept = names(tmp_path)
    assert aside.startswith("checkpoint-5.") and kept == "checkpoint-6"
    assert (tmp_path / aside / "trainer_state.json").exists() and len(caplog.messages) == 1


def test_file_with_code_in_it_is_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.system, (f"touch {tmp_path}/harm",))

    torch.save({"format": 2, "run_id": "run", "metadata": Evil(), "tensors": []}, tmp_path / "state.pt")
    (tmp_path / "folder").mkdir()  # an error of the system, as for a file without permission
    with pytest.raises(ValueError, match="folder: Is a directory"):
        checkpoints.load_training_state(tmp_path / "folder", "run")
    with pytest.raises(ValueError, match="damaged or incomplete"):
        checkpoints.load_training_state(tmp_path / "state.pt", "run")
    assert not (tmp_path / "harm").exists()


def write_for_ever(folder: Path, step: int, pipe: int) -> None:
    """In a forked process: write checkpoints until it is killed, and a byte to the pipe before each."""
    torch.set_num_threads(1)
    for number in itertools.count(step):
        os.write(pipe, b"x")
        checkpoints.rotate_checkpoints(save(folder, number), keep=2)


@pytest.mark.programs
def test_killed_at_fifty_random_moments_the_newest_checkpoint_is_complete(tmp_path):
    generator, newest = random.Random(0), 0
    save(tmp_path, 0)
    for number in range(50):
        remove_leftovers(tmp_path)
        pipe = reading_end, writing_end = os.pipe()
        if (child := os.fork()) == 0:
            try:
                write_for_ever(tmp_path, newest + 1, writing_end)
            finally:
                os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(1 + number % 2):  # kill it in the first checkpoint, every other time in a later one
            os.read(reading_end, 1)
        time.sleep(generator.uniform(0.005, 0.15))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for end in pipe:
            os.close(end)
        found = checkpoints.list_checkpoints(tmp_path)
        states = [checkpoints.load_training_state(path / checkpoints.STATE_FILE, "run") for path in found]
        assert all((path / "model.safetensors").stat().st_size > 1000 for path in found)
        assert states[0].step >= newest
        newest = states[0].step
    assert newest > 5, "it has written while it was being killed"


@pytest.fixture
def full_disk(tmp_path):
    """Mount a file system of 1 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_full_disk_costs_neither_the_old_checkpoint_nor_the_run(full_disk, caplog):
    session = make_session(full_disk, offered=None)
    session.status.close()
    for step, number, saved in ((1, 1000, [1]), (2, 1_000_000, [1]), (3, 1000, [3, 1])):
        state = {"epoch": step, "statistics": []}, [torch.ones(number)]
        session.optimizer.state_averager.frozen_state = lambda state=state: nullcontext(state)
        session.recovery.save_checkpoint()
        found = checkpoints.list_checkpoints(full_disk)
        assert found == [full_disk / f"checkpoint-{step}" for step in saved], "continues once there is space"
        assert checkpoints.load_training_state(found[0] / checkpoints.STATE_FILE, "run").step == saved[0]
    assert [record.levelname for record in caplog.records if record.levelno > logging.INFO] == ["ERROR"]  # no hint


@pytest.fixture
def keeper(tmp_path) -> Iterator[CheckpointKeeper]:
    """The keeper of a monitor that saves every five steps. Its averager downloads the state of step 5."""
    keeper = CheckpointKeeper(FakeAverager(step=5), Task(), MODEL, "run", tmp_path, 5, (2, 8), pause=0.01)
    yield keeper
    keeper.close()


def update(keeper: CheckpointKeeper, step: int) -> None:
    """Update a keeper with a step, and wait until its work is done."""
    keeper.backoff.reset()  # as if the pause after a failure were over
    keeper.update(step, False, {"one"})
    if keeper.pending is not None:
        keeper.pending.result()


@pytest.mark.parametrize(
    ("step", "leaving", "is_due"), [(-1, False, False), (4, False, False), (5, False, True), (4, True, True)]
)
def test_checkpoint_is_due_every_interval_and_when_trainers_leave(keeper, step, leaving, is_due):
    keeper.restore()  # there is none
    keeper.update(step, leaving, {"one"})
    assert (keeper.pending is not None) == is_due


def test_monitor_offers_its_newest_checkpoint_all_the_time(keeper, tmp_path, caplog):
    for step in (3, 4):
        save(tmp_path, step)
    averager, saved = keeper.averager, []
    averager.step = 4
    keeper.on_saved = lambda step: saved.append((step, (tmp_path / f"checkpoint-{step}").is_dir()))
    keeper.restore()
    assert averager.offered_step == 4
    update(keeper, 10**6)
    assert averager.offered_step == 4, "a step that somebody claims, and whose state nobody has"
    averager.step = 10**6
    update(keeper, 10)
    assert averager.offered_step == keeper.saved_step == averager.local_epoch == 4
    assert "step #1000000, which no trainer has reported; trying again later" in caplog.text
    averager.step = 9
    update(keeper, 9)
    assert averager.offered_step == keeper.saved_step == 9 and saved == [(9, True)]


def test_monitor_saves_what_a_revived_run_does_again(keeper, tmp_path):
    """The trainers are killed after step 17 is reported, and before a state newer than step 10 is saved."""
    save(tmp_path, 10)
    averager = keeper.averager
    keeper.restore()
    for step in range(10, 15):
        averager.step = step
        update(keeper, 17)
        assert averager.offered_step == 10
    averager.step = 15
    update(keeper, 17)
    assert averager.offered_step == 15


MARK, OTHER_MARK = (8, 12 * "a"), (8, 12 * "b")


@pytest.mark.parametrize(
    ("marks", "follows"), [([MARK], True), ([MARK, (16, 12 * "c")], True), ([OTHER_MARK], True), ([], False)]
)
def test_monitor_follows_a_run_that_has_gone_back_unless_it_has_begun_anew(keeper, tmp_path, marks, follows):
    """The run has other marks than the checkpoint if it was divided."""
    averager = keeper.averager
    averager.step, averager.offered_marks = 16, [MARK, (16, 12 * "d")]
    update(keeper, 16)
    averager.step, averager.offered_marks = 15, marks
    update(keeper, 15)
    step = 15 if follows else 16
    assert averager.offered_step == keeper.saved_step == step and names(tmp_path, "*-??") == [f"checkpoint-{step}"]
    assert len(names(tmp_path)) == 1 + follows, "the checkpoint of step 16 is there"
    for averager.step, seen, saved in ((20, 20, 20 if follows else 16), (21, 21, 20 if follows else 21)):
        update(keeper, seen)
        assert averager.offered_step == saved, "every five steps, as before"


def test_second_peer_in_a_folder_is_refused(tmp_path):
    with lock_folder(tmp_path, "--output_dir"):
        refused = pytest.raises(UserError, match="in use by another peer")
        with refused, lock_folder(tmp_path, "--output_dir"):
            pass
    with lock_folder(tmp_path, "--output_dir"):
        pass


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_file_system_without_locks_is_used_after_one_warning(tmp_path, monkeypatch, caplog, number):
    """Such as some network file systems."""
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(number, os.strerror(number))))
    others = tmp_path / f".state.json.{'a' * 12}.new"  # which another process may be filling
    others.mkdir()
    with lock_folder(tmp_path, "--output_dir") as fault:
        remove_leftovers(tmp_path)
        with new_file(tmp_path / "state.json") as path:
            path.write_bytes(b"{}")
    assert (tmp_path / "state.json").read_bytes() == b"{}" and others.exists()
    assert caplog.messages == [fault]
    assert "--output_dir" in fault and f"'{tmp_path}' has no locks: use a local disk" in fault
    found = attempt("folders", partial(check_folders, tmp_path))
    assert found.line.startswith(f"FAILED  folders: {fault}")


@pytest.mark.parametrize("use", [partial(lock_folder, flag="--output_dir"), lambda folder: new_file(folder / "x")])
def test_another_fault_of_a_lock_is_an_error(tmp_path, monkeypatch, use):
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError, match="Input/output error"), use(tmp_path):
        pass
