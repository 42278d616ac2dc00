"""Requests to stop, and output that nobody reads, in small processes."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from cotrain.common.signals import ignore_launcher
from tests.support.peers import wait_until
from tests.support.processes import ROOT

pytestmark = pytest.mark.programs

# A script that says what happens to it in a file, its first argument. The second one is what it does.
SCRIPT = """\
import ctypes, sys, time
from cotrain.common.errors import TemporaryError, run_script
from cotrain.common.signals import StopSignal

log = open(sys.argv[1], "w", buffering=1)

def block():  # in C, where no handler of Python runs: a thread that locks a mutex twice waits for itself
    mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex), lock(mutex)

def work():
    with StopSignal(grace=float(sys.argv[3])) as stop:
        stop.defer()
        log.write("ready\\n")
        block() if sys.argv[2] == "block" else stop.event.wait(100)
        time.sleep(0.0 if sys.argv[2] == "stop" else 100.0)
        log.write("stopped\\n")

def fail():
    print("x" * 100_000)
    raise TemporaryError("nobody answers")

run_script(fail if sys.argv[2] == "fail" else work)
"""
NEVER = 1e6


class Process:
    """The script in a process.

    :param do: "stop" at the first signal, "linger" after it, "block", or "fail"
    :param grace: of StopSignal
    :param stderr: a file descriptor, by default that of a pipe which the test reads
    """

    def __init__(self, folder: Path, do: str, grace: float = NEVER, prefix: Sequence[str] = (), **streams):
        self.log = Path(tempfile.mkdtemp(dir=folder), "log")
        # A shell that runs the tests in the background, and nohup, make their programs ignore signals.
        command = ["env", "--default-signal=INT,HUP", *prefix, sys.executable, "-c", SCRIPT, self.log, do, str(grace)]
        self.process = subprocess.Popen(command, cwd=ROOT, **{"stderr": subprocess.PIPE, **streams})

    def send(self, *numbers: int) -> None:
        wait_until(lambda: self.log.exists() and self.log.read_text(encoding="utf-8"), 120, "the start")
        for number in numbers:
            self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(timeout=120)

    @property
    def has_stopped(self) -> bool:
        return "stopped" in self.log.read_text(encoding="utf-8")


@pytest.fixture
def start(tmp_path) -> Iterator:
    processes = []

    def start_process(*args, **options) -> Process:
        processes.append(Process(tmp_path, *args, **options))
        return processes[-1]

    yield start_process
    for process in processes:
        process.process.kill()
        process.process.communicate()


@pytest.fixture
def output(request) -> Iterator[int]:
    """An output without a reader, or a pipe whose reader has stopped reading, as after Ctrl-S or in `less`."""
    reader, writer = os.openpty() if request.param == "lost terminal" else os.pipe()
    if request.param == "full pipe":
        os.set_blocking(writer, False)
        with suppress(BlockingIOError):
            while True:
                os.write(writer, b"x" * 4096)
        os.set_blocking(writer, True)
    else:
        os.close(reader)
    yield writer
    os.close(writer)
    if request.param == "full pipe":
        os.close(reader)


def with_outputs(*outputs: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("output", outputs, indirect=True)


@with_outputs("closed pipe", "full pipe", "lost terminal")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_first_signal_stops_whatever_becomes_of_the_output(start, output, number):
    process = start("stop", stderr=output)
    process.send(number)
    assert process.wait() == 0 and process.has_stopped


@with_outputs("closed pipe", "full pipe", "lost terminal")
def test_grace_and_second_signal_end_it_whatever_becomes_of_the_output(start, output):
    process = start("linger", grace=0.5, stderr=output)
    process.send(signal.SIGTERM)
    assert process.wait() == 0 and not process.has_stopped
    process = start("linger", stderr=output)
    process.send(signal.SIGINT, signal.SIGTERM)
    assert process.wait() in (-signal.SIGTERM, -signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_a_process_that_is_in_a_call_of_c(start, number):
    process = start("block", grace=0.5)
    process.send(number)
    assert process.wait() == 0
    stderr = process.process.stderr.read().decode()
    assert f"{number.name}: stopping" in stderr and "Still busy" in stderr
    process = start("block")
    process.send(number)
    assert b"stopping" in process.process.stderr.readline()
    second = signal.SIGTERM if number == signal.SIGHUP else number
    process.send(second)
    assert process.wait() == -second
    assert b"Stopped at once" in process.process.stderr.read()


def test_hang_up_is_ignored_under_nohup_and_is_never_a_second_request(start):
    process = start("stop", prefix=["nohup"], stdout=subprocess.DEVNULL)
    process.send(signal.SIGHUP, signal.SIGHUP, signal.SIGTERM)
    assert process.wait() == 0 and process.has_stopped
    assert b"SIGTERM: stopping" in process.process.stderr.read()
    # What systemd sends to a session that ends, and a shell and the kernel at the end of a terminal
    for numbers in ((signal.SIGTERM, signal.SIGHUP), (signal.SIGHUP, signal.SIGHUP, signal.SIGHUP)):
        process = start("linger", grace=1.0)
        process.send(numbers[0])
        assert b"stopping" in process.process.stderr.readline()
        process.send(*numbers[1:])
        assert process.wait() == 0


@with_outputs("closed pipe", "lost terminal")
def test_exit_code_does_not_depend_on_the_output(start, output):
    assert start("fail", stdout=output, stderr=output).wait() == 75


def test_ctrl_c_counts_once_while_children_are_forked():
    """A child that is not detached yet has the handlers of its parent, and the pipe that the parent reads."""
    script = """\
import multiprocessing, os, signal, time
from cotrain.common.signals import StopSignal
from peerstep.peer.processes import guard_children

guard_children()
with StopSignal(grace=1e6) as stop:
    stop.defer()
    number = 0
    while not stop.is_set():
        child = multiprocessing.Process(target=time.sleep, args=(0,))
        child.start()
        number += 1
        if number == 5:
            print("ready", flush=True)
        child.join()
    time.sleep(0.2)  # for a second request, which would end it
"""
    for _ in range(5):
        command = ["env", "--default-signal=INT", sys.executable, "-c", script]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True) as process:
            assert process.stdout.readline() == b"ready\n"
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait(timeout=120) == 0


def test_closed_streams_are_no_files_to_write_to(tmp_path):
    """Without a stderr, the next file to be opened would have its number, and get its lines."""
    command = f"{sys.executable} -c '{SCRIPT}' {tmp_path / 'log'} fail 0 <&- >&- 2>&-"
    assert subprocess.run(["bash", "-c", command], cwd=ROOT, timeout=120, check=False).returncode == 75
    assert (tmp_path / "log").read_text(encoding="utf-8") == ""


def test_full_disk_under_the_output_of_a_script_is_an_error(start):
    with open("/dev/full", "wb") as full:
        process = start("fail", stdout=full)
        assert process.wait() == 1
    assert b"standard output: No space left on device" in process.process.stderr.read()


def test_variables_of_launchers_are_ignored_with_one_line(monkeypatch, capsys):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "OMPI_COMM_WORLD_SIZE", "ACCELERATE_USE_FSDP",
                 "TORCHELASTIC_RUN_ID", "PMI_SIZE"):  # fmt: skip
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("FRANK", "1")
    ignore_launcher()
    ignore_launcher()
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1 and "LOCAL_RANK" in warning and "FRANK" not in warning
    assert "RANK" not in os.environ and os.environ["FRANK"] == "1"
