"""Terminal output of a trainer besides the log of its steps: a status panel and a warning."""

import sys
import time

from hivemind.utils import get_logger
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from cotrain.status.status import TrainerStatus, describe_status

logger = get_logger(__name__)


class StatusPanel:
    """Status of the trainer at the bottom of the terminal, below the log lines.

    It is drawn with tqdm's lock, which log lines take, too: rich reads the panel's height, and writes later. A line
    between the two at the first draw, which changes the height, left a second panel behind. Its height is constant for
    what a script prints, which takes no lock.
    """

    def __init__(self):
        # Without soft_wrap, long log lines such as addresses would be broken.
        console = Console(stderr=True, soft_wrap=True)
        # No automatic refresh: the owner refreshes it.
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=sys.stdout.isatty())

    def show(self, status: TrainerStatus) -> None:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(no_wrap=True, overflow="ellipsis")
        for label, text in describe_status(status):
            table.add_row(label, Text(text))  # others' words are no markup
        bar = ProgressBar(total=status.target_batch_size, completed=status.all_samples, width=40)
        with tqdm.get_lock():
            self._live.start()
            self._live.console.show_cursor(True)  # a killed process could not show it again
            self._live.update(Group("", table, bar, ""), refresh=True)

    def close(self) -> None:
        with tqdm.get_lock():
            self._live.stop()


def open_panel(disable: bool) -> StatusPanel | None:
    """Return the panel; None without a terminal that can redraw lines."""
    console = Console(stderr=True)
    return None if disable or not sys.stderr.isatty() or console.is_dumb_terminal else StatusPanel()


class ClientModeAlarm:
    """Warns every PERIOD seconds while all trainers, at least two, are in client mode.

    They can average only through an auxiliary peer, and nobody can download their state.
    """

    PERIOD = 300.0

    def __init__(self):
        self._due_at = float("-inf")  # time.monotonic

    def check(self, num_peers: int, num_clients: int) -> None:
        """Log the warning if it applies to a number of trainers, some of them in client mode, and is due."""
        if num_peers < 2 or num_clients < num_peers or time.monotonic() < self._due_at:
            return
        self._due_at = time.monotonic() + self.PERIOD
        logger.warning(
            f"All {num_peers} trainers are in client mode: nobody can download the training state from them, and "
            "without an auxiliary peer they cannot average with each other. Start one without --client_mode on a "
            "machine that other peers can reach, or with --tunnel or --announce_tunnel"
        )
