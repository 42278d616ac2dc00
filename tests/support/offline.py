"""Averagers and optimizers without their processes and without a network, for fast tests of one peer."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import torch
from hivemind.p2p import P2PDaemonError, PeerID
from hivemind.utils.mpfuture import MPFuture
from hivemind.utils.timed_storage import ValueWithExpiration

from peerstep.optimizer import CollaborativeOptimizer
from peerstep.reports.progress_report import PeerProgress
from peerstep.reports.records import signer_of
from peerstep.rounds.result import RoundResult
from peerstep.state.averager import TrainingStateAverager
from peerstep.step.coordinator import Outcome
from tests.support.engine import build_model, build_optimizer
from tests.support.simulated_network import make_subkey
from tests.support.state import build_averager

RNG = random.Random(0)
SUBKEY = make_subkey(RNG)


class SilentDHT:
    """DHT without other peers."""

    peer_id = signer_of(SUBKEY)
    client_mode, is_open = False, True

    def get(self, _key: str, **_options) -> MPFuture:
        future = MPFuture()
        future.set_result(None)
        return future

    def store(self, *_args, **_options) -> None:
        pass


PEER = SimpleNamespace(dht=SilentDHT(), public_key=SUBKEY, private_key=None, run_id="run")


class Rounds:
    """Coordinator whose rounds have the outcome that the test sets.

    Its attribute `during` is called in each round, `gradients` and `parameters` are the values of the averages. The
    other members lack no updates; `is_given` says that this peer receives parameters on demand. `contribution` has the
    gradients of the newest round as it begins.
    """

    is_called_off, other = False, None
    may_be_used = was_late = is_far = False

    def __init__(self, optimizer: CollaborativeOptimizer):
        self.averager = optimizer.grad_averager
        self.optimizer = optimizer
        self.stopped, self.options = optimizer.coordinator.stopped, optimizer.options
        self.outcome, self.received, self.is_given = Outcome.AVERAGED, 1.0, False
        self.gradients, self.parameters = 0.0, None
        self.during: Callable[[], object] = lambda: None
        self.weights: list[float] = []
        self.contribution: list[torch.Tensor] = []

    def average(self, step: int, weight: float) -> RoundResult:
        self.weights.append(weight)
        self.contribution = [gradient.clone() for gradient in self.averager.gradients]
        self.during()
        if self.outcome != Outcome.AVERAGED:
            return RoundResult(self.outcome, may_be_used=self.may_be_used, num_attempts=1)
        averager = self.averager
        gradients = [torch.full_like(own, self.gradients) for own in averager.gradients]
        own = averager.parameters
        averaged = own if self.parameters is None else [torch.full_like(one, self.parameters) for one in own]
        members = [averager.dht.peer_id, self.other or averager.dht.peer_id]
        parameters = self.received if self.is_given or averager.includes_parameters(step) else None
        distance = self.optimizer.distance
        return RoundResult(
            self.outcome, members, self.received, {}, weight, received_parameters=parameters, distance=distance,
            group_id=bytes([step] * 20), was_late=self.was_late, is_far=self.is_far, gradients=gradients,
            parameters=None if parameters is None else averaged,
        )  # fmt: skip

    def has_group(self, _step: int) -> bool:
        return False

    def look_ahead(self, _view: object) -> None:
        pass

    def call_off(self) -> None:
        self.is_called_off = True

    def stop(self) -> None:
        self.stopped.set()


class Answer(Future):
    """The result of a download in simulated time, which the caller's timeout is not of."""

    def result(self, timeout: float | None = None) -> object:
        return super().result(120)


class Donors:
    """Peers in memory, each with a state averager without its process, that download each other's state.

    Its attribute `offers` has further offers, of peers that do not exist: subkey -> priority; `reports` the steps that
    trainers report, and `marks` those in their reports, by subkey; `away` are those that say so.
    """

    DIAL_SECONDS = 0.5  # to a peer that does not exist
    copy_seconds = 0.0  # that a donor takes to copy its state

    def __init__(self, pool: ThreadPoolExecutor):
        self.pool, self.averagers, self.offers, self.reports, self.marks = pool, {}, {}, {}, {}
        self.away: set[bytes] = set()

    def add(self, behaviour: Callable[[AsyncIterator], AsyncIterator] = aiter, **options) -> TrainingStateAverager:
        """Add a peer.

        :param behaviour: takes the messages of a download and returns those that the peer sends instead
        """
        subkey = make_subkey(RNG)
        dht = SimpleNamespace(peer_id=signer_of(subkey), client_mode=False, get=self._find)
        averager = offline_averager(SimpleNamespace(dht=dht, public_key=subkey), **options)
        averager.behaviour, averager.get_stub = behaviour, partial(self._get_stub, dht.peer_id)
        averager._p2p = SimpleNamespace(_client=SimpleNamespace(connect=self._connect))
        averager._outer_pipe = SimpleNamespace(send=partial(self._call, averager))
        averager._get_current_state_from_host_process = partial(self._get_state, averager)
        self.averagers[dht.peer_id] = averager
        return averager

    def _call(self, averager: TrainingStateAverager, message: tuple[str, list, dict]) -> None:
        """Call a method in another thread instead of the averager's process."""
        method, arguments, _ = message
        self.pool.submit(lambda: asyncio.run(getattr(averager, method)(*arguments)))

    async def _find(self, key: str, **_options) -> ValueWithExpiration:
        if key == "run_training_progress":
            steps = self.reports.items()
            reports = {
                subkey: PeerProgress(
                    b"", epoch=step, completed=step, marks=self.marks.get(subkey, ()), away=subkey in self.away
                ).to_record()
                for subkey, step in steps
            }
            return ValueWithExpiration({key: ValueWithExpiration(value, 1e12) for key, value in reports.items()}, 1e12)
        offers = {
            averager.public_key: averager.state_sharing_priority
            for averager in self.averagers.values()
            if averager.allow_state_sharing
        }
        offers = {key: ValueWithExpiration(value, 1e12) for key, value in (offers | self.offers).items()}
        return ValueWithExpiration(offers, 1e12)

    async def _connect(self, peer_id: PeerID, _maddrs: list) -> None:
        if peer_id not in self.averagers:
            await asyncio.sleep(self.DIAL_SECONDS)
            raise P2PDaemonError("not found")

    def _get_stub(self, caller: PeerID, _p2p, peer_id: PeerID, namespace: str) -> SimpleNamespace:
        donor, context = self.averagers[peer_id], SimpleNamespace(remote_id=caller)

        async def open_download(request) -> AsyncIterator:
            return donor.behaviour(donor.rpc_download_state(request, context))

        compare = partial(donor.rpc_compare_state, context=context)
        return SimpleNamespace(rpc_download_state=open_download, rpc_compare_state=compare)

    async def _get_state(self, donor: TrainingStateAverager) -> tuple:
        await asyncio.sleep(self.copy_seconds)
        return None, (), await asyncio.get_running_loop().run_in_executor(self.pool, donor.copy_state)


def offline_averager(peer=PEER, **options) -> TrainingStateAverager:
    """Build a state averager whose process is never started."""
    return build_averager(build_model(), peer, "run_state_averager", start=False, **options)


def offline_optimizer(model: torch.nn.Module, **settings) -> CollaborativeOptimizer:
    """Build an optimizer with `Rounds`. Use the fixture `offline`, which keeps it from starting processes."""
    optimizer = build_optimizer(model, PEER, 4, **{"bandwidth": 50.0, **settings})
    optimizer.coordinator = Rounds(optimizer)
    return optimizer
