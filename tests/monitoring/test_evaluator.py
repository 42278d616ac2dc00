"""The evaluator: correct values, and when they are due. Real ones run in tests/scripts, beside rounds of trainers."""

import json
import math
import time
from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, GPT2Config, GPT2LMHeadModel

from cotrain.common.errors import UserError
from cotrain.models.memory import PeakMeter, key_of
from cotrain.monitoring import evaluation
from cotrain.monitoring.evaluation import BEST_FOLDER, BestModel, EvaluationLoop, Evaluator, Schedule
from cotrain.monitoring.reporters import Reporters
from cotrain.task import Task
from cotrain.tasks import text
from cotrain.tasks.text import measure
from peerstep.peer.clock import run_time
from peerstep.reports import records as dht_records
from tests.support.dht_records import heartbeat
from tests.support.engine import make_batch
from tests.support.fakes import make_text_task
from tests.support.models import build_model
from tests.support.peers import TINY_CONFIGS, read_jsonl


@pytest.mark.parametrize("is_broken", [False, True])
@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_loss_is_that_of_the_model(family, is_broken):
    config = AutoConfig.for_model(**TINY_CONFIGS[family], vocab_size=1000)
    task, model, batch = make_text_task(config), build_model(config, "run").eval(), make_batch(length=16)
    if is_broken:
        torch.nn.init.constant_(next(model.parameters()), math.nan)
    if family != "albert":
        del batch["sentence_order_label"]
    with torch.inference_mode():
        expected = model(**batch).loss.item()
    task.load_samples, task.collate = lambda split: range(8), lambda samples: batch
    metrics = Evaluator(task, use_cpu=True).evaluate(model, step=3)
    loss, perplexity = (1e9, math.exp(20)) if is_broken else (expected, math.exp(expected))
    assert metrics.pop("loss") == pytest.approx(loss, rel=1e-5)
    if family == "gpt2":
        assert metrics == {"perplexity": pytest.approx(perplexity)}
    else:
        assert metrics.keys() == {"mlm_accuracy", *(["sop_accuracy"] if family == "albert" else [])}


