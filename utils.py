"""Records of the scripts in the DHT, as in hivemind's ALBERT example, and the validators of all records of a run.

The records of the library are in cotrain/dht/run_records.py. A peer refuses records under other keys than those of its
validators. hivemind's schemas are pydantic v1 models; a v2 model raises.
"""

import pydantic.v1 as pydantic
from hivemind.dht.schema import BytesWithPublicKey, SchemaValidator

from cotrain.dht.metrics_schema import Count, ExtensibleRecord, Rate, Step, StepMetrics, Sum
from cotrain.dht.run_records import record_schemas
from peerstep.local_peer import LocalPeer
from peerstep.reports.records import store_record


class LocalMetrics(ExtensibleRecord):
    """Metrics of one trainer for its newest global step, for a monitor of hivemind's example.

    Our monitor reads more in `TrainerRecord`: to report another metric, declare it in `StepMetrics`.
    """

    step: Step
    samples_per_second: Rate
    samples_accumulated: Count
    loss: Sum  # of the losses of `mini_steps` micro-batches
    mini_steps: Count


class MetricSchema(pydantic.BaseModel):
    """The DHT keys of these records without the name of the run: subkey (the signer's public key) -> record."""

    metrics: dict[BytesWithPublicKey, LocalMetrics]


def make_validators(run_id: str) -> list[SchemaValidator]:
    """Return the validators of the records of a run: these, and the library's."""
    return [SchemaValidator(MetricSchema, prefix=run_id), *record_schemas(run_id)]


def publish_metrics(peer: LocalPeer, lifetime: float, metrics: StepMetrics) -> None:
    """Publish this peer's metrics for a global step, for some seconds. Does not wait for the result."""
    record = LocalMetrics(**metrics.dict(include=LocalMetrics.__fields__.keys()))
    store_record(peer.dht, f"{peer.run_id}_metrics", peer.public_key, record.dict(), lifetime)
