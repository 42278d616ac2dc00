"""Progress reports: publish this peer's, and read the others'.

Each trainer publishes a signed record under `{run_id}_training_progress`, which `RunNode` spreads over several keys:
the newest steps that it has begun and completed, the samples for the next one, and how far its parameters are from the
others', see progress_report.py. What follows from the reports is in view.py.
Adapted from hivemind/optim/progress_tracker.py, which believes every claim of a later step.
"""

import math
import threading
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace

from hivemind.dht import DHT
from hivemind.p2p import PeerID
from hivemind.utils import MPFuture, PerformanceEMA, get_logger

from peerstep.options import Options
from peerstep.peer.clock import run_time
from peerstep.progress.other_trainers import OtherTrainers
from peerstep.progress.view import ALIVE_SECONDS, HEARTBEAT_SECONDS, MAX_EXTRAPOLATION, SECONDS_PER_PEER, View
from peerstep.reports.progress_report import PeerProgress
from peerstep.reports.records import READ_TIMEOUT, store_record
from peerstep.rounds.matchmaking import POLL_SECONDS

logger = get_logger(__name__)

REPORT_FRACTION = 0.25  # seconds between two reports of samples, as a fraction of the time to the step
MIN_RATE_UPDATES = 2  # local steps after which a peer's rate is known: the first is too fast, its batch was ready
FEW_TRAINERS = 32  # up to which reads may follow each other closely
ROUND_END_SECONDS = 2.0  # between two reads while other trainers are still in the round that this peer has left
# After a step, for which a trainer that is ahead of most others waits for them: seconds, and times of its last step
HOLD_SECONDS, HOLD_STEPS = 120.0, 4.0


class OwnProgress:
    """This peer's progress, and when to report it. The times are `time.monotonic`."""

    def __init__(self, progress: PeerProgress, options: Options):
        self.progress, self._options = progress, options
        self.performance_ema = PerformanceEMA(alpha=options.performance_ema_alpha)
        self.is_reporting = False  # a trainer publishes nothing before its first local step
        self.report_at = 0.0  # when the next report is due
        self.completed_at = -math.inf  # when this peer last reported its position
        self.step_seconds = math.inf  # from one step to the newest one
        self._last_step = self._last_report = -math.inf
        self._last_increment = 0  # samples of the newest local step

    @property
    def knows_rate(self) -> bool:
        return self.performance_ema.num_updates > MIN_RATE_UPDATES  # a report has had the rate

    def add_samples(self, samples_accumulated: int) -> None:
        """Measure the rate at which this peer computes samples."""
        extra = samples_accumulated - self.progress.samples_accumulated
        self.is_reporting = True
        if extra > 0:
            self._last_increment = extra
            self.performance_ema.update(task_size=extra)
        else:
            self.performance_ema.reset_timer()

    def change(self, now: float, delay: float, changes: dict) -> None:
        """Change the progress, and report it `delay` seconds after the last report."""
        rate = float(self.performance_ema.samples_per_second)
        self.progress = replace(self.progress, samples_per_second=rate, time=run_time(), **changes)
        self.report_at = min(self.report_at, max(now, self._last_report + delay))

    def complete(self, step: int, now: float) -> bool:
        """Record the end of a step; return whether it is a later one than before."""
        is_later = step > self.progress.completed
        if is_later:
            self.step_seconds, self._last_step = now - self._last_step, now
        self.completed_at = now
        return is_later

    def to_record(self, now: float, schema: str) -> dict:
        """Return the record of a report at this moment."""
        self._last_report = now
        self.report_at = now + min(HEARTBEAT_SECONDS, self._options.metadata_expiration / 2)
        fresh = {"schema": schema, "reported_at": run_time(), "samples_per_second": self._sustained_rate()}
        return self.progress.to_record() | fresh

    def _sustained_rate(self) -> float:
        """Return the samples per second that other peers may rely on.

        Lower than the average while the current local step takes longer than the previous ones.
        """
        own, is_known = self.progress, self.performance_ema.num_updates >= MIN_RATE_UPDATES
        newest = self._last_increment / max(1e-3, run_time() - own.time)
        return min(own.samples_per_second, newest) if is_known else 0.0


