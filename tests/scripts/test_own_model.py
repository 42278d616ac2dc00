"""A run whose model, samples, loss and metrics are in a file of one's own, with the real scripts."""

import re
from pathlib import Path

import pytest
import torch

from cotrain.tasks.task_loading import build_initial_model, read_task
from cotrain.training.checkpoints import list_checkpoints
from tests.support.peers import read_jsonl, wait_until
from tests.support.processes import ROOT

DIGITS = ROOT / "examples" / "digits.py"
STEPS, TARGET, LEARNING_RATE = 24, 512, 0.01
# The run has samples in another order than one process, and rounds of one or two trainers.
MARGIN = 0.05


def accuracy_of_one_process(num_samples: int) -> float:
    """Return the accuracy after as many samples in as many steps without peers."""
    task = read_task(DIGITS)
    model, samples = build_initial_model(task, "albert"), task.load_samples("train")
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.01)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        batch = samples[torch.randint(len(samples), (num_samples // STEPS,), generator=generator)]
        optimizer.zero_grad()
        task.compute_loss(model, batch).backward()
        optimizer.step()
    with torch.inference_mode():
        return task.evaluate(model, task.load_samples("validation")[:])["accuracy"].item()


def newest_checkpoint(folder: Path) -> int:
    return max((int(path.name.rpartition("-")[2]) for path in list_checkpoints(folder)), default=0)


@pytest.mark.early
def test_digits_survive_the_loss_of_all_trainers_and_are_learnt_as_by_one_process(scripts):
    """The second trainer comes later, is slower, and has a training loop of its own."""
    settings = ("--task", DIGITS, "--target_batch_size", TARGET, "--optimizer", "adamw", "--adam_epsilon", 1e-8,
                "--learning_rate", LEARNING_RATE, "--warmup_steps", 0, "--metadata_expiration", 10)  # fmt: skip
    monitor = scripts.monitor(*settings, "--save_checkpoint_step_interval", 1)
    folder, joins = scripts.folder / "monitor", ("--initial_peers", monitor.address)
    common = (*settings, *joins, "--per_device_train_batch_size", 32, "--matchmaking_time", 4, "--seed", 1,
              "--statistics_expiration", 20, "--max_global_steps", STEPS)  # fmt: skip
    evaluator = scripts.start(
        "run_evaluator.py", "--task", DIGITS, *joins, "--output_dir", scripts.folder / "evaluator",
        "--evaluation_steps", 1, "--refresh_period", 0.5, "--max_global_steps", STEPS, log="evaluator",
    )  # fmt: skip
    one = scripts.trainer("one", *common, pace=0.06)
    monitor.wait_for(r"Step #1\t")
    two = scripts.trainer("two", *common, name_of_script="run_custom_trainer.py", pace=0.12)
    two.wait_for("Averaged gradients with 2 peers")
    two.kill()
    before = newest_checkpoint(folder)
    wait_until(lambda: newest_checkpoint(folder) > before, 120, "a checkpoint after the loss of one trainer")
    one.kill()
    saved = newest_checkpoint(folder)
    assert 1 <= saved < STEPS - 2

    newcomer = scripts.trainer("newcomer", *common, pace=0.06)
    joined = int(newcomer.wait_for(r"Joined the collaboration at step #(\d+)")[1])
    assert joined >= saved
    assert newcomer.wait() == 0, newcomer.output
    assert evaluator.wait() == 0, evaluator.output
    evaluations = read_jsonl(scripts.folder / "evaluator" / "evaluations.jsonl")
    assert evaluations[-1]["step"] >= STEPS
    assert monitor.stop() == 0
    assert "Traceback" not in "".join(script.output for script in (monitor, evaluator, newcomer, one, two))
    assert re.search(r"Step #\d+\tvalidation loss = [\d.]+\tvalidation accuracy = [\d.]+", evaluator.output)
    assert set(evaluations[-1]) == {"step", "validation loss", "validation accuracy", "time"}
    num_samples = sum(record["samples"] for record in read_jsonl(folder / "metrics.jsonl"))
    expected = accuracy_of_one_process(num_samples)
    reached = evaluations[-1]["validation accuracy"]
    print(f"{num_samples} samples: {reached:.3f}, one process {expected:.3f}")
    assert reached > expected - MARGIN, (reached, expected, num_samples)
