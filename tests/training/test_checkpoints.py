"""Checkpoints: a checkpoint is complete or absent, whatever interrupts its write."""

import errno
import fcntl
import logging
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_model
from transformers import AlbertForPreTraining

from cotrain.common.atomic_files import lock_folder, new_file, remove_leftovers
from cotrain.common.errors import UserError
from cotrain.monitoring.monitor import CheckpointKeeper
from cotrain.task import Task
from cotrain.training import checkpoints
from cotrain.training.check import attempt, check_folders
from run_training_monitor import TrainingMonitorArguments
from tests.support.fakes import FakeAverager, make_session, make_state
from tests.support.models import build_model
from tests.support.swarm import CONFIG


def save(folder: Path, step: int) -> Path:
    return checkpoints.save_checkpoint(folder, Task(), build_model(CONFIG, "run"), make_state(step), {})


def test_checkpoint_opens_again(tmp_path):
    path = save(tmp_path, 7)
    assert AlbertForPreTraining.from_pretrained(path).config.vocab_size == 1000
    state = checkpoints.restore_newest(tmp_path, "run", FakeAverager(step=0))
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
    assert {file.name for file in path.iterdir()} == {"collaboration.json", "model.safetensors", "training_state.pt"}


def test_newest_is_by_step_and_old_ones_are_removed(tmp_path):
    for step in (9, 100, 20):
        save(tmp_path, step)
    assert [path.name for path in checkpoints.list_checkpoints(tmp_path)] == [
        "checkpoint-100", "checkpoint-20", "checkpoint-9"
    ]  # fmt: skip
    checkpoints.rotate_checkpoints(tmp_path / "checkpoint-100", keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-100", "checkpoint-20"]


def test_first_checkpoint_of_each_hour_is_kept_within_a_limit(tmp_path):
    """Otherwise two saves of a bad state would remove all good checkpoints."""
    for step in range(24):  # four an hour, for six hours
        state = save(tmp_path, step) / checkpoints.STATE_FILE
        os.utime(state, (3600.0 * 1000 + 900 * step,) * 2)
        checkpoints.rotate_checkpoints(state.parent, keep=2, keep_hourly=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint-12", "checkpoint-16", "checkpoint-20", "checkpoint-22", "checkpoint-23"
    ]  # fmt: skip
    assert checkpoints.restore_newest(tmp_path, "run", FakeAverager(step=0)).step == 23


def test_what_cannot_be_read_is_skipped_and_the_one_before_is_used(tmp_path, caplog):
    for step in range(1, 7):
        save(tmp_path, step)
    newest = {step: tmp_path / f"checkpoint-{step}" / "training_state.pt" for step in range(1, 7)}
    newest[6].write_bytes(newest[6].read_bytes()[:-500])
    newest[5].write_bytes(b"not a checkpoint")
    newest[4].unlink()
    torch.save({"format": 99}, newest[3])
    torch.save({"format": 2, "run_id": "another", "metadata": {"epoch": 2}, "tensors": []}, newest[2])
    assert checkpoints.restore_newest(tmp_path, "run", FakeAverager(step=0)).step == 1
    assert len(caplog.records) == 5
    assert all("checkpoint-" in record.getMessage() for record in caplog.records)


def set_aside(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("checkpoint-*.*"))


def test_checkpoints_of_a_left_history_are_set_aside_within_a_limit(tmp_path, caplog):
    """Of later steps than the one just written, from before a rollback or on the other side of a divided run."""
    for step in (600, 700):
        save(tmp_path, step)
    for step in (10, 20, 30):
        checkpoints.rotate_checkpoints(save(tmp_path, step), keep=2)
    assert [path.name for path in checkpoints.list_checkpoints(tmp_path)] == ["checkpoint-30", "checkpoint-20"]
    assert set_aside(tmp_path) == ["checkpoint-600", "checkpoint-700"]
    (warning,) = caplog.messages
    assert "The run has gone back to step #10: set aside checkpoint-700 as checkpoint-700." in warning
    checkpoints.rotate_checkpoints(save(tmp_path, 25), keep=2)
    checkpoints.rotate_checkpoints(save(tmp_path, 15), keep=2)
    assert [path.name for path in checkpoints.list_checkpoints(tmp_path)] == ["checkpoint-15"]
    assert set_aside(tmp_path) == ["checkpoint-20", "checkpoint-25"], "the newest two"


def save_unsent(folder: Path, value: float = 0.5, shape: tuple[int, int] = (100, 100), **changes) -> Path:
    """Save a checkpoint of step 7 with local updates. Return their file."""
    state = replace(make_state(7), unsent=[torch.full(shape, value)], **changes)
    path = checkpoints.save_checkpoint(folder, Task(), build_model(CONFIG, "run"), state, {})
    return path / checkpoints.UNSENT_FILE


def restore(folder: Path) -> tuple[int, list[torch.Tensor] | None]:
    state = checkpoints.restore_newest(folder, "run", FakeAverager(step=0))
    return state.step, state.unsent


def test_local_updates_that_were_not_sent_are_beside_their_state(tmp_path):
    save_unsent(tmp_path)
    step, (updates,) = restore(tmp_path)
    assert step == 7 and torch.equal(updates, torch.full((100, 100), 0.5))
    assert updates.dtype == torch.bfloat16, "half of the bytes"
    save(tmp_path, 7)  # without any: they belong to what was replaced
    assert restore(tmp_path) == (7, None)


OF_ANOTHER_HISTORY = {"metadata": {"epoch": 7, "statistics": [], "marks": ((7, "00" * 6),)}}


@pytest.mark.parametrize(
    "other",
    [{"value": float("nan")}, {"value": float("inf")}, {"shape": (100, 1)}, {"run_id": "other"}, OF_ANOTHER_HISTORY],
    ids=["NaN", "Inf", "another shape", "another run", "another history"],
)
def test_local_updates_that_do_not_fit_cost_one_warning_and_not_the_state(tmp_path, other, caplog):
    wrong = save_unsent(tmp_path / "other", **other)
    shutil.copy(wrong, save_unsent(tmp_path))
    assert restore(tmp_path) == (7, None)
    assert len(caplog.messages) == 1 and "unsent_updates.pt" in caplog.messages[0]


@pytest.mark.parametrize("damage", [lambda content: content[:-100], lambda _: b""], ids=["cut off", "empty"])
def test_damaged_local_updates_cost_one_warning_and_not_the_state(tmp_path, damage, caplog):
    path = save_unsent(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    assert restore(tmp_path) == (7, None)
    assert len(caplog.messages) == 1 and "unsent_updates.pt cannot be read" in caplog.messages[0]


def test_checkpoint_of_another_program_is_not_replaced(tmp_path, caplog):
    """Such as of transformers' Trainer in the same --output_dir."""
    path = tmp_path / "checkpoint-5"
    path.mkdir()
    for name in ("config.json", "trainer_state.json"):
        (path / name).write_text("{}", encoding="utf-8")
    for step in (4, 5, 6):
        checkpoints.rotate_checkpoints(save(tmp_path, step), keep=1)
    assert [path.name for path in checkpoints.list_checkpoints(tmp_path)] == ["checkpoint-6"]
    (kept,) = tmp_path.glob("checkpoint-5.*")
    assert (kept / "trainer_state.json").exists() and len(caplog.messages) == 1


def test_file_with_code_in_it_is_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.system, (f"touch {tmp_path}/harm",))

    torch.save({"format": 2, "run_id": "run", "metadata": Evil(), "tensors": []}, tmp_path / "state.pt")
    with pytest.raises(ValueError, match="cannot be read"):
        checkpoints.load_training_state(tmp_path / "state.pt", "run")
    assert not (tmp_path / "harm").exists()


def write_for_ever(folder: Path, first_step: int, pipe: int) -> None:
    """In a forked process: write checkpoints until it is killed, and a byte to the pipe before each."""
    torch.set_num_threads(1)
    model, step = build_model(CONFIG, "run"), first_step
    while True:
        os.write(pipe, b"x")
        path = checkpoints.save_checkpoint(folder, Task(), model, make_state(step), {})
        checkpoints.rotate_checkpoints(path, keep=2)
        step += 1


@pytest.mark.programs
def test_killed_at_fifty_random_moments_the_newest_checkpoint_is_complete(tmp_path):
    generator = random.Random(0)
    save(tmp_path, 0)
    newest = 0
    for number in range(50):
        remove_leftovers(tmp_path)
        reading_end, writing_end = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                write_for_ever(tmp_path, newest + 1, writing_end)
            finally:
                os._exit(1)
        for _ in range(1 + number % 2):  # kill it in the first checkpoint, every other time in a later one
            os.read(reading_end, 1)
        time.sleep(generator.uniform(0.005, 0.15))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading_end)
        os.close(writing_end)
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
        session.save_checkpoint()
        found = checkpoints.list_checkpoints(full_disk)
        assert found == [full_disk / f"checkpoint-{step}" for step in saved], "continues once there is space"
        assert checkpoints.load_training_state(found[0] / checkpoints.STATE_FILE, "run").step == saved[0]
    assert [record.levelname for record in caplog.records if record.levelno > logging.INFO] == ["ERROR"]  # no hint


