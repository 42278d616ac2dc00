"""Faults of running peers: signals, killed processes, restarts."""

import os
import re
import signal
from pathlib import Path

import psutil
import pytest
from transformers import AutoModelForPreTraining

from cotrain.common.errors import TEMPORARY
from cotrain.preparation.sources import open_sample
from cotrain.training.checkpoints import STATE_FILE, list_checkpoints, load_training_state
from tests.support.altered import IN_THE_MIDDLE
from tests.support.peers import LONG_STEPS, steps_of, wait_until

# Long enough to interrupt in the middle.
SLOW = steps_of(seconds=8, num_trainers=1)


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    mask = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(encoding="utf-8"), re.MULTILINE)[1]
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("", signal.SIGTERM),  # while Python imports
        ("Joining the collaboration", signal.SIGINT),  # during the search for peers
        ("Local step 1:", signal.SIGTERM),  # while accumulating gradients
    ],
)
def test_signal_at_any_moment_ends_a_trainer_cleanly(scripts, moment, number):
    is_joining = moment.startswith("Joining")
    address = ("--initial_peers", scripts.monitor("--no_store_checkpoints").address) if is_joining else ()
    if not moment:
        scripts.launcher = None  # the launcher would do the imports in advance
    trainer = scripts.trainer("trainer", *address, *SLOW)
    if moment:
        trainer.wait_for(moment)
    else:
        wait_until(lambda: catches(trainer.process.pid, number), 120, "the handler of the signal")
    assert trainer.stop(number) == 0, trainer.output
    trainer.assert_nothing_left()
    assert "Traceback" not in trainer.output


def test_ctrl_c_to_the_whole_group_in_the_middle_of_averaging(scripts):
    monitor = scripts.monitor()
    trainers = [scripts.trainer(name, "--initial_peers", monitor.address, *LONG_STEPS) for name in ("one", "two")]
    for trainer in trainers:
        trainer.wait_for("Beginning optimizer step", 120)
        os.killpg(trainer.process.pid, signal.SIGINT)  # as a terminal sends it
    for trainer in trainers:
        assert trainer.wait() == 0, trainer.output
        trainer.assert_nothing_left()
    os.killpg(monitor.process.pid, signal.SIGINT)
    assert monitor.wait() == 0
    monitor.assert_nothing_left()


def test_ctrl_c_at_a_trainer_with_tee_saves_a_checkpoint(scripts):
    """tee ends at once, and the trainer has nobody to write to."""
    trainer = scripts.trainer("trainer", wrappers=["tests/support/teed.py"])
    trainer.wait_for(r"Step #\d")
    os.killpg(trainer.process.pid, signal.SIGINT)
    assert trainer.wait(60) == 0
    trainer.assert_nothing_left()
    (checkpoint, *_) = list_checkpoints(scripts.folder / "trainer")
    load_training_state(checkpoint / STATE_FILE, "albert")


def test_folder_of_another_run_loses_nothing_and_hinders_nothing(scripts):
    """A volunteer joins a second run in the default folder, is killed, starts again, and returns to the first one."""
    common = ("--backup_every_steps", 1, *steps_of(seconds=0.5, num_trainers=1))
    folder = scripts.folder / "trainer"
    first = scripts.trainer("trainer", *common)
    first.wait_for(r"Step #4\b")
    assert first.stop() == 0
    newest = list_checkpoints(folder)[0].name
    for start in (r"starting with the initial weights[\s\S]*Step #2\b", r"Resumed from a checkpoint at step #\d"):
        second = scripts.trainer("trainer", *common, "--run_id", "second")
        second.wait_for(start)
        second.kill()
        assert list_checkpoints(folder), second.output
    assert list_checkpoints(folder / "other-runs" / "albert")[0].name == newest
    back = scripts.trainer("trainer", *common)
    back.wait_for(f"Resumed from a checkpoint at step #{newest.removeprefix('checkpoint-')}")
    assert back.stop() == 0