def test_accuracy_counts_what_is_to_be_predicted():
    logits = torch.tensor([[[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]])  # predicts 1, 0, 1
    _, accuracy = measure(logits, torch.tensor([[1, -100, 0]]))
    assert accuracy == (0.5, 2)


class Noise(Task):
    """A task whose metrics are random, and means over other numbers than that of the samples."""

    def load_samples(self, split: str) -> list[int]:
        return list(range(10))

    def evaluate(self, model, batch) -> dict:
        assert not model.training
        values = batch[batch > 4]
        return {"mean": batch.float().mean(), "over_4": (values.sum() / max(1, len(values)), len(values)),
                "noise": torch.rand(())}  # fmt: skip


def test_means_are_over_what_a_task_counts_and_random_numbers_are_the_same_each_time():
    model = torch.nn.Linear(1, 1)

    def evaluate(batch_size: int = 3, should_stop: Callable[[], bool] = bool, **options) -> dict | None:
        evaluator = Evaluator(Noise(), should_stop, batch_size=batch_size, use_cpu=True, **options)
        return evaluator.evaluate(model, step=1)

    one, other = evaluate(), evaluate(batch_size=7)
    torch.rand(1)  # a restarted evaluator has another random state
    assert one == evaluate() and model.training
    assert (one["mean"], one["over_4"]) == (other["mean"], other["over_4"]) == (4.5, 7.0)
    assert evaluate(max_samples=3)["mean"] == 1.0
    assert evaluate(should_stop=lambda: True) is None


def make_loop(**schedule) -> EvaluationLoop:
    """Make a loop that has no model."""
    peer = SimpleNamespace(dht=None, run_id="run")
    return EvaluationLoop(peer, Mock(), None, None, None, None, Schedule(**schedule), 10.0)


@pytest.mark.parametrize(
    ("evaluated", "epochs", "options", "is_due"),
    [
        (0, [], {}, False),
        (0, [0, 0], {}, False),  # nobody has a trained state
        (0, [1, 0], {}, True),
        (7, [7], {}, False),
        (7, [8], {}, True),
        (7, [8, 7], {}, False),
        (7, [7, 10**9], {}, False),  # lies of one peer
        (7, [8, 0], {}, True),
        (7, [8, 8, 0], {}, True),
        (7, [None, 8], {}, True),  # a goodbye
        (7, [-7, 8], {}, True),  # one of the two was killed
        (7, [-8, -8], {}, True),
        (7, [6, 5], {}, False),  # the run has gone back
        (7, [6, 6], {}, True),
        (900, [6, 6], {}, True),
        (7, [9], {"steps": 3}, False),
        (7, [10], {"steps": 3}, True),
        (7, [9], {"steps": 3, "last_step": 9}, True),
        (7, [8], {"interval": 3600.0}, False),
        (7, [8], {"interval": 3600.0, "last_step": 8}, True),
    ],
)
def test_when_an_evaluation_is_due(evaluated, epochs, options, is_due, monkeypatch):
    """A negative step is that of a trainer whose report is 60 seconds old."""
    records = {
        b"%d" % number: None if epoch is None else heartbeat(run_time() - 60 * (epoch < 0), abs(epoch))
        for number, epoch in enumerate(epochs)
    }
    monkeypatch.setattr(dht_records, "get_records", lambda _dht, key: {"run_training_progress": records}[key])
    loop = make_loop(**options)
    loop.evaluate_newest, loop.evaluated_step = Mock(), evaluated
    loop.next_time = time.monotonic() + options.get("interval", 0.0)
    loop.refresh()
    assert loop.evaluate_newest.called == is_due


@pytest.fixture
def evaluate(tmp_path, caplog):
    """Return a function that evaluates a base and steps with some losses, as one evaluator of the folder does."""
    caplog.set_level("INFO")

    def evaluate(
        losses: dict[int, float], base: float | None = None, patience: int = 3, last_step: int = 9
    ) -> EvaluationLoop:
        class OneValue(Task):
            def load_samples(self, split: str) -> list:
                return [0]

            def evaluate(self, model, batch) -> dict:
                return {"loss": model.bias.item()}

        model, task = torch.nn.Linear(1, 1), OneValue()
        averager = SimpleNamespace(local_epoch=0, download_state=lambda min_step: ("donor", min_step, []))

        def restore(_metadata, _tensors) -> None:
            averager.local_epoch = next(iter(losses))
            torch.nn.init.constant_(model.bias, losses.pop(averager.local_epoch))

        averager.restore, reporter = restore, Reporters(tmp_path, "run")
        evaluator, best = Evaluator(task, use_cpu=True), BestModel(tmp_path / BEST_FOLDER, patience)
        loop = EvaluationLoop(None, averager, model, evaluator, reporter, best, Schedule(last_step=last_step), 10.0)
        if base is not None:
            torch.nn.init.constant_(model.bias, base)
            loop.evaluate_base()
        while losses:
            loop.evaluate_newest()
        return loop

    return evaluate


def test_base_is_evaluated_once_and_shown_beside_each_step(evaluate, tmp_path, caplog):
    evaluate({2: 2.0}, base=3.0)
    evaluate({4: 1.5}, base=7.0)  # a restart: the weights are those of the base no more
    losses = {record["step"]: record["validation loss"] for record in read_jsonl(tmp_path / "evaluations.jsonl")}
    assert losses == {0: 3.0, 2: 2.0, 4: 1.5}
    for line in ("Base\tvalidation loss = 3.00000\t(", "Step #2\tvalidation loss = 2.00000 (base 3.00000)\t(",
                 "Step #4\tvalidation loss = 1.50000 (base 3.00000)\t("):  # fmt: skip
        assert caplog.text.count(line) == 1


def test_best_model_stays_in_a_folder(evaluate, tmp_path, caplog):
    """Also if the evaluator starts again, or a loss is no number."""
    evaluate({1: 3.0, 2: 2.5})
    evaluate({3: 2.75, 4: math.nan, 5: 2.5})
    best = tmp_path / "best"
    assert json.loads((best / "evaluation.json").read_text(encoding="utf-8")) == {"step": 2, "loss": 2.5}
    assert load_file(best / "model.safetensors")["bias"].item() == 2.5
    assert caplog.text.count("has not fallen for 3 evaluations: it was lowest at step #2, 2.50000") == 1
    evaluate({6: 2.25})
    assert load_file(best / "model.safetensors")["bias"].item() == 2.25


def test_patience(evaluate, caplog):
    evaluate({1: 1.0, 2: 1.1, 3: 1.2}, patience=2)
    assert "has not fallen for 2 evaluations" in caplog.text


def test_full_disk_does_not_end_the_evaluator(evaluate, tmp_path, caplog):
    (tmp_path / "best").write_text("in the way", encoding="utf-8")
    evaluate({1: 1.0})
    assert "Could not keep the best model so far" in caplog.text


def test_evaluator_ends_with_the_schedule(evaluate):
    assert not evaluate({8: 1.0}).is_done and evaluate({9: 1.0}).is_done
    assert evaluate({5: 1.0}, last_step=5).is_done


def test_state_of_the_monitor_is_evaluated_if_no_trainer_is_left(monkeypatch):
    """Newcomers ran an evaluator on a finished run, and it said nothing for ever."""
    statuses = {
        b"m": SimpleNamespace(value={"checkpoint_step": 7}),
        b"n": SimpleNamespace(value={"checkpoint_step": -1}),
    }
    records = {"run_training_progress": {}, "run_monitor": statuses}
    monkeypatch.setattr(dht_records, "get_records", lambda _dht, key: records[key])
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=100.0)
    monkeypatch.setattr(evaluation, "time", clock)
    loop = make_loop()
    loop.evaluate_newest = Mock()
    loop.refresh()
    assert not loop.evaluate_newest.called, "trainers may be about to join"
    clock.now += 1000.0
    loop.refresh()
    assert loop.evaluate_newest.called


