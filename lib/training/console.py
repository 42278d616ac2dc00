"""What a trainer shows on its terminal, beside the log of its steps."""

import sys
import time

from hivemind.utils import get_logger
from tqdm import tqdm

from lib.averaging.optimizer import Optimizer

logger = get_logger(__name__)


class StepProgressBar:
    """How far all peers together are with the next global step; drawn on a terminal only."""

    def __init__(self, optimizer: Optimizer, disable: bool):
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
    """Says now and then that nobody can average because every trainer is in client mode.

    hivemind counts the steps of trainers that can be reached only, and a client's state cannot be downloaded: neither
    a monitor nor an assistant takes the place of one trainer that is not in client mode.
    """

    def __init__(self, period: float = 300.0):
        self.period = period
        self._last_time = float("-inf")

    def check(self, num_peers: int, num_clients: int) -> None:
        """:param num_peers: trainers that are alive; a single one has nobody to average with in any case"""
        now = time.monotonic()
        if num_peers < 2 or num_clients < num_peers or now < self._last_time + self.period:
            return
        self._last_time = now
        logger.warning(
            f"All {num_peers} trainers are in client mode, so that nobody can average with anybody: start one without "
            f"--client_mode on a machine that others can reach, or with --tunnel or --announce_tunnel"
        )
