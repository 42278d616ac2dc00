"""State averagers, and changes of their state."""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from hivemind.proto.averaging_pb2 import DownloadData
from hivemind.utils import MSGPackSerializer

from peerstep.state.averager import TrainingStateAverager
from peerstep.state.statistics import build_with_statistics
from peerstep.tensors.checks import TensorAssembler
from peerstep.tensors.compression import build_state_compression
from tests.support.engine import Hyperparameters


def build_averager(
    model: torch.nn.Module,
    peer,
    prefix: str,
    hyperparameters: Hyperparameters | None = None,
    compression: str = "none",
    offload_optimizer: bool = True,
    optimizer: Callable | None = None,
    **options,
):
    """Build a state averager."""
    hyperparameters = hyperparameters or Hyperparameters()
    return TrainingStateAverager(
        dht=peer.dht,
        public_key=peer.public_key,
        prefix=prefix,
        params=hyperparameters.build_groups(model),
        optimizer=partial(build_with_statistics, optimizer or hyperparameters.build_optimizer),
        scheduler=hyperparameters.build_scheduler,
        initialize_optimizer=False,
        offload_optimizer=offload_optimizer,
        state_compression=build_state_compression(compression),
        **{"allow_state_sharing": False, "start": True, **options},
    )


def snapshot(averager: TrainingStateAverager) -> tuple[dict, list[torch.Tensor]]:
    """Return a copy of the state: metadata and tensors."""
    with averager.frozen_state() as (metadata, tensors):
        return metadata, [tensor.clone() for tensor in tensors]


def receive(messages: Iterable[bytes], averager: TrainingStateAverager) -> tuple[dict, list[torch.Tensor]]:
    """Return the state in the messages of a download, as it arrives at a peer: metadata and tensors."""
    messages = [DownloadData.FromString(message) for message in messages]
    metadata = MSGPackSerializer.loads(messages[0].metadata)
    assembler = TensorAssembler(averager.layout.specs(metadata))
    for message in messages:
        assembler.add(message.tensor_part)
    averager.layout.unpack(metadata, assembler.tensors)
    return metadata, assembler.tensors


def offer(averager: TrainingStateAverager, step: int, priority: float | None = None) -> None:
    averager.sync_with_main_parameters(step)
    averager.state_sharing_priority = step if priority is None else priority
    averager.allow_state_sharing = True


@torch.no_grad()
def fill_parameters(averager: TrainingStateAverager, value: float) -> None:
    for parameter in averager.layout.parameters:
        parameter.fill_(value)


def update(averager: TrainingStateAverager, step: int, seed: int = 0, parameters: list | None = None) -> None:
    """Take a global step with random gradients."""
    generator = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(parameter.shape, generator=generator) for parameter in averager.layout.parameters]
    averager.apply_update(step, gradients, parameters)


def flat(tensors) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def learning_rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]
