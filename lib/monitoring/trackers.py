"""Where the monitor's aggregated steps go: metrics.jsonl always, besides it Weights & Biases or a trackio dashboard.
What evaluators find goes to evaluations.jsonl and the same dashboard.

metrics.jsonl is the record: nothing is lost from it, and a restarted monitor learns there which step was the last. The
dashboards are for looking at; when one of them fails, that is one warning and the monitor goes on.

Build reporters after the DHT has started: it forks, and neither wandb nor trackio expect to be forked.
"""

import contextlib
import json
import logging
import math
import os
import secrets
import shlex
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from arguments import EvaluatorArguments, TrainingMonitorArguments
from lib.common.errors import describe
from lib.monitoring.aggregation import StepReport
from utils import Evaluation

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT = 30.0  # seconds that a dashboard may take to begin
FINISH_TIMEOUT = 30.0  # seconds that it may take to upload what is left
MAX_WAITING_LINES = 100_000  # about 20 MB; a run has 125 000 steps
_BLOCK = 64 * 1024


class Reporter(Protocol):
    """Takes one global step at a time, in ascending order; evaluations come later than their step."""

    def report(self, step_report: StepReport, extra: dict | None = None) -> None:
        """:param extra: more values of this step by name"""

    def report_evaluation(self, step: int, values: dict[str, float]) -> None:
        """:param values: what was found for the parameters of a step, by name, such as "validation loss\""""

    def close(self) -> None:
        """Write what is left and free resources. May be called twice."""


def make_reporters(args: TrainingMonitorArguments | EvaluatorArguments, run_id: str) -> "Reporters":
    """The files in the output folder, and the dashboard that --report_to asks for.

    :raises OSError: if the output folder or a file there cannot be written to
    """
    output_dir = Path(args.output_dir)
    metrics_file = MetricsFile(output_dir)
    dashboard = None
    try:
        if args.report_to == "wandb":
            dashboard = WandbReporter(output_dir, args.wandb_project or run_id, run_id)
        elif args.report_to == "trackio":
            dashboard = TrackioReporter(output_dir, run_id)
    except Exception as error:
        message = f"No {args.report_to}: {describe(error)}; see {metrics_file.path} instead"
        logger.warning(message, exc_info=logger.isEnabledFor(logging.DEBUG))
    return Reporters(metrics_file, MetricsFile(output_dir, "evaluations.jsonl"), dashboard)


class Reporters:
    """The files and at most one dashboard, behind one Reporter."""

    def __init__(
        self, metrics_file: "MetricsFile", evaluations_file: "MetricsFile", dashboard: Reporter | None = None
    ):
        self.metrics_file, self.evaluations_file, self.dashboard = metrics_file, evaluations_file, dashboard
        self._has_warned = False

    def last_step(self) -> int:
        """The newest step in metrics.jsonl, -1 if there is none."""
        return self.metrics_file.last_step()

    def report(self, step_report: StepReport, extra: dict | None = None) -> None:
        self.metrics_file.report(step_report, extra)
        if self.dashboard is not None:
            with self._warning_once():
                self.dashboard.report(step_report, extra)

    def report_evaluation(self, step: int, values: dict[str, float]) -> None:
        self.evaluations_file.write({"step": step, **values, "time": round(time.time(), 3)})
        if self.dashboard is not None:
            with self._warning_once():
                self.dashboard.report_evaluation(step, values)

    def close(self) -> None:
        self.metrics_file.close()
        self.evaluations_file.close()
        if self.dashboard is not None:
            with self._warning_once():
                self.dashboard.close()

    @contextlib.contextmanager
    def _warning_once(self) -> Iterator[None]:
        """A dashboard that fails is one warning, and the monitor goes on."""
        try:
            yield
        except Exception as error:
            if not self._has_warned:
                message = f"{type(self.dashboard).__name__}: {describe(error)}; see {self.metrics_file.path} instead"
                logger.warning(message, exc_info=logger.isEnabledFor(logging.DEBUG))
                self._has_warned = True


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


