"""A small swarm of peers in the test's process, and a reference that takes the same steps in one process."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from hivemind.dht.schema import SchemaValidator
from hivemind.dht.validation import RecordValidatorBase
from hivemind.utils import PerformanceEMA
from hivemind.utils.crypto import RSAPrivateKey

from cotrain.dht.run_records import make_validators
from cotrain.training.builders import build_local_optimizer, build_param_groups, build_scheduler
from peerstep import swarm as swarm_module
from peerstep.matchmaking import RoundControl, rank
from peerstep.swarm import Swarm as Peer
from tests.support.fakes import make_batch
from tests.support.models import build_model
from tests.support.peers import local_optimizer, local_peer, wait_until
from tests.support.state import CONFIG, arguments, flat

TIMEOUTS = {"matchmaking_time": 15.0, "averaging_timeout": 120.0}  # which no busy machine exceeds
SAMPLES = make_batch(size=200)
# The local steps of one trainer: a batch, and the global step at whose parameters its gradient was computed
Contribution = list[tuple[dict[str, torch.Tensor], int]]
MAX_SWARMS = 200  # of one process
EXACT = dict.fromkeys(("gradient_compression", "state_compression", "load_state_compression"), "none")
DELAYED = {"delay_grad_averaging": True, "delay_optimizer_step": True}


class NoEstimate(PerformanceEMA):
    """Performance estimate of zero: peers take a step when all samples are reported, not when they are expected."""

    def update(self, task_size: float, interval: float | None = None) -> float:
        return self.samples_per_second


def parameters_of(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters in the optimizer's order."""
    return [parameter for group in build_param_groups(model, 0.01) for parameter in group["params"]]


@torch.no_grad()
def set_parameters(model: torch.nn.Module, values: Sequence[torch.Tensor]) -> None:
    for parameter, value in zip(parameters_of(model), values, strict=True):
        parameter.copy_(value)


