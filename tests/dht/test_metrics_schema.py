"""Declaration of metrics: a new field is available in all records, reports and dashboards."""

import math
from types import SimpleNamespace

import pydantic.v1 as pydantic
import pytest

import utils
from cotrain.dht.metrics_schema import Count, LocalMetrics, Rate, describe_metrics, history_length, read_row
from cotrain.monitoring.aggregation import MetricsAggregator
from cotrain.monitoring.reporters import to_record
from cotrain.training.session import TrainingSession
from tests.dht.test_run_records import is_accepted

FIELDS = ["step", "samples_per_second", "samples_accumulated", "loss", "mini_steps"]
# Metrics that LocalMetrics has after those of hivemind's example, as metrics.jsonl names them
ADDED = [metric.name.replace("_", " ") for metric in describe_metrics(LocalMetrics)[len(FIELDS) :]]


class WithGradientNorm(LocalMetrics):
    gradient_norm: Rate | None = pydantic.Field(None, combine="mean")
    skipped_batches: Count | None = pydantic.Field(None, combine="sum")
    gpu_memory: Rate | None = pydantic.Field(None, combine="maximum")


def measure(schema=WithGradientNorm, step=1, samples=32, **others) -> LocalMetrics:
    values = {"samples_per_second": 1.5, "loss": 10.0, "mini_steps": 2} | others
    return schema(step=step, samples_accumulated=samples, **values)


def report(schema=WithGradientNorm, **metrics: LocalMetrics) -> dict:
    """Return the record in metrics.jsonl of a step that these peers report."""
    records = {name.encode(): value.dict() for name, value in metrics.items()}
    (step_report,) = MetricsAggregator(schema=schema).update(1e9, records)
    return {name: value for name, value in to_record(step_report).items() if name not in ADDED}


def test_the_record_has_the_five_fields_of_hiveminds_example():
    assert [metric.name for metric in describe_metrics(LocalMetrics)][: len(FIELDS)] == FIELDS
    record = measure(LocalMetrics).dict()
    assert list(record) == FIELDS and measure(LocalMetrics).to_row()[: len(FIELDS)] == list(record.values())
    assert utils.LocalMetrics is LocalMetrics


def test_new_metrics_arrive_on_the_dashboard():
    record = report(
        a=measure(samples=100, gradient_norm=1.0, skipped_batches=2, gpu_memory=7.5),
        b=measure(samples=300, gradient_norm=3.0, skipped_batches=3, gpu_memory=20.0),
    )
    assert record == {
        "step": 1, "loss": 5.0, "alive peers": 2, "samples": 400, "performance": 3.0,
        "gradient norm": 2.5, "skipped batches": 5, "gpu memory": 20.0,
    }  # fmt: skip


def test_older_peers_take_part():
    old, new = measure(LocalMetrics, samples=100), measure(samples=300, gradient_norm=3.0)
    record = report(old=old, new=new)
    assert (record["samples"], record["gradient norm"], record["skipped batches"]) == (400, 3.0, None)
    assert report(old=old, other=old)["gradient norm"] is None
    assert report(LocalMetrics, old=old, new=new) == {
        "step": 1, "loss": 5.0, "alive peers": 2, "samples": 400, "performance": 3.0,
    }  # fmt: skip


def test_older_monitors_take_the_records_of_newer_trainers():
    new = measure(gradient_norm=3.0)
    assert is_accepted("metrics", new.dict()) and is_accepted("history", [new.to_row()])
    assert read_row(new.to_row(), LocalMetrics) == measure(LocalMetrics).to_row()
    assert read_row(measure(LocalMetrics).to_row(), WithGradientNorm) == measure().to_row()


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 1e10, "1", True, [1.0]])
def test_new_metrics_are_checked_as_strictly_as_the_others(value):
    with pytest.raises(pydantic.ValidationError):
        measure(gradient_norm=value)
    with pytest.raises(ValueError):
        read_row([*measure(LocalMetrics).to_row(), value], WithGradientNorm)


@pytest.mark.parametrize(
    "declaration", [(Rate | None, None), (str | None, pydantic.Field(None, combine="sum")),
                    (pydantic.StrictFloat | None, pydantic.Field(None, combine="sum"))],
)  # fmt: skip
def test_incomplete_declarations_are_errors(declaration):
    with pytest.raises(TypeError, match="gradient_norm"):
        describe_metrics(pydantic.create_model("Wrong", __base__=LocalMetrics, gradient_norm=declaration))


def test_a_trainer_publishes_what_fits_a_record():
    """More metrics per step mean fewer steps per history: hivemind's control pipe takes 4 KiB in one piece."""
    stored = {}
    history = [measure(gradient_norm=0.5)]
    trainer = SimpleNamespace(history=history, _store=lambda name, value: stored.update({name: value}))
    TrainingSession.publish(trainer, measure(gradient_norm=1.5))
    assert stored["metrics"]["gradient_norm"] == 1.5
    added = len(FIELDS) + len(ADDED)
    assert [row[added:] for row in stored["history"]] == [[0.5, None, None], [1.5, None, None]]
    assert 35 >= history_length(WithGradientNorm) < history_length(LocalMetrics) <= 55
