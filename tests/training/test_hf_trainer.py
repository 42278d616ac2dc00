"""The Trainer: losses and gradients, order of samples per peer, and valid checkpoints."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from torch.optim import SGD
from torch.utils._pytree import tree_map
from torch.utils.data import TensorDataset
from transformers import TrainingArguments

from arguments import LocalTrainingArguments
from cotrain.common.errors import UserError
from cotrain.models.device import choose_kernels, enable_gradient_checkpointing
from cotrain.status.loss_meter import LossMeter
from cotrain.task import Task
from cotrain.training.hf_trainer import (
    CollaborativeTrainer,
    PeerSampler,
    TaskLoss,
    autocast_dtype,
    build_training_arguments,
    choose_devices,
)
from cotrain.training.needs import set_batch_size
from tests.support.engine import CONFIG, make_batch
from tests.support.fakes import FakeTask, make_arguments
from tests.support.models import build_model


def build_trainer(
    folder: Path, sampler=None, *, model=None, samples=None, task=None, **options
) -> CollaborativeTrainer:
    """Build a trainer of eight samples, whose optimizer changes nothing. It records its gradients and micro-batches.

    :param sampler: orders the samples, of which there may be another number
    :param options: of TrainingArguments
    """
    sampler = sampler or PeerSampler(range(8), "peer", 0)
    batch = make_batch(size=sampler.order.starts[-1])
    options = {
        "per_device_train_batch_size": 8, "report_to": "none", "use_cpu": True, "max_steps": 1, "max_grad_norm": 0.0,
        "remove_unused_columns": False, "disable_tqdm": True, "save_strategy": "no", **options,
    }  # fmt: skip
    model = (model or build_model(CONFIG, "run")).to("cpu" if options["use_cpu"] else "cuda")
    trainer = CollaborativeTrainer(
        model=model,
        args=TrainingArguments(output_dir=str(folder), **options),
        samples=samples or Dataset.from_dict({name: values.tolist() for name, values in batch.items()}),
        task=task or FakeTask(),
        optimizer=SGD(model.parameters(), lr=0.0),
        sampler=sampler,
        loss_meter=LossMeter(),
    )
    trainer.gradients, trainer.losses = [], []

    def record_step(*_) -> None:
        trainer.gradients.append(
            torch.cat([p.grad.flatten().clone() for p in model.parameters() if p.grad is not None])
        )
        trainer.losses.append(trainer.loss_meter.pop())

    trainer.optimizer.register_step_pre_hook(record_step)
    return trainer


def train_one_step(tmp_path, batch_size: int, accumulation: int) -> tuple[float, torch.Tensor]:
    """Return the reported loss and the gradients of one step over the same eight samples."""
    trainer = build_trainer(
        tmp_path, per_device_train_batch_size=batch_size, gradient_accumulation_steps=accumulation, logging_steps=1
    )
    trainer.train()
    ((loss, mini_steps),) = trainer.losses
    assert mini_steps == accumulation
    logged = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    assert logged == pytest.approx(loss / mini_steps, rel=1e-3)
    return loss / mini_steps, trainer.gradients[0]


def test_accumulation_changes_neither_loss_nor_gradients(tmp_path, monkeypatch):
    monkeypatch.setattr(Accelerator, "clip_grad_norm_", lambda *_, **__: pytest.fail("computed for the log alone"))
    loss_of_one, gradients_of_one = train_one_step(tmp_path, batch_size=8, accumulation=1)
    loss_of_four, gradients_of_four = train_one_step(tmp_path, batch_size=2, accumulation=4)
    assert loss_of_one == pytest.approx(math.log(1000) + math.log(2), rel=0.03)
    assert loss_of_four == pytest.approx(loss_of_one, rel=1e-5)
    assert torch.allclose(gradients_of_one, gradients_of_four, atol=1e-6)


def test_same_seed_gives_the_same_order_and_another_one_does_not():
    """Peers and passes are in tests/data/test_shards.py."""
    one, same, other = (list(PeerSampler(range(100), "peer", seed)) for seed in (42, 42, 43))
    assert one == same != other


@pytest.mark.parametrize(
    ("length", "batch_size_per_step", "expected"), [(100, 8, 96), (96, 8, 96), (5, 8, 8), (3, 8, 8)]
)
def test_pass_is_a_multiple_of_a_local_step(length, batch_size_per_step, expected):
    sampler = PeerSampler(range(length), "peer", 0, batch_size_per_step)
    order = list(sampler)
    assert len(order) == len(sampler) == expected
    counts = [order.count(sample) for sample in range(length)]
    assert max(counts) - min(counts) <= 1, "none is left out for another that comes twice"


@pytest.mark.parametrize(
    ("length", "position", "steps", "passes"),
    [(10, None, 3, 2), (6, None, 3, 2), (32, "[2, 24, 32, 1]", 5, 3)],
    ids=["a micro-batch too many", "fewer than a local step has", "resumes in a pass"],
)
def test_each_local_step_has_all_its_micro_batches(tmp_path, length, position, steps, passes):
    """Steps have four micro-batches of two. The Trainer ends after two passes, as it counts them, in the last case."""
    if position is not None:
        (tmp_path / "samples.json").write_text(position, encoding="utf-8")
    sampler = PeerSampler(range(length), "peer", 0, batch_size_per_step=8, path=tmp_path / "samples.json")
    trainer = build_trainer(
        tmp_path, sampler, per_device_train_batch_size=2, gradient_accumulation_steps=4,
        max_steps=6 if position else 3, dataloader_drop_last=True,
    )  # fmt: skip
    trainer.train()
    assert [mini_steps for _, mini_steps in trainer.losses] == [4] * steps and sampler.passes == passes


def test_loss_meter_skips_what_is_not_finite():
    meter = LossMeter()
    for loss in (1.0, float("nan"), 2.0, float("inf")):
        meter.add(torch.tensor(loss))
    meter.add(torch.tensor([2.0, 4.0]))  # one value for each of two devices
    assert meter.pop() == (6.0, 3)
    assert meter.pop() == (0.0, 0)


def test_precision_without_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    with pytest.raises(UserError, match="--fp16"):
        autocast_dtype(LocalTrainingArguments(fp16=True))
    assert autocast_dtype(LocalTrainingArguments()) is None
    args = build_training_arguments(LocalTrainingArguments(bf16=True, output_dir=str(tmp_path)), "peer")
    assert args.bf16 and args.device.type == "cpu"


# Several GPUs; without GPUs, two fake devices take their place


def use_two_fake_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers use DataParallel, and DataParallel compute on the CPU as it does on two GPUs.

    As with GPUs, two threads compute half of the samples each, with the default dtype of autocast.
    """
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    monkeypatch.setattr(torch.nn.DataParallel, "forward", _forward)
    monkeypatch.setattr(torch.nn.DataParallel, "parallel_apply", _parallel_apply)


