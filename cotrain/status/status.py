"""Status of a trainer: `status.json` in its output folder, and its description for the user.

A trainer writes the file; `./run_trainer.py --status` reads it. This module imports neither torch nor hivemind.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import psutil

from cotrain.common.errors import describe
from cotrain.common.json_file import write_json

FILE_NAME = "status.json"
SILENT_SECONDS = 60.0  # age of the file from which on its process is frozen


@dataclass
class TrainerStatus:
    """What a trainer has contributed, and what it is doing. Times are `time.time`."""

    name: str
    run_id: str  # empty while the trainer starts
    target_batch_size: int
    page: str | None = None  # address of the run's curves
    end_time: float | None = None  # end of the run; None if there is none
    pid: int = field(default_factory=os.getpid)
    started_at: float = 0.0  # when the trainer began to join the run
    time: float = 0.0  # when the status was computed
    worked_at: float | None = None  # end of the newest local step; None before the first one
    ended_at: float | None = None  # None while the trainer runs
    error: str = ""  # with which it ended
    step: int = 0  # newest global step that this trainer has reached
    next_step: int = 1  # the one it computes samples for
    later_step: int | None = None  # of the run, whose state this trainer needs first; None if it needs none
    seconds_to_next: float | None = None  # None before the speed is known
    own_samples: int = 0  # of this trainer for `next_step` so far
    all_samples: int = 0  # the same, of all trainers
    computed: int = 0  # samples since the trainer joined, without those for pending steps
    applied: int = 0  # those of them that counted in a global step
    joined: int = 0  # global steps with this trainer
    missed: int = 0  # global steps without it, since it joined
    last_miss: tuple[int, str] | None = None  # the newest missed step, and the reason
    num_trainers: int = 1  # live ones, including this one
    rank: int | None = None  # place among them by samples per second, from 1; None before the speed is known
    samples_per_second: float = 0.0
    loss: float | None = None  # local loss of the newest global step; None before the first one
    first_loss: float | None = None  # the same of the first one
    own_loss: tuple[float, float] | None = None  # on own held-out samples: of the initial weights, and now
    data: str = ""  # position in the samples, and the shards that are here
    traffic: str = ""  # of this machine since the trainer started, and in this month
    paused: str = ""  # why, while the trainer pauses

    @property
    def applied_fraction(self) -> float | None:
        return min(1.0, self.applied / self.computed) if self.computed > 0 else None


def format_duration(seconds: float) -> str:
    """Return seconds in the largest unit of which there are two."""
    for unit, length in (("days", 86400), ("hours", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def describe_end(end_time: float) -> str:
    """Return when the run ends, such as "2027-04-28 23:59 UTC, in 3 days"."""
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(end_time))
    return f"{when}, in {format_duration(max(0.0, end_time - time.time()))}"


def describe_last_step(step: int) -> str:
    return f"Step #{step} is the last of the schedule: the run has ended."


def _format_time(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def describe_status(status: TrainerStatus) -> list[tuple[str, str]]:
    """Return the status as rows of a table: a label, and a text on one line."""
    s, wait = status, "at an unknown time"
    if not s.run_id:
        return [("State", "starting: it loads programs, the settings of the run and its data")]
    if s.seconds_to_next is not None:
        wait = f"in {format_duration(s.seconds_to_next)}"
    own = f"{s.own_samples:,} of them ({s.own_samples / max(1, s.all_samples):.1%})"
    progress = f"{s.all_samples:,} of {s.target_batch_size:,} samples, {own} yours"
    samples, rank = "none in a global step yet", "" if s.rank is None else f", rank {s.rank} by speed"
    if s.applied_fraction is not None:
        samples = f"{s.computed:,} computed, {s.applied_fraction:.1%} of them applied"
    if s.paused:
        state = f"paused: {s.paused}"
    elif s.worked_at is None:
        state = "joining: no local step yet"
    elif s.time - s.worked_at > SILENT_SECONDS:
        state = f"no local step for {format_duration(s.time - s.worked_at)}"
    else:
        state = "training"
    averaging = f"averaging #{s.next_step - 1}; then " if s.next_step > s.step + 1 else ""
    next_step = f"{averaging}#{s.next_step} {wait}: {progress}"
    if s.later_step is not None:
        next_step = f"the run is at step #{s.later_step}: downloading its state first"
    if s.paused:
        next_step = "none before the end of the pause"
    rows = [
        ("Peer", f"{s.name} in run {s.run_id}, for {format_duration(s.time - s.started_at)}"),
        ("State", f"{state}, at step #{s.step}"),
        ("Next step", next_step),
        ("Your samples", samples),
        ("Global steps", f"{s.joined:,} joined, {s.missed:,} missed"),
        ("Last miss", "none" if s.last_miss is None else f"#{s.last_miss[0]}: {s.last_miss[1]}"),
        ("Trainers", f"{s.num_trainers:,}{rank}, {s.samples_per_second:.1f} samples/s"),
        ("Local loss", "not known yet" if s.loss is None else f"{s.loss:.3f}, {s.first_loss:.3f} at first"),
        *([] if s.own_loss is None else [("Own loss", "{1:.3f}, {0:.3f} before training".format(*s.own_loss))]),
        *([("Data", s.data)] if s.data else []),
        *([("Traffic", s.traffic)] if s.traffic else []),
        *([] if s.page is None else [("Curves", s.page)]),
        *([] if s.end_time is None else [("Run ends", describe_end(s.end_time))]),
    ]
    return [(label, "".join(filter(str.isprintable, text))) for label, text in rows]  # other peers wrote some words


def describe_progress(status: TrainerStatus, loss: float | None) -> str:
    """Return one line about the next global step, with the local loss since the previous one."""
    s, wait = status, "unknown" if status.seconds_to_next is None else f"{status.seconds_to_next:.0f} s"
    if s.later_step is not None:
        return f"The run is at step #{s.later_step}: downloading its state first; {plural(s.num_trainers, 'peer')}"
    parts = [
        f"Accumulated {s.all_samples:,} of {s.target_batch_size:,} samples for step #{s.next_step} from "
        f"{plural(s.num_trainers, 'peer')}, {s.own_samples:,} of them yours",
        f"averaging step #{s.next_step - 1}" if s.next_step > s.step + 1 else None,
        f"ETA {wait}",
        None if loss is None else f"local loss {loss:.3f}",
        None if s.applied_fraction is None else f"{s.applied_fraction:.1%} of your past samples applied",
        None if s.rank is None else f"rank {s.rank} by speed",
    ]
    return "; ".join(part for part in parts if part)


def describe_contribution(status: TrainerStatus) -> str:
    given = f"{plural(status.applied, 'sample')} to {plural(status.joined, 'global step')}"
    traffic = f", with traffic of {status.traffic.partition(';')[0]}" if status.traffic else ""
    duration = format_duration(status.time - status.started_at)
    return f"Thank you, {status.name}! Since this start you contributed {given} in {duration}{traffic}"


def write_status(folder: Path, status: TrainerStatus) -> None:
    """Replace the status file in a folder; nothing happens on a full disk."""
    with contextlib.suppress(OSError):  # on a full disk the file grows old, which `--status` says
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / FILE_NAME, asdict(status))


@contextlib.contextmanager
def recorded_start(folder: Path) -> Iterator[None]:
    """Write that a trainer starts, and that or why it ends, unless another one runs in the folder."""
    if is_free := find_fault(read_status(folder), folder) is not None:
        write_status(folder, TrainerStatus("", "", 0, time=time.time()))
    try:
        yield
    except (Exception, SystemExit) as error:
        if is_free and (status := read_status(folder)) is not None:
            reason = "" if isinstance(error, SystemExit) else describe(error)
            write_status(folder, replace(status, ended_at=status.ended_at or time.time(), error=reason))
        raise


def read_status(folder: Path) -> TrainerStatus | None:
    """Return the status in an output folder, if there is a valid one."""
    try:
        return TrainerStatus(**json.loads((folder / FILE_NAME).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def find_fault(status: TrainerStatus | None, folder: Path) -> str | None:
    """Return one sentence that says why the trainer of an output folder does not run; None if it runs."""
    if status is None:
        return f"No trainer has started in '{folder}' yet."
    subject, written_at = f"The trainer in '{folder}'", _format_time(status.time)
    if status.ended_at is not None:
        given = f"{plural(status.applied, 'sample')} in {plural(status.joined, 'global step')}"
        return (
            f"{subject} ended at {_format_time(status.ended_at)}, after {given}{status.error and ': '}{status.error}."
        )
    if not psutil.pid_exists(status.pid):
        return f"{subject} was killed or lost at about {written_at}: its process {status.pid} is gone."
    if status.run_id and time.time() > status.time + SILENT_SECONDS:
        return f"{subject} has not written its status since {written_at}: it was killed or hangs, or the disk is full."
    return None


def show_status(folder: Path) -> int:
    """Print the status of the trainer of an output folder, and return the exit code: 0 if it runs."""
    status = read_status(folder)
    if (fault := find_fault(status, folder)) is not None:
        print(fault)
        return 1
    for label, text in describe_status(status):
        print(f"{label:<13} {text}")
    return 0
