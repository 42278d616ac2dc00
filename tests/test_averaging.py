"""Two peers of this process average with each other: what they compute must be what one process would."""

import asyncio
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace
from typing import AsyncIterator  # noqa: UP035, hivemind reads the annotations and knows this one only

import pytest
import torch
from hivemind.averaging.averager import DecentralizedAverager
from hivemind.averaging.control import AveragingStage
from hivemind.proto.averaging_pb2 import AVERAGED_PART, BAD_GROUP_ID, AveragingData, DownloadData, DownloadRequest
from hivemind.utils import get_dht_time
from hivemind.utils.asyncio import as_aiter
from hivemind.utils.timed_storage import ValueWithExpiration
from transformers import AlbertConfig

from arguments import HyperparameterArguments
from hivemind_fixes import Optimizer, SafeAverager, StateLoadError, TrainingStateAverager
from model import build_model
from optimizer import make_optimizer, make_param_groups, make_scheduler
from tests.hostile_peer import progress
from tests.peers import TINY_ALBERT, local_optimizer, local_peer, wait_until
from tests.test_model import make_batch
from utils import store_record

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
    """Two peers that have seen each other, each with its own model.

    :param first: the first peer; started if None
    :param address: where the second joins; any of the first one's if None
    :param is_client: whether the second is in client mode
    """

    def __init__(
        self, stack: ExitStack, folder, first=None, address: str | None = None, is_client: bool = False, **options
    ):
        options = {"run_id": "run", "target_batch_size": 8, **options}
        first = first or stack.enter_context(local_peer(folder / "first", "run"))
        address = address or str(first.dht.get_visible_maddrs()[0])
        second = stack.enter_context(local_peer(folder / "second", "run", (address,), client_mode=is_client))
        self.peers = [first, second]
        self.models = [build_model(CONFIG, "run"), build_model(CONFIG, "run")]
        self.optimizers = [
            stack.enter_context(local_optimizer(model, peer, 4, client_mode=client_mode, **options))
            for model, peer, client_mode in zip(self.models, self.peers, (False, is_client), strict=True)
        ]
        self.executor = stack.enter_context(ThreadPoolExecutor(2))
        self.stack = stack

    def welcome(self, folder):
        """Another peer, which joins through the first."""
        address = str(self.peers[0].dht.get_visible_maddrs()[0])
        return self.stack.enter_context(local_peer(folder, "run", (address,)))

    def local_step(self, number: int, batch: dict[str, torch.Tensor], poison: float | None = None) -> None:
        model, optimizer = self.models[number], self.optimizers[number]
        optimizer.zero_grad()
        model(**batch).loss.backward()
        if poison is not None:
            next(model.parameters()).grad[0, 0] = poison
        optimizer.step()

    def fill_gradients(self, *values: float) -> None:
        """What each peer is going to average, in all elements."""
        for value, optimizer in zip(values, self.optimizers, strict=True):
            with optimizer.grad_averager.get_tensors() as gradients:
                for gradient in gradients:
                    gradient.fill_(value)

    def average(self, kind: str) -> BaseException | None:
        """A bare round of all-reduce of both, and how it ended for the first.

        :param kind: grad_averager or state_averager
        """
        rounds = [self.executor.submit(average, getattr(optimizer, kind)) for optimizer in self.optimizers]
        errors = [finished.exception() for finished in rounds]
        return errors[0]

    def global_step(self) -> None:
        """Each peer contributes its half, and begins the step when both know that the other has.

        Whoever began it before would report the next one, in which the other would wait for these samples in vain.
        """
        target = min(optimizer.local_epoch for optimizer in self.optimizers) + 1
        list(self.executor.map(self._contribute, (0, 1)))
        list(self.executor.map(self._update, self.optimizers))
        for optimizer in self.optimizers:
            assert optimizer.local_epoch == target
            optimizer.finish_pending_update()

    def accumulate(self, number: int) -> None:
        """A local step, without the global one that may be due."""
        model, optimizer = self.models[number], self.optimizers[number]
        optimizer.zero_grad()
        model(**half(make_batch(), number)).loss.backward()
        optimizer.tracker.report_local_progress(
            optimizer.local_epoch, optimizer.grad_averager.local_samples_accumulated
        )
        assert optimizer._check_and_accumulate_gradients(4, None)

    def _contribute(self, number: int) -> None:
        optimizer = self.optimizers[number]
        self.accumulate(number)
        wait_until(lambda: optimizer.tracker.global_progress.samples_accumulated >= 8, 120, "both peers' samples")
        wait_until(lambda: optimizer.tracker.global_progress.num_peers == 2, 120, "two peers")

    def _update(self, optimizer: Optimizer) -> None:
        optimizer._maybe_schedule_gradient_averaging()
        optimizer._update_global_epoch(None)


