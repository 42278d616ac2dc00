"""The round averager: one all-reduce over gradients and parameters per global step, in a process.

A round reads the peer's gradients and parameters and writes their averages. The training state does not change before
the round has ended and its result was checked. The trainer's side is RoundClient.
"""

import asyncio
import hashlib
import math
import multiprocessing
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, AsyncIterator  # noqa: UP035  hivemind does not recognize that of collections.abc

import torch
from hivemind.averaging.control import AveragingStage
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.partition import AllreduceException
from hivemind.compression import RoleAdaptiveCompression, TensorRole
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MPFuture, TimedStorage, get_logger
from hivemind.utils.crypto import RSAPrivateKey

from peerstep.options import Options
from peerstep.peer.averager_process import SafeAverager
from peerstep.peer.clock import run_time
from peerstep.reports.progress_report import PROTOCOL
from peerstep.rounds.allreduce import AllReduce, cut_tensors
from peerstep.rounds.bounds import PARAMETER_CHANGE, Bounds
from peerstep.rounds.claims import parse_claims
from peerstep.rounds.matchmaking import RosterEntry, RoundControl, StepMatchmaking
from peerstep.rounds.own_rounds import OwnRounds
from peerstep.rounds.reducer import Part
from peerstep.rounds.requests import STRANGER_SECONDS
from peerstep.rounds.result import Outcome, RoundResult
from peerstep.rounds.shares import Standing, divide
from peerstep.rounds.uplink import BandwidthClaim, UplinkMeter
from peerstep.tensors.compression import COMPRESSIONS

logger = get_logger(__name__)

# Bound on the distance between two peers' parameters, in learning rates, as a root mean square over the elements of a
# part, beside PARAMETER_CHANGE of their norm: honest ones differ by less than an update.
PARAMETER_STEPS = 2.0
BAN_SECONDS = 600.0  # duration of the ban for values that are not finite; short, since the fault may be transient
REPORT_SECONDS = 600.0  # between two warnings about values of the same peer that were scaled down


