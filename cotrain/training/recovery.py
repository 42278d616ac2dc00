"""The checkpoints of a trainer, and its return to a valid state from NaN and Inf."""

import time
from pathlib import Path

import torch
from hivemind.utils import get_logger

from cotrain.common.errors import UserError, first_line
from cotrain.models.device import supports_bf16
from cotrain.options import TrainerOptions
from cotrain.task import Task
from cotrain.training import checkpoints
from cotrain.training.checkpoints import SavedState
from cotrain.training.hf_trainer import autocast_dtype
from peerstep.optimizer import CollaborativeOptimizer
from peerstep.state.layout import StateLoadError, all_finite

logger = get_logger(__name__)

MAX_ATTEMPTS = 3  # rollbacks without a global step in between
SKIPPED_STEPS = 50  # local steps without finite gradients, after which a peer says what to do; GradScaler says nothing


class Recovery:
    """Writes checkpoints, and finds parameters and gradients that are not finite.

    :ivar attempts: rollbacks since the last global step
    """

    def __init__(self, optimizer: CollaborativeOptimizer, task: Task, model: torch.nn.Module, args: TrainerOptions):
        self.optimizer, self.task, self.model, self.args = optimizer, task, model, args
        self.folder = Path(args.training.output_dir)
        self.attempts = 0
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._versions: list[int] = []  # of their values, as torch counts changes
        self._num_skipped = 0  # local steps since the last one that counts

    def resume(self) -> list[torch.Tensor] | None:
        """Restore the newest checkpoint; return its unsent updates alone: a download needs the memory of the state."""
        state = self._restore()
        return None if state is None else state.unsent

    def _restore(self) -> SavedState | None:
        run_id = self.args.collaboration.run_id
        return checkpoints.restore_newest(self.folder, run_id, self.optimizer.state_averager)

    def save_checkpoint(self) -> None:
        """Write a checkpoint of the current global step; log an error if that fails."""
        with self.optimizer.saved_state() as unsent, self.optimizer.state_averager.frozen_state() as content:
            state = SavedState(self.args.collaboration.run_id, *content, unsent)
            try:
                info = {"time": time.time(), "last_step": self.args.training.last_step}
                path = checkpoints.save_checkpoint(self.folder, self.task, self.model, state, info)
                checkpoints.rotate_checkpoints(path, self.args.training.save_total_limit)
            except Exception as error:  # on a full disk, torch and safetensors raise errors of their own
                logger.error(
                    f"Could not save a checkpoint: {first_line(error)}. Training continues, keeping the previous "
                    "checkpoint"
                )

    def record_local_step(self, counts: bool) -> None:
        """Warn if no local step counts because the gradients overflow."""
        self._num_skipped = 0 if counts else self._num_skipped + 1
        if self._num_skipped and self._num_skipped % SKIPPED_STEPS == 0:
            device = self._trained[0].device
            remedy = "check the data, and lower --learning_rate on all peers"
            if autocast_dtype(self.args.training, device) == torch.float16:
                remedy = "they overflow in fp16. Pass " + ("--bf16" if supports_bf16(device) else "--fp32")
            logger.warning(
                f"None of the last {self._num_skipped} local steps had finite gradients: {remedy}. This peer "
                "contributes nothing until then"
            )

    def is_needed(self) -> bool:
        """Whether parameters that have changed since the last call are NaN or Inf: reading them waits for the GPU."""
        last, self._versions = self._versions, [parameter._version for parameter in self._trained]  # noqa: SLF001
        return self._versions != last and not all_finite(self._trained)

    def roll_back(self) -> bool:
        """Roll back NaN or Inf parameters to the peers' state or to the last checkpoint, whichever is newer.

        :returns: False if it was enough to drop local updates, which leaves the global step as it is
        :raises UserError: if there is no valid state, or after MAX_ATTEMPTS rollbacks without a global step
        """
        self.attempts += 1
        logger.error("The parameters are not finite")
        if self.attempts <= MAX_ATTEMPTS and self.optimizer.discard_local_updates():
            logger.info(f"Went back to the parameters of step #{self.optimizer.local_epoch}")
            return False
        with self.optimizer.frozen_state():
            own = self._restore()
            newest = self.optimizer.state_averager.download_state(min_step=0 if own is None else own.step)
            if newest is None and own is not None:
                newest = "the last checkpoint", own.metadata, own.tensors
            if newest is None or self.attempts > MAX_ATTEMPTS:
                raise UserError(
                    "the parameters are not finite and there is no valid state to roll back to: lower "
                    "--learning_rate or --max_grad_norm, remove the checkpoints in --output_dir, and start again"
                )
            source, metadata, tensors = newest
            try:
                self.optimizer.restore(metadata, tensors)
            except StateLoadError as error:
                raise UserError(f"the state from {source} does not fit this model: {error}") from None
        logger.info(f"Rolled back to the state of step #{self.optimizer.local_epoch} from {source}")
        return True
