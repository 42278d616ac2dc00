"""Output of monitor and evaluator: steps in metrics.jsonl, evaluations in evaluations.jsonl, optionally a dashboard.

metrics.jsonl is the durable record: no step is lost from it, and a restarted monitor reads the last step from it. A
dashboard (trackers.py) is for display only.
"""

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from cotrain.common.json_file import JsonLinesFile, read_records
from cotrain.monitoring.aggregation import StepReport

logger = logging.getLogger(__name__)


class Reporters:
    """The files and at most one dashboard.

    :param report_to: the dashboard, see `trackers.build_tracker`, to which `options` are passed
    :raises OSError: if the output folder or a file there is not writable
    """

    def __init__(self, output_dir: Path, run_id: str, report_to: str = "none", **options: str | None):
        self.metrics_file = JsonLinesFile(output_dir / "metrics.jsonl")
        self.evaluations_file = JsonLinesFile(output_dir / "evaluations.jsonl")
        self.dashboard = None
        if report_to != "none":
            from cotrain.monitoring.trackers import Dashboard, build_tracker  # a second

            self.dashboard = Dashboard(build_tracker(report_to, output_dir, run_id, **options))

    @property
    def page(self) -> str | None:
        """See `Dashboard.page`."""
        return None if self.dashboard is None else self.dashboard.page

    def last_step(self) -> int:
        """Return the newest step in metrics.jsonl, -1 if there is none."""
        return next((record["step"] for record in reversed(read_records(self.metrics_file.path))), -1)

    def base_evaluation(self) -> dict | None:
        """Return the evaluation of the base, which is step 0 in evaluations.jsonl; None if there is none."""
        return next((x for x in read_records(self.evaluations_file.path) if x["step"] == 0), None)

    def report(self, report: StepReport, extra: dict | None = None) -> None:
        """:param extra: more values of this step by name"""
        record = to_record(report) | (extra or {})
        more = {"contributors": report.contributors, "mini_steps": report.mini_steps, "time": round(report.time, 3)}
        self.metrics_file.write(record | more)
        self._log({name: value for name, value in record.items() if value is not None and name != "step"}, report.step)

    def report_evaluation(
        self, step: int, metrics: dict[str, float], remark: str = "", base: dict[str, float] | None = None
    ) -> None:
        """:param remark: added to the line in the log; :param base: `base_evaluation`, which is shown beside"""
        values = {curve_name(name): value for name, value in metrics.items()}
        beside = {name: f" (base {value:.5f})" for name, value in (base or {}).items()}
        described = "\t".join(f"{name} = {value:.5f}{beside.get(name, '')}" for name, value in values.items())
        logger.info(f"{f'Step #{step}' if step else 'Base'}\t{described}{remark}")
        self.evaluations_file.write({"step": step, **values, "time": round(time.time(), 3)})
        self._log(values, step)

    def _log(self, values: dict, step: int) -> None:
        if self.dashboard is not None:
            self.dashboard.log(values, step)

    def report_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], step: int) -> None:
        """Give a table of a step to the dashboard, if there is one. May be called from any thread."""
        if self.dashboard is not None:
            self.dashboard.log_table(name, columns, rows, step)

    def close(self) -> None:
        self.metrics_file.flush()
        self.evaluations_file.flush()
        if self.dashboard is not None:
            self.dashboard.close()


def curve_name(metric: str) -> str:
    """Return the name of an evaluation's curve, other than those of the steps: a task may choose any."""
    name = metric.replace("_", " ")
    return name if metric in ("perplexity", "mlm_accuracy", "sop_accuracy") else f"validation {name}"


def to_record(report: StepReport) -> dict:
    """Return the values of a step, named as in hivemind's example."""
    return {
        "step": report.step,
        "loss": report.loss,
        "alive peers": report.alive_peers,
        "samples": report.samples,
        "performance": report.performance,
        **report.metrics,
    }
