"""Simulated peers that train one model in one process, with the local and global steps of the trainers. No network.

The local steps are those of LocalTraining, and the optimizers are those of
cotrain/training/builders.py. A round is computed as its reducers do, without the time that it takes.
"""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from hivemind.averaging.partition import TensorPartContainer
from hivemind.compression import CompressionBase, CompressionInfo, NoCompression, deserialize_torch_tensor

from cotrain.settings import Hyperparameters
from cotrain.training.builders import build_local_optimizer, build_param_groups, build_scheduler
from peerstep.rounds.bounds import norm_of
from peerstep.rounds.relative_bounds import NormFilter, cap_weights
from peerstep.state.averager import set_schedule
from peerstep.step.accumulators import GradientAccumulator, clip_norm
from peerstep.step.local_updates import LocalTraining, LocalUpdates
from peerstep.tensors.compression import COMPRESSIONS, TopK

SPEEDS = (1, 2, 1, 4)  # of the peers, repeated
WARMUP_FRACTION = 0.05  # of the global steps
FINAL_RATE = 0.1  # of the peak learning rate, at the end
NUM_EVALUATIONS = 4  # evenly spread over the samples

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Variant:
    """How peers train together.

    :param peers: number of peers, with the speeds SPEEDS
    :param local_steps: mean number of local steps per peer and round
    :param local_updates: whether peers take optimizer steps between the rounds; else they accumulate gradients
    :param delay: mean number of local steps per peer until the result of a round arrives
    :param compression: of the pseudo-gradients, a key of COMPRESSIONS
    :param missing: probability that a peer misses a round
    :param warmup: fraction of the samples before the first outer step: plain averages after each local step
    :param growth: fraction of the samples within which rounds grow from one local step to `local_steps`
    :param equally: whether each peer with samples weighs the same in a round
    :param per_step: weigh changes by 1 / samples, so that peers with more local steps say no more (FedNova)
    :param proximal: local updates: strength of the pull to the parameters of the last global step (FedProx)
    :param is_open: bound weights and norms as in an open run; else as in one with invitations
    """

    peers: int
    local_steps: int = 1
    local_updates: bool = True
    delay: int = 0
    compression: str = "none"
    missing: float = 0.0
    warmup: float = 0.0
    growth: float = 0.0
    equally: bool = False
    per_step: bool = False
    proximal: float = 0.0
    is_open: bool = False

    def size_at(self, progress: float) -> float:
        """Return the size of a round as a fraction of a whole one, after a fraction of the samples."""
        smallest = 1 / self.local_steps
        if progress < self.warmup:
            return smallest
        return smallest + (1 - smallest) * progress / self.growth if progress < self.growth else 1.0


@dataclass(frozen=True)
class Budget:
    """What a run may compute.

    :param samples: of all peers together
    :param micro_batch: samples of a local step
    """

    samples: int
    micro_batch: int

    @property
    def local_steps(self) -> int:
        return self.samples // self.micro_batch

    def target_batch_size(self, variant: Variant) -> int:
        return variant.local_steps * variant.peers * self.micro_batch

    def schedule(self, variant: Variant) -> dict[str, int]:
        """Return the flags of a schedule that warms up, and decays to FINAL_RATE of the peak.

        Samples of a missed round count in the next one, which is due earlier by as many.
        """
        num_rounds = self.samples / self.target_batch_size(variant) / (1.0 - variant.missing)
        total_steps = math.ceil(num_rounds / (1.0 - FINAL_RATE)) + 1
        return {"total_steps": total_steps, "warmup_steps": min(total_steps, round(WARMUP_FRACTION * num_rounds))}


@dataclass
class Result:
    """Outcome of a run.

    :param evaluations: samples of all peers -> validation loss of the parameters of the last global step
    """

    rounds: int = 0
    evaluations: dict[int, float] = field(default_factory=dict)


