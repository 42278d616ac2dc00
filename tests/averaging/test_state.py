"""Tests of the training state: updates, offers, downloads from good and faulty donors, and rollback."""

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import AsyncIterator  # noqa: UP035  hivemind does not recognize that of collections.abc

import pytest
import torch
from hivemind.averaging.averager import DecentralizedAverager
from hivemind.optim import state_averager
from hivemind.p2p import P2PDaemonError, PeerID
from hivemind.p2p.p2p_daemon_bindings.p2pclient import Client
from hivemind.proto.averaging_pb2 import DownloadData, DownloadRequest
from hivemind.utils import MSGPackSerializer, get_dht_time
from hivemind.utils.timed_storage import ValueWithExpiration
from transformers import AlbertConfig

from arguments import HyperparameterArguments
from lib.averaging import wire
from lib.averaging.download import StateDownload, StateQuery, TooSlowError, rank_donors
from lib.averaging.schedule import set_schedule
from lib.averaging.state import StateLoadError, TrainingStateAverager
from lib.training.model import build_model
from lib.training.optimizer import COMPRESSIONS, build_local_optimizer, build_param_groups, build_scheduler
from tests.support.peers import TINY_ALBERT, local_peer, wait_until

CONFIG = AlbertConfig(vocab_size=1000, **{name: value for name, value in TINY_ALBERT.items() if name != "model_type"})
OFFERS = "run_state_averager.all_averagers"


def arguments(**options) -> HyperparameterArguments:
    return HyperparameterArguments(**{"learning_rate": 0.01, "warmup_steps": 0, "total_steps": 1000, **options})


def build_averager(
    model: torch.nn.Module,
    peer,
    hyperparameters: HyperparameterArguments | None = None,
    compression: str = "none",
    averager_class: type = TrainingStateAverager,
    offload_optimizer: bool = True,
    **options,
):
    """Build a state averager with the settings of a trainer."""
    hyperparameters = hyperparameters or arguments()
    return averager_class(
        dht=peer.dht,
        prefix="run_state_averager",
        params=build_param_groups(model, hyperparameters.weight_decay),
        optimizer=partial(build_local_optimizer, args=hyperparameters),
        scheduler=partial(build_scheduler, args=hyperparameters),
        initialize_optimizer=False,
        offload_optimizer=offload_optimizer,
        custom_gradients=offload_optimizer,
        state_compression=COMPRESSIONS[compression](),
        **{"allow_state_sharing": False, "start": True, **options},
    )


class Swarm:
    """Connected peers in this process, each with a state averager around a separate model."""

    def __init__(self, stack: ExitStack, folder: Path):
        self.stack, self.folder, self.peers = stack, folder, []
        self.pool = ThreadPoolExecutor(4)
        stack.callback(self.pool.shutdown, cancel_futures=True)

    def add_peer(self, client_mode: bool = False):
        address = (str(self.peers[0].dht.get_visible_maddrs()[0]),) if self.peers else ()
        folder = self.folder / str(len(self.peers))
        peer = self.stack.enter_context(local_peer(folder, "run", address, client_mode=client_mode))
        self.peers.append(peer)
        return peer

    def add(self, behaviour: Callable | None = None, client_mode: bool = False, **options) -> TrainingStateAverager:
        """Add a peer with a state averager.

        :param behaviour: replaces hivemind's method that serves downloads, in the averager's process
        """
        peer = self.add_peer(client_mode)
        averager = build_averager(build_model(CONFIG, "run"), peer, start=False, **options)
        averager.behaviour = behaviour
        averager.run_in_background()
        self.stack.callback(shut_down, averager)
        return averager

    def wait_for_offers(self, *donors: TrainingStateAverager) -> None:
        """Wait until the DHT has the offers of these donors, and no others, at every peer."""
        expected = {donor.peer_id.to_bytes(): donor.state_sharing_priority for donor in donors}

        def known(peer) -> dict:
            found = peer.dht.get(OFFERS, latest=True)
            return {} if found is None else {key: offer.value for key, offer in found.value.items()}

        wait_until(lambda: all(known(peer) == expected for peer in self.peers), 120, "the offers")


def shut_down(averager: TrainingStateAverager) -> None:
    if averager.is_alive():
        averager.shutdown()


@pytest.fixture
def swarm(tmp_path) -> Iterator[Swarm]:
    with ExitStack() as stack:
        yield Swarm(stack, tmp_path)


