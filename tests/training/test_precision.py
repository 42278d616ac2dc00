"""A trainer computes the same losses on a GPU as on a CPU, and in mixed precision about the same."""

import pytest

import run_custom_trainer
import run_trainer
from tests.training.test_resume import train

# Relative, of a loss, which falls by 1.4 % in five steps. On a CPU bf16 changes a loss by 2e-5.
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-4, "fp16": 5e-4}
SETUPS = [
    ("cpu", "bf16"),
    *(pytest.param("cuda", precision, marks=pytest.mark.gpu) for precision in ("fp32", "bf16", "fp16")),
]

pytestmark = [
    pytest.mark.peers,
    pytest.mark.parametrize(("device", "precision"), SETUPS),
    pytest.mark.parametrize("script", [run_trainer, run_custom_trainer]),
]


def test_losses_are_those_of_the_cpu(tmp_path, script, device, precision):
    reference = train(tmp_path / "reference", 5, script)
    trainer = train(tmp_path / "trainer", 5, script, device, precision)
    assert [*trainer.losses] == [1, 2, 3, 4, 5]
    assert trainer.losses == pytest.approx(reference.losses, rel=TOLERANCE[precision])
    assert reference.losses[5] < reference.losses[1] * 0.99, "or else there is nothing to compare"


def test_training_resumes_on_another_device_and_in_another_precision(tmp_path, script, device, precision):
    reference = train(tmp_path / "reference", 4, script)
    before = train(tmp_path / "trainer", 2, script, device, precision)
    after = train(tmp_path / "trainer", 3, script)
    last = train(tmp_path / "trainer", 4, script, device, precision)
    assert (before.first_step, after.first_step, last.first_step) == (0, 2, 3)
    losses = before.losses | after.losses | last.losses
    assert losses == pytest.approx(reference.losses, rel=TOLERANCE[precision])
