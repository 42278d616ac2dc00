"""What training loops do about a GPU without memory, and about other errors of a device."""

import contextlib
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import TensorDataset

from cotrain.common.errors import TEMPORARY, report
from cotrain.data.sampler import PeerSampler
from cotrain.models import pretrained
from cotrain.task import Task
from cotrain.training import session as session_module
from cotrain.training.device_errors import MAX_FAILURES, MicroBatches, is_device_error, is_out_of_memory, split
from cotrain.training.loop import TrainingLoop
from tests.support.fakes import make_arguments, make_session
from tests.training.test_hf_trainer import build_trainer

FULL = "CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 7.77 GiB"


@pytest.mark.parametrize(
    ("error", "is_full", "is_of_device"),
    [
        (torch.OutOfMemoryError(FULL), True, True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 17 GB)"), True, True),
        (torch.AcceleratorError("CUDA error: out of memory"), True, True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True, True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"), True, True),
        (torch.AcceleratorError("CUDA error: unspecified launch failure"), False, True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), False, True),
        (RuntimeError("HIP error: an illegal memory access was encountered"), False, True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x4 and 3x3)"), False, False),
        (ValueError("out of memory"), False, False),
    ],
)
def test_kinds_of_errors(error, is_full, is_of_device):
    assert (is_out_of_memory(error), is_device_error(error)) == (is_full, is_of_device)


@pytest.mark.parametrize("batch", [torch.arange(5), {"a": torch.arange(5), "b": [torch.zeros(5, 2), 3]}])
def test_halves_have_all_samples(batch):
    first, second = split(batch, 2)
    a = (first["a"], second["a"]) if isinstance(batch, dict) else (first, second)
    assert torch.cat(a).tolist() == [0, 1, 2, 3, 4]
    if isinstance(batch, dict):
        assert [half["b"][0].shape for half in (first, second)] == [(2, 2), (3, 2)] and first["b"][1] == 3


class Losses:
    """A loss that fails for some of its calls, whose gradient is the mean of a batch."""

    def __init__(self, model: torch.nn.Module, *failures: int, after_backward: bool = False):
        self.model, self.failures, self.sizes = model, failures, []

    def __call__(self, batch: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(batch))
        if len(self.sizes) in self.failures:
            raise torch.OutOfMemoryError(FULL)
        return self.model(batch).mean()


def make_loop(tmp_path, monkeypatch, precision: str = "fp32", **training) -> tuple[TrainingLoop, list]:
    """Make a loop of local steps of two micro-batches, and the list of the gradients of its local steps."""
    session, steps = make_session(tmp_path, offered=None), []
    session.model = torch.nn.Linear(1, 1)

    def step() -> None:
        if session.optimizer.num_lost < 8:
            steps.append((float(session.model.weight.grad), 8 - session.optimizer.num_lost))
            session.optimizer.num_computed += 8
        session.optimizer.num_lost = 0

    optimizer = SimpleNamespace(
        **{**vars(session.optimizer), "num_lost": 0, "step": step},
        param_groups=[{"params": list(session.model.parameters())}], zero_grad=session.model.zero_grad,
    )  # fmt: skip
    session.optimizer, session.status.optimizer = optimizer, optimizer
    monkeypatch.setattr(session, "report_steps", lambda: None)
    options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, precision: True, **training}
    loop = TrainingLoop(session, make_arguments(tmp_path, options).training, torch.device("cpu"))
    loop.micro_batches.sets_aside = True  # as on a GPU
    return loop, steps


BATCH = torch.tensor([[1.0], [3.0], [5.0], [7.0]])


@pytest.mark.parametrize("failing", [3, 4])
def test_later_micro_batch_without_memory_costs_itself_alone(tmp_path, monkeypatch, caplog, failing):
    loop, steps = make_loop(tmp_path, monkeypatch)
    losses = Losses(loop.model, failing)
    for _ in range(6):
        assert loop.train_on(BATCH, losses)
    assert steps == [(4.0, 8), (4.0, 4), (4.0, 8)] and losses.sizes == [4] * 6
    assert "Dropped a micro-batch, 1 of 10 in a row: CUDA out of memory" in caplog.text


def test_local_step_of_missing_micro_batches_counts_nothing(tmp_path, monkeypatch):
    loop, steps = make_loop(tmp_path, monkeypatch)
    losses = Losses(loop.model, 3, 4, 5)
    for _ in range(6):
        assert loop.train_on(BATCH, losses)
    assert steps == [(4.0, 8), (4.0, 4)]


