"""Parsing and summary of the trainers' records of rounds and local steps. Pure: no processes, no network."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import numpy as np

OUTCOMES = ("averaged", "missed", "failed", "alone")


@dataclass
class Round:
    """The round of a global step, as recorded by one peer.

    :param begin, end: when the peer noticed that the step was due, and when its round ended; seconds since 1970
    :param size: number of peers in the group
    :param members: peer IDs of the group, if known
    :param received: fraction of the averages that this peer received, if known
    """

    step: int
    begin: float
    end: float
    outcome: str
    samples: int = 0
    size: int = 0
    members: frozenset[str] | None = None
    received: float | None = None
    missed: dict[str, str] = field(default_factory=dict)
    error: str = ""


@dataclass
class PeerRecords:
    """The records of one trainer.

    :param peer_id: in base58, empty if unknown
    :param local_steps: for each local step: time, samples, and seconds in the optimizer's `step`
    :param downloads: begin and end of each download of the training state
    :param absences: begin and end of the periods in which the peer does not count as alive
    """

    name: str
    peer_id: str = ""
    rounds: dict[int, Round] = field(default_factory=dict)
    local_steps: list[tuple[float, int, float]] = field(default_factory=list)
    downloads: list[tuple[float, float]] = field(default_factory=list)
    absences: list[tuple[float, float]] = field(default_factory=list)

    def is_alive(self, moment: float) -> bool:
        """Whether the peer trains at a moment: it has started, and is not frozen, downloading or leaving."""
        if not self.local_steps or moment < self.local_steps[0][0]:
            return False
        return not any(begin <= moment < end for begin, end in [*self.absences, *self.downloads])

    def samples_between(self, begin: float, end: float) -> int:
        """Return the number of samples computed between two moments."""
        return sum(samples for moment, samples, _ in self.local_steps if begin < moment <= end)

    def seconds_waited(self, begin: float, end: float) -> float:
        return sum(waited for moment, _, waited in self.local_steps if begin < moment <= end)


def read_local_records(peer: PeerRecords, path: Path) -> None:
    """Read the local steps and downloads that paced_peer.py or plain_trainer.py has recorded."""
    for record in read_jsonl(path):
        if record["event"] == "download":
            peer.downloads.append((record["began"], record["time"]))
        elif record["event"] == "local step":
            peer.local_steps.append((record["time"], record["samples"], record["waited"]))


def read_round_log(peer: PeerRecords, path: Path) -> None:
    """Read a trainer's rounds.jsonl."""
    for entry in read_jsonl(path):
        seconds = entry["seconds"]
        end = entry["time"] - seconds.get("update", 0.0)
        peer.rounds[entry["step"]] = Round(
            step=entry["step"],
            begin=end - seconds.get("round", 0.0) - seconds.get("load", 0.0),
            end=end,
            outcome=entry["outcome"],
            samples=entry["samples"],
            size=len(entry["group"]),
            members=frozenset(entry["group"]),
            received=entry["received"] if entry["outcome"] == "averaged" else None,
            missed=entry["missed"],
            error=entry["error"],
        )


_LINE = re.compile(r"(?P<stamp>[A-Z][a-z]{2} \d{2} [\d:.]+) \[[A-Z]+\] (\[\S+:\d+\] )?(?P<text>.*)")


def read_log_lines(peer: PeerRecords, path: Path) -> None:
    """Read the log of a trainer from a commit that does not write rounds.jsonl.

    The round of step N+1 begins at "Beginning optimizer step #N" and ends at "Averaged gradients with N peers" or
    "Averaging gradients failed". Its samples are the increase of "Your current contribution" after "Step #N+1".
    """
    current, reported, total = None, None, 0
    for line in path.read_text(errors="replace").splitlines():
        if (match := _LINE.match(re.sub(r"\x1b\[[\d;]*m", "", line))) is None:
            continue
        moment, text = _parse_stamp(match["stamp"]), match["text"]
        if found := re.match(r"Beginning optimizer step #(\d+)", text):
            step = int(found[1]) + 1
            current = peer.rounds[step] = Round(step, begin=moment, end=moment, outcome="alone")
        elif current is not None and (found := re.match(r"Averaged gradients with (\d+) peers", text)):
            current.outcome, current.size, current.end = "averaged", int(found[1]), moment
        elif current is not None and text.startswith("Averaging gradients failed"):
            current.outcome, current.error, current.end = "failed", text, moment
        elif found := re.match(r"Late for step #(\d+): took part in #(\d+)", text):
            late = peer.rounds.pop(int(found[1]), None)
            if late is not None:
                late.step = int(found[2])
                peer.rounds[late.step] = late
        elif found := re.match(r"Step #(\d+)$", text):
            reported = int(found[1])
        elif found := re.match(r"Your current contribution: (\d+) samples", text):
            samples, total = int(found[1]) - total, int(found[1])
            if reported in peer.rounds:
                peer.rounds[reported].samples = samples


