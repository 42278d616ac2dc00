"""Parse the records that trainers publish on the DHT: the steps that they report, and their rounds.

Pure logic: no DHT, no clock, no torch. Untrusted peers write all records. The DHT's validators bound their number and
size, and check them against `run_records.MetricSchema`.
"""

import statistics
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import NamedTuple

from cotrain.dht.metrics_schema import read_row
from peerstep.progress_record import MAX_ROUNDS


class PeerStep(NamedTuple):
    """One peer's report of a global step."""

    peer: Hashable  # its ID
    step: int
    samples: int  # that count, at most those that the peer states
    metrics: Mapping[str, int | float | None]  # by the names of the fields of `LocalMetrics`, as the peer states them


def parse_steps(peer: Hashable, history: Sequence) -> list[PeerStep]:
    """Parse the history of a trainer's record."""
    rows = [read_row(row) for row in history]
    return [PeerStep(peer, row["step"], row["samples_accumulated"], row) for row in rows]


def parse_shares(records: Collection[Mapping]) -> dict[str, float]:
    """Parse what trainers report of their rounds into shares over all of them, by curve name.

    "complete rounds": complete rounds / rounds. "applied share": applied samples / computed samples. A claim of many
    samples is not believed: no trainer has more weight than the median one. "averaging": the fraction of the time for
    which the median trainer's rounds ran. Without any, a share is missing.
    """
    shares = {}
    averaging = [record["averaging"] for record in records if record.get("averaging") is not None]
    if averaging:
        shares["averaging"] = statistics.median(averaging)
    for name, part, whole in (("complete rounds", "complete", "rounds"), ("applied share", "applied", "computed")):
        counts = [(record[whole], record[part]) for record in records if record[whole] > 0]
        if counts:
            bound = max(MAX_ROUNDS, statistics.median_low(number for number, _ in counts))
            weights = [min(number, bound) for number, _ in counts]
            shares[name] = statistics.fmean((min(partial / number, 1.0) for number, partial in counts), weights)
    return shares
