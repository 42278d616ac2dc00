"""Comparison of a downloaded state with what other peers have: a few elements of it, chosen at random.

A donor may send any state. It cannot know which elements the receiver asks the others for.
"""

from collections.abc import Sequence

import torch
from hivemind.compression import deserialize_torch_tensor, serialize_torch_tensor
from hivemind.proto import averaging_pb2, runtime_pb2

from peerstep.wire import TensorSpec, check_tensor

NUM_ELEMENTS = 1000  # of each group
# Bound on the distance of two peers' parameters, relative to the larger norm. One step apart, honest peers differ by
# some percent, and by 17 % in the first steps of a small model. Unrelated weights have a distance above 1.
MAX_RELATIVE_ERROR = 0.3
# The same of optimizer statistics, relative to the geometric mean of the norms: they may differ by a factor of 17.
# Those of honest peers that are ten steps apart are unrelated (1.4), and grow like the steps after the start.
MAX_STATISTICS_ERROR = 4.0

Groups = Sequence[Sequence[torch.Tensor]]  # the parameters, then each kind of statistics that has their shapes


def choose_elements(groups: Groups, seed: bytes) -> torch.Tensor:
    """Return what a seed of 8 bytes chooses, shape (groups, NUM_ELEMENTS), float32; ValueError for another seed."""
    if len(seed) != 8:
        raise ValueError("a seed has 8 bytes")
    generator = torch.Generator().manual_seed(int.from_bytes(seed, "big") >> 1)  # torch takes signed numbers
    chosen = []
    for tensors in groups:
        ends = torch.tensor([tensor.numel() for tensor in tensors]).cumsum(0)
        places = torch.randint(int(ends[-1]), (NUM_ELEMENTS,), generator=generator)
        owners = torch.searchsorted(ends, places, right=True).tolist()
        flat = [tensor.detach().view(-1) for tensor in tensors]
        pairs = zip(owners, places.tolist(), strict=True)
        chosen.append(torch.stack([flat[owner][place - int(ends[owner])] for owner, place in pairs]).float().cpu())
    return torch.stack(chosen)


def pack_elements(groups: Groups, request: averaging_pb2.DownloadData) -> averaging_pb2.DownloadData:
    """Answer a request, whose metadata are the seed; ValueError if they are not."""
    elements = choose_elements(groups, request.metadata)
    return averaging_pb2.DownloadData(tensor_part=serialize_torch_tensor(elements))


def agrees(groups: Groups, seed: bytes, answer: averaging_pb2.DownloadData) -> bool:
    """Whether another peer has about the same state; ValueError if its answer is malformed."""
    check_tensor(answer.tensor_part, TensorSpec((len(groups), NUM_ELEMENTS), compressions={runtime_pb2.NONE}))
    both = torch.stack([choose_elements(groups, seed), deserialize_torch_tensor(answer.tensor_part)]).double()
    norms = both.norm(dim=-1)  # of this state and of the other, for each group
    bounds = MAX_STATISTICS_ERROR * norms.prod(dim=0).sqrt()
    bounds[0] = MAX_RELATIVE_ERROR * norms[:, 0].max()
    return bool(((both[0] - both[1]).norm(dim=-1) <= bounds).all())  # false for NaN
