"""Declaration of metrics: a new field is available in all records, reports and dashboards."""

import math

import pydantic.v1 as pydantic
import pytest

import utils
from cotrain.dht import metrics_schema
from cotrain.dht.metrics_schema import METRICS, Count, Rate, StepMetrics, describe_metrics, history_length, read_row
from cotrain.monitoring.aggregation import MetricsAggregator
from cotrain.monitoring.reporters import to_record
from tests.dht.test_run_records import is_accepted
from tests.support.dht_records import found, heartbeat, trainer_record
from tests.support.fakes import storing_peer

FIELDS = ["step", "samples_per_second", "samples_accumulated", "loss", "mini_steps"]
# Metrics that StepMetrics has after those of hivemind's example, as metrics.jsonl names them
ADDED = [metric.name.replace("_", " ") for metric in METRICS[len(FIELDS) :]]


class WithGradientNorm(StepMetrics):
    gradient_norm: Rate | None = pydantic.Field(None, combine="mean")
    skipped_batches: Count | None = pydantic.Field(None, combine="sum")
    gpu_memory: Rate | None = pydantic.Field(None, combine="maximum")


@pytest.fixture
def extended(monkeypatch) -> None:
    """Declare the metrics of `WithGradientNorm`."""
    monkeypatch.setattr(metrics_schema, "METRICS", describe_metrics(WithGradientNorm))


def measure(schema=WithGradientNorm, step=1, samples=32, **others) -> StepMetrics:
    values = {"samples_per_second": 1.5, "loss": 10.0, "mini_steps": 2} | others
    return schema(step=step, samples_accumulated=samples, **values)


def report(**metrics: StepMetrics) -> dict:
    """Return the record in metrics.jsonl of a step that these peers report."""
    trainers = found({peer: trainer_record(metric.to_row()) for peer, metric in metrics.items()})
    progress = found({peer: heartbeat(1e9, metric.step) for peer, metric in metrics.items()})
    (step_report,) = MetricsAggregator().update(1e9, trainers, progress)
    return {name: value for name, value in to_record(step_report).items() if name not in ADDED}


def test_the_record_has_the_five_fields_of_hiveminds_example():
    assert [metric.name for metric in METRICS][: len(FIELDS)] == FIELDS
    record = measure(StepMetrics).dict()
    assert list(record) == FIELDS and measure(StepMetrics).to_row()[: len(FIELDS)] == list(record.values())
    assert [*utils.LocalMetrics.__fields__] == FIELDS and is_accepted("metrics", record)
    stored = {}
    peer = storing_peer(stored)
    utils.publish_metrics(peer, 60.0, measure(StepMetrics, time=1.0))
    assert stored["run_metrics"][b"key"].value == {name: record[name] for name in FIELDS}


@pytest.mark.usefixtures("extended")
def test_new_metrics_arrive_on_the_dashboard():
    record = report(
        a=measure(samples=100, gradient_norm=1.0, skipped_batches=2, gpu_memory=7.5),
        b=measure(samples=300, gradient_norm=3.0, skipped_batches=3, gpu_memory=20.0),
    )
    assert record == {
        "step": 1, "loss": 5.0, "alive peers": 2, "samples": 400, "performance": 3.0,
        "gradient norm": 2.5, "skipped batches": 5, "gpu memory": 20.0,
    }  # fmt: skip


def test_older_peers_take_part(monkeypatch):
    old, new = measure(StepMetrics, samples=100), measure(samples=300, gradient_norm=3.0)
    assert report(old=old, new=new) == {
        "step": 1, "loss": 5.0, "alive peers": 2, "samples": 400, "performance": 3.0,
    }  # fmt: skip
    monkeypatch.setattr(metrics_schema, "METRICS", describe_metrics(WithGradientNorm))
    record = report(old=old, new=new)
    assert (record["samples"], record["gradient norm"], record["skipped batches"]) == (400, 3.0, None)
    assert report(old=old, other=old)["gradient norm"] is None


def test_older_monitors_take_the_records_of_newer_trainers(monkeypatch):
    new, old = measure(gradient_norm=3.0), measure(StepMetrics)
    assert is_accepted("metrics", new.dict()) and is_accepted("trainers", trainer_record(new.to_row()))
    assert list(read_row(new.to_row()).values()) == old.to_row()
    monkeypatch.setattr(metrics_schema, "METRICS", describe_metrics(WithGradientNorm))
    assert list(read_row(old.to_row()).values()) == measure().to_row()


@pytest.mark.usefixtures("extended")
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 1e10, "1", True, [1.0]])
def test_new_metrics_are_checked_as_strictly_as_the_others(value):
    with pytest.raises(pydantic.ValidationError):
        measure(gradient_norm=value)
    with pytest.raises(ValueError):
        read_row([*measure(StepMetrics).to_row(), value])


@pytest.mark.parametrize(
    "declaration", [(Rate | None, None), (str | None, pydantic.Field(None, combine="sum")),
                    (pydantic.StrictFloat | None, pydantic.Field(None, combine="sum"))],
)  # fmt: skip
def test_incomplete_declarations_are_errors(declaration):
    with pytest.raises(TypeError, match="gradient_norm"):
        describe_metrics(pydantic.create_model("Wrong", __base__=StepMetrics, gradient_norm=declaration))


def test_more_metrics_per_step_mean_fewer_steps_per_history(monkeypatch):
    """hivemind's control pipe takes 4 KiB in one piece."""
    length = history_length()
    monkeypatch.setattr(metrics_schema, "METRICS", describe_metrics(WithGradientNorm))
    assert 35 >= history_length() < length <= 55
