#!/usr/bin/env python3
"""Run a trainer whose micro-batches take a given time and little CPU, and record its local steps and downloads.

PACE=0.5 RECORD=local.jsonl benchmarks/paced_peer.py run_trainer.py FLAGS

The script may be from another commit: only classes of libraries and the download of the training state are patched.
Environment variables:

    PACE              seconds per micro-batch
    DOWNLOAD_SECONDS  additional seconds per download of the training state, as on a slow connection (default: 0)
    RECORD            output file: one JSON line is appended per local step and per download
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
    """Pads micro-batches to a given duration.

    :param seconds: duration of a micro-batch; later ones do not compensate for a slower one
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._end: float | None = None  # end of the previous micro-batch
        self.num_samples = 0  # samples since the last local step

    def wait(self, began: float) -> None:
        """Wait until the micro-batch that began at `began` has its full duration."""
        now = time.monotonic()
        self._end = max((began if self._end is None else self._end) + self.seconds, now)
        time.sleep(self._end - now)


def pace_trainer(pace: Pace, recorder: Recorder) -> None:
    """Patch transformers' Trainer: pad each micro-batch to a given duration, and record the local steps.

    `waited` is the time in the optimizer's `step`, in which the trainer computes nothing.
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
    """Patch the download of the training state: add `seconds` to each, and record it."""
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
    """Apply all patches in this process. The project's modules must be on `sys.path`."""
    recorder = Recorder(record)
    pace_trainer(Pace(pace), recorder)
    slow_down_downloads(download_seconds, recorder)


def main() -> None:
    del sys.argv[0]  # the script's name becomes the program name in messages
    script = Path(sys.argv[0]).resolve()
    sys.path[0] = str(script.parent)
    apply(float(os.environ["PACE"]), Path(os.environ["RECORD"]), float(os.environ.get("DOWNLOAD_SECONDS", "0")))
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