class WandbReporter:
    """Weights & Biases: online after `wandb login`, else recorded in the output folder to be uploaded at leisure.

    The run's ID is kept in the output folder, so that a restarted monitor goes on with the same curves.

    :raises Exception: whatever wandb raises if it can record neither online nor offline
    """

    def __init__(self, output_dir: Path, project: str, run_name: str):
        # wandb's reports of its own errors need a network, and their threads outlive it.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._wandb, self._run = wandb, None
        settings = wandb.Settings(
            silent=True,
            console="off",
            init_timeout=CONNECT_TIMEOUT,
            finish_timeout=FINISH_TIMEOUT,
            # The monitor's host name, command line, code and load are nobody's business
            save_code=False,
            disable_git=True,
            x_disable_machine_info=True,
            x_disable_meta=True,
            x_disable_stats=True,
        )
        options = {"project": project, "name": run_name, "id": _load_wandb_id(output_dir), "resume": "allow",
                   "dir": str(output_dir), "settings": settings}  # fmt: skip
        mode = wandb.setup(wandb.Settings(silent=True)).settings.mode  # "online" unless WANDB_MODE or a file says else
        reason = f"mode {mode}"
        if mode == "online":
            try:
                if not wandb.login(prompt=False, verify=False):
                    mode, reason = "offline", "no login found"
                else:
                    self._run = wandb.init(mode=mode, **options)
            except Exception as error:
                wandb.teardown()  # else its service takes the run that did not come about for one in use
                mode, reason = "offline", " ".join(str(error).split())[:200]
        if self._run is None:
            self._run = wandb.init(mode=mode, **options)
        self._run.define_metric("*", step_metric="step")
        if mode == "online":
            logger.info(f"Curves: {self._run.url}")
        elif mode != "disabled":
            folder = shlex.quote(str(Path(self._run.dir).parent))
            logger.info(f"wandb records offline ({reason}). To upload: wandb login, then wandb sync {folder}")

    def report(self, step_report: StepReport, extra: dict | None = None) -> None:
        record = to_record(step_report, extra)
        self._log({name: value for name, value in record.items() if value is not None})

    def report_evaluation(self, step: int, values: dict[str, float]) -> None:
        self._log({"step": step, **values})

    def _log(self, record: dict) -> None:
        self._run.log(record)  # its own `step=` would refuse evaluations of earlier steps, or a run that has gone back

    def close(self) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            try:
                run.finish()
            finally:
                self._wandb.teardown()  # ends its service process


def _load_wandb_id(output_dir: Path) -> str:
    """The ID under which wandb knows this folder's run; made at the first call."""
    path = output_dir / "wandb_run_id"
    if path.exists() and (wandb_id := path.read_text().strip()):
        return wandb_id
    wandb_id = secrets.token_hex(4)
    path.write_text(f"{wandb_id}\n")
    return wandb_id


class TrackioReporter:
    """A local trackio dashboard: no account, no server until it is looked at. Its database lies in the output folder.

    trackio asks the Hugging Face Hub for the user's name if there is a token, without a time limit. So the run is
    started by a thread of its own; steps wait until it is there.
    """

    def __init__(self, output_dir: Path, project: str):
        # Read when trackio is imported. Whoever sets it already has a place for dashboards.
        os.environ.setdefault("TRACKIO_DIR", str((output_dir / "trackio").resolve()))
        import trackio

        self._trackio, self._project = trackio, project
        self._run, self._error, self._is_closed = None, None, False
        self._waiting: deque[tuple[dict, int]] = deque(maxlen=MAX_WAITING_LINES)
        self._connection = threading.Thread(target=self._connect, name="trackio", daemon=True)
        self._connection.start()
        self._connection.join(timeout=min(2.0, CONNECT_TIMEOUT))  # takes milliseconds if there is no token
        folder = shlex.quote(str(trackio.TRACKIO_DIR))
        logger.info(f"Curves: TRACKIO_DIR={folder} trackio show --project {shlex.quote(project)}")

    def _connect(self) -> None:
        try:
            # To a project that it takes for known, it does not print how to look at it: its line lacks the folder.
            self._trackio.context_vars.current_project.set(self._project)
            self._run = self._trackio.init(
                self._project, name="monitor", resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False
            )
        except Exception as error:
            self._error = error

    def report(self, step_report: StepReport, extra: dict | None = None) -> None:
        record = to_record(step_report, extra)
        # trackio has the step in a column of its own and renames whatever else is called so.
        values = {name: value for name, value in record.items() if value is not None and name != "step"}
        self._log(values, step_report.step)

    def report_evaluation(self, step: int, values: dict[str, float]) -> None:
        self._log(values, step)

    def _log(self, values: dict, step: int) -> None:
        self._check_started()
        self._waiting.append((values, step))
        self._log_waiting()

    def close(self) -> None:
        """:raises RuntimeError: if trackio did not start"""
        if self._is_closed:
            return
        self._is_closed = True
        self._connection.join(timeout=CONNECT_TIMEOUT)
        self._check_started()
        if self._run is None:
            raise RuntimeError(f"trackio did not start, {len(self._waiting)} steps are missing there")
        self._log_waiting()
        self._run.finish()  # waits for its thread, 30 seconds at most

    def _check_started(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"trackio did not start: {self._error!r}")

    def _log_waiting(self) -> None:
        while self._run is not None and self._waiting:
            values, step = self._waiting.popleft()
            self._run.log(values, step=step)
