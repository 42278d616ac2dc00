"""Tests of local updates as a pseudo-gradient, in the orders in which a round and the local steps can happen."""

from functools import partial

import torch

from peerstep.state.statistics import constant_schedule
from peerstep.step.accumulators import GradientAccumulator
from peerstep.step.local_updates import LocalTraining


def test_gradients_whose_sum_overflows_are_not_sent():
    """Each gradient was finite. The other peers would ban a peer that sends Inf."""
    parameter, contribution = torch.nn.Parameter(torch.zeros(2)), [torch.ones(2)]
    accumulator = GradientAccumulator([parameter], [], contribution)
    for scale, expected in ((1e38, (0, 0.0)), (1.0, (16, 1.0))):
        parameter.grad = torch.full((2,), scale)
        for _ in range(2):
            accumulator.add(8)
        assert (accumulator.load(), contribution[0][0].item()) == expected


def train_locally(*tensors, **options) -> LocalTraining:
    """Build an accumulator whose local steps change nothing: the parameters have no gradients."""
    builders = partial(torch.optim.SGD, lr=0.1), constant_schedule
    return LocalTraining([{"params": tensors[0]}], *builders, 0.0, *tensors, **options)


class Peer:
    """Parameters of one element each: the model's, those of the last global step, and the contribution."""

    def __init__(self, value: float = 0.0, **options):
        self.model, self.step, self.contribution = ([torch.tensor([value])] for _ in range(3))
        self.accumulator = train_locally(self.model, self.step, self.contribution, **options)

    def train(self, change: float, num_samples: int = 1) -> None:
        self.model[0] += change
        self.accumulator.add(num_samples)

    def load(self) -> tuple[float, int]:
        num_samples = self.accumulator.load()
        return self.contribution[0].item(), num_samples

    @property
    def changes(self) -> float:
        return self.accumulator.local_changes()[0].item()


def test_a_round_may_begin_before_the_result_of_the_last_one_is_copied():
    peer = Peer()
    peer.train(-1.0)
    peer.load()
    peer.accumulator.confirm()
    peer.step[0].fill_(-8.0)
    peer.train(-0.5, num_samples=2)
    assert peer.load() == (0.5, 2)
    peer.accumulator.rebase()  # the model gets the result of the first round during the second one
    assert peer.model[0] == -8.5
    peer.train(-0.25)
    peer.accumulator.confirm()
    assert peer.changes == -0.25
    peer.step[0].fill_(-16.0)
    peer.accumulator.rebase()
    assert peer.model[0] == -16.25


def test_what_a_sparse_round_does_not_take_stays_in_the_model():
    peer = Peer(project=lambda tensor: tensor / 4)
    peer.train(-1.0, num_samples=3)
    assert peer.load() == (0.25, 3)
    peer.train(-0.25)  # during the round
    peer.accumulator.confirm()
    peer.step[0].fill_(-8.0)
    peer.accumulator.rebase()
    assert peer.changes == -1.0 and peer.model[0] == -9.0
    assert peer.load() == (0.25, 1)

    # Missed, or failed before it began
    peer.accumulator.take_back(1)
    assert peer.load() == (0.25, 1)


def test_what_a_running_round_has_is_not_among_what_was_not_sent():
    """Its members may use it, also if this peer ends before the round does."""
    peer = Peer(project=lambda tensor: tensor / 4)
    peer.train(-1.0)

    def unsent() -> float:
        return peer.accumulator.local_changes(unsent=True)[0].item()

    assert unsent() == -1.0
    peer.load()
    peer.train(-0.25)
    assert unsent() == -1.0 and peer.changes == -1.25
    peer.accumulator.take_back(1)
    assert unsent() == -1.25
    peer.load()
    peer.accumulator.confirm()
    assert unsent() == peer.changes == -0.9375
