"""The log on stderr: one format for hivemind's lines and ours, and hints what to do about a warning."""

import contextlib
import logging
import os
import sys
import threading
import warnings

from hivemind.utils.logging import use_hivemind_log_handler
from tqdm import tqdm

from lib.common.diagnosis import next_hint

logger = logging.getLogger(__name__)


class TqdmLogStream:
    """Log stream on stderr that writes above a tqdm progress bar."""

    def write(self, text: str) -> None:
        tqdm.write(text, file=sys.stderr, end="")

    def flush(self) -> None:
        sys.stderr.flush()


def _renew_tqdm_lock() -> None:
    """Replace tqdm's lock in a forked process: a thread of the parent may have held it during the fork."""
    tqdm.set_lock(threading.RLock())


class TracebackFilter(logging.Filter):
    """Turns hivemind's errors with a traceback into warnings of one line.

    hivemind logs them when a round fails or a peer leaves. This is common with volunteers, and training continues.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name.startswith("hivemind.") and record.exc_info:
            record.exc_info, record.levelno, record.levelname = None, logging.WARNING, "WARN"
            record.msg = " ".join(f"{record.getMessage()}".split()) or "an operation failed"
            record.args = ()
        return True


class HintHandler(logging.Handler):
    """Logs what to do about a warning or an error, once for each row of lib/common/diagnosis.py."""

    def __init__(self):
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(Exception):  # a hint must not end what it is about
            hint = next_hint(record.getMessage())
            if hint is not None:
                logger.info(hint)


def setup_logging(debug: bool = False) -> None:
    """Log to stderr with one format for hivemind's lines and ours, above a progress bar if there is one.

    The first warning or error of each known kind is followed by what to do about it.

    :param debug: log debug messages, and keep the tracebacks of hivemind's errors
    """
    use_hivemind_log_handler("in_root_logger")
    logging.getLogger().setLevel(logging.DEBUG if debug else logging.INFO)
    for noisy in ("httpx", "httpcore", "urllib3", "filelock", "matplotlib", "datasets", "fsspec"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr and sys.stderr.isatty():
            handler.setStream(TqdmLogStream())
            os.register_at_fork(after_in_child=_renew_tqdm_lock)
    # After loading a state, hivemind steps the schedule without a step of the optimizer.
    warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step\\(\\)` before")
    if not debug:
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # errors of pending tasks while a peer leaves
        for handler in logging.getLogger().handlers:
            handler.addFilter(TracebackFilter())
    logging.getLogger().addHandler(HintHandler())  # after the handler that prints the message