class Trainer:
    """A trainer whose local steps are taken by the test.

    Its attribute `version` is the global step whose parameters the model has.
    """

    def __init__(self, stack: ExitStack, peer: Peer, client_mode: bool = False, **options):
        self.peer, self.stack = peer, stack
        self.model = build_model(CONFIG, "run")
        options = {"client_mode": client_mode, **TIMEOUTS, **options}
        self.optimizer = stack.enter_context(local_optimizer(self.model, peer, 1, **options))
        self.optimizer.tracker.performance_ema = NoEstimate()
        self.log: list[dict] = []
        self.optimizer.on_round = self.log.append
        self.tracker, self.averager = self.optimizer.tracker, self.optimizer.grad_averager
        self.id, self.name = peer.dht.peer_id.to_bytes(), str(peer.dht.peer_id)
        self.version = 0
        self.contribution: Contribution = []

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
        return flat(self.optimizer._offloaded_parameters())

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep the trainer from taking a global step while the block runs."""
        with self.optimizer.frozen_state():
            self.version = self.optimizer.state_averager.applied_step  # frozen_state applies a pending update
            yield

    def local_step(self, batch: dict[str, torch.Tensor]) -> None:
        """Compute the mean gradient of a batch and call `step`."""
        optimizer = self.optimizer
        self.contribution.append((batch, self.version))
        optimizer.zero_grad()
        self.model(**batch).loss.backward()
        optimizer.step(batch_size=len(batch["labels"]))

    def pop_contribution(self) -> Contribution:
        """Return the local steps since the last call."""
        contribution, self.contribution = self.contribution, []
        return contribution

    @property
    def model_parameters(self) -> torch.Tensor:
        return flat(self.optimizer.state_averager.main_parameters)

    def knows(self, trainers: Sequence["Trainer"]) -> bool:
        """Whether this trainer knows the completed step of each other trainer that has reported one."""
        known = {progress.peer_id: progress.completed for progress in self.tracker.other_trainers}
        return all(
            known.get(trainer.id) == trainer.completed for trainer in trainers if trainer is not self and trainer.log
        )

    def join(self) -> None:
        """Download the newest state, as a trainer does at its start."""
        self.tracker.refresh()
        wait_until(self.optimizer.load_state_from_peers, 120, "the offer of a state")
        self.version = self.optimizer.state_averager.applied_step

    def wait_for(self, step: int, timeout: float = 120) -> None:
        wait_until(lambda: self.completed >= step, timeout, f"step {step}: {self.log}")


class Network:
    """DHT peers in this process that know each other. Tests share them, since starting a peer takes seconds."""

    def __init__(self, stack: ExitStack, folder: Path):
        self.stack, self.folder = stack, folder
        self._peers: dict[tuple[bool, int], Peer] = {}

    def peer(self, number: int, client_mode: bool = False) -> Peer:
        if (client_mode, number) not in self._peers:
            folder = self.folder / f"{'client' if client_mode else 'public'}{number}"
            self._peers[client_mode, number] = self.start(self.stack, folder, client_mode)
        return self._peers[client_mode, number]

    @property
    def address(self) -> str:
        return str(self.peer(0).dht.get_visible_maddrs()[0])

    def start(self, stack: ExitStack, folder: Path, client_mode: bool = False) -> Peer:
        """Start another peer, which ends with `stack`."""
        addresses = (self.address,) if self._peers else ()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(swarm_module, "build_validators", build_validators_of_all)
            return stack.enter_context(local_peer(folder, "run", addresses, client_mode=client_mode))


def build_validators_of_all(
    run_id: str, private_key: RSAPrivateKey, _schemas
) -> tuple[list[RecordValidatorBase], bytes]:
    """Build the validators of a peer that swarms with different run IDs use one after the other."""
    (validator,), public_key = make_validators(run_id, private_key)
    schemas = next(part for part in validator._validators if isinstance(part, SchemaValidator))
    for number in range(MAX_SWARMS):
        (other,), _ = make_validators(f"{run_id}{number}", private_key)
        validator._lifetimes |= other._lifetimes
        for part in other._validators:
            if isinstance(part, SchemaValidator):
                schemas._key_id_to_field_name |= part._key_id_to_field_name
    return [validator], public_key


class Swarm:
    """The trainers of one run. Each swarm has a different run ID.

    :param options: options of each optimizer, as in `local_optimizer`
    """

    _run_numbers = itertools.count()

    def __init__(self, stack: ExitStack, network: Network, folder: Path, **options):
        self.stack, self.network, self.folder = stack, network, folder
        self.run_id = f"run{next(self._run_numbers)}"
        self.options = {"run_id": self.run_id, "target_batch_size": 12, "average_state_every": 1, **EXACT, **DELAYED}
        self.options |= options
        self.trainers: list[Trainer] = []
        self.pool = ThreadPoolExecutor(8)
        stack.callback(self.pool.shutdown, cancel_futures=True)
        self._num_borrowed = Counter()
        self._num_taken = 0

    def borrow(self, client_mode: bool = False) -> Peer:
        """Return a peer of the network that this swarm does not use yet."""
        self.network.peer(0)  # the other peers join through it
        number = self._num_borrowed[client_mode]
        self._num_borrowed[client_mode] += 1
        return self.network.peer(number, client_mode)

    def add(self, client_mode: bool = False, identity: str = "", **options) -> Trainer:
        """Add a trainer.

        :param identity: name of a new DHT peer to start; default: one of the network. A trainer that is added with the
            name of a removed one is that peer after a restart
        """
        stack = self.stack.enter_context(ExitStack())
        peer = self.network.start(stack, self.folder / identity, client_mode) if identity else self.borrow(client_mode)
        trainer = Trainer(stack, peer, client_mode=client_mode, **{**self.options, **options})
        self.trainers.append(trainer)
        return trainer

    def add_several(self, *client_modes: bool) -> list[Trainer]:
        return [self.add(client_mode) for client_mode in client_modes]

    def remove(self, trainer: Trainer) -> None:
        self.trainers.remove(trainer)
        trainer.stack.close()

    def take(self, size: int) -> dict[str, torch.Tensor]:
        """Return the next samples."""
        begin, self._num_taken = self._num_taken, self._num_taken + size
        return {name: values[begin : begin + size] for name, values in SAMPLES.items()}

    def compute(self, *sizes: int, trainers: Sequence[Trainer] = ()) -> None:
        """Take a local step of each trainer, with `sizes` samples. Trainers with delays do not wait for the round."""
        for trainer, size in zip(trainers or self.trainers, sizes, strict=True):
            if size:
                trainer.local_step(self.take(size))

    def wait_for(self, step: int, trainers: Sequence[Trainer] = ()) -> list[Contribution]:
        """Wait until trainers have completed a global step.

        :returns: the contribution of each trainer
        """
        for trainer in trainers or self.trainers:
            trainer.wait_for(step)
            # With delays, the model gets the parameters in the next local step, after its gradient is computed.
            trainer.version = step - 1 if trainer.optimizer.delay_grad_averaging else step
        return [trainer.pop_contribution() for trainer in trainers or self.trainers]

    def meet(self) -> None:
        """Wait until the trainers know each other and each other's completed steps."""
        for trainer in self.trainers:
            wait_until(lambda trainer=trainer: trainer.knows(self.trainers), 120, "that all know each other")

    def in_order(self, step: int) -> list[Trainer]:
        """Return the trainers in the order in which they are asked to lead the group of a step."""
        return sorted(self.trainers, key=lambda trainer: rank(step, trainer.peer.dht.peer_id))

    def schedule_rounds(self, step: int) -> list[RoundControl]:
        """Start matchmaking for a step in the averagers of all trainers, without their optimizers.

        :returns: the handle of each trainer's round, in the order of `in_order`
        """
        self.compute(*[1] * len(self.trainers))  # trainers report progress after their first local step
        for trainer in self.trainers:
            wait_until(
                lambda tracker=trainer.tracker: len(tracker.roster(step)) == len(self.trainers), 120, "the roster"
            )
        rounds = []
        for trainer in self.in_order(step):
            trainer.optimizer.coordinator.update_roster()
            rounds.append(trainer.averager.schedule_round(step, timeout=60.0))
            rounds[-1].weight = 1.0
        return rounds

    def global_step(self, *sizes: int) -> list[Contribution]:
        """Let the trainers take a global step.

        Without delays, a trainer takes the global step within the local step that finds it due. The first trainer's
        local step makes it due; the other trainers, which have contributed already, compute one more sample.

        :param sizes: samples that each trainer contributes, the target batch size in total
        :returns: the contribution of each trainer
        """
        first, *others = self.trainers
        step = first.completed + 1
        self.meet()
        if first.optimizer.delay_grad_averaging:
            self.compute(*sizes)
            return self.wait_for(step)
        self.compute(*sizes[1:], trainers=others)
        known = first.tracker
        wait_until(lambda: known.estimate()[0] == sum(sizes[1:]), 120, "their samples")
        last_steps = [self.pool.submit(first.local_step, self.take(sizes[0]))]
        for trainer in others:
            wait_until(lambda trainer=trainer: trainer.tracker.seconds_to_step <= 0, 120, "that the step is due")
            last_steps.append(self.pool.submit(trainer.local_step, self.take(1)))
        for finished in last_steps:
            finished.result(120)
        return self.wait_for(step)