def _parse_stamp(stamp: str) -> float:
    return datetime.strptime(f"{datetime.now().year} {stamp}", "%Y %b %d %H:%M:%S.%f").timestamp()


def read_jsonl(path: Path) -> list[dict]:
    """Return the objects in the complete lines of a file; an empty list if the file does not exist."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines if line]


@dataclass
class StepSummary:
    """Outcome of one global step.

    :param due: when the first trainer began the step
    :param alive: names of the trainers that were alive at that time
    :param is_complete: whether all of them were in one group
    :param is_whole: whether, in addition, all of them received the whole average
    """

    step: int
    due: float
    alive: list[str]
    is_complete: bool
    is_whole: bool
    details: str


@dataclass
class PeerSummary:
    """Figures of one trainer between the first and the last global step of a run.

    :param outcomes: number of rounds by outcome; `absent`: steps at which the trainer was alive but had no round
    """

    name: str
    computed: int
    applied: int
    outcomes: Counter
    seconds_waited: float
    seconds_downloading: float


@dataclass
class RunSummary:
    """Outcome of a run between two moments."""

    steps: list[StepSummary]
    peers: list[PeerSummary]
    latencies: list[float]  # seconds from when a step was due until a trainer had the average, per trainer and step
    seconds: float

    @property
    def durations(self) -> list[float]:
        """Seconds between consecutive global steps."""
        return [(after.due - before.due) / (after.step - before.step) for before, after in pairwise(self.steps)]

    @property
    def complete_fraction(self) -> float:
        return _ratio(sum(step.is_complete for step in self.steps), len(self.steps))

    @property
    def whole_fraction(self) -> float:
        return _ratio(sum(step.is_whole for step in self.steps), len(self.steps))

    @property
    def applied(self) -> int:
        return sum(peer.applied for peer in self.peers)

    @property
    def computed(self) -> int:
        return sum(peer.computed for peer in self.peers)

    @property
    def applied_fraction(self) -> float:
        return _ratio(self.applied, self.computed)

    @property
    def applied_per_second(self) -> float:
        return _ratio(self.applied, self.seconds)

    @property
    def seconds_waited(self) -> float:
        return sum(peer.seconds_waited for peer in self.peers)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile; NaN if there are no values."""
    return float(np.percentile(values, percent)) if len(values) else float("nan")


def summarize(peers: Sequence[PeerRecords], begin: float, end: float) -> RunSummary:
    """Summarize the global steps that were due between two moments.

    Computed samples are counted from the first to the last of these steps. Applied samples are counted in all steps
    but the first, so both cover the same period.
    """
    due: dict[int, float] = {}
    for peer in peers:
        for round_ in peer.rounds.values():
            due[round_.step] = min(round_.begin, due.get(round_.step, round_.begin))
    steps = sorted(step for step, moment in due.items() if begin <= moment <= end)
    summaries = [_summarize_step(peers, step, due[step]) for step in steps]
    if not summaries:
        return RunSummary([], [], [], 0.0)
    first, last = summaries[0], summaries[-1]
    latencies = [
        peer.rounds[step].end - due[step]
        for peer in peers
        for step in steps
        if step in peer.rounds and peer.rounds[step].outcome == "averaged"
    ]
    return RunSummary(
        steps=summaries,
        peers=[_summarize_peer(peer, summaries) for peer in peers],
        latencies=latencies,
        seconds=last.due - first.due,
    )


