"""The memory that a micro-batch takes, computed without weights and without a GPU."""

import weakref
from contextlib import suppress

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

BYTES_OF_NF4 = 0.516  # of a number, with its double-quantized scales; embeddings and the head stay in bf16


class PeakMeter(TorchDispatchMode):
    """Adds up the bytes of the tensors that operations allocate, while they are alive.

    :ivar peak: the most at once
    """

    def __init__(self, existing: set[int]):
        super().__init__()
        self.live, self.current, self.peak = dict.fromkeys(existing, 0), 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and (key := key_of(tensor)) not in self.live:
                storage = tensor.untyped_storage()
                self.live[key] = storage.nbytes()
                self.current += self.live[key]
                weakref.finalize(storage, self._free, key)
        self.peak = max(self.peak, self.current)
        return result

    def _free(self, key: int) -> None:
        self.current -= self.live.pop(key, 0)


class FusedAttention(TorchFunctionMode):
    """Computes attention as on a GPU, where dropout is part of the fused kernel; a CPU keeps matrices for it."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is scaled_dot_product_attention:
            kwargs = {**(kwargs or {}), "dropout_p": 0.0}
        return function(*args, **(kwargs or {}))


def key_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata  # noqa: SLF001  without memory, each data_ptr is 0


def micro_batch_bytes(
    model: PreTrainedModel, batch_size: int, length: int, dtype: torch.dtype | None, has_order: bool = False
) -> float | None:
    """Return the bytes above the weights at the peak of a forward and a backward pass, with the gradients.

    Of Llama-8B with adapters, 0.8 % less than an H100 takes in bf16, and 6 % more in 4 bits. The autocast is that of a
    CPU: CUDA's keeps norms in float32, and ALBERT-large takes 1.3 GB a sample there, here 0.9.

    :param model: what it has is replaced by tensors without memory, and becomes useless
    :param dtype: of autocast
    :param has_order: whether the loss needs labels of the order of sentences
    :returns: None for a model that does not run without weights, such as one with experts
    """
    with suppress(Exception), FakeTensorMode(), FusedAttention():
        drop_values(model)
        tokens = torch.zeros(batch_size, length, dtype=torch.long)
        batch = {"input_ids": tokens, "labels": tokens}
        batch |= {"sentence_order_label": tokens[:, 0]} if has_order else {}
        existing = {key_of(tensor) for tensor in (*model.parameters(), *model.buffers(), tokens)}
        with PeakMeter(existing) as meter:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is not None):
                loss = model(**batch).loss
            loss.backward()
        return float(meter.peak)
    return None


def drop_values(model: torch.nn.Module) -> None:
    """Replace the tensors of a model by those of the current FakeTensorMode; frozen ones are in bf16."""
    replaced = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):  # noqa: SLF001  shared ones stay shared
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                is_base = isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad
                if id(tensor) not in replaced:
                    fake = torch.empty(tensor.shape, dtype=torch.bfloat16 if is_base else tensor.dtype)
                    if isinstance(tensor, torch.nn.Parameter):
                        fake = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
                    replaced[id(tensor)] = tensor, fake  # `tensor` is kept, so that its ID is used for no other
                tensors[name] = replaced[id(tensor)][1]


def base_bytes(model: torch.nn.Module, in_4_bits: bool) -> float:
    """Return the bytes of the frozen parameters of a model, in bf16 or as bitsandbytes stores them."""
    frozen = {id(p): p.numel() for p in model.parameters() if not p.requires_grad}
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    layers = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear | Conv1D) and m is not head]
    quantized = sum(weight.numel() for weight in layers if in_4_bits and id(weight) in frozen)
    return 2.0 * (sum(frozen.values()) - quantized) + BYTES_OF_NF4 * quantized
