"""Memory of tensors that child processes share."""

import mmap

import torch


def shared_zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return zeros on the tensor's device; on the CPU in memory that children share.

    Of other memory a child keeps each page that its parent changes after the fork.
    """
    if tensor.device.type != "cpu" or not tensor.nbytes:
        return torch.zeros_like(tensor)
    return torch.frombuffer(mmap.mmap(-1, tensor.nbytes), dtype=tensor.dtype).view(tensor.shape)


def share_parameters(model: torch.nn.Module) -> None:
    """Move the trainable parameters of a model on the CPU to memory that children share."""
    for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
        parameter.data = shared_zeros_like(parameter).copy_(parameter.data)
