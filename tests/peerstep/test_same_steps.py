"""Simulated peers take the same steps as one process with the same samples, see tests/support/scenario.py."""

import math
from collections.abc import Collection, Sequence

import pytest
import torch

from peerstep.rounds import relative_bounds
from peerstep.step.local_updates import INNER_WARMUP_STEPS
from tests.support.scenario import Peer, Scenario

pytestmark = [pytest.mark.peers, pytest.mark.usefixtures("patches")]  # simulated ones
RATE, TOTAL_STEPS, MAX_NORM = 0.01, 10**6, 5.0
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9
FLAGS = {"average_state_every": 1, "max_grad_norm": MAX_NORM, "total_steps": TOTAL_STEPS}
NOT_DELAYED = {"delay_grad_averaging": False, "delay_optimizer_step": False}
LOCAL = {"local_updates": True, "outer_learning_rate": OUTER_RATE, "outer_momentum": OUTER_MOMENTUM}

IDS = ["delayed", "not delayed", "local updates, delayed", "local updates, not delayed"]


class AdamW:
    """One process's optimizer. The learning rate decays linearly over the global steps."""

    def __init__(self, parameters: torch.Tensor):
        self.parameter = torch.nn.Parameter(parameters.clone())
        self.optimizer = torch.optim.AdamW([self.parameter], weight_decay=0.0)

    def step(self, number: int, gradient: torch.Tensor, factor: float = 1.0) -> None:
        self.parameter.grad = gradient.clone()
        torch.nn.utils.clip_grad_norm_([self.parameter], MAX_NORM)
        self.optimizer.param_groups[0]["lr"] = factor * RATE * (1 - (number - 1) / TOTAL_STEPS)
        self.optimizer.step()

    @property
    def values(self) -> torch.Tensor:
        return self.parameter.detach().clone()


class OneProcess:
    """Takes the steps of some peers with the gradients that they have computed.

    With local updates (DiLoCo) it is that method, from its paper's equations: each peer's inner optimizer moves
    separate parameters, and the outer one is SGD with Nesterov's momentum.

    :param checked: the peers whose gradients must be at the parameters of the newest step, or of the one before while
       the newest is taken, with the local updates since
    """

    def __init__(self, peers: Sequence[Peer], checked: Collection[Peer], initial: torch.Tensor, local_updates: bool):
        self.unused = {peer: iter(list(peer.local_steps)) for peer in peers}
        self.checked, self.local_updates = checked, local_updates
        self.outer, self.inner = AdamW(initial), {peer: AdamW(initial) for peer in peers}
        self.num_inner, self.changes = dict.fromkeys(peers, 0), dict.fromkeys(peers, torch.zeros_like(initial))
        self.versions, self.momentum = [initial.clone()] * 2, torch.zeros_like(initial)

    def contribution(self, peer: Peer, step: int) -> tuple[int, torch.Tensor]:
        """Return the samples of a peer in a step, and the sum of their gradients, or its change by local steps."""
        samples = left = peer.samples.get(step) or 0
        inner, total = self.inner[peer], torch.zeros_like(self.momentum)
        begin, change = inner.values, torch.zeros_like(total)
        while left > 0:
            size, parameters, gradient = next(self.unused[peer])
            positions = self.versions[-1] + change, self.versions[-2] + self.changes[peer] + change
            assert peer not in self.checked or min(float((parameters - p).abs().max()) for p in positions) < 1e-5
            total, left = total + size * gradient, left - size
            if self.local_updates:
                self.num_inner[peer] += 1
                inner.step(step, gradient, min(1.0, self.num_inner[peer] / INNER_WARMUP_STEPS))
                change = inner.values - begin
        assert left == 0
        self.changes[peer] = change
        return samples, -samples * change if self.local_updates else total

    def step(self, number: int) -> torch.Tensor:
        """Take the next step; return the parameters after it."""
        contributions = [self.contribution(peer, number) for peer in self.unused]
        mean = sum(total for _, total in contributions) / sum(samples for samples, _ in contributions)
        if self.local_updates:
            self.momentum = OUTER_MOMENTUM * self.momentum + mean
            self.versions.append(self.versions[-1] - OUTER_RATE * (mean + OUTER_MOMENTUM * self.momentum))
        else:
            self.outer.step(number, mean)
            self.versions.append(self.outer.values)
        return self.versions[-1]


