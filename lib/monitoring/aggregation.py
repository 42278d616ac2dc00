"""Aggregate the records that trainers publish on the DHT into one report per global step.

Pure logic: no DHT, no clock, no torch. All records are written by untrusted peers; `parsing` reads them.

**Live peers.** A peer is alive if its heartbeat (its progress report) is younger than `alive_timeout`, or if its
metrics changed within that time, unless it announced its departure. Keys with the same peer ID count as one peer: a
trainer that restarted.

**Global step of the run.** It is decided by vote. A live peer votes for its current step, and so for all earlier ones.
Peers that no longer take part (behind the reported steps, or without a new sample for long) have no vote. A peer that
left after a step that is not reported yet keeps its vote for `alive_timeout`. Otherwise the slowest peer, alone at the
end of a run, would roll back the step that all other peers have taken. A step is complete, and is reported once and in
ascending order, when

1. every voter has reported it or a later one; or
2. half of the voters are at this step or a later one, and the others had `settle_time` to follow.

Steps more than `MAX_SPREAD` ahead of the majority of the voters are dropped: one peer, however far ahead, must neither
advance the run nor hold it back. A jump of more than `MAX_JUMP` steps is accepted only after it has been visible for
`settle_time` (six times as long if a single peer reports it), so that the first record does not decide. The global
step grows by at most `MAX_STEPS_PER_SECOND` since the last report, so that one Byzantine peer that is alone for a
while does not decide either.

**Rollback.** The first peer to be seen is believed, since no other peer contradicts it. If that peer was Byzantine, or
if a run lost its state and restarted, the trainers are far behind the reported step. The aggregator adopts their step
and continues from there once more than half of the active peers are behind (half, if a single peer reported the
jump), have completed steps while the aggregator watched, and are still behind after `settle_time`.

**Revived run.** A run that is restored from a checkpoint, after all its trainers were killed, repeats the steps since
the checkpoint. If these are few, they are not reported again: reports continue with the first new step. If they are so
many that the trainers complete two of them and `settle_time` passes while the trainers are still more than
`MAX_SPREAD` steps behind, this is a rollback, and the remaining steps are reported a second time.

**Limits.** A vote costs no more than a key pair. Byzantine peers that outnumber the honest voters (two against one)
decide the global step, and the steps that they skip are lost. One against one, a Byzantine peer is believed up to
`MAX_SPREAD` steps ahead. The loss and the speed of a peer are self-reported: their weight is bounded, see
`StepReport`, their values are not.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lib.common.metrics_schema import HISTORY_LENGTH, LocalMetrics, Metric, describe_metrics
from lib.monitoring.parsing import (
    Heartbeat,
    PeerStep,
    find_owner,
    parse_history,
    parse_metrics,
    parse_progress,
    parse_target_batch_sizes,
)

MAX_JUMP = HISTORY_LENGTH  # steps; normal progress between two refreshes
MAX_STEPS_PER_SECOND = 10.0  # above the rate of any run: matchmaking alone takes seconds, half a second in a toy demo
LONE_JUMP_FACTOR = 6  # multiplies `settle_time` for a jump that a single peer reports
MAX_SPREAD = 3  # steps between peers of the same run; peers that average together are hardly ever apart
MAX_PENDING_STEPS = 2 * HISTORY_LENGTH  # unreported steps kept per peer
# In target batches. Peers keep computing until they notice that the target is reached, and during matchmaking. No peer
# was seen to reach four targets that way, except where a single local step exceeds the target.
MAX_OVERSHOOT = 4


@dataclass(frozen=True, slots=True)
class StepReport:
    """Aggregated metrics of one global step.

    `loss`: mean over the micro-batches of each peer that took exactly this step, weighted by the peers' samples; None
    if no peer reported one. The weight of a peer, and its part of `samples`, is bounded by `MAX_OVERSHOOT` target
    batches once more than half of the live peers have published the same target. `metrics`: metrics declared besides
    the five of hivemind's record, by the names of their curves; a value is None if no peer reported it.
    """

    step: int
    loss: float | None
    alive_peers: int
    samples: int
    performance: float  # samples per second of all live peers
    contributors: int  # peers with samples in this step
    mini_steps: int
    time: float  # seconds; when the aggregator found the step complete
    contributions: tuple[PeerStep, ...] = ()
    metrics: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(slots=True)
class _Peer:
    """State of one public key. Times are in seconds on the monitor's clock."""

    key: bytes
    moved: float  # when its step or its number of samples last changed
    present: float  # when it was last found in the DHT
    pending: dict[int, PeerStep] = field(default_factory=dict)  # steps that are not reported yet
    newest: PeerStep | None = None
    progress: Heartbeat | None = None
    last_alive: float = -math.inf
    left: float | None = None  # when the aggregator found its goodbye
    num_steps_seen: int = 0  # steps that the peer completed while the aggregator watched

    @property
    def identity(self) -> bytes:
        return self.progress.peer_id if self.progress else self.key

    @property
    def reported_step(self) -> int:
        return self.newest.step if self.newest else -1

    @property
    def step(self) -> int:
        """The newest step of this peer. Its heartbeat may arrive before its metrics."""
        return max(self.reported_step, self.progress.epoch if self.progress else -1)

    def newest_value(self, metric: Metric) -> float:
        """The newest value of a metric, 0 if unknown. The heartbeat is used until the first metrics arrive."""
        return getattr(self.newest or self.progress, metric.name, None) or 0.0