@torch.no_grad()
def fill_parameters(averager: TrainingStateAverager, value: float) -> None:
    for parameter in averager._optimized_parameters():
        parameter.fill_(value)


def wait_for_groups(rounds) -> None:
    wait_until(lambda: {control.stage for control in rounds} == {AveragingStage.AWAITING_TRIGGER}, 120, "the groups")


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
    """What is not finite, here put past the checks at its source, does not reach the other peer, which then no longer
    averages with its sender."""
    with ExitStack() as stack:
        pair = Pair(stack, tmp_path, averaging_compression="none", averaging_timeout=5.0)
        pair.fill_gradients(1.0, float("nan"))
        for optimizer in pair.optimizers:
            optimizer.tracker.report_local_progress(0, 4)
        tracker = pair.optimizers[0].tracker
        wait_until(lambda: tracker.global_progress.num_peers == 2, 120, "two peers")
        first = pair.optimizers[0]

        def has_met_it() -> bool:
            pair.average("grad_averager")  # ends well or not, as the two happen to send first
            with first.grad_averager.get_tensors() as gradients:
                assert all((gradient == 1.0).all() for gradient in gradients)
            return bool(first.grad_averager.shunned_peers())

        wait_until(has_met_it, 120, "a round with the peer of NaN")
        assert "could not find a group" in str(pair.average("grad_averager"))
        first._share_shunned_peers()
        assert "could not find a group" in str(pair.average("state_averager")), "it has not heard"
        pair.optimizers[1].tracker.report_local_progress(7, 4)
        wait_until(lambda: tracker.global_progress.num_peers == 1, 120, "that the peer is not counted")
        assert tracker.global_epoch == 0


async def be_slow(self, *args, **kwargs) -> None:
    await asyncio.sleep(30)


def test_averager_ends_in_the_middle_of_a_round(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(SafeAverager, "_run_allreduce_inplace_", be_slow)
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)  # pytest's keeps what it prints
    with ExitStack() as stack:
        averagers = [optimizer.grad_averager for optimizer in Pair(stack, tmp_path).optimizers]
        rounds = [DecentralizedAverager.step(averager, timeout=10, wait=False) for averager in averagers]
        wait_until(lambda: all(r.stage == AveragingStage.RUNNING_ALLREDUCE for r in rounds), 120, "the round")
        for averager in averagers:
            averager.shutdown()
    assert "Traceback" not in capfd.readouterr().err


def test_end_after_a_round_that_was_called_off(tmp_path):
    with ExitStack() as stack:
        peer = stack.enter_context(local_peer(tmp_path, "run"))
        optimizer = stack.enter_context(local_optimizer(build_model(CONFIG, "run"), peer, 4, run_id="run"))
        optimizer.scheduled_grads = optimizer.grad_averager.schedule_step(timeout=30.0)
        optimizer.scheduled_grads.cancel()
        optimizer.shutdown()


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
        wait_until(first.load_state_from_peers, 120, "the state of the other peer")
        assert first.local_epoch == 1


