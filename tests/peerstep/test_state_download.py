"""Tests of the download of the training state, from good, faulty and lying donors."""

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hivemind.proto.averaging_pb2 import DownloadData, DownloadRequest
from hivemind.utils import MSGPackSerializer
from hivemind.utils.streaming import split_for_streaming
from hivemind.utils.timed_storage import ValueWithExpiration

from peerstep.reports.records import signer_of
from peerstep.state.averager import TrainingStateAverager
from peerstep.state.download import StateDownload, rank_donors
from peerstep.state.layout import StateLoadError
from peerstep.tensors import checks
from tests.support.engine import Hyperparameters
from tests.support.offline import RNG, offline_averager
from tests.support.processes import wait_until
from tests.support.simulated_network import make_subkey
from tests.support.state import (
    fill_parameters,
    flat,
    learning_rates,
    offer,
    receive,
    snapshot,
    update,
)


def statistics(averager: TrainingStateAverager) -> list:
    state = averager.optimizer.state_dict()["state"]
    return [float(value) if torch.tensor(value).ndim == 0 else value for entry in state.values()
            for _, value in sorted(entry.items())]  # fmt: skip


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize("optimizer", ["lamb", "adamw"])
@pytest.mark.parametrize(("compression", "tolerance"), [("none", 1e-6), ("float16", 2e-3)])
@pytest.mark.parametrize("offload_optimizer", [True, False], ids=["trainer", "observer"])
def test_state_survives_the_transfer(donors, optimizer, compression, tolerance, offload_optimizer):
    """LAMB's statistics are tensors, or numbers where a norm is zero. Float16 has no exact step counts above 2048."""
    options = {"hyperparameters": Hyperparameters(optimizer=optimizer), "compression": compression}
    donor = donors.add(**options)
    newcomer = donors.add(**options, offload_optimizer=offload_optimizer)
    for epoch in (1, 2):
        update(donor, epoch, seed=epoch)
    for entry in donor.optimizer.state.values():
        entry["step"] += 5000  # an integer in LAMB, a tensor in AdamW
    donor.copy_to_model()
    offer(donor, step=2)
    assert newcomer.load_state_from_peers()
    assert newcomer.local_epoch == newcomer.applied_step == 2
    assert learning_rates(newcomer.optimizer) == learning_rates(donor.optimizer)
    assert torch.allclose(flat(newcomer.main_parameters), flat(donor.main_parameters), rtol=tolerance, atol=1e-6)
    ours, theirs = statistics(newcomer), statistics(donor)
    assert len(ours) == len(donor.layout.parameters) * (6 if optimizer == "lamb" else 3)
    for own, other in zip(ours, theirs, strict=True):
        assert torch.allclose(torch.as_tensor(own), torch.as_tensor(other), rtol=tolerance, atol=1e-6)
    assert {float(entry["step"]) for entry in newcomer.optimizer.state.values()} == {5002.0}
    for averager in (donor, newcomer):
        update(averager, 3, seed=3)
    assert torch.allclose(
        flat(newcomer.layout.parameters), flat(donor.layout.parameters), rtol=10 * tolerance, atol=1e-3
    )


def test_newcomer_that_finds_no_donor_starts_at_once(donors, clock):
    """The state of a client cannot be downloaded."""
    newcomer, client = donors.add(), donors.add(client_mode=True)
    with pytest.raises(ValueError, match="client mode"):
        client.allow_state_sharing = True
    assert not newcomer.load_state_from_peers()
    assert clock.now < 5


def test_trainer_does_not_download_a_state_of_its_own_step(donors):
    """Trainers that resumed from older checkpoints offer the state that they have just received from this one."""
    donor, resumed = donors.add(), donors.add()
    offer(donor, step=16)
    resumed.sync_with_main_parameters(16)
    assert not resumed.load_state_from_peers()
    offer(donor, step=17)
    assert resumed.load_state_from_peers() and resumed.local_epoch == 17


async def be_silent(_messages: AsyncIterator) -> AsyncIterator:
    await asyncio.sleep(1000.0)
    yield


async def trickle(messages: AsyncIterator) -> AsyncIterator:
    async for message in messages:
        yield message
        await asyncio.sleep(0.9)


