"""The model between two threads: the main one computes with it, the step thread has new parameters for it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from peerstep.step.accumulators import GradientAccumulator
from peerstep.step.local_updates import LocalTraining


class SharedModel:
    """Gives the model the parameters of each global step, at a time that suits the main thread.

    :param accumulator: has both, the parameters of the model and those of the last global step
    """

    def __init__(self, accumulator: GradientAccumulator | LocalTraining):
        self.accumulator = accumulator
        self.has_update = False  # whether the offloaded parameters are newer than the model's
        self.is_broken = False  # whether the offloaded parameters are not finite
        self.step_lock = threading.RLock()  # held by the step thread from the start of a step to its end
        self.update_lock = threading.RLock()  # held while parameters and statistics change or are copied

    def apply_update(self) -> None:
        """Copy the offloaded parameters to the model, if they are newer."""
        if self.has_update:
            with self.update_lock:
                self.has_update = False
                self.accumulator.rebase()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Keep model, parameters and optimizer statistics at one step, with no step running."""
        with self.step_lock, self.update_lock:
            self.apply_update()
            yield

    @contextmanager
    def saved(self) -> Iterator[list[torch.Tensor] | None]:
        """See CollaborativeOptimizer.saved_state."""
        with self.update_lock:
            self.apply_update()
            with self.accumulator.set_aside() as unsent:
                yield unsent
