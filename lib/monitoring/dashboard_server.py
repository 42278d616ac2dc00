"""trackio's dashboard as a web page, in a separate process that ends with the monitor.

`DashboardServer` starts this module as

    python -m lib.monitoring.dashboard_server PROJECT --host HOST --parent PID [--port PORT]

The page is read-only: the calls that change something are removed from trackio's API. trackio prints an address with
a write token nevertheless; its output is discarded.
"""

import argparse
import contextlib
import io
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import quote

from lib.common.errors import UserError, run_script
from lib.common.processes import leave_with_parent

logger = logging.getLogger(__name__)

STOP_TIMEOUT = 5.0  # seconds for the process to end after SIGTERM


class DashboardServer:
    """Serves the curves in trackio's folder (TRACKIO_DIR) and logs the address. A failure is one warning.

    Create it in the main thread: the kernel ends the process with the thread that started it.

    :param project: trackio's project, the run ID
    :param host: the address to listen on
    :param port: the port; None for the first free one from 7860
    """

    def __init__(self, project: str, host: str, port: int | None):
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            __name__,
            project,
            f"--host={host}",
            f"--parent={os.getpid()}",
        ]
        self._process = subprocess.Popen(
            command if port is None else [*command, f"--port={port}"],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._is_closed = False
        self._thread = threading.Thread(target=self._watch, name="DashboardServer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the process. May be called twice."""
        self._is_closed = True
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _watch(self) -> None:
        last_line = "no reason was given"
        for line in self._process.stdout:
            last_line = line.strip()
            if last_line.startswith("http"):
                logger.info(f"Dashboard: {last_line} (read-only)")
        code = self._process.wait()
        if not self._is_closed:
            reason = last_line.split(" error: ", 1)[-1]
            logger.warning(f"The dashboard has ended with exit code {code}: {reason}")


def main() -> None:
    leave_with_parent()
    os.nice(10)  # drawing must not slow down the monitor
    parser = argparse.ArgumentParser()
    parser.add_argument("project")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int)
    parser.add_argument("--parent", type=int, required=True)
    args = parser.parse_args()
    if os.getppid() != args.parent:
        raise UserError("the monitor has ended")  # before leave_with_parent took effect
    print(f"{serve(args.host, args.port)}?project={quote(args.project)}", flush=True)
    signal.pause()


def serve(host: str, port: int | None) -> str:
    """Start trackio's server in a thread and return its address, without the write token.

    :raises UserError: if the server cannot listen there
    """
    import trackio
    from trackio.server import WRITE_APIS

    with contextlib.redirect_stdout(io.StringIO()):
        try:
            server, address, *_ = trackio.show(
                host=host, server_port=port, open_browser=False, block_thread=False, share=False, mcp_server=False
            )
        except OSError:
            where = host if port is None else f"{host}, port {port}"
            raise UserError(f"cannot listen on {where}; choose another --dashboard_host or --dashboard_port") from None
    # trackio 0.43 checks the token in each of these except force_sync, which writes a copy of all curves. SQL of
    # strangers may keep the machine busy.
    for name in (*WRITE_APIS, "query_project"):
        server.app.state.api_registry.pop(name, None)
    return address


if __name__ == "__main__":
    run_script(main)
