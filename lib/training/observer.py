"""Download of the trainers' state by a peer that does not train: a monitor or an evaluator."""

import contextlib
from collections.abc import Iterator

import torch

from arguments import HyperparameterArguments
from lib.averaging.state import TrainingStateAverager
from lib.peer.lifecycle import supervise
from lib.peer.peer import Peer
from lib.training.optimizer import build_state_averager


@contextlib.contextmanager
def open_observer(
    model: torch.nn.Module,
    peer: Peer,
    run_id: str,
    hyperparameter_args: HyperparameterArguments,
    load_state_timeout: float,
) -> Iterator[TrainingStateAverager]:
    """Open an averager that downloads the trainers' state into `model`. Call this in the main thread.

    :param load_state_timeout: seconds that a download may take
    """
    averager = build_state_averager(model, peer, run_id, hyperparameter_args, load_state_timeout)
    try:
        with supervise({"averager": averager}, seconds=12.0, exit_code=0):
            yield averager
    finally:
        averager.shutdown()
