"""The backup of a trainer: its newest sound training state, to return to when the parameters break."""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from hivemind.utils import get_logger

from lib.training.checkpoints import TrainingState, load_training_state, save_training_state

logger = get_logger(__name__)


class BackupWriter:
    """Keeps the newest good training state in a file, written by a thread of its own."""

    def __init__(self, path: Path, run_id: str):
        self.path, self.run_id = path, run_id
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="BackupWriter")
        self._pending: Future | None = None

    def write(self, metadata: dict, tensors: list[torch.Tensor]) -> None:
        """Write in the background; skipped while the previous backup is still being written."""
        if self._pending is None or self._pending.done():
            self._pending = self._executor.submit(self._write, TrainingState(self.run_id, metadata, tensors))

    def _write(self, state: TrainingState) -> None:
        try:
            save_training_state(self.path, state)
        except Exception as error:
            logger.error(f"Could not write the backup {self.path} ({error}); the one before it stays")

    def read(self) -> TrainingState | None:
        """The backup, or None if there is none that can be read."""
        if self._pending is not None:
            self._pending.result()
        if not self.path.exists():
            return None
        try:
            return load_training_state(self.path, self.run_id)
        except ValueError as error:
            logger.warning(f"Skipping the backup: {error}")
            return None

    def close(self) -> None:
        self._executor.shutdown(wait=True)