def _forward(data_parallel: torch.nn.DataParallel, batch: dict | list) -> torch.Tensor:
    halves = [(tree_map(lambda values, index=index: values.chunk(2)[index], batch),) for index in (0, 1)]
    return torch.stack(data_parallel.parallel_apply([data_parallel.module] * 2, halves, [{}] * 2))


def _parallel_apply(_data_parallel, modules: list, inputs: list[tuple], kwargs: list[dict]) -> list:
    is_enabled, both_run = torch.is_autocast_enabled("cpu"), threading.Barrier(2)

    def apply_one(module, inputs: tuple, kwargs: dict):
        both_run.wait()
        with torch.amp.autocast("cpu", enabled=is_enabled):
            return module(*inputs, **kwargs)

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(apply_one, modules, inputs, kwargs))


def record_precision(layer: torch.nn.Module) -> list[tuple[int, torch.dtype | None]]:
    """Record the thread and the dtype of autocast of each call of a layer; None without autocast."""
    calls = []

    def record(_layer, _inputs, output: torch.Tensor) -> None:
        device_type = output.device.type
        is_enabled = torch.is_autocast_enabled(device_type)
        calls.append((threading.get_ident(), torch.get_autocast_dtype(device_type) if is_enabled else None))

    layer.register_forward_hook(record)
    return calls


def train_on_devices(tmp_path, device: str = "cpu", **options) -> tuple[float, list[tuple[int, torch.dtype | None]]]:
    """Train one step of eight samples with a micro-batch of four for each of two devices.

    :param options: of TrainingArguments
    :returns: the loss, and the threads and precisions of the calls of one layer
    """
    trainer = build_trainer(tmp_path, per_device_train_batch_size=4, use_cpu=device == "cpu", **options)
    calls = record_precision(trainer.model.model.predictions.dense)
    trainer.train()
    return trainer.losses[0][0], calls


