"""Random faults over the simulated network: after them nobody is locked out, and there is one history.

A full plan is 15 to 17 simulated minutes, which take 5 to 30 CPU seconds and no waiting. RANDOM_FAULTS_FROM=2000
in the environment lets `make test-all` draw other seeds.
"""

import itertools
import os
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from peerstep.reports.marks import MAX_DIFFERENT, different_marks
from tests.support.random_faults import FaultyPeer, FaultyRun, Plan, draw_plan
from tests.support.simulated_time import EPOCH

pytestmark = [pytest.mark.peers, pytest.mark.usefixtures("patches")]

FAILED_ONCE = [1, 18, 20, 21, 25, 26, 30, 32, 34, 35]  # seeds after which trainers stayed alone, or forked
FIRST_SEED = int(os.environ.get("RANDOM_FAULTS_FROM", "1000"))
SHORT_SECONDS = 120.0  # of the faults of a shortened plan
LAST_SECONDS = 120.0  # of the peace, in which each trainer has to take part
LEAST_PART = 0.8  # of the rounds


def rounds_since(peer: FaultyPeer, since: float) -> set[int]:
    """Return the steps of a trainer's rounds after a simulated time, to one second before the end."""
    until = peer.scenario.time.read() - 1.0
    times = {
        entry["step"]: entry["time"] - EPOCH - peer.clock for entry in peer.rounds if entry["outcome"] == "averaged"
    }
    return {step for step, ended in times.items() if since <= ended <= until}


def find_locked_out(run: FaultyRun) -> list[str]:
    since = run.time.read() - LAST_SECONDS
    taken = {peer: rounds_since(peer, since) for peer in run.live}
    most = max(map(len, taken.values()))
    found = ["nobody averages"] if not most and len(taken) > 1 else []
    for peer, steps in taken.items():
        if len(steps) < LEAST_PART * most - 0.5:
            found.append(f"{peer.name} is locked out: {len(steps)} of {most} rounds, {peer.outcomes()[-8:]}")
        if not any(ended > run.time.read() - 60.0 - 1.0 / peer.speed for ended in peer.computed):
            found.append(f"{peer.name} computes nothing")
    return found


def find_histories(run: FaultyRun) -> list[str]:
    found, steps = [], run.steps_of(*run.live)
    if max(steps) - min(steps) > 2:
        found.append(f"steps apart: {steps}")
    for one, other in itertools.combinations(run.live, 2):
        different = different_marks(one.marks, other.marks)
        if len(different or ()) > MAX_DIFFERENT or (different is None and one.marks and other.marks):
            found.append(f"{one.name} and {other.name} have two histories: {one.marks}, {other.marks}")
    return found


def steps_since_shared(one: FaultyPeer, other: FaultyPeer, every: int) -> int:
    """Return how many steps ago two trainers last averaged parameters in one group; all steps if they never did."""

    def groups_of(peer: FaultyPeer) -> set[tuple[int, frozenset[str]]]:
        averaged = (entry for entry in peer.rounds if entry["outcome"] == "averaged" and entry["step"] % every == 0)
        return {(entry["step"], frozenset(entry["group"])) for entry in averaged}

    shared = [step for step, _ in groups_of(one) & groups_of(other)]
    return max(one.step, other.step) - max(shared, default=0)


def find_unequal(run: FaultyRun) -> list[str]:
    """Parameters may differ by an update, and by a part of one for each step since they were averaged.

    Of those of small groups, as many differ by up to two updates for each step since two were in one group. The
    groups of a step are dealt by chance: in seed 2344 two of five trainers were apart from the others five times
    running.
    """
    changes = []
    for peer in run.live:
        newest = sorted(peer.history)[-6:]
        pairs = [(a, b) for a, b in itertools.pairwise(newest) if b == a + 1]
        changes += [float((peer.history[b] - peer.history[a]).abs().max()) for a, b in pairs]
    settings, update = run.plan.settings, statistics.median_high(changes or [0.0])
    every = settings["average_state_every"]
    is_small = settings["target_group_size"] < len(run.live)
    found = []
    for one, other in itertools.combinations(run.live, 2):
        updates = 1.0 + 0.3 * every
        if is_small:
            updates = 2.0 * max(every, steps_since_shared(one, other, every))
        if update and run.distance(one, other) > updates * update + 1e-3:
            found.append(f"unequal: {one.name}, {other.name}: {run.distance(one, other):.4f} of {update:.4f}")
    return found


def find_faults(run: FaultyRun) -> list[str]:
    """Return what is wrong at the end of a run, one line each."""
    twice = [f"{p.name}'s step {i} counts twice" for (p, i), of_step in run.uses.items() if len(of_step) > 1]
    return [*find_locked_out(run), *find_histories(run), *find_unequal(run), *twice[:5], *run.errors]


def run_plan(plan: Plan, folder: Path, peace: float) -> FaultyRun:
    """Run a plan, and assert that the faults have left nothing wrong after some seconds of peace."""
    with FaultyRun(plan) as run:
        run.run(folder, peace)
        found = find_faults(run)
    assert not found, "\n".join([*found, run.describe()])
    return run


@pytest.mark.parametrize("seed", FAILED_ONCE)
def test_trainers_are_one_run_again_after_some_faults(seed, tmp_path):
    plan = draw_plan(seed)
    faults = [fault for fault in plan.faults if fault["t"] < SHORT_SECONDS]
    run = run_plan(replace(plan, faults=faults, end=SHORT_SECONDS), tmp_path, peace=240.0)
    assert max(run.steps_of(*run.live)) > 8


@pytest.mark.long
@pytest.mark.parametrize("seed", [5, *FAILED_ONCE, *range(FIRST_SEED, FIRST_SEED + 100)])
def test_trainers_are_one_run_again_after_many_faults(seed, tmp_path):
    run_plan(draw_plan(seed), tmp_path, peace=300.0)