def test_silent_donor_is_passed_over_and_without_any_ours_stays(tmp_path):
    """The first donor is silent in the middle of its work, the second answers; then neither does."""
    with ExitStack() as stack:
        pair = Pair(stack, tmp_path, averaging_compression="none")
        pair.global_step()
        silent, good = (optimizer.state_averager for optimizer in pair.optimizers)
        silent.state_sharing_priority = 100.0  # so that it is asked first
        peer = pair.welcome(tmp_path / "third")
        model = build_model(CONFIG, "run")
        optimizer = stack.enter_context(
            local_optimizer(
                model, peer, 4, run_id="run", target_batch_size=8, averaging_timeout=3.0, load_state_timeout=10.0
            )
        )
        with silent.lock_averaged_tensors:
            wait_until(optimizer.load_state_from_peers, 120, "the state of the second donor")
            assert optimizer.local_epoch == 1
            assert largest_difference(model, pair.models[1]) < 1e-2  # float16 on the way
            before = [parameter.clone() for parameter in model.parameters()]
            with good.lock_averaged_tensors:
                started = time.monotonic()
                assert not optimizer.load_state_from_peers()
                assert time.monotonic() - started < 15
        assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
        assert optimizer.local_epoch == 1


download = DecentralizedAverager.rpc_download_state


async def trickle(self, request: DownloadRequest, context) -> AsyncIterator[DownloadData]:
    async for message in download(self, request, context):
        yield message
        await asyncio.sleep(1)


async def break_off(self, request: DownloadRequest, context) -> AsyncIterator[DownloadData]:
    messages = aiter(download(self, request, context))
    for _ in range(3):
        yield await anext(messages)


async def fail(self, request: DownloadRequest, context) -> AsyncIterator[DownloadData]:
    yield await anext(aiter(download(self, request, context)))
    raise ConnectionResetError("as when the donor's process dies")


def offer_state(donor, step: int) -> None:
    """Offer a state that is told to be of `step`, and wait until others can know."""
    donor.state_averager.local_epoch = step
    donor.state_averager._update_scheduler()
    donor.share_state()
    offers = f"{donor.state_averager.prefix}.all_averagers"
    wait_until(lambda: donor.dht.get(offers, latest=True), 120, "the donor's offer")


def test_averager_that_ends_breaks_off_its_download(tmp_path):
    with ExitStack() as stack:
        pair = Pair(stack, tmp_path)
        newcomer, silent = (optimizer.state_averager for optimizer in pair.optimizers)
        offer_state(pair.optimizers[1], step=5)
        with silent.lock_averaged_tensors:
            answer = pair.executor.submit(newcomer.download_state)
            time.sleep(1)
            assert not answer.done()
            newcomer.shutdown()
            assert answer.result(5) is None


downloads_served = []  # in the donor's averager process


async def break_off_once(self, request: DownloadRequest, context) -> AsyncIterator[DownloadData]:
    downloads_served.append(request)
    serve = break_off if len(downloads_served) == 1 else download
    async for message in serve(self, request, context):
        yield message


def test_download_that_breaks_off_is_tried_again(tmp_path, monkeypatch):
    """The donor may be the only one that has the run's state: a newcomer without it would begin a second run."""
    monkeypatch.setattr(DecentralizedAverager, "rpc_download_state", break_off_once)
    with ExitStack() as stack:
        donor, newcomer = Pair(stack, tmp_path).optimizers
        offer_state(donor, step=5)
        assert newcomer.load_state_from_peers() and newcomer.local_epoch == 5


@pytest.mark.parametrize("behaviour", [trickle, break_off, fail])
def test_donor_that_does_not_finish_costs_bounded_time_and_changes_nothing(tmp_path, monkeypatch, behaviour):
    monkeypatch.setattr(DecentralizedAverager, "rpc_download_state", behaviour)
    with ExitStack() as stack:
        donor, newcomer = Pair(stack, tmp_path, averaging_timeout=3.0, load_state_timeout=8.0).optimizers
        offer_state(donor, step=5)
        before = [tensor.clone() for tensor in newcomer.state_averager.snapshot()[1]]
        started = time.monotonic()
        assert not newcomer.load_state_from_peers()
        assert time.monotonic() - started < 13
        assert newcomer.local_epoch == 0
        assert all(torch.equal(*pair) for pair in zip(before, newcomer.state_averager.snapshot()[1], strict=True))


