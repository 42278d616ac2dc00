"""Shares of the rounds in the work of a run, and advice to the organiser if they take as long as its global steps."""

import math
import statistics
import time
from collections import deque
from collections.abc import Collection, Mapping

from cotrain.settings import Hyperparameters, StepSettings
from cotrain.status.short_steps import advise_target
from cotrain.status.status import format_duration
from peerstep.reports.progress_report import MAX_ROUNDS
from peerstep.step.pace import SHORT

BUSY = 0.9  # fraction of the time for which rounds run; steps then wait for them
ADVICE_SECONDS = 1800.0  # seconds between two lines
PACE_STEPS = 64  # over which the pace of a run is measured
MIN_INTERVAL = 64  # of parameters in sparse rounds: at 8 peers they then have a third of the bytes


def parse_shares(records: Collection[Mapping]) -> dict[str, float]:
    """Parse what trainers report of their rounds into shares over all of them, by curve name.

    "complete rounds": complete rounds / rounds. "applied share": applied samples / computed samples. A claim of many
    samples is not believed: no trainer has more weight than the median one. "averaging": the fraction of the time for
    which the median trainer's rounds ran. Without any, a share is missing.
    """
    shares = {}
    averaging = [record["averaging"] for record in records if record.get("averaging") is not None]
    if averaging:
        shares["averaging"] = statistics.median(averaging)
    for name, part, whole in (("complete rounds", "complete", "rounds"), ("applied share", "applied", "computed")):
        counts = [(record[whole], record[part]) for record in records if record[whole] > 0]
        if counts:
            bound = max(MAX_ROUNDS, statistics.median_low(number for number, _ in counts))
            weights = [min(number, bound) for number, _ in counts]
            shares[name] = statistics.fmean((min(partial / number, 1.0) for number, partial in counts), weights)
    return shares


def find_flags(steps: StepSettings, local_updates: bool) -> str:
    """Return the flags that make the rounds of a run with these settings shorter, or rarer."""
    sparse = f"--gradient_compression topk --average_state_every {MIN_INTERVAL}"
    if not local_updates:
        local = f"--local_updates {sparse} and a larger --target_batch_size"
        is_compressed = steps.gradient_compression.startswith("blockwise")
        return local if is_compressed else f"--gradient_compression blockwise8, or {local}"
    if steps.gradient_compression != "topk" or steps.average_state_every < MIN_INTERVAL:
        return sparse
    return "a larger --target_batch_size"


class Adviser:
    """Returns one line if the rounds of a run with these settings take up the time."""

    def __init__(self, steps: StepSettings, hyperparameters: Hyperparameters):
        self._flags, self.advised_at = find_flags(steps, hyperparameters.local_updates), -math.inf
        self._total_steps, self._target = hyperparameters.total_steps, steps.target_batch_size
        self._has_told_target = False
        self._times: deque[tuple[int, float]] = deque(maxlen=PACE_STEPS)  # of the newest steps, and when they ended

    def advise(self, averaging: float | None) -> str | None:
        """Return advice, at most once in ADVICE_SECONDS, from the fraction of the time for which rounds run.

        Of rounds that are only long beside a step it tells once.
        """
        now = time.monotonic()
        if averaging is not None and SHORT < averaging < BUSY and not self._has_told_target:
            self._has_told_target = True
            return advise_target(self._target, averaging).capitalize()
        if averaging is None or averaging < BUSY or now < self.advised_at + ADVICE_SECONDS:
            return None
        self.advised_at = now
        return (
            f"Rounds run for {averaging:.0%} of the time: steps wait for slow connections. Rounds would be shorter or "
            f"rarer with {self._flags}. See docs/tuning.md; all peers need the same settings"
        )

    def record_step(self, step: int, ended_at: float) -> None:
        """Record when a step ended. After a rollback the pace is measured anew."""
        if self._times and step <= self._times[-1][0]:
            self._times.clear()
        self._times.append((step, ended_at))

    def estimate_end(self) -> str:
        """Return when the schedule ends at the pace of the newest steps; empty if that is not known, or it has."""
        if len(self._times) < 2 or self._times[-1][0] >= self._total_steps:
            return ""
        (first, begun_at), (step, ended_at) = self._times[0], self._times[-1]
        seconds = max(0.0, ended_at - begun_at) / (step - first) * (self._total_steps - step)
        return f"; step #{self._total_steps:,}, the last of the schedule, in about {format_duration(seconds)}"
