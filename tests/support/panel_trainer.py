"""A trainer without training, whose threads and processes log while its panel is drawn, see test_console.py.

python tests/support/panel_trainer.py OUTPUT_DIR NUM_LINES
"""

import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[2]))

from hivemind.utils import get_logger

from cotrain.arguments import CollaborationArguments
from cotrain.common.logs import setup_logging
from cotrain.status.console import open_panel
from cotrain.status.loss_meter import LossMeter
from cotrain.status.status_keeper import StatusKeeper
from tests.support.fakes import FakeTracker

logger = get_logger(__name__)


def start_child(name: str, num_lines: int) -> int:
    """Fork a process that logs; return its ID."""
    child = os.fork()
    if child == 0:
        log(name, num_lines)
        os._exit(0)
    return child


def log(name: str, num_lines: int) -> None:
    for number in range(num_lines):
        logger.info(f"{name} {number} " + "long " * 60)
        time.sleep(0.01)


def main() -> None:
    setup_logging()
    folder, num_lines = Path(sys.argv[1]), int(sys.argv[2])
    optimizer = SimpleNamespace(tracker=FakeTracker(epoch=7), target_batch_size=256, num_computed=0, dht=None)
    panel, stop = open_panel(disable=False), threading.Event()
    args = CollaborationArguments(run_id="run")
    keeper = StatusKeeper(folder, optimizer, args, "quick-otter-3f2a", "me", LossMeter(), stop.is_set, panel)
    keeper.period = 0.02
    children = [start_child("early child", num_lines)]
    keeper.start()
    children.append(start_child("late child", num_lines))
    log("trainer", num_lines)
    print("to stdout")
    for child in children:
        os.waitpid(child, 0)
    time.sleep(1.0)  # the lines of the children arrive
    stop.set()
    time.sleep(0.2)
    logger.info("the last line")
    keeper.close()


if __name__ == "__main__":
    main()