class Replay:
    """Reference: one process that takes the same global steps, with the optimizer of the trainers.

    :param max_grad_norm: norm to which the gradient of a step is clipped, 0: none
    """

    def __init__(self, max_grad_norm: float = 0.0):
        self.max_grad_norm, args = max_grad_norm, arguments()
        self.model = build_model(CONFIG, "run")
        self.optimizer = build_local_optimizer(build_param_groups(self.model, args.weight_decay), args)
        self.scheduler = build_scheduler(self.optimizer, args)
        # The parameters after each step
        self.versions = [[parameter.detach().clone() for parameter in parameters_of(self.model)]]
        self.norms: list[float] = []  # of the gradients of the steps, before clipping

    def step(self, contributions: list[Contribution]) -> torch.Tensor:
        """Take a step with the contributions of some trainers.

        :returns: the parameters after the step
        """
        total, num_samples = [torch.zeros_like(p) for p in parameters_of(self.model)], 0
        for contribution in contributions:
            mean, size = self.gradient(contribution)
            torch._foreach_add_(total, mean, alpha=size)
            num_samples += size
        set_parameters(self.model, self.versions[-1])
        for parameter, gradient in zip(parameters_of(self.model), total, strict=True):
            parameter.grad = gradient / num_samples
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm or math.inf)
        self.norms.append(float(norm))
        self.optimizer.step()
        self.scheduler.step()
        self.versions.append([parameter.detach().clone() for parameter in parameters_of(self.model)])
        return self.parameters()

    def parameters(self, version: int = -1) -> torch.Tensor:
        return flat(self.versions[version])

    def gradient(self, contribution: Contribution) -> tuple[list[torch.Tensor], int]:
        """Return the mean gradient over all samples of a contribution, and the number of samples."""
        total, num_samples = [torch.zeros_like(p) for p in parameters_of(self.model)], 0
        for batch, version in contribution:
            set_parameters(self.model, self.versions[version])
            self.model.zero_grad()
            self.model(**batch).loss.backward()
            size = len(batch["labels"])
            torch._foreach_add_(total, [p.grad for p in parameters_of(self.model)], alpha=size)
            num_samples += size
        return torch._foreach_div(total, num_samples), num_samples


def assert_equal_parameters(trainers: list[Trainer], expected: torch.Tensor) -> None:
    for trainer in trainers:
        assert (trainer.parameters - expected).abs().max() < 1e-6