@pytest.mark.parametrize(("device", "number"), [("cuda", 1), ("cpu", 0)])
def test_memory_of_an_evaluation_is_given_back_to_other_programs(monkeypatch, device, number):
    calls = []
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: calls.append("empty"))
    evaluator = SimpleNamespace(device=torch.device(device), evaluate=lambda *_: calls.append("evaluate"))
    averager = Mock(local_epoch=1, **{"download_state.return_value": ("donor", None, None)})
    EvaluationLoop(Mock(), averager, Mock(), evaluator, Mock(), Mock(), Schedule(), 10.0).evaluate_newest()
    assert calls == ["evaluate", *["empty"] * number]


def test_evaluation_takes_little_more_memory_than_its_logits(monkeypatch):
    """With labels, transformers computes a loss in float32, and three copies more made 29.8 GB for Qwen3-1.7B."""
    config = GPT2Config(vocab_size=50_257, n_embd=8, n_head=2, n_layer=1, architectures=["GPT2LMHeadModel"])
    task, model = make_text_task(config), GPT2LMHeadModel(config).eval()
    tokens = torch.randint(1000, (8, 64), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
    with torch.no_grad():
        expected = float(model(**batch).loss)
        monkeypatch.setattr(text, "ROW_BYTES", 32 * 4 * 50_257)
        existing = {key_of(tensor) for tensor in (*model.parameters(), *model.buffers(), tokens)}
        with PeakMeter(existing) as meter:
            ((loss, count),) = task.evaluate(model, batch).values()
    assert loss == pytest.approx(expected, rel=1e-5) and count == 8 * 63
    assert meter.peak < 1.5 * 4 * 8 * 64 * 50_257


@pytest.mark.parametrize(("length", "vocabulary", "size"), [(1024, 151_936, 1), (512, 30_000, 16), (1024, 50_257, 4)])
def test_batch_of_the_evaluator_has_logits_of_at_most_1_gb(monkeypatch, length, vocabulary, size):
    task = make_text_task(GPT2Config(vocab_size=vocabulary))
    task.args.dataset_path = "data"
    monkeypatch.setattr(text.Manifest, "load", lambda path: SimpleNamespace(max_seq_length=length))
    assert task.eval_batch_size() == size


def test_evaluator_without_memory_ends_at_its_start_with_its_own_flag():
    class Full(Noise):
        def evaluate(self, model, batch) -> dict:
            raise torch.OutOfMemoryError("CUDA out of memory")

    evaluator = Evaluator(Full(), batch_size=4, use_cpu=True)
    with pytest.raises(UserError, match="smaller --per_device_eval_batch_size than 4"):
        evaluator.try_batch(torch.nn.Linear(1, 1))
    assert evaluator.num_samples == 10
    evaluator.task = Noise()
    evaluator.try_batch(torch.nn.Linear(1, 1))
