"""Comparison of a downloaded state with what other peers have: a few elements of the parameters, chosen at random.

A donor may send any state. It cannot know which elements the receiver asks the others for.
"""

from collections.abc import Sequence

import torch
from hivemind.compression import deserialize_torch_tensor, serialize_torch_tensor
from hivemind.proto import averaging_pb2, runtime_pb2

from cotrain.averaging.wire import TensorSpec, check_tensor

NUM_ELEMENTS = 1000
# Bound on the distance of two peers' elements, relative to their norm. One step apart, honest peers differ by some
# percent, and by 17 % in the first steps of a small model. Unrelated weights have a distance above 1.
MAX_DISTANCE = 0.3
SPEC = TensorSpec((NUM_ELEMENTS,), compressions={runtime_pb2.NONE})


def choose_elements(parameters: Sequence[torch.Tensor], seed: bytes) -> torch.Tensor:
    """Return the elements that a seed of 8 bytes chooses, shape (NUM_ELEMENTS,), float32; ValueError otherwise."""
    if len(seed) != 8:
        raise ValueError("a seed has 8 bytes")
    generator = torch.Generator().manual_seed(int.from_bytes(seed, "big") >> 1)  # torch takes signed numbers
    ends = torch.tensor([parameter.numel() for parameter in parameters]).cumsum(0)
    places = torch.randint(int(ends[-1]), (NUM_ELEMENTS,), generator=generator)
    owners = torch.searchsorted(ends, places, right=True).tolist()
    flat = [parameter.detach().view(-1) for parameter in parameters]
    pairs = zip(owners, places.tolist(), strict=True)
    return torch.stack([flat[owner][place - int(ends[owner])] for owner, place in pairs]).float().cpu()


def pack_elements(
    parameters: Sequence[torch.Tensor], request: averaging_pb2.DownloadData
) -> averaging_pb2.DownloadData:
    """Answer a request, whose metadata are the seed; ValueError if they are not."""
    elements = choose_elements(parameters, request.metadata)
    return averaging_pb2.DownloadData(tensor_part=serialize_torch_tensor(elements))


def agrees(parameters: Sequence[torch.Tensor], seed: bytes, answer: averaging_pb2.DownloadData) -> bool:
    """Whether another peer has about the same parameters; ValueError if its answer is malformed."""
    check_tensor(answer.tensor_part, SPEC)
    others = deserialize_torch_tensor(answer.tensor_part)
    own = choose_elements(parameters, seed)
    scale = torch.maximum(own.norm(), others.norm())
    return bool((own - others).norm() <= MAX_DISTANCE * scale)  # false for NaN
