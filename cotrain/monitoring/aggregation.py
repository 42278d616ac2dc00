"""Aggregate the records that trainers publish on the DHT into one report per global step.

Pure logic: no DHT, no clock, no torch. Untrusted peers write all records; the DHT's validators bound their values, and
`parsing` and `progress_record` read them. A peer is its ID.

**Live peers.** A peer is alive if its heartbeat (its progress report) or, without heartbeats, its metrics changed
within `alive_timeout` on the monitor's clock, unless it announced its departure. It takes part while its heartbeat is
fresh (`MAX_SILENCE`): a killed trainer is not waited for, nor one that says that it is away.

**Values of a step.** They are those of the peers that took it, whenever the monitor reads them. A step ends at the
median of the times that they state. Its performance is its samples by the seconds since the step before ended. A peer
was alive at a step if it has reported this one or an earlier one, and this one or a later one.

**Complete steps.** A step is reported, in ascending order, once half of the peers that take part have reported it or a
later one, and the others have done so, too, or had `settle_time` to follow. A peer that contributes to it, as its
heartbeat says, has `late_time`: it reports the step after its local step. Steps more than `MAX_SPREAD` ahead of the
slower half wait. A peer that left after an unreported step still counts: the last one may never take that step. What a
peer reports of a step after that, also because the network was divided, is `late`: it counts, but in no report.

**Going back.** A run that lost all its trainers continues from a checkpoint and repeats the steps since then. Peers
with a step behind the reported one that have contributed to no report are newcomers. Once there are only newcomers,
the aggregator goes back and reports their steps from their first one on, so that a repeated step has two reports. If
newcomers are only in the majority, it does so after `settle_time`. So a lie of the first peer costs no steps.

**Limits.** Byzantine peers that outnumber the honest ones (two against one) decide the global step, and the steps that
they skip are lost. One against one, a Byzantine peer is believed up to `MAX_SPREAD` steps ahead. A jump of more than
`MAX_JUMP` steps must be visible for `settle_time`, and the global step grows by at most `MAX_STEPS_PER_SECOND`. The
weight of a peer's loss and speed is bounded, see `StepReport`; their values are not.
"""

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from cotrain.dht.metrics_schema import HISTORY_LENGTH, LocalMetrics, Metric, describe_metrics
from cotrain.monitoring.parsing import PeerStep, parse_history, parse_metrics
from peerstep.neighbours import cap_weights
from peerstep.progress_record import PeerProgress, read_progress

MAX_JUMP = HISTORY_LENGTH  # steps; normal progress between two refreshes
MAX_STEPS_PER_SECOND = 10.0  # above the rate of any run: matchmaking alone takes seconds, half a second in a toy demo
MAX_SPREAD = 3  # steps between peers of the same run; peers that average together are hardly ever apart
MAX_SILENCE = 20.0  # seconds; trainers publish a heartbeat every 5
MAX_PENDING_STEPS = 2 * HISTORY_LENGTH  # unreported steps kept per peer


@dataclass(frozen=True, slots=True)
class StepReport:
    """Aggregated metrics of one global step.

    `loss`: mean over the micro-batches of each peer that took exactly this step, weighted by the peers' samples, which
    count as they do in the round. `metrics`: those besides the five of hivemind's record, by the names
    of their curves. A value that no peer reported is None.
    """

    step: int
    loss: float | None
    alive_peers: int
    samples: int
    performance: float  # samples per second
    contributors: int  # peers with samples in this step
    mini_steps: int
    time: float  # seconds; when the step ended
    contributions: tuple[PeerStep, ...] = ()
    metrics: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(slots=True)
class TrackedPeer:
    """State of one peer. Times are on the monitor's clock."""

    key: Hashable
    present: float = -math.inf  # when it was last found in the DHT
    last_alive: float = -math.inf
    has_left: bool = False  # by a goodbye
    heartbeat: PeerProgress | None = None
    begun: int = -1  # the newest step that it contributes to, by its heartbeat
    newest: PeerStep | None = None
    first_step: float = math.inf  # the earliest one that it has reported
    pending: dict[int, PeerStep] = field(default_factory=dict)  # its steps that no report contains
    done: int = -1  # its steps up to this one are counted, or are not to be
    is_newcomer: bool = True  # until it contributes to a report; again once its step goes back

    @property
    def reported_step(self) -> int:
        return self.newest.step if self.newest else -1

    @property
    def step(self) -> int:
        """The newest step of this peer. Its heartbeat may arrive before its metrics."""
        return max(self.reported_step, self.heartbeat.epoch if self.heartbeat else -1)