def test_liar_about_the_step_is_ignored_though_others_offer_their_state(tmp_path):
    """Or a trainer would load the same state again and again, to get to where nobody is, and drop each time what it
    has accumulated, and leave the rounds that it has signed up for."""
    with ExitStack() as stack:
        pair = Pair(stack, tmp_path, load_state_timeout=10.0)
        pair.global_step()
        optimizer = pair.optimizers[0]
        pair.accumulate(0)
        before = optimizer.state_averager.snapshot()[1]
        liar = pair.welcome(tmp_path / "liar")
        claim = progress(liar.dht, epoch=30_000)
        store_record(liar.dht, "run_progress", liar.public_key, claim, lifetime=120)
        for _ in range(3):
            wait_until(lambda: optimizer.tracker.global_epoch == 30_000, 120, "the claim")
            assert not optimizer.load_state_from_peers()
        assert not optimizer.tracker.ready_to_update_epoch, "it takes a step with what the liar claims to have"
        wait_until(optimizer.tracker.fetched_global_progress_this_epoch.is_set, 120, "a look at the others")
        assert optimizer.tracker.global_epoch == 1, "believed no longer"
        assert optimizer.grad_averager.local_samples_accumulated == 4
        after = optimizer.state_averager.snapshot()[1]
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_peer_that_fell_silent_is_not_reckoned_to_go_on(tmp_path):
    with ExitStack() as stack:
        peer = stack.enter_context(local_peer(tmp_path, "run"))
        optimizer = stack.enter_context(
            local_optimizer(build_model(CONFIG, "run"), peer, 4, run_id="run", target_batch_size=1000)
        )
        report = progress(peer.dht, epoch=0, rate=100.0, when=-40.0)
        reports = {b"silent": ValueWithExpiration(report, get_dht_time() + 60)}
        found = optimizer.tracker._parse_swarm_progress_data(reports)
        assert found.num_peers == 1
        assert found.eta_next_epoch - get_dht_time() > 8, "1000 samples at 100 a second: ten seconds, not overdue"


@pytest.mark.parametrize(("claimed", "believed"), [(0, 0), (1, 1), (2, 0)])
def test_client_that_begins_the_next_step_draws_the_others_there(tmp_path, claimed, believed):
    """Or they would do its samples once more while it waits. Two steps ahead it is alone: it has no state to offer."""
    with ExitStack() as stack:
        peer = stack.enter_context(local_peer(tmp_path, "run"))
        optimizer = stack.enter_context(
            local_optimizer(build_model(CONFIG, "run"), peer, 4, run_id="run", target_batch_size=1000)
        )
        expiration = get_dht_time() + 60
        reports = {
            b"public": ValueWithExpiration(progress(peer.dht, epoch=0), expiration),
            b"client": ValueWithExpiration(progress(peer.dht, epoch=claimed, client_mode=True), expiration),
        }
        found = optimizer.tracker._parse_swarm_progress_data(reports)
        assert (found.epoch, found.num_peers, found.num_clients) == (believed, 2, 1)


def test_lone_peer_looks_often_for_others(tmp_path):
    """Its first step was slow: by that, the global step takes hours, of which a quarter would be slept through."""
    with ExitStack() as stack:
        peer = stack.enter_context(local_peer(tmp_path, "run"))
        optimizer = stack.enter_context(
            local_optimizer(build_model(CONFIG, "run"), peer, 4, run_id="run", target_batch_size=1000)
        )
        tracker = optimizer.tracker
        with tracker.pause_updates():
            tracker.max_refresh_period = 30.0
            report = ValueWithExpiration(progress(peer.dht, epoch=0, rate=0.1), get_dht_time() + 60)
            alone = tracker._parse_swarm_progress_data({b"own": report})
            together = tracker._parse_swarm_progress_data({b"own": report, b"other": report})
        assert alone.next_fetch_time - get_dht_time() <= tracker.default_refresh_period
        assert together.next_fetch_time - get_dht_time() > 20


def test_peer_looks_soon_whether_the_others_are_at_the_same_step(tmp_path):
    with ExitStack() as stack:
        peer = stack.enter_context(local_peer(tmp_path, "run"))
        tracker = stack.enter_context(local_optimizer(build_model(CONFIG, "run"), peer, 4, run_id="run")).tracker
        wait_until(tracker.fetched_global_progress_this_epoch.is_set, 120, "the first look")
        with tracker.pause_updates():
            tracker.global_progress.next_fetch_time += 100
            tracker.update_epoch(1)
        wait_until(tracker.fetched_global_progress_this_epoch.is_set, 120, "the first look in step 1")


