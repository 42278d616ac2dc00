"""Aggregate the records that trainers publish on the DHT into one report per global step.

Pure logic: no DHT, no clock, no torch. Untrusted peers write all records; the DHT's validators bound their number,
their size and their values, see `run_records.TrainerRecord`. A peer is its ID.

**Live peers.** A peer is alive if its progress report, its heartbeat, changed within `alive_timeout` on the monitor's
clock, unless it announced its departure. It takes part while its heartbeat is fresh (`FRESH_SECONDS`): a killed
trainer is not waited for, nor one that says that it is away.

**Values of a step.** They are those of the peers that took it, whenever the monitor reads them. A step ends at the
median of the times that they state. Its performance is its samples by the seconds since the step before ended. A peer
was alive at a step if it has reported this one or an earlier one, and this one or a later one.

**Complete steps.** A step is reported, in ascending order, once half of the peers that take part have reported it or a
later one, and the others have done so, too, or had `settle_time` to follow. A peer that contributes to it, as its
heartbeat says, has `late_time`: it reports the step after its local step. Steps more than `MAX_SPREAD` ahead of the
slower half wait. A peer that left after an unreported step still counts: the last one may never take that step. What a
peer reports of a step after that, also because the network was divided, is `late`: it counts, but in no report. In
each of the newest HISTORY_LENGTH steps a peer counts once, with at most what it could have had in the report, and only
if others name it as a member of their rounds, see `named_by_others`.

**Going back.** A run that lost all its trainers continues from a checkpoint and repeats the steps since then. Peers
with a step behind the reported one that have contributed to no report are newcomers. Once there are only newcomers,
the aggregator goes back and reports their steps from their first one on, so that a repeated step has two reports. If
newcomers are only in the majority, it does so after `settle_time`. So a lie of the first peer costs no steps.

**Limits.** Byzantine peers that outnumber the honest ones (two against one) decide the global step, and the steps that
they skip are lost. One against one, a Byzantine peer is believed up to `MAX_SPREAD` steps ahead. A jump of more than
`MAX_JUMP` steps must be visible for `settle_time`, and the global step grows by at most `MAX_STEPS_PER_SECOND`. The
weight of a peer's loss and speed is bounded, see `StepReport`. A loss far from those of the others and of the newest
steps is left out, see `find_near`: one peer of two has its way if it is there from the first step on.
"""

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from cotrain.common.names import short
from cotrain.dht import metrics_schema
from cotrain.dht.metrics_schema import HISTORY_LENGTH, Metric, read_row
from peerstep.reports.progress_report import PeerProgress, read_progress
from peerstep.rounds.relative_bounds import cap_weights, medians_of_others

MAX_JUMP = HISTORY_LENGTH  # steps; normal progress between two refreshes
MAX_STEPS_PER_SECOND = 10.0  # above the rate of any run: matchmaking alone takes seconds, half a second in a toy demo
MAX_SPREAD = 3  # steps between peers of the same run; peers that average together are hardly ever apart
FRESH_SECONDS = 20.0  # seconds; trainers publish a heartbeat every 5
MAX_PENDING_STEPS = 2 * HISTORY_LENGTH  # unreported steps kept per peer
# Of a value that is left out: values to compare with, and its distance from their median, in medians of their
# distances and relative to the median. Losses of honest peers differ by a few medians, and by some per cent.
MIN_KNOWN, MAX_KNOWN, FAR, RELATIVELY_FAR = 5, 64, 20.0, 0.5


class PeerStep(NamedTuple):
    """One peer's report of a global step."""

    peer: Hashable  # its ID
    step: int
    samples: int  # that count, at most those that the peer states
    metrics: Mapping[str, int | float | None]  # by the names of the fields of `StepMetrics`, as the peer states them


# Metrics with a field of their own in a report
NAMED_METRICS = ("samples_per_second", "samples_accumulated", "loss", "mini_steps", "time")


@dataclass(frozen=True, slots=True)
class StepReport:
    """Aggregated metrics of one global step.

    `loss`: mean over the micro-batches of each peer that took exactly this step, weighted by the peers' samples, which
    count as they do in the round, without losses far from the others'. `metrics`: those besides the five of hivemind's
    record, by the names of their curves. A value that no peer reported is None.
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


@dataclass(slots=True, eq=False)
class TrackedPeer:
    """State of one peer. Times are on the monitor's clock."""

    key: Hashable
    present: float = -math.inf  # when it was last found in the DHT
    heard_at: float = -math.inf  # when its heartbeat last changed; after a goodbye -inf
    heartbeat: PeerProgress | None = None
    newest: PeerStep | None = None
    expires: float = -math.inf  # when the record with `newest` does
    first_step: float = math.inf  # the earliest one that it has reported
    members: Collection[str] = ()  # short names of those that gave samples in its newest rounds
    pending: dict[int, PeerStep] = field(default_factory=dict)  # its steps that no report contains
    done: int = -1  # its steps up to this one are counted, or are not to be
    is_newcomer: bool = True  # until it contributes to a report; again once its step goes back

    @property
    def reported_step(self) -> int:
        return self.newest.step if self.newest else -1

    @property
    def step(self) -> int:
        """The newest step of this peer. Its heartbeat may arrive before its report."""
        return max(self.reported_step, self.heartbeat.epoch if self.heartbeat else -1)

    @property
    def newest_owed(self) -> int:
        """The newest step to which this peer contributes. It reports the step after its local step."""
        return self.heartbeat.epoch if self.heartbeat.contributed > 0 else -1