def difference(scenario: Scenario, last: int, *peers: Peer, without: Collection[Peer] = ()) -> float:
    """Return the largest difference of the parameters of some peers from those of one process, in the first steps.

    :param without: peers that contribute nothing
    """
    scenario.reach(last + 1, *peers)  # the samples of a step are known one local step later
    contributing = [peer for peer in scenario.peers if peer not in without]
    process = OneProcess(contributing, peers, scenario.initial, scenario.flags.get("local_updates", False))
    found = []
    for step in range(1, last + 1):
        expected = process.step(step)
        found += [float((peer.history[step] - expected).abs().max()) for peer in peers if step in peer.history]
    assert len(found) > last
    return max(found)


@pytest.mark.parametrize("flags", [{}, NOT_DELAYED, LOCAL, LOCAL | NOT_DELAYED], ids=IDS)
def test_unequal_peers_take_the_steps_of_one_process(flags, monkeypatch):
    """One is in client mode, one on a thin uplink, with wrong clocks. One restarts, and a newcomer takes its place.

    A newcomer's first local updates are small, and would bound those of the others.
    """
    monkeypatch.setattr(relative_bounds, "LOOSE_RATIO", 1e9)
    with Scenario(31, grain=0.05, target_batch_size=200, **FLAGS, **flags) as scenario:
        thin, client, leaving = (
            scenario.add(speed=0.5, uplink=3000.0, clock=600.0), scenario.add(client=True, clock=-5.0),
            scenario.add(speed=1.7),
        )  # fmt: skip
        scenario.reach(2)
        state = leaving.state
        leaving.leave()
        restarted = scenario.add(speed=1.5, state=state)
        scenario.reach(4, thin, client, restarted)
        restarted.leave()
        newcomer = scenario.add(speed=1.3)
        assert difference(scenario, 7, thin, client) < 1e-5, scenario.describe()
        scenario.reach(8, newcomer)  # on a busy machine it may miss the first step after its download
        assert scenario.have_one_history(thin, newcomer, tolerance=0.005), scenario.describe()
        assert newcomer.downloads and sum(map(bool, newcomer.samples.values())) > 1
        assert all(peer.samples[step] for peer in (thin, client) for step in range(2, 8)), scenario.describe()


def test_peer_that_misses_a_round_gives_its_samples_to_the_next():
    with Scenario(32, grain=0.05, target_batch_size=200, **FLAGS) as scenario:
        late, *others = (scenario.add(speed=speed) for speed in (0.8, 1.0, 1.2))
        scenario.reach(2)
        with late.optimizer.frozen_state():
            missed = max(scenario.steps_of(*others)) + 1
            scenario.reach(missed, *others)
        assert difference(scenario, missed + 2, *others) < 1e-5, scenario.describe()
        assert late.samples[missed] is None and late.samples[missed + 1] > late.samples[missed + 2]
        assert scenario.have_one_history(tolerance=0.005), scenario.describe()


def test_peer_that_sends_nan_changes_nothing_and_is_banned():
    with Scenario(33, grain=0.05, target_batch_size=200, **FLAGS) as scenario:
        bad, *honest = scenario.add(client=True), scenario.add(speed=0.8), scenario.add(speed=1.2)
        accumulator = bad.optimizer.accumulator
        load = accumulator.load
        accumulator.load = lambda: (load(), [tensor.fill_(math.nan) for tensor in accumulator.contribution])[0]
        assert difference(scenario, 3, *honest, without=[bad]) < 1e-5, scenario.describe()
        assert any(str(bad.peer_id) in entry["violations"] for peer in honest for entry in peer.rounds)
        assert not any(str(bad.peer_id) in peer.rounds[-1]["group"] for peer in honest)
        assert any(
            f"{bad.peer_id} sent" in line and "not averaging with it for" in line for p in honest for line in p.log
        )


def test_sparse_rounds_keep_unequal_trainers_equal():
    """What they do not send stays with them. A newcomer begins with nothing."""
    with Scenario(34, target_batch_size=120, gradient_compression="topk", **FLAGS, **LOCAL) as scenario:
        peers = [scenario.add(speed=0.5, uplink=3000.0), scenario.add(client=True), scenario.add(speed=1.7)]
        scenario.reach(3)
        newcomer = scenario.add(speed=0.8)
        scenario.reach(8)
        assert scenario.have_one_history(*peers, tolerance=1e-5) and newcomer.applied_samples, scenario.describe()
        for peer in (*peers, newcomer):
            with peer.optimizer.saved_state() as unsent:
                assert all(tensor.any() and tensor.isfinite().all() for tensor in unsent)