def test_who_says_goodbye_is_not_reckoned_with(tmp_path):
    with ExitStack() as stack:
        pair = Pair(stack, tmp_path)
        pair.global_step()
        leaving, staying = pair.optimizers
        leaving.say_goodbye()
        wait_until(lambda: staying.tracker.global_progress.num_peers == 1, 30, "the goodbye")


def test_client_is_no_donor(tmp_path):
    """Nobody can ask it; a newcomer that finds no other starts without waiting."""
    with ExitStack() as stack:
        newcomer = stack.enter_context(local_peer(tmp_path / "newcomer", "run"))
        address = str(newcomer.dht.get_visible_maddrs()[0])
        client = stack.enter_context(local_peer(tmp_path / "client", "run", (address,), client_mode=True))
        options = {"run_id": "run", "target_batch_size": 8}
        optimizers = [
            stack.enter_context(local_optimizer(build_model(CONFIG, "run"), peer, 4, client_mode=is_client, **options))
            for peer, is_client in ((newcomer, False), (client, True))
        ]
        optimizers[1].state_averager.local_epoch = 5
        optimizers[1].share_state()
        started = time.monotonic()
        assert not optimizers[0].load_state_from_peers()
        assert time.monotonic() - started < 5


def test_joining_in_the_middle_of_a_step_throws_nobody_back(tmp_path):
    with ExitStack() as stack:
        pair = Pair(stack, tmp_path, averaging_compression="none", load_state_compression="none")
        pair.global_step()
        peer = pair.welcome(tmp_path / "third")
        model = build_model(CONFIG, "run")
        newcomer = stack.enter_context(
            local_optimizer(model, peer, 4, run_id="run", target_batch_size=8, load_state_compression="none")
        )
        step = stack.enter_context(ThreadPoolExecutor(1)).submit(pair.global_step)
        wait_until(lambda: pair.optimizers[0].scheduled_grads is not None, 120, "the search for a group")
        wait_until(newcomer.load_state_from_peers, 120, "a state in the middle of the step")
        assert newcomer.local_epoch in (1, 2)
        step.result(60)
        assert [optimizer.local_epoch for optimizer in pair.optimizers] == [2, 2]
        assert [optimizer.last_group_size for optimizer in pair.optimizers] == [2, 2]
        wait_until(lambda: newcomer.load_state_from_peers() and newcomer.local_epoch == 2, 120, "the step's state")
        assert largest_difference(model, pair.models[0]) < 1e-6
        assert largest_difference(*pair.models) < 1e-6


async def collect_garbage(self) -> None:
    """Runs in the averager process."""
    gc.collect()


def test_rounds_that_wait_for_their_trigger_survive_the_garbage_collector(tmp_path, monkeypatch):
    monkeypatch.setattr(SafeAverager, "collect_garbage", collect_garbage, raising=False)
    with ExitStack() as stack:
        pair = Pair(stack, tmp_path)
        for optimizer in pair.optimizers:
            optimizer.scheduled_grads = optimizer.grad_averager.schedule_step(timeout=30.0)
        rounds = [optimizer.scheduled_grads for optimizer in pair.optimizers]
        wait_for_groups(rounds)
        for optimizer in pair.optimizers:
            optimizer.grad_averager._outer_pipe.send(("collect_garbage", [], {}))
        pair.global_step()
        assert [optimizer.last_group_size for optimizer in pair.optimizers] == [2, 2]


async def end_another_round(self) -> None:
    """Runs in the averager process: the round before ends while the next waits for its trigger."""
    self._pending_groups_registered.set()


def test_peers_that_find_the_step_due_seconds_apart_average_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(SafeAverager, "end_another_round", end_another_round, raising=False)
    with ExitStack() as stack:
        pair = Pair(stack, tmp_path, averaging_compression="none", averaging_timeout=60.0)
        averagers = [optimizer.grad_averager for optimizer in pair.optimizers]
        pair.fill_gradients(0.0, 1.0)
        rounds = [averager.schedule_step(timeout=60.0) for averager in averagers]
        wait_for_groups(rounds)
        averagers[1]._outer_pipe.send(("end_another_round", [], {}))
        rounds[0].allow_allreduce()
        time.sleep(7.0)  # less than a quarter of the timeout
        rounds[1].allow_allreduce()
        for averager, control in zip(averagers, rounds, strict=True):
            control.result(20)
            with averager.get_tensors() as gradients:
                assert all((gradient == 0.5).all() for gradient in gradients)