@torch.no_grad()
def all_reduce(
    contributions: Sequence[Tensors],
    weights: Sequence[float],
    compression: CompressionBase,
    variant: Variant,
    kept: list[dict[int, float]],
) -> list[torch.Tensor]:
    """Return the weighted mean that the reducers of a round compute from compressed parts, one reducer per sender.

    :param kept: receives for each part what is left of each sender's values; 1: all
    """
    if variant.is_open:
        weights = list(cap_weights(dict(enumerate(weights)), len(contributions) - 1).values())
    if variant.equally:
        weights = [float(weight > 0) for weight in weights]
    if variant.per_step:
        weights = [1.0 / weight if weight else 0.0 for weight in weights]
    fractions = [1.0] * len(contributions)
    containers = [TensorPartContainer(tensors, fractions, compression) for tensors in contributions]
    means = []
    for reducer in range(len(contributions)):
        outliers = NormFilter(len(contributions) - 1, is_loose=not variant.is_open or variant.local_updates)
        for parts in zip(*(container.get_raw_input_parts(reducer) for container in containers), strict=True):
            received = {
                sender: part if sender == reducer else _send(part, compression) for sender, part in enumerate(parts)
            }
            norms = {sender: norm_of(part) for sender, part in received.items() if weights[sender]}
            own_norm = weights[reducer] * math.hypot(*map(norm_of, contributions[reducer])) / len(contributions) ** 0.5
            factors = outliers.factors(norms, dict(enumerate(weights)), reducer, own_norm)
            kept.append({sender: factors.get(sender, 1.0) for sender in norms if sender != reducer})
            total = torch.zeros_like(parts[0])
            for sender, part in received.items():
                total.add_(part, alpha=weights[sender] * factors.get(sender, 1.0))
            means.append(_send(total / sum(weights), compression))
    flat = torch.cat(means).split([tensor.numel() for tensor in contributions[0]])
    return [mean.view_as(tensor) for mean, tensor in zip(flat, contributions[0], strict=True)]


def _send(part: torch.Tensor, compression: CompressionBase) -> torch.Tensor:
    if isinstance(compression, NoCompression):
        return part
    return deserialize_torch_tensor(compression.compress(part, CompressionInfo.from_tensor(part)))


def parameters_of(groups: Sequence[dict]) -> list[torch.nn.Parameter]:
    return [parameter for group in groups for parameter in group["params"]]


def copies_of(groups: Sequence[dict]) -> list[dict]:
    """Return parameter groups with copies of the parameters, as hivemind offloads them."""
    return [{**group, "params": [torch.nn.Parameter(p.detach().clone()) for p in group["params"]]} for group in groups]


def sample_order(num_samples: int, seed: int, peer: int) -> Iterator[int]:
    """Iterate over the samples in a peer's order, again and again."""
    random = np.random.default_rng([seed, 2, peer])
    while True:
        yield from random.permutation(num_samples).tolist()


class DataParallelPeers:
    """Peers that accumulate gradients. Their models are equal, so one model serves all."""

    def __init__(self, variant: Variant, args: Hyperparameters, build_model: Callable[[], torch.nn.Module]):
        self.args, self.model = args, build_model()
        groups = build_param_groups(self.model, args.weight_decay, args.optimizer)
        self.parameters = parameters_of(groups)
        self.optimizer = build_local_optimizer(groups, args)
        self._schedule = build_scheduler(self.optimizer, args)
        self._compression, self.kept = COMPRESSIONS[variant.compression](), []
        self._variant, self._step = variant, 0
        self.accumulators = [
            GradientAccumulator(self.parameters, [], [torch.zeros_like(p) for p in self.parameters])
            for _ in range(variant.peers)
        ]

    def local_step(self, peer: int, batch: dict[str, torch.Tensor], num_samples: int) -> None:
        self.model.zero_grad()
        self.model(**batch).loss.backward()
        self.accumulators[peer].add(num_samples)

    def begin_round(self, absent: frozenset[int], progress: float) -> None:
        samples = [accumulator.load() for accumulator in self.accumulators]
        contributions = [accumulator.contribution for accumulator in self.accumulators]
        self._mean = all_reduce(contributions, samples, self._compression, self._variant, self.kept)

    def finish_round(self) -> None:
        """Take the global step."""
        for parameter, mean in zip(self.parameters, self._mean, strict=True):
            parameter.grad = mean
        clip_norm(self._mean, self.args.max_grad_norm)
        set_schedule(self._schedule, self._step)
        self.optimizer.step()
        self._step += 1

    def global_parameters(self) -> Tensors:
        return self.parameters


