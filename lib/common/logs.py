"""The log on stderr: one format for hivemind's lines and ours."""

import logging
import os
import sys
import threading
import warnings

from hivemind.utils.logging import use_hivemind_log_handler
from tqdm import tqdm


class AboveProgressBar:
    """A stream for the log that does not tear a progress bar apart."""

    def write(self, text: str) -> None:
        tqdm.write(text, file=sys.stderr, end="")

    def flush(self) -> None:
        sys.stderr.flush()


def _renew_tqdm_lock() -> None:
    """A thread of the parent may have held the lock at the moment of the fork; it would never be released here."""
    tqdm.set_lock(threading.RLock())


class OneLineFilter(logging.Filter):
    """Makes one line of warning of what hivemind logs as an error with a traceback: that a round of averaging failed,
    a peer went away. With volunteers this happens all the time, and it carries on by itself."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name.startswith("hivemind.") and record.exc_info:
            record.exc_info, record.levelno, record.levelname = None, logging.WARNING, "WARN"
            record.msg = " ".join(f"{record.getMessage()}".split()) or "an operation failed"
            record.args = ()
        return True


def setup_logging(debug: bool = False) -> None:
    """One format for hivemind's log and ours, on stderr, above a progress bar if there is one."""
    use_hivemind_log_handler("in_root_logger")
    logging.getLogger().setLevel(logging.DEBUG if debug else logging.INFO)
    for noisy in ("httpx", "httpcore", "urllib3", "filelock", "matplotlib", "datasets", "fsspec"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr and sys.stderr.isatty():
            handler.setStream(AboveProgressBar())
            os.register_at_fork(after_in_child=_renew_tqdm_lock)
    # hivemind sets the schedule to the step of a state that it has loaded, without a step of the optimizer
    warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step\\(\\)` before")
    if not debug:
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # tasks of a peer that leaves
        for handler in logging.getLogger().handlers:
            handler.addFilter(OneLineFilter())