async def break_off(messages: AsyncIterator) -> AsyncIterator:
    for _ in range(3):
        yield await anext(messages)


async def fail(messages: AsyncIterator) -> AsyncIterator:
    yield await anext(messages)
    raise ConnectionResetError("as when the donor's process dies")


async def send_strings(messages: AsyncIterator) -> AsyncIterator:
    async for message in messages:
        message.tensor_part.dtype = "U50000"
        yield message


async def send_another_optimizer(messages: AsyncIterator) -> AsyncIterator:
    async for message in messages:
        if message.metadata:
            metadata = MSGPackSerializer.loads(message.metadata)
            metadata["statistics"].pop()
            message.metadata = MSGPackSerializer.dumps(metadata)
        yield message


async def send_forever(messages: AsyncIterator) -> AsyncIterator:
    async for message in messages:
        for _ in range(1000):
            yield message


@pytest.mark.parametrize(
    "behaviour", [be_silent, trickle, break_off, fail, send_strings, send_another_optimizer, send_forever]
)
def test_faulty_donor_is_passed_over_and_without_another_the_own_state_stays(donors, clock, monkeypatch, behaviour):
    """The faulty one is asked first. What it sends is checked before it is deserialized."""
    deserialized, deserialize = set(), checks.deserialize_torch_tensor
    monkeypatch.setattr(
        checks, "deserialize_torch_tensor", lambda message: deserialized.add(message.dtype) or deserialize(message)
    )
    faulty, good, newcomer = donors.add(behaviour), donors.add(), donors.add(donor_timeout=1.0, download_timeout=12.0)
    update(good, 1, seed=0)
    good.copy_to_model()
    offer(faulty, step=1, priority=100.0)
    offer(good, step=1)
    assert newcomer.load_state_from_peers() and newcomer.local_epoch == 1
    assert torch.equal(flat(newcomer.main_parameters), flat(good.main_parameters))
    assert deserialized == {"float32", "float64"}
    impatient, good.allow_state_sharing = donors.add(donor_timeout=1.0, download_timeout=3.0), False
    before, started = flat(snapshot(impatient)[1]), clock.now
    assert not impatient.load_state_from_peers()
    assert clock.now - started < 8 and impatient.local_epoch == 0
    assert torch.equal(flat(snapshot(impatient)[1]), before)


def test_download_that_breaks_off_is_tried_again(donors):
    """The donor may be the only peer with the run's state; a newcomer without it would begin a second run."""
    behaviours = iter([break_off])
    donor, newcomer = donors.add(lambda messages: next(behaviours, aiter)(messages)), donors.add()
    offer(donor, step=5)
    assert newcomer.load_state_from_peers() and newcomer.local_epoch == 5


def stall(seconds: float) -> Callable:
    """Pause after the first message for so long."""

    async def send(messages: AsyncIterator) -> AsyncIterator:
        yield await anext(messages)
        await asyncio.sleep(seconds)
        async for message in messages:
            yield message

    return send


def in_time(seconds: float) -> Callable:
    """Spread the sending of the state over a number of seconds."""

    async def send(messages: AsyncIterator) -> AsyncIterator:
        parts = [message async for message in messages]
        size = sum(len(part.tensor_part.buffer) for part in parts)
        for part in parts:
            yield part
            await asyncio.sleep(seconds * len(part.tensor_part.buffer) / size)

    return send


@pytest.mark.parametrize("is_other_reachable", [True, False])
@pytest.mark.parametrize(
    ("behaviour", "is_too_slow"),
    [(stall(9.0), False), (stall(11.0), True), (in_time(70.0), False), (in_time(80.0), True)],
)
def test_slow_donor_is_abandoned_for_reachable_donors(donors, monkeypatch, behaviour, is_too_slow, is_other_reachable):
    """It would take more than three quarters of the 100 seconds, as ten of them have shown."""
    monkeypatch.setattr(StateDownload, "SLOW_SECONDS", math.inf)
    split = partial(split_for_streaming, chunk_size_bytes=1000)
    monkeypatch.setattr("peerstep.state.averager.split_for_streaming", split)
    offer(donors.add(behaviour), step=6)
    if is_other_reachable:
        offer(donors.add(), step=5)
    else:
        donors.offers = {make_subkey(RNG): 5.0}
    newcomer = donors.add(donor_timeout=100.0, download_timeout=100.0)
    assert newcomer.load_state_from_peers()
    assert newcomer.local_epoch == (5 if is_too_slow and is_other_reachable else 6)


