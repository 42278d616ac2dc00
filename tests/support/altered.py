"""Run a script with the changes that environment variables ask for.

    PACE=0.25 python tests/support/altered.py run_trainer.py FLAGS

PACE              seconds of a local step on any machine: the trainer sleeps until then. Tests can therefore choose the
                  duration of a global step, and trainers on a busy machine have equal rates
RECORD            a file: the trainer appends its local steps, downloads of the training state, reads of the others'
                  progress, and numbers of DHT requests, as JSON lines
DOWNLOAD_SECONDS  more seconds for each download of the training state, as on a slow connection
CLOCK             seconds by which this machine's clock is ahead, or a file with that number, which may change
ATTACK            how the trainer attacks its run, see attacks.py
PAUSE             the script pauses in the middle of its first checkpoint until a signal has arrived

Trainers ask for revocations every 5 s instead of 30. The last one that is stopped waits 2 s instead of 20 for a
monitor to save its step: tests/training/test_session.py simulates that wait.
"""

import importlib
import json
import os
import runpy
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import run_custom_trainer
import run_trainer
from cotrain.common import atomic_files
from cotrain.common.errors import run_script
from cotrain.common.signals import StopSignal

IN_THE_MIDDLE = "Half a checkpoint is written"
DHT_REQUESTS = ("call_ping", "call_store", "call_find")
REVOCATION_SECONDS = 5.0
LAST_STEP_SECONDS = 2.0


class Recorder:
    """Appends JSON lines to a file."""

    def __init__(self, path: Path):
        self.path = path

    def write(self, event: str, **values: object) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, "time": time.time(), **values}) + "\n")


def set_pace(seconds: float) -> None:
    """Let a local step take at least `seconds`. The time lost with a late one is not made up for."""
    from cotrain.training.session import TrainingSession

    after_local_step, due = TrainingSession.after_local_step, time.monotonic()

    @wraps(after_local_step)
    def after_paced_step(session, *args, **kwargs):
        nonlocal due
        now = time.monotonic()
        due = max(due + seconds, now)
        time.sleep(due - now)
        return after_local_step(session, *args, **kwargs)

    TrainingSession.after_local_step = after_paced_step


def record(recorder: Recorder) -> None:
    """Record local steps, reads of the others' progress, and at most once a second the DHT requests so far.

    `waited` is the time in the optimizer's `step`, in which the trainer computes nothing.
    """
    from hivemind.dht.protocol import DHTProtocol

    from peerstep.optimizer import CollaborativeOptimizer
    from peerstep.progress.tracker import ProgressTracker

    take_step, finish_fetch = CollaborativeOptimizer.step, ProgressTracker.finish_read

    @wraps(take_step)
    def step(optimizer, *args, **kwargs):
        began = time.monotonic()
        result = take_step(optimizer, *args, **kwargs)
        waited = round(time.monotonic() - began, 3)
        recorder.write("local step", samples=optimizer.batch_size_per_step, waited=waited)
        return result

    @wraps(finish_fetch)
    def finish(tracker):
        is_finished = finish_fetch(tracker)
        if is_finished:
            recorder.write("read", seconds=time.monotonic() - tracker.others.begun_at)
        return is_finished

    CollaborativeOptimizer.step, ProgressTracker.finish_read = step, finish
    counts, written_at = Counter(), 0.0

    def count(name: str, call: Callable) -> Callable:
        @wraps(call)
        async def counted(*args, **kwargs):
            nonlocal written_at
            counts[name] += 1
            if time.monotonic() > written_at + 1:
                written_at = time.monotonic()
                recorder.write("requests", **counts)
            return await call(*args, **kwargs)

        return counted

    for name in DHT_REQUESTS:
        setattr(DHTProtocol, name, count(name, getattr(DHTProtocol, name)))


def slow_down_downloads(seconds: float, recorder: Recorder | None) -> None:
    """Add seconds to each download of the training state, and record it."""
    from peerstep.state.averager import TrainingStateAverager

    download = TrainingStateAverager.download_state

    @wraps(download)
    def download_state(averager, *args, **kwargs):
        began = time.time()
        state = download(averager, *args, **kwargs)
        time.sleep(0.0 if state is None else seconds)
        if recorder is not None:
            recorder.write("download", began=began)
        return state

    TrainingStateAverager.download_state = download_state


def shorten_waits() -> None:
    from cotrain.admission.admission import Admission
    from cotrain.training import session

    Admission.REFRESH_PERIOD = REVOCATION_SECONDS
    session.LAST_STEP_SECONDS = LAST_STEP_SECONDS


def set_clock(ahead: str) -> None:
    """Let the clock of this process, and of those forked from it, be ahead.

    :param ahead: seconds, or a file with that number, which is read each time
    """
    read, file = time.time, Path(ahead)
    if file.is_file():
        time.time = lambda: read() + float(file.read_text(encoding="utf-8"))
    else:
        time.time = lambda: read() + float(ahead)


def pause_in_checkpoint() -> None:
    """Pause before a file of the checkpoint is synced, which is the last step before the checkpoint is renamed."""
    signals: list[int] = []
    handle, sync = StopSignal.handle, atomic_files.sync

    def handle_and_remember(self: StopSignal, number: int, frame) -> None:
        signals.append(number)
        handle(self, number, frame)

    def sync_after_a_signal(path: Path) -> None:
        if "/.checkpoint-" in str(path) and not signals:
            print(IN_THE_MIDDLE, flush=True)
            while not signals:
                time.sleep(0.05)
        sync(path)

    StopSignal.handle, atomic_files.sync = handle_and_remember, sync_after_a_signal


def alter(train: Callable) -> Callable:
    """Wrap the function `train` of a script. Its imports take seconds; the trainer already handles signals."""

    @wraps(train)
    def altered_train(*args, **kwargs) -> None:
        recorder = Recorder(Path(os.environ["RECORD"])) if "RECORD" in os.environ else None
        shorten_waits()
        set_pace(float(os.environ.get("PACE", "0")))
        if recorder is not None:
            record(recorder)
        if recorder is not None or "DOWNLOAD_SECONDS" in os.environ:
            slow_down_downloads(float(os.environ.get("DOWNLOAD_SECONDS", "0")), recorder)
        train(*args, **kwargs)

    return altered_train


def main() -> None:
    del sys.argv[0]  # error messages name the script that is now sys.argv[0]
    if "CLOCK" in os.environ:
        set_clock(os.environ["CLOCK"])
    if "PAUSE" in os.environ:
        pause_in_checkpoint()
    if "ATTACK" in os.environ:
        from tests.support.attacks import ATTACKS

        ATTACKS[os.environ["ATTACK"]]()
    for script in (run_trainer, run_custom_trainer):
        script.train = alter(script.train)
    if sys.argv[0].startswith("examples/"):  # a user's script, without `main`
        set_pace(float(os.environ["PACE"]))
        runpy.run_path(str(Path(__file__).parents[2] / sys.argv[0]), run_name="__main__")
        return
    run_script(importlib.import_module(sys.argv[0].removesuffix(".py").replace("/", ".")).main)


if __name__ == "__main__":
    main()
