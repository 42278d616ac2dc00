"""Evaluation of a task's metrics on the validation split, with the same samples and random numbers each time."""

import copy
import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from hivemind.utils import get_logger

from cotrain.common.atomic_files import new_folder
from cotrain.common.backoff import Backoff
from cotrain.common.errors import UserError, first_line
from cotrain.common.json_file import JsonFile, write_json
from cotrain.common.progress_bar import ProgressBar
from cotrain.dht.metrics_schema import MAX_NUMBER
from cotrain.models.device import find_device
from cotrain.monitoring.aggregation import FRESH_SECONDS, MAX_SPREAD
from cotrain.monitoring.reporters import Reporters
from cotrain.task import Task
from cotrain.tasks.task_loading import load_samples
from cotrain.training.checkpoints import write_model
from cotrain.training.device_errors import is_out_of_memory
from peerstep.local_peer import LocalPeer
from peerstep.peer.clock import run_time
from peerstep.reports import records as dht_records
from peerstep.reports.progress_report import read_progress
from peerstep.state.averager import TrainingStateAverager

logger = get_logger(__name__)

BEST_FOLDER = "best"  # in the output folder: the model with the lowest validation loss
_EVALUATION = "evaluation.json"  # in that folder
MAX_DOWNLOAD_PAUSE = 60.0  # seconds between two attempts to download a state


