"""What averaging relies on between a GPU and the CPU: copies of gradients, and forked averagers."""

import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch
from hivemind.utils.tensor_descr import TensorDescriptor
from torch.utils._python_dispatch import TorchDispatchMode

from peerstep.step.accumulators import GradientAccumulator, clip_norm
from tests.peerstep.test_accumulators import train_locally
from tests.support.fake_device import DeviceTensor, fake_streams, is_free

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("build", [GradientAccumulator, train_locally])
@pytest.mark.parametrize(
    ("device", "size", "repeats"), [("cpu", 2**10, 3), pytest.param("cuda", 2**26, 100, marks=pytest.mark.gpu)]
)
def test_contribution_is_complete_once_it_is_loaded(build, device, size, repeats):
    """The copy from a GPU, of 256 MiB, must have ended: the averager's process reads the shared memory at once."""
    parameter = torch.zeros(size, device=device)
    shared = torch.zeros(size).share_memory_()
    accumulator = build([parameter], [torch.zeros(size)], [shared])
    for number in range(repeats):
        values = torch.full_like(parameter, number + 1.0)
        if build is train_locally:
            parameter.copy_(-values)
        else:
            parameter.grad = values
        accumulator.add(1)
        accumulator.load()
        first, last = float(shared[0]), float(shared[-1])
        assert first == last == number + 1.0
        assert torch.equal(shared, values.cpu())


@pytest.mark.parametrize("device", DEVICES)
def test_forked_process_finds_quickly_that_no_memory_is_pinned(device):
    """hivemind asks for each tensor and each part. In a fork of a process that uses CUDA, each answer is an error."""
    torch.zeros(1, device=device)
    with ProcessPoolExecutor(1, get_context("fork")) as processes:
        seconds, is_pinned = processes.submit(check_pinned, 1000).result(60)
    assert not is_pinned and seconds < 1.0


def check_pinned(repeats: int) -> tuple[float, bool]:
    began = time.monotonic()
    results = [TensorDescriptor.from_tensor(torch.zeros(9)).pin_memory for _ in range(repeats)]
    return time.monotonic() - began, any(results)


@pytest.mark.parametrize("build", [GradientAccumulator, train_locally])
def test_hand_over_waits_once_and_holds_no_lock_meanwhile(build, monkeypatch):
    """On a GPU a blocking copy waits for all that the main thread has launched: until the end of its local step."""
    copies, was_free = [], []
    with fake_streams(monkeypatch, lambda: was_free.append(is_free(accumulator.lock))) as log:
        model = [DeviceTensor(torch.full((4,), 1.0), "cuda") for _ in range(50)]
        contribution = [torch.zeros(4) for _ in model]
        accumulator = build(model, [torch.full((4,), 1.0) for _ in model], contribution)

        def add(gradient: float) -> None:
            for parameter in model:
                parameter.grad = DeviceTensor(torch.full((4,), gradient), "cuda")
                parameter -= parameter.grad
            accumulator.add(3)

        add(2.0)
        monkeypatch.setattr(DeviceTensor, "on_operation", lambda name, blocks: copies.append(blocks))
        log.clear()
        assert accumulator.load() == 3
        assert contribution[7].tolist() == pytest.approx([2.0] * 4, rel=0.02)  # with a local step of 1 % of it
        assert log == ["side waits for main 1", "side begins", "side ends", "host waits for side"]
        assert was_free == [True], "a local step that ends now waits for no copy"
        assert copies and not any(copies), "no copy blocks"
        log.clear()
        add(4.0)
        assert log == ["main waits for side 1"], "the sum changes once it is copied, and the host waits for nothing"
        accumulator.confirm()
        assert accumulator.load() == 3
        assert contribution[7].tolist() == pytest.approx([4.0] * 4, rel=0.02)


