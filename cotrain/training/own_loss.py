"""Whether the run's model helps this trainer: its loss on the held-out part of --own_data."""

import math
import time

import torch
from accelerate.utils import send_to_device
from hivemind.utils import get_logger

from cotrain.dht.metrics_schema import MAX_NUMBER
from cotrain.task import Task
from peerstep.optimizer import CollaborativeOptimizer

logger = get_logger(__name__)

MAX_SAMPLES = 32  # one at a time, so it needs no more memory than training
# Of the first measurement, before the trainer joins; the later ones have its samples. With local updates, a round that
# begins during one waits for it.
MAX_SECONDS = 20.0
REST = 50.0  # times as long as it took, until it is measured again: 2 % of the time


class OwnLoss:
    """Loss of the newest global step on a task's validation samples; `base`: of the initial weights.

    :param dtype: of autocast, as in training: flash attention takes no float32
    """

    def __init__(
        self, task: Task, model: torch.nn.Module, optimizer: CollaborativeOptimizer, dtype: torch.dtype | None
    ):
        samples = task.load_samples("validation")
        self.samples = [samples[n] for n in range(min(len(samples), MAX_SAMPLES))]
        self.task, self.model, self.optimizer, self.dtype = task, model, optimizer, dtype
        self.base = math.nan  # until it is measured
        self.newest = 0.0
        self._due_at = 0.0  # `time.monotonic`

    def measure(self) -> bool:
        """Measure the loss, and return True, if it is time. The first time the model has the initial weights."""
        began = time.monotonic()
        if began < self._due_at:
            return False
        with self.optimizer.saved_state(), self.optimizer.tracker.pause_updates():
            self.newest = self._compute(began + MAX_SECONDS if math.isnan(self.base) else math.inf)
        self.base = self.newest if math.isnan(self.base) else self.base
        self._due_at = time.monotonic() + REST * (time.monotonic() - began)
        logger.info(f"Loss on your own held-out samples: {self.newest:.5f}, {self.base:.5f} before training")
        return True

    def _compute(self, end: float) -> float:
        total = count = 0.0
        device = next(self.model.parameters()).device
        autocast = torch.autocast(device.type, dtype=self.dtype, enabled=self.dtype is not None)
        with torch.no_grad(), autocast, torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)  # masks are the same each time; a GPU's dropout is not
            self.model.eval()
            for number, sample in enumerate(self.samples, 1):
                batch = send_to_device(self.task.collate([sample]), device)
                if weight := float(self.task.weigh(batch)):
                    total += weight * float(self.task.compute_loss(self.model, batch))
                    count += weight
                if time.monotonic() > end:
                    del self.samples[number:]
        self.model.train()
        return max(-MAX_NUMBER, min(MAX_NUMBER, total / max(1.0, count)))  # a broken model's NaN is MAX_NUMBER
