"""Messages to the owner of a peer through a webhook: Slack, Discord, or any server that takes JSON.

Not by trackio's `alert`: trainers run without trackio, and after a failure it logs the address, which is a secret.
"""

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from cotrain.common.errors import describe, is_temporary
from cotrain.common.flags import require

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 3600.0  # between two messages of a kind
TIMEOUT = 10.0  # seconds for a server to answer, and for the last messages before the end of the process


def read_webhook(file: str | None) -> str | None:
    """Return the address in the file of --webhook_file. An error does not repeat it: who has it may write."""
    if file is None:
        return None
    require(Path(file).is_file(), f"--webhook_file: there is no file '{file}'; write the address of the webhook to it")
    address = Path(file).read_text(encoding="utf-8-sig", errors="replace").strip()
    is_valid = re.fullmatch(r"https?://[^\s/@]+(/\S*)?", address) is not None
    example = "an address such as https://hooks.slack.com/services/…"
    require(is_valid, f"--webhook_file: '{file}' must have one line, {example}")
    return address


class Alerts:
    """Sends messages, each in a thread: no server holds up a peer.

    :param sender: who sends them, such as "monitor of run my-albert"
    """

    def __init__(self, file: str | None = None, sender: str = ""):
        self._address, self.sender = read_webhook(file) or "", sender
        self._sent: dict[str, tuple[float, threading.Thread]] = {}  # kind -> when, in which thread

    @property
    def is_on(self) -> bool:
        return bool(self._address)

    def send(self, kind: str, text: str) -> None:
        """Send a message, unless one of this kind was sent in the last hour."""
        now = time.monotonic()
        if not self.is_on or (kind in self._sent and now < self._sent[kind][0] + PAUSE_SECONDS):
            return
        message = f"{self.sender}: {text}"
        thread = threading.Thread(target=self._post, args=(kind, message), name="Alerts", daemon=True)
        self._sent[kind] = now, thread
        thread.start()

    def _post(self, kind: str, message: str) -> None:
        import requests  # some 0.2 s, which --help does not need

        body = {"text": message, "content": message, "kind": kind}  # Slack reads the first, Discord the second
        try:
            options = {"timeout": TIMEOUT, "allow_redirects": False, "stream": True}
            with requests.post(self._address, json=body, **options) as answer:
                fault = None if 200 <= answer.status_code < 300 else f"it answers {answer.status_code}"
        except (requests.RequestException, ValueError) as error:  # whose text has the address
            fault = type(error).__name__
        if fault is not None:
            logger.warning(f"Could not send '{kind}' to the webhook of --webhook_file: {fault}")

    def close(self) -> None:
        """Wait for the messages on their way, TIMEOUT seconds at most."""
        deadline = time.monotonic() + TIMEOUT
        for _, thread in self._sent.values():
            thread.join(max(0.0, deadline - time.monotonic()))


@contextlib.contextmanager
def announced_end(alerts: Alerts, is_stopped: Callable[[], bool]) -> Iterator[None]:
    """Send a message if the block ends by an error that another start does not cure, or by itself.

    :param is_stopped: whether somebody has asked for the end
    """
    try:
        yield
    except Exception as error:
        if not is_temporary(error):
            alerts.send("end", f"stopped for good: {describe(error)}")
        raise
    else:
        if not is_stopped():
            alerts.send("end", "ended: the run, or its part in it, is complete")
    finally:
        alerts.close()
