"""The clock of the run: this machine's clock, corrected by what the initial peers say.

Records in the DHT expire at a time, so all peers need the same one. A machine whose clock is wrong, from the start or
after a sleep, uses the clock of the run. Times that only this machine compares are `time.monotonic`.
"""

import multiprocessing
import time

# Seconds that this machine's clock lags behind the run's. In memory that processes forked later share.
offset = multiprocessing.RawValue("d", 0.0)


def run_time() -> float:
    """Return the time of the run, as `time.time`."""
    return time.time() + offset.value


def correct_clock(seconds: float) -> None:
    """Set the seconds that this machine's clock lags behind the run's, in this process and those forked from it."""
    offset.value = seconds
