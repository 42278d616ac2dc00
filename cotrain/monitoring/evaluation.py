"""Evaluation of a task's metrics on the validation split, with the same samples and random numbers each time."""

import copy
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import send_to_device
from hivemind.utils import get_logger
from tqdm import tqdm

from cotrain.common.backoff import Backoff
from cotrain.dht.metrics_schema import MAX_NUMBER
from cotrain.models.model import find_device
from cotrain.monitoring.aggregation import FRESH_SECONDS, MAX_SPREAD
from cotrain.monitoring.reporters import Reporters
from cotrain.task import Task
from cotrain.tasks.task_loading import load_samples
from peerstep import records as dht_records
from peerstep.clock import run_time
from peerstep.progress_record import read_progress
from peerstep.state import TrainingStateAverager
from peerstep.swarm import Swarm

logger = get_logger(__name__)

MAX_DOWNLOAD_PAUSE = 60.0  # seconds between two attempts to download a state


class Evaluator:
    """Evaluates models of a task on its first validation samples, until `should_stop`."""

    def __init__(self, task: Task, should_stop: Callable[[], bool], args):
        self.task, self.should_stop, self.args = task, should_stop, args
        self.samples = load_samples(task, "validation")
        self.num_samples = min(len(self.samples), args.max_eval_samples or len(self.samples))
        self.device = find_device(args.use_cpu)

    def evaluate(self, model: torch.nn.Module, step: int) -> dict[str, float] | None:
        """Return the metrics of a copy of a model; None if `should_stop` ended it."""
        frozen = {id(parameter): parameter for parameter in model.parameters() if not parameter.requires_grad}
        model = copy.deepcopy(model, frozen).to(self.device).eval()  # a frozen base is not copied
        batch_size, sums, counts = self.args.per_device_eval_batch_size, defaultdict(float), Counter()
        starts = range(0, self.num_samples, batch_size)
        hide_bar = self.args.disable_tqdm or None
        with torch.inference_mode(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # a task may be random; the numbers are the same each time
            for start in tqdm(starts, desc=f"Evaluating step #{step}", leave=False, disable=hide_bar):
                if self.should_stop():
                    return None
                batch = [self.samples[index] for index in range(start, min(start + batch_size, self.num_samples))]
                metrics = self.task.evaluate(model, send_to_device(self.task.collate(batch), self.device))
                for name, value in metrics.items():
                    mean, count = value if isinstance(value, tuple) else (value, len(batch))
                    sums[name] += float(mean) * count
                    counts[name] += count
        metrics = self.task.summarize({name: value / max(1, counts[name]) for name, value in sums.items()})
        # In this order also NaN, which a broken model has, is MAX_NUMBER.
        return {name: max(-MAX_NUMBER, min(MAX_NUMBER, float(value))) for name, value in metrics.items()}


@dataclass
class EvaluationLoop:
    """Periodically downloads the training state from trainers, evaluates it, and reports the result."""

    peer: Swarm
    run_id: str
    averager: TrainingStateAverager  # of an observer, around `model`; it offers no state and joins no group
    model: torch.nn.Module
    evaluator: Evaluator
    reporter: Reporters
    args: Any  # EvaluatorArguments of run_evaluator.py
    evaluated_step: int = 0  # the initial weights are not evaluated

    def __post_init__(self):
        self._next_time = float("-inf")
        self._donor = ""  # the peer ID of the newest donor
        self.averager.must_agree = True
        self._last_step = self.args.max_global_steps or float("inf")
        self._backoff = Backoff(first=self.args.refresh_period, longest=MAX_DOWNLOAD_PAUSE)

    def refresh(self) -> None:
        """Read the trainers' progress, and evaluate if an evaluation is due."""
        if self._is_due(self._find_step()) and self._backoff.is_over:
            self._evaluate()

    def _find_step(self) -> int:
        """Return the step of the slower half of the trainers that are heard, 0 without trainers.

        One false claim does not change it: those far behind the evaluated step, such as 0, do not count. If all are
        behind it, the run has gone back.
        """
        records = dht_records.get_records(self.peer.dht, f"{self.run_id}_training_progress")
        proven = [peer for peer in records if str(peer) == self._donor]
        trainers, now = list(read_progress(records, proven).values()), run_time()
        heard = [progress for progress in trainers if now - progress.reported_at <= FRESH_SECONDS] or trainers
        epochs = [progress.epoch for progress in heard]
        newest = max(epochs, default=0)
        if 0 < newest < self.evaluated_step:
            self.evaluated_step = newest - 1
        earliest = max(1, self.evaluated_step - MAX_SPREAD)
        steps = [epoch for epoch in epochs if epoch >= earliest]
        return statistics.median_low(steps) if steps else 0

    @property
    def is_done(self) -> bool:
        return self.evaluated_step >= self._last_step

    def _is_due(self, step: int) -> bool:
        new_steps, is_last = step - self.evaluated_step, step >= self._last_step
        if self.args.evaluation_steps is not None:
            return new_steps >= self.args.evaluation_steps or (is_last and new_steps > 0)
        return new_steps > 0 and (is_last or time.monotonic() >= self._next_time)

    def _evaluate(self) -> None:
        started = time.monotonic()
        downloaded = self.averager.download_state(min_step=self.evaluated_step + 1)
        if downloaded is None:
            pause = self._backoff.fail()
            logger.warning(f"No trainer offers a state that most others have; trying again in {pause:.0f} seconds")
            return
        self._backoff.reset()
        donor, metadata, tensors = downloaded
        self.averager.restore(metadata, tensors)
        self._donor = donor
        step = self.averager.local_epoch
        metrics = self.evaluator.evaluate(self.model, step)
        if metrics is None:
            return
        self.evaluated_step = step
        self._next_time = started + self.args.evaluation_interval
        self.reporter.report_evaluation(step, metrics, f"\t({time.monotonic() - started:.1f} s, from {donor})")
