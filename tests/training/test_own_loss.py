"""The loss on a trainer's own held-out samples: of the initial weights, and later."""

import contextlib
import math
from types import SimpleNamespace

import pytest
import torch

from cotrain.dht.metrics_schema import MAX_NUMBER
from cotrain.dht.run_records import TrainerRecord
from cotrain.task import Task
from cotrain.training import own_loss
from cotrain.training.own_loss import MAX_SAMPLES, REST, OwnLoss
from tests.support.dht_records import trainer_record


class Lengths(Task):
    """Samples of one to 100 values; the loss is that of the weight, and a sample without values has none."""

    def load_samples(self, split):
        assert split == "validation"
        return [torch.ones(number) for number in range(100)]

    def collate(self, samples):
        return samples[0]

    def compute_loss(self, model, batch):
        assert not model.training and not torch.is_grad_enabled()
        return model.weight.sum() if len(batch) else torch.tensor(math.nan)

    def weigh(self, batch):
        return float(len(batch))


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(own_loss, "time", clock)
    return clock


def test_own_loss_is_measured_at_first_and_then_for_a_fiftieth_of_the_time(clock):
    model = torch.nn.Linear(1, 1)

    @contextlib.contextmanager
    def saved_state():
        clock.now += 2.0  # that the measurement takes
        yield

    optimizer = SimpleNamespace(saved_state=saved_state, tracker=SimpleNamespace(pause_updates=contextlib.nullcontext))
    measured = OwnLoss(Lengths(), model, optimizer, None)
    assert len(measured.samples) == MAX_SAMPLES
    for weight, moment, is_due in ((3.0, 100.0, True), (2.0, 150.0, False), (1.0, 102.0 + 2 * REST, True)):
        clock.now = moment
        torch.nn.init.constant_(model.weight, weight)
        assert measured.measure() == is_due and model.training
    assert (measured.base, measured.newest) == (3.0, 1.0)
    clock.now += 1000.0
    torch.nn.init.constant_(model.weight, math.nan)  # a record with it would be refused, and end the trainer
    assert measured.measure() and measured.newest == MAX_NUMBER
    TrainerRecord(**trainer_record(own_base_loss=measured.base, own_loss=measured.newest))


@pytest.fixture
def optimizer() -> SimpleNamespace:
    tracker = SimpleNamespace(pause_updates=contextlib.nullcontext)
    return SimpleNamespace(saved_state=contextlib.nullcontext, tracker=tracker)


def test_slow_machine_measures_the_samples_of_its_first_seconds(clock, optimizer):
    class Slow(Lengths):
        def compute_loss(self, model, batch):
            clock.now += 11.0
            return super().compute_loss(model, batch)

    measured = OwnLoss(Slow(), torch.nn.Linear(1, 1), optimizer, None)
    assert measured.measure() and clock.now == 100.0 + 2 * 11.0
    began = clock.now = clock.now + 2 * 11.0 * REST
    assert measured.measure() and clock.now == began + 2 * 11.0


def test_no_random_number_of_training_is_another_one(clock, optimizer, monkeypatch):
    """Dropout draws on the GPU's generator, which nobody restores."""
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda _: pytest.fail("the GPU's generator begins again"))
    measured = OwnLoss(Lengths(), torch.nn.Linear(1, 1), optimizer, None)
    state = torch.get_rng_state()
    assert measured.measure() and torch.equal(torch.get_rng_state(), state)


def test_precision_is_that_of_training(clock, optimizer):
    class Precise(Lengths):
        def compute_loss(self, model, batch):
            assert torch.get_autocast_dtype("cpu") == torch.bfloat16 and torch.is_autocast_enabled("cpu")
            return super().compute_loss(model, batch)

    assert OwnLoss(Precise(), torch.nn.Linear(1, 1), optimizer, torch.bfloat16).measure()
    assert not torch.is_autocast_enabled("cpu")