def test_new_parameters_reach_the_device_without_a_wait(monkeypatch):
    """From pageable memory each copy waits for all kernels, and the GPU idles: 0.25 to 0.5 s for 1.4 GB."""
    copies, newest = [], [torch.full((4,), float(number)) for number in range(50)]
    with fake_streams(monkeypatch) as log:
        model = [DeviceTensor(torch.zeros(4), "cuda") for _ in newest]
        accumulator = GradientAccumulator(model, newest, [torch.zeros(4) for _ in newest])
        monkeypatch.setattr(DeviceTensor, "on_copies", copies.append)
        accumulator.rebase()
        assert [float(parameter.inner[0]) for parameter in model] == [float(number) for number in range(50)]
        assert log == [] and copies == [False], "it does not block"
        accumulator.load()
        assert log[0] == "side waits for main 1", "the sums are copied to the same memory"
        log.clear()
        accumulator.rebase()
        assert log[0] == "host waits for main 1", "the memory is read until then"


def test_contribution_that_no_round_has_used_needs_no_device(monkeypatch):
    """Adding it to the sum on the GPU took one copy for each tensor, and the k-th might be out of memory."""
    model, contribution = [DeviceTensor(torch.zeros(2), "mps")], [torch.zeros(2)]
    accumulator = GradientAccumulator(model, [torch.zeros(2)], contribution)
    model[0].grad = DeviceTensor(torch.ones(2), "mps")
    accumulator.add(3)
    accumulator.load()
    operations = []
    monkeypatch.setattr(DeviceTensor, "on_operation", lambda name, _: operations.append(name))
    accumulator.take_back(3)
    assert operations == [] and accumulator.num_samples == 3
    model[0].grad = DeviceTensor(torch.full((2,), 5.0), "mps")
    accumulator.add(1)
    assert accumulator.load() == 4 and contribution[0].tolist() == [2.0, 2.0]
    accumulator.take_back(4)
    accumulator.drop()
    assert accumulator.load() == 0 and contribution[0].tolist() == [0.0, 0.0]


def test_compression_of_local_updates_does_not_stop_local_steps():
    """It takes 97 ns for a parameter: 34 s for 350 million, in which a GPU would compute nothing."""
    was_free = []

    def project(tensor: torch.Tensor) -> torch.Tensor:
        was_free.append(is_free(accumulator.lock))
        return tensor / 2

    model = [torch.zeros(3)]
    accumulator = train_locally(model, [torch.zeros(3)], [torch.zeros(3)], project=project)
    model[0] += 1.0
    accumulator.add(1)
    assert accumulator.load() == 1 and was_free == [True]


def test_norm_of_a_large_tensor_takes_no_copy_of_it():
    """float64 took a copy of twice the size. float32 is exact to 1 % for 10^8 elements, and peers would differ."""
    values = torch.randn(2**20, generator=torch.Generator().manual_seed(0))
    largest = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "dtype" in (kwargs or {}):
                largest.append(args[0].numel())
            return function(*args, **(kwargs or {}))

    with Watch():
        norm = clip_norm([values, torch.zeros(0)], 0.0)
    assert norm == pytest.approx(float(values.double().norm()), rel=1e-12)
    assert max(largest) <= 2**18


@pytest.mark.parametrize("build", [GradientAccumulator, train_locally])
@pytest.mark.parametrize("device", DEVICES)
def test_pause_gives_the_memory_of_the_device_back_and_keeps_the_work(build, device):
    """A game needs it. The contribution to the next round is the same as without the pause."""
    results, before = [], torch.cuda.memory_reserved() if device == "cuda" else 0
    for pauses in (False, True):
        model, shared = torch.nn.Linear(2**10, 2**10, bias=False).to(device), torch.zeros(2**10, 2**10).share_memory_()
        torch.nn.init.constant_(model.weight, 1.0)
        accumulator = build([model.weight], [torch.ones(2**10, 2**10)], [shared])

        def compute(accumulator=accumulator, model=model) -> None:
            model.weight.grad = torch.full_like(model.weight, 0.5)
            accumulator.add(2)
            model.zero_grad()

        compute()
        if pauses:
            accumulator.move(model, torch.device("cpu"))
            if device == "cuda":
                torch.accelerator.empty_cache()
                assert torch.cuda.memory_reserved() - before < 2**22
            assert accumulator.main_parameters[0].device.type == "cpu"
            accumulator.move(model, torch.device(device))
        compute()
        assert accumulator.main_parameters[0].device.type == device and accumulator.load() == 4
        results.append(shared.clone())
        del model, accumulator, compute
    assert torch.equal(*results) and results[0].any()