@pytest.fixture(autouse=True)
def donors_behave_as_told(monkeypatch) -> None:
    monkeypatch.setattr(DecentralizedAverager, "rpc_download_state", serve)


hiveminds_rpc_download_state = DecentralizedAverager.rpc_download_state


async def serve(self, request: DownloadRequest, context) -> AsyncIterator[DownloadData]:
    behaviour = getattr(self, "behaviour", None) or hiveminds_rpc_download_state
    async for message in behaviour(self, request, context):
        yield message


def offer(averager: TrainingStateAverager, step: int, priority: float | None = None) -> None:
    averager.sync_with_main_parameters(step)
    averager.state_sharing_priority = step if priority is None else priority
    averager.allow_state_sharing = True


@torch.no_grad()
def fill_parameters(averager: TrainingStateAverager, value: float) -> None:
    for parameter in averager._optimized_parameters():
        parameter.fill_(value)


def fill_gradients(averager: TrainingStateAverager, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in averager._optimized_parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def flat(tensors) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def learning_rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


# Schedule


def build_schedule():
    args = arguments(warmup_steps=10, total_steps=50)
    return build_scheduler(build_local_optimizer(build_param_groups(torch.nn.Linear(2, 2), 0.0), args), args)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_schedule_is_that_of_stepping_to_the_same_step():
    direct = build_schedule()
    for epoch in (50, 0, 1, 60, 9, 10, 11, 49):  # forwards and backwards
        stepped = build_schedule()
        for _ in range(epoch):
            stepped.step()
        set_schedule(direct, epoch)
        for scheduler in (direct, stepped):
            assert (scheduler.last_epoch, scheduler._step_count) == (epoch, epoch + 1)
        assert learning_rates(direct.optimizer) == learning_rates(stepped.optimizer)
        assert direct.get_last_lr() == stepped.get_last_lr() == learning_rates(direct.optimizer)
    direct.step()
    assert learning_rates(direct.optimizer) == [0.0, 0.0]


def test_step_number_of_a_state_costs_no_time_and_may_be_lower(swarm):
    averager = swarm.add()
    metadata, tensors = averager.snapshot()
    started = time.monotonic()
    averager.restore({**metadata, "epoch": 10**6}, tensors)
    assert time.monotonic() - started < 2
    assert averager.local_epoch == 10**6
    assert learning_rates(averager.optimizer) == [0.0, 0.0]
    for go_back in (lambda: averager.restore({**metadata, "epoch": 500}, tensors),
                    lambda: averager.sync_with_main_parameters(500)):  # fmt: skip
        averager.restore({**metadata, "epoch": 900}, tensors)
        go_back()
        assert averager.local_epoch == averager.applied_epoch == averager.snapshot()[0]["epoch"] == 500
        assert learning_rates(averager.optimizer) == pytest.approx([0.005, 0.005])


# Updates


@pytest.mark.parametrize("optimizer", ["lamb", "adamw"])
@pytest.mark.parametrize("are_averaged", [False, True])
def test_updates_are_those_of_one_process(swarm, optimizer, are_averaged):
    """With `are_averaged`, each update starts from the averaged parameters of a group."""
    args = arguments(optimizer=optimizer, warmup_steps=2, total_steps=5)
    averager = swarm.add(hyperparameters=args)
    alone = build_local_optimizer(build_param_groups(build_model(CONFIG, "run"), args.weight_decay), args)
    scheduler = build_scheduler(alone, args)
    own = [parameter for group in alone.param_groups for parameter in group["params"]]
    start = flat(own)
    for epoch in (1, 2, 3, 4):
        fill_gradients(averager, seed=epoch)
        averaged = [parameter.detach() * 0.5 for parameter in own] if are_averaged else None
        averager.apply_update(epoch, averaged)
        for parameter, other in zip(own, averager._optimized_parameters(), strict=True):
            parameter.grad = other.grad
        if are_averaged:
            with torch.no_grad():
                torch._foreach_mul_(own, 0.5)
        alone.step()
        scheduler.step()
        assert torch.equal(flat(averager._optimized_parameters()), flat(own))
        assert learning_rates(averager.optimizer) == learning_rates(alone)
        assert averager.applied_epoch == epoch and averager.local_epoch == 0
    assert (flat(own) - start).abs().max() > 1e-3
    averager._apply_optimizer_parameters_()
    assert torch.equal(flat(averager.main_parameters), flat(own))


def test_update_has_the_learning_rate_of_the_previous_step(swarm):
    averager = swarm.add(hyperparameters=arguments(warmup_steps=0, total_steps=10))
    used = []
    step = averager.optimizer.step
    averager.optimizer.step = lambda: (used.extend(learning_rates(averager.optimizer)[:1]), step())
    for epoch in (1, 5, 3):  # 5: after steps without this peer; 3: after a rollback
        averager.apply_update(epoch)
    assert used == pytest.approx([0.010, 0.006, 0.008])
    assert learning_rates(averager.optimizer) == pytest.approx([0.007, 0.007])


def test_averaged_parameters_of_another_model_change_nothing(swarm):
    averager = swarm.add()
    before = averager.snapshot()[1]
    with pytest.raises(ValueError, match="other shapes"):
        averager.apply_update(1, [torch.zeros(3) for _ in averager._optimized_parameters()])
    assert averager.applied_epoch == 0
    assert torch.equal(flat(before), flat(averager.snapshot()[1]))


def test_nobody_reads_the_state_in_the_middle_of_an_update(swarm):
    averager = swarm.add()
    is_in_the_middle, may_end = threading.Event(), threading.Event()

    def step() -> None:
        is_in_the_middle.set()
        may_end.wait(60)
        fill_parameters(averager, 2.0)

    averager.optimizer.step = step
    averaged = [torch.ones_like(parameter) for parameter in averager._optimized_parameters()]
    averager.snapshot()  # keeps a copy of the state before the update
    update = swarm.pool.submit(averager.apply_update, 1, averaged)
    assert is_in_the_middle.wait(60)
    readers = [swarm.pool.submit(averager.snapshot), swarm.pool.submit(averager.get_current_state),
               swarm.pool.submit(averager._apply_optimizer_parameters_)]  # fmt: skip
    assert not wait(readers, timeout=0.5).done
    may_end.set()
    update.result(60)
    for reader in readers[:2]:
        metadata, tensors, *_ = reader.result(60)
        assert metadata["epoch"] == 1
        assert all((tensor == 2.0).all() for tensor in tensors[: len(averaged)])
    readers[2].result(60)
    assert all((parameter == 2.0).all() for parameter in averager.main_parameters)


def test_state_during_an_update_by_hivemind_carries_its_own_step(swarm):
    averager = swarm.add()
    with averager.lock_optimizer:  # as in hivemind's background thread
        states = [swarm.pool.submit(averager.snapshot), swarm.pool.submit(averager.get_current_state)]
        averager.optimizer.step()
        assert not wait(states, timeout=0.2).done
        averager.local_epoch = 1
        averager._update_scheduler()
    assert [state.result(10)[0]["epoch"] for state in states] == [1, 1]


def test_offers_and_snapshots_carry_the_applied_step(swarm):
    averager = swarm.add()
    averager.sync_with_main_parameters(5)
    averager.local_epoch = 6  # the update to step 6 is still running in the background
    assert averager.applied_epoch == averager.snapshot()[0]["epoch"] == averager.get_current_state()[0]["epoch"] == 5


# Copies of the state


def test_downloads_of_one_state_share_an_unchanging_copy(swarm):
    averager = swarm.add()
    first, second = (averager.get_current_state()[1] for _ in range(2))
    snapshot = averager.snapshot()[1]
    live = {parameter.data_ptr() for parameter in averager._optimized_parameters()}
    pointers = [tensor.data_ptr() for tensor in first]
    assert pointers == [tensor.data_ptr() for tensor in second] == [tensor.data_ptr() for tensor in snapshot]
    assert not live & set(pointers)
    before = flat(first).clone()
    fill_gradients(averager, seed=0)
    averager.apply_update(1)
    assert torch.equal(flat(first), before)
    third = averager.snapshot()[1]
    assert not torch.equal(flat(third), before)
    averager.restore(*averager.snapshot())
    assert averager.snapshot()[1][0].data_ptr() != third[0].data_ptr()


def test_restored_tensors_are_copied(swarm):
    """torch's optimizers would keep and update the tensors that they are given."""
    averager = swarm.add()
    state = averager.snapshot()
    before = flat(state[1]).clone()
    averager.restore(*state)
    fill_gradients(averager, seed=0)
    averager.optimizer.step()
    assert torch.equal(flat(state[1]), before)


def test_copy_is_freed_after_a_while(swarm, monkeypatch):
    monkeypatch.setattr(TrainingStateAverager, "COPY_SECONDS", 0.2)
    averager = swarm.add()
    averager.snapshot()
    assert averager._copy is not None
    wait_until(lambda: averager._copy is None, 120, "the end of the copy")


begun, may_continue = multiprocessing.Event(), multiprocessing.Event()


async def pause(self, request: DownloadRequest, context) -> AsyncIterator[DownloadData]:
    messages = aiter(hiveminds_rpc_download_state(self, request, context))
    yield await anext(messages)
    begun.set()
    while not may_continue.is_set():
        await asyncio.sleep(0.05)
    async for message in messages:
        yield message


def test_download_that_takes_longer_than_a_step_is_of_one_step(swarm):
    begun.clear()
    may_continue.clear()
    donor, newcomer = swarm.add(behaviour=pause), swarm.add()
    metadata, tensors = donor.snapshot()
    donor.restore({**metadata, "epoch": 5}, [torch.ones_like(tensor) for tensor in tensors])
    donor.state_sharing_priority, donor.allow_state_sharing = 5, True
    swarm.wait_for_offers(donor)
    download = swarm.pool.submit(newcomer.download_state)
    assert begun.wait(60)
    fill_gradients(donor, seed=0)
    donor.optimizer.step()
    fill_parameters(donor, 2.0)
    may_continue.set()
    _, metadata, tensors = download.result(60)
    assert metadata["epoch"] == 5
    assert all((tensor == 1.0).all() for tensor in tensors)


# Downloads


def statistics(averager: TrainingStateAverager) -> list:
    state = averager.optimizer.state_dict()["state"]
    return [float(value) if torch.tensor(value).ndim == 0 else value for entry in state.values()
            for _, value in sorted(entry.items())]  # fmt: skip


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize("optimizer", ["lamb", "adamw"])
@pytest.mark.parametrize(("compression", "tolerance"), [("none", 0.0), ("float16", 2e-3)])
@pytest.mark.parametrize("offload_optimizer", [True, False], ids=["trainer", "observer"])
def test_state_survives_the_transfer(swarm, optimizer, compression, tolerance, offload_optimizer):
    """LAMB's statistics are tensors, or numbers where a norm is zero. Float16 has no exact step counts above 2048."""
    options = {"hyperparameters": arguments(optimizer=optimizer), "compression": compression}
    donor = swarm.add(**options)
    newcomer = swarm.add(**options, offload_optimizer=offload_optimizer)
    for epoch in (1, 2):
        fill_gradients(donor, seed=epoch)
        donor.apply_update(epoch)
    for entry in donor.optimizer.state.values():
        entry["step"] += 5000  # an integer in LAMB, a tensor in AdamW
    donor._apply_optimizer_parameters_()
    offer(donor, step=2)
    swarm.wait_for_offers(donor)
    assert newcomer.load_state_from_peers()
    assert newcomer.local_epoch == newcomer.applied_epoch == 2
    assert learning_rates(newcomer.optimizer) == learning_rates(donor.optimizer)
    assert torch.allclose(flat(newcomer.main_parameters), flat(donor.main_parameters), rtol=tolerance, atol=1e-6)
    ours, theirs = statistics(newcomer), statistics(donor)
    assert len(ours) == len(donor._optimized_parameters()) * (6 if optimizer == "lamb" else 3)
    for own, other in zip(ours, theirs, strict=True):
        assert torch.allclose(torch.as_tensor(own), torch.as_tensor(other), rtol=tolerance, atol=1e-6)
    assert {entry["step"] for entry in newcomer.optimizer.state_dict()["state"].values()} == {5002}
    for averager in (donor, newcomer):
        fill_gradients(averager, seed=3)
        averager.apply_update(3)
    assert torch.allclose(
        flat(newcomer._optimized_parameters()), flat(donor._optimized_parameters()), rtol=10 * tolerance, atol=1e-3
    )


def test_newcomer_that_finds_no_donor_starts_at_once(swarm):
    """The state of a client cannot be downloaded."""
    newcomer, client = swarm.add(), swarm.add(client_mode=True)
    with pytest.raises(ValueError, match="client mode"):
        client.allow_state_sharing = True
    started = time.monotonic()
    assert not newcomer.load_state_from_peers()
    assert time.monotonic() - started < 5


def test_silent_donor_is_passed_over_and_without_any_ours_stays(swarm):
    """The first donor stops answering and the second answers; then neither answers."""
    silent, good = swarm.add(), swarm.add()
    newcomer = swarm.add(donor_timeout=3.0, download_timeout=10.0)
    fill_gradients(good, seed=0)
    good.apply_update(1)
    good._apply_optimizer_parameters_()
    offer(silent, step=1, priority=100.0)  # highest priority: asked first
    offer(good, step=1)
    swarm.wait_for_offers(silent, good)
    with silent.lock_averaged_tensors:
        assert newcomer.load_state_from_peers()
        assert newcomer.local_epoch == 1
        assert torch.equal(flat(newcomer.main_parameters), flat(good.main_parameters))
        before = flat(newcomer.main_parameters)
        with good.lock_averaged_tensors:
            started = time.monotonic()
            assert not newcomer.load_state_from_peers()
            assert time.monotonic() - started < 15
    assert torch.equal(flat(newcomer.main_parameters), before)
    assert newcomer.local_epoch == 1


async def trickle(self, request: DownloadRequest, context) -> AsyncIterator[DownloadData]:
    async for message in hiveminds_rpc_download_state(self, request, context):
        yield message
        await asyncio.sleep(1)


async def send_slowly(self, request: DownloadRequest, context) -> AsyncIterator[DownloadData]:
    async for message in hiveminds_rpc_download_state(self, request, context):
        yield message
        await asyncio.sleep(0.05)


async def break_off(self, request: DownloadRequest, context) -> AsyncIterator[DownloadData]:
    messages = aiter(hiveminds_rpc_download_state(self, request, context))
    for _ in range(3):
        yield await anext(messages)


async def fail(self, request: DownloadRequest, context) -> AsyncIterator[DownloadData]:
    yield await anext(aiter(hiveminds_rpc_download_state(self, request, context)))
    raise ConnectionResetError("as when the donor's process dies")


downloads_served = []  # in the donor's averager process


async def break_off_once(self, request: DownloadRequest, context) -> AsyncIterator[DownloadData]:
    downloads_served.append(request)
    behaviour = break_off if len(downloads_served) == 1 else hiveminds_rpc_download_state
    async for message in behaviour(self, request, context):
        yield message


def test_shutdown_cancels_the_download(swarm):
    newcomer, silent = swarm.add(), swarm.add()
    offer(silent, step=5)
    swarm.wait_for_offers(silent)
    with silent.lock_averaged_tensors:
        answer = swarm.pool.submit(newcomer.download_state)
        assert not wait([answer], timeout=1).done
        newcomer.shutdown()
        assert answer.result(5) is None


def test_download_that_breaks_off_is_tried_again(swarm):
    """The donor may be the only peer with the run's state; a newcomer without it would begin a second run."""
    donor, newcomer = swarm.add(behaviour=break_off_once), swarm.add()
    offer(donor, step=5)
    swarm.wait_for_offers(donor)
    assert newcomer.load_state_from_peers() and newcomer.local_epoch == 5


@pytest.mark.parametrize("behaviour", [trickle, break_off, fail])
def test_unfinished_download_takes_bounded_time_and_changes_nothing(swarm, behaviour):
    donor, newcomer = swarm.add(behaviour=behaviour), swarm.add(donor_timeout=3.0, download_timeout=8.0)
    offer(donor, step=5)
    swarm.wait_for_offers(donor)
    before = flat(newcomer.snapshot()[1])
    started = time.monotonic()
    assert not newcomer.load_state_from_peers()
    assert time.monotonic() - started < 13
    assert newcomer.local_epoch == 0
    assert torch.equal(before, flat(newcomer.snapshot()[1]))


def test_donor_that_trickles_leaves_the_others_their_time(swarm):
    slow, good = swarm.add(behaviour=trickle), swarm.add()
    newcomer = swarm.add(download_timeout=40.0)
    offer(slow, step=5, priority=100)
    offer(good, step=5)
    swarm.wait_for_offers(slow, good)
    donor, _, _ = newcomer.download_state()
    assert donor == str(good.peer_id)


def test_slow_donor_without_alternatives_may_finish(swarm):
    """The other offers are of peers that do not exist."""
    slow, newcomer = swarm.add(behaviour=send_slowly), swarm.add(download_timeout=100.0)
    offer(slow, step=5)
    offer_nonexistent_peers(newcomer, 3)
    wait_until(lambda: len(newcomer.dht.get(OFFERS, latest=True).value) == 4, 120, "the offers")
    assert newcomer.load_state_from_peers() and newcomer.local_epoch == 5


def make_query(timeout: float = 100.0, **options) -> StateQuery:
    return StateQuery(
        **{"min_epoch": 0, "credible_epoch": None, "only_metadata": False, "timeout": timeout, **options}
    )


def make_dial(result: Exception | None) -> asyncio.Future:
    dial = asyncio.Future()
    dial.set_result(result)
    return dial


@pytest.mark.parametrize(
    ("elapsed", "fraction", "is_too_slow"),
    [(5, 0.0, False), (11, 0.0, True), (50, 0.6, True), (50, 0.7, False), (90, 1.0, True), (70, 0.95, False)],
)
def test_slow_donor_is_abandoned_for_reachable_donors(elapsed, fraction, is_too_slow):
    async def check(dials: list[Exception | None]) -> bool:
        download = StateDownload(SimpleNamespace(donor_timeout=60.0), make_query())
        began = download.started = time.monotonic() - elapsed
        download.deadline = began + 100
        for number, result in enumerate(dials):
            download._dials[number] = make_dial(result)
            download._queue.append(number)
        try:
            download._check_pace(began, fraction)
        except TooSlowError:
            return True
        return False

    assert asyncio.run(check([OSError(), None])) == is_too_slow
    assert not asyncio.run(check([OSError()])), "nobody else can be reached"
    assert not asyncio.run(check([])), "it is the last one"


def random_peer() -> PeerID:
    return PeerID(b"\x12\x20" + os.urandom(32))


def offer_nonexistent_peers(averager: TrainingStateAverager, number: int) -> None:
    stores = [
        averager.dht.store(
            OFFERS, float(2**31 - 1), get_dht_time() + 300, subkey=random_peer().to_bytes(), return_future=True
        )
        for _ in range(number)
    ]
    assert all(store.result(60) for store in stores)


def find_slowly(method: Callable, real_peers: list[PeerID]) -> Callable:
    """Wrap a call of libp2p's client so that it fails after 2 seconds for peers that do not exist."""

    async def find(self, peer_id: PeerID, *args):
        if peer_id not in real_peers:
            await asyncio.sleep(2)
            raise P2PDaemonError("not found")
        return await method(self, peer_id, *args)

    return find


def test_offers_of_nonexistent_peers_take_little_time(swarm, monkeypatch):
    donor_peer, newcomer_peer = swarm.add_peer(), swarm.add_peer()
    for name in ("connect", "stream_open"):
        slow = find_slowly(getattr(Client, name), [donor_peer.dht.peer_id, newcomer_peer.dht.peer_id])
        monkeypatch.setattr(Client, name, slow)
    donor = build_averager(build_model(CONFIG, "run"), donor_peer)
    swarm.stack.callback(shut_down, donor)
    newcomer = build_averager(build_model(CONFIG, "run"), newcomer_peer, download_timeout=120.0)
    swarm.stack.callback(shut_down, newcomer)
    offer(donor, step=5)
    offer_nonexistent_peers(newcomer, 500)
    wait_until(lambda: len(newcomer.dht.get(OFFERS, latest=True).value) == 501, 120, "the offers")
    assert newcomer.load_state_from_peers() and newcomer.local_epoch == 5


# Credible steps


def test_donor_of_a_doubtful_step_is_the_last_resort(swarm):
    honest, liar, newcomer = swarm.add(), swarm.add(), swarm.add(donor_timeout=6.0)
    offer(honest, step=7)
    offer(liar, step=30_000)
    swarm.wait_for_offers(honest, liar)

    def downloaded_step() -> int | None:
        state = newcomer.download_state()
        return None if state is None else state[1]["epoch"]

    assert downloaded_step() == 30_000, "nothing is known"
    for known, expected in ((5, 7), (7, 7), (None, 30_000), (30_000, 30_000)):
        newcomer.credible_epoch = lambda known=known: known
        assert downloaded_step() == expected
    newcomer.credible_epoch = lambda: 7
    offer(liar, step=30_000, priority=8)  # a credible priority, but not a credible step in the state
    swarm.wait_for_offers(honest, liar)
    assert downloaded_step() == 7
    with honest.lock_averaged_tensors:
        assert downloaded_step() == 30_000, "nobody else has told a step"
    honest.allow_state_sharing = False
    assert downloaded_step() == 30_000, "nobody else offers a state"


def test_doubtful_step_is_refused_although_the_credible_donor_fails(swarm):
    honest, liar, newcomer = swarm.add(behaviour=break_off), swarm.add(), swarm.add()
    offer(honest, step=7)
    offer(liar, step=30_000)
    swarm.wait_for_offers(honest, liar)
    newcomer.credible_epoch = lambda: 7
    assert newcomer.download_state() is None
    newcomer.credible_epoch = lambda: None
    assert newcomer.download_state()[1]["epoch"] == 30_000


def test_credible_step_grows_with_the_time_of_a_download():
    download = StateDownload(SimpleNamespace(), make_query(credible_epoch=10))
    assert 12 <= download.max_epoch < 13
    download.started -= 100
    assert 112 <= download.max_epoch < 113
    assert StateDownload(SimpleNamespace(), make_query()).max_epoch == float("inf")


def test_donors_are_ranked_by_step_without_malformed_offers():
    offers = [3, 5.0, 4, 2**31, -1, float("nan"), float("inf"), "6", None, True, 30_000]
    records = {bytes([number]): ValueWithExpiration(value, 1e12) for number, value in enumerate(offers)}
    records |= {"text": ValueWithExpiration(5, 1e12), b"none": None}
    likely, unlikely = rank_donors(records, max_epoch=5)
    assert [donor.to_bytes()[0] for donor in likely] == [1, 2, 0, 9]
    assert [donor.to_bytes()[0] for donor in unlikely] == [10]
    assert rank_donors(b"\xc1", 5) == rank_donors(None, 5) == ([], [])


def test_metadata_query_does_not_wait_for_the_tensors(swarm):
    donor, newcomer = swarm.add(behaviour=trickle), swarm.add(donor_timeout=20.0)
    offer(donor, step=5)
    swarm.wait_for_offers(donor)
    started = time.monotonic()
    assert newcomer.download_state(min_epoch=5, only_metadata=True)[1]["epoch"] == 5
    assert newcomer.download_state(min_epoch=6, only_metadata=True) is None
    assert time.monotonic() - started < 10


# Invalid states


def test_states_that_do_not_fit_are_refused_whole(swarm):
    averager = swarm.add()
    metadata, tensors = averager.snapshot()
    entries = metadata["optimizer_metadata"]
    before = flat(averager.main_parameters)

    def refuse(match: str, changed_metadata=metadata, changed_tensors=tensors):
        with pytest.raises(StateLoadError, match=match):
            averager.restore(changed_metadata, changed_tensors)

    def with_step(value) -> dict:
        step = next(i for i in reversed(range(len(entries))) if entries[i].get("value") == 0)
        return {**metadata, "optimizer_metadata": [*entries[:step], {"type": "value", "value": value},
                                                   *entries[step + 1 :]]}  # fmt: skip

    nan = [tensors[0].clone().fill_(float("nan")), *tensors[1:]]
    refuse("step number", {**metadata, "epoch": "5"})
    refuse("step number", {**metadata, "epoch": 10**18})
    refuse("step number", {**metadata, "epoch": True})
    refuse("not finite", changed_tensors=nan)
    refuse("other shapes", changed_tensors=[tensors[0][:-1], *tensors[1:]])
    refuse("other shapes", changed_tensors=tensors[:3])
    refuse("cut off", changed_tensors=tensors[:-1])
    refuse("another one", {**metadata, "optimizer_metadata": entries[:-1]})
    refuse("another one", {"epoch": 1})
    refuse("malformed", {**metadata, "optimizer_metadata": [1] * len(entries)})
    refuse("not finite", changed_tensors=[*tensors[:-5], *(torch.full_like(t, torch.inf) for t in tensors[-5:])])
    for value in ("text", None, [1, 2], {}):
        refuse("other shapes", with_step(value))
    for value in (-5, float("nan")):
        refuse("negative or not finite", with_step(value))
    assert averager.local_epoch == averager.applied_epoch == 0
    assert torch.equal(before, flat(averager.main_parameters))

    changed = [tensor + 1 for tensor in tensors]
    learning_rate = averager.optimizer.param_groups[0]["lr"]
    averager.restore({**with_step(3), "epoch": 7}, changed)
    assert averager.local_epoch == averager.applied_epoch == 7
    assert averager.optimizer.param_groups[0]["lr"] == pytest.approx(learning_rate * 993 / 1000)
    assert averager.optimizer.param_groups[0]["weight_decay"] == 0.01
    assert torch.equal(flat(averager.main_parameters), flat(changed[: len(averager.main_parameters)]))


async def send_strings(self, request: DownloadRequest, context) -> AsyncIterator[DownloadData]:
    async for message in hiveminds_rpc_download_state(self, request, context):
        message.tensor_part.dtype = "U50000"
        yield message


async def send_another_optimizer(self, request: DownloadRequest, context) -> AsyncIterator[DownloadData]:
    async for message in hiveminds_rpc_download_state(self, request, context):
        if message.metadata:
            metadata = MSGPackSerializer.loads(message.metadata)
            metadata["optimizer_metadata"].pop()
            message.metadata = MSGPackSerializer.dumps(metadata)
        yield message


async def send_forever(self, request: DownloadRequest, context) -> AsyncIterator[DownloadData]:
    async for message in hiveminds_rpc_download_state(self, request, context):
        for _ in range(1000):
            yield message


def deserialize_or_die(message):
    """Exit the process on an unexpected dtype, as if it had run out of memory."""
    if message.dtype != "float32":
        os._exit(1)
    return hiveminds_deserialize(message)


hiveminds_deserialize = wire.deserialize_torch_tensor


@pytest.mark.parametrize("behaviour", [send_strings, send_another_optimizer, send_forever])
def test_unexpected_tensors_are_refused_before_they_are_deserialized(swarm, monkeypatch, behaviour):
    monkeypatch.setattr(wire, "deserialize_torch_tensor", deserialize_or_die)
    liar, good, newcomer = swarm.add(behaviour=behaviour), swarm.add(), swarm.add(download_timeout=60.0)
    offer(liar, step=5, priority=100)
    offer(good, step=5)
    swarm.wait_for_offers(liar, good)
    donor, _, _ = newcomer.download_state()
    assert donor == str(good.peer_id) and newcomer.is_alive()


@pytest.mark.parametrize("serialized", [b"", b"\xc1", b"x" * 200, MSGPackSerializer.dumps([5])])
def test_invalid_metadata_are_refused(serialized):
    averager = SimpleNamespace(max_metadata_bytes=100, serializer=MSGPackSerializer)
    download = StateDownload(averager, make_query())
    with pytest.raises(StateLoadError):
        download._read_metadata(serialized, believe_all=True)
    assert download._read_metadata(MSGPackSerializer.dumps({"epoch": 5}), believe_all=True) == {"epoch": 5}


def test_download_closes_the_stream_when_complete(swarm, monkeypatch):
    monkeypatch.setattr(TrainingStateAverager, "LINGER_SECONDS", 60.0)
    donor, newcomer = swarm.add(), swarm.add()
    offer(donor, step=5)
    swarm.wait_for_offers(donor)
    started = time.monotonic()
    assert newcomer.load_state_from_peers()
    assert time.monotonic() - started < 30


@contextmanager
def sigint_kept() -> Iterator[None]:
    """Restore the handler of SIGINT: plain hivemind ignores SIGINT in a process that starts an averager."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def test_plain_hivemind_client_downloads_a_state_without_a_timeout(swarm):
    """hivemind's client reads until the donor closes the stream, for at most `next_chunk_timeout`.

    In hivemind's example that is 5 seconds.
    """
    donor = swarm.add()
    offer(donor, step=5)
    with sigint_kept():
        newcomer = build_averager(
            build_model(CONFIG, "run"),
            swarm.add_peer(),
            averager_class=state_averager.TrainingStateAverager,
            next_chunk_timeout=4.0,
        )
    swarm.stack.callback(shut_down, newcomer)
    swarm.wait_for_offers(donor)
    metadata, tensors = DecentralizedAverager.load_state_from_peers(newcomer, timeout=60)
    assert metadata["epoch"] == 5 and len(tensors) == len(donor.snapshot()[1])
