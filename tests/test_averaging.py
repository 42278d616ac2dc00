"""Two peers of this process average with each other: what they compute must be what one process would."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from hivemind.averaging.averager import DecentralizedAverager
from transformers import AlbertConfig

from arguments import HyperparameterArguments
from hivemind_fixes import StateLoadError
from model import build_model
from optimizer import make_optimizer, make_param_groups, make_scheduler
from tests.peers import TINY_ALBERT, local_optimizer, local_peer, wait_until
from tests.test_model import make_batch

CONFIG = AlbertConfig(vocab_size=1000, **{name: value for name, value in TINY_ALBERT.items() if name != "model_type"})


def half(batch: dict[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
    return {name: values.chunk(2)[number] for name, values in batch.items()}


def train_alone(num_steps: int) -> torch.nn.Module:
    """What one process gets from the whole batch."""
    model = build_model(CONFIG, "run")
    args = HyperparameterArguments(learning_rate=0.01, warmup_steps=0, total_steps=1000)
    optimizer = make_optimizer(make_param_groups(model, args.weight_decay), args)
    scheduler = make_scheduler(optimizer, args)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(**make_batch()).loss.backward()
        optimizer.step()
        scheduler.step()
    return model


def largest_difference(one: torch.nn.Module, other: torch.nn.Module) -> float:
    return max((a - b).abs().max().item() for a, b in zip(one.parameters(), other.parameters(), strict=True))


class Pair:
    """Two peers that have seen each other, each with its own model."""

    def __init__(self, stack: ExitStack, folder, **options):
        options = {"run_id": "run", "target_batch_size": 8, **options}
        first = stack.enter_context(local_peer(folder / "first", "run"))
        address = str(first.dht.get_visible_maddrs()[0])
        second = stack.enter_context(local_peer(folder / "second", "run", (address,)))
        self.peers = [first, second]
        self.models = [build_model(CONFIG, "run"), build_model(CONFIG, "run")]
        self.optimizers = [
            stack.enter_context(local_optimizer(model, peer, 4, **options))
            for model, peer in zip(self.models, self.peers, strict=True)
        ]
        self.executor = stack.enter_context(ThreadPoolExecutor(2))

    def local_step(self, number: int, batch: dict[str, torch.Tensor], poison: float | None = None) -> None:
        model, optimizer = self.models[number], self.optimizers[number]
        optimizer.zero_grad()
        model(**batch).loss.backward()
        if poison is not None:
            next(model.parameters()).grad[0, 0] = poison
        optimizer.step()

    def global_step(self) -> None:
        """Each peer contributes its half; both wait until they know that the other has."""
        target = min(optimizer.local_epoch for optimizer in self.optimizers) + 1
        list(self.executor.map(lambda number: self._contribute(number, target), (0, 1)))
        for optimizer in self.optimizers:
            optimizer.finish_pending_update()

    def _contribute(self, number: int, target: int) -> None:
        model, optimizer = self.models[number], self.optimizers[number]
        optimizer.zero_grad()
        model(**half(make_batch(), number)).loss.backward()
        optimizer.tracker.report_local_progress(
            optimizer.local_epoch, optimizer.grad_averager.local_samples_accumulated
        )
        assert optimizer._check_and_accumulate_gradients(4, None)
        wait_until(lambda: optimizer.tracker.global_progress.samples_accumulated >= 8, 20, "both peers' samples")
        wait_until(lambda: optimizer.tracker.global_progress.num_peers == 2, 20, "two peers")
        optimizer._maybe_schedule_gradient_averaging()
        optimizer._update_global_epoch(None)
        assert optimizer.local_epoch == target


@pytest.mark.parametrize(("compression", "tolerance"), [("none", 1e-6), ("float16", 2e-3), ("uniform8", 0.2)])
def test_two_peers_take_the_step_of_one_process(tmp_path, compression, tolerance):
    with ExitStack() as stack:
        pair = Pair(stack, tmp_path, averaging_compression=compression)
        for _ in range(2):
            pair.global_step()
            assert [optimizer.last_group_size for optimizer in pair.optimizers] == [2, 2]
        alone = train_alone(2)
        start = build_model(CONFIG, "run")
        assert largest_difference(alone, start) > 0.01
        for model in pair.models:
            assert largest_difference(model, alone) < tolerance
        assert largest_difference(*pair.models) < tolerance


def test_clipping_bounds_what_a_peer_contributes(tmp_path):
    with ExitStack() as stack:
        peer = stack.enter_context(local_peer(tmp_path, "run"))
        model = build_model(CONFIG, "run")
        optimizer = stack.enter_context(
            local_optimizer(model, peer, 4, run_id="run", target_batch_size=8, max_grad_norm=0.25)
        )
        model(**make_batch()).loss.backward()
        own = torch.cat([parameter.grad.flatten() for parameter in optimizer.state_averager.main_parameters])
        optimizer.grad_averager.accumulate_grads_(4)
        optimizer.grad_averager.load_accumulators_into_averager_()
        with optimizer.grad_averager.get_tensors() as gradients:
            contributed = torch.cat([gradient.flatten() for gradient in gradients])
        assert own.norm() > 0.25
        assert contributed.norm().item() == pytest.approx(0.25, rel=1e-4)
        assert torch.allclose(contributed / contributed.norm(), own / own.norm(), atol=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_gradient_that_is_not_finite_is_dropped_and_counted(tmp_path, value):
    with ExitStack() as stack:
        peer = stack.enter_context(local_peer(tmp_path, "run"))
        model = build_model(CONFIG, "run")
        optimizer = stack.enter_context(local_optimizer(model, peer, 4, run_id="run", target_batch_size=64))
        for poison in (None, value, None):
            optimizer.zero_grad()
            model(**half(make_batch(), 0)).loss.backward()
            if poison is not None:
                model.albert.pooler.weight.grad[0, 0] = poison
            optimizer.step()
        assert optimizer.num_dropped_gradients == 1
        assert optimizer.grad_averager.local_samples_accumulated == 8
        assert all(accumulator.isfinite().all() for accumulator in optimizer.grad_averager._grad_accumulators())


def test_peer_that_averages_nan_is_left_out(tmp_path):
    """A contribution that is not finite, here put past the checks at its source, does not reach the other peer."""
    with ExitStack() as stack:
        pair = Pair(stack, tmp_path, averaging_compression="none", averaging_timeout=5.0)
        for value, optimizer in zip((1.0, float("nan")), pair.optimizers, strict=True):
            with optimizer.grad_averager.get_tensors() as gradients:
                for gradient in gradients:
                    gradient.fill_(value)
        rounds = [pair.executor.submit(average, optimizer.grad_averager) for optimizer in pair.optimizers]
        for finished in rounds:
            finished.exception()  # of the round, if any: what matters is what it leaves behind
        with pair.optimizers[0].grad_averager.get_tensors() as gradients:
            assert all((gradient == 1.0).all() for gradient in gradients)


def average(averager: DecentralizedAverager):
    """A bare round of all-reduce over whatever the averager's tensors hold."""
    return DecentralizedAverager.step(averager, timeout=5, allow_retries=False)


