"""Where the monitor's aggregated steps go: metrics.jsonl always, besides it a dashboard (see dashboards.py).
What evaluators find goes to evaluations.jsonl and the same dashboard.

metrics.jsonl is the record: nothing is lost from it, and a restarted monitor learns there which step was the last. The
dashboards are for looking at; when one of them fails, that is one warning and the monitor goes on.
"""

import contextlib
import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lib.common.errors import describe
from lib.monitoring.aggregation import StepReport
from utils import Evaluation

if TYPE_CHECKING:
    from lib.monitoring.dashboards import Dashboard

logger = logging.getLogger(__name__)

MAX_WAITING_LINES = 100_000  # about 20 MB; a run has 125 000 steps
_BLOCK = 64 * 1024


def make_reporters(
    output_dir: Path, run_id: str, report_to: str = "none", wandb_project: str | None = None
) -> "Reporters":
    """The files in the output folder, and the dashboard that --report_to asks for.

    :raises OSError: if the output folder or a file there cannot be written to
    """
    metrics_file = MetricsFile(output_dir)
    dashboard = None
    if report_to != "none":
        try:
            from lib.monitoring.dashboards import Dashboard, build_tracker

            tracker = build_tracker(report_to, output_dir, run_id, wandb_project)
            dashboard = Dashboard(tracker, metrics_file.path)
        except Exception as error:
            message = f"No {report_to}: {describe(error)}; see {metrics_file.path} instead"
            logger.warning(message, exc_info=logger.isEnabledFor(logging.DEBUG))
    return Reporters(metrics_file, MetricsFile(output_dir, "evaluations.jsonl"), dashboard)


class Reporters:
    """The files and at most one dashboard. Steps come in ascending order, evaluations later than their step."""

    def __init__(
        self, metrics_file: "MetricsFile", evaluations_file: "MetricsFile", dashboard: "Dashboard | None" = None
    ):
        self.metrics_file, self.evaluations_file, self.dashboard = metrics_file, evaluations_file, dashboard

    def last_step(self) -> int:
        """The newest step in metrics.jsonl, -1 if there is none."""
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

    def close(self) -> None:
        """Write what is left and free resources. May be called twice."""
        self.metrics_file.close()
        self.evaluations_file.close()
        if self.dashboard is not None:
            self.dashboard.close()


def _plain(value: object) -> object:
    """A value that JSON and dashboards know; None for a number that is not finite."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return str(value)
    return number if math.isfinite(number) else None


def to_record(step_report: StepReport, extra: dict | None = None) -> dict:
    """The values of a step under the names that hivemind's example gives them, then those of `extra` with others."""
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
    """What an evaluator found, under the names that curves have."""
    values = {
        "validation loss": evaluation.loss,
        "perplexity": evaluation.perplexity,
        "mlm accuracy": evaluation.mlm_accuracy,
        "sop accuracy": evaluation.sop_accuracy,
    }
    return {name: value for name, value in values.items() if value is not None}


def describe_evaluation(step: int, values: dict[str, float]) -> str:
    """One line for the log."""
    return f"Step #{step}\t" + "\t".join(f"{name} = {value:.5f}" for name, value in values.items())


class MetricsFile:
    """metrics.jsonl: one JSON object per line and step, on disk (fsync) when `report` returns.

    If it cannot be written to (a full disk), lines wait in memory and go first at the next report.

    :raises OSError: if the folder cannot be made or an existing file not be repaired
    """

    def __init__(self, output_dir: Path, name: str = "metrics.jsonl"):
        self.path = Path(output_dir) / name
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._waiting: deque[bytes] = deque(maxlen=MAX_WAITING_LINES)
        self._is_failing = False
        self._remove_torn_line()

    def last_step(self) -> int:
        """The newest step in the file, -1 if there is none. Reads the end of the file only."""
        for line in self._lines_from_end():
            try:
                record = json.loads(line)
            except ValueError:  # also of bytes that are no text
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
            logger.error(f"{self.path}: {MAX_WAITING_LINES} steps wait to be written, the oldest of them is lost")
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
            # Opened each time, so that a file that was moved away or a disk that came back is no special case.
            with open(self.path, "ab", buffering=0) as file:
                _append(file.fileno(), b"".join(self._waiting))
        except OSError as error:
            if not self._is_failing:
                logger.warning(f"Cannot write {self.path}: {describe(error)}. Steps are kept until that works again")
            self._is_failing = True
            return
        if self._is_failing:
            logger.info(f"{self.path} can be written again, {len(self._waiting)} steps caught up")
        self._is_failing = False
        self._waiting.clear()

    def _remove_torn_line(self) -> None:
        """A process that died while writing leaves half a line; the next one would be appended to it."""
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
                logger.warning(f"{self.path} ends within a line, {size - end} bytes of it are removed")
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
    """Append all of `data` to an open file and sync it; in case of trouble leave the file as it was.

    :raises OSError: if that failed
    """
    size = os.fstat(descriptor).st_size
    try:
        written = 0
        while written < len(data):  # a disk that fills up takes a part first and refuses the next
            written += os.write(descriptor, data[written:])
        os.fsync(descriptor)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, size)
        raise
