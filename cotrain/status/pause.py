"""Whether a trainer pauses, and why. This module imports neither torch nor hivemind."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cotrain.status.status import find_fault, read_status

FILE_NAME = "pause"  # in the output folder, from --pause to --resume
UNTIL_RESUME = "until --resume"
CHECK_SECONDS = 1.0  # between two checks
QUIET_SECONDS = 60.0  # after the end of another program, which may begin again: a game loads its next level


def is_within(hours: str, now: float) -> bool:
    """Whether the local wall clock is within hours such as "22:00-07:00". The end does not belong to them."""
    (start, end), clock = hours.split("-"), time.strftime("%H:%M", time.localtime(now))
    return start <= clock < end if start < end else clock >= start or clock < end


@dataclass
class PauseRule:
    """Decides whether a trainer pauses. Its clock is the caller's, and may jump.

    :param hours: local times between which to train; None: always
    :param find_program: returns the name of another program that uses the device; empty if there is none
    """

    folder: Path
    hours: str | None = None
    find_program: Callable[[], str] = str

    def __post_init__(self):
        self._checked_at = self._busy_at = float("-inf")
        self._reason = self._program = ""

    def find_reason(self, now: float) -> str:
        """Return why to pause at `now` (`time.time`); empty if there is no reason."""
        if not 0 <= now - self._checked_at < CHECK_SECONDS:
            self._checked_at, self._reason = now, self._check(now)
        return self._reason

    def _check(self, now: float) -> str:
        if (self.folder / FILE_NAME).exists():
            return UNTIL_RESUME
        if self.hours is not None and not is_within(self.hours, now):
            return f"until {self.hours.partition('-')[0]}, since --only_between {self.hours}"
        if program := self.find_program():
            self._busy_at, self._program = now, program
        return f"while {self._program} uses the GPU" if 0 <= now - self._busy_at < QUIET_SECONDS else ""


def request_pause(folder: Path, pauses: bool) -> int:
    """Let the trainer of an output folder pause, or continue; return the exit code: 0 if it runs."""
    fault = find_fault(status := read_status(folder), folder)
    what = "pauses after its local step" if pauses else "continues"
    if not pauses:
        (folder / FILE_NAME).unlink(missing_ok=True)
        if status is not None and status.paused not in ("", UNTIL_RESUME):
            what = f"stays paused {status.paused}"
    elif fault is None:
        (folder / FILE_NAME).touch()
    print(fault or f"The trainer in '{folder}' {what}: see --status")
    return int(fault is not None)
