"""A small swarm of real peers whose local steps the test takes; tests/support/scenario.py simulates more of them."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch
from hivemind.utils import PerformanceEMA

from peerstep.local_peer import LocalPeer as Peer
from tests.support.engine import build_model, local_optimizer, local_peer, make_batch
from tests.support.processes import wait_until
from tests.support.state import flat

SAMPLES = make_batch(size=200)
OPTIONS = {
    "target_batch_size": 12, "average_state_every": 1, "gradient_compression": "none", "state_compression": "none",
    "load_state_compression": "none", "delay_grad_averaging": True, "delay_optimizer_step": True,
    "matchmaking_time": 15.0, "averaging_timeout": 120.0,  # which no busy machine exceeds
}  # fmt: skip


class NoEstimate(PerformanceEMA):
    """Performance estimate of zero: peers take a step when all samples are reported, not when they are expected."""

    def update(self, task_size: float, interval: float | None = None) -> float:
        return self.samples_per_second


class Trainer:
    """A trainer whose local steps are taken by the test."""

    def __init__(self, stack: ExitStack, peer: Peer, open_optimizer: Callable, options: dict):
        self.peer, self.model = peer, build_model()
        self.optimizer = stack.enter_context(open_optimizer(self.model, peer, 1, **options))
        self.optimizer.tracker.own.performance_ema = NoEstimate()
        self.log: list[dict] = []
        self.optimizer.on_round = self.log.append
        self.tracker, self.averager = self.optimizer.tracker, self.optimizer.grad_averager
        self.id = peer.dht.peer_id.to_bytes()

    @property
    def entry(self) -> dict:
        """The newest entry of the round log."""
        return self.log[-1]

    @property
    def completed(self) -> int:
        return self.tracker.local_progress.completed

    @property
    def parameters(self) -> torch.Tensor:
        """The parameters of the newest step, which the model may not have yet."""
        return flat(self.optimizer.state_averager.layout.parameters)

    def local_step(self, batch: dict[str, torch.Tensor]) -> None:
        """Compute the mean gradient of a batch and call `step`."""
        self.optimizer.zero_grad()
        self.model(**batch).loss.backward()
        self.optimizer.step(batch_size=len(batch["labels"]))

    def knows(self, trainers: Sequence["Trainer"]) -> bool:
        """Whether this trainer knows the completed step of each other trainer that has reported one."""
        known = {progress.peer_id: progress.completed for progress in self.tracker.view().others}
        return all(
            known.get(trainer.id) == trainer.completed for trainer in trainers if trainer is not self and trainer.log
        )


class Swarm:
    """The peers of a run.

    :param open_optimizer, options: of each trainer, as `local_optimizer` and its options
    """

    def __init__(self, stack: ExitStack, folder: Path, open_optimizer: Callable = local_optimizer, **options):
        self.stack, self.folder, self.options = stack, folder, {**OPTIONS, **options}
        self.open_optimizer = open_optimizer
        self.peers: list[Peer] = []
        self.trainers: list[Trainer] = []
        self.pool = ThreadPoolExecutor(8)
        stack.callback(self.pool.shutdown, cancel_futures=True)
        self.num_taken = 0

    @property
    def address(self) -> str:
        return str(self.peers[0].dht.get_visible_maddrs()[0])

    def add_peer(self, client_mode: bool = False) -> Peer:
        """Start a DHT peer."""
        folder, addresses = self.folder / f"peer{len(self.peers)}", (self.address,) if self.peers else ()
        self.peers.append(self.stack.enter_context(local_peer(folder, "run", addresses, client_mode=client_mode)))
        return self.peers[-1]

    def add(self, client_mode: bool = False) -> Trainer:
        self.trainers.append(Trainer(self.stack, self.add_peer(client_mode), self.open_optimizer, self.options))
        return self.trainers[-1]

    def add_several(self, *client_modes: bool) -> list[Trainer]:
        return [self.add(client_mode) for client_mode in client_modes]

    def compute(self, *sizes: int) -> None:
        """Take a local step of each trainer with the next samples; 0: none. Nobody waits for the round."""
        for trainer, size in zip(self.trainers, sizes, strict=True):
            if not size:
                continue
            begin, self.num_taken = self.num_taken, self.num_taken + size
            trainer.local_step({name: values[begin : self.num_taken] for name, values in SAMPLES.items()})

    def wait_for(self, step: int) -> None:
        """Wait until the trainers have completed a global step."""
        for trainer in self.trainers:
            wait_until(lambda trainer=trainer: trainer.completed >= step, 120, f"step {step}: {trainer.log}")

    def meet(self) -> None:
        """Wait until the trainers know each other and each other's completed steps."""
        for trainer in self.trainers:
            wait_until(lambda trainer=trainer: trainer.knows(self.trainers), 120, "that all know each other")

    def global_step(self, *sizes: int) -> None:
        """Let the trainers take a global step, to which they contribute `sizes` samples."""
        step = self.trainers[0].completed + 1
        self.meet()
        self.compute(*sizes)
        self.wait_for(step)
