"""Parse the records that trainers publish on the DHT: metrics, histories and rounds.

Pure logic: no DHT, no clock, no torch. Untrusted peers write all records. The DHT's validators bound their number and
size, and check them against `run_records.MetricSchema`.
"""

import math
import statistics
from collections import namedtuple
from collections.abc import Hashable, Iterator, Mapping
from functools import cache

from cotrain.dht.metrics_schema import LocalMetrics, describe_metrics, read_row
from peerstep.progress_record import MAX_ROUNDS


@cache
def peer_step_class(schema: type[LocalMetrics]) -> type:
    """Build the class of one peer's report of a global step.

    Its fields are `peer` (its ID), the metrics of `schema`, and when its record in the DHT expires, if known.
    """
    metrics = describe_metrics(schema)
    names = ["peer", *(metric.name for metric in metrics), "expires"]
    return namedtuple("PeerStep", names, defaults=[*(None for metric in metrics if metric.is_optional), math.inf])


PeerStep = peer_step_class(LocalMetrics)


def _records(raw: Mapping | None) -> Iterator[tuple[Hashable, object, float]]:
    """Yield peer, value and expiration time of each record, which may lack the times."""
    for peer, record in (raw or {}).items():
        yield peer, getattr(record, "value", record), getattr(record, "expiration_time", math.inf)


def parse_metrics(raw: Mapping | None, schema: type[LocalMetrics] = LocalMetrics) -> list[PeerStep]:
    """Parse the records under `{run_id}_metrics`: peer -> value, see `dht_records.get_records`."""
    peer_step, names = peer_step_class(schema), [metric.name for metric in describe_metrics(schema)]
    return [peer_step(peer, *map(value.get, names), expires) for peer, value, expires in _records(raw)]


def parse_history(raw: Mapping | None, schema: type[LocalMetrics] = LocalMetrics) -> list[PeerStep]:
    """Parse the records under `{run_id}_history`: like `parse_metrics`, with one item per entry."""
    peer_step = peer_step_class(schema)
    return [peer_step(peer, *read_row(entry, schema)) for peer, entries, _ in _records(raw) for entry in entries]


def parse_shares(raw: Mapping | None) -> dict[str, float]:
    """Parse the records under `{run_id}_rounds` into shares over all trainers, by curve name.

    "complete rounds": complete rounds / rounds. "applied share": applied samples / computed samples. A claim of many
    samples is not believed: no trainer has more weight than the median one. "averaging": the fraction of the time for
    which the median trainer's rounds ran. Without any, a share is missing.
    """
    shares = {}
    averaging = [value["averaging"] for _, value, _ in _records(raw) if value.get("averaging") is not None]
    if averaging:
        shares["averaging"] = statistics.median(averaging)
    for name, part, whole in (("complete rounds", "complete", "rounds"), ("applied share", "applied", "computed")):
        counts = [(value[whole], value.get(part) or 0) for _, value, _ in _records(raw) if value.get(whole)]
        if counts:
            bound = max(MAX_ROUNDS, statistics.median_low(number for number, _ in counts))
            weights = [min(number, bound) for number, _ in counts]
            shares[name] = statistics.fmean((min(partial / number, 1.0) for number, partial in counts), weights)
    return shares
