"""Dashboards for --report_to: accelerate's trackers, each in a thread.

A tracker that hangs or fails causes one warning and neither delays nor ends the caller. The x-axis is the global step,
and a restarted monitor continues the same curves. Files are written to the output folder, unless the environment
variables of the dashboard name another place.
Not supported are Comet, ClearML and SwanLab, which also record the monitor's code, packages or host, and Aim, whose
values could not be read back with the pinned packages.
"""

import contextlib
import itertools
import logging
import os
import queue
import secrets
import shlex
import sqlite3
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import quote

import requests
from accelerate.state import PartialState
from accelerate.tracking import GeneralTracker, TensorBoardTracker, TrackioTracker, WandBTracker

from cotrain.common.errors import describe
from cotrain.common.flags import is_page

logger = logging.getLogger(__name__)

# Loss first, and without smoothing, which shows values that no step has
PLOT_ORDER = "loss,validation loss,performance,alive peers,samples"
ADDRESS = "{host}?project={project}&smoothing=0"
WANDB_TIMEOUT = 30.0  # seconds for wandb to connect, before it records offline
SERVER_TIMEOUT = 5.0  # seconds for a trackio server to answer, before one warning
FINISH_TIMEOUT = 30.0  # seconds for wandb to upload the remaining values
# A factor between the steps of two tables: a run of 125 000 steps has 250 leaderboards, not 25 000 of 8 KB each.
TABLE_GROWTH = 1.05
TABLE_SECONDS = 1800.0  # after which a table is sent all the same: it says who is paused
DASHBOARD_TIMEOUT = 40.0  # seconds that `Dashboard.close` waits; wandb and trackio take at most 30 to finish


class Dashboard:
    """Starts one of accelerate's trackers in a thread. Steps are queued until then.

    Create it after the DHT: the start of the DHT forks this process, which the trackers do not support.
    """

    def __init__(self, tracker: GeneralTracker):
        PartialState(cpu=True)  # without it, the trackers' log messages raise
        tracker.main_process_only = False  # the monitor has a single process
        self.tracker = tracker
        self._calls = queue.SimpleQueue()  # some 30 MB for the 125 000 steps of a run
        self._calls.put(tracker.start)
        self._sent: dict[str, tuple[int, float]] = {}  # a table's name -> at which step, and when, the tracker got it
        self._withheld: dict[str, Callable[[], None]] = {}  # the newest tables since
        self._thread = threading.Thread(target=self._run, name=tracker.name, daemon=True)
        self._thread.start()

    @property
    def page(self) -> str | None:
        """Public address of the curves; None if there is none, or the tracker has not started."""
        page = getattr(self.tracker, "page", None)
        return page if is_page(page) else None

    def log(self, values: dict, step: int) -> None:
        """Queue the values of a step by curve name, and return at once. Steps may come in any order."""
        self._calls.put(partial(self.tracker.log, values, step=step))

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], step: int) -> None:
        """Queue a table of numbers and plain text, which only wandb and trackio draw.

        The tracker gets a table again once the step has grown by `TABLE_GROWTH` or has gone back, after
        TABLE_SECONDS, and at the end.
        """
        if hasattr(self.tracker, "log_table"):
            data, (last, sent_at) = list(map(list, rows)), self._sent.get(name, (0, 0.0))
            self._withheld[name] = partial(self.tracker.log_table, name, list(columns), data=data, step=step)
            if not last <= step < last * TABLE_GROWTH or time.monotonic() >= sent_at + TABLE_SECONDS:
                self._sent[name] = step, time.monotonic()
                self._calls.put(self._withheld.pop(name))

    def close(self) -> None:
        """Finish the upload within DASHBOARD_TIMEOUT seconds."""
        for call in (*self._withheld.values(), self.tracker.finish, None):
            self._calls.put(call)
        self._thread.join(DASHBOARD_TIMEOUT)
        if self._thread.is_alive():
            self._warn(f"did not finish in {DASHBOARD_TIMEOUT:.0f} s; values may be missing there")

    def _run(self) -> None:
        has_warned = False
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception as error:
                if not has_warned:  # after a failed start, all calls fail
                    self._warn(f"failed: {describe(error)}")
                    logger.debug("The dashboard's error", exc_info=error)
                has_warned = True

    def _warn(self, problem: str) -> None:
        logger.warning(f"{self.tracker.name} {problem}; see metrics.jsonl instead")


