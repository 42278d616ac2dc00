"""Terminal output of a trainer besides the log of its steps: a progress bar and a warning."""

import sys
import time

from hivemind.utils import get_logger
from tqdm import tqdm

from lib.averaging.optimizer import CollaborativeOptimizer

logger = get_logger(__name__)


class StepProgressBar:
    """Progress bar of the samples that all peers have accumulated for the next global step.

    It is drawn on a terminal only.
    """

    def __init__(self, optimizer: CollaborativeOptimizer, disable: bool):
        self.tracker = optimizer.tracker
        is_terminal = sys.stderr.isatty()
        self._bar = tqdm(total=optimizer.target_batch_size, unit=" samples", disable=disable or not is_terminal)

    def update(self) -> None:
        progress = self.tracker.global_progress
        self._bar.set_description(f"Step #{progress.epoch + 1}", refresh=False)
        self._bar.set_postfix(peers=max(1, progress.num_peers), refresh=False)
        self._bar.n = min(progress.samples_accumulated, self._bar.total)
        self._bar.refresh()

    def close(self) -> None:
        self._bar.close()


class ClientModeAlarm:
    """Warns while all trainers are in client mode.

    They can average only through an auxiliary peer, and the state of a client-mode trainer cannot be downloaded: a
    monitor writes no checkpoint, and newcomers start from an old one.

    :param period: seconds between two warnings
    """

    def __init__(self, period: float = 300.0):
        self.period = period
        self._last_time = float("-inf")

    def check(self, num_peers: int, num_clients: int) -> None:
        """Log the warning if it applies and is due.

        :param num_peers: number of live trainers; no warning for a single one, which has no peer to average with
        :param num_clients: number of live trainers in client mode
        """
        now = time.monotonic()
        if num_peers < 2 or num_clients < num_peers or now < self._last_time + self.period:
            return
        self._last_time = now
        logger.warning(
            f"All {num_peers} trainers are in client mode: nobody can download the training state from them, and "
            "without an auxiliary peer they cannot average with each other. Start one without --client_mode on a "
            "machine that other peers can reach, or with --tunnel or --announce_tunnel"
        )
