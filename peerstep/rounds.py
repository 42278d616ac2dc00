"""The round averager: one all-reduce over gradients and parameters per global step.

A round reads the peer's gradients and parameters and writes their averages. The training state does not change before
the round has ended and its result was checked.
"""

import asyncio
import hashlib
import math
import multiprocessing
import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from itertools import chain
from typing import Any, AsyncIterator  # noqa: UP035  hivemind does not recognize that of collections.abc

import torch
from hivemind.averaging.control import AveragingStage
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.partition import AllreduceException
from hivemind.compression import CompressionBase, RoleAdaptiveCompression, TensorRole
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MPFuture, TimedStorage, get_logger
from hivemind.utils.crypto import RSAPrivateKey

from peerstep.allreduce import AllReduce, cut_tensors
from peerstep.base import SafeAverager
from peerstep.bounds import PARAMETER_CHANGE, Bounds
from peerstep.claims import Claims, parse_claims
from peerstep.clock import run_time
from peerstep.matchmaking import STRANGER_SECONDS, RosterEntry, RoundControl, StepMatchmaking
from peerstep.progress_record import PROTOCOL
from peerstep.reducer import Delivery, Part
from peerstep.standing import Standing, divide
from peerstep.uplink import UplinkMeter

logger = get_logger(__name__)

# Bound on the distance between two peers' parameters, in learning rates, as a root mean square over the elements of a
# part, beside PARAMETER_CHANGE of their norm: honest ones differ by less than an update.
PARAMETER_STEPS = 2.0
BAN_SECONDS = 600.0  # duration of the ban for values that are not finite; short, since the fault may be transient
REPORT_SECONDS = 600.0  # between two warnings about values of the same peer that were scaled down
COMPLETE = 0.95  # fraction of the elements after which the members count as equal
# Of its rate, at which a peer sends that is too slow to reduce: acknowledgements of what it receives need the rest.
# With 4 Mbit/s beside three of 20, it received 32 to 61 % of rounds at the whole rate, and all of them at 76 % of it.
QUIET_FRACTION = 0.75
# Mbit/s that a peer claims before a round has measured its link: less than nearly all links have, so that it reduces
# nothing beside others. That makes a round 3 to 13 % longer (16 to 3 equal peers, computed). With a claim of 14.7, the
# median upload of the world's fixed lines, a link of 4 Mbit/s beside links of 20 would make it 3.5 times as long.
FIRST_CLAIM = 1.0
MAX_MEASURED = 100.0  # Mbit/s: a link inside a house may have more, and tell nothing of that to the other peers
LEAST_CLAIM = 1 / 64  # of a peer's bandwidth
PACED_MBITS = 50.0  # below this bandwidth a peer sends its values at that rate, if they take longer than a moment
# Of a peer, and of all peers, whose part of an unknown group arrives before this peer has the group
MAX_WAITING_STREAMS, MAX_WAITING_STREAMS_OF_ALL = 2, 256
MAX_FIRST_BYTES = 256  # of the first message of such a stream, which has no part
MAX_KEPT_ROUNDS = 64  # newest rounds of this peer of which it knows that they have ended


class Outcome(Enum):
    """Outcome of the round of a global step at this peer."""

    AVERAGED = "averaged"
    ALONE = "alone"  # there is no other trainer
    MISSED = "missed"  # the other trainers have completed the step without this peer
    FAILED = "failed"  # there are other trainers, but no round with them succeeded
    STOPPED = "stopped"
    CAUGHT_UP = "caught up"  # this peer has no round of the step: it has downloaded a state, or skipped steps


@dataclass(frozen=True)
class RoundResult:
    """What came of the round of a global step at this peer. Without an average, only its outcome and attempts."""

    outcome: Outcome
    members: Sequence[PeerID] = ()
    received: float = 0.0  # fraction of the gradients whose average arrived
    # Samples of the senders, known only if this peer reduces gradients
    weights: dict[PeerID, float] = field(default_factory=dict)
    weight: float = 0.0  # of this peer's samples
    missed: dict[PeerID, str] = field(default_factory=dict)  # peers of the roster outside of the group -> reason
    violations: dict[PeerID, str] = field(default_factory=dict)  # of the members that were banned for them
    seconds: dict[str, float] = field(default_factory=dict)  # of the phases: matchmaking, waiting, allreduce
    received_parameters: float | None = None  # fraction of the parameters that arrived; None: this peer received none
    distance: float = 0.0  # of this peer's parameters from the group's before the round, in updates
    group_id: bytes = b""
    was_late: bool = False  # whether a reducer closed a part without this peer's values
    silent: Collection[PeerID] = ()  # reducers that have answered nothing
    is_far: bool = False  # whether this peer's parameters are too far from those of most others
    gradients: Sequence[torch.Tensor] = ()  # the averages, until the next round begins
    parameters: list[torch.Tensor] | None = None  # likewise, if this peer received any
    num_attempts: int = 0
    error: str = ""  # of the last attempt that failed
    may_be_used: bool = False  # whether the members of a failed attempt may have used the contribution

    @property
    def is_complete(self) -> bool:
        """Whether enough has arrived for this peer to be equal to the other members."""
        return min(self.received, 1.0 if self.received_parameters is None else self.received_parameters) >= COMPLETE