@pytest.mark.parametrize(
    ("times", "asked"),
    [
        ([300], [300]), ([300, 20], [300, 20]), ([300, 100], [300, 100]), ([100, 300], [100, 300, 100]),
        ([300, 100, 200], [300, 100, 200]), ([300, 200, 100, 20], [300, 200, 100]),
    ],
)  # fmt: skip
def test_donors_on_thin_lines_are_put_aside_for_others(donors, times, asked):
    """Seconds that the donors would take, in the order in which they are asked at first; and who is asked."""
    seen = []
    for number, seconds in enumerate(times):
        send = in_time(seconds)
        donor = donors.add(lambda messages, seconds=seconds, send=send: seen.append(seconds) or send(messages))
        offer(donor, step=9 - number)
    newcomer = donors.add(donor_timeout=100.0, download_timeout=600.0)
    assert newcomer.load_state_from_peers() and newcomer.local_epoch == 9 - times.index(asked[-1])
    assert seen == asked


@pytest.mark.parametrize(("is_other_reachable", "seconds"), [(True, 25.0), (False, 60.0)])
def test_donor_may_be_silent_for_a_quarter_of_the_time_while_others_are_left(
    donors, clock, is_other_reachable, seconds
):
    ended = []

    async def be_silent_until_left(_messages: AsyncIterator) -> AsyncIterator:
        try:
            await asyncio.sleep(1000.0)
            yield
        finally:
            ended.append(clock.now)

    offer(donors.add(be_silent_until_left), step=6)
    if is_other_reachable:
        offer(donors.add(), step=5)
    else:
        donors.offers = {make_subkey(RNG): 5.0}
    donors.add(donor_timeout=60.0, download_timeout=100.0).load_state_from_peers()
    assert ended[0] == pytest.approx(seconds, abs=1.0)


def test_offers_of_nonexistent_peers_take_little_time(donors, clock, monkeypatch):
    monkeypatch.setattr(StateDownload, "MAX_DIALS", 3)
    donor, newcomer = donors.add(), donors.add(download_timeout=120.0)
    offer(donor, step=5)
    signers = (make_subkey(RNG) for _ in range(9))
    donors.offers = dict.fromkeys(signers, float(2**31 - 1))
    assert newcomer.load_state_from_peers() and newcomer.local_epoch == 5
    assert clock.now < 9 * donors.DIAL_SECONDS, "three are dialed at a time"


def test_download_that_takes_longer_than_a_step_is_of_one_step(donors):
    begun, may_continue = threading.Event(), threading.Event()

    async def pause(messages: AsyncIterator) -> AsyncIterator:
        yield await anext(messages)
        begun.set()
        await asyncio.to_thread(may_continue.wait, 60)
        async for message in messages:
            yield message

    donor, newcomer = donors.add(pause), donors.add()
    metadata, tensors = snapshot(donor)
    donor.restore({**metadata, "epoch": 5}, [torch.ones_like(tensor) for tensor in tensors])
    donor.state_sharing_priority, donor.allow_state_sharing = 5, True
    download = donors.pool.submit(newcomer.download_state)
    assert begun.wait(60)
    update(donor, 1, seed=0)
    fill_parameters(donor, 2.0)
    may_continue.set()
    _, metadata, tensors = download.result(60)
    assert metadata["epoch"] == 5
    assert all((tensor == 1.0).all() for tensor in tensors)


# Credible steps


def test_donor_of_a_doubtful_step_is_the_last_resort(donors):
    honest, liar, newcomer = donors.add(), donors.add(), donors.add(donor_timeout=1.0)
    offer(honest, step=7)
    offer(liar, step=30_000)

    def downloaded_step() -> int | None:
        state = newcomer.download_state()
        return None if state is None else state[1]["epoch"]

    assert downloaded_step() == 30_000, "nothing is known"
    for known, expected in ((5, 7), (7, 7), (None, 30_000), (30_000, 30_000)):
        newcomer.credible_step = lambda known=known: known
        assert downloaded_step() == expected
    newcomer.credible_step = lambda: 7
    offer(liar, step=30_000, priority=8)  # a credible priority, but not a credible step in the state
    assert downloaded_step() == 7
    honest.behaviour = be_silent
    assert downloaded_step() == 30_000, "nobody else has told a step"
    honest.allow_state_sharing = False
    assert downloaded_step() == 30_000, "nobody else offers a state"