class LateFailure(torch.nn.Module):
    """Two layers; the backward pass has no memory after the second one has its gradient, at some of its calls."""

    def __init__(self, *failing: int):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.failing, self.calls = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1), failing, 0

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        middle, fails = self.first(batch), self.calls in self.failing
        middle.register_hook(lambda _: self.fail() if fails else None)
        return self.second(middle).square().mean()

    def fail(self) -> None:
        assert self.second.weight.grad is not None
        raise torch.OutOfMemoryError(FULL)


class TokenTask(Task):
    """Tensors as batches, each of which weighs as many tokens as its first number says."""

    def collate(self, samples):
        return torch.stack(samples)

    def compute_loss(self, model, batch):
        return model(batch)

    def weigh(self, batch):
        return batch[:, 0].sum()


SAMPLES = torch.tensor([[3.0, 1.0], [1.0, 2.0], [4.0, -1.0], [5.0, 2.0]])


def mean_over_tokens(numbers: list[int]) -> torch.Tensor:
    model = LateFailure()
    weights = SAMPLES[:, 0] / SAMPLES[numbers, 0].sum()
    sum(weights[number] * model(SAMPLES[[number]]) for number in numbers).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("failing", [(2,), (3,), (4,), (2, 3), (3, 4)])
@pytest.mark.parametrize("kind", ["loop", "Trainer"])
def test_gradient_without_a_dropped_micro_batch_is_the_mean_over_the_tokens_of_the_others(
    tmp_path, monkeypatch, failing, kind
):
    """Also if its backward pass had changed some gradients. The first micro-batch is computed in a step before."""
    task, model = TokenTask(), LateFailure(*failing)
    order = list(PeerSampler(range(4), "peer", 0))
    if kind == "loop":
        gradients = []
        loop, _ = make_loop(tmp_path, monkeypatch, gradient_accumulation_steps=4, per_device_train_batch_size=1)
        loop.model = loop.micro_batches.model = model
        optimizer = loop.session.optimizer
        optimizer.step = lambda: gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        for number in order:
            loop.train_on(SAMPLES[[number]], model, task.weigh)
    else:
        trainer = build_trainer(
            tmp_path, PeerSampler(range(4), "peer", 0), model=model, samples=list(SAMPLES), task=task,
            per_device_train_batch_size=1, gradient_accumulation_steps=4,
        )  # fmt: skip
        optimizer, trainer.micro_batches.sets_aside = trainer.optimizer, True
        optimizer.num_lost = 0
        trainer.train()
        gradients = trainer.gradients
    rest = [number for place, number in enumerate(order, 1) if place not in failing]
    assert torch.allclose(gradients[0], mean_over_tokens(rest), atol=1e-6)
    assert optimizer.num_lost == len(failing)


@pytest.mark.parametrize("failing", [3, 4])
def test_gradscaler_survives_a_micro_batch_without_memory(tmp_path, monkeypatch, failing):
    loop, steps = make_loop(tmp_path, monkeypatch)
    loop.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    losses = Losses(loop.model, failing, 5, 6)
    for _ in range(8):
        assert loop.train_on(BATCH, losses)
    assert steps == [(4.0, 8), (4.0, 4), (4.0, 8)]


def test_local_step_after_one_that_gradscaler_left_out_counts_all_its_samples(tmp_path, monkeypatch):
    loop, steps = make_loop(tmp_path, monkeypatch)
    losses, given = Losses(loop.model, 4), loop.session.optimizer.step
    for number in range(6):
        loop.session.optimizer.step = (lambda: None) if number < 4 else given
        assert loop.train_on(BATCH, losses)
    assert steps == [(4.0, 8)]


def test_first_micro_batch_without_memory_is_computed_in_halves_from_then_on(tmp_path, monkeypatch, caplog):
    loop, steps = make_loop(tmp_path, monkeypatch)
    losses = Losses(loop.model, 1)
    for _ in range(4):
        assert loop.train_on(BATCH, losses)
    assert losses.sizes == [4, *[2] * 8] and steps == [(4.0, 8)] * 2, "the local step stays the same"
    assert "The first micro-batch does not fit into memory" in caplog.text


@pytest.mark.parametrize(
    ("failures", "calls"), [((1, 2), 2), (range(3, 100), 2 + MAX_FAILURES)], ids=["from the start", "for long"]
)
def test_memory_that_never_suffices_ends_training(tmp_path, monkeypatch, failures, calls):
    loop, _ = make_loop(tmp_path, monkeypatch)
    losses = Losses(loop.model, *failures)
    with pytest.raises(torch.OutOfMemoryError):
        for _ in range(50):
            loop.train_on(BATCH, losses)
    assert len(losses.sizes) == calls


