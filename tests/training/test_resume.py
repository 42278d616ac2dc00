"""A trainer resumes from its checkpoint without a difference: weights, LAMB's statistics, losses.

It computes the same losses on a GPU as on a CPU, and in mixed precision about the same.
"""

import contextlib
from pathlib import Path

import pytest
import torch
from datasets import Dataset

import run_custom_trainer
import run_trainer
from cotrain.common.signals import StopSignal
from cotrain.dht.metrics_schema import StepMetrics
from cotrain.options import TrainerOptions
from cotrain.status.status import read_status
from cotrain.training import session, workload
from cotrain.training.checkpoints import list_checkpoints
from cotrain.training.publisher import Publisher
from cotrain.training.recovery import Recovery
from cotrain.training.session import TrainingSession
from peerstep.step.coordinator import StepRecord
from tests.support.engine import CONFIG, make_batch
from tests.support.fakes import FakeTask, make_arguments
from tests.support.models import build_model
from tests.support.peers import local_peer
from tests.support.state import flat, snapshot

SIZE = 8  # samples of the dataset, of a local step and of a global step: all steps use the same samples
# Relative, of a loss, which falls by about 1 % in four steps. On a CPU bf16 changes a loss by 2e-5.
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-4, "fp16": 5e-4}
SETUPS = [
    ("cpu", "bf16"),
    *(pytest.param("cuda", precision, marks=pytest.mark.gpu) for precision in ("fp32", "bf16", "fp16")),
]
STATISTICS = ("adam_norm", "exp_avg", "exp_avg_sq", "step", "trust_ratio", "weight_norm")


