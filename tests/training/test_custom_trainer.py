"""The custom training loop in the same run as the Trainer."""

import time

import torch

from lib.training.checkpoints import load_training_state
from tests.support.peers import LONG_STEPS, join_together, read_jsonl

# Without compression, so that the parameters can be compared to rounding errors.
COMMON = (*LONG_STEPS, "--gradient_compression", "none", "--state_compression", "none", "--backup_every_steps", 1,
          "--max_global_steps", 5, "--leave_timeout", 0)  # fmt: skip


def watch_backups(trainers, run_id: str, seconds: float) -> dict[str, dict[int, torch.Tensor]]:
    """Collect the parameters of each trainer after each global step, from its backups, until all have ended."""
    seen = {trainer.log.stem: {} for trainer in trainers}
    deadline = time.monotonic() + seconds
    while any(trainer.process.poll() is None for trainer in trainers):
        assert time.monotonic() < deadline, [trainer.output for trainer in trainers]
        for trainer in trainers:
            path = trainer.log.with_suffix("") / "backup.pt"
            if path.exists():
                state = load_training_state(path, run_id)
                statistics = [entry for entry in state.metadata["optimizer_metadata"] if entry["type"] == "tensor"]
                parameters = state.tensors[: -len(statistics)]
                seen[trainer.log.stem].setdefault(state.step, torch.cat([tensor.flatten() for tensor in parameters]))
        time.sleep(0.1)
    return seen


def averaged_together(trainer) -> set[int]:
    """Return the global steps that a trainer averaged with the other one."""
    rounds = read_jsonl(trainer.log.with_suffix("") / "rounds.jsonl")
    return {entry["step"] for entry in rounds if entry["outcome"] == "averaged" and len(entry["group"]) == 2}


def test_custom_loop_and_trainer_have_the_same_parameters_after_each_step(scripts):
    monitor = scripts.monitor("--no_store_checkpoints")
    common = ("--initial_peers", monitor.address, *COMMON)
    custom = scripts.trainer("custom", *common, name_of_script="run_custom_trainer.py")
    trainer = scripts.trainer("trainer", *common, "--gradient_accumulation_steps", 2)
    join_together(custom, trainer)
    seen = watch_backups((custom, trainer), "albert", 300)
    for script in (custom, trainer):
        assert script.process.returncode == 0, script.output
        script.assert_nothing_left()
        assert "Traceback" not in script.output and "ERROR" not in script.output
    together = averaged_together(custom) & averaged_together(trainer)
    same = [0]
    for step in sorted(seen["custom"].keys() & seen["trainer"].keys()):
        one, other = seen["custom"][step], seen["trainer"][step]
        is_same = (one - other).norm() < 1e-4 * one.norm()
        # On a busy machine a trainer may miss a step; parameter averaging makes the trainers equal again.
        assert is_same or step not in together or same[-1] != step - 1, f"step {step}"
        if is_same and step > 0:
            same.append(step)
    assert len(same) >= 3, (same, together)  # a backup is skipped during the write of the previous one
