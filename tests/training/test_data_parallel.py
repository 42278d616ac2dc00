"""Mixed precision in a trainer with several GPUs; without GPUs, two fake devices take their place."""

import pytest
import torch

from lib.training.hf_trainer import AutocastDataParallel
from lib.training.model import build_model, enable_gradient_checkpointing
from tests.support.devices import record_precision, use_two_fake_devices
from tests.support.fakes import make_batch
from tests.support.swarm import CONFIG
from tests.training.test_hf_trainer import build_trainer


def train_one_step(tmp_path, device: str = "cpu", **options) -> tuple[float, list[tuple[int, torch.dtype | None]]]:
    """Train one step of eight samples with a micro-batch of four for each of two devices.

    :param options: of TrainingArguments
    :returns: the loss, and the threads and precisions of the calls of one layer
    """
    trainer = build_trainer(tmp_path, per_device_train_batch_size=4, use_cpu=device == "cpu", **options)
    model, meter = trainer.model, trainer.loss_meter
    calls = record_precision(model.predictions.dense)
    trainer.train()
    assert trainer.accelerator.unwrap_model(trainer.model_wrapped) is model, "checkpoints have the model itself"
    return meter.pop()[0], calls


def test_two_devices_compute_in_the_requested_precision(tmp_path, monkeypatch):
    use_two_fake_devices(monkeypatch)
    full_loss, full_calls = train_one_step(tmp_path)
    loss, calls = train_one_step(tmp_path, bf16=True)
    for recorded, dtype in ((full_calls, None), (calls, torch.bfloat16)):
        assert len({thread for thread, _ in recorded}) == 2
        assert [used for _, used in recorded] == [dtype] * 2
    assert loss == pytest.approx(full_loss, rel=0.01) and loss != full_loss


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_threads_take_the_given_dtype_and_not_the_default(dtype, monkeypatch):
    """The default is bfloat16 on the CPU and float16 on GPUs."""
    use_two_fake_devices(monkeypatch)
    model = build_model(CONFIG, "run")
    calls = record_precision(model.predictions.dense)
    losses = AutocastDataParallel(model, dtype)(**make_batch(size=8))["loss"]
    assert losses.shape == (2,) and losses.isfinite().all()
    assert [used for _, used in calls] == [dtype] * 2


def test_gradient_checkpointing_recomputes_in_the_same_precision(monkeypatch):
    use_two_fake_devices(monkeypatch)
    model = build_model(CONFIG, "run")
    enable_gradient_checkpointing(model.train())
    calls = record_precision(model.albert.encoder.albert_layer_groups[0].albert_layers[0].ffn)
    AutocastDataParallel(model, torch.float16)(**make_batch(size=8))["loss"].mean().backward()
    num_calls = 2 * CONFIG.num_hidden_layers * 2  # devices; forward and again in the backward pass
    assert [used for _, used in calls] == [torch.float16] * num_calls
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_two_gpus_compute_in_the_requested_precision(precision, tmp_path):
    flags = {} if precision == "fp32" else {precision: True}
    expected = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    loss, calls = train_one_step(tmp_path, "cuda", **flags)
    assert len({thread for thread, _ in calls}) == torch.cuda.device_count()
    assert {used for _, used in calls} == {expected}
    reference, _ = train_one_step(tmp_path)
    assert loss == pytest.approx(reference, rel=0.01)