class Recorder(TrainingSession):
    """Records the initial training state, and the training state and loss of each global step."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.publisher.report, self.recovery.save_checkpoint = self.report, self.save_checkpoint
        self.states: dict[int, tuple[dict, list[torch.Tensor]]] = {}
        self.weights: dict[int, list[torch.Tensor]] = {}
        self.begun_with = self.kept = torch.zeros(0)  # local updates, at the start and at the newest save

    def join(self) -> None:
        super().join()
        self.first_step = self.optimizer.local_epoch
        self.begun_with = self.local_changes()
        self.record()

    def report(self, record: StepRecord) -> StepMetrics:
        metrics = Publisher.report(self.publisher, record)
        self.record()
        return metrics

    def record(self) -> None:
        step = self.optimizer.local_epoch
        self.states[step] = snapshot(self.optimizer.state_averager)
        self.weights[step] = [parameter.detach().clone() for parameter in self.model.parameters()]

    def save_checkpoint(self) -> None:
        self.kept = self.local_changes()
        Recovery.save_checkpoint(self.recovery)

    def local_changes(self) -> torch.Tensor:
        """Return how far the model is from the parameters of its step."""
        averager = self.optimizer.state_averager
        return flat(averager.main_parameters) - flat(averager.layout.parameters)

    @property
    def losses(self) -> dict[int, float]:
        return {entry.step: entry.loss / entry.mini_steps for entry in self.publisher.history}


def run(patch: pytest.MonkeyPatch, script, peer, args: TrainerOptions, size: int, num_devices: int = 1) -> None:
    """Run a trainer script with a peer and some samples, on the CPU or on GPUs."""
    dataset = Dataset.from_dict({name: values.tolist() for name, values in make_batch(size=size).items()})
    device = torch.device("cpu" if args.training.use_cpu else "cuda")
    loaded = workload.Workload(FakeTask(), dataset, build_model(CONFIG, "run"), device, num_devices)
    patch.setattr(workload, "load_workload", lambda _args: loaded)
    patch.setattr("cotrain.peer.peer.open_peer", lambda *_args: contextlib.nullcontext(peer))
    patch.setattr("peerstep.local_peer.exit_after", lambda *_args: None)
    with StopSignal() as stop:
        script.train(args, stop)


def train(
    folder: Path, until: int, script, device: str = "cpu", precision: str = "fp32", is_sparse: bool = False
) -> Recorder:
    """Train a single peer until a global step, from the checkpoint in `folder` if there is one, and write another.

    :param script: run_trainer or run_custom_trainer
    :param device: "cpu", or "cuda" for all GPUs that the script uses
    :param is_sparse: whether rounds take a part of local updates
    """
    num_devices = torch.cuda.device_count() if device == "cuda" and script is run_trainer else 1
    training = {
        "per_device_train_batch_size": SIZE // num_devices // 2, "gradient_accumulation_steps": 2,
        "use_cpu": device == "cpu", "save_steps": 10**6, "learning_rate": 0.01, "warmup_steps": 0, "total_steps": 1000,
        "max_grad_norm": 0.0, precision: True, "local_updates": is_sparse,
    }  # fmt: skip
    args = make_arguments(
        folder, training, run_id="run", max_global_steps=until, leave_timeout=0.0, target_batch_size=SIZE,
        delay_grad_averaging=False, delay_optimizer_step=False,
        gradient_compression="topk" if is_sparse else "float16",
    )  # fmt: skip
    recorders = []
    with pytest.MonkeyPatch.context() as patch, local_peer(folder, "run") as peer:
        patch.setattr(session, "TrainingSession", lambda *args: recorders.append(Recorder(*args)) or recorders[0])
        run(patch, script, peer, args, SIZE, num_devices)
    return recorders[0]


def assert_close(recorder: Recorder, other: Recorder) -> None:
    """Assert that two trainers have the same last state up to rounding."""
    for one, two in zip(recorder.states[max(recorder.states)][1], other.states[max(other.states)][1], strict=True):
        if one.ndim:  # norms derive from the rest; that of a gradient which is zero up to rounding is arbitrary
            assert torch.allclose(one, two, rtol=1e-3, atol=1e-5)


@pytest.mark.peers
@pytest.mark.parametrize("script", [run_trainer, run_custom_trainer])
def test_resumed_training_equals_one_that_was_not_interrupted(tmp_path, script):
    whole = train(tmp_path / "whole", 4, script)
    before = train(tmp_path / "resumed", 2, script)
    after = train(tmp_path / "resumed", 4, script)
    assert (whole.first_step, before.first_step, after.first_step) == (0, 0, 2)
    (metadata, tensors), (saved_metadata, saved_tensors) = after.states[2], before.states[2]
    assert metadata["epoch"] == saved_metadata["epoch"]
    for one, two in zip([*tensors, *after.weights[2]], [*saved_tensors, *before.weights[2]], strict=True):
        assert torch.equal(one, two)
    # One run may have more local steps of the same samples per global step than the other: equal except for rounding.
    assert [*(before.losses | after.losses)] == [*whole.losses] == [1, 2, 3, 4]
    assert before.losses | after.losses == pytest.approx(whole.losses, rel=1e-4)
    assert whole.losses[4] < whole.losses[1] - 1e-3, "or else there is nothing to compare"
    assert [path.name for path in list_checkpoints(tmp_path / "resumed")] == ["checkpoint-4", "checkpoint-2"]
    saved = torch.load(tmp_path / "resumed" / "checkpoint-4" / "training_state.pt")
    assert saved.keys() == {"format", "run_id", "metadata", "tensors"} and saved["format"] == 2
    assert saved["metadata"].keys() == {"epoch", "statistics", "marks"}
    assert saved["metadata"]["statistics"] == [*STATISTICS] * len(whole.weights[4])
    assert_close(after, whole)
    status = read_status(tmp_path / "whole")
    assert (status.step, status.joined, status.missed) == (4, 4, 0) and status.applied >= 4 * SIZE
    assert status.ended_at is not None and status.loss is not None


@pytest.mark.peers
def test_what_sparse_rounds_have_not_taken_is_resumed(tmp_path):
    before = train(tmp_path, 2, run_custom_trainer, is_sparse=True)
    after = train(tmp_path, 3, run_custom_trainer, is_sparse=True)
    assert after.first_step == 2
    (_, begun), (_, saved), (_, moved) = after.states[2], before.states[2], after.states[3]
    assert all(map(torch.equal, begun, saved)), "the parameters of the step are as they were"
    assert before.kept.norm() > 0.5 * (flat(moved) - flat(saved)).norm(), "or else there is nothing to keep"
    assert (after.begun_with - before.kept).norm() < 0.01 * before.kept.norm()


@pytest.mark.peers
def test_both_scripts_take_the_same_steps(tmp_path):
    assert_close(train(tmp_path / "trainer", 2, run_trainer), train(tmp_path / "custom", 2, run_custom_trainer))


@pytest.mark.peers
@pytest.mark.parametrize(("device", "precision"), SETUPS)
@pytest.mark.parametrize("script", [run_trainer, run_custom_trainer])
def test_training_resumes_on_another_device_and_in_another_precision(tmp_path, script, device, precision):
    reference = train(tmp_path / "reference", 4, script)
    before = train(tmp_path / "trainer", 2, script, device, precision)
    after = train(tmp_path / "trainer", 3, script)
    last = train(tmp_path / "trainer", 4, script, device, precision)
    assert (before.first_step, after.first_step, last.first_step) == (0, 2, 3)
    losses = before.losses | after.losses | last.losses
    assert losses == pytest.approx(reference.losses, rel=TOLERANCE[precision])
    assert reference.losses[4] < reference.losses[1] * 0.995, "or else there is nothing to compare"