class RoundAverager(SafeAverager):
    """Averages this peer's gradients and parameters with its group, in one round per global step.

    Its attributes are for the trainer, too: `gradients` and `averaged_parameters` are in shared memory.

    :param parameters: parameters of the offloaded optimizer, on the CPU in shared memory
    :param local_updates: whether the gradients are pseudo-gradients, see LocalTraining. A group has peers of one kind
    :param learning_rate: the largest one of the run; set the attribute of this name to the present one
    :param private_key: of this peer's identity; signs what it claims when it joins a group
    """

    reuse_grad_buffers = False  # hivemind.Optimizer.zero_grad reads it
    _matchmaking: StepMatchmaking  # set by hivemind, as are the next two
    _allreduce_timeout: float
    allreduce_kwargs: dict[str, Any]

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        options: Options,
        *,
        learning_rate: float,
        private_key: RSAPrivateKey | None,
        local_updates: bool = False,
        **kwargs,
    ):
        self.options, self.local_updates = options, local_updates
        self.max_weight = float(options.target_batch_size)  # samples: a peer counts for a whole step at most
        self._peak_rate, self.learning_rate = learning_rate, multiprocessing.RawValue("d", learning_rate)
        self.gradients = [torch.zeros(parameter.shape).share_memory_() for parameter in parameters]
        self.parameters = [parameter.detach() for parameter in parameters]
        self.averaged_parameters = [torch.zeros(p.shape, dtype=p.dtype).share_memory_() for p in self.parameters]
        self.requested_step = multiprocessing.RawValue("q", -1)  # step for which another peer asks for a group
        self.claim = BandwidthClaim(options.bandwidth)
        # Newest steps whose rounds averaged this peer's parameters, and whose peers were in several groups
        self._averaged_at, self._split_at = -math.inf, -math.inf
        self._slow: set[PeerID] = set()  # senders that were late for a part of the newest round
        self._reported: TimedStorage[PeerID, None] = TimedStorage()  # peers whose excesses were logged
        compressions = COMPRESSIONS[options.gradient_compression](), COMPRESSIONS[options.state_compression]()
        super().__init__(
            averaged_tensors=[*self.gradients, *self.parameters],
            compression=RoleAdaptiveCompression(gradient=compressions[0], parameter=compressions[1]),
            allow_state_sharing=False,
            start=False,
            target_group_size=options.target_group_size,
            min_matchmaking_time=options.matchmaking_time,
            allreduce_timeout=options.averaging_timeout,
            # Seconds of silence after which a sender is excluded from a round: hivemind's `sender_timeout`, of which
            # its `reducer_timeout` is twice. Its default is `matchmaking_time`, which busy machines exceed.
            next_chunk_timeout=max(options.matchmaking_time, options.averaging_timeout / 4),
            **kwargs,
        )
        self.own_rounds = OwnRounds(self.allreduce_kwargs["reducer_timeout"], lambda: self._matchmaking.awaits_list)
        self.matchmaking_kwargs |= {"private_key": private_key}
        size = options.target_group_size  # by which each member deals the groups
        names = (type(compression).__name__ for compression in compressions)
        settings = (PROTOCOL, options.average_state_every, local_updates, size, *names)
        settings += ("equally",) if options.weigh_equally else ()
        self.schema_hash = hashlib.sha256(self.schema_hash + repr(settings).encode()).digest()
        self.run_in_background(await_ready=True)

    @property
    def schema_id(self) -> str:
        """Digits that tell peers with another model, compression or kind of rounds, for the progress reports."""
        return self.schema_hash.hex()[:16]

    def includes_parameters(self, step: int) -> bool:
        """Whether the round of a step also averages the parameters."""
        return step % self.options.average_state_every == 0

    # Calls of RoundClient

    async def _set_roster(self, entries: Sequence[RosterEntry], finished_step: int) -> None:
        self._matchmaking.set_roster(entries)
        self._matchmaking.requests.finish(finished_step)

    async def _step(self, *, control: RoundControl, step: int, future_for_init: MPFuture) -> None:
        control.step = step
        trigger, cancel = MPFuture(), MPFuture()
        control.attach(trigger, cancel)
        future_for_init.set_result((trigger, cancel))
        work = asyncio.create_task(self.run_round(control))
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

    async def run_round(self, control: RoundControl) -> RoundResult:
        started, matchmaking, group = time.monotonic(), self._matchmaking, None
        control.stage = AveragingStage.LOOKING_FOR_GROUP
        self.own_rounds.search()
        try:
            try:
                async with asyncio.timeout(control.deadline - run_time()):  # the all-reduce has a separate one
                    group = await matchmaking.look_for_group(control)
                    missed, leader, found = matchmaking.missed, matchmaking.led_by, time.monotonic()
                    self._split_at = control.step if matchmaking.is_split else self._split_at
                    self.own_rounds.expect(group.group_id)
                    control.stage = AveragingStage.AWAITING_TRIGGER
                    await control.wait_for_trigger()
            except TimeoutError:
                raise TimeoutError("no group was found") from None
            begun = time.monotonic()
            control.stage = AveragingStage.RUNNING_ALLREDUCE
            result = await self.average_in_group(control, group, leader)
        finally:
            if group is not None:
                self.own_rounds.end(group.group_id)
        seconds = {"matchmaking": found - started, "waiting": begun - found, "allreduce": time.monotonic() - begun}
        return replace(result, missed=missed, seconds=seconds)

    async def average_in_group(self, control: RoundControl, group: GroupInfo, leader: PeerID) -> RoundResult:
        standing = Standing([parse_claims(gathered) for gathered in group.gathered])
        own = group.peer_ids.index(self.peer_id)
        weight = 0.0 if standing.lacking[own] else control.weight
        runner = self._build_runner(control.step, group, standing, weight)
        self.claim.adapt(runner.reducer.delivery)
        meter = UplinkMeter()
        self.own_rounds.begin(runner)
        try:
            await runner.run()
        finally:
            meter.stop()
            self._record_conduct(runner, leader, group.peer_ids)
            if runner.reducer.num_awaited:
                self._slow = runner.reducer.late
        takes_parameters = self.includes_parameters(control.step) or standing.lacking[own]
        received = runner.received_fraction(TensorRole.GRADIENT) or 0.0
        if received >= 0.5 or runner.was_late:  # otherwise others may have kept it from sending
            self.claim.record_rate(meter.rate)
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

    def _build_runner(self, step: int, group: GroupInfo, standing: Standing, weight: float) -> AllReduce:
        timeouts, own = self.allreduce_kwargs, group.peer_ids.index(self.peer_id)
        shares = divide([claims.bandwidth for claims in standing.claims])
        return AllReduce(
            peer_id=self.peer_id,
            group_id=group.group_id,
            parts=self.cut_parts(step, group, standing, shares, weight),
            get_stub=lambda peer_id: self.get_stub(self._p2p, peer_id, namespace=self.prefix),
            bounds=self.make_bounds(weight, standing.distances[own], standing.trusted[own]),
            sender_timeout=timeouts["sender_timeout"],
            reducer_timeout=timeouts["reducer_timeout"],
            timeout=self._allreduce_timeout,
            slow=self._slow,
            upload=self.claim.pace(reduces=shares[own] > 0),
        )

    def cut_parts(
        self, step: int, group: GroupInfo, standing: Standing, shares: Sequence[int], weight: float
    ) -> dict[PeerID, list[Part]]:
        """Cut gradients, and parameters if the round has some, into the parts that each member reduces or gives."""
        compression, size = self.allreduce_kwargs["compression"], self.allreduce_kwargs["part_size_bytes"]
        cut = partial(cut_tensors, compression, size, int.from_bytes(group.group_id, "big"))
        cuts = [cut(TensorRole.GRADIENT, self.gradients, self.gradients, shares, weight)]
        if math.isinf(self._averaged_at):  # the first round
            self._averaged_at = step - 1
            torch._foreach_copy_(self.averaged_parameters, self.parameters)
        drifts = self._split_at >= self._averaged_at >= step - 2 * self.options.average_state_every
        cut_parameters = partial(cut, TensorRole.PARAMETER, self.parameters, self.averaged_parameters, drifts=drifts)
        self._averaged_at = step if self.includes_parameters(step) else self._averaged_at
        given = standing.shares_to_give(shares)
        if self.includes_parameters(step) or (any(standing.lacking) and not any(given)):
            cuts.append(cut_parameters(shares, float(standing.trusted[group.peer_ids.index(self.peer_id)])))
        elif any(given):
            takers = {peer_id for peer_id, lacks in zip(group.peer_ids, standing.lacking, strict=True) if lacks}
            cuts.append(cut_parameters(given, takers=takers))
        return {peer_id: list(chain(*of_peer)) for peer_id, *of_peer in zip(group.peer_ids, *cuts, strict=True)}

    def make_bounds(self, weight: float, distance: float, counts: bool) -> Bounds:
        """Return the bounds for a round.

        :param weight, distance, counts: samples of this peer, updates that its parameters lack, and whether they count
        """
        # The first updates of LAMB move an element by three learning rates.
        rate, factor = (self.learning_rate.value, 1.0) if counts else (self._peak_rate, 1 + min(distance, 64.0))
        return Bounds(
            max_weight=self.max_weight,
            parameter_step=PARAMETER_STEPS * rate * factor,
            parameter_change=PARAMETER_CHANGE * factor,
            believes_weights=not self.dht.is_open,
            weighs_equally=self.options.weigh_equally,
            are_updates=self.local_updates,
            # A peer without gradients, or with few local updates, has no measure. The whole average is clipped.
            has_gradient=weight > 0 and not self.local_updates,
        )

    def _record_conduct(self, runner: AllReduce, leader: PeerID, members: Sequence[PeerID]) -> None:
        """Ban who has violated the bounds, report who has exceeded them, and record who was silent."""
        conduct = self._matchmaking.conduct
        for peer_id, violation in runner.violations.items():
            name, minutes = conduct.describe(peer_id), BAN_SECONDS / 60
            logger.warning(f"{name} sent {violation}: not averaging with it for {minutes:.0f} minutes")
            conduct.ban(peer_id, run_time() + BAN_SECONDS)
        for peer_id, excess in runner.excesses.items():
            if peer_id not in self._reported:
                self._reported.store(peer_id, None, run_time() + REPORT_SECONDS)
                name = conduct.describe(peer_id)
                logger.warning(f"{name} sent {excess}: scaled it down, or kept this peer's parameters")
        conduct.record_round(
            leader,
            members,
            silent=runner.silent_reducers(),
            confirming=runner.confirming,
            # A member reduces nothing, as a client, or this peer sends it none: it cannot refuse, but asks here.
            refusing=runner.refusing | self.own_rounds.senders_elsewhere(),
            answering=runner.answering,
        )

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
        self.requested_step.value = self._matchmaking.requests.next_step

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        """Receive a member's part of the tensors, possibly before this peer's round has begun."""
        async for message in self._keep_stream_open(self.own_rounds.answer(stream, context.remote_id)):
            yield message