class Evaluator:
    """Evaluates models of a task on its first validation samples, until `should_stop`."""

    def __init__(
        self,
        task: Task,
        should_stop: Callable[[], bool] = bool,
        max_samples: int | None = None,
        batch_size: int | None = None,
        use_cpu: bool = False,
        disable_tqdm: bool = False,
    ):
        self.task, self.should_stop, self.disable_tqdm = task, should_stop, disable_tqdm
        self.samples = load_samples(task, "validation")
        self.num_samples = min(len(self.samples), max_samples or len(self.samples))
        self.device = find_device(use_cpu)
        self.batch_size = batch_size or task.eval_batch_size()

    def try_batch(self, model: torch.nn.Module) -> None:
        """Evaluate one batch of a model, so that a lack of memory shows at the start; UserError if it does."""
        num_samples, self.num_samples = self.num_samples, min(self.num_samples, self.batch_size)
        try:
            self.evaluate(model, 0)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            remedy = f"pass a smaller --per_device_eval_batch_size than {self.batch_size}, or --use_cpu"
            raise UserError(f"the GPU has no memory for a batch of the evaluation: {remedy}") from None
        finally:
            self.num_samples = num_samples

    def evaluate(self, model: torch.nn.Module, step: int) -> dict[str, float] | None:
        """Return the metrics of a copy of a model; None if `should_stop` ended it."""
        frozen = {id(parameter): parameter for parameter in model.parameters() if not parameter.requires_grad}
        model = copy.deepcopy(model, frozen).to(self.device).eval()  # a frozen base is not copied
        batch_size, sums, counts = self.batch_size, defaultdict(float), Counter()
        starts = range(0, self.num_samples, batch_size)
        with torch.inference_mode(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # a task may be random; the numbers are the same each time
            options: dict = {"desc": f"Evaluating step #{step}", "leave": False, "disable": self.disable_tqdm}
            for start in ProgressBar(starts, **options):
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


@dataclass(frozen=True)
class Schedule:
    """When to evaluate: every `interval` seconds, or every `steps` global steps, until `last_step`."""

    interval: float = 300.0
    steps: int | None = None
    last_step: float = math.inf


@dataclass
class EvaluationLoop:
    """Periodically downloads the training state from trainers, evaluates it, and reports the result."""

    peer: LocalPeer
    averager: TrainingStateAverager  # of an observer, around `model`; it offers no state and joins no group
    model: torch.nn.Module
    evaluator: Evaluator
    reporter: Reporters
    best: "BestModel"
    schedule: Schedule
    refresh_period: float  # seconds between two calls of `refresh`
    evaluated_step: int = 0

    def __post_init__(self):
        self.next_time = float("-inf")
        self._donor = ""  # the peer ID of the newest donor
        self.averager.must_agree = True
        self._backoff = Backoff(first=self.refresh_period, longest=MAX_DOWNLOAD_PAUSE)
        self._heard_at = time.monotonic()  # when a trainer was heard last
        self._base: dict[str, float] | None = None  # metrics by the names of their curves

    def evaluate_base(self) -> None:
        """Evaluate the initial weights, unless an earlier evaluator of this folder did."""
        started = time.monotonic()
        if self.reporter.base_evaluation() is None:
            if (metrics := self.evaluator.evaluate(self.model, 0)) is None:
                return
            self.reporter.report_evaluation(0, metrics, f"\t({time.monotonic() - started:.1f} s)")
        self._base = self.reporter.base_evaluation()

    def refresh(self) -> None:
        """Read the trainers' progress, and evaluate if an evaluation is due."""
        if self._is_due(self._find_step()) and self._backoff.is_over:
            self.evaluate_newest()

    def _find_step(self) -> int:
        """Return the step of the slower half of the trainers that are heard, 0 without any; see `_find_saved_steps`.

        One false claim does not change it: those far behind the evaluated step, such as 0, do not count. If all are
        behind it, the run has gone back.
        """
        records = dht_records.get_records(self.peer.dht, f"{self.peer.run_id}_training_progress")
        proven = [peer for peer in records if str(peer) == self._donor]
        trainers, now = list(read_progress(records, proven).values()), run_time()
        heard = [progress for progress in trainers if now - progress.reported_at <= FRESH_SECONDS] or trainers
        if heard:
            self._heard_at = time.monotonic()
        epochs = [progress.epoch for progress in heard] or self._find_saved_steps()
        newest = max(epochs, default=0)
        if 0 < newest < self.evaluated_step:
            self.evaluated_step = newest - 1
        earliest = max(1, self.evaluated_step - MAX_SPREAD)
        steps = [epoch for epoch in epochs if epoch >= earliest]
        return statistics.median_low(steps) if steps else 0

    def _find_saved_steps(self) -> list[int]:
        """Return the later steps that monitors offer, if no trainer has been heard for some time."""
        if time.monotonic() < self._heard_at + 3 * self.refresh_period:
            return []
        statuses = dht_records.get_records(self.peer.dht, f"{self.peer.run_id}_monitor").values()
        steps = (status.value["checkpoint_step"] for status in statuses)
        return [step for step in steps if step > self.evaluated_step]

    @property
    def is_done(self) -> bool:
        return self.evaluated_step >= self.schedule.last_step

    def _is_due(self, step: int) -> bool:
        new_steps, is_last = step - self.evaluated_step, step >= self.schedule.last_step
        if self.schedule.steps is not None:
            return new_steps >= self.schedule.steps or (is_last and new_steps > 0)
        return new_steps > 0 and (is_last or time.monotonic() >= self.next_time)

    def evaluate_newest(self) -> None:
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
        if self.evaluator.device.type != "cpu":
            torch.accelerator.empty_cache()  # for a game, or a trainer beside it, until the next one
        if metrics is None:
            return
        self.evaluated_step = step
        self.next_time = started + self.schedule.interval
        remark = f"\t({time.monotonic() - started:.1f} s, from {donor})"
        self.reporter.report_evaluation(step, metrics, remark, self._base)
        self.best.update(step, metrics.get("loss"), self.evaluator.task, self.model)
        if self.best.lowest is not None:
            self.reporter.report_table("best checkpoint", ("step", "validation loss"), [self.best.lowest], step)


def _parse_evaluation(content: Any) -> tuple[int, float]:
    return int(content["step"]), float(content["loss"])


class BestModel:
    """Keeps the model with the lowest validation loss in a folder.

    :param patience: evaluations without a lower loss, after which a warning is logged
    """

    def __init__(self, folder: Path, patience: int):
        self.folder, self.patience = folder, patience
        self.lowest = JsonFile(folder / _EVALUATION).load(_parse_evaluation)  # step and loss
        self._num_worse = 0  # evaluations since then

    def update(self, step: int, loss: float | None, task: Task, model: torch.nn.Module) -> None:
        """Keep the model of a step if its validation loss is the lowest so far; log an error if that fails."""
        if loss is None:
            return
        if self.lowest is not None and loss >= self.lowest[1]:
            self._num_worse += 1
            if self._num_worse % self.patience == 0:
                what = f"has not fallen for {self._num_worse} evaluations: it was lowest at step #{self.lowest[0]}"
                logger.warning(f"The validation loss {what}, {self.lowest[1]:.5f}; that model is in '{self.folder}'")
            return
        self.lowest, self._num_worse = (step, loss), 0
        try:
            with new_folder(self.folder, "--output_dir", overwrite=True, replaceable=(_EVALUATION,)) as temporary:
                write_model(temporary, task, model)
                write_json(temporary / _EVALUATION, {"step": step, "loss": loss})
        except Exception as error:  # on a full disk, torch and safetensors raise errors of their own
            logger.error(f"Could not keep the best model so far in '{self.folder}': {first_line(error)}")