def build_tracker(
    name: str, output_dir: Path, run_id: str, wandb_project: str | None = None, **place: str | None
) -> GeneralTracker:
    """Build the tracker for a value of --report_to; `place` is for `ProjectTrackioTracker`."""
    output_dir = output_dir.resolve()
    if name == "wandb":
        return OfflineCapableWandbTracker(output_dir, wandb_project or run_id, run_id)
    if name == "trackio":
        return ProjectTrackioTracker(output_dir / name, run_id, **place)
    # Each start adds an event file; TensorBoard merges them.
    logger.info(f"Curves: tensorboard --logdir {shlex.quote(str(output_dir / name))}")
    return TensorBoardTracker(run_id, output_dir / name)


class OfflineCapableWandbTracker(WandBTracker):
    """Weights & Biases: online after `wandb login`, otherwise recorded in the output folder for a later upload.

    `start` raises wandb's exception if wandb can record neither online nor offline.
    """

    page: str | None = None

    def __init__(self, output_dir: Path, project: str, run_name: str):
        super().__init__(project, name=run_name, resume="allow", dir=str(output_dir))
        self._id_path = output_dir / "wandb_run_id"

    def start(self) -> None:
        # wandb's error reporting needs a network, and its threads outlive the run.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        if not self._id_path.exists():
            self._id_path.write_text(f"{secrets.token_hex(4)}\n", encoding="utf-8")
        self.init_kwargs["id"] = self._id_path.read_text(encoding="utf-8").strip()
        self.init_kwargs["settings"] = wandb.Settings(
            silent=True,
            console="off",
            init_timeout=WANDB_TIMEOUT,
            finish_timeout=FINISH_TIMEOUT,
            # Do not upload the monitor's host name, command line, code and load.
            save_code=False,
            disable_git=True,
            x_disable_machine_info=True,
            x_disable_meta=True,
            x_disable_stats=True,
        )
        mode = wandb.setup(wandb.Settings(silent=True)).settings.mode  # WANDB_MODE or a file; default: "online"
        reason = f"mode {mode}"
        if mode == "online":
            try:
                if wandb.login(prompt=False, verify=False):
                    super().start()
                else:
                    mode, reason = "offline", "no login found"
            except Exception as error:
                wandb.teardown()  # otherwise wandb's service considers the run that failed to start as in use
                mode, reason = "offline", " ".join(str(error).split())[:200]
        if mode != "online":
            self.init_kwargs["mode"] = mode
            super().start()
        self.run.define_metric("*", step_metric="step")
        if mode == "online":
            self.page = self.run.url
            logger.info(f"Curves: {self.page}")
        elif mode != "disabled":
            # Each start records into another folder. wandb uploads those of one ID in their order, as one run.
            folders = f"{shlex.quote(str(Path(self.run.dir).parents[1]))}/offline-run-*-{self.run.id}"
            logger.info(f"wandb records offline ({reason}). To upload: wandb login, then wandb sync {folders}")

    def log(self, values: dict, step: int | None = None, **kwargs) -> None:
        # wandb drops values whose `step=` is below the last one, as for evaluations and after a rollback.
        super().log({"step": step, **values}, **kwargs)

    def finish(self) -> None:
        import wandb

        try:
            super().finish()
        finally:
            wandb.teardown()  # ends wandb's service process


def show_command(folder: Path, project: str) -> str:
    """Return the command that shows trackio's page of a folder. trackio takes another port if 7860 is not free."""
    variables = f"TRACKIO_PLOT_ORDER={shlex.quote(PLOT_ORDER)} TRACKIO_DIR={shlex.quote(str(folder))}"
    command = f"{variables} trackio show --project {shlex.quote(project)}"
    return f"{command}  # open the address that it prints, with &smoothing=0 at its end"


