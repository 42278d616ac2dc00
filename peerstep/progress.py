"""Progress reports of the peers, and when a global step is due.

Each trainer publishes a signed record under `{run_id}_training_progress`, which `RunNode` spreads over several keys:
the newest steps that it has begun and completed, the samples for the next one, and how far its parameters are from the
others', see progress_record.py.
Adapted from hivemind/optim/progress_tracker.py, which believes every claim of a later step.
"""

import math
import statistics
import threading
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from hivemind.dht import DHT
from hivemind.p2p import PeerID
from hivemind.utils import MPFuture, PerformanceEMA, get_logger

from peerstep.clock import run_time
from peerstep.history import Side, is_forked
from peerstep.matchmaking import POLL_SECONDS, RosterEntry
from peerstep.neighbours import cap_weights
from peerstep.progress_record import PROTOCOL, PeerProgress, parse_progress
from peerstep.records import READ_TIMEOUT, signer_of, store_record
from peerstep.standing import LACKING

logger = get_logger(__name__)

HEARTBEAT_SECONDS = 5.0  # between two reports of a peer with long local steps
REPORT_FRACTION = 0.25  # seconds between two reports of samples, as a fraction of the time to the step
MIN_RATE_UPDATES = 2  # local steps after which a peer's rate is known: the first is too fast, its batch was ready
ALIVE_SECONDS = 3 * HEARTBEAT_SECONDS  # age of the newest report from which on a peer is not waited for
PROBATION_SECONDS = 1.5 * HEARTBEAT_SECONDS  # for which a peer counts as alive whose first report looks old
MAX_EXTRAPOLATION = 60.0  # seconds after its newest samples for which a peer is assumed to compute
SECONDS_PER_PEER = 0.2  # between two reads: a read of 100 reports costs the other nodes 0.7 MB
ROUND_END_SECONDS = 2.0  # between two reads while other trainers are still in the round that this peer has left
HOLD_SECONDS = 120.0  # after a step, for which a trainer that is ahead of most others waits for them
CONFIRMING_READS = 2  # of the reports after which a trainer believes that the others have another history
MAX_MEMBERS = 32  # of the last rounds, which each read asks
IGNORE_SECONDS = 600.0  # for which a peer is ignored after a violation, or after a claim of a step without an offer
WARN_SECONDS = 600.0  # between two warnings about the same peer


@dataclass(frozen=True)
class TrackerOptions:
    """How often a trainer asks the others for their progress."""

    min_refresh_period: float = 0.5  # least seconds between two reads, and between two reports of samples
    max_refresh_period: float = 30.0  # most seconds between two reads
    default_refresh_period: float = 3.0  # the same while no other peer reports any, or after a read that has failed
    expected_drift_peers: float = 3.0  # number of peers that are assumed to join during a global step
    expected_drift_rate: float = 0.2  # the same, as a fraction of the peers
    performance_ema_alpha: float = 0.1  # weight of the newest measurement in the average of samples per second
    metadata_expiration: float = 120.0  # seconds to the expiration of a report, at most 120


