"""Backup of a trainer's newest finite training state, for a rollback when its parameters become NaN or Inf."""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from hivemind.utils import get_logger

from lib.training.checkpoints import TrainingState, load_training_state, save_training_state

logger = get_logger(__name__)


class BackupWriter:
    """Saves the newest finite training state to a file, in a background thread.

    :param path: the file
    :param run_id: stored with the state; a backup of another run is not read
    """

    def __init__(self, path: Path, run_id: str):
        self.path, self.run_id = path, run_id
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="BackupWriter")
        self._pending: Future | None = None

    def write(self, metadata: dict, tensors: list[torch.Tensor]) -> None:
        """Save a state in the background; skip it while the previous backup is still being written.

        :param metadata, tensors: see TrainingState
        """
        if self._pending is None or self._pending.done():
            self._pending = self._executor.submit(self._write, TrainingState(self.run_id, metadata, tensors))

    def _write(self, state: TrainingState) -> None:
        try:
            save_training_state(self.path, state)
        except Exception as error:
            logger.error(f"Could not write the backup {self.path} ({error}); keeping the previous one")

    def read(self) -> TrainingState | None:
        """Load the newest backup, after a pending write has ended.

        :returns: None if there is no readable backup of this run
        """
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
