"""Tests of benchmarks/low_communication.py and its simulation: steps of DiLoCo, equal results when repeated."""

import argparse
import itertools
import json
import math
from collections.abc import Sequence

import pytest
import torch

from arguments import HyperparameterArguments, LocalTrainingArguments, OptimizerArguments
from benchmarks import low_communication
from benchmarks.local_updates_simulation import (
    SPEEDS,
    Budget,
    Simulation,
    Variant,
    all_reduce,
)
from benchmarks.low_communication import LEARNING_RATE_FACTORS, OUTER_RATES, Results, Run, plan_runs, sweep
from lib.averaging.local_updates import INNER_WARMUP_STEPS
from lib.common.cli import parse_arguments
from lib.training.model import build_model
from lib.training.optimizer import COMPRESSIONS, build_local_optimizer, build_param_groups
from tests.averaging.test_local_updates import OUTER, LocalReplay, difference
from tests.support.swarm import CONFIG, HYPERPARAMETERS, SAMPLES, flat, parameters_of

BUDGET = Budget(samples=32, micro_batch=2)  # 16 local steps


class RandomTask:
    """Random samples and a tiny model. It records the batches, in the order of the local steps."""

    num_samples = 200
    description = "random samples"

    def __init__(self):
        self.batches: list[dict[str, torch.Tensor]] = []

    def build_model(self, seed: int) -> torch.nn.Module:
        return build_model(CONFIG, "run")

    def make_batch(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        self.batches.append({name: values[list(indices)] for name, values in SAMPLES.items()})
        return self.batches[-1]

    def evaluate(self, model: torch.nn.Module) -> float:
        with torch.no_grad():
            return float(model(**SAMPLES).loss)


def arguments(**values) -> HyperparameterArguments:
    return HyperparameterArguments(**{**HYPERPARAMETERS, "local_updates": True, **OUTER, **values})


def simulate(variant: Variant, budget: Budget = BUDGET, **values) -> tuple[RandomTask, Simulation]:
    task = RandomTask()
    simulation = Simulation(task, variant, arguments(**values), budget, seed=0)
    simulation.run()
    return task, simulation


def parameters(simulation: Simulation) -> torch.Tensor:
    return flat(simulation.peers.global_parameters())


def peers_of_steps(peers: int, steps: int) -> list[int]:
    """Return the peers of the first local steps: peer n finishes a step every 1 / speed."""
    events = ((step / SPEEDS[peer], peer) for peer, step in itertools.product(range(peers), range(1, steps + 1)))
    return [peer for _, peer in sorted(events)][:steps]


def contributions(task: RandomTask, first: int, last: int, peers: int) -> dict[int, list[dict[str, torch.Tensor]]]:
    """Return the batches of the local steps from `first` to before `last`, by peer."""
    owners = peers_of_steps(peers, last)
    batches = {peer: [] for peer in range(peers)}
    for step in range(first, last):
        batches[owners[step]].append(task.batches[step])
    return batches


def test_rounds_of_unequal_peers_are_those_of_diloco():
    """Two rounds with four local steps of two peers, in the mean; the second peer is twice as fast."""
    task, simulation = simulate(Variant(2, 4))
    replay = LocalReplay()
    for first in (0, 8):
        expected = replay.global_step(contributions(task, first, first + 8, 2))
    assert simulation.result.rounds == 2
    assert (parameters(simulation) - expected).abs().max() < 1e-6


def test_data_parallel_takes_the_mean_gradient_of_all_samples():
    task, simulation = simulate(Variant(2, 2, local_updates=False), Budget(8, 2), local_updates=False, max_grad_norm=0)
    model = build_model(CONFIG, "run")
    args = arguments()
    optimizer = build_local_optimizer(build_param_groups(model, args.weight_decay), args)
    for batch in task.batches:
        (model(**batch).loss / len(task.batches)).backward()
    optimizer.step()
    assert simulation.result.rounds == 1
    assert (parameters(simulation) - flat(parameters_of(model))).abs().max() < 1e-6


def test_late_result_is_added_to_the_local_updates_since():
    """The result of the round arrives when each peer has taken one more local step, in the mean."""
    task, simulation = simulate(Variant(2, 4, delay=1), Budget(20, 2))
    replay = LocalReplay()
    sent, during = contributions(task, 0, 8, 2), contributions(task, 8, 10, 2)
    trained = [replay.train(peer, batches, replay.theta) for peer, batches in sent.items()]
    sizes = [2 * len(batches) for batches in sent.values()]
    updates = [(difference(replay.theta, new), size) for new, size in zip(trained, sizes, strict=True)]
    later = [difference(start, replay.train(peer, during[peer], start)) for peer, start in enumerate(trained)]
    expected = replay.step(updates)
    assert (parameters(simulation) - expected).abs().max() < 1e-6
    for trainer, update in zip(simulation.peers.trainers, later, strict=True):
        assert (flat(trainer.accumulator.local_changes()) + flat(update)).abs().max() < 1e-5


def test_missed_updates_count_in_the_next_round():
    task = RandomTask()
    simulation = Simulation(task, Variant(2, 4, missing=0.5), arguments(), Budget(26, 2), seed=0)
    absences = iter([frozenset({0}), frozenset()])
    simulation._draw_absent = lambda: next(absences)
    simulation.run()
    replay = LocalReplay()
    first = contributions(task, 0, 8, 2)
    start = replay.theta
    late = replay.train(0, first[0], start)
    replay.global_step({1: first[1]})
    kept = difference(start, late)
    # The samples of the late peer count: the next round is due after eight local steps less those of the late peer
    last = 16 - len(first[0])
    second = contributions(task, 8, last, 2)
    theta = replay.theta
    moved = [new - change for new, change in zip(theta, kept, strict=True)]
    updates = [
        (difference(theta, replay.train(0, second[0], moved)), 2 * len(first[0] + second[0])),
        (difference(theta, replay.train(1, second[1], theta)), 2 * len(second[1])),
    ]
    expected = replay.step(updates)
    assert last == 13  # all local steps
    assert simulation.result.rounds == 2
    assert (parameters(simulation) - expected).abs().max() < 1e-5


def test_eager_peer_uses_its_own_part_at_once():
    """After the first round each peer has moved by its part of the mean alone; the others' part follows."""
    task, simulation = simulate(Variant(2, 4, eager=True), Budget(16, 2))
    replay = LocalReplay()
    sent = contributions(task, 0, 8, 2)
    for peer, batches in sent.items():
        start = replay.theta
        update = difference(start, replay.train(peer, batches, start))
        share = len(batches) / 8
        own = LocalReplay()
        expected = own.step([([share * change for change in update], 1)])
        assert (flat(simulation.peers.thetas[peer]) - expected).abs().max() < 1e-6


@pytest.mark.parametrize("kind", ["donor", "warm-up", "cold"])
def test_newcomer_begins_with_the_newest_parameters(kind):
    _, simulation = simulate(Variant(2, 4, newcomer=kind), Budget(48, 2))
    assert list(simulation.result.after_joining) == [0, 1]
    donor, newcomer = simulation.peers.trainers
    steps = 0 if kind == "warm-up" else INNER_WARMUP_STEPS
    assert newcomer._num_inner_steps - steps == 5  # it is twice as fast as the peer that takes the other 3 of 8 steps
    donors, own = (next(iter(t.inner.state_dict()["state"].values()))["step"] for t in (donor, newcomer))
    assert own == (21 if kind == "donor" else 5) and donors == 19


def test_8_bit_parts_change_the_mean_by_little():
    tensors = [[torch.randn(300, generator=torch.Generator().manual_seed(n)).view(3, 100)] for n in range(4)]
    weights = [1, 2, 3, 4]
    exact = sum(weight * values for weight, (values,) in zip(weights, tensors, strict=True)) / 10
    (full,) = all_reduce(tensors, weights, COMPRESSIONS["none"](), compares_norms=True)
    (rough,) = all_reduce(tensors, weights, COMPRESSIONS["uniform8"](), compares_norms=True)
    assert full.shape == (3, 100) and (full - exact).abs().max() < 1e-6
    assert 0 < (rough - exact).norm() < 0.05 * exact.norm()


def test_far_too_large_contribution_is_scaled_down():
    tensors = [[torch.ones(100)], [torch.ones(100)], [torch.full((100,), 1000.0)]]
    (mean,) = all_reduce(tensors, [1, 1, 1], COMPRESSIONS["none"](), compares_norms=True)
    assert torch.allclose(mean, torch.full((100,), 2.0))
    (mean,) = all_reduce(tensors, [1, 1, 1], COMPRESSIONS["none"](), compares_norms=False)
    assert torch.allclose(mean, torch.full((100,), 334.0))


def test_diverged_run_is_recorded(options, tmp_path):
    options.points, options.learning_rate = ["h8"], math.inf
    results, table = play_all(options, tmp_path)
    assert [results.loss(run) for run in results.lines] == [math.inf] * 2
    assert " inf " in table


def test_same_seed_gives_the_same_result():
    variant = Variant(4, 2, missing=0.5, compression="uniform8")
    (_, first), (_, second) = simulate(variant), simulate(variant)
    assert first.result == second.result
    assert torch.equal(parameters(first), parameters(second))
    assert list(first.result.evaluations) == [16, 32]


def test_schedule_covers_the_rounds():
    """With missed rounds there are more of them."""
    budget = Budget(32768, 4)
    assert budget.schedule(Variant(4, 32)) == {"total_steps": 73, "warmup_steps": 3}
    assert budget.schedule(Variant(4, 32, missing=0.5)) == {"total_steps": 144, "warmup_steps": 6}


@pytest.fixture
def options() -> argparse.Namespace:
    return argparse.Namespace(points=["dp", "h8"], peers=[2], seeds=[0, 1], learning_rate=0.01)


def play_all(options, tmp_path, seconds: float = math.inf) -> tuple[Results, str]:
    results = Results(tmp_path / "results.jsonl")
    runs = plan_runs(options, "setup", BUDGET)
    low_communication.play(runs, RandomTask(), BUDGET, "lamb", results, seconds)
    return results, low_communication.format_tables(runs, results)


def test_resumed_session_gives_the_same_table(options, tmp_path):
    results, table = play_all(options, tmp_path)
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert len(lines) == 4 and table.count("\n") == 2 and "+0.00 % +- 0.00" in table
    (tmp_path / "results.jsonl").write_text("\n".join(lines[:2]) + '\n{"run": {"se')  # the session was killed
    resumed, again = play_all(options, tmp_path)
    assert again == table
    assert [results.loss(run) for run in results.lines] == [resumed.loss(run) for run in resumed.lines]
    assert play_all(options, tmp_path, seconds=0.0)[1] == table


def test_line_has_the_flags_of_a_trainer(options, tmp_path):
    results, _ = play_all(options, tmp_path)
    flags = {run.point: line["flags"].split() for run, line in results.lines.items()}
    groups = (LocalTrainingArguments, OptimizerArguments)
    local, _ = parse_arguments(groups, "Flags", flags["h8"])
    plain, other = parse_arguments(groups, "Flags", flags["dp"])
    assert local.local_updates and local.learning_rate == 0.01 and not plain.local_updates
    assert other.target_batch_size == 4 and not other.delay_grad_averaging
    assert plain.batch_size_per_step(1) == BUDGET.micro_batch


def test_no_run_begins_after_the_time_is_up(options, tmp_path):
    assert play_all(options, tmp_path, seconds=0.0)[0].lines == {}


def test_newcomers_of_two_sessions_share_a_row(tmp_path):
    first, second = (Run("setup", "h32-join-cold", 4, seed, 0.01, 0.7) for seed in (0, 1))
    outcome = {"rounds": 4, "evaluations": {32: 2.0}, "after_joining": {0: 5.0, 1: 3.0}, "seconds": 1.0}
    Results(tmp_path / "results.jsonl").add(first, outcome)
    results = Results(tmp_path / "results.jsonl")
    results.add(second, {**outcome, "after_joining": {0: 4.0}})
    row = low_communication.format_tables([first, second], results).splitlines()[-1]
    assert row.split() == ["h32-join-cold", "0:", "4.5000"]


def test_tuned_rates_are_those_with_the_least_loss(tmp_path):
    results = Results(tmp_path / "results.jsonl")
    run = Run("setup", "h8", 2, 0, 0.01, 0.7)
    candidates = sweep(run)
    assert len(candidates) == len(LEARNING_RATE_FACTORS) + len(OUTER_RATES)
    assert results.tuned(run) == run
    for candidate, loss in zip(candidates, (3.0, 2.0, math.nan, 5.0, 1.0, 4.0), strict=True):
        results.add(candidate, {"evaluations": {"32": loss}, "seconds": 1.0})
    assert results.tuned(run) == candidates[4]
    assert Results(results.path).tuned(Run("setup", "h8", 2, 1, 0.01, 0.7)).outer_momentum == 0.5
    assert results.tuned(Run("other", "h8", 2, 0, 0.01, 0.7)).outer_learning_rate == 0.7
    assert json.loads(results.path.read_text().splitlines()[0])["run"]["point"] == "h8"


def test_rates_of_four_peers_are_used_for_others_but_not_with_data_parallel(tmp_path):
    results = Results(tmp_path / "results.jsonl")
    for point in ("h8", "dp"):
        for number, candidate in enumerate(sweep(Run("setup", point, 4, 0, 0.01, 0.7))):
            results.add(candidate, {"evaluations": {"32": 9.0 - number}, "seconds": 1.0})
    tuned = results.tuned(Run("setup", "h8", 8, 2, 0.01, 0.7))
    assert (tuned.peers, tuned.seed, tuned.outer_learning_rate, tuned.outer_momentum) == (8, 2, *OUTER_RATES[-1])
    untuned = Run("setup", "dp", 8, 2, 0.01, 0.7)
    assert results.tuned(untuned) == untuned


def test_variants_of_h32_have_its_rates_unless_they_are_tuned(tmp_path):
    results = Results(tmp_path / "results.jsonl")
    late, h32 = Run("setup", "h32-late2", 4, 0, 0.01, 0.7), Run("setup", "h32", 4, 0, 0.002, 0.7)
    outcome = {"evaluations": {"32": 2.0}, "seconds": 1.0}
    results.add(late, outcome)
    assert results.tuned(late) == late
    results.add(h32, outcome)
    assert results.tuned(late).learning_rate == 0.002
    results.add(Run("setup", "h32-late2", 4, 0, 0.02, 0.7), {**outcome, "evaluations": {"32": 1.0}})
    assert results.tuned(late).learning_rate == 0.02


def test_important_runs_come_first(options):
    options.points, options.peers, options.seeds = None, [2, 4, 8], [0, 1]
    runs = plan_runs(options, "setup", BUDGET)
    names = [(run.seed, run.peers, run.point) for run in runs]
    assert names[:4] == [(0, 2, "dp"), (0, 2, "h8"), (0, 2, "h32"), (0, 2, "h128")]
    assert names.index((0, 4, "h32-eager")) < names.index((0, 8, "dp")) < names.index((1, 2, "dp"))
    assert len(set(runs)) == len(runs) == 2 * (3 * 4 + len(low_communication.SPECIAL_POINTS))
