"""The page of a run without an account: the monitor serves it, and a trainer prints its address."""

import contextlib
import re
import signal
import socket

import pytest
import requests

from tests.support.peers import Scripts, reserve_maddr, steps_of, wait_until

STEPS = steps_of(seconds=4, num_trainers=1)


@pytest.mark.early
def test_monitor_serves_a_page_that_ends_with_it(scripts, tmp_path, data):
    """The monitor is killed once, and then stopped. It alone has trackio, and is not forked."""
    port, address = (reserve_maddr().rpartition("/")[2] for _ in range(2))
    page = f"http://127.0.0.1:{port}/?project=my%20run&smoothing=0"
    flags = ("--run_id", "my run", "--serve_page", f"127.0.0.1:{port}", *STEPS, "--host_maddrs",
             f"/ip4/127.0.0.1/tcp/{address}")  # fmt: skip
    with contextlib.closing(Scripts(tmp_path, data)) as organiser:
        monitor = organiser.monitor(*flags)
        monitor.wait_for(re.escape(f"Curves of the run: {page}"))
        trainer = scripts.trainer("alice", "--initial_peers", monitor.address, "--run_id", "my run", *STEPS)
        trainer.wait_for(re.escape(f"Curves of the run: {page}"))
        monitor.wait_for(r"Step #1\t")

        def read_logs() -> list[dict]:
            body = {"kwargs": {"project": "my run", "run": "my run"}}
            answer = requests.post(f"http://127.0.0.1:{port}/api/get_logs", json=body, timeout=60).json()
            return [log for log in answer.get("data") or [] if "loss" in log]

        assert wait_until(read_logs, 120, "the step on the page")[0]["step"] == 1
        monitor.kill()
        wait_for_the_end_of(port)
        again = organiser.monitor(*flags)
        again.wait_for(re.escape(f"Curves of the run: {page}"))
        assert read_logs()[0]["step"] == 1 and again.stop(signal.SIGINT) == 0
        again.assert_nothing_left()
        wait_for_the_end_of(port)
        assert trainer.stop() == 0
        assert "write_token" not in monitor.output + again.output + trainer.output


def wait_for_the_end_of(port: str) -> None:
    """The kernel ends the server after the monitor that has been killed."""

    def is_gone() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", int(port))) != 0

    wait_until(is_gone, 60, "the end of the page")