@pytest.mark.parametrize(("ahead", "is_client"), [(0, False), (0, True), (1, True)])
def test_peers_that_are_a_round_apart_do_not_wait_for_each_other(tmp_path, ahead, is_client):
    """One has taken a step alone. It averages gradients with one that still waits for it to average parameters."""
    with ExitStack() as stack:
        pair = Pair(stack, tmp_path, is_client=is_client, averaging_compression="none", averaging_timeout=120.0)
        pair.fill_gradients(0.0, 1.0)
        gradients = [optimizer.grad_averager.schedule_step(timeout=100.0) for optimizer in pair.optimizers]
        parameters = [optimizer.state_averager.schedule_step(timeout=100.0) for optimizer in pair.optimizers]
        wait_for_groups([*gradients, *parameters])
        behind = 1 - ahead
        started = time.monotonic()
        parameters[behind].allow_allreduce()
        gradients[ahead].allow_allreduce()
        parameters[behind].result(20)  # a silent peer is waited for 30 seconds
        gradients[behind].allow_allreduce()
        for control, optimizer in zip(gradients, pair.optimizers, strict=True):
            control.result(20)
            with optimizer.grad_averager.get_tensors() as averaged:
                assert all((gradient == 0.5).all() for gradient in averaged)
        parameters[ahead].allow_allreduce()  # the other is no longer there
        parameters[ahead].result(20)
        assert time.monotonic() - started < 20


@pytest.mark.parametrize("has_left", [False, True], ids=["alone", "their round of parameters is over"])
def test_peer_whose_round_meets_the_next_one_of_the_others_is_at_their_step_from_then_on(tmp_path, has_left):
    """Or it would begin that step with nothing to contribute, and be late for the next one, too: in gradients, and in
    parameters, where the other is in a round of its own and this one in theirs of the step before."""
    with ExitStack() as stack:
        in_background = {"delay_grad_averaging": True, "delay_optimizer_step": True}
        pair = Pair(stack, tmp_path, averaging_compression="none", averaging_timeout=60.0, **in_background)
        pair.global_step()
        late, other = pair.optimizers
        pair.accumulate(1)
        if has_left:
            pair.accumulate(0)
            late.scheduled_grads = None  # it was for the step before
            last_round = late.state_averager.current_round
            late._update_global_epoch(None)
            round_of_both = other.state_averager.schedule_step(gather=2, timeout=60.0)
            wait_until(lambda: late.state_averager.current_round is not last_round, 120, "a round in the background")
            wait_for_groups([round_of_both, late.state_averager.current_round])
            round_of_both.cancel()
        with other.tracker.pause_updates():  # it takes a step without us
            other.state_averager.step(increment_epoch=True, optimizer_step=True)
            other.tracker.update_epoch(other.local_epoch)
        assert largest_difference(*pair.models) > 1e-3
        for number, optimizer in enumerate(pair.optimizers):
            pair.accumulate(number)
            optimizer.scheduled_grads = None  # it was for the step before
        if not has_left:
            late._update_global_epoch(None)
        next_step = pair.executor.submit(late._update_global_epoch, None)  # due, as far as it knows
        other._update_global_epoch(None)
        next_step.result(120)
        for optimizer in pair.optimizers:
            optimizer.finish_pending_update()
        assert (late.local_epoch, other.local_epoch) == (3, 3)
        assert late.last_completed_step == late.tracker.local_progress.epoch == 3
        assert largest_difference(*pair.models) < 1e-6, "it has the update that it was late for"