@dataclass(frozen=True, slots=True)
class _Vote:
    """Outcome of a vote: for each quorum the newest step that it has reached; -1 if there are no voters."""

    all: int  # all voters; they have published metrics of this step, not only a heartbeat
    majority: int  # more than half of the voters
    half: int  # at least half of the voters
    ceiling: float  # records of later steps are dropped


class MetricsAggregator:
    """Converts successive snapshots of the DHT into one StepReport per global step. See the module docstring.

    Memory and time are bounded by `max_peers` and MAX_PENDING_STEPS, whatever is published: known peers have priority
    over unknown ones, and newcomers are refused while `max_peers` peers are alive.

    :param last_reported_step: newest step reported before a restart, -1 if none; steps up to this one are not reported
        again
    :param alive_timeout: seconds without a sign of life after which a peer counts as gone. hivemind's heartbeat comes
        at least every half `metadata_expiration`, which is 60 seconds here
    :param settle_time: seconds to wait for stragglers
    :param target_batch_size: samples per global step, until more than half of the live peers agree on a value; bounds
        the weight of one peer. None: no bound
    :param max_peers: maximum number of public keys to track
    :param schema: the metrics to aggregate
    :raises ValueError: if a duration or `max_peers` is not above zero
    """

    def __init__(
        self,
        last_reported_step: int = -1,
        alive_timeout: float = 120.0,
        settle_time: float = 30.0,
        target_batch_size: int | None = None,
        max_peers: int = 2000,
        schema: type[LocalMetrics] = LocalMetrics,
    ):
        if min(alive_timeout, settle_time, max_peers) <= 0:
            raise ValueError("alive_timeout, settle_time and max_peers must be above zero")
        self.last_reported_step = last_reported_step
        self.alive_timeout, self.settle_time, self.max_peers = alive_timeout, settle_time, max_peers
        self.target_batch_size, self.schema = target_batch_size, schema
        self.refused: Counter = Counter()  # records refused in the newest update, by reason
        self.alive_peers = self.alive_clients = 0  # in the newest update; clients are peers in client mode
        self.run_step: int | None = None  # the step of the majority in the newest update, None without voters
        self._peers: dict[bytes, _Peer] = {}
        self._reached: dict[int, float] = {}  # pending step -> when half of the voters had first reached it
        self._now = -math.inf
        self._last_report_time: float | None = None
        self._read_any_metrics = False
        # Set while the latest reports came from a single peer: which peer, after which step, and whether the peer
        # skipped more than MAX_JUMP steps.
        self._lone_witness: bytes | None = None
        self._told_alone_after = -1
        self._has_jumped = False
        self._behind_since: float | None = None  # when the active peers were first found behind the reported step

    def update(
        self,
        now: float,
        metrics: object = None,
        history: object = None,
        progress: object = None,
        peers: object = None,
    ) -> list[StepReport]:
        """Process a snapshot of the DHT and return the newly completed steps, in ascending order.

        :param now: hivemind's DHT time in seconds; heartbeats are compared with it
        :param metrics: the dictionary under `{run_id}_metrics` as `dht.get` returned it; None or {} if there is none
        :param history: the same for `{run_id}_history`
        :param progress: the same for `{run_id}_training_progress`
        :param peers: the same for `{run_id}_peers`
        """
        self._now = max(now, self._now)
        self.refused = Counter()
        steps = self._take_in(metrics, history, progress)
        live_peers = self._live_peers()
        self._learn_target(parse_target_batch_sizes(self._bounded(peers)), live_peers)
        if self._go_back_if_outvoted(live_peers):
            steps = []  # the histories were parsed from a later step on; the next update has them in full
        vote = self._vote(live_peers)
        self._keep_steps(steps, vote)
        reports = self._take_complete(vote, live_peers)
        self._forget_absent_peers()
        return reports

    def flush(self, now: float) -> list[StepReport]:
        """Return the steps that more than half of the voters have reached, without waiting for stragglers.

        For the shutdown of the monitor.
        """
        self._now = max(now, self._now)
        live_peers = self._live_peers()
        return self._take_complete(self._vote(live_peers), live_peers, wait_for_stragglers=False)

    # Records

    def _take_in(self, metrics: object, history: object, progress: object) -> list[PeerStep]:
        """Update the state of each peer and return all steps that the records contain."""
        heartbeats, refused_progress = parse_progress(self._bounded(progress))
        steps, refused_metrics = parse_metrics(self._bounded(metrics), self.schema)
        old_steps, refused_history = parse_history(self._bounded(history), self.last_reported_step, self.schema)
        self.refused += refused_progress + refused_metrics + refused_history
        steps += old_steps

        newcomers = {record.peer for record in (*heartbeats, *steps)} - self._peers.keys()
        if len(self._peers) + len(newcomers) > self.max_peers:
            self._peers = {key: peer for key, peer in self._peers.items() if self._is_alive(peer)}
        for heartbeat in heartbeats:
            self._note_progress(heartbeat)
        newest: dict[bytes, PeerStep] = {}
        for record in steps:
            if record.step > newest.setdefault(record.peer, record).step:
                newest[record.peer] = record
        # Metrics stay in the DHT for minutes after their peer has died. Metrics found at the start of a monitor are no
        # sign of life where heartbeats are available.
        is_news = self._read_any_metrics or not heartbeats
        for record in newest.values():
            self._note_newest(record, is_news)
        self._read_any_metrics |= bool(newest)
        return steps

    def _bounded(self, raw: object) -> object:
        """Return at most `max_peers` of the records, records of known peers first."""
        raw = getattr(raw, "value", raw)
        if not isinstance(raw, Mapping) or len(raw) <= self.max_peers:
            return raw
        self.refused["too many records"] += len(raw) - self.max_peers
        known_first = sorted(raw, key=lambda subkey: find_owner(subkey) not in self._peers)
        return {subkey: raw[subkey] for subkey in known_first[: self.max_peers]}

    def _find_peer(self, key: bytes) -> _Peer | None:
        peer = self._peers.get(key)
        if peer is None:
            if len(self._peers) >= self.max_peers:
                self.refused["too many peers"] += 1
                return None
            peer = self._peers[key] = _Peer(key, moved=self._now, present=self._now)
        peer.present = self._now
        return peer

    def _note_progress(self, heartbeat: Heartbeat) -> None:
        peer = self._find_peer(heartbeat.peer)
        if peer is None or heartbeat == peer.progress:
            return
        if heartbeat.goodbye:
            if peer.left is None:
                peer.left = self._now
            return
        # A peer whose clock is ahead does not stay alive longer: its heartbeat counts from when it was first seen.
        time = min(heartbeat.time, self._now)
        if peer.left is not None and time > peer.left:
            peer.left = None
        peer.last_alive = max(peer.last_alive, time)
        before, peer.progress = peer.progress, heartbeat
        if before and (before.epoch, before.samples_accumulated) != (heartbeat.epoch, heartbeat.samples_accumulated):
            peer.moved = self._now

    def _note_newest(self, record: PeerStep, is_news: bool) -> None:
        peer = self._find_peer(record.peer)
        if peer is None or record == peer.newest:
            return
        if peer.newest is not None and record.step <= self.last_reported_step:
            self.refused["late"] += 1
        if peer.newest is not None and peer.newest.step < record.step <= peer.newest.step + MAX_SPREAD:
            peer.num_steps_seen += 1
        peer.newest, peer.moved = record, self._now
        if is_news:
            peer.last_alive = self._now

    def _keep_steps(self, steps: list[PeerStep], vote: _Vote) -> None:
        for record in steps:
            peer = self._peers.get(record.peer)
            if peer is None or record.step <= self.last_reported_step or record.step in peer.pending:
                continue
            # Drop steps beyond the ceiling. Genuine ones reappear in the peer's history.
            if record.step > vote.ceiling:
                self.refused["ahead of the run"] += 1
            elif len(peer.pending) >= MAX_PENDING_STEPS:
                self.refused["too many unreported steps"] += 1
            else:
                peer.pending[record.step] = record

    # Live peers and votes

    def _is_alive(self, peer: _Peer) -> bool:
        return peer.left is None and self._now - peer.last_alive <= self.alive_timeout

    def _has_just_left(self, peer: _Peer) -> bool:
        return peer.left is not None and self._now - peer.left <= self.alive_timeout

    def _live_peers(self) -> list[_Peer]:
        """Return each live peer once: of several keys with the same peer ID, the one with the newest sign of life."""
        live: dict[bytes, _Peer] = {}
        for peer in self._peers.values():
            rival = live.get(peer.identity)
            if self._is_alive(peer) and (rival is None or peer.last_alive >= rival.last_alive):
                live[peer.identity] = peer
        return list(live.values())

    def _learn_target(self, told: dict[bytes, int], live_peers: list[_Peer]) -> None:
        """Adopt the target batch size that more than half of the live peers publish; else keep the previous one."""
        votes = Counter(told[peer.key] for peer in live_peers if peer.key in told)
        for target, number in votes.most_common(1):
            if 2 * number > len(live_peers):
                self.target_batch_size = target

    def _is_moving(self, peer: _Peer) -> bool:
        return self._now - peer.moved <= 2 * self.alive_timeout

    def _is_behind(self, peer: _Peer) -> bool:
        return peer.step < self.last_reported_step - MAX_SPREAD

    def _go_back_if_outvoted(self, live_peers: list[_Peer]) -> bool:
        """Roll back to the step of the trainers if they are far behind; see "Rollback" in the module docstring.

        :returns: whether the aggregator rolled back
        """
        moving = [peer for peer in live_peers if self._is_moving(peer)]
        behind = [peer.step for peer in moving if self._is_behind(peer) and peer.num_steps_seen >= 2]
        needed = len(moving) / 2 if self._lone_witness and self._has_jumped else (len(moving) + 1) / 2
        if len(behind) < needed or not behind:
            self._behind_since = None
            return False
        if self._behind_since is None:
            self._behind_since = self._now
        if self._now - self._behind_since < self.settle_time:
            return False
        stands = sorted(behind)[len(behind) // 2]
        is_doubtful = self._lone_witness is not None and self._told_alone_after < stands
        self.last_reported_step = self._told_alone_after if is_doubtful else stands - 1
        self._last_report_time = self._behind_since = self._lone_witness = None
        for peer in self._peers.values():
            peer.pending.clear()
        return True

    def _voters(self, live_peers: list[_Peer]) -> list[_Peer]:
        """Return the active peers, and the peers that have just left after a step that is not reported yet.

        Without any of these: all known peers with a step that is not reported yet.
        """
        taking_part = [peer for peer in live_peers if not self._is_behind(peer) and self._is_moving(peer)]
        unreported = [peer for peer in self._peers.values() if peer.reported_step > self.last_reported_step]
        there = {peer.identity for peer in live_peers}  # a peer that left and came back has one vote
        just_left = [peer for peer in unreported if self._has_just_left(peer) and peer.identity not in there]
        return taking_part + just_left or unreported

    def _vote(self, live_peers: list[_Peer]) -> _Vote:
        voters = self._voters(live_peers)
        self.alive_peers = len(live_peers)
        self.alive_clients = sum(peer.progress is not None and peer.progress.client_mode for peer in live_peers)
        self.run_step = None
        if not voters:
            return _Vote(-1, -1, -1, -1)
        stands = sorted((peer.step for peer in voters), reverse=True)
        half, self.run_step = stands[(len(stands) - 1) // 2], stands[len(stands) // 2]
        possible = math.inf
        if self._last_report_time is not None:
            elapsed = self._now - self._last_report_time
            possible = self.last_reported_step + MAX_JUMP + MAX_STEPS_PER_SECOND * elapsed
        return _Vote(
            all=min(peer.reported_step for peer in voters),
            majority=self.run_step,
            half=half,
            ceiling=min(self.run_step + MAX_SPREAD, possible),
        )

    def _forget_absent_peers(self) -> None:
        for key, peer in list(self._peers.items()):
            if not self._is_alive(peer) and self._now - peer.present > 2 * self.alive_timeout:
                del self._peers[key]

    # Complete steps

    def _take_complete(
        self, vote: _Vote, live_peers: list[_Peer], wait_for_stragglers: bool = True
    ) -> list[StepReport]:
        reached = min(vote.half, vote.ceiling)
        pending = sorted({step for peer in self._peers.values() for step in peer.pending if step <= reached})
        self._reached = {step: self._reached.get(step, self._now) for step in pending}
        complete = self.last_reported_step
        for step in pending:
            near = step <= complete + (MAX_JUMP if complete >= 0 else MAX_SPREAD)  # a run begins at step 0 or 1
            is_lone = not near and sum(step in peer.pending for peer in self._peers.values()) == 1
            patience = self.settle_time * (LONE_JUMP_FACTOR if is_lone else 1)
            settled = self._now - self._reached[step] >= patience
            at_once = step <= vote.all or (step <= vote.majority and not wait_for_stragglers)
            if settled or (near and at_once):
                complete = step
        reports = [self._report(step, live_peers) for step in pending if step <= complete]
        if reports:
            self._note_witnesses(reports)
            self._mark_reported(complete)
        return reports

    def _note_witnesses(self, reports: list[StepReport]) -> None:
        before = self.last_reported_step
        for report in reports:
            peers = {record.peer for record in report.contributions}
            witness = peers.pop() if len(peers) == 1 else None
            if witness is None or witness != self._lone_witness:
                self._lone_witness, self._told_alone_after, self._has_jumped = witness, before, False
            self._has_jumped |= report.step > before + MAX_JUMP
            before = report.step

    def _mark_reported(self, step: int) -> None:
        self.last_reported_step = step
        self._last_report_time = self._now
        for peer in self._peers.values():
            for old_step in [pending for pending in peer.pending if pending <= step]:
                del peer.pending[old_step]

    def _report(self, step: int, live_peers: list[_Peer]) -> StepReport:
        contributions = [peer.pending[step] for peer in self._peers.values() if step in peer.pending]
        believed = [self._bound_samples(peer_step) for peer_step in contributions]
        values = {
            metric.name: _combine(metric, believed, live_peers)
            for metric in describe_metrics(self.schema)
            if metric.combine is not None
        }
        return StepReport(
            step=step,
            loss=values.pop("loss"),
            alive_peers=len(live_peers),
            samples=values.pop("samples_accumulated"),
            performance=values.pop("samples_per_second"),
            contributors=sum(peer_step.samples_accumulated > 0 for peer_step in contributions),
            mini_steps=values.pop("mini_steps"),
            time=self._now,
            contributions=tuple(contributions),
            metrics={name.replace("_", " "): value for name, value in values.items()},
        )

    def _bound_samples(self, peer_step: PeerStep) -> PeerStep:
        """Clip the samples of a peer to `MAX_OVERSHOOT` target batches."""
        bound = math.inf if self.target_batch_size is None else MAX_OVERSHOOT * self.target_batch_size
        if peer_step.samples_accumulated <= bound:
            return peer_step
        return dataclasses.replace(peer_step, samples_accumulated=bound)


def _combine(metric: Metric, peer_steps: Sequence[PeerStep], live_peers: Sequence[_Peer]) -> float | None:
    """Combine the peers' values of a metric, see `LocalMetrics` for the rules; None if no peer has a value."""
    if metric.combine == "live sum":
        return math.fsum(peer.newest_value(metric) for peer in live_peers)
    if metric.combine == "mean":
        return _weighted_mean(metric, peer_steps)
    values = [value for peer_step in peer_steps if (value := getattr(peer_step, metric.name)) is not None]
    if not values:
        return None
    if metric.combine == "maximum":
        return max(values)
    return sum(values) if metric.is_whole else math.fsum(values)


def _weighted_mean(metric: Metric, peer_steps: Sequence[PeerStep]) -> float | None:
    """Return the mean weighted by samples, over peers whose value of `metric.per`, if any, is above zero."""
    values, weights = [], []
    for peer_step in peer_steps:
        value, samples = getattr(peer_step, metric.name), peer_step.samples_accumulated
        divisor = 1 if metric.per is None else getattr(peer_step, metric.per)
        if value is not None and divisor and samples > 0:
            values.append(value / divisor)
            weights.append(samples)
    if not weights:
        return None
    mean = math.fsum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)
    return min(max(mean, min(values)), max(values))  # rounding errors must not leave the range