def test_two_devices_compute_in_the_requested_precision(tmp_path, monkeypatch):
    use_two_fake_devices(monkeypatch)
    full_loss, full_calls = train_on_devices(tmp_path)
    loss, calls = train_on_devices(tmp_path, bf16=True)
    for recorded, dtype in ((full_calls, None), (calls, torch.bfloat16)):
        assert len({thread for thread, _ in recorded}) == 2
        assert [used for _, used in recorded] == [dtype] * 2
    assert loss == pytest.approx(full_loss, rel=0.01) and loss != full_loss


class Attribute(Task):
    """A task whose loss uses a part of the model, which DataParallel hides, and whose batches are lists."""

    def compute_loss(self, model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        inputs, targets = batch
        return torch.nn.functional.mse_loss(model.head(inputs), targets)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_any_task_trains_on_one_device_or_two(tmp_path, monkeypatch, num_devices):
    if num_devices == 2:
        use_two_fake_devices(monkeypatch)
    model = torch.nn.ModuleDict({"head": torch.nn.Linear(1, 1)})
    model.head = model["head"]
    torch.nn.init.zeros_(model.head.weight)
    torch.nn.init.zeros_(model.head.bias)
    samples, options = (
        TensorDataset(torch.arange(8.0).view(8, 1), torch.ones(8, 1)),
        {"gradient_accumulation_steps": 2},
    )
    trainer = build_trainer(
        tmp_path,
        model=model,
        samples=samples,
        task=Attribute(),
        per_device_train_batch_size=4 // num_devices,
        **options,
    )
    trainer.train()
    assert trainer.losses == [(2.0, 2)]
    assert trainer.gradients[0][0].item() == pytest.approx(-2 * 3.5), "the mean over all eight samples"


def test_gradient_checkpointing_recomputes_in_the_same_precision(monkeypatch):
    """The default of the threads is bfloat16 on the CPU and float16 on GPUs."""
    use_two_fake_devices(monkeypatch)
    model = build_model(CONFIG, "run")
    enable_gradient_checkpointing(model.train())
    calls = record_precision(model.albert.encoder.albert_layer_groups[0].albert_layers[0].ffn)
    torch.nn.DataParallel(TaskLoss(FakeTask(), model, torch.float16))(make_batch(size=8)).mean().backward()
    num_calls = 2 * CONFIG.num_hidden_layers * 2  # devices; forward and again in the backward pass
    assert [used for _, used in calls] == [torch.float16] * num_calls
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_two_gpus_compute_in_the_requested_precision(precision, tmp_path):
    flags = {} if precision == "fp32" else {precision: True}
    expected = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    loss, calls = train_on_devices(tmp_path, "cuda", **flags)
    assert len({thread for thread, _ in calls}) == torch.cuda.device_count()
    assert {used for _, used in calls} == {expected}
    reference, _ = train_on_devices(tmp_path)
    assert loss == pytest.approx(reference, rel=0.01)


@pytest.mark.parametrize(("has_bf16", "expected"), [(True, torch.bfloat16), (False, torch.float16)])
def test_accelerators_other_than_cuda_are_used(monkeypatch, has_bf16, expected):
    """A stand-in for a Mac's GPU: an older macOS refuses bfloat16."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("mps"))

    def multiply(*_shape, dtype, device):
        assert (dtype, device) == (torch.bfloat16, torch.device("mps", 0))
        if not has_bf16:
            raise TypeError("BFloat16 is not supported on MPS")
        return torch.full((2, 2), 1.0)

    monkeypatch.setattr(torch, "ones", multiply)
    args = LocalTrainingArguments()
    assert choose_devices(args) == (torch.device("mps", 0), 1) and autocast_dtype(args) == expected
    args = LocalTrainingArguments(use_cpu=True)
    assert choose_devices(args) == (torch.device("cpu"), 1) and autocast_dtype(args) is None
    if not has_bf16:
        with pytest.raises(UserError, match="--bf16: mps has no bfloat16; pass --fp16"):
            autocast_dtype(LocalTrainingArguments(bf16=True))


@pytest.mark.parametrize(("device", "expected"), [("cuda", True), ("mps", False), ("cpu", False)])
def test_trainer_copies_batches_without_waiting_on_cuda_alone(tmp_path, monkeypatch, device, expected):
    """Where memory is not pinned such a copy may be of random tokens. On CUDA, others wait for the GPU."""
    monkeypatch.setattr("cotrain.training.hf_trainer.choose_devices", lambda args: (torch.device(device), 1))
    monkeypatch.setattr("cotrain.training.hf_trainer.autocast_dtype", lambda args: None)
    args = build_training_arguments(LocalTrainingArguments(output_dir=str(tmp_path)), "peer")
    assert (args.accelerator_config.non_blocking, args.dataloader_pin_memory) == (expected, expected)


@pytest.mark.parametrize(("num_gpus", "expected"), [(1, "meta"), (0, "cpu")])
def test_compilation_is_tried_on_the_device_in_use(monkeypatch, num_gpus, expected):
    """A GPU needs Triton, which a try on the CPU does not miss."""
    devices, monkey = [], monkeypatch.setattr
    monkey(torch.accelerator, "current_accelerator", lambda check_available: torch.device("meta"))
    monkey(torch, "compile", lambda function: lambda tensor: devices.append(tensor.device.type))
    model = torch.nn.Linear(1, 1)
    monkey(model, "compile", lambda: devices.append("model"))
    choose_kernels(model, LocalTrainingArguments(torch_compile=True), num_gpus)
    assert devices == [expected, "model"]


@pytest.mark.parametrize(
    ("names", "has_adapters", "number", "warning"),
    [
        (["RTX 4090", "RTX 4090"], False, 2, ""),
        (["RTX 4090", "GT 710"], False, 1, "Not used beside RTX 4090: GPU 1 (GT 710)"),
        (["RTX 4090", "RTX 4090", "GT 710"], False, 2, "GPU 2 (GT 710)"),
        (["RTX 4090", "GT 710", "RTX 4090"], False, 1, "GPU 1 (GT 710), GPU 2 (RTX 4090)"),
        (["RTX 4090", "RTX 4090"], True, 1, "a trainer uses one GPU: start one for each of the 2"),
        (["RTX 4090"], True, 1, ""),
    ],
)
def test_only_gpus_like_the_first_are_used_together(monkeypatch, caplog, names, has_adapters, number, warning):
    """A display card would end the trainer, or slow it down."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number=0: names[number])
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda number: (8, 9) if "RTX" in names[number] else (3, 5)
    )
    monkeypatch.setattr("cotrain.training.hf_trainer.supports_bf16", lambda device: True)
    assert choose_devices(LocalTrainingArguments(), has_adapters) == (torch.device("cuda", 0), number)
    assert warning in caplog.text and bool(caplog.text) == bool(warning)