def test_doubtful_step_is_refused_although_the_credible_donor_fails(donors):
    honest, liar, newcomer = donors.add(break_off), donors.add(), donors.add()
    offer(honest, step=7)
    offer(liar, step=30_000)
    newcomer.credible_step = lambda: 7
    assert newcomer.download_state() is None
    newcomer.credible_step = lambda: None
    assert newcomer.download_state()[1]["epoch"] == 30_000


# Comparison with other peers


@pytest.mark.parametrize(("num_honest", "expected"), [(3, 1.0), (1, -1.0)])
def test_state_that_most_other_donors_contradict_is_the_last_resort(donors, num_honest, expected):
    """Two liars offer the same false state, at a higher priority. Against one honest peer they are the majority."""
    for value, priority, number in ((-1.0, 5, 2), (1.0, 4, num_honest)):
        for _ in range(number):
            donor = donors.add()
            fill_parameters(donor, value + 0.01 * number)  # honest peers differ, and are a step apart
            donor.copy_to_model()
            offer(donor, step=5, priority=priority)
    newcomer = donors.add()
    _, _, tensors = newcomer.download_state(credible_step=5)
    assert torch.sign(tensors[0].flatten()[0]) == expected


def test_donor_whom_the_only_other_one_contradicts_is_used_all_the_same(donors):
    for value in (1.0, -1.0):
        fill_parameters(donor := donors.add(), value)
        donor.copy_to_model()
        offer(donor, step=5)
    assert donors.add().download_state() is not None


@pytest.mark.parametrize("optimizer", ["lamb", "adamw"])
@pytest.mark.parametrize(
    ("first", "second", "is_alone"),
    [(1.0, 0.0, False), (1e-8, 1.0, False), (1e3, 1.0, False), (1.0, 1e6, False), (6e4, 0.0, True), (1.0, -1.0, True)],
)
def test_state_with_false_statistics_is_not_used(donors, optimizer, first, second, is_alone):
    """Its parameters are right. With the statistics, the next update moved the weights as the donor liked.

    :param first, second: multiples of the honest moments
    :param is_alone: whether it is refused without another donor
    """
    options = {"hyperparameters": Hyperparameters(optimizer=optimizer)}
    for step in (12, 12, 20) if not is_alone else (12,):  # the liar is the first one
        donor = donors.add(**options)
        for number in range(1, step + 1):  # noise, in which first moments ten steps apart are unrelated
            update(donor, number, seed=number)
        fill_parameters(donor, 0.5)
        donor.copy_to_model()
        offer(donor, step=5, priority=6 - len(donors.averagers))
    newcomer = donors.add(**options)
    liar = next(iter(donors.averagers.values()))
    assert newcomer.download_state(credible_step=20)[0] == str(liar.peer_id), "without the lie"
    for values in liar.optimizer.state.values():
        values["exp_avg"] *= first
        values["exp_avg_sq"] *= second
    liar.newest_copy = None
    found = newcomer.download_state(credible_step=20)
    assert (found is None) if is_alone else found[0] != str(liar.peer_id)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.999), (0.9, 0.9), (0.0, 0.99), (0.99, 0.95)])
def test_all_moments_that_gradients_make_are_accepted(betas):
    """The largest first moment is that of gradients which grow in this way."""
    averager = offline_averager(hyperparameters=Hyperparameters(adam_beta1=betas[0], adam_beta2=betas[1]))
    first = second = 0.0
    for number in range(60):
        gradient = 1e-3 * (betas[0] / betas[1]) ** (59 - number)
        first = betas[0] * first + (1 - betas[0]) * gradient
        second = betas[1] * second + (1 - betas[1]) * gradient**2
    for values in averager.optimizer.state.values():
        values["exp_avg"].fill_(first)
        values["exp_avg_sq"].fill_(second)
    receive(averager.copy_state(), averager)