@dataclass
class MetricsAggregator:
    """Converts successive snapshots of the DHT into one StepReport per global step. See the module docstring."""

    last_reported_step: int = -1  # before a restart, -1 if none
    alive_timeout: float = 120.0  # seconds without a sign of life after which a peer counts as gone
    settle_time: float = 30.0  # seconds to wait for stragglers
    late_time: float = 120.0  # the same, for those that have contributed
    target_batch_size: int = 4096  # samples per global step, which bound the weight of one peer
    believes_weights: bool = False  # whether samples have no other bound, see peerstep/rounds/relative_bounds.py

    def __post_init__(self):
        self.live_peers: list[TrackedPeer] = []  # in the newest update
        self.contributors: set[Hashable] = set()  # the peers in the newest report
        self.late: list[PeerStep] = []  # found in the newest update, of steps that were reported without them
        self._counted: dict[int, dict[Hashable, int]] = {}  # samples by peer in each of the newest reported steps
        self._known: dict[str, deque] = defaultdict(partial(deque, maxlen=MAX_KNOWN))  # means of peers, by metric
        self.peers: dict[Hashable, TrackedPeer] = {}
        self._taking_part: list[TrackedPeer] = []
        self.reached: dict[int, float] = {}  # pending step -> when half of the peers had first reached it
        self._now = -math.inf
        self._last_report_time = -math.inf
        self._last_ended: tuple[int, float] = -1, -math.inf  # the newest reported step, and its time
        self._is_doubtful = False  # the newest step was a jump that a single peer reported
        self._outvoted_since: float | None = None  # when the newcomers were first found in the majority

    def update(self, now: float, trainers: Mapping, progress: Mapping) -> list[StepReport]:
        """Process a snapshot of the DHT and return the newly completed steps, in ascending order.

        :param now: hivemind's DHT time in seconds; the first heartbeat of a peer is compared with it
        :param trainers: the records under `{run_id}_trainers`, by peer
        :param progress: those under `{run_id}_training_progress`
        """
        self._now = max(now, self._now)
        self._read(trainers, progress)
        self.live_peers = [peer for peer in self.peers.values() if peer.heard_at >= self._now - self.alive_timeout]
        heard = [peer for peer in self.live_peers if peer.heard_at >= self._now - FRESH_SECONDS]
        self._taking_part = [peer for peer in heard if not peer.heartbeat.away]
        self._go_back_if_outvoted()
        reports = self._take_complete()
        self.late = [record for peer in self.peers.values() for record in self._take_late(peer)]
        oldest = self._now - 2 * self.alive_timeout
        self.peers = {key: peer for key, peer in self.peers.items() if peer.present >= oldest}
        return reports

    @property
    def is_waiting(self) -> bool:
        """Whether half of the peers have reported a step that the others are waited for."""
        return any(step > self.last_reported_step for step in self.reached)

    # Records

    def _read(self, trainers: Mapping, progress: Mapping) -> None:
        for key in (*progress, *trainers):
            self.peers.setdefault(key, TrackedPeer(key)).present = self._now
        for key, record in progress.items():
            if record.value is None:
                self.peers[key].heard_at = -math.inf
        for key, heartbeat in read_progress(progress, self.contributors).items():
            self._read_heartbeat(self.peers[key], heartbeat)
        for key, record in trainers.items():
            rows = map(read_row, record.value["history"])
            steps = [PeerStep(key, row["step"], row["samples_accumulated"], row) for row in rows]
            self.peers[key].members = set(record.value.get("members") or ())
            self._read_steps(self.peers[key], steps, record.expiration_time)

    def _read_heartbeat(self, peer: TrackedPeer, heartbeat: PeerProgress) -> None:
        if peer.heartbeat and heartbeat.reported_at <= peer.heartbeat.reported_at:
            return  # nothing new, or an outdated copy in the DHT
        # Without a previous heartbeat this one may be that of a peer that has died.
        peer.heard_at = max(peer.heard_at, self._now if peer.heartbeat else min(heartbeat.reported_at, self._now))
        peer.heartbeat = heartbeat

    def _read_steps(self, peer: TrackedPeer, steps: Sequence[PeerStep], expires: float) -> None:
        if not steps or expires < peer.expires:
            return  # nothing yet, or an outdated copy in the DHT
        newest = steps[-1]
        if peer.newest is None and self._last_report_time == -math.inf:
            # After a restart of the monitor: the steps before are in reports, unless the run goes back from now on.
            peer.done = min(newest.step - 1, self.last_reported_step)
            peer.is_newcomer = newest.step < self.last_reported_step
        elif newest.step <= peer.reported_step and newest != peer.newest:
            # It restarted from an earlier state: it has another record of this step.
            peer.is_newcomer, peer.done, peer.first_step, peer.pending = True, -1, newest.step, {}
        peer.newest, peer.expires = newest, expires
        for step in steps:
            peer.first_step = min(peer.first_step, step.step)
            if step.step > peer.done:
                peer.pending.setdefault(step.step, step)
        for step in sorted(peer.pending)[:-MAX_PENDING_STEPS]:
            del peer.pending[step]

    def _go_back_if_outvoted(self) -> None:
        """Go back to the first step of the newcomers if they outnumber the others; see the module docstring."""
        voters = [peer for peer in self._taking_part if peer.newest]
        first_steps = [min(peer.pending) for peer in voters if peer.is_newcomer and peer.pending]
        first_steps = [step for step in first_steps if step <= self.last_reported_step]
        if not first_steps or 2 * len(first_steps) < len(voters) + (0 if self._is_doubtful else 1):
            self._outvoted_since = None
            return
        if self._outvoted_since is None:
            self._outvoted_since = self._now
        has_ended = len(first_steps) == len(voters) and self._last_report_time > -math.inf
        if not has_ended and self._now - self._outvoted_since < self.settle_time:
            return
        self.last_reported_step = statistics.median_low(first_steps) - 1
        self._outvoted_since, self._is_doubtful = None, False
        for peer in self.peers.values():
            if peer not in voters:  # its unreported steps are not of this run
                peer.pending, peer.done = {}, peer.reported_step

    # Complete steps

    def _take_complete(self) -> list[StepReport]:
        nearby = self.last_reported_step - MAX_SPREAD
        taking_part = [peer for peer in self._taking_part if peer.step >= nearby]
        voters = {peer for peer in taking_part if peer.reported_step >= nearby}
        # Those that left after a step that is not reported yet vote, too.
        voters |= {peer for peer in self.peers.values() if max(peer.pending, default=-1) > self.last_reported_step}
        levels = sorted(peer.reported_step for peer in voters)
        if not levels:
            return []
        agreed, half = levels[(len(levels) - 1) // 2], levels[len(levels) // 2]
        seconds = self._now - self._last_report_time
        possible = self.last_reported_step + MAX_JUMP + MAX_STEPS_PER_SECOND * seconds
        reached = min(half, agreed + MAX_SPREAD, possible)
        steps = {step for peer in self.peers.values() for step in peer.pending}
        pending = sorted(step for step in steps if self.last_reported_step < step <= reached)
        all_there = min((peer.reported_step for peer in taking_part), default=math.inf)
        self.reached = {step: self.reached.get(step, self._now) for step in pending}
        complete = self.last_reported_step
        for step in pending:
            near = step <= complete + (MAX_JUMP if complete >= 0 else MAX_SPREAD)  # a run begins at step 0 or 1
            is_owed = any(peer.reported_step < step <= peer.newest_owed for peer in taking_part)
            wait = self.late_time if is_owed else self.settle_time
            if self._now - self.reached[step] >= wait or (near and step <= all_there):
                complete = step
        return [self._report(step) for step in pending if step <= complete]

    def _take_late(self, peer: TrackedPeer) -> list[PeerStep]:
        steps = [] if peer.is_newcomer else sorted(step for step in peer.pending if step <= self.last_reported_step)
        late = []
        for record in [self._take(peer, step) for step in steps]:
            counted = self._counted.get(record.step, {peer.key: 0})  # too old, or from before a restart
            others = [self.peers[key] for key in counted.keys() & self.peers.keys()]
            if peer.key not in counted and record.samples > 0 and peer in named_by_others([*others, peer]):
                counted[peer.key] = record.samples
                counted[peer.key] = round(self._cap(counted)[peer.key])
                late.append(record._replace(samples=counted[peer.key]))
        return late

    def _take(self, peer: TrackedPeer, step: int) -> PeerStep:
        """Take a record of a peer, with its samples bounded."""
        peer.is_newcomer, peer.done, own = False, max(peer.done, step), peer.pending.pop(step)
        return own._replace(samples=min(own.samples, self.target_batch_size))

    def _cap(self, values: Mapping[Hashable, float]) -> Mapping[Hashable, float]:
        """Cap what peers state by the others' values, as in a round; nothing in a run that believes them."""
        return values if self.believes_weights else cap_weights(values, len(values) - 1)

    def _report(self, step: int) -> StepReport:
        reporting = [peer for peer in self.peers.values() if step in peer.pending]
        contributors = named_by_others(reporting)
        if len(contributors) > 1:
            self._is_doubtful = False
        elif step > self.last_reported_step + MAX_JUMP:
            self._is_doubtful = True
        self.last_reported_step, self._last_report_time = step, self._now
        self.contributors = {peer.key for peer in contributors}
        taken = {peer.key: self._take(peer, step) for peer in reporting}
        contributions = [taken[peer.key] for peer in contributors]
        caps = self._cap({own.peer: own.samples for own in contributions})
        contributions = [own._replace(samples=round(caps[own.peer])) for own in contributions]
        self._counted[step] = {own.peer: own.samples for own in contributions}
        for old in sorted(self._counted)[:-HISTORY_LENGTH]:
            del self._counted[old]
        rules = [metric for metric in metrics_schema.METRICS if metric.combine is not None]
        values = {metric.name: self._combine(metric, contributions) for metric in rules}
        samples, ended = sum(own.samples for own in contributions), values["time"] or self._now
        before, ended_before = self._last_ended
        if before < step:
            ended = min(max(ended, ended_before), self._now)
        rate = values["samples_per_second"]  # the sum of what the peers state
        if before == step - 1 >= 0 and ended > ended_before:
            rate = samples / max(1e-3, ended - ended_before)
        self._last_ended = step, ended
        return StepReport(
            step=step,
            loss=values["loss"],
            alive_peers=sum(peer.first_step <= step <= peer.reported_step for peer in self.peers.values()),
            samples=samples,
            performance=rate,
            contributors=sum(own.samples > 0 for own in contributions),
            mini_steps=values["mini_steps"],
            time=ended,
            contributions=tuple(contributions),
            metrics={name.replace("_", " "): value for name, value in values.items() if name not in NAMED_METRICS},
        )

    def _combine(self, metric: Metric, peer_steps: Sequence[PeerStep]) -> float | None:
        """Combine the peers' values of a metric, see `StepMetrics` for the rules; None if no peer has a value."""
        known = [own for own in peer_steps if own.metrics[metric.name] is not None]
        if metric.combine == "mean":  # weighted by samples, over peers whose value of `metric.per`, if any, is not 0
            known = [own for own in known if own.samples > 0 and (metric.per is None or own.metrics[metric.per])]
        if not known:
            return None
        stated = {own.peer: own.metrics[metric.name] for own in known}
        if metric.combine == "median":
            return statistics.median(stated.values())
        if metric.combine == "sum":
            total = math.fsum(self._cap(stated).values())
            return round(total) if metric.is_whole else total
        if metric.per is not None:
            stated = {own.peer: stated[own.peer] / own.metrics[metric.per] for own in known}
        near = find_near(self._known[metric.name], stated)
        if metric.combine == "maximum":
            return max(near.values())
        mean = statistics.fmean(near.values(), [own.samples for own in known if own.peer in near])
        return min(max(mean, min(near.values())), max(near.values()))  # rounding errors must not leave the range


def named_by_others(peers: Sequence[TrackedPeer]) -> list[TrackedPeer]:
    """Return those of some peers that the rounds of half as many others name as of the others, in the median.

    So a key that takes part in no round has no samples. Groups may be smaller than the run, and while nobody has
    averaged with anybody all are returned.
    """
    names = {peer.key: short(peer.key) for peer in peers}
    support = {
        peer.key: sum(names[peer.key] in other.members for other in peers if other is not peer) for peer in peers
    }
    medians = medians_of_others(support, support)
    return [peer for peer in peers if len(peers) == 1 or 2 * support[peer.key] >= medians[peer.key]]


def find_near(known: deque[float], stated: Mapping[Hashable, float]) -> dict[Hashable, float]:
    """Return what peers state of a step, by peer, without values far from the median; add the rest to `known`.

    With less than MIN_KNOWN values in all, or if most are far, nobody can tell which are false: all are returned.

    :param known: values of the newest steps
    """
    values = [*known, *stated.values()]
    median = statistics.median(values)
    spread = statistics.median(abs(value - median) for value in values)
    limit = max(FAR * spread, RELATIVELY_FAR * abs(median))
    near = {peer: value for peer, value in stated.items() if abs(value - median) <= limit}
    if len(values) < MIN_KNOWN or 2 * len(near) < len(stated):
        near = dict(stated)
    known.extend(near.values())
    return near
