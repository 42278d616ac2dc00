#!/usr/bin/env python3
"""Keep a trainer, monitor or evaluator running: start it again when it has ended or hangs.

    ./run_forever.py ./run_trainer.py --run_id my-albert --initial_peers /ip4/203.0.113.1/tcp/31337/p2p/XXXX

Pauses between restarts grow from 5 seconds to 10 minutes. It ends when the command has completed (exit code 0), on
Ctrl-C, and on an error that another start does not cure: a wrong flag, missing data, five failures in a row before the
first work. A peer that nobody answers is tried without end.
"""

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from lib.common.backoff import Backoff
from lib.common.errors import TEMPORARY, exit_with
from lib.common.heartbeat import VARIABLE, read_heartbeat
from lib.common.processes import StopSignal, signal_at_end_of_parent

FIRST_PAUSE, LONGEST_PAUSE = 5.0, 600.0
MAX_FAILURES = 5  # in a row, before any work
SILENT_SECONDS = 60.0  # without a beat: the process or one of its children is frozen
STOP_SECONDS = 30.0  # for a clean end, before the process is killed
POLL_SECONDS = 0.5
USAGE = 2  # exit code for wrong flags


@dataclass(frozen=True)
class Outcome:
    """How a run of the command ended.

    :param code: its exit code; negative: the number of the signal
    :param has_worked: whether it has done any work, such as a local step
    :param why: what this program has ended it for; None if it has ended by itself
    """

    code: int
    has_worked: bool
    why: str | None = None

    def describe(self) -> str:
        if self.why is not None:
            return self.why
        if self.code < 0:
            return f"it was ended by {signal.Signals(-self.code).name}"
        return f"it ended with exit code {self.code}"


class Command:
    """One run of the command.

    :param stop: ends the run when set
    """

    def __init__(self, command: list[str], stop: threading.Event):
        self.command, self.stop = command, stop

    def run(self) -> Outcome:
        """Run the command until it ends, hangs, or `stop` is set.

        :raises OSError: if it cannot be started
        """
        with tempfile.TemporaryDirectory(prefix="run-forever-") as folder:
            beat_file = Path(folder) / "heartbeat.json"
            # In a separate process group: Ctrl-C reaches this program only, which ends the command. If this program
            # is killed, the kernel does.
            process = psutil.Popen(
                self.command, env={**os.environ, VARIABLE: str(beat_file)}, process_group=0,
                preexec_fn=partial(signal_at_end_of_parent, signal.SIGTERM),
            )  # fmt: skip
            why = self._watch(process, beat_file)
            if process.poll() is None:
                end(process)
            beat = read_heartbeat(beat_file)
        return Outcome(process.returncode, has_worked=beat is not None and beat["work"] > 0, why=why)

    def _watch(self, process: psutil.Popen, beat_file: Path) -> str | None:
        """Wait for the end; return early, with the reason, if the command must be ended."""
        beats = work = None
        # A clock that stands still while the machine sleeps
        beat_at = work_at = time.monotonic()
        while process.poll() is None:
            if self.stop.wait(POLL_SECONDS):
                return "stopped"
            beat, now = read_heartbeat(beat_file), time.monotonic()
            if beat is None:
                continue  # it starts: its waits, such as for the data, have their own timeouts
            if beat["beats"] != beats:
                beats, beat_at = beat["beats"], now
            if beat["work"] != work:
                work, work_at = beat["work"], now
            if now > beat_at + SILENT_SECONDS:
                return f"it or one of its processes has been frozen for {SILENT_SECONDS:.0f} seconds"
            if now > work_at + beat["longest_wait"]:
                return f"it hangs: nothing was done for {beat['longest_wait']:.0f} seconds"
        return None


def end(process: psutil.Popen) -> None:
    """End a process and its descendants: first ask it, then kill what is left."""
    family = [process, *process.children(recursive=True)]
    process.terminate()
    with contextlib.suppress(psutil.TimeoutExpired):
        process.wait(STOP_SECONDS)
    for member in family:
        try:
            # torch_shm_manager ends after the others, and removes what they have left in /dev/shm.
            if member.is_running() and not member.name().startswith("torch_shm"):
                member.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()


def is_cured_by_restart(outcome: Outcome, failures: int, is_first: bool) -> bool:
    """Whether another start may help.

    :param failures: failed runs in a row without work, this one included
    :param is_first: whether the command has never worked, so that somebody may still read its messages
    """
    if outcome.code == USAGE:
        return False
    if outcome.code == TEMPORARY or outcome.has_worked:
        return True
    return failures < MAX_FAILURES and not (is_first and outcome.code == 1 and outcome.why is None)


def log(message: str) -> None:
    print(f"run_forever.py: {message}", file=sys.stderr, flush=True)


def keep_running(command: list[str], stop: threading.Event) -> int:
    """Run a command again and again; return the exit code for this program."""
    backoff, failures, has_ever_worked = Backoff(FIRST_PAUSE, LONGEST_PAUSE), 0, False
    while True:
        try:
            outcome = Command(command, stop).run()
        except OSError as error:
            exit_with(f"'{command[0]}' cannot be started ({error.strerror}); pass the path of a script", USAGE)
        if stop.is_set() or outcome.code == 0:
            return max(outcome.code, 0)
        if outcome.has_worked:
            backoff.reset()
            failures, has_ever_worked = 0, True
        elif outcome.code != TEMPORARY:
            failures += 1
        if not is_cured_by_restart(outcome, failures, is_first=not has_ever_worked):
            times = f", the {failures}th failure in a row" if failures >= MAX_FAILURES else ""
            log(f"{outcome.describe()}{times}: starting it again does not cure this")
            return outcome.code if outcome.code > 0 else 1
        pause = backoff.fail()
        log(f"{outcome.describe()}; starting it again in {pause:.0f} seconds")
        if stop.wait(pause):
            return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the script and its flags")
    command = parser.parse_args().command
    if not command:
        parser.error("pass the command to keep running, such as ./run_trainer.py --initial_peers ADDRESS")
    with StopSignal(grace=STOP_SECONDS + 15.0) as stop:
        stop.defer()
        sys.exit(keep_running(command, stop.event))


if __name__ == "__main__":
    main()
