"""Log of a peer's rounds: `rounds.jsonl` in its output folder, with one JSON line per round."""

import json
import logging
from logging.handlers import RotatingFileHandler
from pathlib import Path

from hivemind.utils import get_logger

from cotrain.averaging.rounds import RoundResult

logger = get_logger(__name__)

MAX_LOG_BYTES = 16 * 2**20


class _QuietHandler(RotatingFileHandler):
    """Handler that warns if it cannot write the file: a full disk costs log lines, and training continues."""

    def handleError(self, record: logging.LogRecord) -> None:
        logger.warning(f"Cannot write {self.baseFilename}")


class RoundLog:
    """Log with one JSON line per round, in a file that is rotated at 16 MiB."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self._handler = _QuietHandler(folder / "rounds.jsonl", maxBytes=MAX_LOG_BYTES, backupCount=1, delay=True)

    def write(self, entry: dict) -> None:
        line = json.dumps(entry)
        self._handler.handle(logging.LogRecord("rounds", logging.INFO, "", 0, line, None, None))


def describe_round(result: RoundResult | None) -> dict:
    """Return the result of a round as fields of the round log; peer IDs in base58."""
    result = result or RoundResult(members=[], received=0.0, weights={})
    return {
        "group": [str(peer_id) for peer_id in result.members],
        "weights": {str(peer_id): weight for peer_id, weight in result.weights.items()},
        "received": round(result.received, 4),
        "missed": {str(peer_id): why for peer_id, why in result.missed.items()},
        "violations": {str(peer_id): why for peer_id, why in result.violations.items()},
        "seconds": result.seconds,
    }
