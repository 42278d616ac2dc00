"""Records that peers publish in the DHT, and their validators, defined in cotrain/dht and peerstep/records.py."""

from cotrain.dht.metrics_schema import LocalMetrics
from cotrain.dht.run_records import MetricSchema, MonitorStatus, TrainerRecord, make_validators, record_schemas
from peerstep.records import get_dictionary, store_record
