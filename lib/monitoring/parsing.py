"""Parse the records that trainers publish on the DHT: metrics, histories, heartbeats, names and target batch sizes.

Pure logic: no DHT, no clock, no torch. Untrusted peers write all records; invalid ones are counted, not raised.
"""

import dataclasses
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from lib.common.metrics_schema import (
    HISTORY_LENGTH,
    MAX_COUNT,
    MAX_NUMBER,
    MAX_ROUNDS,
    MAX_STEP,
    InvalidValue,
    LocalMetrics,
    describe_metrics,
    read_real,
    read_record,
    read_row,
    read_whole,
)

MAX_TIME = 1e12  # seconds; a heartbeat with a clock that far off is invalid
MAX_SUBKEY_BYTES = 4096  # an RSA-2048 public key with its tag has about 400
MAX_PEER_ID_BYTES = 128  # libp2p's have 34 to 42

_OWNER = re.compile(rb"\[owner:(.+?)\]")  # the tag of the signer's public key, see hivemind's RSASignatureValidator


@cache
def peer_step_class(schema: type[LocalMetrics]) -> type:
    """Build the dataclass of one peer's report of a global step: `peer` (public key), then the metrics of `schema`."""
    required = [("peer", bytes)]
    optional = []
    for metric in describe_metrics(schema):
        kind = int if metric.is_whole else float
        if metric.is_optional:
            optional.append((metric.name, kind | None, None))
        else:
            required.append((metric.name, kind))
    return dataclasses.make_dataclass("PeerStep", [*required, *optional], frozen=True, slots=True)


