"""Scenarios of many unequal peers in one process: the real averaging code over tests/support/simulated_network.py.

Peers train on a quadratic loss with noise, so that different histories have different parameters.
"""

import logging
import math
import threading
from collections.abc import Callable
from types import SimpleNamespace

import torch

from peerstep.reports.marks import Marks
from peerstep.step.coordinator import Outcome
from tests.support.engine import build_optimizer
from tests.support.simulated_network import Network, Node
from tests.support.simulated_time import owner
from tests.support.state import snapshot

State = tuple[dict, list[torch.Tensor]]

NUM_PARAMETERS = 200
BATCH = 4  # samples of a local step
PART_BYTES = 80  # a share in a group of four is several parts, as in real rounds
LINKS = 10_000.0  # bytes per second; 200 gradients and parameters are 1600 bytes
SETTINGS = {"optimizer": "adamw", "learning_rate": 0.01, "warmup_steps": 0, "adam_epsilon": 1e-8}
SETTINGS |= {"average_state_every": 2}  # rounds with and without parameters
SETTINGS |= {"gradient_compression": "none", "state_compression": "none", "load_state_compression": "none"}


class Peer(Node):
    """A trainer: its optimizer, its thread and its node. Create it with `Scenario.add`."""

    def __init__(self, scenario: "Scenario", name: str, speed: float, uplink: float, client: bool, clock: float):
        super().__init__(scenario, uplink, client, clock)
        self.scenario, self.name = scenario, name
        self.speed, self.batch = speed, BATCH  # local steps per second, and their samples; may be changed
        self.has_joined = False
        self._recorded = -1  # newest step in `history`
        self.log: list[str] = []
        self.rounds: list[dict] = []  # entries of the round log
        self.downloads: list[tuple[int, int]] = []  # own step, and the step of the state that it has taken over
        self.loaded: list[torch.Tensor] = []  # their parameters
        self.local_steps: list[tuple[int, torch.Tensor, torch.Tensor]] = []  # samples, parameters, mean gradient
        self.samples: dict[int, int | None] = {}  # step -> samples of this peer in it, None if it was not in the step
        self.history: dict[int, torch.Tensor] = {}  # step -> parameters with its update
        self.noise = torch.Generator().manual_seed(scenario.rng.getrandbits(60))

    # Training

    def start(self, start_step: int, parameters: torch.Tensor, state: State | None, flags: dict) -> None:
        self.context.copy().run(self._build, start_step, parameters, state, flags)

    def _build(self, start_step: int, parameters: torch.Tensor, state: State | None, flags: dict) -> None:
        self.model = torch.nn.Module()
        self.model.weight = torch.nn.Parameter(parameters.clone())
        flags = {**SETTINGS, "bandwidth": self.uplink * 8e-6, **flags}
        peer = SimpleNamespace(dht=self, public_key=self.subkey, private_key=self.private_key, run_id="run")
        self.optimizer = build_optimizer(self.model, peer, BATCH, **flags)
        self.optimizer.grad_averager.allreduce_kwargs["part_size_bytes"] = PART_BYTES
        self.optimizer.on_round = self.rounds.append
        self.optimizer.state_averager.restore = self._restore
        if state is not None:
            self.optimizer.state_averager.restore(*state)
            self.downloads.clear()
            start_step = self.step
        if start_step:
            self.optimizer.begin_at(start_step)
            self.optimizer.share_state()
        threading.Thread(target=self.train, name=f"Trainer {self.name}", daemon=True).start()

    def _restore(self, metadata: dict, tensors: list[torch.Tensor]) -> None:
        self.downloads.append((self.step, metadata["epoch"]))
        self.loaded.append(tensors[0].clone())
        type(self.optimizer.state_averager).restore(self.optimizer.state_averager, metadata, tensors)

    def train(self) -> None:
        self._join()
        while True:
            self.scenario.time.sleep(self.compute_seconds())
            weight = self.model.weight
            weight.grad = self.compute(weight.detach())
            self.local_steps.append((self.batch, weight.detach().clone(), weight.grad.clone()))
            self.optimizer.step(batch_size=self.batch)
            self.record()

    def compute_seconds(self) -> float:
        """Return the seconds of the next local step."""
        return 1.0 / self.speed

    def compute(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the gradient of a local step."""
        noise = torch.randn(NUM_PARAMETERS, generator=self.noise).view(weight.shape)
        return weight - self.scenario.target.view(weight.shape) + 2.0 * noise

    def _join(self) -> None:
        """Download a state, as a trainer does at its start (cotrain/training/session.py)."""
        tracker = self.optimizer.tracker
        for _ in range(3):
            tracker.refresh()
            if self.optimizer.load_state_from_peers():
                break
            if all(peer.epoch <= self.step + 1 for peer in tracker.view().live):
                break
        self.optimizer.pop_records()
        self.has_joined = True

    def record(self) -> None:
        self.samples.update((r.step, r.samples) for r in self.optimizer.pop_records() if r.outcome != Outcome.FAILED)
        if self.optimizer.state_averager.applied_step != self._recorded:
            metadata, tensors = snapshot(self.optimizer.state_averager)
            self._recorded = metadata["epoch"]
            later = [step for step in self.history if step > self._recorded]  # of a fork that this peer has left
            for step in later:
                del self.history[step]
            self.history[self._recorded] = tensors[0]

    @property
    def step(self) -> int:
        return self.optimizer.local_epoch

    @property
    def state(self) -> State:
        return snapshot(self.optimizer.state_averager)

    @property
    def marks(self) -> Marks:
        return self.optimizer.state_averager.marks

    @property
    def applied_samples(self) -> int:
        """Samples of this peer in the global steps that it has taken."""
        return sum(samples or 0 for samples in list(self.samples.values()))

    @property
    def received(self) -> float:
        """Mean fraction of the averages that this peer has received in its rounds."""
        fractions = [entry["received"] for entry in self.rounds if entry["outcome"] == "averaged"]
        return sum(fractions) / max(1, len(fractions))

    def outcomes(self) -> list[str]:
        return [entry["outcome"] for entry in self.rounds]

    def leave(self) -> None:
        """Say goodbye, and end."""
        self.optimizer.say_goodbye()
        self.optimizer.stop_averaging()
        self.record()
        self.kill(silently=False)

    def close(self) -> None:
        self.optimizer.coordinator.call_off()  # or hivemind warns when it is deleted


class _PeerLog(logging.Handler):
    """Collects the records of each peer's threads and tasks."""

    def emit(self, record: logging.LogRecord) -> None:
        if hasattr(peer := owner.get(), "log"):
            peer.log.append(f"{peer.scenario.time.read():.1f} {record.levelname[0]} {record.getMessage()}")


class Scenario(Network):
    """Peers of one run. Use it as a context manager: peers and threads end with it.

    :param seed: of the peers' IDs, which decide who leads a step, and of their samples' noise
    :param grain: see SimulatedTime
    :param flags: settings of the run, as options of a trainer
    """

    def __init__(self, seed: int, grain: float = 0.08, **flags):
        super().__init__(seed, grain)
        self.flags = {"target_batch_size": 160, **flags}
        generator = torch.Generator().manual_seed(seed)
        self.target, self.initial = (torch.randn(NUM_PARAMETERS, generator=generator) for _ in range(2))
        self._handler = _PeerLog()

    @property
    def peers(self) -> list[Peer]:
        return [node for node in self.nodes if isinstance(node, Peer)]

    def __enter__(self) -> "Scenario":
        logging.getLogger("peerstep").addHandler(self._handler)
        return super().__enter__()

    def __exit__(self, *error) -> None:
        logging.getLogger("peerstep").removeHandler(self._handler)
        super().__exit__(*error)
        for node in self.nodes:
            node.close()

    def add(
        self,
        speed: float = 1.0,
        uplink: float = LINKS,
        downlink: float = math.inf,
        client: bool = False,
        clock: float = 0.0,
        start_step: int = 0,
        params: torch.Tensor | None = None,
        state: State | None = None,
        **flags,
    ) -> Peer:
        """Add a trainer, which joins as a trainer does at its start.

        :param speed: local steps per second, of BATCH samples each
        :param uplink, downlink: bytes per second
        :param clock: seconds by which its wall clock is ahead
        :param start_step, params: step and parameters of its checkpoint; these may have any shape
        :param state: the training state in its checkpoint, instead of these two
        """
        peer = Peer(self, "abcdefghijklmnopqrstuvwxyz"[len(self.peers) % 26] * (1 + len(self.peers) // 26),
                    speed, uplink, client, clock)  # fmt: skip
        peer.downlink = downlink
        peer.start(start_step, self.initial if params is None else params, state, {**self.flags, **flags})
        self.nodes.append(peer)
        return peer

    # Observation

    def wait(self, seconds: float) -> None:
        """Wait for simulated seconds. Time stands still before the first call of this method or of `wait_until`."""
        self.time.go()
        self.time.sleep(seconds)

    def wait_until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Wait until a condition holds; AssertionError with the state of all peers after so many simulated seconds."""
        self.time.go()
        deadline = self.time.read() + seconds
        while not condition():
            assert self.time.read() < deadline, f"not within {seconds} seconds\n{self.describe()}"
            self.time.sleep(0.1)

    def describe(self) -> str:
        """Describe the peers, with their newest log records."""
        lines = []
        for peer in self.peers:
            lines.append(
                f"{peer.name}: step {peer.step}, outcomes {peer.outcomes()[-8:]}, received {peer.received:.2f}"
            )
            lines += [f"    {line}" for line in peer.log[-6:]]
        return "\n".join(lines)

    def steps_of(self, *peers: Peer) -> list[int]:
        return [peer.step for peer in peers or self.peers]

    def reach(self, step: int, *peers: Peer, seconds: float = 300.0) -> None:
        """Wait until peers have the update of a step."""
        self.wait_until(lambda: all(max(peer.history, default=0) >= step for peer in peers or self.peers), seconds)

    def distance(self, one: Peer, other: Peer) -> float:
        """Return the largest difference of two peers' parameters at the newest step that both have recorded."""
        common = set(one.history) & set(other.history)
        return float((one.history[max(common)] - other.history[max(common)]).abs().max()) if common else math.inf

    def have_one_history(self, *peers: Peer, tolerance: float = 1e-3) -> bool:
        """Whether peers have the same parameters but for rounding: an update changes each by some 0.01."""
        first, *others = peers or self.peers
        return all(self.distance(first, other) < tolerance for other in others)

    def unite(self, *peers: Peer, seconds: float = 100.0, tolerance: float = 0.005) -> None:
        """Wait until peers have one history from now on.

        :param tolerance: see `distance`. The optimizer statistics of a repaired peer lack some gradients: its updates
           may differ by half of one
        """
        for peer in peers or self.peers:
            peer.history.clear()
        self.wait_until(lambda: self.have_one_history(*peers, tolerance=tolerance), seconds)