def test_signal_in_the_middle_of_saving(scripts):
    """A signal to trainer and monitor during the write of a checkpoint leaves only complete checkpoints."""
    env = {"PAUSE": "1"}
    monitor = scripts.monitor("--save_checkpoint_step_interval", 1, env=env)
    # The trainer runs for ten seconds, and the monitor saves its state
    trainer = scripts.trainer("trainer", "--initial_peers", monitor.address, "--save_steps", 40, env=env)
    for script in (monitor, trainer):
        script.wait_for(IN_THE_MIDDLE)
        folder = scripts.folder / script.log.stem
        assert list(folder.glob(".checkpoint-*.new")) and not list_checkpoints(folder)
        assert script.stop() == 0, script.output
        script.assert_nothing_left()
        assert "Traceback" not in script.output
        assert not list(folder.glob(".checkpoint-*.new"))
        assert list_checkpoints(folder)
        for path in list_checkpoints(folder):
            assert AutoModelForPreTraining.from_pretrained(path).config.vocab_size == 500
            load_training_state(path / STATE_FILE, "albert")


def test_ctrl_c_ends_the_tokenize_script_and_leaves_nothing_half_done(scripts):
    text = scripts.folder / "text.txt"
    lines = list(open_sample().parts["train"][0]()) * 20  # enough to be still at work when the signal comes
    text.write_text("\n".join(lines), encoding="utf-8")
    script = scripts.start(
        "tokenize_wikitext103.py", "--train_file", text, "--train_tokenizer", "--vocab_size", 500, "--max_seq_length",
        32, "--output_path", scripts.folder / "dataset", "--tokenizer_path", scripts.folder / "tokenizer",
        "--cache_dir", scripts.folder / "cache", log="tokenize",
    )  # fmt: skip
    wait_until(lambda: list(scripts.folder.glob("cache/.work.*.new")), 120, "work in hand")
    assert script.stop(signal.SIGINT) == 130
    script.assert_nothing_left()
    assert "Traceback" not in script.output
    assert not (scripts.folder / "dataset").exists() and not (scripts.folder / "tokenizer").exists()
    assert not list(scripts.folder.rglob(".*.new")), "temporary files are removed"


def test_death_of_an_averager_is_noticed(scripts):
    trainer = scripts.trainer("trainer", *SLOW)
    trainer.wait_for("Local step 1:")
    children = [process for process in psutil.Process(trainer.process.pid).children() if "python" in process.name()]
    max(children, key=lambda process: (process.create_time(), process.pid)).kill()
    assert trainer.wait() == TEMPORARY, trainer.output
    assert "The round averager process has died" in trainer.output
    trainer.assert_nothing_left()


def test_killed_monitor_is_found_again_and_loses_no_step(scripts):
    monitor = scripts.monitor("--save_checkpoint_step_interval", 2)
    address = monitor.address
    common = ("--initial_peers", address, *steps_of(seconds=2, num_trainers=1))
    trainer = scripts.trainer("trainer", *common)
    trainer.wait_for(r"Step #2\b", 120)
    monitor.kill()
    missed = max(trainer.steps) + 2
    trainer.wait_for(rf"Step #{missed}\b", 120)

    again = scripts.monitor("--host_maddrs", address.split("/p2p/")[0], "--save_checkpoint_step_interval", 2)
    assert again.address == address
    again.wait_for(rf"Step #{missed + 1}\b", 120)
    newcomer = scripts.trainer("newcomer", *common)
    newcomer.wait_for(r"Joined the collaboration at step #\d+", 120)
    assert int(re.search(r"Joined the collaboration at step #(\d+)", newcomer.output)[1]) >= missed
    recorded = [record["step"] for record in scripts.metrics()]
    assert recorded == list(range(1, len(recorded) + 1)), "none lost, none repeated"
    assert "Traceback" not in trainer.output and trainer.process.poll() is None
