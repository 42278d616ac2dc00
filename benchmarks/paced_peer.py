#!/usr/bin/env python3
"""Run a trainer whose micro-batches take a given time and little CPU, and record what it computes.

PACE=0.5 RECORD=local.jsonl benchmarks/paced_peer.py run_trainer.py FLAGS

The script may be one of another commit: only classes of the libraries are patched, and the download of the state.
The environment says how:

    PACE              seconds of a micro-batch
    DOWNLOAD_SECONDS  additional seconds of each download of the training state, as on a slow line (default: 0)
    RECORD            file to append to: a JSON line for each local step and each download
"""

import importlib
import json
import os
import runpy
import sys
import time
from functools import wraps
from pathlib import Path


class Recorder:
    """Appends JSON lines to a file."""

    def __init__(self, path: Path):
        self.path = path

    def write(self, event: str, **values: object) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps({"event": event, "time": time.time(), **values}) + "\n")


class Pace:
    """Spreads micro-batches over time.

    :param seconds: of a micro-batch. One that is late is not made up for
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._end: float | None = None  # of the micro-batch before
        self.num_samples = 0  # since the last local step

    def wait(self, began: float) -> None:
        """Wait until the micro-batch that began then has taken its time."""
        now = time.monotonic()
        self._end = max((began if self._end is None else self._end) + self.seconds, now)
        time.sleep(self._end - now)


def pace_trainer(pace: Pace, recorder: Recorder) -> None:
    """Let each micro-batch of transformers' Trainer take a given time; record the local steps.

    `waited` is the time inside of the optimizer's `step`: the trainer computes nothing meanwhile.
    """
    from accelerate.optimizer import AcceleratedOptimizer
    from transformers import Trainer

    compute, take_step = Trainer.training_step, AcceleratedOptimizer.step

    @wraps(compute)
    def training_step(trainer, model, inputs, *args, **kwargs):
        began = time.monotonic()
        loss = compute(trainer, model, inputs, *args, **kwargs)
        pace.wait(began)
        pace.num_samples += len(inputs["input_ids"])
        return loss

    @wraps(take_step)
    def step(optimizer, closure=None):
        began, num_samples = time.monotonic(), pace.num_samples
        pace.num_samples = 0
        result = take_step(optimizer, closure)
        recorder.write("local step", samples=num_samples, waited=round(time.monotonic() - began, 3))
        return result

    Trainer.training_step, AcceleratedOptimizer.step = training_step, step


def slow_down_downloads(seconds: float, recorder: Recorder) -> None:
    """Let each download of the training state take some seconds more; record the downloads."""
    try:
        from lib.averaging.state import TrainingStateAverager
    except ImportError:  # an older commit
        TrainingStateAverager = importlib.import_module("hivemind_fixes").TrainingStateAverager
    download = TrainingStateAverager.download_state

    @wraps(download)
    def download_state(averager, min_epoch: int = 0, only_metadata: bool = False):
        began = time.time()
        state = download(averager, min_epoch=min_epoch, only_metadata=only_metadata)
        if not only_metadata:
            time.sleep(0.0 if state is None else seconds)
            recorder.write("download", began=began, found=state is not None)
        return state

    TrainingStateAverager.download_state = download_state


def apply(pace: float, record: Path, download_seconds: float = 0.0) -> None:
    """Patch the trainer of this process. The project's modules must be on the path."""
    recorder = Recorder(record)
    pace_trainer(Pace(pace), recorder)
    slow_down_downloads(download_seconds, recorder)


def main() -> None:
    del sys.argv[0]  # the script's name takes its place, for messages
    script = Path(sys.argv[0]).resolve()
    sys.path[0] = str(script.parent)
    apply(float(os.environ["PACE"]), Path(os.environ["RECORD"]), float(os.environ.get("DOWNLOAD_SECONDS", "0")))
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
