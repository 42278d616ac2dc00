"""Peers in this process, each with a state averager, for tests of the training state and its download."""

import itertools
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import torch
from transformers import AlbertConfig

from arguments import HyperparameterArguments
from lib.averaging.records import signer_of
from lib.averaging.state import TrainingStateAverager
from lib.peer.peer import Peer
from lib.training.model import build_model
from lib.training.optimizer import build_local_optimizer, build_param_groups, build_scheduler, build_state_compression
from tests.support.peers import TINY_ALBERT, wait_until
from tests.support.swarm import Network
from utils import get_dictionary

CONFIG = AlbertConfig(vocab_size=1000, **{name: value for name, value in TINY_ALBERT.items() if name != "model_type"})


def arguments(**options) -> HyperparameterArguments:
    return HyperparameterArguments(**{"learning_rate": 0.01, "warmup_steps": 0, "total_steps": 1000, **options})


def build_averager(
    model: torch.nn.Module,
    peer,
    prefix: str,
    hyperparameter_args: HyperparameterArguments | None = None,
    compression: str = "none",
    averager_class: type = TrainingStateAverager,
    offload_optimizer: bool = True,
    optimizer: Callable | None = None,
    **options,
):
    """Build a state averager with the settings of a trainer."""
    hyperparameter_args = hyperparameter_args or arguments()
    return averager_class(
        dht=peer.dht,
        public_key=peer.public_key,
        prefix=prefix,
        params=build_param_groups(model, hyperparameter_args.weight_decay),
        optimizer=optimizer or partial(build_local_optimizer, args=hyperparameter_args),
        scheduler=partial(build_scheduler, args=hyperparameter_args),
        initialize_optimizer=False,
        offload_optimizer=offload_optimizer,
        custom_gradients=offload_optimizer,
        state_compression=build_state_compression(compression),
        **{"allow_state_sharing": False, "start": True, **options},
    )


class StateSwarm:
    """Connected peers in this process, each with a state averager around a separate model.

    The averagers of a swarm find each other by their prefix, which no other swarm has.
    """

    _numbers = itertools.count()

    def __init__(self, stack: ExitStack, network: Network):
        self.stack, self.network = stack, network
        self.prefix = f"run{next(self._numbers)}_state_averager"
        self.offers = f"{self.prefix}.all_averagers"  # key in the DHT
        self.peers: list[Peer] = []
        self._num_borrowed = Counter()
        self.pool = ThreadPoolExecutor(4)
        stack.callback(self.pool.shutdown, cancel_futures=True)

    def add_peer(self, client_mode: bool = False) -> Peer:
        self.network.peer(0)  # the other peers join through it
        self.peers.append(self.network.peer(self._num_borrowed[client_mode], client_mode))
        self._num_borrowed[client_mode] += 1
        return self.peers[-1]

    def add(self, behaviour: Callable | None = None, client_mode: bool = False, **options) -> TrainingStateAverager:
        """Add a peer with a state averager.

        :param behaviour: replaces hivemind's method that serves downloads, see `serve` in test_state_download.py
        """
        peer = self.add_peer(client_mode)
        averager = build_averager(build_model(CONFIG, "run"), peer, self.prefix, start=False, **options)
        averager.behaviour = behaviour
        averager.run_in_background()
        self.stack.callback(shut_down, averager)
        return averager

    def wait_for_offers(self, *donors: TrainingStateAverager) -> None:
        """Wait until the DHT has the offers of these donors, and no others, at every peer."""
        expected = {donor.peer_id: donor.state_sharing_priority for donor in donors}

        def known(peer) -> dict:
            offers = get_dictionary(peer.dht, self.offers)
            return {signer_of(subkey): offer.value for subkey, offer in offers.items()}

        wait_until(lambda: all(known(peer) == expected for peer in self.peers), 120, "the offers")


def shut_down(averager: TrainingStateAverager) -> None:
    if averager.is_alive():
        averager.shutdown()


def offer(averager: TrainingStateAverager, step: int, priority: float | None = None) -> None:
    averager.sync_with_main_parameters(step)
    averager.state_sharing_priority = step if priority is None else priority
    averager.allow_state_sharing = True


@torch.no_grad()
def fill_parameters(averager: TrainingStateAverager, value: float) -> None:
    for parameter in averager._optimized_parameters():
        parameter.fill_(value)


def fill_gradients(averager: TrainingStateAverager, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in averager._optimized_parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def flat(tensors) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def learning_rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]
