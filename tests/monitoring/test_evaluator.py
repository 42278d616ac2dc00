"""The evaluator: correct values, and no influence on the trainers."""

import math
import re
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoConfig

from cotrain.arguments import DatasetArguments
from cotrain.data.loading import load_validation_data
from cotrain.data.tokenizers import load_tokenizer
from cotrain.dht import run_records
from cotrain.models.model import build_model, get_objective, load_config
from cotrain.models.objectives import OBJECTIVES
from cotrain.monitoring.evaluation import EvaluationLoop, Evaluator, MetricSum, _add, _summarize
from run_evaluator import EvaluatorArguments
from tests.support.dht_records import heartbeat
from tests.support.fakes import make_batch
from tests.support.peers import LONG_STEPS, TINY_CONFIGS, join_together, read_jsonl, wait_until


@pytest.mark.parametrize("is_broken", [False, True])
@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_loss_is_that_of_the_model(family, is_broken):
    config = AutoConfig.for_model(**TINY_CONFIGS[family], vocab_size=1000)
    model, objective = build_model(config, "run").eval(), OBJECTIVES[get_objective(config)]
    if is_broken:
        torch.nn.init.constant_(next(model.parameters()), math.nan)
    batch = make_batch(length=16)
    if not objective.has_sentence_order:
        del batch["sentence_order_label"]
    with torch.inference_mode():
        outputs = model(**batch)
    tokens, order = MetricSum(), MetricSum()
    _add(tokens, order, outputs, batch, objective)
    evaluation = _summarize(tokens, order, objective, step=3, samples=8)
    loss, perplexity = (1e9, math.exp(20)) if is_broken else (outputs.loss.item(), math.exp(outputs.loss.item()))
    assert evaluation.loss == pytest.approx(loss, rel=1e-5)
    assert evaluation.perplexity == (pytest.approx(perplexity) if objective.is_causal else None)
    assert (evaluation.mlm_accuracy is None) == objective.is_causal
    assert (evaluation.sop_accuracy is None) == (not objective.has_sentence_order)


def test_accuracy_counts_what_is_to_be_predicted():
    logits = torch.tensor([[[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]])  # predicts 1, 0, 1
    tokens, order = MetricSum(), MetricSum()
    outputs = SimpleNamespace(prediction_logits=logits, sop_logits=torch.tensor([[0.0, 1.0]]))
    batch = {"labels": torch.tensor([[1, -100, 0]]), "sentence_order_label": torch.tensor([1])}
    _add(tokens, order, outputs, batch, OBJECTIVES["mlm_sop"])
    evaluation = _summarize(tokens, order, OBJECTIVES["mlm_sop"], step=1, samples=1)
    assert (evaluation.mlm_accuracy, evaluation.sop_accuracy) == (0.5, 1.0)


@pytest.fixture
def evaluate(data):
    """Return a function that evaluates a new model on the prepared data."""
    dataset_args = DatasetArguments(
        model_name_or_path=str(data / "config.json"),
        tokenizer_path=str(data / "tokenizer"),
        dataset_path=str(data / "dataset"),
    )
    tokenizer = load_tokenizer(dataset_args.tokenizer_path)
    config = load_config(dataset_args, tokenizer)
    dataset, collator = load_validation_data(dataset_args, 0.15, tokenizer, config)
    model = build_model(config, "run")

    def evaluate(should_stop=lambda: False, **options):
        evaluator = Evaluator(dataset, collator, should_stop, EvaluatorArguments(use_cpu=True, **options))
        return evaluator.evaluate(model, step=1), model

    return evaluate


def test_the_same_each_time_whatever_the_batch_size(evaluate):
    one, model = evaluate()
    torch.rand(1)  # a restarted evaluator has another random state
    again, _ = evaluate()
    assert one == again
    for batch_size in (1, 7, 64):
        other, _ = evaluate(per_device_eval_batch_size=batch_size)
        assert other.loss == pytest.approx(one.loss, rel=1e-5)
        assert (other.mlm_accuracy, other.sop_accuracy) == (one.mlm_accuracy, one.sop_accuracy)
    assert model.training and one.samples > 100
    assert one.loss == pytest.approx(math.log(500) + math.log(2), rel=0.03)
    assert one.sop_accuracy == pytest.approx(0.5, abs=0.2) and one.mlm_accuracy < 0.1
    assert evaluate(max_eval_samples=10)[0].samples == 10
    assert evaluate(should_stop=lambda: True)[0] is None


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
        (7, [9], {"evaluation_steps": 3}, False),
        (7, [10], {"evaluation_steps": 3}, True),
        (7, [9], {"evaluation_steps": 3, "max_global_steps": 9}, True),
        (7, [8], {"evaluation_interval": 3600.0}, False),
        (7, [8], {"evaluation_interval": 3600.0, "max_global_steps": 8}, True),
    ],
)
def test_when_an_evaluation_is_due(evaluated, epochs, options, is_due, monkeypatch):
    records = {b"%d" % number: None if epoch is None else heartbeat(1.0, epoch) for number, epoch in enumerate(epochs)}
    monkeypatch.setattr(run_records, "get_dictionary", lambda _dht, key: {"run_training_progress": records}[key])
    args = EvaluatorArguments(**options)
    loop = EvaluationLoop(SimpleNamespace(dht=None), "run", None, None, None, None, args)
    loop._evaluate, loop.evaluated_step = Mock(), evaluated
    loop._next_time = time.monotonic() + options.get("evaluation_interval", 0.0)
    loop.refresh()
    assert loop._evaluate.called == is_due


