"""The log on stderr: one format for hivemind's lines and ours, and hints what to do about a warning."""

import contextlib
import logging
import os
import sys
import threading
import warnings

from hivemind.utils.logging import use_hivemind_log_handler
from tqdm import tqdm
from tqdm.contrib import DummyTqdmFile

from cotrain.common.diagnosis import next_hint

logger = logging.getLogger(__name__)


class TracebackFilter(logging.Filter):
    """Turns hivemind's errors with a traceback, such as of a failed round, into warnings of one line."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name.startswith("hivemind.") and record.exc_info:
            record.exc_info, record.levelno, record.levelname = None, logging.WARNING, "WARN"
            record.msg = " ".join(f"{record.getMessage()}".split()) or "an operation failed"
            record.args = ()
        return True


class HintHandler(logging.Handler):
    """Logs what to do about a warning or an error, once for each row of cotrain/common/messages.md."""

    def __init__(self):
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(Exception):  # a failing hint must not break logging
            if (hint := next_hint(record.getMessage())) is not None:
                logger.info(hint)


def setup_logging(debug: bool = False) -> None:
    """Set up the log of this process. A second call changes nothing: a trainer logs while it reads its run's settings.

    :param debug: log debug messages, and keep the tracebacks of hivemind's errors
    """
    if any(isinstance(handler, HintHandler) for handler in logging.getLogger().handlers):
        return
    use_hivemind_log_handler("in_root_logger")
    logging.getLogger().setLevel(logging.DEBUG if debug else logging.INFO)
    logging.getLogger("huggingface_hub").handlers.clear()  # it would print each line twice
    # hivemind's daemon says at each try to join that it checks the identity.
    for noisy in (
        "httpx", "httpcore", "urllib3", "filelock", "matplotlib", "datasets", "fsspec", "hivemind.p2p.p2p_daemon",
    ):  # fmt: skip
        logging.getLogger(noisy).setLevel(logging.WARNING)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr and sys.stderr.isatty():
            handler.setStream(DummyTqdmFile(sys.stderr))  # writes above a progress bar
            # A thread of the parent may hold tqdm's lock during a fork.
            os.register_at_fork(after_in_child=lambda: tqdm.set_lock(threading.RLock()))
    # After loading a state, hivemind steps the schedule without a step of the optimizer.
    warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step\\(\\)` before")
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")  # which peft reads
    if not debug:
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # errors of pending tasks while a peer leaves
        for handler in logging.getLogger().handlers:
            handler.addFilter(TracebackFilter())
    logging.getLogger().addHandler(HintHandler())  # after the handler that prints the message