def test_fresh_peer_offers_no_state_and_trained_one_does(tmp_path):
    with ExitStack() as stack:
        pair = Pair(stack, tmp_path, averaging_compression="none")
        first, second = pair.optimizers
        assert not first.load_state_from_peers() and not second.load_state_from_peers()
        pair.global_step()
        assert first.state_averager.allow_state_sharing
        first.state_averager.local_epoch = 0
        wait_until(first.load_state_from_peers, 15, "the state of the other peer")
        assert first.local_epoch == 1


def test_silent_donor_is_passed_over_and_without_any_ours_stays(tmp_path):
    """The first donor is silent in the middle of its work, the second answers; then neither does."""
    with ExitStack() as stack:
        pair = Pair(stack, tmp_path, averaging_compression="none")
        pair.global_step()
        silent, good = (optimizer.state_averager for optimizer in pair.optimizers)
        silent.state_sharing_priority = 100.0  # so that it is asked first
        address = str(pair.peers[0].dht.get_visible_maddrs()[0])
        peer = stack.enter_context(local_peer(tmp_path / "third", "run", (address,)))
        model = build_model(CONFIG, "run")
        optimizer = stack.enter_context(
            local_optimizer(
                model, peer, 4, run_id="run", target_batch_size=8, averaging_timeout=3.0, load_state_timeout=10.0
            )
        )
        with silent.lock_averaged_tensors:
            wait_until(optimizer.load_state_from_peers, 30, "the state of the second donor")
            assert optimizer.local_epoch == 1
            assert largest_difference(model, pair.models[1]) < 1e-2  # float16 on the way
            before = [parameter.clone() for parameter in model.parameters()]
            with good.lock_averaged_tensors:
                started = time.monotonic()
                assert not optimizer.load_state_from_peers()
                assert time.monotonic() - started < 15
        assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
        assert optimizer.local_epoch == 1


def test_states_that_do_not_fit_are_refused_whole(tmp_path):
    with ExitStack() as stack:
        peer = stack.enter_context(local_peer(tmp_path, "run"))
        model = build_model(CONFIG, "run")
        optimizer = stack.enter_context(local_optimizer(model, peer, 4, run_id="run", target_batch_size=64))
        averager = optimizer.state_averager
        metadata, tensors = averager.snapshot()
        before = [parameter.clone() for parameter in model.parameters()]

        def refuse(match: str, changed_metadata=metadata, changed_tensors=tensors):
            with pytest.raises(StateLoadError, match=match):
                averager.restore(changed_metadata, changed_tensors)

        nan = [tensors[0].clone().fill_(float("nan")), *tensors[1:]]
        refuse("step number", {**metadata, "epoch": "5"})
        refuse("step number", {**metadata, "epoch": 10**18})
        refuse("step number", {**metadata, "epoch": True})
        refuse("not finite", changed_tensors=nan)
        refuse("other shapes", changed_tensors=[tensors[0][:-1], *tensors[1:]])
        refuse("other shapes", changed_tensors=tensors[:3])
        refuse("cut off", changed_tensors=tensors[:-1])
        refuse("another one", {**metadata, "optimizer_metadata": metadata["optimizer_metadata"][:-1]})
        refuse("another one", {"epoch": 1})
        refuse("not finite", changed_tensors=[*tensors[:-5], *(torch.full_like(t, torch.inf) for t in tensors[-5:])])
        assert optimizer.local_epoch == 0
        assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))

        changed = [tensor + 1 for tensor in tensors]
        learning_rate = averager.optimizer.param_groups[0]["lr"]
        averager.restore({**metadata, "epoch": 7}, changed)
        assert optimizer.local_epoch == 7
        assert averager.optimizer.param_groups[0]["lr"] == pytest.approx(learning_rate * 993 / 1000)
        assert averager.optimizer.param_groups[0]["weight_decay"] == 0.01
        restored = torch.cat([p.flatten() for p in averager.main_parameters])
        assert torch.equal(restored, torch.cat([t.flatten() for t in changed[: len(averager.main_parameters)]]))