class ProgressTracker(threading.Thread):
    """Publishes this peer's progress and reads the progress of the other peers.

    :param public_key: the subkey of this peer's records, from `build_validators`
    :param target_batch_size: samples that all peers together accumulate for one global step
    :param schema: tells the rounds of this peer from those of peers with another model or compression. Trainers with
      another one are ignored; `misfits` has their peer IDs
    """

    def __init__(
        self,
        dht: DHT,
        run_id: str,
        target_batch_size: int,
        args: TrackerOptions,
        *,
        public_key: bytes,
        schema: str = "",
    ):
        super().__init__(name="ProgressTracker", daemon=True)
        self.dht, self.key, self.args = dht, f"{run_id}_training_progress", args
        self.target_batch_size, self.schema = target_batch_size, schema
        self.performance_ema = PerformanceEMA(alpha=args.performance_ema_alpha)
        self.on_refresh: Callable[[], None] = lambda: None
        self._subkey = public_key
        self._lock = threading.RLock()  # never held while the DHT is read
        self._wake, self._stopped = threading.Event(), threading.Event()
        self._others: dict[bytes, PeerProgress] = {}  # subkey -> newest report of a peer
        self._members: list[bytes] = []  # peer IDs of the last rounds that can be called, the newest at the end
        self._ignored: dict[bytes, float] = {}  # peer ID -> time.monotonic until which the peer is ignored
        self.misfits: set[bytes] = set()  # peer IDs of live trainers with another schema
        self._num_reads_apart = 0  # since this peer's last step, after which another side outranked this peer's
        self._warned_at: dict[bytes, float] = {}
        self._next_report = self._next_fetch = 0.0  # time.monotonic
        self._last_report = self._completed_at = self._newcomer_at = -math.inf
        self._fetched_at = time.monotonic()  # when the current reports were read
        self._has_fetched = threading.Event()  # since the last call of `refresh`
        self._is_outdated = False  # whether the current reports are of before this peer's last step
        self._pending_fetch: tuple[MPFuture, float] | None = None  # result and start time
        self._last_increment = 0  # samples of the newest local step
        self._is_reporting = False  # a trainer publishes nothing before its first local step
        self.local_progress = PeerProgress(dht.peer_id.to_bytes(), client_mode=dht.client_mode, time=run_time())

    # This peer's progress

    def report_samples(self, samples_accumulated: int, step: int) -> None:
        """Report the samples for the next step, after each local step that began in `step`."""
        with self._lock:
            if step != self.local_progress.epoch:
                return  # a step has begun meanwhile, and has the samples
            extra = samples_accumulated - self.local_progress.samples_accumulated
            if extra > 0:
                self._last_increment = extra
                self.performance_ema.update(task_size=extra)
            else:
                self.performance_ema.reset_timer()
            self._is_reporting = True
            self._set(is_urgent=False, samples_accumulated=samples_accumulated)

    def begin_step(self, step: int, contributed: int) -> None:
        """Report that this peer begins the round of a step and contributes so many samples."""
        self._set(epoch=step, samples_accumulated=0, contributed=contributed)

    def report_position(self, step: int, samples_accumulated: int, **standing) -> None:
        """Report that this peer is at a step, and of `distance`, `away` and `marks` those that have changed."""
        is_later = step > self.local_progress.completed
        self._set(epoch=step, completed=step, samples_accumulated=samples_accumulated, **standing)
        if not is_later or self.side_to_join is None:  # a peer that passes steps which are long over stays apart
            self._num_reads_apart = 0
        self._is_outdated, self._completed_at = True, time.monotonic()
        self.refresh_in(self.args.min_refresh_period)

    def set_away(self, away: bool) -> None:
        """Report whether other peers are not to wait for this one."""
        self._set(away=away)

    def _set(self, is_urgent: bool = True, **changes) -> None:
        """Change the progress. Report it now; if it is not urgent, when the last report is old enough.

        Other peers extrapolate the samples between two reports.
        """
        rate = float(self.performance_ema.samples_per_second)
        with self._lock:
            self.local_progress = replace(self.local_progress, samples_per_second=rate, time=run_time(), **changes)
            period = 0.0 if is_urgent else self.args.min_refresh_period
            if not is_urgent and self.performance_ema.num_updates > MIN_RATE_UPDATES:  # a report has had the rate
                period = max(period, REPORT_FRACTION * self.seconds_to_step)
            self._next_report = min(self._next_report, max(time.monotonic(), self._last_report + period))
        self._wake.set()

    def pause_updates(self) -> AbstractContextManager:
        """Exclude the time in this context from the measured training speed."""
        return self.performance_ema.pause()

    # The other peers' progress

    @property
    def other_trainers(self) -> list[PeerProgress]:
        """Newest reports of the other trainers, without ignored ones."""
        now = time.monotonic()
        with self._lock:
            return [p for p in self._others.values() if self._ignored.get(p.peer_id, -math.inf) < now]

    @property
    def live_trainers(self) -> list[PeerProgress]:
        """The other trainers whose reports were recent when they were read, so that a slow DHT does not age them."""
        return [p for p in self.other_trainers if self._fetched_at - p.reported_here < ALIVE_SECONDS]

    @property
    def side(self) -> list[PeerProgress]:
        """The live other trainers that are at this peer's step or next to it, with the same history."""
        own = self.local_progress.position
        return [progress for progress in self._present if not progress.position.is_apart_from(own)]

    @property
    def _present(self) -> list[PeerProgress]:
        """The live other trainers that do not say that they are away."""
        return [progress for progress in self.live_trainers if not progress.away]

    @property
    def contributing(self) -> list[PeerProgress]:
        """The trainers of this peer's side whose samples count: their parameters lack few updates."""
        usual = self._usual_distance()
        return [progress for progress in self.side if progress.distance <= usual + LACKING]

    @property
    def num_lacking(self) -> float:
        """Updates that this peer's parameters lack, compared with the median trainer of its side."""
        return self.local_progress.distance - self._usual_distance()

    def _usual_distance(self) -> float:
        """Return the median distance on this peer's side, see Standing."""
        own = [] if self.local_progress.away else [self.local_progress.distance]
        return statistics.median_low([progress.distance for progress in self.side] + own or [0.0])

    @property
    def side_to_join(self) -> PeerProgress | None:
        """A trainer of the side that this peer must join, once several reads since its last step have shown it."""
        return self._find_side_to_join() if self._num_reads_apart >= CONFIRMING_READS else None

    @property
    def is_outranked(self) -> bool:
        """Whether the newest reports show a side that this peer must join."""
        return self._find_side_to_join() is not None

    def _find_side_to_join(self) -> PeerProgress | None:
        present, own = self._present, Side(self.local_progress.position, 1 + len(self.side))
        found = []
        for progress in present:
            position = progress.position
            if position.is_apart_from(own.position):
                # Counted, not claimed: a side is as large as the number of its reports.
                side = Side(position, sum(not other.position.is_apart_from(position) for other in present))
                if side.outranks(own):
                    found.append((side.size, progress.epoch, progress))
        return max(found, key=lambda entry: entry[:2], default=(None,))[-1]

    @property
    def agreed_step(self) -> int:
        """Newest step that at least half of the other live trainers of this history have completed; 0 without any."""
        own = self.local_progress.marks
        others = [p for p in self._present if not is_forked(own, p.marks)]
        steps = sorted((progress.completed for progress in others), reverse=True)
        return steps[(len(steps) + 1) // 2 - 1] if steps else 0

    def credible_step(self) -> int | None:
        """Return the newest step that two other live trainers have begun; of a single one its step; of none None."""
        steps = sorted((progress.epoch for progress in self.live_trainers), reverse=True)
        return steps[min(1, len(steps) - 1)] if steps else None

    @property
    def next_step(self) -> int:
        """Global step that the next round leads to."""
        return self.local_progress.epoch + 1

    def roster(self, step: int) -> list[RosterEntry]:
        """Return the peers that may take part in the round of a step, including this peer."""
        own = self.local_progress
        others = (p for p in self.live_trainers if not p.position.is_apart_from(own.position))
        peers = [own, *(p for p in others if step - 1 <= p.epoch <= step and p.completed < step)]
        with self._lock:
            keys = {p.peer_id: subkey for subkey, p in self._others.items()} | {own.peer_id: self._subkey}
        return [
            RosterEntry(PeerID(p.peer_id), keys[p.peer_id], p.client_mode, p.completed >= step - 1 > 0, p.away)
            for p in peers
            if p.peer_id in keys
        ]

    def is_begun_elsewhere(self, step: int) -> bool:
        """Whether at least half of the other live trainers of this history have begun the round of a step."""
        others = self.contributing
        return 0 < len(others) <= 2 * sum(progress.epoch >= step for progress in others)

    def is_done_elsewhere(self, step: int) -> bool:
        """Whether more than half of the other live trainers of this history have completed a step."""
        others = self.contributing
        return sum(progress.completed >= step for progress in others) * 2 > len(others)

    def num_expected(self, step: int) -> int:
        """Count the trainers of this peer's side that have not completed a step."""
        return sum(step - 2 <= p.epoch and p.completed < step for p in self.side)

    def estimate(self) -> tuple[int, float]:
        """Return the samples that are reported for the next step, and the estimated seconds until all of them are.

        A peer counts for a few times as many as the others, as in the round, see neighbours.py.
        """
        step, now, own = self.next_step, time.monotonic(), self.local_progress
        reach = max(HEARTBEAT_SECONDS, SECONDS_PER_PEER * (1 + len(self.other_trainers)))
        reported, estimated, rates, stuck = {}, {}, {}, set()
        for progress in [*self.contributing, own]:
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
            if self.dht.is_open:
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
        step, others = self.next_step, self.contributing
        num_behind = sum(progress.epoch < step - 1 for progress in others)
        # With known reports of the previous step only, a fast peer would take this step alone.
        hold = HOLD_SECONDS if num_behind * 2 > len(others) else READ_TIMEOUT if others and self._is_outdated else 0.0
        seconds = self.estimate()[1]
        if time.monotonic() < self._completed_at + hold:
            return max(self.args.min_refresh_period, seconds)
        return 0.0 if self.is_begun_elsewhere(step) else seconds

    def refresh_in(self, seconds: float) -> None:
        """Schedule a read of the other peers' progress in `seconds`, unless an earlier one is scheduled."""
        with self._lock:
            self._next_fetch = min(self._next_fetch, time.monotonic() + seconds)
        self._wake.set()

    def refresh(self, timeout: float = READ_TIMEOUT) -> bool:
        """Read the other peers' progress and wait for the result; False if it takes longer than `timeout` seconds."""
        self._has_fetched.clear()
        self.refresh_in(0.0)
        return self.is_alive() and self._has_fetched.wait(timeout)

    def ignore(self, is_ignored: Callable[[PeerProgress], bool]) -> int:
        """Ignore the peers whose reports fulfil a condition, for IGNORE_SECONDS. Return their number."""
        with self._lock:
            peer_ids = [progress.peer_id for progress in self._others.values() if is_ignored(progress)]
            self._ignored.update(dict.fromkeys(peer_ids, time.monotonic() + IGNORE_SECONDS))
        return len(peer_ids)

    def record_members(self, members: Iterable[PeerID], violators: Collection[PeerID]) -> None:
        """Believe the members of a round again, and ignore those that have sent what no honest peer sends."""
        until = time.monotonic() + IGNORE_SECONDS
        with self._lock:
            clients = {progress.peer_id for progress in self._others.values() if progress.client_mode}
            newest = [peer_id.to_bytes() for peer_id in members]
            known = [member for member in self._members if member not in newest] + newest
            self._members = [member for member in known if member not in clients][-MAX_MEMBERS:]
            for peer_id in newest:
                self._ignored.pop(peer_id, None)
            self._ignored.update({peer_id.to_bytes(): until for peer_id in violators})

    # The thread

    def run(self) -> None:
        while not self._stopped.is_set():
            try:
                if self._is_reporting and time.monotonic() >= self._next_report:
                    self._report()
                if self._pending_fetch is None and time.monotonic() >= self._next_fetch:
                    self._begin_fetch()
                if self._pending_fetch is not None and self._finish_fetch():
                    self.on_refresh()
            except Exception as error:
                logger.warning(f"Could not exchange progress with the other peers ({error!r}); trying again")
                self._stopped.wait(1.0)
            due = self._next_report if self._is_reporting else math.inf
            due = min(due, self._next_fetch if self._pending_fetch is None else time.monotonic() + POLL_SECONDS)
            self._wake.wait(min(max(0.0, due - time.monotonic()), 1.0))
            self._wake.clear()

    def _report(self) -> None:
        with self._lock:
            self._last_report = time.monotonic()
            self._next_report = self._last_report + min(HEARTBEAT_SECONDS, self.args.metadata_expiration / 2)
            record = self.local_progress.to_record()
            record |= {"schema": self.schema, "reported_at": run_time(), "samples_per_second": self._sustained_rate()}
        store_record(self.dht, self.key, self._subkey, record, self.args.metadata_expiration)

    def _sustained_rate(self) -> float:
        """Return the samples per second that other peers may rely on.

        Lower than the average while the current local step takes longer than the previous ones.
        """
        own, is_known = self.local_progress, self.performance_ema.num_updates >= MIN_RATE_UPDATES
        newest = self._last_increment / max(1e-3, run_time() - own.time)
        return min(own.samples_per_second, newest) if is_known else 0.0

    def _begin_fetch(self) -> None:
        self._next_fetch = time.monotonic() + self.args.default_refresh_period  # retry interval if the fetch fails
        options = {"latest": True, "return_future": True, "members": self._members}
        self._pending_fetch = self.dht.get(self.key, **options), time.monotonic()  # pyright: ignore[reportAttributeAccessIssue]

    def _finish_fetch(self) -> bool:
        """Read the reports once the DHT has answered. Does not block: the thread must keep reporting.

        :returns: whether the reports were read
        :raises TimeoutError: if the DHT does not answer in READ_TIMEOUT
        """
        future, begun_at = self._pending_fetch  # pyright: ignore[reportGeneralTypeIssues]
        if not future.done() and time.monotonic() < begun_at + READ_TIMEOUT:
            return False
        self._pending_fetch = None
        if not future.done():
            future.cancel()
            raise TimeoutError("the DHT does not answer")
        found = future.result(timeout=0)
        self._read(found.value if found is not None else {})
        return True

    def _read(self, records: dict) -> None:
        now, misfits = time.monotonic(), set()
        newest = run_time() + self.args.metadata_expiration - ALIVE_SECONDS  # expiration of live peers' reports
        # One answer may lack peers, as after a failure of a link. A peer that leaves replaces its report by None.
        others = {subkey: p for subkey, p in self._others.items() if now - p.reported_here < ALIVE_SECONDS}
        for subkey, record in records.items():
            if record.value is None or subkey == self._subkey:
                others.pop(subkey, None)
                continue
            try:
                if self._speaks_our_protocol(subkey, record.value):
                    progress = parse_progress(signer_of(subkey).to_bytes(), record.value)
                    others[subkey] = self._date(subkey, progress, now)
                elif record.expiration_time > newest:
                    misfits.add(signer_of(subkey).to_bytes())
            except ValueError as error:
                logger.debug(f"Ignoring a malformed progress report: {error}")
        with self._lock:
            self._newcomer_at = now if others.keys() - self._others.keys() else self._newcomer_at
            self._others, self.misfits = others, misfits
            self._ignored = {peer_id: until for peer_id, until in self._ignored.items() if until > now}
            self._fetched_at, self._is_outdated = now, False
            self._num_reads_apart = self._num_reads_apart + 1 if self.is_outranked else 0
            self._next_fetch = time.monotonic() + self._refresh_period()
        self._has_fetched.set()

    def _date(self, subkey: bytes, progress: PeerProgress, now: float) -> PeerProgress:
        """Return a report with the time at which it was made, on this machine's clock.

        A report that differs from the previous one was made since that was read, whatever the clocks say. If the
        first report of a peer looks old, the peer may be dead or its clock may be late: it gets time for another one.
        """
        before = self._others.get(subkey)
        if before is not None and before.reported_at == progress.reported_at:
            return replace(progress, reported_here=before.reported_here)
        earliest = now + PROBATION_SECONDS - ALIVE_SECONDS if before is None else self._fetched_at
        return replace(progress, reported_here=min(now, max(earliest, now - (run_time() - progress.reported_at))))

    def _speaks_our_protocol(self, subkey: bytes, record: object) -> bool:
        fields = record if isinstance(record, dict) else {}
        if (protocol := fields.get("protocol")) != PROTOCOL:
            message = (
                f"A trainer of this run has protocol {protocol!r:.20}, this trainer has {PROTOCOL}: they do not "
                "average with each other. Update the older one"
            )
        elif fields.get("schema") != self.schema:
            message = (
                "A trainer of this run has another model, other initial weights (see join_run), another compression, "
                "another interval of averaged parameters, or only one of both has local updates: they do not average "
                "with each other. Pass the same options to all peers"
            )
        else:
            return True
        if time.monotonic() >= self._warned_at.get(subkey, -math.inf) + WARN_SECONDS and len(self._warned_at) < 1000:
            self._warned_at[subkey] = time.monotonic()
            logger.warning(message)
        return False

    def _refresh_period(self) -> float:
        number = 1 + len(self.other_trainers)
        if number <= 1:
            return self.args.default_refresh_period
        drift = max(self.args.expected_drift_peers, number * self.args.expected_drift_rate)
        period = self.estimate()[1] * number / (number + drift)
        completed = self.local_progress.completed
        if self._num_reads_apart or any(p.completed < p.epoch <= completed for p in self.side):
            # A trainer that waits for its round reports a low rate, until it continues.
            period = min(period, ROUND_END_SECONDS)
        # The first rates of a new peer are unreliable: read again after 0.5, 1, 2, 4 ... seconds.
        period = min(period, time.monotonic() - self._newcomer_at)
        shortest = max(self.args.min_refresh_period, SECONDS_PER_PEER * number)
        return min(max(period, shortest), self.args.max_refresh_period)

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop the thread and announce that this peer leaves."""
        if not self._stopped.is_set():
            self._stopped.set()
            self._wake.set()
            self.join(timeout)
            if self._is_reporting:
                store_record(self.dht, self.key, self._subkey, None, self.args.metadata_expiration)
