"""A stand-in for an accelerator: tensors that say that they are on one, and are computed on the CPU."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.utils._pytree import tree_map

COPIES = {"aten.copy_.default", "aten._to_copy.default"}
WAITS = {"aten._local_scalar_dense.default", "aten.is_nonzero.default", "aten.nonzero.default", "aten.equal.default"}


class DeviceTensor(torch.Tensor):
    """A tensor of a fake device. As on Apple's GPUs ("mps") and Intel's ("xpu"), no result may be of float64.

    :cvar on_operation: is called with the name of each operation, and whether it copies to the host and blocks
    :cvar on_copies: is called for each copy of several tensors, with whether it blocks
    """

    on_operation: Callable[[str, bool], None] = staticmethod(lambda name, is_blocking_copy: None)
    on_copies: Callable[[bool], None] = staticmethod(lambda is_blocking: None)

    @staticmethod
    def __new__(cls, inner: torch.Tensor, device: str):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=device)

    def __init__(self, inner: torch.Tensor, device: str):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        tensors = []
        plain_args, plain = tree_map(lambda x: unwrap(x, tensors), (args, kwargs))
        device, name = tensors[0].device.type, str(function)
        is_to_host = "device" in kwargs and torch.device(kwargs["device"]).type == "cpu"
        if name == "aten.copy_.default":
            is_to_host = not isinstance(args[0], DeviceTensor)
        if "device" in kwargs:
            plain["device"] = "cpu"
        is_blocking = kwargs.get("non_blocking", len(args) > 2 and args[2]) is not True
        cls.on_operation(name, (name in COPIES and is_to_host and is_blocking) or name in WAITS)
        if name == "aten._foreach_copy_.default":
            cls.on_copies(is_blocking)
        result = function(*plain_args, **plain)
        if name == "aten.copy_.default":
            return args[0]

        def wrap(x):
            if not isinstance(x, torch.Tensor) or is_to_host:
                return x
            if x.dtype == torch.float64:
                raise TypeError(
                    f"Cannot convert a {device} Tensor to float64 dtype as the framework doesn't support it"
                )
            return DeviceTensor(x, device)

        if name.split(".")[1].endswith("_"):
            return None if result is None else args[0]
        return tree_map(wrap, result)


def unwrap(x: object, found: list) -> object:
    if not isinstance(x, DeviceTensor):
        return x
    found.append(x)
    return x.inner


class FakeEvent(str):
    """An event of a FakeStream, by its name."""

    log: list

    def synchronize(self) -> None:
        self.log.append(f"host waits for {self}")


class FakeStream:
    """Stands for the stream of the step thread and that of the main thread. Records what they wait for, in order."""

    def __init__(self, log: list, name: str, on_wait: Callable[[], None] = lambda: None):
        self.log, self.name, self.on_wait, self._number = log, name, on_wait, 0

    def record_event(self) -> FakeEvent:
        self._number += 1
        event = FakeEvent(f"{self.name} {self._number}")
        event.log = self.log
        return event

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def synchronize(self) -> None:
        self.log.append(f"host waits for {self.name}")
        self.on_wait()

    def __enter__(self) -> None:
        self.log.append(f"{self.name} begins")

    def __exit__(self, *_) -> None:
        self.log.append(f"{self.name} ends")


@contextmanager
def fake_streams(monkeypatch, on_wait: Callable[[], None] = lambda: None) -> Iterator[list[str]]:
    """Give a fake CUDA device two streams; yield the log of what waits for what. No memory is pinned on a CPU."""
    log, empty_like = [], torch.zeros_like
    side, main = FakeStream(log, "side", on_wait), FakeStream(log, "main")
    monkeypatch.setattr(torch, "Stream", lambda device: side)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: main)
    monkeypatch.setattr(torch, "zeros_like", lambda tensor, pin_memory=False, **options: empty_like(tensor, **options))
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    yield log


def is_free(lock: threading.RLock) -> bool:
    """Whether another thread can take a lock now."""
    taken = []

    def take() -> None:
        if lock.acquire(timeout=0.0):
            taken.append(True)
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return bool(taken)
