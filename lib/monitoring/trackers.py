"""Output of the monitor: aggregated steps go to metrics.jsonl and optionally to a dashboard (see dashboards.py).
Evaluations go to evaluations.jsonl and the same dashboard.

metrics.jsonl is the durable record: no step is lost from it, and a restarted monitor reads the last step from it. A
dashboard is for display only: its failure causes one warning, and the monitor continues.
"""

import contextlib
import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lib.common.errors import describe
from lib.monitoring.aggregation import StepReport
from utils import Evaluation

if TYPE_CHECKING:
    from lib.monitoring.dashboards import Dashboard

logger = logging.getLogger(__name__)

MAX_WAITING_LINES = 100_000  # about 20 MB; a run has 125 000 steps
# A factor between the steps of two tables: a run of 125 000 steps has 250 leaderboards, not 25 000 of 8 KB each.
TABLE_GROWTH = 1.05
_BLOCK = 64 * 1024


def build_reporters(
    output_dir: Path,
    run_id: str,
    report_to: str = "none",
    wandb_project: str | None = None,
    space_id: str | None = None,
) -> "Reporters":
    """The files in the output folder, and the dashboard that --report_to asks for.

    :raises OSError: if the output folder or a file there is not writable
    """
    metrics_file = MetricsFile(output_dir)
    dashboard = None
    if report_to != "none":
        try:
            from lib.monitoring.dashboards import Dashboard, build_tracker

            tracker = build_tracker(report_to, output_dir, run_id, wandb_project, space_id)
            dashboard = Dashboard(tracker, metrics_file.path)
        except Exception as error:
            message = f"Could not start {report_to}: {describe(error)}; see {metrics_file.path} instead"
            logger.warning(message, exc_info=logger.isEnabledFor(logging.DEBUG))
    return Reporters(metrics_file, MetricsFile(output_dir, "evaluations.jsonl"), dashboard)


class Reporters:
    """The files and at most one dashboard. Steps arrive in ascending order, an evaluation after its step."""

    def __init__(
        self, metrics_file: "MetricsFile", evaluations_file: "MetricsFile", dashboard: "Dashboard | None" = None
    ):
        self.metrics_file, self.evaluations_file, self.dashboard = metrics_file, evaluations_file, dashboard
        self._table_steps: dict[str, int] = {}  # a table's name -> the step at which the dashboard last got it

    @property
    def page(self) -> str | None:
        """Address of the dashboard's public page; None if there is none, or the dashboard has not started yet."""
        return None if self.dashboard is None else self.dashboard.page

    def last_step(self) -> int:
        """Return the newest step in metrics.jsonl, -1 if there is none."""
        return self.metrics_file.last_step()

    def report(self, step_report: StepReport, extra: dict | None = None) -> None:
        """:param extra: more values of this step by name"""
        self.metrics_file.report(step_report, extra)
        if self.dashboard is not None:
            record = to_record(step_report, extra)
            values = {name: value for name, value in record.items() if value is not None and name != "step"}
            self.dashboard.log(values, step_report.step)

    def report_evaluation(self, step: int, values: dict[str, float]) -> None:
        """:param values: what was found for the parameters of a step, by name, such as "validation loss\""""
        self.evaluations_file.write({"step": step, **values, "time": round(time.time(), 3)})
        if self.dashboard is not None:
            self.dashboard.log(values, step)

    def report_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], step: int) -> None:
        """Give a table of a step to the dashboard, if there is one that draws tables. May be called from any thread.

        The dashboard gets a table again once the step has grown by `TABLE_GROWTH` or has gone back.

        :param rows: numbers and plain text, one value per column
        """
        last = self._table_steps.get(name, 0)
        if self.dashboard is not None and not last <= step < last * TABLE_GROWTH:
            self._table_steps[name] = step
            from lib.monitoring.dashboards import Table

            self.dashboard.log(Table(name, columns, rows), step)

    def close(self) -> None:
        """Write the remaining lines and free resources. May be called twice."""
        self.metrics_file.close()
        self.evaluations_file.close()
        if self.dashboard is not None:
            self.dashboard.close()


def _plain(value: object) -> object:
    """Convert to a value that JSON and dashboards support; None for a non-finite number."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return str(value)
    return number if math.isfinite(number) else None


def to_record(step_report: StepReport, extra: dict | None = None) -> dict:
    """Return the values of a step, named as in hivemind's example, then those of `extra` that have other names."""
    record = {
        "step": step_report.step,
        "loss": step_report.loss,
        "alive peers": step_report.alive_peers,
        "samples": step_report.samples,
        "performance": step_report.performance,
        **step_report.metrics,
    }
    return {str(name): _plain(value) for name, value in (record | (extra or {}) | record).items()}


