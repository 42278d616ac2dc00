"""Records that peers publish in the DHT, and their validators, defined in cotrain/dht."""

from cotrain.dht.metrics_schema import LocalMetrics
from cotrain.dht.run_records import MetricSchema, MonitorStatus, TrainerRecord, make_validators
from peerstep.records import get_dictionary, store_record
