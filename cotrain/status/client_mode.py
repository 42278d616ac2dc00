"""Warning about a run whose trainers are all in client mode."""

from collections.abc import Sequence

from hivemind.utils import get_logger

from cotrain.common.backoff import Backoff

logger = get_logger(__name__)


class ClientModeAlarm:
    """Warns every WARNING_SECONDS seconds while all trainers, at least two, are in client mode.

    They cannot average with each other, and nobody can download their state.
    """

    WARNING_SECONDS = 300.0

    def __init__(self):
        self._pause = Backoff(self.WARNING_SECONDS, self.WARNING_SECONDS)

    def check(self, modes: Sequence[bool]) -> None:
        """Log the warning if it is due for these trainers, whether each of them is in client mode."""
        if len(modes) > 1 and all(modes) and self._pause.is_over:
            self._pause.fail()
            logger.warning(
                f"All {len(modes)} trainers are in client mode: nobody can download the training state from them, and "
                "they cannot average with each other. Start one without --client_mode on a machine that other peers "
                "can reach, such as the monitor's, or with --tunnel or --announce_tunnel"
            )
