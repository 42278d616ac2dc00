"""Evaluation on the validation split: loss, accuracy and perplexity of a model, with the same samples and masks each
time."""

import copy
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import datasets
import torch
from hivemind.utils import get_logger
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import PreTrainedModel

from cotrain.averaging.state import TrainingStateAverager
from cotrain.common.backoff import Backoff
from cotrain.dht import run_records
from cotrain.dht.run_records import Evaluation
from cotrain.models.model import get_objective
from cotrain.models.objectives import OBJECTIVES, Objective
from cotrain.monitoring.aggregation import MAX_SPREAD
from cotrain.monitoring.parsing import parse_progress
from cotrain.monitoring.reporters import Reporters
from cotrain.peer.peer import Peer

logger = get_logger(__name__)

MAX_PAUSE = 60.0  # seconds between two attempts to download a state
LIFETIME = 3600.0  # seconds; of an evaluation in the DHT


@dataclass
class MetricSum:
    """Sums over batches."""

    loss: float = 0.0
    correct: int = 0
    count: int = 0

    def add(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """:param logits: [..., classes]; :param labels: [...], -100 where there is nothing to predict"""
        logits, labels = logits.flatten(end_dim=-2), labels.flatten()
        logits, labels = logits[labels != -100].float(), labels[labels != -100]
        self.loss += cross_entropy(logits, labels, reduction="sum").item()
        self.correct += int((logits.argmax(dim=-1) == labels).sum())
        self.count += len(labels)

    @property
    def mean_loss(self) -> float:
        return self.loss / max(1, self.count)

    @property
    def accuracy(self) -> float:
        return self.correct / max(1, self.count)


class Evaluator:
    """Evaluates models on the first samples of a dataset.

    :param dataset: the split "validation"
    :param collator: makes batches of samples, see `build_collator`
    :param should_stop: asked after each batch
    :param args: EvaluatorArguments of run_evaluator.py
    """

    def __init__(self, dataset: datasets.Dataset, collator: Callable, should_stop: Callable[[], bool], args):
        self.dataset = dataset.select(range(min(len(dataset), args.max_eval_samples or len(dataset))))
        self.collator, self.should_stop, self.args = collator, should_stop, args
        self.device = torch.device("cuda:0" if torch.cuda.is_available() and not args.use_cpu else "cpu")

    def evaluate(self, model: PreTrainedModel, step: int) -> Evaluation | None:
        """Evaluate a copy of a model; None if `should_stop` ended it.

        The loss is the mean over the predicted tokens, plus the mean over the samples for sentence order. Trainers
        report the same loss, except for their weighting of micro-batches.
        """
        model = copy.deepcopy(model).to(self.device).eval()
        objective = OBJECTIVES[get_objective(model.config)]
        indices = range(len(self.dataset))
        loader = DataLoader(indices, self.args.per_device_eval_batch_size, collate_fn=self._make_batch)
        tokens, order = MetricSum(), MetricSum()
        hide_bar = self.args.disable_tqdm or None
        with torch.inference_mode(), torch.random.fork_rng(devices=[]):
            for batch in tqdm(loader, desc=f"Evaluating step #{step}", leave=False, disable=hide_bar):
                if self.should_stop():
                    return None
                batch = {name: tensor.to(self.device) for name, tensor in batch.items()}
                _add(tokens, order, model(**batch), batch, objective)
        return _summarize(tokens, order, objective, step, samples=len(self.dataset))

    def _make_batch(self, indices: list[int]) -> dict[str, torch.Tensor]:
        """Collate samples. The masked tokens of a sample depend on its index only, not on its batch."""
        samples = []
        for index in indices:
            torch.manual_seed(index)
            samples.append(self.collator([self.dataset[index]]))
        padding = {"input_ids": self.collator.tokenizer.pad_token_id, "labels": -100}
        return {name: _stack([sample[name][0] for sample in samples], padding.get(name, 0)) for name in samples[0]}


def _stack(values: list[torch.Tensor], padding: int) -> torch.Tensor:
    """Stack the samples' values of a column: numbers, or sequences, which are padded to the longest one."""
    return pad_sequence(values, batch_first=True, padding_value=padding) if values[0].ndim else torch.stack(values)


def _add(tokens: MetricSum, order: MetricSum, outputs, batch: dict[str, torch.Tensor], objective: Objective) -> None:
    if objective.has_sentence_order:
        tokens.add(outputs.prediction_logits, batch["labels"])
        order.add(outputs.sop_logits, batch["sentence_order_label"])
    elif objective.is_causal:
        tokens.add(outputs.logits[:, :-1], batch["labels"][:, 1:])  # each token predicts the next
    else:
        tokens.add(outputs.logits, batch["labels"])


def _summarize(tokens: MetricSum, order: MetricSum, objective: Objective, step: int, samples: int) -> Evaluation:
    return Evaluation(
        step=step,
        samples=samples,
        # In this order also the loss of a broken model, NaN, is 1e9
        loss=min(1e9, tokens.mean_loss + order.mean_loss),
        perplexity=math.exp(min(20.0, tokens.mean_loss)) if objective.is_causal else None,
        mlm_accuracy=None if objective.is_causal else tokens.accuracy,
        sop_accuracy=order.accuracy if objective.has_sentence_order else None,
    )


class EvaluationLoop:
    """Periodically downloads the training state from trainers, evaluates it, and reports the result.

    :param averager: that of an observer, around `model`; it offers no state and joins no group
    :param args: EvaluatorArguments of run_evaluator.py
    """

    def __init__(
        self,
        peer: Peer,
        run_id: str,
        averager: TrainingStateAverager,
        model: PreTrainedModel,
        evaluator: Evaluator,
        reporter: Reporters,
        args,
    ):
        self.peer, self.run_id, self.averager, self.model = peer, run_id, averager, model
        self.evaluator, self.reporter = evaluator, reporter
        self.interval, self.step_interval = args.evaluation_interval, args.evaluation_steps
        self.last_step = args.max_global_steps
        self.evaluated_step = 0  # the initial weights are not evaluated
        self._next_time = float("-inf")
        self._backoff = Backoff(first=args.refresh_period, longest=MAX_PAUSE)

    def refresh(self) -> None:
        """Read the trainers' progress, and evaluate if an evaluation is due."""
        if self._is_due(self._find_step()) and self._backoff.is_over:
            self._evaluate()

    def _find_step(self) -> int:
        """Return the step of the slower half of the trainers, 0 without trainers.

        One false claim does not change it: those far behind the evaluated step, such as 0, do not count.
        """
        heartbeats, _ = parse_progress(run_records.get_dictionary(self.peer.dht, f"{self.run_id}_training_progress"))
        earliest = max(1, self.evaluated_step - MAX_SPREAD)
        steps = [heartbeat.epoch for heartbeat in heartbeats if heartbeat.epoch >= earliest]
        return statistics.median_low(steps) if steps else 0

    @property
    def is_done(self) -> bool:
        return self.last_step is not None and self.evaluated_step >= self.last_step

    def _is_due(self, step: int) -> bool:
        is_last = self.last_step is not None and step >= self.last_step
        if self.step_interval is not None:
            return step >= self.evaluated_step + self.step_interval or (is_last and step > self.evaluated_step)
        return step > self.evaluated_step and (time.monotonic() >= self._next_time or is_last)

    def _evaluate(self) -> None:
        started = time.monotonic()
        downloaded = self.averager.download_state(min_epoch=self.evaluated_step + 1)
        if downloaded is None:
            pause = self._backoff.fail()
            logger.warning(f"No trainer offers its state; trying again in {pause:.0f} seconds")
            return
        self._backoff.reset()
        donor, metadata, tensors = downloaded
        self.averager.restore(metadata, tensors)
        evaluation = self.evaluator.evaluate(self.model, self.averager.local_epoch)
        if evaluation is None:
            return
        self.evaluated_step = evaluation.step
        self._next_time = started + self.interval
        self.reporter.report_evaluation(evaluation, f"\t({time.monotonic() - started:.1f} s, from {donor})")
        key = f"{self.run_id}_evaluation"
        run_records.store_record(self.peer.dht, key, self.peer.public_key, evaluation.dict(), LIFETIME)