def write_patiently(write: Callable[..., None], *args: object, **options: object) -> None:
    """Call trackio's write to its database until it succeeds: trackio drops the steps. Further ones queue up."""
    for number in itertools.count():
        with contextlib.suppress(sqlite3.OperationalError, OSError):
            return write(*args, **options)
        if number == 0:
            logger.warning("trackio's database is in use, or its disk is full: the page gets the steps later")
        time.sleep(1)


class ProjectTrackioTracker(TrackioTracker):
    """trackio, in a local folder without an account and a server, in a Hugging Face Space, or on a server.

    If a token is present, trackio requests the user's name from the Hugging Face Hub, without a timeout. While a Space
    or a server cannot be reached, trackio keeps the values in the folder and sends them later.
    """

    page: str | None = None

    def __init__(self, folder: Path, project: str, space_id: str | None = None, server_url: str | None = None):
        space_id = None if server_url is not None else space_id or os.environ.get("TRACKIO_SPACE_ID")
        space = None if space_id is None else f"https://huggingface.co/spaces/{space_id}"
        self.server_url = server_url
        self.host = space if server_url is None else f"{server_url.rstrip('/')}/"  # None: a local folder
        options = {"space_id": space_id, "server_url": server_url, "embed": False}
        options |= {"auto_log_gpu": False, "auto_log_cpu": False}
        super().__init__(project, name=project, resume="allow", **options)
        # trackio reads it on import. A value that is already set is the user's folder for dashboards.
        os.environ.setdefault("TRACKIO_DIR", str(folder))
        os.environ.setdefault("TRACKIO_PLOT_ORDER", PLOT_ORDER)  # of a Space, and of --serve_page
        self._has_warned = False

    def start(self) -> None:
        import trackio

        self._check_server()
        if self.server_url is not None:
            warnings.filterwarnings("ignore", module="trackio")  # several, of several lines
        elif self.host is None:
            logger.info(f"Curves: {show_command(trackio.TRACKIO_DIR, self.run_name)}")
            # Suppresses trackio's own hint for a new project, which lacks the folder.
            trackio.context_vars.current_project.set(self.run_name)
            trackio.SQLiteStorage.bulk_log = staticmethod(partial(write_patiently, trackio.SQLiteStorage.bulk_log))
        super().start()
        if self.server_url is not None:  # trackio sends what an earlier process has kept only to Spaces
            self.run._has_local_buffer = trackio.SQLiteStorage.has_pending_data(self.run_name)  # noqa: SLF001
        if self.host is not None:
            self.page = ADDRESS.format(host=self.host, project=quote(self.run_name))
            logger.info(f"Curves: {self.page}")

    def finish(self) -> None:
        self._check_server()
        super().finish()

    def _check_server(self) -> None:
        """Warn once if the server does not answer, or refuses the token: trackio itself tries again in silence."""
        if self.server_url is None or self._has_warned:
            return
        url = f"{self.host}api/get_run_mutation_status"
        options = {"headers": {"X-Trackio-Write-Token": os.environ["TRACKIO_WRITE_TOKEN"]}, "allow_redirects": False}
        try:
            answer = requests.post(url, json={}, timeout=SERVER_TIMEOUT, **options).json()
            fault = "" if answer["data"]["allowed"] else "refuses the token in TRACKIO_WRITE_TOKEN"
        except (requests.RequestException, LookupError, TypeError) as error:
            fault = f"does not answer as trackio does ({type(error).__name__})"
        if fault:
            self._has_warned, kept = True, os.environ["TRACKIO_DIR"]
            logger.warning(f"{self.server_url} {fault}: the curves are kept in '{kept}' until it takes them")

    def log_table(self, table_name: str, columns: list[str], data: list[list], step: int) -> None:
        """Log a table, as accelerate's tracker for wandb does. trackio shows its cells as plain text."""
        import trackio

        self.log({table_name: trackio.Table(columns=columns, data=data)}, step=step)
