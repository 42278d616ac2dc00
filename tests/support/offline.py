"""Averagers and optimizers without their processes and without a network, for fast tests of one peer."""

from types import SimpleNamespace

import torch
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.utils.crypto import RSAPrivateKey
from hivemind.utils.mpfuture import MPFuture

from arguments import AveragerArguments, CollaborationArguments, LocalTrainingArguments, ProgressTrackerArguments
from lib.averaging.coordinator import Outcome
from lib.averaging.optimizer import CollaborativeOptimizer
from lib.averaging.records import signer_of
from lib.averaging.rounds import RoundResult
from lib.averaging.state import TrainingStateAverager
from lib.training.model import build_model
from lib.training.optimizer import build_optimizer
from tests.support.state_swarm import CONFIG, build_averager

SUBKEY = RSASignatureValidator(RSAPrivateKey()).local_public_key


class SilentDHT:
    """DHT without other peers."""

    peer_id = signer_of(SUBKEY)
    client_mode = False

    def get(self, _key: str, **_options) -> MPFuture:
        future = MPFuture()
        future.set_result(None)
        return future

    def store(self, *_args, **_options) -> None:
        pass


PEER = SimpleNamespace(dht=SilentDHT(), public_key=SUBKEY)


class Rounds:
    """Coordinator whose rounds have the outcome that the test sets.

    :param gradients, parameters: values of the averages
    """

    num_attempts, last_error, has_group = 1, "", False

    def __init__(self, optimizer: CollaborativeOptimizer):
        self.averager = optimizer.grad_averager
        self.outcome, self.received = Outcome.AVERAGED, 1.0
        self.gradients, self.parameters = 0.0, None
        self.weights: list[tuple[float, float]] = []

    def average(self, _step: int, weight: float, parameter_weight: float) -> tuple[Outcome, RoundResult | None]:
        self.weights.append((weight, parameter_weight))
        if self.outcome != Outcome.AVERAGED:
            return self.outcome, None
        averager = self.averager
        for average in averager.averaged_gradients:
            average.fill_(self.gradients)
        for average, own in zip(averager.averaged_parameters, averager.parameters, strict=True):
            average.copy_(own if self.parameters is None else torch.full_like(own, self.parameters))
        return self.outcome, RoundResult([b"a", b"b"], self.received, {}, {}, {})

    def call_off(self) -> None:
        pass


def offline_averager(**options) -> TrainingStateAverager:
    """Build a state averager whose process is never started."""
    return build_averager(build_model(CONFIG, "run"), PEER, "run_state_averager", start=False, **options)


def offline_optimizer(model: torch.nn.Module, **flags) -> CollaborativeOptimizer:
    """Build a trainer's optimizer with `Rounds`. Use the fixture `offline`, which keeps it from starting processes."""
    known = LocalTrainingArguments.__dataclass_fields__
    training_args = LocalTrainingArguments(**{name: value for name, value in flags.items() if name in known})
    collaboration_args = CollaborationArguments(
        run_id="run", bandwidth=flags.pop("bandwidth", 50.0),
        **{name: value for name, value in flags.items() if name not in known},
    )  # fmt: skip
    averager_args, tracker_args = AveragerArguments(), ProgressTrackerArguments()
    optimizer = build_optimizer(model, PEER, 4, training_args, collaboration_args, averager_args, tracker_args)
    optimizer.coordinator = Rounds(optimizer)
    return optimizer
