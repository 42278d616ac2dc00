"""Parsing and summary of the trainers' records of rounds and local steps. Pure: no processes, no network."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
from hivemind.p2p import PeerID

from tests.support.peers import read_jsonl

OUTCOMES = ("averaged", "missed", "failed", "alone")


@dataclass
class PeerRecords:
    """The records of one trainer.

    :param peer_id: in base58, empty if unknown
    :param rounds: by step, the entries of rounds.jsonl, with `begin` and `end`: when the peer noticed that the step
      was due, and when its round ended, in seconds since 1970
    :param local_steps: for each local step: time, samples, and seconds in the optimizer's `step`
    :param downloads: begin and end of each download of the training state
    :param absences: begin and end of the periods in which the peer does not count as alive
    :param reads: time and seconds of each read of the others' progress
    :param requests: time and numbers of DHT requests so far
    """

    name: str
    peer_id: str = ""
    rounds: dict[int, dict] = field(default_factory=dict)
    local_steps: list[tuple[float, int, float]] = field(default_factory=list)
    downloads: list[tuple[float, float]] = field(default_factory=list)
    absences: list[tuple[float, float]] = field(default_factory=list)
    reads: list[tuple[float, float]] = field(default_factory=list)
    requests: list[tuple[float, Counter]] = field(default_factory=list)

    def is_alive(self, moment: float) -> bool:
        """Whether the peer trains at a moment: it has started, and is not frozen, downloading or leaving."""
        if not self.local_steps or moment < self.local_steps[0][0]:
            return False
        return not any(begin <= moment < end for begin, end in [*self.absences, *self.downloads])

    def requests_between(self, begin: float, end: float) -> Counter:
        counts = {begin: Counter(), end: Counter()}
        for moment, sent in self.requests:
            counts |= {limit: sent for limit in counts if moment <= limit}
        return counts[end] - counts[begin]


def read_records(
    name: str, folder: Path, absences: Iterable[tuple[float, float]] = (), clock: float = 0.0
) -> PeerRecords:
    """Read what a trainer has recorded in its output folder, see tests/support/altered.py and peerstep.

    :param clock: seconds by which the trainer's clock is ahead
    """
    peer = PeerRecords(name, absences=[*absences])
    if (identity := folder / "identity.key").exists():
        peer.peer_id = _read_peer_id(identity)
    for record in read_jsonl(folder / "record.jsonl"):
        event, moment = record.pop("event"), record.pop("time") - clock
        if event == "download":
            peer.downloads.append((record["began"] - clock, moment))
        elif event == "local step":
            peer.local_steps.append((moment, record["samples"], record["waited"]))
        elif event == "read":
            peer.reads.append((moment, record["seconds"]))
        elif event == "requests":
            peer.requests.append((moment, Counter(record)))
    for entry in read_jsonl(folder / "rounds.jsonl"):
        seconds = entry["seconds"]
        end = entry["time"] - clock - seconds.get("update", 0.0)
        begin = end - seconds.get("round", 0.0) - seconds.get("load", 0.0)
        peer.rounds[entry["step"]] = {**entry, "begin": begin, "end": end}
    return peer


@cache
def _read_peer_id(path: Path) -> str:
    """Return the peer ID of a key, which takes 28 ms. A benchmark that reads its trainers' records as they train
    would take a sixth of a core from them.
    """
    return str(PeerID.from_identity(path.read_bytes()))


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
    """Outcome of a run between two moments.

    :param latencies: seconds from when a step was due until a trainer had the average, per trainer and step
    """

    steps: list[StepSummary]
    peers: list[PeerSummary]
    latencies: list[float]
    seconds: float

    @property
    def durations(self) -> list[float]:
        """Seconds between consecutive global steps."""
        return [(after.due - before.due) / (after.step - before.step) for before, after in pairwise(self.steps)]

    @property
    def complete_fraction(self) -> float:
        return ratio(sum(step.is_complete for step in self.steps), len(self.steps))

    @property
    def whole_fraction(self) -> float:
        return ratio(sum(step.is_whole for step in self.steps), len(self.steps))

    def applied_fraction(self, names: Iterable[str] = ()) -> float:
        """Return the fraction of the computed samples that was applied, of some trainers or of all."""
        names = set(names) or {peer.name for peer in self.peers}
        peers = [peer for peer in self.peers if peer.name in names]
        return ratio(sum(peer.applied for peer in peers), sum(peer.computed for peer in peers))


def ratio(part: float, whole: float) -> float:
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
        for step, entry in peer.rounds.items():
            due[step] = min(entry["begin"], due.get(step, entry["begin"]))
    steps = [_summarize_step(peers, step, due[step]) for step in sorted(due) if begin <= due[step] <= end]
    if not steps:
        return RunSummary([], [], [], 0.0)
    latencies = [
        peer.rounds[step.step]["end"] - step.due for peer in peers for step in steps if _is_averaged(peer, step.step)
    ]
    return RunSummary(steps, [_summarize_peer(peer, steps) for peer in peers], latencies, steps[-1].due - steps[0].due)


def _is_averaged(peer: PeerRecords, step: int) -> bool:
    return step in peer.rounds and peer.rounds[step]["outcome"] == "averaged"


def _summarize_step(peers: Sequence[PeerRecords], step: int, due: float) -> StepSummary:
    alive = [peer for peer in peers if peer.is_alive(due)]
    entries = {peer.name: peer.rounds.get(step) for peer in alive}
    groups = {frozenset(peer.rounds[step]["group"]) for peer in alive if _is_averaged(peer, step)}
    is_complete = (
        bool(alive)
        and all(_is_averaged(peer, step) for peer in alive)
        and len(groups) == 1
        and {peer.peer_id for peer in alive} <= next(iter(groups))
    )
    is_whole = is_complete and all(entry["received"] >= 1 for entry in entries.values())
    details = ", ".join(f"{name}: {_describe(entry)}" for name, entry in entries.items())
    return StepSummary(step, due, [peer.name for peer in alive], is_complete, is_whole, details)


def _describe(entry: dict | None) -> str:
    if entry is None:
        return "no round"
    if entry["outcome"] != "averaged":
        return f"{entry['outcome']} {entry['error']}".strip()
    text = f"in a group of {len(entry['group'])}"
    if entry["received"] < 1:
        text += f", received {entry['received']:.0%}"
    if entry["missed"]:
        reasons = Counter(entry["missed"].values()).items()
        text += ", without " + " and ".join(f"{number} ({reason})" for reason, number in reasons)
    return text


def _summarize_peer(peer: PeerRecords, steps: Sequence[StepSummary]) -> PeerSummary:
    begin, end = steps[0].due, steps[-1].due
    outcomes, applied = Counter(), 0
    for step in steps[1:]:
        entry = peer.rounds.get(step.step)
        if entry is None:
            outcomes["absent"] += peer.name in step.alive
        else:
            outcomes[entry["outcome"]] += 1
            applied += entry["samples"] if entry["outcome"] == "averaged" else 0
    local = [(samples, waited) for moment, samples, waited in peer.local_steps if begin < moment <= end]
    return PeerSummary(
        name=peer.name,
        computed=sum(samples for samples, _ in local),
        applied=applied,
        outcomes=outcomes,
        seconds_waited=sum(waited for _, waited in local),
        seconds_downloading=sum(max(0.0, min(to, end) - max(since, begin)) for since, to in peer.downloads),
    )


def compare_newcomers(
    peers: Sequence[PeerRecords], steps: Sequence[StepSummary], begin: float, first_steps: int
) -> dict[str, tuple[int, int]]:
    """Compare the first `first_steps` steps of the trainers that joined after `begin` with all other steps.

    :returns: (averaged, total) rounds of newcomers and of others, (complete, total) steps with and without newcomers
    """
    ages, counts = Counter(), {name: [] for name in ("newcomers", "others", "with newcomers", "without")}
    joined = {peer.name for peer in peers if peer.local_steps and peer.local_steps[0][0] > begin}
    by_name = {peer.name: peer for peer in peers}
    for step in steps:
        newcomers = {name for name in step.alive if name in joined and ages[name] < first_steps}
        ages.update(step.alive)
        for name in step.alive:
            counts["newcomers" if name in newcomers else "others"].append(_is_averaged(by_name[name], step.step))
        counts["with newcomers" if newcomers else "without"].append(step.is_complete)
    return {name: (sum(values), len(values)) for name, values in counts.items()}