def test_group_of_the_others_next_step_averages_parameters_then(tmp_path):
    """Who begins it a step too early is alone in it, and so are the others then, and each time after that."""
    with ExitStack() as stack:
        pair = Pair(stack, tmp_path, averaging_compression="none", averaging_timeout=60.0)
        one, other = (optimizer.state_averager for optimizer in pair.optimizers)
        fill_parameters(one, 0.0)
        fill_parameters(other, 1.0)
        control = other.schedule_step(gather=2, timeout=60.0)
        step = {"increment_epoch": True, "averaging_round": True, "averaging_opts": {"timeout": 60.0}}
        one.step(**step)
        wait_for_groups([control, one.current_round])
        control.allow_allreduce()
        one.step(**step)
        assert len(control.result(30)) == 2
        for averager in (one, other):
            assert all(torch.allclose(p, torch.full_like(p, 0.5)) for p in averager._optimized_parameters())


@pytest.mark.parametrize(
    ("epochs", "expected"),
    [([2], 2), ([1, 2, 1], 2), ([1, 1], 1), ([0, 3], 1), ([], 1), (["2", None, [2]], 1)],
    ids=["all others", "one of them", "none", "far from ours", "alone", "nonsense"],
)
def test_one_that_is_a_step_ahead_draws_along_all_that_its_round_meets(tmp_path, epochs, expected):
    """Two of three that are late at once would otherwise stay so, and the third would average parameters alone."""
    with ExitStack() as stack:
        peer = stack.enter_context(local_peer(tmp_path, "run"))
        optimizer = stack.enter_context(local_optimizer(build_model(CONFIG, "run"), peer, 4, run_id="run"))
        optimizer.state_averager.local_epoch = optimizer._gradient_round_epoch = 1
        optimizer._keep_up_with(epochs)
        assert optimizer.local_epoch == expected
        assert optimizer.state_averager.is_behind == (expected == 2)


def test_round_that_is_called_off_keeps_nobody_waiting(tmp_path):
    with ExitStack() as stack:
        pair = Pair(stack, tmp_path, averaging_timeout=120.0)
        rounds = [optimizer.grad_averager.schedule_step(timeout=100.0) for optimizer in pair.optimizers]
        wait_for_groups(rounds)
        rounds[0].cancel()
        rounds[1].allow_allreduce()
        rounds[1].result(20)  # a silent peer is waited for 30 seconds


def test_catching_up_keeps_nobody_waiting_who_averages_parameters(tmp_path):
    with ExitStack() as stack:
        late, other = Pair(stack, tmp_path, averaging_timeout=80.0, load_state_timeout=5.0).optimizers
        for optimizer in (late, other):
            optimizer.scheduled_state = optimizer.state_averager.schedule_step(gather=1, timeout=60.0)
        rounds = [late.scheduled_state, other.scheduled_state]
        wait_for_groups(rounds)
        catching_up = stack.enter_context(ThreadPoolExecutor(1)).submit(late.load_state_from_peers)
        other.scheduled_state.allow_allreduce()
        assert len(other.scheduled_state.result(15)) == 2, "a silent peer is waited for 20 seconds"
        catching_up.result(30)


def test_newcomer_without_the_last_update_takes_it_from_the_others_and_does_not_draw_them_back(tmp_path):
    with ExitStack() as stack:
        pair = Pair(stack, tmp_path, averaging_compression="none")
        newcomer, other = (optimizer.state_averager for optimizer in pair.optimizers)
        fill_parameters(newcomer, 0.0)
        fill_parameters(other, 1.0)
        newcomer.is_behind = True
        rounds = [
            pair.executor.submit(averager.step, averaging_round=True, averaging_opts={"timeout": 10.0})
            for averager in (newcomer, other)
        ]
        for finished in rounds:
            finished.result(20)
        for averager in (newcomer, other):
            assert all(torch.allclose(p, torch.ones_like(p)) for p in averager._optimized_parameters())
        assert not newcomer.is_behind


def test_state_in_the_middle_of_an_update_is_told_with_the_step_that_it_is_of(tmp_path):
    with ExitStack() as stack:
        peer = stack.enter_context(local_peer(tmp_path, "run"))
        optimizer = stack.enter_context(local_optimizer(build_model(CONFIG, "run"), peer, 4, run_id="run"))
        averager, pool = optimizer.state_averager, stack.enter_context(ThreadPoolExecutor(2))
        with averager.lock_optimizer:  # as hivemind's thread in the background does
            states = [pool.submit(averager.snapshot), pool.submit(averager.get_current_state)]
            optimizer.opt.step()
            time.sleep(0.2)
            averager.local_epoch = 1
            averager._update_scheduler()
        assert [state.result(10)[0]["epoch"] for state in states] == [1, 1]