@pytest.fixture
def keeper(tmp_path) -> Iterator[CheckpointKeeper]:
    """The keeper of a monitor that saves every five steps. Its averager downloads the state of step 5."""
    args = TrainingMonitorArguments(output_dir=str(tmp_path), refresh_period=0.01)
    keeper = CheckpointKeeper(FakeAverager(step=5), Task(), build_model(CONFIG, "run"), "run", args)
    yield keeper
    keeper.close()


def update(keeper: CheckpointKeeper, step: int) -> None:
    """Update a keeper with a step, and wait until its work is done."""
    keeper._backoff.reset()  # as if the pause after a failure were over
    keeper.update(step, trainers_are_leaving=False)
    if keeper._pending is not None:
        keeper._pending.result()


def test_monitor_retries_a_checkpoint_that_could_not_be_written(keeper, tmp_path, monkeypatch, caplog):
    def fail(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path))

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", fail)
        update(keeper, 5)
    assert keeper.saved_step == -1 and list(tmp_path.iterdir()) == []
    assert "trying again later" in caplog.text and "Traceback" not in caplog.text
    update(keeper, 5)
    assert keeper.saved_step == 5
    assert [path.name for path in checkpoints.list_checkpoints(tmp_path)] == ["checkpoint-5"]


@pytest.mark.parametrize(
    ("step", "leaving", "is_due"), [(-1, False, False), (4, False, False), (5, False, True), (4, True, True)]
)
def test_checkpoint_is_due_every_interval_and_when_trainers_leave(keeper, step, leaving, is_due):
    keeper.update(step, leaving)
    assert (keeper._pending is not None) == is_due


