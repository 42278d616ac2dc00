"""The metrics that a trainer publishes after each global step, each declared once, as a field of `LocalMetrics`.

The DHT's validators, the columns of the history, the monitor's parser, its aggregation, and the records of
metrics.jsonl and the dashboards derive from the declaration; docs/adding-a-metric.md shows how to add one. Imports
neither hivemind nor torch.
"""

from dataclasses import dataclass
from functools import cache

import pydantic.v1 as pydantic  # hivemind's schemas are pydantic v1 models, a v2 model raises

MAX_STEP = 2**31 - 1  # more global steps than any run makes
MAX_COUNT = 10**9
MAX_NUMBER = 1e9
MAX_FIELDS = 32  # of a record, unknown ones included

HISTORY_LENGTH = 64  # the most entries that a trainer's history has
# hivemind's control pipe takes 4 KiB in one piece when several threads write to it, of which the record's keys and its
# signature are 900 bytes.
_HISTORY_BYTES = 3200

Step = pydantic.conint(strict=True, ge=0, le=MAX_STEP)
Count = pydantic.conint(strict=True, ge=0, le=MAX_COUNT)
Rate = pydantic.confloat(strict=True, ge=0.0, le=MAX_NUMBER)  # bounds also refuse NaN and infinity
Sum = pydantic.confloat(strict=True, ge=-MAX_NUMBER, le=MAX_NUMBER)

RULES = ("sum", "mean", "maximum", "live sum")


class InvalidValue(ValueError):
    """A value that is not used; the message is the reason, one of a few fixed ones."""


class LocalMetrics(pydantic.BaseModel):
    """The metrics of one trainer for one global step; the first five are the record of hivemind's own ALBERT example.

    `step`: the global step that was reached; `samples_accumulated`: samples that this peer contributed to it;
    `loss`: the sum of the losses of `mini_steps` micro-batches.

    Further metrics come after these and are optional: peers without them stay in the run. `combine` says how the
    values of peers become that of the step: their "sum"; their "mean", weighted by samples, each value divided by the
    field `per` if there is one; their "maximum"; or the "live sum", over the newest values of all live peers, whether
    they contributed to this step or not.

    Fields that are not declared here are those of newer peers: they are accepted if they are numbers.
    """

    step: Step
    samples_per_second: Rate = pydantic.Field(..., combine="live sum")
    samples_accumulated: Count = pydantic.Field(..., combine="sum")
    loss: Sum = pydantic.Field(..., combine="mean", per="mini_steps")
    mini_steps: Count = pydantic.Field(..., combine="sum")

    class Config:
        extra = pydantic.Extra.allow

    @pydantic.root_validator(pre=True)
    def check_unknown_fields(cls, values: dict) -> dict:
        if len(values) > MAX_FIELDS:
            raise InvalidValue("too many fields")
        for name in values.keys() - cls.__fields__.keys():
            _read_unknown(values[name])
        return values

    def dict(self, **options) -> dict:
        """The fields that are set: a validated record must come out as it went in, without optional fields, too."""
        return super().dict(**{**options, "exclude_unset": True})

    def to_row(self) -> list:
        """The values as an entry of a history, in the order of the declaration."""
        return [getattr(self, metric.name) for metric in describe_metrics(type(self))]


@dataclass(frozen=True, slots=True)
class Metric:
    """A field of `LocalMetrics`: its bounds, and how the values of peers are combined (None: not at all)."""

    name: str
    is_whole: bool
    minimum: float
    maximum: float
    is_optional: bool
    combine: str | None
    per: str | None

    def read(self, value: object) -> int | float | None:
        """Check a value of an untrusted record; None if it is missing and may be.

        :raises InvalidValue: if its type is wrong, or it is out of bounds
        """
        if value is None and self.is_optional:
            return None
        return (read_whole if self.is_whole else read_real)(value, self.minimum, self.maximum)


@cache
def describe_metrics(schema: type[LocalMetrics]) -> tuple[Metric, ...]:
    """The declared metrics, in order.

    :raises TypeError: if one is not declared as described at `LocalMetrics`
    """
    metrics = []
    for field in schema.__fields__.values():
        bounds, extra = field.type_, field.field_info.extra
        rule = extra.get("combine")
        if not issubclass(bounds, int | float) or None in (getattr(bounds, "ge", None), getattr(bounds, "le", None)):
            raise TypeError(f"{field.name}: a metric is a number within bounds, such as Rate or Count")
        if rule not in RULES and field.name != "step":
            raise TypeError(f"{field.name}: combine must be one of {', '.join(RULES)}")
        metrics.append(
            Metric(
                field.name, issubclass(bounds, int), bounds.ge, bounds.le, not field.required, rule, extra.get("per")
            )
        )
    return tuple(metrics)


def history_length(schema: type[LocalMetrics] = LocalMetrics) -> int:
    """The steps that a trainer's history holds: as many as fit its record, with at most 9 bytes for a number."""
    return min(HISTORY_LENGTH, _HISTORY_BYTES // (1 + 9 * len(describe_metrics(schema))))


def read_whole(value: object, minimum: int, maximum: int) -> int:
    """Check an integer of an untrusted record.

    :raises InvalidValue: if it is none, or not within the bounds
    """
    if type(value) is not int:  # type() because bool is an int to isinstance
        raise InvalidValue("not a whole number")
    if not minimum <= value <= maximum:
        raise InvalidValue("out of bounds")
    return value


def read_real(value: object, minimum: float, maximum: float) -> float:
    """Check a number of an untrusted record.

    :raises InvalidValue: if it is none, or not within the bounds
    """
    if type(value) is not float and type(value) is not int:
        raise InvalidValue("not a number")
    if value != value:
        raise InvalidValue("NaN")
    if not minimum <= value <= maximum:
        raise InvalidValue("out of bounds")
    return float(value)


def _read_unknown(value: object) -> None:
    if value is not None:
        read_real(value, -MAX_NUMBER, MAX_NUMBER)


def read_record(record: dict, schema: type[LocalMetrics] = LocalMetrics) -> list[int | float | None]:
    """The values of an untrusted record of metrics, in the order of the declaration.

    :raises InvalidValue: if a field is missing or wrong
    """
    metrics = describe_metrics(schema)
    if len(record) > MAX_FIELDS or any(metric.name not in record for metric in metrics if not metric.is_optional):
        raise InvalidValue("wrong fields")
    return [metric.read(record.get(metric.name)) for metric in metrics]


def read_row(row: object, schema: type[LocalMetrics] = LocalMetrics) -> list[int | float | None]:
    """The values of an untrusted entry of a history; columns that a newer peer has added at its end are left out.

    :raises InvalidValue: if a column is missing or wrong
    """
    metrics = describe_metrics(schema)
    num_required = sum(not metric.is_optional for metric in metrics)
    if not isinstance(row, list | tuple) or not num_required <= len(row) <= MAX_FIELDS:
        raise InvalidValue("wrong fields")
    if len(row) != len(metrics):
        for value in row[len(metrics) :]:
            _read_unknown(value)
        row = [*row, *[None] * (len(metrics) - len(row))]
    return [metric.read(value) for metric, value in zip(metrics, row, strict=False)]


class HistoryRow(list):
    """An entry of a history as `LocalMetrics.to_row` gives it; the type of a field in a pydantic model."""

    @classmethod
    def __get_validators__(cls):
        yield cls.check

    @classmethod
    def check(cls, row: object) -> object:
        read_row(row)
        return row