def _summarize_step(peers: Sequence[PeerRecords], step: int, due: float) -> StepSummary:
    alive = [peer for peer in peers if peer.is_alive(due)]
    rounds = {peer.name: peer.rounds.get(step) for peer in alive}
    averaged = [round_ for round_ in rounds.values() if round_ is not None and round_.outcome == "averaged"]
    is_complete = bool(alive) and len(averaged) == len(alive) and _is_one_group(averaged, alive)
    is_whole = is_complete and all(round_.received is None or round_.received >= 1 for round_ in averaged)
    details = ", ".join(f"{name}: {_describe(round_)}" for name, round_ in rounds.items())
    return StepSummary(step, due, [peer.name for peer in alive], is_complete, is_whole, details)


def _is_one_group(rounds: Sequence[Round], alive: Sequence[PeerRecords]) -> bool:
    if any(round_.members is None for round_ in rounds):
        return all(round_.size >= len(alive) for round_ in rounds)
    ids = {peer.peer_id for peer in alive}
    return len({round_.members for round_ in rounds}) == 1 and ids <= rounds[0].members


def _describe(round_: Round | None) -> str:
    if round_ is None:
        return "no round"
    if round_.outcome != "averaged":
        return f"{round_.outcome} {round_.error}".strip()
    text = f"in a group of {round_.size}"
    if round_.received is not None and round_.received < 1:
        text += f", received {round_.received:.0%}"
    if round_.missed:
        text += f", without {_count(round_.missed.values())}"
    return text


def _count(reasons: Iterable[str]) -> str:
    return " and ".join(f"{number} ({reason})" for reason, number in Counter(reasons).items())


def _summarize_peer(peer: PeerRecords, steps: Sequence[StepSummary]) -> PeerSummary:
    begin, end = steps[0].due, steps[-1].due
    outcomes = Counter()
    applied = 0
    for summary in steps[1:]:
        round_ = peer.rounds.get(summary.step)
        if round_ is None:
            outcomes["absent"] += peer.name in summary.alive
        else:
            outcomes[round_.outcome] += 1
            applied += round_.samples if round_.outcome == "averaged" else 0
    downloading = sum(max(0.0, min(to, end) - max(since, begin)) for since, to in peer.downloads)
    return PeerSummary(
        name=peer.name,
        computed=peer.samples_between(begin, end),
        applied=applied,
        outcomes=outcomes,
        seconds_waited=peer.seconds_waited(begin, end),
        seconds_downloading=downloading,
    )


@dataclass
class NewcomerSummary:
    """Rounds of trainers in their first steps beside those of the others, as (averaged, total) or (complete, total).

    :param newcomers, others: rounds of trainers that were alive when a step was due
    :param with_newcomers, without: global steps
    """

    newcomers: tuple[int, int]
    others: tuple[int, int]
    with_newcomers: tuple[int, int]
    without: tuple[int, int]


def summarize_newcomers(
    peers: Sequence[PeerRecords], steps: Sequence[StepSummary], begin: float, first_steps: int
) -> NewcomerSummary:
    """Compare the first `first_steps` steps of the trainers that joined after `begin` with all other steps."""
    ages = Counter()
    rounds: dict[bool, list[bool]] = {True: [], False: []}  # by whether the trainer is a newcomer
    complete: dict[bool, list[bool]] = {True: [], False: []}  # by whether a newcomer is there
    joined = {peer.name for peer in peers if peer.local_steps and peer.local_steps[0][0] > begin}
    by_name = {peer.name: peer for peer in peers}
    for step in steps:
        newcomers = {name for name in step.alive if name in joined and ages[name] < first_steps}
        ages.update(step.alive)
        for name in step.alive:
            round_ = by_name[name].rounds.get(step.step)
            rounds[name in newcomers].append(round_ is not None and round_.outcome == "averaged")
        complete[bool(newcomers)].append(step.is_complete)
    counts = [(sum(values), len(values)) for values in (rounds[True], rounds[False], complete[True], complete[False])]
    return NewcomerSummary(*counts)
