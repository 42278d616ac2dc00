"""Callback that connects transformers' Trainer to the collaboration."""

from hivemind.utils import get_logger
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cotrain.training.session import TrainingSession

logger = get_logger(__name__)


class CollaborativeCallback(TrainerCallback):
    """Joins the collaboration when training begins, reports to it after each local step, and saves checkpoints.

    :param session: this peer's session. Training stops when its `after_local_step` returns False
    """

    def __init__(self, session: TrainingSession):
        self.session = session

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        self.session.join()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        control.should_training_stop = not self.session.after_local_step()
        if control.should_training_stop or state.global_step % args.save_steps == 0:
            self.session.recovery.save_checkpoint()
        return control

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs=None, **kwargs):
        if logs and "loss" in logs:
            logger.info(f"Local step {state.global_step}: loss = {logs['loss']:.5f}")
