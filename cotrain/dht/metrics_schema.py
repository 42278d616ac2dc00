"""Schema of the metrics that a trainer publishes after each global step.

Each metric is declared once, as a field of `StepMetrics`. The DHT's validators, the columns of the history, the
monitor's parser and aggregation, and the records of metrics.jsonl and the dashboards derive from the declaration.
CONTRIBUTING.md shows how to add a metric. This module imports neither hivemind nor torch.
"""

from dataclasses import dataclass
from itertools import zip_longest

import pydantic.v1 as pydantic  # hivemind's schemas are pydantic v1 models, a v2 model raises

from peerstep.reports.marks import MAX_STEP

MAX_COUNT = 10**9
MAX_NUMBER = 1e9
MAX_FIELDS = 32  # of a record, including unknown fields

HISTORY_LENGTH = 64  # maximum number of entries in a trainer's history
# A monitor reads the records of 1,000 trainers in one answer of 4 MiB. The keys and the signature of a record take 900
# bytes, its other fields 600. Several threads write to hivemind's control pipe, which keeps messages of up to 4 KiB in
# one piece.
_HISTORY_BYTES = 1950

Step = pydantic.conint(strict=True, ge=0, le=MAX_STEP)
Count = pydantic.conint(strict=True, ge=0, le=MAX_COUNT)
Rate = pydantic.confloat(strict=True, ge=0.0, le=MAX_NUMBER)  # the bounds also reject NaN and Inf
Moment = pydantic.confloat(strict=True, ge=0.0, le=1e12)  # seconds, `run_time`
Sum = pydantic.confloat(strict=True, ge=-MAX_NUMBER, le=MAX_NUMBER)

RULES = ("sum", "mean", "maximum", "median")


class ExtensibleRecord(pydantic.BaseModel):
    """Record whose undeclared fields belong to newer peers and are accepted if they are numbers.

    Fields that are declared later must be optional: records of older peers lack them.
    """

    class Config:
        extra = pydantic.Extra.allow

    @pydantic.root_validator(pre=True)
    def check_unknown_fields(cls, values: dict) -> dict:
        if len(values) > MAX_FIELDS:
            raise ValueError("too many fields")
        for name in values.keys() - cls.__fields__.keys():
            check_value(values[name], UNKNOWN)
        return values

    def dict(self, **options) -> dict:
        """Return the fields that are set. hivemind's validation requires an unchanged record."""
        return super().dict(**{**options, "exclude_unset": True})


class StepMetrics(ExtensibleRecord):
    """Metrics of one trainer for one global step. The first five are those of hivemind's ALBERT example, see utils.py.

    Further metrics come after these and are optional, so that peers without them stay in the run.

    `combine` of a field is the rule by which the values of the peers are aggregated for a step: "sum", "maximum",
    "median", or "mean", weighted by samples, of each value divided by the field `per` if there is one.

    `loss` is the sum of the losses of `mini_steps` micro-batches; `samples_accumulated` are those that the step used;
    `time` is when the step ended.
    """

    step: Step
    samples_per_second: Rate = pydantic.Field(..., combine="sum")
    samples_accumulated: Count = pydantic.Field(..., combine="sum")
    loss: Sum = pydantic.Field(..., combine="mean", per="mini_steps")
    mini_steps: Count = pydantic.Field(..., combine="sum")
    time: Moment | None = pydantic.Field(None, combine="median")

    def to_row(self) -> list:
        """Return the values as an entry of a history, in the order of the declaration."""
        return [getattr(self, name) for name in self.__fields__]


@dataclass(frozen=True, slots=True)
class Metric:
    """A field of `StepMetrics`: its type, its bounds, and how peers' values are aggregated (None: they are not)."""

    name: str
    minimum: float
    maximum: float
    is_whole: bool
    is_optional: bool
    combine: str | None
    per: str | None


def describe_metrics(schema: type[StepMetrics]) -> tuple[Metric, ...]:
    """Return the declared metrics, in order; raise TypeError for one that breaks the rules of `StepMetrics`."""
    metrics = []
    for field in schema.__fields__.values():
        bounds, extra = field.type_, field.field_info.extra
        rule = extra.get("combine")
        if not issubclass(bounds, int | float) or None in (getattr(bounds, "ge", None), getattr(bounds, "le", None)):
            raise TypeError(f"{field.name}: a metric is a number within bounds, such as Rate or Count")
        if rule not in RULES and field.name != "step":
            raise TypeError(f"{field.name}: combine must be one of {', '.join(RULES)}")
        is_whole, is_optional = issubclass(bounds, int), not field.required
        metrics.append(Metric(field.name, bounds.ge, bounds.le, is_whole, is_optional, rule, extra.get("per")))
    return tuple(metrics)


METRICS = describe_metrics(StepMetrics)
# A field that a newer peer declares
UNKNOWN = Metric("", -MAX_NUMBER, MAX_NUMBER, is_whole=False, is_optional=True, combine=None, per=None)


def history_length() -> int:
    """Return the number of steps in a trainer's history: as many as fit into its record."""
    row = 1 + sum(5 if metric.is_whole else 9 for metric in METRICS)  # bytes in msgpack
    return min(HISTORY_LENGTH, _HISTORY_BYTES // row)


def check_value(value: object, metric: Metric) -> None:
    """Raise ValueError if a value of an untrusted record is no number, NaN, or out of bounds."""
    if value is None and metric.is_optional:
        return
    if type(value) is not int and (metric.is_whole or type(value) is not float):  # bool is an int to isinstance
        raise ValueError("not a whole number" if metric.is_whole else "not a number")
    if not metric.minimum <= value <= metric.maximum:  # false for NaN, too
        raise ValueError("out of bounds")


def read_row(row: object) -> dict[str, int | float | None]:
    """Return the metrics by name of an untrusted entry of a history, or raise ValueError. Skip newer columns."""
    if not isinstance(row, list | tuple) or len(row) > MAX_FIELDS:
        raise ValueError("wrong fields")
    row = [*row, *[None] * (len(METRICS) - len(row))]
    for metric, value in zip_longest(METRICS, row, fillvalue=UNKNOWN):
        check_value(value, metric)
    return {metric.name: value for metric, value in zip(METRICS, row, strict=False)}
