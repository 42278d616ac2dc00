"""How this machine computes a model: its device, precision and kernels, and what it recomputes."""

from functools import partial

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.albert.modeling_albert import AlbertLayer
from transformers.utils import is_flash_attn_2_available

from cotrain.common.errors import UserError, first_line
from cotrain.options import LocalOptions


def find_device(use_cpu: bool) -> torch.device:
    """Return the first accelerator of this machine that torch supports (CUDA, ROCm, MPS, XPU), or its CPU."""
    if use_cpu or (device := torch.accelerator.current_accelerator(check_available=True)) is None:
        return torch.device("cpu")
    return torch.device(device.type, 0)


def supports_bf16(device: torch.device) -> bool:
    """Whether a device computes matrix products in bfloat16. Old ones of AMD and Apple emulate it unnoticed."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    try:
        matrix = torch.ones(2, 2, dtype=torch.bfloat16, device=device)
        return bool((matrix @ matrix == 2).all())
    except (RuntimeError, TypeError):  # MPS on older macOS
        return False


def choose_kernels(model: PreTrainedModel, args: LocalOptions, num_gpus: int) -> None:
    """Choose how this machine computes the model.

    :raises UserError: if it is not available here
    """
    attention = args.attn_implementation
    flag = f"--attn_implementation {attention}"
    try:
        works = {"flash_attention_2": is_flash_attn_2_available(), "flex_attention": num_gpus > 0}
        if not works.get(attention, True):  # transformers may download a kernel instead of flash-attn
            raise ValueError("it needs a GPU and, for flash attention, the package flash-attn")
        if attention is not None:
            model.set_attn_implementation(attention)
            if model.config._attn_implementation != attention:  # noqa: SLF001  no public name
                raise ValueError("the model has another one")
        flag = "--torch_compile"
        if args.torch_compile and num_gpus > 1:
            raise ValueError("several GPUs: set CUDA_VISIBLE_DEVICES=0")  # DataParallel would run the first's code
        if args.torch_compile:
            device = find_device(use_cpu=num_gpus == 0)
            torch.compile(torch.square)(torch.ones(8, device=device))  # is there a compiler, and on a GPU Triton?
            model.compile()  # in place: the names of the parameters stay
    except Exception as error:
        raise UserError(f"{flag} is not available here ({first_line(error):.150}): drop the flag") from None


class CheckpointedAlbertLayer(GradientCheckpointingLayer, AlbertLayer):
    """AlbertLayer that recomputes its activations. The layers of the other families have this base class already."""

    gradient_checkpointing = True
    _gradient_checkpointing_func = staticmethod(partial(checkpoint, use_reentrant=False))


def to_float(model: torch.nn.Module) -> torch.nn.Module:
    """Convert what is trained to float32, in which peers exchange it. Frozen parameters keep their precision."""
    if all(parameter.requires_grad for parameter in model.parameters()):
        return model.float()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model


def enable_gradient_checkpointing(model: torch.nn.Module) -> None:
    """Compute activations again in the backward pass; UserError for a model that does not support it."""
    albert_layers = [module for module in model.modules() if type(module) is AlbertLayer]
    for layer in albert_layers:
        layer.__class__ = CheckpointedAlbertLayer  # DataParallel's replicas would share a replaced `forward`
    if not (albert_layers or hasattr(model, "activation_checkpointing_enable")):
        raise UserError("--gradient_checkpointing: this model does not support it; drop the flag")
    if not albert_layers:
        model.activation_checkpointing_enable()
