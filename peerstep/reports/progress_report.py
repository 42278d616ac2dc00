"""Progress reports of trainers, as they and the monitor read them.

A report is a signed record under `{run_id}_training_progress`. It has the protocol and the schema of the trainer's
rounds: trainers of another version or with another model do not average, and do not count. This module imports neither
torch nor hivemind.
"""

from collections import Counter
from collections.abc import Collection, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from peerstep.reports.marks import MAX_STEP, Marks, Position, parse_marks

PROTOCOL = 17  # version of rounds and progress reports; peers of different versions do not average
MAX_SAMPLES, MAX_TIME = 10**9 - 1, 1e12  # bounds on what peers report
MAX_LAG = 1e6  # updates; a claim
LACKING = 2.0  # updates; a peer whose parameters lack more contributes no gradients and receives parameters
EQUAL = 0.5  # updates; parameters that lack less have weight
MAX_ROUNDS = 64  # newest rounds, or global steps, that a trainer counts
MAX_SCHEMA = 200  # characters
# Field of a report -> its types, and the least and the largest value
RANGES = {
    **dict.fromkeys(("client_mode", "away"), ((bool,), 0, 1)),
    **dict.fromkeys(("epoch", "completed"), ((int,), 0, MAX_STEP)),
    **dict.fromkeys(("samples_accumulated", "contributed"), ((int,), 0, MAX_SAMPLES)),
    **dict.fromkeys(("time", "reported_at"), ((int, float), -MAX_TIME, MAX_TIME)),
    "samples_per_second": ((int, float), 0, MAX_SAMPLES),
    "distance": ((int, float), 0, MAX_LAG),
}
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class PeerProgress:
    """Progress of one peer, as the peer reports it."""

    peer_id: bytes
    epoch: int = 0  # newest global step that the peer has begun
    completed: int = 0  # newest step whose update the peer has, or has skipped
    samples_accumulated: int = 0  # for the step after `epoch`
    contributed: int = 0  # samples for step `epoch`
    samples_per_second: float = 0.0
    time: float = 0.0  # when the newest of the samples were computed, on the peer's clock
    reported_at: float = 0.0  # when the peer last reported, on the peer's clock
    client_mode: bool = False
    distance: float = 0.0  # updates by which its parameters differ, see Membership
    away: bool = False  # it is paused, downloads a state, or finds no group: nobody waits for it
    marks: Marks = ()
    schema: str = ""  # tells the rounds of trainers with another model or compression apart
    reported_here: float = 0.0  # when the peer last reported, on this machine's clock (`time.monotonic`), see `_date`

    @property
    def position(self) -> Position:
        return Position(self.epoch, self.marks)

    @property
    def computed(self) -> float:
        """When the newest of the samples were computed, on this machine's clock (`time.monotonic`)."""
        return self.reported_here - max(0.0, self.reported_at - self.time)

    def to_record(self) -> dict:
        """Return the record without the peer ID, which follows from the subkey: it cannot be another peer's."""
        fields = {name: value for name, value in vars(self).items() if name not in ("peer_id", "reported_here")}
        # hivemind packs a tuple as an extension type, which the validators refuse.
        return {"protocol": PROTOCOL, **fields, "marks": [list(mark) for mark in self.marks]}


def parse_progress(peer_id: bytes, value: object) -> PeerProgress:
    """Parse a report; raise ValueError if a field is missing or out of range."""
    if not isinstance(value, dict):
        raise ValueError("not a dictionary")
    fields: dict[str, Any] = {name: value.get(name) for name in (*RANGES, "marks", "schema")}
    progress = PeerProgress(peer_id, **fields)
    for name, (types, low, high) in RANGES.items():
        number = getattr(progress, name)
        if type(number) not in types or not low <= number <= high:
            raise ValueError(f"wrong {name}")
    if not isinstance(progress.schema, str) or len(progress.schema) > MAX_SCHEMA:
        raise ValueError("wrong schema")
    return replace(progress, marks=parse_marks(progress.marks))


def read_progress(records: Mapping[Key, object], proven: Collection[Key] = ()) -> dict[Key, PeerProgress]:
    """Return the reports that count, for a reader that does not train: those of one schema.

    It is the one that most of the `proven` peers have, which have taken part; if none of them reports, most peers.

    :param records: peer -> its report, or a record of the DHT with it as `value`
    """
    found = {}
    for key, record in records.items():
        value = getattr(record, "value", record)
        with suppress(ValueError):
            if isinstance(value, dict) and value.get("protocol") == PROTOCOL:
                found[key] = parse_progress(b"", value)
    believed = found.keys() & set(proven) or found
    schemas = Counter(found[key].schema for key in believed)
    return {key: progress for key, progress in found.items() if progress.schema == schemas.most_common(1)[0][0]}