class RoundAverager(SafeAverager):
    """Averages this peer's gradients and parameters with its group, in one round per global step.

    Fill `gradients` before a round. Its result has the averages, in the same memory.

    :param parameters: parameters of the offloaded optimizer, on the CPU in shared memory
    :param local_updates: whether the gradients are pseudo-gradients, see LocalTraining. A group has peers of one kind
    :param average_parameters_every: steps from one round with parameters to the next; the rounds in between average
      gradients only
    :param gradient_compression, parameter_compression: the same at all peers of a group
    :param max_weight: bound on the weight of a peer's contribution, in samples
    :param learning_rate: the largest one of the run; set the attribute of this name to the present one
    :param private_key: of this peer's identity; signs what it claims when it joins a group
    :param bandwidth: Mbit/s; None: the largest rate at which this machine has sent in a round
    """

    reuse_grad_buffers = False  # hivemind.Optimizer.zero_grad reads it
    _matchmaking: StepMatchmaking  # set by hivemind, as are the next two
    _allreduce_timeout: float
    allreduce_kwargs: dict[str, Any]

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        *,
        average_parameters_every: int,
        gradient_compression: CompressionBase,
        parameter_compression: CompressionBase,
        max_weight: float,
        learning_rate: float,
        private_key: RSAPrivateKey,
        local_updates: bool = False,
        bandwidth: float | None = None,
        **kwargs,
    ):
        self.local_updates, self.max_weight = local_updates, max_weight
        self.average_parameters_every = average_parameters_every
        self._peak_rate, self.learning_rate = learning_rate, multiprocessing.RawValue("d", learning_rate)
        self.gradients = [torch.zeros(parameter.shape).share_memory_() for parameter in parameters]
        self.parameters = [parameter.detach() for parameter in parameters]
        self.averaged_parameters = [torch.zeros(p.shape, dtype=p.dtype).share_memory_() for p in self.parameters]
        self.requested_step = multiprocessing.RawValue("q", -1)  # step for which another peer asks for a group
        self._delivery = Delivery(0)  # of the newest round
        # Newest steps whose rounds averaged this peer's parameters, and whose peers were in several groups
        self._averaged_at, self._split_at = -math.inf, -math.inf
        self._slow: set[PeerID] = set()  # senders that were late for a part of it
        self._measures, self._is_known = bandwidth is None, bandwidth is not None  # the bandwidth
        self.claim = multiprocessing.RawValue("d", 0.0)  # bandwidth that this peer claims, see _adapt_claim
        # Group ID -> this peer's round, which is None if it was cancelled; None: it has ended
        self._rounds: dict[bytes, asyncio.Future[AllReduce | None] | None] = {}
        self._refused: deque[tuple[bytes, PeerID]] = deque(maxlen=256)  # group ID, and sender of a refused part
        self._elsewhere: deque[tuple[bytes, PeerID]] = deque(maxlen=256)  # the same of unknown groups in this round
        self._waiting: Counter[PeerID] = Counter()  # streams of unknown groups
        self._reported: TimedStorage[PeerID, None] = TimedStorage()  # peers whose excesses were logged
        self._lock_pipe = threading.Lock()
        super().__init__(
            averaged_tensors=[*self.gradients, *self.parameters],
            compression=RoleAdaptiveCompression(gradient=gradient_compression, parameter=parameter_compression),
            bandwidth=bandwidth or FIRST_CLAIM,
            allow_state_sharing=False,
            start=False,
            **kwargs,
        )
        self.claim.value = self.bandwidth
        self.matchmaking_kwargs |= {"private_key": private_key}
        compressions = type(gradient_compression).__name__, type(parameter_compression).__name__
        size = self.matchmaking_kwargs["target_group_size"]  # by which each member deals the groups
        settings = (PROTOCOL, average_parameters_every, local_updates, size, *compressions)
        self.schema_hash = hashlib.sha256(self.schema_hash + repr(settings).encode()).digest()
        self.run_in_background(await_ready=True)

    @property
    def schema_id(self) -> str:
        """Digits that tell peers with another model, compression or kind of rounds, for the progress reports."""
        return self.schema_hash.hex()[:16]

    # In the main process: rounds

    def includes_parameters(self, step: int) -> bool:
        """Whether the round of a step also averages the parameters."""
        return step % self.average_parameters_every == 0

    def schedule_round(
        self, step: int, timeout: float, distance: float = 0.0, is_settling: bool = False
    ) -> RoundControl:
        """Start the search for the group of a step. It ends after `timeout` seconds, unless the all-reduce is running.

        :param distance, is_settling: of this peer's parameters, see Claims
        :returns: the handle of the round; set its weight and call `allow_allreduce` once the contribution is loaded
        """
        control = RoundControl(
            scheduled_time=run_time(),
            deadline=run_time() + timeout,
            allow_retries=False,
            weight=0.0,
            data_for_gather=Claims(0.0 if self.client_mode else self.claim.value, distance, is_settling).pack(),
        )
        control.step, attached = step, MPFuture()
        self._send("_step", control=control, step=step, future_for_init=attached)
        control.attach(*attached.result(timeout=30.0))
        return control

    def collect(self, control: RoundControl) -> RoundResult:
        """Return the result of a round that has ended, with the averages. Raises what the round has raised."""
        result = control.result(timeout=0)
        parameters = None if result.received_parameters is None else self.averaged_parameters
        return replace(result, gradients=self.gradients, parameters=parameters)

    def set_roster(self, entries: Sequence[RosterEntry], finished_step: int) -> None:
        """Set the roster of the next round, and the newest finished step."""
        self._send("_set_roster", entries=entries, finished_step=finished_step)

    def _send(self, method: str, **kwargs) -> None:
        with self._lock_pipe:
            self._outer_pipe.send((method, [], kwargs))

    # In the averager's process

    async def _set_roster(self, entries: Sequence[RosterEntry], finished_step: int) -> None:
        self._matchmaking.set_roster(entries)
        self._matchmaking.finish(finished_step)

    async def _step(self, *, control: RoundControl, step: int, future_for_init: MPFuture) -> None:
        control.step = step
        trigger, cancel = MPFuture(), MPFuture()
        control.attach(trigger, cancel)
        future_for_init.set_result((trigger, cancel))
        work = asyncio.create_task(self._run_round(control))
        cancelled = asyncio.create_task(control.wait_for_cancel())
        await asyncio.wait({work, cancelled}, return_when=asyncio.FIRST_COMPLETED)
        work.cancel()
        cancelled.cancel()
        (outcome, *_) = await asyncio.gather(work, cancelled, return_exceptions=True)
        control.stage = AveragingStage.FINISHED
        with suppress(Exception):  # the main process may cancel the round at this moment
            if isinstance(outcome, BaseException):
                control.set_exception(AllreduceException(str(outcome) or type(outcome).__name__))
            else:
                control.set_result(outcome)

    async def _run_round(self, control: RoundControl) -> RoundResult:
        started, group = time.monotonic(), None
        begins: asyncio.Future[AllReduce | None] = asyncio.get_running_loop().create_future()
        control.stage = AveragingStage.LOOKING_FOR_GROUP
        self._elsewhere.clear()
        try:
            try:
                async with asyncio.timeout(control.deadline - run_time()):  # the all-reduce has a separate one
                    group = await self._matchmaking.look_for_group(control)
                    missed, leader, found = self._matchmaking.missed, self._matchmaking.led_by, time.monotonic()
                    self._split_at = control.step if self._matchmaking.is_split else self._split_at
                    self._rounds[group.group_id] = begins
                    control.stage = AveragingStage.AWAITING_TRIGGER
                    await control.wait_for_trigger()
            except TimeoutError:
                raise TimeoutError("no group was found") from None
            begun = time.monotonic()
            control.stage = AveragingStage.RUNNING_ALLREDUCE
            result = await self._average_in_group(control, group, leader, begins)
        finally:
            if not begins.done():
                begins.set_result(None)
            if group is not None:
                self._rounds[group.group_id] = None
                while len(self._rounds) > MAX_KEPT_ROUNDS:
                    del self._rounds[next(iter(self._rounds))]
        seconds = {"matchmaking": found - started, "waiting": begun - found, "allreduce": time.monotonic() - begun}
        return replace(result, missed=missed, seconds=seconds)

    async def _average_in_group(
        self, control: RoundControl, group: GroupInfo, leader: PeerID, begins: asyncio.Future[AllReduce | None]
    ) -> RoundResult:
        options, own = self.allreduce_kwargs, group.peer_ids.index(self.peer_id)
        standing = Standing([parse_claims(gathered) for gathered in group.gathered])
        weight = 0.0 if standing.lacking[own] else control.weight
        shares = divide([claims.bandwidth for claims in standing.claims])
        takes_parameters = self.includes_parameters(control.step) or standing.lacking[own]
        pace = self.bandwidth * 125_000 * (1.0 if shares[own] else QUIET_FRACTION)
        runner = AllReduce(
            peer_id=self.peer_id,
            group_id=group.group_id,
            parts=self._cut(control.step, group, standing, shares, weight),
            get_stub=lambda peer_id: self.get_stub(self._p2p, peer_id, namespace=self.prefix),
            bounds=self._make_bounds(weight, standing.distances[own], standing.trusted[own]),
            sender_timeout=options["sender_timeout"],
            reducer_timeout=options["reducer_timeout"],
            timeout=self._allreduce_timeout,
            slow=self._slow,
            upload=pace if self._is_known and self.bandwidth < PACED_MBITS else math.inf,
        )
        self._adapt_claim(runner.reducer.delivery)
        meter = UplinkMeter()
        begins.set_result(runner)
        for group_id, sender in self._refused:
            if group_id == group.group_id:
                runner.reducer.drop_unstarted(sender)  # a refused sender does not try again
        try:
            await runner.run()
        finally:
            meter.stop()
            self._ban_violators(runner)
            self._report_excesses(runner)
            self._matchmaking.conduct.record_round(
                leader,
                group.peer_ids,
                silent=runner.silent_reducers(),
                confirming=runner.confirming,
                # A member reduces nothing, as a client, or this peer sends it none: it cannot refuse, but asks here.
                refusing=runner.refusing | {peer for group, peer in self._elsewhere if group not in self._rounds},
                answering=runner.answering,
            )
            if runner.reducer.num_awaited:
                self._slow = runner.reducer.late
        received = runner.received_fraction(TensorRole.GRADIENT) or 0.0
        if self._measures and (received >= 0.5 or runner.was_late):  # otherwise others may have kept it from sending
            self._claim_measured(meter.rate)
        return RoundResult(
            Outcome.AVERAGED,
            members=group.peer_ids,
            received=received,
            weights=runner.reducer.weights,
            weight=runner.reducer.weights.get(self.peer_id, weight),
            violations=runner.violations,
            # In other rounds no parameters are taken by who lacks none, whatever the others claim.
            received_parameters=runner.received_fraction(TensorRole.PARAMETER) if takes_parameters else None,
            distance=standing.distances[own],
            group_id=group.group_id,
            was_late=runner.was_late,
            silent=runner.silent_reducers(),
            is_far=takes_parameters and runner.is_far,
        )

    def _cut(
        self, step: int, group: GroupInfo, standing: Standing, shares: Sequence[int], weight: float
    ) -> dict[PeerID, list[Part]]:
        """Cut gradients, and parameters if the round has some, into the parts that each member reduces or gives."""
        compression, size = self.allreduce_kwargs["compression"], self.allreduce_kwargs["part_size_bytes"]
        cut = partial(cut_tensors, compression, size, int.from_bytes(group.group_id, "big"))
        cuts = [cut(TensorRole.GRADIENT, self.gradients, self.gradients, shares, weight)]
        if math.isinf(self._averaged_at):  # the first round
            self._averaged_at = step - 1
            torch._foreach_copy_(self.averaged_parameters, self.parameters)
        drifts = self._split_at >= self._averaged_at >= step - 2 * self.average_parameters_every
        cut_parameters = partial(cut, TensorRole.PARAMETER, self.parameters, self.averaged_parameters, drifts=drifts)
        self._averaged_at = step if self.includes_parameters(step) else self._averaged_at
        given = standing.shares_to_give(shares)
        if self.includes_parameters(step) or (any(standing.lacking) and not any(given)):
            cuts.append(cut_parameters(shares, float(standing.trusted[group.peer_ids.index(self.peer_id)])))
        elif any(given):
            takers = {peer_id for peer_id, lacks in zip(group.peer_ids, standing.lacking, strict=True) if lacks}
            cuts.append(cut_parameters(given, takers=takers))
        return {peer_id: list(chain(*of_peer)) for peer_id, *of_peer in zip(group.peer_ids, *cuts, strict=True)}

    def _make_bounds(self, weight: float, distance: float, counts: bool) -> Bounds:
        """Return the bounds for a round.

        :param weight, distance, counts: samples of this peer, updates that its parameters lack, and whether they count
        """
        # The first updates of LAMB move an element by three learning rates.
        rate, factor = (self.learning_rate.value, 1.0) if counts else (self._peak_rate, 1 + min(distance, 64.0))
        return Bounds(
            weight=self.max_weight,
            parameter_step=PARAMETER_STEPS * rate * factor,
            parameter_change=PARAMETER_CHANGE * factor,
            believes_weights=not self.dht.is_open,
            are_updates=self.local_updates,
            # A peer without gradients, or with few local updates, has no measure. The whole average is clipped.
            has_gradient=weight > 0 and not self.local_updates,
        )

    def _adapt_claim(self, delivery: Delivery) -> None:
        """Claim half as much after a round in which most members did not receive this peer's averages in time.

        A link may be slower than before, or have other users. After other rounds the claim grows by 5 %.

        :param delivery: of the round that begins
        """
        before, self._delivery = self._delivery, delivery
        claim = min(self.bandwidth, self.claim.value * (0.5 if before.is_poor else 1.05))
        self.claim.value = max(claim, self.bandwidth * LEAST_CLAIM)
        if before.is_poor:
            logger.info(f"Most members did not receive this peer's averages: claiming {self.claim.value:.1f} Mbit/s")

    def _claim_measured(self, rate: float) -> None:
        """Claim a rate at which this machine has sent, in Mbit/s, if it is the largest one so far."""
        if not self._is_known or rate > self.bandwidth:
            self.bandwidth = self.claim.value = min(max(rate, FIRST_CLAIM), MAX_MEASURED)
        if not self._is_known:
            self._is_known = True
            logger.info(f"Claiming a bandwidth of {self.bandwidth:.1f} Mbit/s, as measured in this round")

    def _ban_violators(self, runner: AllReduce) -> None:
        for peer_id, violation in runner.violations.items():
            name, minutes = self._matchmaking.conduct.describe(peer_id), BAN_SECONDS / 60
            logger.warning(f"{name} sent {violation}: not averaging with it for {minutes:.0f} minutes")
            self._matchmaking.conduct.ban(peer_id, run_time() + BAN_SECONDS)

    def _report_excesses(self, runner: AllReduce) -> None:
        for peer_id, excess in runner.excesses.items():
            if peer_id not in self._reported:
                self._reported.store(peer_id, None, run_time() + REPORT_SECONDS)
                name = self._matchmaking.conduct.describe(peer_id)
                logger.warning(f"{name} sent {excess}: scaled it down, or kept this peer's parameters")

    # Answers to other peers

    async def rpc_join_group(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        try:
            async for message in self._keep_stream_open(self._matchmaking.rpc_join_group(request, context)):
                self._count_requests()
                asyncio.get_running_loop().call_later(STRANGER_SECONDS, self._count_requests)
                yield message
        finally:
            self._count_requests()

    def _count_requests(self) -> None:
        self.requested_step.value = self._matchmaking.requested_step

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        """Receive a member's part of the tensors, possibly before this peer's round has begun.

        hivemind refuses the part if another round ends meanwhile. The whole group then waits for the sender.
        """
        async for message in self._keep_stream_open(self._answer_part(stream, context.remote_id)):
            yield message

    async def _answer_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], sender: PeerID
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        if (request := await anext(stream, None)) is None:
            return
        is_small = request.ByteSize() <= MAX_FIRST_BYTES  # it may be kept for a while
        if is_small and (runner := await self._await_round(request.group_id, sender)) is not None:
            async for message in runner.reducer.answer(sender, stream):
                yield message
        else:
            self._refused.append((request.group_id, sender))
            yield averaging_pb2.AveragingData(code=averaging_pb2.BAD_GROUP_ID)

    async def _await_round(self, group_id: bytes, sender: PeerID) -> AllReduce | None:
        """Wait until this peer's round of a group begins; None if it has ended or does not begin in time."""
        # An unknown group: the leader's announcement may be one answer late; then this peer has left too early to
        # receive it.
        if group_id not in self._rounds:
            self._elsewhere.append((group_id, sender))
            if self._waiting[sender] >= MAX_WAITING_STREAMS or self._waiting.total() >= MAX_WAITING_STREAMS_OF_ALL:
                return None
            self._waiting[sender] += 1
            try:
                async with asyncio.timeout(self.request_timeout):
                    while group_id not in self._rounds:
                        await asyncio.sleep(0.05)
            except TimeoutError:
                return None
            finally:
                self._waiting -= Counter({sender: 1})
        if (begins := self._rounds.get(group_id)) is None:
            return None
        # After `reducer_timeout` the sender stops waiting, too.
        await asyncio.wait({begins}, timeout=self.allreduce_kwargs["reducer_timeout"])
        return begins.result() if begins.done() else None