class LocalTrainer(LocalTraining):
    """A trainer's model and its local steps.

    :param theta: parameters of the last global step
    """

    def __init__(
        self, model: torch.nn.Module, theta: Tensors, args: Hyperparameters, project: Callable | None,
        proximal: float = 0.0,
    ):  # fmt: skip
        self.model, self.step, self.proximal = model, 0.0, proximal  # `step` counts whole rounds
        groups = build_param_groups(model, args.weight_decay, args.optimizer)
        builders = partial(build_local_optimizer, args=args), partial(build_scheduler, args=args)
        contribution = [torch.zeros_like(parameter) for parameter in theta]
        super().__init__(
            groups, *builders, args.max_grad_norm, parameters_of(groups), theta, contribution, project=project
        )

    def train(self, batch: dict[str, torch.Tensor], num_samples: int) -> None:
        self.model.zero_grad()
        self.model(**batch).loss.backward()
        if self.proximal:
            for parameter, step_parameter in zip(self.main_parameters, self.step_parameters, strict=True):
                if parameter.grad is not None:
                    parameter.grad.add_(parameter.detach() - step_parameter, alpha=self.proximal)
        self.add(num_samples, self.step)

    def receive_step(self, step: float) -> None:
        """Move the model to the parameters of a global step, plus the local updates that no step has used."""
        self.step = step
        self.rebase()


class LocalUpdatePeers:
    """Peers that train by themselves between the rounds."""

    def __init__(self, variant: Variant, args: Hyperparameters, build_model: Callable[[], torch.nn.Module]):
        self.args, self._variant = args, variant
        self._compression, self.kept = COMPRESSIONS[variant.compression](), []
        groups = copies_of(build_param_groups(build_model(), args.weight_decay, args.optimizer))
        self.theta = parameters_of(groups)
        self.outer = LocalUpdates(args.outer_learning_rate, args.outer_momentum).build_outer(groups)
        project = self._compression.project if isinstance(self._compression, TopK) else None
        options = self.theta, args, project, variant.proximal
        self.accumulators = [LocalTrainer(build_model(), *options) for _ in range(variant.peers)]
        self.step = 0.0  # counts whole rounds

    def local_step(self, peer: int, batch: dict[str, torch.Tensor], num_samples: int) -> None:
        self.accumulators[peer].train(batch, num_samples)

    def begin_round(self, absent: frozenset[int], progress: float) -> None:
        """Average the pseudo-gradients.

        :param absent: peers that miss the round: their local updates count in the next one
        :param progress: fraction of the samples so far
        :raises FloatingPointError: if the parameters of all other peers are not finite
        """
        self._size, self._is_plain = self._variant.size_at(progress), progress < self._variant.warmup
        samples = [accumulator.load() for accumulator in self.accumulators]
        for number in absent:
            self.accumulators[number].take_back(samples[number])
        self._senders = [number for number, size in enumerate(samples) if size and number not in absent]
        if not self._senders:
            raise FloatingPointError("the parameters of all peers are NaN or Inf")
        weights = [samples[number] for number in self._senders]
        contributions = [self.accumulators[number].contribution for number in self._senders]
        self._mean = all_reduce(contributions, weights, self._compression, self._variant, self.kept)

    def finish_round(self) -> None:
        """Take the global step, and bring the peers to it. Peers that missed the round download it."""
        for number in self._senders:
            self.accumulators[number].confirm()
        for parameter, gradient in zip(self.theta, self._mean, strict=True):
            parameter.grad = gradient
        clip_norm(self._mean, self.args.max_update_norm * float(torch.nn.utils.get_total_norm(self.theta)))
        for group in self.outer.param_groups:
            rates = self.args.outer_learning_rate, self.args.outer_momentum
            group["lr"], group["momentum"] = (1.0, 0.0) if self._is_plain else rates
        self.outer.step()
        self.step += self._size
        for trainer in self.accumulators:
            trainer.receive_step(self.step)

    def global_parameters(self) -> Tensors:
        return self.theta


