"""Trainer whose micro-batches take a fixed time on every machine, and little CPU.

    PACE=0.25 python tests/support/paced.py run_trainer.py FLAGS

The collator sleeps until PACE seconds after the previous batch. Tests can therefore choose the duration of a global
step in seconds, and trainers on a busy machine have equal rates.
"""

import importlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import run_custom_trainer
import run_trainer
from lib.common.errors import run_script


class PacedCollator:
    """Calls a collator at most once in `seconds`. The time lost with a late batch is not made up for."""

    def __init__(self, collator: Callable, seconds: float):
        self.collator, self.seconds = collator, seconds
        self._next = time.monotonic()

    def __call__(self, samples: list[dict]):
        batch = self.collator(samples)
        now = time.monotonic()
        self._next = max(self._next + self.seconds, now)
        time.sleep(self._next - now)
        return batch


def pace(train: Callable, seconds: float) -> Callable:
    """Wrap the function `train` of a script."""

    def paced_train(*args) -> None:
        from lib.data import loading as data  # the import takes seconds; the trainer already handles signals

        load = data.load_training_data

        def load_paced(*args):
            dataset, collator = load(*args)
            return dataset, PacedCollator(collator, seconds)

        data.load_training_data = load_paced
        train(*args)

    return paced_train


def main() -> None:
    del sys.argv[0]  # error messages name the script that is now sys.argv[0]
    for script in (run_trainer, run_custom_trainer):
        script.train = pace(script.train, float(os.environ["PACE"]))
    name = sys.argv[0].removesuffix(".py").replace("/", ".")
    run_script(importlib.import_module(name).main)


if __name__ == "__main__":
    main()
