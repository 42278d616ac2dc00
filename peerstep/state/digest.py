"""Comparison of two peers' training states by a few random sums of each tensor.

A donor may send any state. The receiver chooses the signs of the sums after the download and asks other peers for
theirs: the donor cannot prepare a state that has the same ones. A change of any element changes a sum.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hivemind.compression import deserialize_torch_tensor, serialize_torch_tensor
from hivemind.proto import averaging_pb2, runtime_pb2

from peerstep.tensors.checks import TensorSpec, check_tensor

SEED_BYTES = 8
WIDTH = 64  # sums of a tensor: the distance of two tensors is known to 9 %
# Bounds on the distance of two peers' parameters, for each tensor relative to its norm. An update moves a tensor by
# 0.2 % (LAMB, learning rate 0.00176) to 4 % (AdamW, 0.001), with local updates or AdamW at 0.005 by 2 to 17 %.
# Rounding to float16 is 0.03 %.
SAME, ONE_STEP = 0.05, 0.2  # without a measured update, and if it is not known how far one moves the tensors
MAX_MOVED = 0.5  # a bound is no larger, whatever other peers claim to have moved
MOVED_FACTOR = 1.5  # of what a peer has moved: its estimate and that of the distance are inexact
LEAST_NORM = 0.5  # norm of a tensor, in that of as many elements of the usual size: biases begin at 0
# Bound on the distance of optimizer statistics of one name, relative to the geometric mean of the norms: they may
# differ by a factor of 17. Those of honest peers ten steps apart are unrelated (1.4), and grow after the start.
MAX_STATISTICS_ERROR = 4.0
CHUNK, NUM_SIGNS = 2**16, 2**20  # elements of a tensor that are added at once; signs, of which each chunk has others


@dataclass(frozen=True)
class Digest:
    """What a peer says of its state."""

    step: int
    sums: torch.Tensor  # see `fold`

    def pack(self) -> averaging_pb2.DownloadData:
        return averaging_pb2.DownloadData(
            metadata=self.step.to_bytes(8, "big"), tensor_part=serialize_torch_tensor(self.sums)
        )

    @classmethod
    def parse(cls, message: averaging_pb2.DownloadData, num_rows: int) -> "Digest":
        """Read the digest of a peer; ValueError if it is malformed."""
        check_tensor(message.tensor_part, TensorSpec((num_rows, WIDTH), compressions={runtime_pb2.NONE}))
        return cls(int.from_bytes(message.metadata[:8], "big"), deserialize_torch_tensor(message.tensor_part))


def is_near(own: Digest, other: Digest, sizes: torch.Tensor, moved: torch.Tensor | None, spread: torch.Tensor) -> bool:
    """Whether two states are of one run, in the eyes of the other peer; false for NaN.

    :param sizes: number of elements of each parameter
    :param moved: how far the other peer has moved each parameter since; None if it is not known
    :param spread: how far the other peer is from further ones, for each parameter
    """
    first, norms = len(sizes), other.sums.double().norm(dim=1)
    usual = norms[:first].norm() / sizes.sum().sqrt()
    scale = torch.maximum(norms[:first], LEAST_NORM * usual * sizes.sqrt())
    moved = (ONE_STEP - SAME) / MOVED_FACTOR * scale if moved is None else moved
    bounds = MAX_STATISTICS_ERROR * (norms * own.sums.double().norm(dim=1)).sqrt()
    bounds[:first] = torch.minimum(SAME * scale + MOVED_FACTOR * (moved + spread), MAX_MOVED * scale)
    return bool((distances(own, other) <= bounds).all())


def distances(one: Digest, other: Digest) -> torch.Tensor:
    """Return about how far two states are from each other, for each row of `fold`."""
    return (one.sums.double() - other.sums.double()).norm(dim=1)


def fold(groups: Sequence[Sequence[torch.Tensor]], seed: bytes) -> torch.Tensor:
    """Return random sums of groups of tensors of any strides, shape (groups, WIDTH), float32.

    Each element is in one sum, with a random sign. The norm of a row is about that of the group, and that of the
    difference of two rows about the distance of two groups. 20 million elements take 10 ms.

    :param seed: of the signs, of SEED_BYTES; ValueError for another one
    """
    if len(seed) != SEED_BYTES:
        raise ValueError(f"a seed has {SEED_BYTES} bytes")
    generator = torch.Generator().manual_seed(int.from_bytes(seed, "big") >> 1)  # torch takes signed numbers
    signs = torch.randint(2, (NUM_SIGNS,), generator=generator, dtype=torch.int8).mul_(2).sub_(1).float()
    rows = []
    for tensors in groups:
        largest = max((tensor.numel() for tensor in tensors), default=0)
        sums = torch.zeros(min(CHUNK, WIDTH * math.ceil(max(1, largest) / WIDTH)))
        for tensor in tensors:
            chunks = tensor.detach().reshape(-1).split(CHUNK)
            places = torch.randint(NUM_SIGNS - CHUNK, (len(chunks),), generator=generator).tolist()
            for chunk, place in zip(chunks, places, strict=True):
                sums[: len(chunk)].addcmul_(chunk.float().cpu(), signs[place : place + len(chunk)])
        rows.append(sums.view(-1, WIDTH).sum(0))
    return torch.stack(rows)
