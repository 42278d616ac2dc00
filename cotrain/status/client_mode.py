"""Warning about a run whose trainers are all in client mode."""

import time

from hivemind.utils import get_logger

logger = get_logger(__name__)


class ClientModeAlarm:
    """Warns every PERIOD seconds while all trainers, at least two, are in client mode.

    They cannot average with each other, and nobody can download their state.
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
            f"All {num_peers} trainers are in client mode: nobody can download the training state from them, and they "
            "cannot average with each other. Start one without --client_mode on a machine that other peers can reach, "
            "such as the monitor's, or with --tunnel or --announce_tunnel"
        )
