"""Trainers that attack their run from within its rounds; see the variable ATTACK of altered.py.

They know what any member knows, so an outsider of an open run and an invited peer of a closed run do the same.
tests/support/hostile_peer.py attacks with records alone, flooding_peer.py with streams.
"""

import asyncio
import functools
import os
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import torch
from hivemind.compression import deserialize_torch_tensor, serialize_torch_tensor
from hivemind.p2p.p2p_daemon_bindings.control import DEFAULT_MAX_MSG_SIZE
from hivemind.proto import averaging_pb2

from cotrain.training import recovery
from peerstep import optimizer
from peerstep.peer.clock import run_time
from peerstep.progress.tracker import ProgressTracker
from peerstep.reports.progress_report import MAX_SAMPLES, PeerProgress
from peerstep.rounds import averager
from peerstep.rounds.allreduce import AllReduce
from peerstep.rounds.averager import RoundAverager
from peerstep.rounds.bounds import Bounds
from peerstep.rounds.claims import MAX_BANDWIDTH, Claims
from peerstep.rounds.known_peers import KnownPeers
from peerstep.rounds.matchmaking import StepMatchmaking
from peerstep.rounds.own_rounds import OwnRounds
from peerstep.rounds.reducer import Reducer
from peerstep.rounds.requests import JoinRequests
from peerstep.state.averager import TrainingStateAverager
from peerstep.step.accumulators import GradientAccumulator
from peerstep.step.coordinator import RoundCoordinator
from peerstep.step.local_updates import LocalTraining
from tests.support.false_leader import FalseLeader

LARGE = 1e9


