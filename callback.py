"""transformers' Trainer as a member of the collaboration."""

from hivemind.utils import get_logger
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from lib.training.session import TrainingSession

logger = get_logger(__name__)


class CollaborativeCallback(TrainerCallback):
    """Calls a session at the Trainer's events: at the begin of training and after each local step.

    :param session: of this peer; training ends when it says so
    """

    def __init__(self, session: TrainingSession):
        self.session = session

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        self.session.join()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        if not self.session.after_local_step():
            control.should_training_stop = control.should_save = True
        return control

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs=None, **kwargs):
        if logs and "loss" in logs:
            logger.info(f"Local step {state.global_step}: loss = {logs['loss']:.5f}")