class Simulation:
    """Interleaves the local steps of peers by their speeds, and takes a global step when one is due.

    :param task: model and data, see low_communication.TextTask
    :param seed: of the initial weights, the order of each peer's samples, and the missed rounds
    """

    def __init__(self, task, variant: Variant, args: Hyperparameters, budget: Budget, seed: int):
        torch.manual_seed(seed)
        self.task, self.variant, self.budget = task, variant, budget
        kind = LocalUpdatePeers if variant.local_updates else DataParallelPeers
        self.peers = kind(variant, args, lambda: task.build_model(seed).eval())  # eval(): no dropout
        self.result = Result()
        self._model, self._optimizer = task.build_model(seed).eval(), args.optimizer
        self._random = np.random.default_rng([seed, 1])
        self._orders = [sample_order(task.num_samples, seed, number) for number in range(variant.peers)]
        self._marks = [budget.samples * part // NUM_EVALUATIONS for part in range(1, NUM_EVALUATIONS)]
        self._arrival = -1  # local step after which the result of the running round arrives; -1: no round

    def run(self, progress: Callable[[], None] = lambda: None) -> Result:
        """Train until the samples of the budget are computed.

        Samples that no round has used by then are lost.

        :param progress: called after each local step
        :raises FloatingPointError: if all peers diverge
        """
        queue = [(1.0 / SPEEDS[number % len(SPEEDS)], number) for number in range(self.variant.peers)]
        heapq.heapify(queue)
        for step in range(1, self.budget.local_steps + 1):
            moment, number = heapq.heappop(queue)
            heapq.heappush(queue, (moment + 1.0 / SPEEDS[number % len(SPEEDS)], number))
            batch = self.task.make_batch([next(self._orders[number]) for _ in range(self.budget.micro_batch)])
            self.peers.local_step(number, batch, self.budget.micro_batch)
            self._advance(step)
            progress()
        if self._arrival >= 0:
            self.peers.finish_round()
        self.result.evaluations[self.budget.samples] = self._evaluate()
        return self.result

    def _advance(self, step: int) -> None:
        """Use the result of a round that has arrived, and begin the next one if it is due."""
        if self._arrival == step:
            self._finish_round(step)
        num_samples = sum(accumulator.num_samples for accumulator in self.peers.accumulators)
        progress = step / self.budget.local_steps
        target = self.variant.size_at(progress) * self.budget.target_batch_size(self.variant)
        if self._arrival < 0 and num_samples >= round(target):
            self.result.rounds += 1
            self.peers.begin_round(self._draw_absent(), progress)
            self._arrival = step + self.variant.delay * self.variant.peers
            if self._arrival == step:
                self._finish_round(step)

    def _finish_round(self, step: int) -> None:
        self.peers.finish_round()
        self._arrival = -1
        self._record(step * self.budget.micro_batch)

    def _draw_absent(self) -> frozenset[int]:
        """Draw the peers that miss a round. A round without any peer is drawn again."""
        if not self.variant.missing:
            return frozenset()
        while True:
            missing = self._random.random(self.variant.peers) < self.variant.missing
            senders = [n for n, a in enumerate(self.peers.accumulators) if a.num_samples and not missing[n]]
            if senders:
                return frozenset(np.flatnonzero(missing).tolist())

    def _record(self, samples: int) -> None:
        if self._marks and samples >= self._marks[0]:
            self._marks = [mark for mark in self._marks if mark > samples]
            self.result.evaluations[samples] = self._evaluate()

    def _evaluate(self) -> float:
        groups = build_param_groups(self._model, 0.0, self._optimizer)
        with torch.no_grad():
            for target, source in zip(parameters_of(groups), self.peers.global_parameters(), strict=True):
                target.copy_(source)
        return self.task.evaluate(self._model)
