"""Records that peers publish in the DHT, and their validators, defined in cotrain/dht."""

from cotrain.dht.metrics_schema import LocalMetrics
from cotrain.dht.run_records import (
    MetricSchema,
    MonitorStatus,
    PeerInfo,
    RoundStatistics,
    get_dictionary,
    make_validators,
    store_record,
)