def wrap(owner: type, name: str, change: Callable) -> None:
    """Replace a method by `change(original, self, ...)`."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(lambda *args, **kwargs: change(original, *args, **kwargs)))


def send_nan() -> None:
    """Send NaN in place of each gradient (and have no guards against NaN)."""

    def load_nan(self) -> int:
        num_samples, self.num_samples = self.num_samples, 0
        for gradient in self.contribution:
            gradient.fill_(float("nan"))
        return num_samples

    recovery.all_finite = optimizer.all_finite = lambda tensors: True
    Bounds.clip = lambda self, info, part, own_part, weight: (part, weight, None)
    GradientAccumulator.load = LocalTraining.load = load_nan


def claim_everything() -> None:
    """Claim the largest bandwidth, rate and number of samples, and the largest weight in the round."""
    wrap(Claims, "pack", lambda pack, self: pack(replace(self, bandwidth=MAX_BANDWIDTH)))
    most = {"samples_accumulated": MAX_SAMPLES, "contributed": MAX_SAMPLES, "samples_per_second": float(MAX_SAMPLES)}
    wrap(PeerProgress, "to_record", lambda to_record, self: to_record(self) | most)
    wrap(averager, "cut_tensors", lambda cut, *args, **options: cut(*args[:7], LARGE, **options))


def send_large() -> None:
    """Send gradients and parameters that are a thousand times too large."""
    wrap(AllReduce, "outgoing", lambda outgoing, self, remote: scaled(outgoing(self, remote), 1000.0))


def answer_two_faced() -> None:
    """Answer some members with an average that is too large, and the others with its opposite."""

    def answer_falsely(answer, self, sender, stream):
        sign = 1.0 if sender.to_bytes()[-1] % 2 else -1.0
        return scaled(answer(self, sender, stream), 3.0 * sign)

    wrap(Reducer, "answer", answer_falsely)


async def scaled(messages, factor: float):
    async for message in messages:
        if message.tensor_part.buffer:
            tensor, index = deserialize_torch_tensor(message.tensor_part).float() * factor, message.tensor_part.chunks
            message.tensor_part.CopyFrom(serialize_torch_tensor(tensor, message.tensor_part.compression))
            message.tensor_part.chunks = index
        yield message


def stay_silent() -> None:
    """Join each group, and then neither send nor answer anything."""

    async def run(self) -> None:
        await asyncio.sleep(self.timeout)

    async def answer(self, sender, stream):
        await asyncio.sleep(600)
        yield averaging_pb2.AveragingData()

    AllReduce.run, Reducer.answer = run, answer


def lead_nowhere() -> None:
    """Accept every request to lead, and never begin."""
    StepMatchmaking.choose_leader = lambda self, search: self.peer_id
    JoinRequests.for_step = lambda self, step: {}


class _LoudLeader(FalseLeader):
    def assemble(self, search, joined) -> None:
        super().assemble(search, joined)
        print(f"LED step {search.control.step}", flush=True)


def lead_falsely(kind: str) -> None:
    """As a leader, form false groups of a kind, see false_leader.py."""

    def run_round(run, self, control):
        if not hasattr(self.own_rounds, "false_leader"):
            self.own_rounds.false_leader = _LoudLeader(self, self._matchmaking, kind)
        return run(self, control)

    async def answer_part(answer, self, stream, sender):
        def handle(stream, context):
            return answer(self, stream, context.remote_id)

        leader = getattr(self, "false_leader", None)
        handler = handle if leader is None else leader.wrap(handle)
        async for message in handler(stream, SimpleNamespace(remote_id=sender)):
            yield message

    wrap(RoundAverager, "run_round", run_round)
    wrap(OwnRounds, "answer", answer_part)


def lead_takeover() -> None:
    """As a leader, claim that each member lacks updates, in a group of two."""
    lead_falsely("false claims")


def lead_pairs() -> None:
    """As a leader, form groups of two."""
    lead_falsely("groups of two")


def lead_apart() -> None:
    """As a leader, form another group for each member."""
    lead_falsely("separate groups")


def malform_claims() -> None:
    """Join with claims that no member can read."""
    wrap(KnownPeers, "sign", lambda sign, self, *args: random.choice([b"", b"\xc1", os.urandom(700)]))


async def count(stream) -> int:
    return len([message async for message in stream])


def flood_requests() -> None:
    """Ask each peer to lead, with claims behind which there are 4 MB: no group can be told of them in one message."""
    claims = Claims(100.0).pack()

    async def ask(self, leader) -> None:
        while True:
            key = str(self.requests.finished_step + 1)
            request = averaging_pb2.JoinRequest(
                schema_hash=self.schema_hash, expiration=run_time() + 60, gather=claims, group_key=key
            )
            request.gather += bytes(DEFAULT_MAX_MSG_SIZE - request.ByteSize() - 4)
            stub = self._servicer_type.get_stub(self._p2p, leader, namespace=self._prefix)
            received = 0
            with suppress(Exception):
                received = await count(await stub.rpc_join_group(request))
            await asyncio.sleep(1.0 if received == 1 else 0.02)  # one message: it was refused

    async def look_for_group(self, step):
        for leader in self.roster.keys() - asking.keys() - {self.peer_id}:
            asking[leader] = asyncio.create_task(ask(self, leader))
        await asyncio.sleep(600)

    def update_roster(self) -> None:
        view = self.tracker.view()
        steps = [progress.epoch for progress in view.others]
        number = 1 + max(steps, default=0)  # for which the others look for a group now
        self.rounds.set_roster(view.roster(number), number - 1)

    asking = {}
    StepMatchmaking.look_for_group, RoundCoordinator.update_roster = look_for_group, update_roster
    ProgressTracker.refresh_period = lambda self: 0.2


def offer_false_statistics() -> None:
    """Offer the true parameters, as of a later step than any other peer has, with statistics that move them far."""

    def offer_false(serialize, self, metadata, tensors):
        names = [None] * (len(tensors) - len(metadata["statistics"])) + metadata["statistics"]
        values = {"exp_avg": 6e4, "exp_avg_sq": 0.0}
        false = [
            torch.full_like(tensor, values[name]) if name in values else tensor
            for tensor, name in zip(tensors, names, strict=True)
        ]
        return serialize(self, metadata | {"epoch": metadata["epoch"] + 1}, false)

    wrap(TrainingStateAverager, "to_messages", offer_false)
    wrap(TrainingStateAverager, "offer", lambda offer, self, priority: offer(self, priority + 1))


def offer_false_state() -> None:
    """Offer random parameters, as of a later step than any other peer has."""

    def offer_noise(serialize, self, metadata, tensors):
        noise = [torch.randn_like(tensor).abs() if tensor.is_floating_point() else tensor for tensor in tensors]
        return serialize(self, metadata | {"epoch": metadata["epoch"] + 1}, noise)

    wrap(TrainingStateAverager, "to_messages", offer_noise)
    wrap(TrainingStateAverager, "offer", lambda offer, self, priority: offer(self, priority + 1))


def report_false_steps() -> None:
    """Report, signed, that this peer is far ahead, with marks of a history that nobody has."""
    marks = [[2**30 + step, os.urandom(6).hex()] for step in range(8)]
    false = {"epoch": 2**30 + 8, "completed": 2**30 + 8, "marks": marks, "distance": 0.0, "away": False}
    wrap(PeerProgress, "to_record", lambda to_record, self: to_record(self) | false)


ATTACKS = {
    attack.__name__: attack
    for attack in (
        send_nan, claim_everything, send_large, answer_two_faced, stay_silent, lead_nowhere, lead_apart, lead_pairs,
        malform_claims, offer_false_state, report_false_steps, flood_requests, offer_false_statistics, lead_takeover,
    )
}  # fmt: skip