class ProgressTracker(threading.Thread):
    """Publishes this peer's progress and reads the progress of the other peers. Decisions take a `view`.

    :param public_key: the subkey of this peer's records, from `build_validators`
    :param schema: tells the rounds of this peer from those of peers with another model or compression. Trainers with
      another one are ignored
    """

    def __init__(
        self,
        dht: DHT,
        run_id: str,
        options: Options,
        *,
        public_key: bytes,
        schema: str = "",
    ):
        super().__init__(name="ProgressTracker", daemon=True)
        self.dht, self.key = dht, f"{run_id}_training_progress"
        self.options, self.schema = options, schema
        own = PeerProgress(dht.peer_id.to_bytes(), client_mode=dht.client_mode, time=run_time())
        self.own, self.others = OwnProgress(own, options), OtherTrainers(public_key, time.monotonic())
        self.is_paused: Callable[[], bool] = bool  # whether this peer takes part in no step, and reads rarely
        self.on_refresh: Callable[[], None] = lambda: None
        self._subkey = public_key
        self._lock = threading.RLock()  # of `own` and `others`; never held while the DHT is read
        self._wake, self._stopped = threading.Event(), threading.Event()
        self._has_read = threading.Event()  # since the last call of `refresh`
        self.next_read_at = 0.0  # `time.monotonic` of the next read
        self._pending: tuple[MPFuture, float] | None = None  # result and start of the running read

    def view(self) -> View:
        """Return what this peer knows at the moment."""
        with self._lock:
            now, own, others = time.monotonic(), self.own, self.others
            return View(
                own=own.progress,
                others=others.heard(now),
                now=now,
                read_at=others.read_at,
                target_batch_size=self.options.target_batch_size,
                outdated_until=own.completed_at + READ_TIMEOUT if self._is_outdated else -math.inf,
                hold_until=own.completed_at + min(HOLD_SECONDS, HOLD_STEPS * own.step_seconds),
                fruitless=others.fruitless,
                num_reads_apart=others.num_reads_apart,
                misfits=others.misfits,
                keys=others.keys | {own.progress.peer_id: self._subkey},
                is_open=self.dht.is_open,
                least_seconds=self.options.min_refresh_period,
            )

    @property
    def local_progress(self) -> PeerProgress:
        return self.own.progress

    @property
    def _is_outdated(self) -> bool:
        """Whether the reports may be of before this peer's last step."""
        return self.others.begun_at <= self.own.completed_at

    # This peer's progress

    def report_samples(self, samples_accumulated: int, step: int) -> None:
        """Report the samples for the next step, after each local step that began in `step`."""
        with self._lock:
            if step != self.local_progress.epoch:
                return  # a step has begun meanwhile, and has the samples
            self.own.add_samples(samples_accumulated)
            delay = self.options.min_refresh_period
            if self.own.knows_rate:  # other peers extrapolate the samples between two reports
                delay = max(delay, REPORT_FRACTION * self.view().seconds_to_step)
            self._change(delay, samples_accumulated=samples_accumulated)

    def begin_step(self, step: int, contributed: int) -> None:
        """Report that this peer begins the round of a step and contributes so many samples."""
        self._change(epoch=step, samples_accumulated=0, contributed=contributed)

    def report_position(self, step: int, samples_accumulated: int, **standing) -> None:
        """Report that this peer is at a step, and of `distance`, `away` and `marks` those that have changed."""
        with self._lock:
            is_later = self.own.complete(step, time.monotonic())
            self._change(epoch=step, completed=step, samples_accumulated=samples_accumulated, **standing)
            # A peer that passes steps which are long over stays apart.
            if not is_later or self.view().side_to_join is None:
                self.others.num_reads_apart = 0
        self.refresh_in(self.options.min_refresh_period)

    def set_away(self, away: bool) -> None:
        """Report whether other peers are not to wait for this one."""
        self._change(away=away)

    def _change(self, delay: float = 0.0, **changes) -> None:
        with self._lock:
            self.own.change(time.monotonic(), delay, changes)
        self._wake.set()

    def pause_updates(self) -> AbstractContextManager:
        """Exclude the time in this context from the measured training speed."""
        return self.own.performance_ema.pause()

    # The other peers' progress

    def refresh_in(self, seconds: float) -> None:
        """Schedule a read of the other peers' progress in `seconds`, unless an earlier one is scheduled.

        In a large run the reads of who waits for a round, each of all reports, would be most of the traffic.
        """
        with self._lock:
            pause = SECONDS_PER_PEER / 2 * max(0, len(self.others.reports) - FEW_TRAINERS)
            earliest = self.others.begun_at + min(pause, MAX_EXTRAPOLATION)
            if self._is_outdated:
                earliest = -math.inf
            self.next_read_at = min(self.next_read_at, max(earliest, time.monotonic() + seconds))
        self._wake.set()

    def refresh(self, timeout: float = READ_TIMEOUT) -> bool:
        """Read the other peers' progress and wait for the result; False if it takes longer than `timeout` seconds."""
        self._has_read.clear()
        with self._lock:
            self.next_read_at = 0.0
        self._wake.set()
        return self.is_alive() and self._has_read.wait(timeout)

    def ignore(self, silent: Iterable[PeerProgress]) -> int:
        """Ignore trainers of a view that this peer does not reach for a while, which grows. Return their number."""
        with self._lock:
            return self.others.ignore(silent, time.monotonic())

    def hear_all(self) -> None:
        """Stop ignoring trainers that this peer did not reach."""
        with self._lock:
            self.others.hear_all()

    def record_round(
        self, members: Iterable[PeerID], violators: Collection[PeerID], fruitless: Collection[PeerID]
    ) -> None:
        """Record who took part in a round with this peer, see OtherTrainers."""
        with self._lock:
            self.others.record_round(members, violators, fruitless, time.monotonic())

    # The thread

    def run(self) -> None:
        while not self._stopped.is_set():
            try:
                if self.own.is_reporting and time.monotonic() >= self.own.report_at:
                    self.publish_report()
                if self._pending is None and time.monotonic() >= self.next_read_at:
                    self.begin_read()
                if self._pending is not None and self.finish_read():
                    self.on_refresh()
            except Exception as error:
                logger.warning(f"Could not exchange progress with the other peers ({error!r}); trying again")
                self._stopped.wait(1.0)
            due = self.own.report_at if self.own.is_reporting else math.inf
            due = min(due, self.next_read_at if self._pending is None else time.monotonic() + POLL_SECONDS)
            self._wake.wait(min(max(0.0, due - time.monotonic()), 1.0))
            self._wake.clear()

    def publish_report(self) -> None:
        with self._lock:
            record = self.own.to_record(time.monotonic(), self.schema)
        store_record(self.dht, self.key, self._subkey, record, self.options.metadata_expiration)

    def begin_read(self) -> None:
        now = time.monotonic()
        self.next_read_at = now + self.options.default_refresh_period  # retry interval if the read fails
        options = {"latest": True, "return_future": True, "members": self.others.members}
        self._pending = self.dht.get(self.key, **options), now  # pyright: ignore[reportAttributeAccessIssue]

    def finish_read(self) -> bool:
        """Take in the reports once the DHT has answered. Does not block: the thread must keep reporting.

        :returns: whether the reports were read
        :raises TimeoutError: if the DHT does not answer in READ_TIMEOUT
        """
        future, begun_at = self._pending  # pyright: ignore[reportGeneralTypeIssues]
        if not future.done() and time.monotonic() < begun_at + READ_TIMEOUT:
            return False
        self._pending = None
        if not future.done():
            future.cancel()
            raise TimeoutError("the DHT does not answer")
        found, now = future.result(timeout=0), time.monotonic()
        latest_expiration = run_time() + self.options.metadata_expiration - ALIVE_SECONDS
        with self._lock:
            self.others.read(found.value if found is not None else {}, self.schema, latest_expiration, begun_at, now)
            if not self._is_outdated:
                is_apart = self.view().outranking is not None
                self.others.num_reads_apart = self.others.num_reads_apart + 1 if is_apart else 0
            self.next_read_at = now + (self.options.min_refresh_period if self._is_outdated else self.refresh_period())
        self._has_read.set()
        return True

    def refresh_period(self) -> float:
        view, options = self.view(), self.options
        if self.is_paused():
            return options.max_refresh_period
        number = 1 + len(view.others)
        if number <= 1:
            return options.default_refresh_period
        drift = max(options.expected_drift_peers, number * options.expected_drift_rate)
        period = view.estimate[1] * number / (number + drift)
        if view.num_reads_apart or any(p.completed < p.epoch <= view.own.completed for p in view.side):
            # A trainer that waits for its round reports a low rate, until it continues.
            period = min(period, ROUND_END_SECONDS)
        # The first rates of a new peer are unreliable: read again after 0.5, 1, 2, 4 ... seconds.
        period = min(period, view.now - self.others.newcomer_at)
        shortest = max(options.min_refresh_period, SECONDS_PER_PEER * number)
        # A read of 512 reports takes 1 MB. Each report costs its author only a key.
        longest = min(SECONDS_PER_PEER / 2 * number, MAX_EXTRAPOLATION)
        return min(max(period, shortest), max(options.max_refresh_period, longest))

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop the thread and announce that this peer leaves."""
        if not self._stopped.is_set():
            self._stopped.set()
            self._wake.set()
            self.join(timeout)
            if self.own.is_reporting:
                store_record(self.dht, self.key, self._subkey, None, self.options.metadata_expiration)