def test_newcomer_does_not_take_the_step_that_was_due_before_its_download(tmp_path):
    with ExitStack() as stack:
        pair = Pair(stack, tmp_path)
        pair.global_step()
        peer = pair.welcome(tmp_path / "third")
        model = build_model(CONFIG, "run")
        newcomer = stack.enter_context(local_optimizer(model, peer, 4, run_id="run", target_batch_size=8))
        newcomer.tracker.global_progress.eta_next_epoch = get_dht_time()  # of the step that the two have made since
        wait_until(newcomer.load_state_from_peers, 120, "a state")
        assert newcomer.local_epoch == 1 and not newcomer.tracker.ready_to_update_epoch
        wait_until(newcomer.tracker.fetched_global_progress_this_epoch.is_set, 120, "the others' reports")


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


class Round:
    """A round of all-reduce, as far as a peer that sends its part can tell."""

    async def rpc_aggregate_part(self, stream, context):
        async for _ in stream:
            yield AveragingData(code=AVERAGED_PART)


class LateAverager(SafeAverager):
    """Has no process. A round has just ended, which hivemind takes for the news that it waits for."""

    def __init__(self):
        self._running_groups, self._finished_groups, self._refused = {}, [], []
        self._matchmaking = SimpleNamespace(is_called_off=lambda group_id: False)
        self.allreduce_kwargs = {"reducer_timeout": 5.0}
        self._pending_groups_registered = asyncio.Event()
        self._pending_groups_registered.set()

    def __del__(self):
        pass

    async def take_part_before_the_group_is_known(self) -> AsyncIterator[AveragingData]:
        loop = asyncio.get_running_loop()
        current_round = loop.create_future()
        current_round.set_result(Round())
        loop.call_later(0.3, self._running_groups.update, {b"group": current_round})
        return self.rpc_aggregate_part(as_aiter(AveragingData(group_id=b"group")), SimpleNamespace(remote_id=None))

    async def first_answer(self) -> AveragingData:
        return await anext(await self.take_part_before_the_group_is_known())

    async def ends_by_itself(self, seconds: float) -> bool:
        """Whether it ends `seconds` after its last answer, before the caller closes the stream."""
        answers = await self.take_part_before_the_group_is_known()
        await anext(answers)
        try:
            await asyncio.wait_for(anext(answers), seconds)
        except StopAsyncIteration:
            return True
        except TimeoutError:
            return False


def test_peer_that_sends_its_part_after_the_round_is_refused_at_once():
    averager = LateAverager()
    averager._finished_groups.append(b"group")
    started = time.monotonic()
    assert asyncio.run(averager.first_answer()).code == BAD_GROUP_ID
    assert time.monotonic() - started < 1


def test_peer_that_hears_late_of_its_group_takes_what_the_others_send():
    assert asyncio.run(LateAverager().first_answer()).code == AVERAGED_PART


def test_stream_is_closed_by_the_caller_and_not_at_once_by_the_one_that_answers(monkeypatch):
    """libp2p's daemon may discard what it has not passed on yet when the one that answers closes first."""
    assert not asyncio.run(LateAverager().ends_by_itself(1.0))
    monkeypatch.setattr(SafeAverager, "LINGER_SECONDS", 0.5)
    assert asyncio.run(LateAverager().ends_by_itself(5.0))


def test_callers_close_the_stream_once_they_have_all(tmp_path, monkeypatch):
    """They would wait until the others do; for a state that nobody offers, nobody waits."""
    monkeypatch.setattr(SafeAverager, "LINGER_SECONDS", 60.0)
    with ExitStack() as stack:
        pair = Pair(stack, tmp_path)
        first, second = pair.optimizers
        started = time.monotonic()
        assert not first.load_state_from_peers()
        pair.global_step()
        assert first.last_group_size == second.last_group_size == 2
        first.state_averager.local_epoch = 0
        wait_until(first.load_state_from_peers, 120, "the state of the other peer")
        assert time.monotonic() - started < 30