def test_trainer_of_transformers_drops_the_same_and_halves_the_same(tmp_path):
    gradients = []
    for failing in ((), (1,), (6,)):
        trainer = build_trainer(
            tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=3, logging_steps=1
        )
        compute, calls, module = trainer.model.task.compute_loss, [], trainer.model
        optimizer, lost = trainer.optimizer, []
        optimizer.num_lost, trainer.micro_batches.sets_aside = 0, True
        optimizer.register_step_pre_hook(lambda given, *_, seen=lost: seen.append(given.num_lost))

        def fail(model, batch, calls=calls, failing=failing, compute=compute):
            calls.append(len(batch["input_ids"]))
            if len(calls) in failing:
                raise torch.OutOfMemoryError(FULL)
            return compute(model, batch)

        module.task.compute_loss = fail
        trainer.train()
        gradients.append(trainer.gradients[0])
        if failing == (1,):
            assert calls == [2, *[1] * 24] and not any(lost)
        elif failing:
            assert calls == [2] * 12 and lost[:2] == [0, 2]
    assert torch.allclose(gradients[0], gradients[1], atol=1e-6)


def test_batches_are_copied_without_waiting_on_cuda_alone(tmp_path, monkeypatch):
    """On MPS such a copy may read memory that has been freed: random tokens (pytorch #189690)."""
    for device, expected in (("mps", False), ("xpu", False), ("cpu", False), ("cuda", True)):
        loop, _ = make_loop(tmp_path, monkeypatch, per_device_train_batch_size=1)
        loop.device, options = torch.device(device), {}
        monkeypatch.setattr(
            "cotrain.training.loop.send_to_device",
            lambda batch, device, options=options, **given: options.update(given) or batch,
        )
        monkeypatch.setattr("cotrain.training.loop.DataLoader", lambda samples, size, sampler, pin_memory: samples)
        next(loop.batches(TensorDataset(BATCH)))
        assert options == {"non_blocking": expected}, device


@pytest.mark.parametrize(
    ("error", "num_computed", "code"),
    [
        (torch.AcceleratorError("CUDA error: unspecified launch failure"), 8, TEMPORARY),
        (torch.OutOfMemoryError(FULL), 8, TEMPORARY),
        (torch.OutOfMemoryError(FULL), 0, 1),
        (torch.AcceleratorError("CUDA error: no kernel image is available"), 0, 1),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), 8, 1),
        (ValueError("wrong"), 8, 1),
    ],
)
def test_error_of_the_device_after_a_local_step_may_pass(tmp_path, monkeypatch, capsys, error, num_computed, code):
    """A loop and systemd start a trainer again that ends with 75, and not one that ends with 1."""
    session = make_session(tmp_path, offered=None)
    args, optimizer = make_arguments(tmp_path, run_id="run", client_mode=True), session.optimizer
    optimizer.num_computed, optimizer.processes = num_computed, {}
    monkeypatch.setattr(session_module, "RunConfigRelay", SimpleNamespace(of_run=lambda *_: session.publisher.relay))
    monkeypatch.setattr(session_module, "supervise", lambda *_, **__: contextlib.nullcontext(session.watchdog))
    monkeypatch.setattr(session_module, "claim_folder", lambda *_: None)
    stop = SimpleNamespace(is_set=lambda: False)
    with (
        pytest.raises(type(error)) as raised,
        session_module.open_session(session.peer, optimizer, session.recovery.task, session.model, args, stop),
    ):
        raise error
    assert report(raised.value) == code
    assert len(capsys.readouterr().err.splitlines()) <= 2


def test_four_bit_base_computes_in_the_precision_of_autocast(monkeypatch):
    """A T4 has no bf16. torch says that it is supported, by emulation: several times slower."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(pretrained, "BitsAndBytesConfig", lambda **options: SimpleNamespace(**options))
    assert pretrained.quantize()["quantization_config"].bnb_4bit_compute_dtype == torch.float16


def test_module_on_the_cpu_beside_a_gpu_is_computed_in_float32(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr("cotrain.training.hf_trainer.supports_bf16", lambda device: False)
    session = make_session(tmp_path, offered=None)
    loop = TrainingLoop(session, make_arguments(tmp_path).training, torch.device("cpu"))
    with loop.autocast():
        assert not torch.is_autocast_enabled("cpu") and not loop.scaler.is_enabled()


def test_memory_of_a_dropped_micro_batch_is_free_before_the_next():
    """The traceback of the error keeps what the micro-batch has computed."""
    runner, kept = MicroBatches(torch.nn.Linear(1, 1), SimpleNamespace(num_lost=0), 4), []
    runner.num_computed, runner.sets_aside, runner.free_memory = 1, True, lambda: kept.append(activations())

    def backward(batch: torch.Tensor, share: float) -> torch.Tensor:
        nonlocal activations
        computed = torch.zeros(3)
        activations = weakref.ref(computed)
        raise torch.OutOfMemoryError(FULL)

    activations = None
    assert runner.compute(BATCH, backward) is None
    assert kept == [None]