PeerStep = peer_step_class(LocalMetrics)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Heartbeat of a peer. With `goodbye`, the peer has left and all other fields are empty."""

    peer: bytes  # public key
    peer_id: bytes = b""
    epoch: int = 0
    samples_accumulated: int = 0
    samples_per_second: float = 0.0
    time: float = -math.inf  # seconds on the peer's own clock
    client_mode: bool = False
    goodbye: bool = False


def _read_heartbeat(peer: bytes, value: object) -> Heartbeat:
    if value is None:
        return Heartbeat(peer, goodbye=True)
    if not isinstance(value, Mapping):
        raise InvalidValue("not a dictionary")
    peer_id, client_mode = value.get("peer_id"), value.get("client_mode")
    if not isinstance(peer_id, bytes) or not 0 < len(peer_id) <= MAX_PEER_ID_BYTES or type(client_mode) is not bool:
        raise InvalidValue("wrong fields")
    return Heartbeat(
        peer,
        peer_id,
        epoch=read_whole(value.get("epoch"), 0, MAX_STEP),
        samples_accumulated=read_whole(value.get("samples_accumulated"), 0, MAX_COUNT),
        samples_per_second=read_real(value.get("samples_per_second"), 0.0, MAX_NUMBER),
        time=read_real(value.get("reported_at", value.get("time")), 0.0, MAX_TIME),
        client_mode=client_mode,
    )


def find_owner(subkey: object) -> bytes | None:
    """Return the public key that a record is signed with; None if the subkey is not a valid one."""
    if not isinstance(subkey, bytes) or not 0 < len(subkey) <= MAX_SUBKEY_BYTES:
        return None
    tagged = _OWNER.search(subkey)
    return tagged[1] if tagged else subkey


def _records(raw: object, refused: Counter) -> Iterator[tuple[bytes, object]]:
    """Yield public key and value of each record that `dht.get` returned, with or without expiration times."""
    raw = getattr(raw, "value", raw)
    if raw is None:
        return
    if not isinstance(raw, Mapping):
        refused["not a dictionary"] += 1
        return
    for subkey, value in raw.items():
        peer = find_owner(subkey)
        if peer is None:
            refused["bad subkey"] += 1
        else:
            yield peer, getattr(value, "value", value)


def parse_metrics(raw: object, schema: type[LocalMetrics] = LocalMetrics) -> tuple[list[PeerStep], Counter]:
    """Parse the records under `{run_id}_metrics`. Never raises.

    :param raw: subkey -> value, as `dht.get` returned it; a value may be a ValueWithExpiration
    :param schema: the metrics to read
    :returns: the valid records, and the number of invalid ones by reason
    """
    steps, refused = [], Counter()
    for peer, value in _records(raw, refused):
        try:
            if not isinstance(value, Mapping):
                raise InvalidValue("not a dictionary")
            steps.append(peer_step_class(schema)(peer, *read_record(value, schema)))
        except InvalidValue as refusal:
            refused[str(refusal)] += 1
    return steps, refused


def parse_history(
    raw: object,
    is_known: Callable[[bytes, int], bool] = lambda peer, step: False,
    schema: type[LocalMetrics] = LocalMetrics,
) -> tuple[list[PeerStep], Counter]:
    """Parse the records under `{run_id}_history`; arguments and result as for `parse_metrics`, one item per entry.

    :param is_known: called with public key and step; known entries, most of a history, are skipped unread
    """
    steps, refused, peer_step = [], Counter(), peer_step_class(schema)
    for peer, entries in _records(raw, refused):
        if not isinstance(entries, (list, tuple)):
            refused["not a list"] += 1
            continue
        if len(entries) > HISTORY_LENGTH:
            refused["history too long"] += 1
            continue
        for entry in entries:
            try:
                if isinstance(entry, list | tuple) and entry and type(entry[0]) is int and is_known(peer, entry[0]):
                    continue
                steps.append(peer_step(peer, *read_row(entry, schema)))
            except InvalidValue as refusal:
                refused[str(refusal)] += 1
    return steps, refused


def parse_progress(raw: object) -> tuple[list[Heartbeat], Counter]:
    """Parse the heartbeats under `{run_id}_training_progress`; arguments and result as for `parse_metrics`.

    Auxiliary peers are skipped: they compute no gradients.
    """
    heartbeats, refused = [], Counter()
    for peer, value in _records(raw, refused):
        if isinstance(value, Mapping) and value.get("auxiliary") is True:
            continue
        try:
            heartbeats.append(_read_heartbeat(peer, value))
        except InvalidValue as refusal:
            refused[str(refusal)] += 1
    return heartbeats, refused


def parse_share_of_complete_rounds(raw: object) -> float | None:
    """Parse the records under `{run_id}_rounds`: complete rounds / rounds, of all trainers; None without rounds."""
    counts = _read_parts(raw, "complete", "rounds", 0, MAX_ROUNDS)
    rounds = sum(whole for _, whole in counts)
    return sum(complete for complete, _ in counts) / rounds if rounds else None


def parse_share_of_applied_samples(raw: object) -> float | None:
    """Parse the records under `{run_id}_rounds`: applied samples / computed samples, of all trainers.

    A claim of many samples is not believed: no trainer has more weight than the median one.

    :returns: None if no trainer reports computed samples
    """
    counts = _read_parts(raw, "applied", "computed", 1, MAX_COUNT)
    if not counts:
        return None
    median = statistics.median_low(computed for _, computed in counts)
    weights = [min(computed, median) for _, computed in counts]
    weighted = (weight * applied / computed for weight, (applied, computed) in zip(weights, counts, strict=True))
    return sum(weighted) / sum(weights)


def _read_parts(raw: object, part: str, whole: str, least: int, most: int) -> list[tuple[int, int]]:
    """Return two fields of each valid record: a part, and the whole, which is `least` to `most`."""
    counts = []
    for _, value in _records(raw, Counter()):
        try:
            if not isinstance(value, Mapping):
                raise InvalidValue("not a dictionary")
            number = read_whole(value.get(whole), least, most)
            counts.append((read_whole(value.get(part), 0, number), number))
        except InvalidValue:
            continue
    return counts


def parse_usernames(raw: object) -> dict[bytes, str]:
    """Parse the names under `{run_id}_peers`: public key -> name, an arbitrary string that the peer chose."""
    return {
        peer: value["username"]
        for peer, value in _records(raw, Counter())
        if isinstance(value, Mapping) and isinstance(value.get("username"), str)
    }