def evaluation_values(evaluation: Evaluation) -> dict[str, float]:
    """Return the values of an evaluation by curve name."""
    values = {
        "validation loss": evaluation.loss,
        "perplexity": evaluation.perplexity,
        "mlm accuracy": evaluation.mlm_accuracy,
        "sop accuracy": evaluation.sop_accuracy,
    }
    return {name: value for name, value in values.items() if value is not None}


def describe_evaluation(step: int, values: dict[str, float]) -> str:
    """Return one line for the log."""
    return f"Step #{step}\t" + "\t".join(f"{name} = {value:.5f}" for name, value in values.items())


class MetricsFile:
    """metrics.jsonl: one JSON object per line and step, on disk (fsync) when `report` returns.

    If a write fails (a full disk), lines are kept in memory and written first at the next report.

    :raises OSError: if the folder cannot be created or an existing file cannot be repaired
    """

    def __init__(self, output_dir: Path, name: str = "metrics.jsonl"):
        self.path = Path(output_dir) / name
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._waiting: deque[bytes] = deque(maxlen=MAX_WAITING_LINES)
        self._is_failing = False
        self._remove_torn_line()

    def last_step(self) -> int:
        """Return the newest step in the file, -1 if there is none. Reads the end of the file only."""
        for line in self._lines_from_end():
            try:
                record = json.loads(line)
            except ValueError:  # also raised for invalid UTF-8
                continue
            if isinstance(record, dict) and type(record.get("step")) is int:
                return record["step"]
        return -1

    def report(self, step_report: StepReport, extra: dict | None = None) -> None:
        record = to_record(step_report, extra) | {
            "contributors": step_report.contributors,
            "mini_steps": step_report.mini_steps,
            "time": round(step_report.time, 3),
        }
        self.write(record)

    def write(self, record: dict) -> None:
        """:param record: plain values by name, of one step"""
        if len(self._waiting) == MAX_WAITING_LINES:
            logger.error(
                f"{self.path}: {MAX_WAITING_LINES} steps are waiting to be written, the oldest of them is lost"
            )
        self._waiting.append(json.dumps(record, allow_nan=False).encode() + b"\n")
        self._write_waiting()

    def close(self) -> None:
        if self._waiting:
            self._write_waiting()
        if self._waiting:
            logger.error(f"{self.path}: {len(self._waiting)} steps could not be written")

    def _write_waiting(self) -> None:
        try:
            if self._is_failing:
                self._remove_torn_line()
            # Opened for each write: a file that was moved or a disk that was remounted needs no special handling.
            with open(self.path, "ab", buffering=0) as file:
                _append(file.fileno(), b"".join(self._waiting))
        except OSError as error:
            if not self._is_failing:
                logger.warning(
                    f"Cannot write {self.path}: {describe(error)}. Keeping the steps until writing succeeds"
                )
            self._is_failing = True
            return
        if self._is_failing:
            logger.info(f"{self.path} can be written again: wrote {len(self._waiting)} waiting steps")
        self._is_failing = False
        self._waiting.clear()

    def _remove_torn_line(self) -> None:
        """Truncate an incomplete last line, left by a process that died in a write; the next line would follow it."""
        if not self.path.exists():
            return
        with open(self.path, "r+b") as file:
            size = end = file.seek(0, os.SEEK_END)
            while end > 0:
                start = max(0, end - _BLOCK)
                file.seek(start)
                newline = file.read(end - start).rfind(b"\n")
                if newline >= 0:
                    end = start + newline + 1
                    break
                end = start
            if end < size:
                logger.warning(f"{self.path} ends with an incomplete line: removed its {size - end} bytes")
                file.truncate(end)
                os.fsync(file.fileno())

    def _lines_from_end(self) -> Iterator[bytes]:
        if not self.path.exists():
            return
        with open(self.path, "rb") as file:
            start, rest = file.seek(0, os.SEEK_END), b""
            while start > 0:
                start, end = max(0, start - _BLOCK), start
                file.seek(start)
                first, *lines = (file.read(end - start) + rest).split(b"\n")
                yield from reversed(lines)
                rest = first
            yield rest


def _append(descriptor: int, data: bytes) -> None:
    """Append all of `data` to an open file and sync it. On failure, truncate the file to its previous size.

    :raises OSError: if a write or the sync fails
    """
    size = os.fstat(descriptor).st_size
    try:
        written = 0
        while written < len(data):  # a disk that fills up accepts a part first and refuses the next
            written += os.write(descriptor, data[written:])
        os.fsync(descriptor)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, size)
        raise
