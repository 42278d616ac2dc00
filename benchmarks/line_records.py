"""Points that benchmarks/home_lines.py has measured, the fit of the formula, and a table."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from lib.training.round_time import BITS, tensor_bytes


@dataclass(frozen=True)
class Mode:
    """What peers send in a round: values of --local_updates, --gradient_compression and --average_state_every."""

    local_updates: bool = False
    compression: str = "float16"
    state_every: int = 1

    @property
    def flags(self) -> str:
        local_updates = "--local_updates " if self.local_updates else ""
        return f"{local_updates}--gradient_compression {self.compression} --average_state_every {self.state_every}"

    @property
    def bits(self) -> float:
        """Bits of the measured rounds for each parameter of the model."""
        return BITS[self.compression] + (BITS["float16"] if self.state_every == 1 else 0)


# What is measured, by name. A round has the same tensors with and without local updates.
MODES = {
    "ordinary-float16": Mode(),
    "ordinary-blockwise8": Mode(compression="blockwise8"),
    "local-float16": Mode(local_updates=True),
    "local-blockwise8": Mode(local_updates=True, compression="blockwise8"),
    "gradients-float16": Mode(state_every=1000),  # the first 999 rounds have no parameters
    "gradients-blockwise8": Mode(state_every=1000, compression="blockwise8"),
}
# Load average for each core above which a point is shown, but not fitted: its rounds have waited for the CPU.
MAX_LOAD = 10.0
PHASES = ("load", "matchmaking", "waiting", "allreduce", "round", "update")


@dataclass(frozen=True)
class Point:
    """What the rounds of one mode took on one kind of line; means over rounds and peers.

    :param elements: parameters of the model
    :param bits: bits of a round for each parameter
    :param seconds: by phase, see PHASES, and `applied`: from when the first peer began the step to the new parameters
    :param sent, received: bytes of a peer from one global step to the next, with all headers and other traffic
    :param complete: fraction of the rounds that had all peers and in which all averages arrived
    :param load: load average for each core of the machine, at the end
    """

    peers: int
    mode: str
    upload: float
    download: float
    elements: int
    bits: float
    rounds: int
    seconds: dict[str, float]
    sent: float
    received: float
    complete: float
    load: float = 0.0

    @property
    def key(self) -> tuple[int, str, float]:
        return self.peers, self.mode, self.upload

    @property
    def is_fit(self) -> bool:
        """Whether the point counts in the fit: its rounds were complete, and the machine was not busy."""
        return self.complete == 1 and self.load <= MAX_LOAD

    @property
    def line_seconds(self) -> float:
        return tensor_bytes(self.elements, self.peers, self.bits) * 8e-6 / min(self.upload, self.download)

    @property
    def round(self) -> float:
        """Seconds from due to averaged."""
        return self.seconds["load"] + self.seconds["round"]

    @property
    def overhead(self) -> float:
        """Bytes sent / bytes of the tensors."""
        return self.sent / tensor_bytes(self.elements, self.peers, self.bits)


@dataclass(frozen=True)
class Fit:
    """Constants of the formula, as in lib/training/round_time.py."""

    fixed: float
    slowdown: float
    overhead: float
    update: float

    def round(self, point: Point) -> float:
        return self.fixed + self.slowdown * point.line_seconds


def summarize_rounds(rounds: Sequence[Sequence[dict]]) -> tuple[dict[str, float], float]:
    """Return the mean seconds by phase, and the fraction of complete rounds.

    :param rounds: for each step, the entries of all peers' rounds.jsonl
    """
    entries = [entry for entries in rounds for entry in entries]
    seconds = {phase: fmean(entry["seconds"].get(phase, 0.0) for entry in entries) for phase in PHASES}
    due = [min(entry["time"] - sum(entry["seconds"].get(phase, 0.0) for phase in ("load", "round", "update"))
               for entry in entries) for entries in rounds]  # fmt: skip
    seconds["applied"] = fmean(
        entry["time"] - begin for begin, entries in zip(due, rounds, strict=True) for entry in entries
    )
    complete = fmean(
        all(entry["received"] == 1 and len(entry["group"]) == len(entries) for entry in entries) for entries in rounds
    )
    return {phase: round(value, 3) for phase, value in seconds.items()}, complete


def fit(points: Sequence[Point]) -> Fit:
    """Fit the formula of a round to points, by least squares of the relative residuals."""
    measured = np.array([point.round for point in points])
    columns = np.array([[1.0, point.line_seconds] for point in points])
    (fixed, slowdown), *_ = np.linalg.lstsq(columns / measured[:, None], np.ones(len(points)), rcond=None)
    return Fit(
        fixed=float(fixed),
        slowdown=float(slowdown),
        overhead=fmean(point.overhead for point in points),
        update=fmean(point.seconds["update"] for point in points),
    )


def measured_table(points: Sequence[Point], fitted: Fit) -> list[str]:
    """Return the lines of a table with measured and fitted seconds."""
    lines = [
        f"{'mode':<20}{'peers':>6}{'up/down':>10}{'bits':>6}{'rounds':>8}{'sent':>9}{'received':>10}{'overhead':>10}"
        f"{'search':>8}{'reduce':>8}{'update':>8}{'applied':>9}{'round':>8}{'fitted':>8}{'residual':>10}"
    ]
    for point in sorted(points, key=lambda point: (point.mode, point.peers, point.upload)):
        predicted = fitted.round(point)
        lines.append(
            f"{point.mode:<20}{point.peers:>6}{f'{point.upload:g}/{point.download:g}':>10}{point.bits:>6}"
            f"{point.rounds:>8}{point.sent / 1e6:>6.1f} MB{point.received / 1e6:>7.1f} MB{point.overhead:>10.3f}"
            f"{point.seconds['matchmaking']:>8.1f}{point.seconds['allreduce']:>8.1f}{point.seconds['update']:>8.2f}"
            f"{point.seconds['applied']:>9.1f}{point.round:>8.1f}{predicted:>8.1f}"
            f"{predicted / point.round - 1:>+10.0%}"
            + ("" if point.is_fit else f"  not fitted: {point.complete:.0%} complete, load {point.load:.0f}")
        )
    return lines