def test_monitor_offers_its_newest_checkpoint_all_the_time(keeper, tmp_path):
    for step in (3, 4):
        save(tmp_path, step)
    averager, saved = keeper.averager, []
    averager.step = 4
    keeper.on_saved = lambda step: saved.append((step, (tmp_path / f"checkpoint-{step}").is_dir()))
    keeper.restore()
    assert averager.offered_step == 4
    update(keeper, 4)
    update(keeper, 10**6)
    assert averager.offered_step == 4, "a step that somebody claims, and whose state nobody has"
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
    assert averager.offered_step == keeper.saved_step == step
    assert [path.name for path in checkpoints.list_checkpoints(tmp_path)] == [f"checkpoint-{step}"]
    assert len(list(tmp_path.iterdir())) == 1 + follows, "the checkpoint of step 16 is there"
    averager.step = 20
    update(keeper, 20)
    update(keeper, 21)
    assert averager.offered_step == (20 if follows else 16)
    averager.step = 21
    update(keeper, 21)
    assert averager.offered_step == (20 if follows else 21), "every five steps, as before"


def test_monitor_neither_saves_nor_offers_a_state_far_ahead_of_the_reports(keeper, caplog):
    averager = keeper.averager
    averager.step = 10**6
    keeper.restore()
    update(keeper, 10)
    assert averager.offered_step is None and keeper.saved_step == -1 and averager.local_epoch == 0
    assert "step #1000000, which no trainer has reported" in caplog.text


def test_second_peer_in_a_folder_is_refused(tmp_path):
    with (
        lock_folder(tmp_path, "--output_dir"),
        pytest.raises(UserError, match="in use by another peer"),
        lock_folder(tmp_path, "--output_dir"),
    ):
        pass
    with lock_folder(tmp_path, "--output_dir"):
        pass


@pytest.fixture
def fail_to_lock(monkeypatch):
    """Return a function that makes every later lock fail with an error, as on some network file systems."""

    def fail_to_lock(number: int) -> None:
        def refuse(*_):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(fcntl, "flock", refuse)

    return fail_to_lock


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_file_system_without_locks_is_used_after_one_warning(tmp_path, fail_to_lock, caplog, number):
    fail_to_lock(number)
    others = tmp_path / f".state.json.{'a' * 12}.new"  # which another process may be filling
    others.mkdir()
    with lock_folder(tmp_path, "--output_dir") as fault:
        remove_leftovers(tmp_path)
        with new_file(tmp_path / "state.json") as path:
            path.write_bytes(b"{}")
    assert (tmp_path / "state.json").read_bytes() == b"{}" and others.exists()
    (warning,) = caplog.messages
    caplog.clear()
    assert warning == fault and "--output_dir" in warning and f"'{tmp_path}' has no locks: use a local disk" in warning
    found = attempt("folders", partial(check_folders, tmp_path))
    assert found.line.startswith(f"FAILED  folders: {fault}")


def test_another_fault_of_a_lock_is_an_error(tmp_path, fail_to_lock):
    fail_to_lock(errno.EIO)
    with pytest.raises(OSError, match="Input/output error"), lock_folder(tmp_path, "--output_dir"):
        pass
    with pytest.raises(OSError, match="Input/output error"), new_file(tmp_path / "state.json"):
        pass
