"""Status of a trainer: `status.json` in its output folder, and its description for the user.

A trainer writes the file; `./run_trainer.py --status` reads it. This module imports neither torch nor hivemind.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

FILE_NAME = "status.json"
WRITE_SECONDS = 5.0  # between two writes of a running trainer
SILENT_SECONDS = 60.0  # age of the file from which on its process is frozen
MAX_NAMED = 64  # connected peers
MAX_SECONDS_TO_STEP = 30 * 86400.0  # longer estimates are those of trainers without a known speed


@dataclass(frozen=True)
class TrainerStatus:
    """What a trainer has contributed, and what it is doing. Times are `time.time`.

    :param time: when the status was computed
    :param process_started_at: tells the process from a later one with the same ID
    :param started_at: when the trainer joined the run
    :param worked_at: end of the newest local step; None before the first one
    :param longest_wait: seconds without a local step after which the trainer hangs
    :param ended_at: None while the trainer runs
    :param step: newest global step that this trainer has reached
    :param next_step: global step that this trainer computes samples for
    :param seconds_to_next: estimate for `next_step`; None if the speed is not known yet
    :param own_samples, all_samples: samples for `next_step` so far, of this trainer and of all
    :param computed: samples that this trainer has computed since it joined, without those for pending steps
    :param applied: the part of `computed` that counted in a global step
    :param joined, missed: global steps with and without this trainer since it joined
    :param last_miss: the newest missed step and the reason; None if there is none
    :param num_trainers: live trainers, including this one
    :param rank: place among them by samples per second, from 1; None if the speed is not known yet
    :param loss: local loss of the newest minute; None before the first global step
    :param earlier_loss: local loss `earlier_seconds` before: an hour, or the time since the start if that is shorter
    :param num_direct, num_relayed: connected peers of the run, direct and through a relay; None if not known
    :param direct, relayed: their names, MAX_NAMED at most
    :param page: address of the run's curves
    """

    time: float
    pid: int
    process_started_at: float
    run_id: str
    name: str
    started_at: float
    worked_at: float | None
    longest_wait: float
    ended_at: float | None
    step: int
    next_step: int
    seconds_to_next: float | None
    own_samples: int
    all_samples: int
    target_batch_size: int
    computed: int
    applied: int
    joined: int
    missed: int
    last_miss: tuple[int, str] | None
    num_trainers: int
    rank: int | None
    samples_per_second: float
    loss: float | None
    earlier_loss: float | None
    earlier_seconds: float
    num_direct: int | None = None
    num_relayed: int | None = None
    direct: Sequence[str] = ()
    relayed: Sequence[str] = ()
    page: str | None = None

    @property
    def applied_fraction(self) -> float | None:
        return min(1.0, self.applied / self.computed) if self.computed > 0 else None


# Descriptions


def format_fraction(fraction: float) -> str:
    """Return a percentage that is 0% or 100% only if the fraction is 0 or 1."""
    percent = round(100 * fraction)
    if percent == 0 and fraction > 0:
        return "less than 1%"
    return "99%" if percent == 100 and fraction < 1 else f"{percent}%"


def format_duration(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _format_wait(seconds: float | None) -> str:
    if seconds is None:
        return "at an unknown time"
    return f"in {format_duration(seconds)}" if seconds >= 1 else "now"


def _format_time(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def describe_status(status: TrainerStatus) -> list[tuple[str, str]]:
    """Return the status as rows of a table: a label, and a text on one line."""
    s = status
    own = f"{s.own_samples:,} of them ({format_fraction(s.own_samples / max(1, s.all_samples))})"
    progress = f"{s.all_samples:,} of {s.target_batch_size:,} samples, {own} yours"
    rank = "" if s.rank is None else f", rank {s.rank} by speed"
    loss = "known after the first global step" if s.loss is None else f"{s.loss:.3f}"
    if s.earlier_loss is not None:
        loss += f", {s.earlier_loss:.3f} {format_duration(s.earlier_seconds)} ago"
    if s.worked_at is None:
        state = "joining: no local step yet"
    elif s.time - s.worked_at > SILENT_SECONDS:
        state = f"no local step for {format_duration(s.time - s.worked_at)}"
    else:
        state = "training"
    last_miss = "none" if s.last_miss is None else f"#{s.last_miss[0]}: {s.last_miss[1]}"
    return [
        ("Peer", f"{s.name} in run {s.run_id}, for {format_duration(s.time - s.started_at)}"),
        ("State", f"{state}, at step #{s.step}"),
        ("Next step", f"#{s.next_step} {_format_wait(s.seconds_to_next)}: {progress}"),
        ("Your samples", describe_samples(s)),
        ("Global steps", f"{s.joined:,} joined, {s.missed:,} missed"),
        ("Last miss", last_miss),
        ("Trainers", f"{s.num_trainers:,}{rank}, {s.samples_per_second:.1f} samples/s"),
        ("Connections", describe_connections(s)),
        ("Local loss", loss),
        *([("Curves", s.page)] if s.page is not None else []),
    ]


def describe_progress(status: TrainerStatus, loss: float | None) -> str:
    """Return one line about the global step that the trainers compute samples for.

    :param loss: local loss since the previous global step; None before the first micro-batch
    """
    s, wait = status, "unknown" if status.seconds_to_next is None else f"{status.seconds_to_next:.0f} s"
    return (
        f"Accumulated {s.all_samples:,} of {s.target_batch_size:,} samples for step #{s.next_step} from "
        f"{plural(s.num_trainers, 'peer')}, {s.own_samples:,} of them yours; ETA {wait}"
        + ("" if loss is None else f"; local loss {loss:.3f}")
    )


def describe_samples(status: TrainerStatus) -> str:
    """Return how many samples the trainer has computed for past steps, and how many of them were applied."""
    if status.applied_fraction is None:
        return "none in a global step yet"
    return f"{status.computed:,} computed, {format_fraction(status.applied_fraction)} of them applied"


def describe_connections(status: TrainerStatus) -> str:
    """Return which peers of the run are connected through a relay, and which directly."""
    if status.num_direct is None:
        return "not known yet"
    parts = []
    for number, names, how in (
        (status.num_relayed, status.relayed, "through a relay"),
        (status.num_direct, status.direct, "direct"),
    ):
        if number:
            rest = [f"{number - len(names):,} more"] if number > len(names) else []
            parts.append(f"{number:,} {how}: {', '.join([*names, *rest])}")
    return "; ".join(parts) or "to no other peer of the run"


def describe_part(status: TrainerStatus, step: int, fraction: float | None) -> str:
    """Return one line about a past global step.

    :param fraction: this trainer's part of the step's samples; None if the trainer missed the step
    """
    if fraction is not None:
        parts = [f"{format_fraction(fraction)} of it yours"]
    else:
        parts = ["missed" if status.last_miss is None else f"missed ({status.last_miss[1]})"]
    if status.applied_fraction is not None:
        parts.append(f"{format_fraction(status.applied_fraction)} of your samples applied")
    if status.rank is not None:
        parts.append(f"rank {status.rank} of {status.num_trainers}")
    if status.seconds_to_next is not None:
        parts.append(f"next step {_format_wait(status.seconds_to_next)}")
    return f"Your part in step #{step}: {', '.join(parts)}"


def describe_gift(status: TrainerStatus) -> str:
    """Return one line of thanks for a trainer that leaves."""
    hours = (status.time - status.started_at) / 3600
    return (
        f"Thank you! You gave {plural(status.applied, 'sample')} to {plural(status.joined, 'global step')} "
        f"in {hours:.1f} hours"
    )


# The file


def read_status(folder: Path) -> TrainerStatus | None:
    """Return the status in an output folder; None if there is no valid one."""
    try:
        return TrainerStatus(**json.loads((folder / FILE_NAME).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def to_json(status: TrainerStatus) -> dict:
    return asdict(status)


def find_fault(status: TrainerStatus | None, folder: Path, now: float) -> str | None:
    """Return one sentence that says why the trainer of an output folder does not run; None if it runs."""
    if status is None:
        return f"No trainer has started in '{folder}' yet."
    subject = f"The trainer in '{folder}'"
    if status.ended_at is not None:
        return (
            f"{subject} ended at {_format_time(status.ended_at)}, after {plural(status.applied, 'sample')} in "
            f"{plural(status.joined, 'global step')}."
        )
    if not _is_running(status):
        return f"{subject} was killed or lost at about {_format_time(status.time)}: its process {status.pid} is gone."
    worked_at = max(status.worked_at or 0.0, status.started_at)
    if now > status.time + SILENT_SECONDS:
        return (
            f"{subject} has not written its status since {_format_time(status.time)}: its process {status.pid} is "
            "frozen, or the disk is full."
        )
    if now > worked_at + status.longest_wait:
        return f"{subject} has been hanging since {_format_time(worked_at)}: process {status.pid} takes no local step."
    return None


def _is_running(status: TrainerStatus) -> bool:
    try:
        process = psutil.Process(status.pid)
        # Two readings of the same start differ by the resolution of the clock.
        return process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - status.process_started_at) < 2
    except psutil.NoSuchProcess:
        return False


def show_status(folder: Path) -> int:
    """Print the status of the trainer of an output folder.

    :returns: the exit code: 0 if the trainer runs, otherwise 1
    """
    status = read_status(folder)
    fault = find_fault(status, folder, time.time())
    if fault is not None:
        print(fault)
        return 1
    for label, text in describe_status(status):
        print(f"{label:<13} {text}")
    return 0