def test_trainer_has_as_many_replicas_as_devices_were_chosen(tmp_path, monkeypatch):
    """transformers takes all visible GPUs."""
    calls = []

    class Replicas(torch.nn.DataParallel):
        def __init__(self, model: torch.nn.Module, device_ids: list[int]):
            torch.nn.Module.__init__(self)
            calls.append(device_ids)

    monkeypatch.setattr(torch.nn, "DataParallel", Replicas)
    trainer = build_trainer(tmp_path)
    for number in (1, 2):
        trainer.args._n_gpu = number
        trainer._wrap_model(trainer.model)
    assert calls == [[0, 1]]


@pytest.mark.parametrize(
    ("target", "flags", "expected"),
    [
        (4096, {}, (4, 2)), (128, {}, (4, 1)), (32, {}, (1, 1)), (1, {}, (1, 1)),
        (32, {"per_device_train_batch_size": 3}, (3, 2)), (32, {"local_updates": True}, (4, 2)),
        (128, {"gradient_accumulation_steps": 2}, (2, 2)), (32, {"gradient_accumulation_steps": 5}, (1, 5)),
        (32, {"gradient_accumulation_steps": 5, "local_updates": True}, (4, 5)),
    ],
)  # fmt: skip
def test_local_steps_are_short_beside_the_step_unless_a_flag_says_otherwise(tmp_path, target, flags, expected):
    """Four trainers with local steps of 8 samples exceeded a target of 32 by half."""
    args = make_arguments(tmp_path, flags, target_batch_size=target)
    set_batch_size(args, torch.device("cpu"))
    assert (args.training.per_device_train_batch_size, args.training.gradient_accumulation_steps) == expected
