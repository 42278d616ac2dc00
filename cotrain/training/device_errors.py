"""Errors of a device: a full memory, which may pass, and those after which only a new process works."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from hivemind.utils import get_logger
from torch.utils._pytree import tree_leaves, tree_map

from peerstep.optimizer import CollaborativeOptimizer

logger = get_logger(__name__)

MAX_FAILURES = 10  # micro-batches in a row for which there was no memory
# MPS and cuBLAS raise a RuntimeError, and CUDA an AcceleratorError if it is not torch's allocator that fails.
_OUT_OF_MEMORY = re.compile("out of memory|ALLOC_FAILED|can't allocate memory", re.IGNORECASE)
_OF_DEVICE = re.compile(r"\b(CUDA|HIP|MPS|XPU|level_zero)\b.* (error|failed)|(CUDNN|CUBLAS)_STATUS", re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None


def is_device_error(error: BaseException) -> bool:
    """Whether an error is one of a GPU or its memory, rather than of the model or the data."""
    is_named = isinstance(error, RuntimeError) and _OF_DEVICE.search(str(error)) is not None
    return isinstance(error, torch.AcceleratorError) or is_out_of_memory(error) or is_named


def split(batch: Any, number: int) -> list[Any]:
    """Cut a batch of at least as many samples into equal parts: the tensors of its size, along their first axis."""
    batch = {**batch} if isinstance(batch, Mapping) else batch  # a BatchEncoding is no node of a tree
    size = count_samples(batch)
    places = [range(part * size // number, (part + 1) * size // number) for part in range(number)]

    def cut(value: Any, place: range) -> Any:
        is_cut = isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == size
        return value[place.start : place.stop] if is_cut else value

    return [tree_map(lambda value, place=place: cut(value, place), batch) for place in places]


def count_samples(batch: Any) -> int:
    batch = {**batch} if isinstance(batch, Mapping) else batch
    return next((len(x) for x in tree_leaves(batch) if isinstance(x, torch.Tensor) and x.ndim), 0)


class MicroBatches:
    """Computes micro-batches, and continues after one for which the device has no memory, such as beside a game.

    If it is the first one, all are computed in two halves from then on, which add to the same local step. Later ones
    are dropped alone; MAX_FAILURES in a row raise the error. On a CPU each raises it: there, the gradients of the
    micro-batches before are not set aside, which takes 4 bytes for a parameter unless activations took more.

    :param batch_size: samples of a micro-batch
    """

    def __init__(self, model: torch.nn.Module, optimizer: CollaborativeOptimizer, batch_size: int):
        self.model, self.optimizer, self.batch_size = model, optimizer, batch_size
        self.sets_aside = next(model.parameters()).device.type != "cpu"
        self.num_parts = 1
        self.num_computed = self._num_failures = 0

    def compute(self, batch: Any, backward: Callable[[Any, float], torch.Tensor]) -> torch.Tensor | None:
        """Compute gradients.

        :param backward: computes those of a part of the batch times its share, and returns the loss times its share
        :returns: the loss; None if the micro-batch was dropped
        """
        failure = None
        kept = [(p, p.grad) for p in self.model.parameters() if self.sets_aside and p.grad is not None]
        if not kept:  # a new local step; GradScaler may have left out the one before
            self.optimizer.num_lost = 0
        for parameter, _ in kept:
            parameter.grad = None
        try:
            parts = split(batch, self.num_parts) if count_samples(batch) >= self.num_parts > 1 else [batch]
            loss = torch.stack([backward(part, 1 / len(parts)) for part in parts]).sum()
            self.num_computed, self._num_failures = self.num_computed + 1, 0
            if both := [(gradient, parameter.grad) for parameter, gradient in kept if parameter.grad is not None]:
                torch._foreach_add_(*map(list, zip(*both, strict=True)))
            for parameter, gradient in kept:
                parameter.grad = gradient
            return loss
        except RuntimeError as error:
            halves = self.num_computed == 0 and self.num_parts == 1 and count_samples(batch) > 1
            self._num_failures += 1
            can_drop = self.sets_aside and self.num_computed > 0
            is_last = self._num_failures >= MAX_FAILURES or not (halves or can_drop)
            if not is_out_of_memory(error) or is_last:
                raise
            failure = str(error).partition("\n")[0]
        # Here, the traceback no longer keeps the tensors of the micro-batch.
        self.model.zero_grad()
        for parameter, gradient in kept:
            parameter.grad = gradient
        self.free_memory()
        if halves:
            logger.warning(f"The first micro-batch does not fit into memory ({failure:.100}): computing it in halves")
            self.num_parts = 2
            return self.compute(batch, backward)
        logger.warning(f"Dropped a micro-batch, {self._num_failures} of {MAX_FAILURES} in a row: {failure:.200}")
        self.optimizer.num_lost += self.batch_size
        smallest = min(filter(lambda p: p.requires_grad, self.model.parameters()), key=torch.Tensor.numel)
        smallest.grad = torch.zeros_like(smallest) if smallest.grad is None else smallest.grad  # for GradScaler
        return None

    def free_memory(self) -> None:
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
