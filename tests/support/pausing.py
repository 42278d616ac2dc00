"""Run a script that pauses in the middle of its first checkpoint until a signal has arrived.

python tests/support/pausing.py run_training_monitor.py FLAGS
"""

import importlib
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from lib.common import atomic_files as atomic
from lib.common.errors import run_script
from lib.common.processes import StopSignal

IN_THE_MIDDLE = "Half a checkpoint is written"

signals: list[int] = []
handle, sync = StopSignal._handle, atomic._sync


def handle_and_note(self: StopSignal, number: int, frame) -> None:
    signals.append(number)
    handle(self, number, frame)


def sync_after_a_signal(path: Path) -> None:
    """Pause before a file of the checkpoint is synced, which is the last step before the checkpoint is renamed."""
    if "/.checkpoint-" in str(path) and not signals:
        print(IN_THE_MIDDLE, flush=True)
        while not signals:
            time.sleep(0.05)
    sync(path)


def main() -> None:
    StopSignal._handle = handle_and_note
    atomic._sync = sync_after_a_signal
    del sys.argv[0]  # error messages name the script that is now sys.argv[0]
    run_script(importlib.import_module(sys.argv[0].removesuffix(".py").replace("/", ".")).main)


if __name__ == "__main__":
    main()