def test_evaluator_reports_to_the_monitor_and_joins_no_round(scripts):
    monitor = scripts.monitor("--save_checkpoint_step_interval", 2)
    common = ("--initial_peers", monitor.address, *LONG_STEPS)
    trainers = [scripts.trainer(name, *common) for name in ("one", "two")]
    evaluator = scripts.start(
        "run_evaluator.py", "--initial_peers", monitor.address, "--tokenizer_path", scripts.data / "tokenizer",
        "--dataset_path", scripts.data / "dataset", "--model_name_or_path", scripts.data / "config.json",
        "--output_dir", scripts.folder / "evaluator", "--evaluation_steps", 1, "--refresh_period", 0.5,
        "--max_eval_samples", 64, log="evaluator",
    )  # fmt: skip
    join_together(*trainers)
    seen = scripts.folder / "monitor" / "evaluations.jsonl"
    own = scripts.folder / "evaluator" / "evaluations.jsonl"
    wait_until(lambda: len(read_jsonl(seen)) >= 3, 240, "three evaluations at the monitor")
    for script in (evaluator, *trainers, monitor):
        assert script.stop() == 0, script.output
        script.assert_nothing_left()
    assert "Traceback" not in evaluator.output + monitor.output

    evaluations = read_jsonl(own)
    steps = [evaluation["step"] for evaluation in evaluations]
    assert steps == sorted(set(steps)) and len(steps) >= 2
    assert evaluations[-1]["validation loss"] < evaluations[0]["validation loss"] < 8
    assert {"step", "validation loss", "mlm accuracy", "sop accuracy", "time"} == evaluations[0].keys()
    values = {evaluation["step"]: evaluation["validation loss"] for evaluation in evaluations}
    assert all(values[record["step"]] == pytest.approx(record["validation loss"]) for record in read_jsonl(seen))
    assert re.search(r"Step #\d+\tvalidation loss = [\d.]+\tmlm accuracy", monitor.output)

    # the evaluator is an observer: groups have the two trainers only, and it offers no training state
    peer_id = re.search(r"This evaluator is (\w+)", evaluator.output)[1]
    for trainer in trainers:
        assert "Averaged gradients with 2 peers" in trainer.output
        assert "with 3 peers" not in trainer.output
    assert all(peer_id not in script.output for script in (monitor, *trainers))