async def test_digests_take_a_bounded_share_of_the_time(donors, clock, monkeypatch):
    """One peer has one request at a time. A flood of keys waits its turn, and is refused when the queue is long."""
    donor = donors.add()
    offer(donor, step=5)
    monkeypatch.setattr(donor.layout, "groups", lambda tensors: [tensors])
    monkeypatch.setattr("peerstep.state.averager.time.thread_time", iter(range(10**6)).__next__)  # each takes a second

    async def ask(number: int) -> bool:
        context = SimpleNamespace(remote_id=bytes([number]))
        return bool((await donor.rpc_compare_state(DownloadData(metadata=bytes(8)), context)).tensor_part.buffer)

    assert await ask(0)
    started, answers = clock.now, await asyncio.gather(*(ask(number) for number in [1, 1, *range(2, 40)]))
    num_answered = sum(answers)
    assert answers[:2] == [True, False], "the second request of the same peer"
    assert 1 < num_answered <= 1 + donor.MAX_TURN_SECONDS * donor.DIGEST_SHARE
    assert clock.now - started >= (num_answered - 1) / donor.DIGEST_SHARE
    assert await ask(1), "nobody waits any more"


@pytest.mark.parametrize("number", [3, 20])
async def test_keys_that_ask_again_and_again_hold_up_no_other(donors, clock, monkeypatch, number):
    """A state of a billion parameters takes three seconds: two keys had all turns."""
    donor = donors.add()
    offer(donor, step=5)
    donor.allow_state_sharing = False  # it lacks an update
    monkeypatch.setattr(donor.layout, "groups", lambda tensors: [tensors])
    monkeypatch.setattr("peerstep.state.averager.time.thread_time", iter(range(0, 10**6, 3)).__next__)

    async def ask(name: bytes) -> bool:
        context = SimpleNamespace(remote_id=name)
        return bool((await donor.rpc_compare_state(DownloadData(metadata=bytes(8)), context)).tensor_part.buffer)

    async def ask_always(name: bytes) -> None:
        while True:
            await ask(name)
            await asyncio.sleep(0.1)

    tasks = [asyncio.create_task(ask_always(b"%d" % key)) for key in range(number)]
    await asyncio.sleep(50.0 * number)
    assert [await ask(b"newcomer") for _ in range(3)] == [True] * 3
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("number", [1, 2])
async def test_slow_downloads_do_not_hold_most_places(donors, monkeypatch, clock, number):
    """Eight keys held all sixteen places with 3 Mbit/s. A single slow reader may go on."""
    monkeypatch.setattr(TrainingStateAverager, "MAX_UPLOADS_OF_ALL", 2)
    monkeypatch.setattr(TrainingStateAverager, "LEAST_RATE", 100.0)
    monkeypatch.setattr(TrainingStateAverager, "BUSY_RATE", 5000.0)
    donor, received = donors.add(), []
    offer(donor, step=5)

    async def read(reader: int) -> None:
        async for _ in donor.rpc_download_state(DownloadRequest(), SimpleNamespace(remote_id=reader)):
            received.append(reader)
            await asyncio.sleep(5.0)  # some 1500 bytes a second

    tasks = [asyncio.create_task(read(reader)) for reader in range(number)]
    await asyncio.sleep(4 * TrainingStateAverager.READER_GRACE)
    assert any(task.done() for task in tasks) == (number == 2)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not donor.uploads


def test_reader_waits_for_a_copy_that_takes_longer_than_a_donor_may_be_silent(donors, clock):
    """At a billion parameters it takes a minute. The places of readers that have not begun are not lost meanwhile."""
    donor, newcomer = donors.add(), donors.add(donor_timeout=15.0)
    offer(donor, step=5)
    donors.copy_seconds = 2 * donor.READER_GRACE
    assert newcomer.load_state_from_peers() and newcomer.local_epoch == 5
    assert clock.now >= 2 * donor.READER_GRACE and not donor.uploads


