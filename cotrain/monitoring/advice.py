"""Advice to the organiser of a run whose rounds take as long as its global steps."""

import math
import time

from cotrain.status.status import format_duration

BUSY = 0.9  # fraction of the time for which rounds run; steps then wait for them
PERIOD = 1800.0  # seconds between two lines
MIN_INTERVAL = 64  # of parameters in sparse rounds: at 8 peers they then have a third of the bytes


def find_flags(args) -> str:
    """Return the flags that make the rounds of a run with these settings shorter, or rarer."""
    sparse = f"--gradient_compression topk --average_state_every {MIN_INTERVAL}"
    if not args.local_updates:
        local = f"--local_updates {sparse} and a larger --target_batch_size"
        is_compressed = args.gradient_compression.startswith("blockwise")
        return local if is_compressed else f"--gradient_compression blockwise8, or {local}"
    if args.gradient_compression != "topk" or args.average_state_every < MIN_INTERVAL:
        return sparse
    return "a larger --target_batch_size"


class Adviser:
    """Returns one line if the rounds of a run with these settings take up the time."""

    def __init__(self, args):
        self._flags, self._advised_at = find_flags(args), -math.inf
        self._total_steps, self._pace = args.total_steps, (time.monotonic(), 10**9)

    def advise(self, averaging: float | None) -> str | None:
        """Return advice, at most once in PERIOD, from the fraction of the time for which rounds run."""
        now = time.monotonic()
        if averaging is None or averaging < BUSY or now < self._advised_at + PERIOD:
            return None
        self._advised_at = now
        return (
            f"Rounds run for {averaging:.0%} of the time: steps wait for slow connections. Rounds would be shorter or "
            f"rarer with {self._flags}. See docs/tuning.md; all peers need the same settings"
        )

    def estimate_end(self, step: int) -> str:
        """Return when the schedule ends at the pace since the last call; empty if that is not known, or it has."""
        (before, first), self._pace = self._pace, (time.monotonic(), step)
        if not first < step < self._total_steps:
            return ""
        seconds = (time.monotonic() - before) / (step - first) * (self._total_steps - step)
        return f"; step #{self._total_steps:,}, the last of the schedule, in about {format_duration(seconds)}"
