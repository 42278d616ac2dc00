"""What a peer knows of the run at one moment, and what follows from it. Pure: no threads, no clocks."""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from hivemind.p2p import PeerID

from peerstep.reports.marks import Position, Side, is_forked
from peerstep.reports.progress_report import LACKING, PeerProgress
from peerstep.rounds.matchmaking import RosterEntry
from peerstep.rounds.relative_bounds import cap_weights

HEARTBEAT_SECONDS = 5.0  # between two reports of a peer with long local steps
ALIVE_SECONDS = 3 * HEARTBEAT_SECONDS  # age of the newest report from which on a peer is not waited for
MAX_EXTRAPOLATION = 60.0  # seconds after its newest samples for which a peer is assumed to compute
SECONDS_PER_PEER = 0.2  # between two reads: a read of 100 reports costs the other nodes 0.7 MB
CONFIRMING_READS = 2  # of the reports after which a trainer believes that the others have another history


@dataclass(frozen=True)
class View:
    """This peer and the other trainers at one moment.

    Take one for a decision, from `ProgressTracker.view`: two of them may be of two reads of the reports.
    """

    own: PeerProgress
    others: tuple[PeerProgress, ...]  # newest reports of the other trainers, without ignored ones
    now: float  # `time.monotonic`, as the next four
    read_at: float  # when the reports were read
    target_batch_size: int
    outdated_until: float = -math.inf  # to which the reports may be of before this peer's last step
    hold_until: float = -math.inf  # to which this peer waits for most of the others, if it is ahead of them
    fruitless: frozenset[bytes] = frozenset()  # peers that took no part in the last rounds of this peer
    num_reads_apart: int = 0  # newest reads that all showed a side which this peer must join
    misfits: frozenset[bytes] = frozenset()  # peer IDs of live trainers whose rounds have another schema
    keys: Mapping[bytes, bytes] = field(default_factory=dict)  # peer ID -> subkey of its records
    is_open: bool = True  # whether strangers may take part
    least_seconds: float = 0.5  # to a step that is not due yet

    # Who is there

    @cached_property
    def live(self) -> list[PeerProgress]:
        """The other trainers whose reports were recent when they were read, so that a slow DHT does not age them."""
        return [progress for progress in self.others if self.read_at - progress.reported_here < ALIVE_SECONDS]

    @cached_property
    def present(self) -> list[PeerProgress]:
        """The live other trainers that do not say that they are away."""
        return [progress for progress in self.live if not progress.away]

    @cached_property
    def side(self) -> list[PeerProgress]:
        """The present trainers that are at this peer's step or next to it, with the same history."""
        return [progress for progress in self.present if not progress.position.is_apart_from(self.own.position)]

    @cached_property
    def contributing(self) -> list[PeerProgress]:
        """The trainers of this peer's side that count: they take part in rounds, and their parameters lack little."""
        return [progress for progress in self.side if self._counts(progress)]

    def _counts(self, progress: PeerProgress) -> bool:
        """Whether the samples of a trainer of this peer's side, or of this peer, count towards a step."""
        is_near = progress.distance <= self._usual_distance + LACKING
        return is_near and not (progress.away or self._is_failing(progress))

    def _is_failing(self, progress: PeerProgress) -> bool:
        """Whether a trainer brings no round through, with this peer or others, whatever it says of being away."""
        return progress.peer_id in self.fruitless and progress.distance >= self._usual_distance + 1

    @cached_property
    def _usual_distance(self) -> float:
        """The median distance on this peer's side, see Standing."""
        own = [] if self.own.away else [self.own.distance]
        return statistics.median_low([progress.distance for progress in self.side] + own or [0.0])

    @property
    def num_lacking(self) -> float:
        """Updates that this peer's parameters lack, compared with the median trainer of its side."""
        return self.own.distance - self._usual_distance

    # Sides of a divided run

    @cached_property
    def outranking(self) -> PeerProgress | None:
        """A trainer of the side that this peer must join, as the newest reports show."""
        own, found = self._side_at(self.own.position, [self.own, *self.side]), []
        for progress in self.present:
            position = progress.position
            if position.is_apart_from(own.position):
                # Counted, not claimed: a side is as large as the number of its reports.
                side = self._side_at(position, self.present)
                if side.outranks(own):
                    found.append((side.size, progress.epoch, progress))
        return max(found, key=lambda entry: entry[:2], default=(None,))[-1]

    @staticmethod
    def _side_at(position: Position, trainers: Iterable[PeerProgress]) -> Side:
        members = [progress for progress in trainers if not progress.position.is_apart_from(position)]
        return Side(position, len(members), is_offered=not all(progress.client_mode for progress in members))

    @property
    def side_to_join(self) -> PeerProgress | None:
        """A trainer of the side that this peer must join, once several reads since its last step have shown it."""
        return self.outranking if self.num_reads_apart >= CONFIRMING_READS else None

    @property
    def is_dependent(self) -> bool:
        """Whether this peer, in client mode, hears a public trainer of its history.

        A step that it took without the others would be dropped: nobody can download its state.
        """
        heard = (p for p in self.live if not (p.client_mode or self._is_failing(p)))
        return self.own.client_mode and any(self._has_history_of(progress) for progress in heard)

    @property
    def is_first(self) -> bool:
        """Whether no trainer that may go on without the others precedes this one: public ones do first."""
        own = self.own
        return all((own.client_mode, own.peer_id) < (p.client_mode, p.peer_id) for p in self.contributing)

    def _has_history_of(self, progress: PeerProgress) -> bool:
        return not is_forked(self.own.marks, progress.marks)

    @property
    def agreed_step(self) -> int:
        """Newest step that at least half of the other present trainers of this history have completed; else 0."""
        steps = sorted((p.completed for p in self.present if self._has_history_of(p)), reverse=True)
        return steps[(len(steps) + 1) // 2 - 1] if steps else 0

    @property
    def credible_step(self) -> int | None:
        """The newest step that two other live trainers have begun; of a single one its step; of none None."""
        steps = sorted((progress.epoch for progress in self.live), reverse=True)
        return steps[min(1, len(steps) - 1)] if steps else None

    @property
    def samples_per_second(self) -> float:
        """The rate of the other trainers; one counts for a few times as many samples as the others."""
        rates = {progress.peer_id: progress.samples_per_second for progress in self.present}
        return sum(cap_weights(rates, len(rates) - 1).values())

    # The next step

    @property
    def next_step(self) -> int:
        """Global step that the next round leads to."""
        return self.own.epoch + 1

    def roster(self, step: int) -> list[RosterEntry]:
        """Return the peers that may take part in the round of a step, including this peer."""
        others = (p for p in self.live if not p.position.is_apart_from(self.own.position))
        peers = [self.own, *(p for p in others if step - 1 <= p.epoch <= step and p.completed < step)]
        return [
            RosterEntry(
                PeerID(p.peer_id),
                self.keys[p.peer_id],
                p.client_mode,
                p.completed >= step - 1 > 0,
                p.away or self._is_failing(p),
            )
            for p in peers
        ]

    def half_have_begun(self, step: int) -> bool:
        """Whether at least half of the other trainers that count have begun the round of a step."""
        others = self.contributing
        return 0 < len(others) <= 2 * sum(progress.epoch >= step for progress in others)

    def most_have_completed(self, step: int) -> bool:
        """Whether more than half of the other trainers that count have completed a step."""
        others = self.contributing
        return sum(progress.completed >= step for progress in others) * 2 > len(others)

    @property
    def doubt(self) -> float:
        """Seconds by which a step may be due earlier than estimated: more where reads are rare, as in large runs."""
        return min(max(0.0, self.now - self.read_at - HEARTBEAT_SECONDS), MAX_EXTRAPOLATION) / 5

    def num_expected(self, step: int) -> int:
        """Count the trainers of this peer's side that have not completed a step."""
        return sum(step - 2 <= p.epoch and p.completed < step for p in self.side)

    @cached_property
    def estimate(self) -> tuple[int, float]:
        """The samples that are reported for the next step, and the estimated seconds until all of them are.

        A peer counts for a few times as many as the others, as in the round, see relative_bounds.py. Samples of this
        peer do not count here while they do not at the others: it would look for their group long before them.
        """
        step, now, own = self.next_step, self.now, self.own
        reach = max(HEARTBEAT_SECONDS, 1.5 * SECONDS_PER_PEER * (1 + len(self.others)))
        reported, estimated, rates, stuck = {}, {}, {}, set()
        own_counts = self._counts(own) or not self.contributing
        for progress in [*self.contributing, own] if own_counts else self.contributing:
            # Other peers' samples are extrapolated for a heartbeat after the report, in large runs until the next
            # read: a killed peer computes no more.
            # This peer's samples are exact: a peer that is alone takes its step when it has all of them.
            peer_id, is_own = progress.peer_id, progress is own
            until = min(now, progress.reported_here + reach, progress.computed + MAX_EXTRAPOLATION)
            samples, extrapolated = progress.contributed, 0.0
            if progress.epoch == step - 1:
                samples = progress.samples_accumulated
                extrapolated = 0.0 if is_own else max(0.0, until - progress.computed) * progress.samples_per_second
            elif progress.epoch != step:
                continue
            reported[peer_id] = min(samples, self.target_batch_size)
            estimated[peer_id] = min(samples + extrapolated, self.target_batch_size)
            rates[peer_id] = progress.samples_per_second
            if not is_own and now >= progress.computed + MAX_EXTRAPOLATION:
                stuck.add(peer_id)  # what it has computed says nothing of the others
        for values in (estimated, rates):
            if self.is_open:
                values.update(cap_weights(values, len(values) - 1, stuck))
        total = sum(min(samples, round(estimated[peer_id])) for peer_id, samples in reported.items())
        missing = self.target_batch_size - sum(estimated.values())
        return total, max(0.0, missing) / (sum(rates.values()) + 1e-20)

    @property
    def seconds_to_step(self) -> float:
        """Estimated seconds until the next step is due; 0 if it is due.

        A step is due once all peers together have accumulated the target batch, or once half of the other trainers
        have begun it. A trainer that is ahead of most others waits for them.
        """
        step, others, (_, seconds) = self.next_step, self.contributing, self.estimate
        num_behind = sum(progress.epoch < step - 1 for progress in others)
        # With known reports of the previous step only, a fast peer would take this step alone.
        hold = self.hold_until if num_behind * 2 > len(others) else self.outdated_until if others else -math.inf
        if self.now < hold:
            return max(self.least_seconds, seconds)
        return 0.0 if self.half_have_begun(step) else seconds