def test_donor_that_only_says_that_it_makes_a_copy_is_abandoned_for_others(donors, clock):
    async def send_nothing(_messages: AsyncIterator) -> AsyncIterator:
        while True:
            await asyncio.sleep(1.0)
            yield DownloadData()

    faulty, good, newcomer = donors.add(send_nothing), donors.add(), donors.add(download_timeout=120.0)
    offer(faulty, step=5, priority=100.0)
    offer(good, step=5)
    assert newcomer.load_state_from_peers() and clock.now < 60
    good.allow_state_sharing, started = False, clock.now
    assert not donors.add(download_timeout=60.0).load_state_from_peers() and clock.now - started < 300


async def test_downloads_of_a_peer_and_those_that_stall_are_bounded(donors, monkeypatch):
    """Each keeps a copy of the state."""
    monkeypatch.setattr(TrainingStateAverager, "READER_GRACE", 0.5)
    donor, started = donors.add(), []
    offer(donor, step=5)
    readers = [SimpleNamespace(remote_id=peer.peer_id) for peer in (donors.add(), donors.add())]

    async def stall(reader: SimpleNamespace) -> None:
        async for _ in donor.rpc_download_state(DownloadRequest(), reader):
            started.append(reader)
            await asyncio.sleep(60)

    tasks = [asyncio.create_task(stall(reader)) for reader in (readers[0], readers[0], readers[0], readers[1])]
    async with asyncio.timeout(10):
        await asyncio.wait(tasks)
    assert [started.count(reader) for reader in readers] == [2, 1]
    assert [task.cancelled() for task in tasks] == [True, True, False, True]
    assert not donor.uploads


def make_download(credible_step: int | None = None) -> StateDownload:
    averager, layout = SimpleNamespace(serializer=MSGPackSerializer), SimpleNamespace(max_metadata_bytes=100)
    return StateDownload(averager, layout, 60.0, 0, credible_step, timeout=100.0)


def test_credible_step_grows_with_the_time_of_a_download(clock):
    download = make_download(credible_step=10)
    assert download.max_step == 12
    clock.now += 100
    assert download.max_step == 112
    assert make_download().max_step == float("inf")


def test_donors_are_ranked_by_step_without_malformed_offers():
    offers = [3, 5.0, 4, 2**31, -1, float("nan"), float("inf"), "6", None, True, 30_000, 5]
    signers = [make_subkey(RNG) for _ in offers]
    offers = [ValueWithExpiration(value, 1e12) for value in offers[:-1]] + [None]
    unsigned = {"text": offers[0], signer_of(signers[0]).to_bytes(): offers[1]}
    ids = list(map(signer_of, signers))
    likely, unlikely = rank_donors(dict(zip(signers, offers, strict=True)) | unsigned, 5, own_id=ids[2])
    assert likely == [ids[number] for number in (9, 0, 1)] and unlikely == [ids[10]]
    assert rank_donors(b"\xc1", 5, ids[0]) == rank_donors(None, 5, ids[0]) == ([], [])


# Invalid states


@pytest.mark.parametrize("serialized", [b"", b"\xc1", b"x" * 200, MSGPackSerializer.dumps([5])])
def test_invalid_metadata_are_refused(serialized):
    download = make_download()
    with pytest.raises(StateLoadError):
        download.read_metadata(serialized)
    for marks, error in (([], nullcontext()), ([["8", "x"]], pytest.raises(ValueError, match="wrong marks"))):
        metadata = {"epoch": 5, "marks": marks}
        with error:
            assert download.read_metadata(MSGPackSerializer.dumps(metadata)) == metadata


def test_download_closes_the_stream_when_complete_and_ends_with_its_averager(build_swarm, monkeypatch):
    monkeypatch.setattr(TrainingStateAverager, "LINGER_SECONDS", 10_000.0)
    swarm = build_swarm()
    donor, newcomer = (trainer.optimizer.state_averager for trainer in swarm.add_several(False, False))
    offer(donor, step=5)
    wait_until(lambda: newcomer.download_state(), 60, "the offer")
    assert newcomer.load_state_from_peers()
    asked, copy_state = threading.Event(), donor.copy_state
    donor.copy_state = lambda: (asked.set(), copy_state())[1]
    with donor.lock_averaged_tensors:
        answer = swarm.pool.submit(newcomer.download_state)
        assert asked.wait(60) and not answer.done()
        newcomer.shutdown()
        assert answer.result(60) is None