@dataclass
class MetricsAggregator:
    """Converts successive snapshots of the DHT into one StepReport per global step. See the module docstring."""

    last_reported_step: int = -1  # before a restart, -1 if none
    alive_timeout: float = 120.0  # seconds without a sign of life after which a peer counts as gone
    settle_time: float = 30.0  # seconds to wait for stragglers
    late_time: float = 120.0  # the same, for those that have contributed
    target_batch_size: int = 4096  # samples per global step, which bound the weight of one peer
    believes_weights: bool = False  # whether samples have no other bound, see peerstep/neighbours.py
    schema: type[LocalMetrics] = LocalMetrics

    def __post_init__(self):
        self.live_peers: list[TrackedPeer] = []  # in the newest update
        self.contributors: set[Hashable] = set()  # the peers in the newest report
        self.late: list[PeerStep] = []  # found in the newest update, of steps that were reported without them
        self._first_step = self.last_reported_step  # those up to it were counted before a restart
        self._peers: dict[Hashable, TrackedPeer] = {}
        self._reached: dict[int, float] = {}  # pending step -> when half of the peers had first reached it
        self._now = -math.inf
        self._last_report_time = -math.inf
        self._last_ended: tuple[int, float] = -1, -math.inf  # the newest reported step, and its time
        self._is_doubtful = False  # the newest step was a jump that a single peer reported
        self._outvoted_since: float | None = None  # when the newcomers were first found in the majority

    def update(
        self, now: float, metrics: Mapping, history: Mapping | None = None, progress: Mapping | None = None
    ) -> list[StepReport]:
        """Process a snapshot of the DHT and return the newly completed steps, in ascending order.

        :param now: hivemind's DHT time in seconds; the first heartbeat of a peer is compared with it
        :param metrics: the records under `{run_id}_metrics`, by peer
        :param history: those under `{run_id}_history`
        :param progress: those under `{run_id}_training_progress`
        """
        self._now = max(now, self._now)
        self._read(metrics, history, progress)
        self.live_peers = [peer for peer in self._peers.values() if self._is_alive(peer)]
        self._go_back_if_outvoted()
        reports = self._take_complete()
        self.late = [record for peer in self._peers.values() for record in self._take_late(peer)]
        oldest = self._now - 2 * self.alive_timeout
        kept = [peer for peer in self._peers.values() if self._is_alive(peer) or peer.present >= oldest]
        self._peers = {peer.key: peer for peer in kept}
        return reports

    # Records

    def _read(self, metrics: Mapping, history: Mapping | None, progress: Mapping | None) -> None:
        heartbeats = read_progress(progress or {})
        goodbyes = [peer for peer, record in (progress or {}).items() if getattr(record, "value", record) is None]
        newest = parse_metrics(metrics, self.schema)
        for key in (*heartbeats, *goodbyes, *(record.peer for record in newest)):
            self._peers.setdefault(key, TrackedPeer(key)).present = self._now
        for key in goodbyes:
            self._peers[key].has_left = True
        for key, heartbeat in heartbeats.items():
            self._record_heartbeat(self._peers[key], heartbeat)
        for record in newest:
            # Metrics stay in the DHT for minutes after their peer has died: where heartbeats are available, metrics
            # are a sign of life only when they change.
            self._record_newest(self._peers[record.peer], record, is_life_sign=not progress)
        for record in (*parse_history(history, self.schema), *newest):
            peer = self._peers.get(record.peer)
            if peer is not None:
                peer.first_step = min(peer.first_step, record.step)
            if peer is not None and record.step > peer.done and record.step not in peer.pending:
                peer.pending[record.step] = record
                if len(peer.pending) > MAX_PENDING_STEPS:
                    del peer.pending[min(peer.pending)]

    def _record_heartbeat(self, peer: TrackedPeer, heartbeat: PeerProgress) -> None:
        if peer.heartbeat and heartbeat.reported_at <= peer.heartbeat.reported_at:
            return  # nothing new, or an outdated copy in the DHT
        # Without a previous heartbeat this one may be that of a peer that has died.
        peer.last_alive = max(peer.last_alive, self._now if peer.heartbeat else min(heartbeat.reported_at, self._now))
        peer.heartbeat, peer.has_left = heartbeat, False
        if heartbeat.contributed > 0:
            peer.begun = heartbeat.epoch

    def _record_newest(self, peer: TrackedPeer, record: PeerStep, is_life_sign: bool) -> None:
        is_known = peer.newest and record._replace(expires=peer.newest.expires) == peer.newest
        if is_known or (peer.newest and record.expires < peer.newest.expires):
            return  # nothing new, also if it is stored again, or an outdated copy in the DHT
        if record.step <= peer.reported_step:  # it restarted from an earlier state: it has another record of this step
            peer.is_newcomer, peer.done, peer.first_step = True, -1, record.step
            peer.pending.clear()
        if peer.newest or is_life_sign:
            peer.last_alive = self._now
        if self._last_report_time == -math.inf and peer.newest is None:
            # After a restart of the monitor: the steps before are in reports, unless the run goes back from now on.
            peer.done = min(record.step - 1, self.last_reported_step)
            peer.is_newcomer = record.step < self.last_reported_step
        peer.newest = record

    @property
    def is_waiting(self) -> bool:
        """Whether half of the peers have reported a step that the others are waited for."""
        return bool(self._reached)

    # Live peers and votes

    def _is_alive(self, peer: TrackedPeer) -> bool:
        return not peer.has_left and self._now - peer.last_alive <= self.alive_timeout

    def _takes_part(self, peer: TrackedPeer) -> bool:
        is_heard = peer.heartbeat is None or (not peer.heartbeat.away and self._now - peer.last_alive <= MAX_SILENCE)
        return self._is_alive(peer) and is_heard

    def _go_back_if_outvoted(self) -> None:
        """Go back to the first step of the newcomers if they outnumber the others; see the module docstring."""
        voters = [peer for peer in self.live_peers if peer.newest and self._takes_part(peer)]
        first_steps = [
            min(peer.pending)
            for peer in voters
            if peer.is_newcomer and peer.pending and min(peer.pending) <= self.last_reported_step
        ]
        if not first_steps or 2 * len(first_steps) < len(voters) + (0 if self._is_doubtful else 1):
            self._outvoted_since = None
            return
        if self._outvoted_since is None:
            self._outvoted_since = self._now
        has_ended = len(first_steps) == len(voters) and self._last_report_time > -math.inf
        if not has_ended and self._now - self._outvoted_since < self.settle_time:
            return
        self.last_reported_step = statistics.median_low(first_steps) - 1
        self._first_step = min(self._first_step, self.last_reported_step)
        self._outvoted_since, self._is_doubtful = None, False
        for peer in self._peers.values():
            if peer not in voters:  # its unreported steps are not of this run
                peer.pending, peer.done = {}, peer.reported_step

    # Complete steps

    def _take_complete(self) -> list[StepReport]:
        nearby = self.last_reported_step - MAX_SPREAD
        taking_part = [peer for peer in self.live_peers if peer.step >= nearby and self._takes_part(peer)]
        # Those that left after a step that is not reported yet vote, too.
        gone = [peer for peer in self._peers.values() if not self._takes_part(peer)]
        voters = [peer for peer in taking_part if peer.reported_step >= nearby]
        voters += [peer for peer in gone if max(peer.pending, default=-1) > self.last_reported_step]
        levels = sorted(peer.reported_step for peer in voters)
        if not levels:
            return []
        agreed, half = levels[(len(levels) - 1) // 2], levels[len(levels) // 2]
        seconds = self._now - self._last_report_time
        possible = self.last_reported_step + MAX_JUMP + MAX_STEPS_PER_SECOND * seconds
        reached = min(half, agreed + MAX_SPREAD, possible)
        steps = {step for peer in self._peers.values() for step in peer.pending}
        pending = sorted(step for step in steps if self.last_reported_step < step <= reached)
        all_there = min((peer.reported_step for peer in taking_part), default=math.inf)
        self._reached = {step: self._reached.get(step, self._now) for step in pending}
        complete = self.last_reported_step
        for step in pending:
            near = step <= complete + (MAX_JUMP if complete >= 0 else MAX_SPREAD)  # a run begins at step 0 or 1
            is_owed = any(peer.reported_step < step <= peer.begun for peer in taking_part)
            settled = self._now - self._reached[step] >= (self.late_time if is_owed else self.settle_time)
            if settled or (near and step <= all_there):
                complete = step
        reports = [self._report(step) for step in pending if step <= complete]
        self._reached = {step: since for step, since in self._reached.items() if step > complete}
        return reports

    def _take_late(self, peer: TrackedPeer) -> list[PeerStep]:
        steps = [] if peer.is_newcomer else sorted(step for step in peer.pending if step <= self.last_reported_step)
        late = [self._take(peer, step) for step in steps]
        return [record for record in late if record.step > self._first_step]

    def _take(self, peer: TrackedPeer, step: int) -> PeerStep:
        """Take a record of a peer, with its samples bounded."""
        peer.is_newcomer, peer.done, own = False, max(peer.done, step), peer.pending.pop(step)
        return own._replace(samples_accumulated=min(own.samples_accumulated, self.target_batch_size))

    def _report(self, step: int) -> StepReport:
        contributors = [peer for peer in self._peers.values() if step in peer.pending]
        if len(contributors) > 1:
            self._is_doubtful = False
        elif step > self.last_reported_step + MAX_JUMP:
            self._is_doubtful = True
        self.last_reported_step, self._last_report_time = step, self._now
        self.contributors = {peer.key for peer in contributors}
        contributions = [self._take(peer, step) for peer in contributors]
        if not self.believes_weights:
            samples = {number: own.samples_accumulated for number, own in enumerate(contributions)}
            caps = cap_weights(samples, len(samples) - 1)
            contributions = [own._replace(samples_accumulated=round(caps[n])) for n, own in enumerate(contributions)]
        values = {
            metric.name: _combine(metric, contributions)
            for metric in describe_metrics(self.schema)
            if metric.combine is not None
        }
        rate, samples = values.pop("samples_per_second"), values.pop("samples_accumulated")
        (before, ended_before), ended = self._last_ended, values.pop("time") or self._now
        if before < step:
            ended = min(max(ended, ended_before), self._now)
        if before == step - 1 >= 0 and ended > ended_before:
            rate = samples / max(1e-3, ended - ended_before)  # otherwise the sum of what the peers state
        self._last_ended = step, ended
        return StepReport(
            step=step,
            loss=values.pop("loss"),
            alive_peers=sum(peer.first_step <= step <= peer.reported_step for peer in self._peers.values()),
            samples=samples,
            performance=rate,
            contributors=sum(peer_step.samples_accumulated > 0 for peer_step in contributions),
            mini_steps=values.pop("mini_steps"),
            time=ended,
            contributions=tuple(contributions),
            metrics={name.replace("_", " "): value for name, value in values.items()},
        )


def _combine(metric: Metric, peer_steps: Sequence[PeerStep]) -> float | None:
    """Combine the peers' values of a metric, see `LocalMetrics` for the rules; None if no peer has a value."""
    if metric.combine == "mean":
        return _weighted_mean(metric, peer_steps)
    values = [value for peer_step in peer_steps if (value := getattr(peer_step, metric.name)) is not None]
    combine = {"maximum": max, "median": statistics.median, "sum": sum if metric.is_whole else math.fsum}
    return combine[metric.combine](values) if values else None


def _weighted_mean(metric: Metric, peer_steps: Sequence[PeerStep]) -> float | None:
    """Return the mean weighted by samples, over peers whose value of `metric.per`, if any, is above zero."""
    values, weights = [], []
    for peer_step in peer_steps:
        value, samples = getattr(peer_step, metric.name), peer_step.samples_accumulated
        divisor = 1 if metric.per is None else getattr(peer_step, metric.per)
        if value is not None and divisor and samples > 0:
            values.append(value / divisor)
            weights.append(samples)
    # Rounding errors must not leave the range.
    return min(max(statistics.fmean(values, weights), min(values)), max(values)) if weights else None
