"""Tests of the comparison of states: what it sees, what it lets pass, and who is asked and believed in a download."""

import os
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hivemind.p2p import P2PDaemonError
from hivemind.utils.timed_storage import ValueWithExpiration

from peerstep.reports.marks import common_marks, is_forked
from peerstep.state.digest import SEED_BYTES, Digest, distances, fold, is_near
from peerstep.state.layout import StateLayout
from peerstep.state.statistics import build_with_statistics
from tests.support.engine import Hyperparameters
from tests.support.offline import Donors
from tests.support.state import fill_parameters, offer, snapshot, update

RNG = torch.Generator().manual_seed(0)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=RNG)


# Random sums


@pytest.mark.parametrize(
    "change",
    [randn(300, 700), torch.outer(randn(300), randn(700)), torch.ones(300, 700), torch.eye(300, 700),
     torch.zeros(300, 700).index_fill(0, torch.tensor([5]), 1.0)],
    ids=["random", "rank 1", "constant", "diagonal", "one row"],
)  # fmt: skip
def test_sums_tell_how_far_two_tensors_are_from_each_other(change):
    tensor = randn(300, 700)
    for _ in range(10):
        seed = os.urandom(SEED_BYTES)
        sums = [fold([[other]], seed) for other in (tensor, tensor + change)]
        assert float((sums[0] - sums[1]).norm()) == pytest.approx(float(change.norm()), rel=0.5)


def test_sums_depend_on_the_seed_and_not_on_strides():
    plain = randn(8, 6, 5, 5)
    for other in (plain.to(memory_format=torch.channels_last), plain.transpose(0, 1).contiguous().transpose(0, 1)):
        assert torch.equal(fold([[plain]], bytes(8)), fold([[other]], bytes(8)))
    assert not torch.equal(fold([[plain]], bytes(8)), fold([[plain]], b"8 bytes."))
    odd = [
        [torch.tensor(3.0)],
        [torch.empty(0, 4)],
        [torch.ones(1).expand(5, 7)],
        [randn(3)],
        [randn(70_000), randn(9)],
    ]
    assert fold(odd, bytes(8)).norm(dim=1).tolist()[:2] == [3.0, 0.0]
    for count in (0, 9):
        with pytest.raises(ValueError, match="a seed has 8 bytes"):
            fold(odd, bytes(count))


# False states


def build_layout() -> tuple[StateLayout, list[str], list[torch.Tensor]]:
    """Return the layout, names and tensors of a small transformer's state."""
    shapes = {"embeddings": (2000, 64), "norm": (64,), "bias": (2000,)}
    shapes |= {f"{name}{layer}": shape for layer in range(4) for name, shape in
               {"attention": (64, 64), "up": (64, 256), "down": (256, 64), "norm": (64,)}.items()}  # fmt: skip
    parameters = [torch.nn.Parameter(0.02 * randn(*shape) + ("norm" in name)) for name, shape in shapes.items()]
    layout = StateLayout(build_with_statistics(torch.optim.AdamW, [{"params": parameters}]))
    tensors = [tensor.detach().clone() for tensor in layout.tensors()]
    for number, name in enumerate(layout.names, len(parameters)):
        if name == "exp_avg":
            tensors[number] = 1e-3 * randn(*tensors[number].shape)
        elif name == "exp_avg_sq":
            tensors[number] = 1e-6 * randn(*tensors[number].shape).square()
    return layout, list(shapes), tensors


LAYOUT, NAMES, HONEST = build_layout()
SIZES = torch.tensor([parameter.numel() for parameter in LAYOUT.parameters], dtype=torch.float64)


def add_random(tensor: torch.Tensor, fraction: float) -> None:
    noise = randn(*tensor.shape)
    tensor.add_(noise * (fraction * tensor.norm() / noise.norm()))


def edit_rank_one(state: dict[str, torch.Tensor]) -> None:
    edit = torch.outer(randn(64), randn(256))
    state["up3"].add_(edit * (0.25 * torch.stack([tensor.norm() for tensor in state.values()]).norm() / edit.norm()))


FALSE: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    "final norm x -1000": lambda state: state["norm"].mul_(-1e3),
    "bias of one token + 10^6": lambda state: state["bias"][123].add_(1e6),
    "embeddings of 4 tokens": lambda state: state["embeddings"][5:9].copy_(randn(4, 64)),
    "29 % of the norm of each matrix": lambda state: [add_random(tensor, 0.29) for tensor in state.values()],
    "all x 1.25": lambda state: [tensor.mul_(1.25) for tensor in state.values()],
    "rank 1 in one matrix": edit_rank_one,
}


def vote(false: list[torch.Tensor], num_honest: int) -> bool:
    """Whether honest donors that have the same state let a false one pass."""
    seed = os.urandom(SEED_BYTES)
    own, other = (Digest(5, fold(LAYOUT.groups(tensors), seed)) for tensors in (false, HONEST))
    first = len(LAYOUT.parameters)
    votes = [is_near(own, other, SIZES, None, torch.zeros(first)) for _ in range(num_honest)]
    return not votes.count(False) > votes.count(True)


@pytest.mark.parametrize("kind", FALSE)
def test_false_state_is_contradicted_each_time(kind):
    """With 1,000 elements of all tensors together, 60 to 100 % passed beside one to seven honest donors."""
    state = [tensor.clone() for tensor in HONEST]
    FALSE[kind](dict(zip(NAMES, state, strict=False)))
    assert not any(vote(state, number) for number in (1, 3, 7) for _ in range(10))
    assert all(vote([*HONEST], number) for number in (1, 3, 7))


@pytest.mark.parametrize("optimizer", ["lamb", "adamw"])
def test_honest_states_pass_each_time(donors, optimizer):
    """They are rounded to float16, and up to two steps apart."""
    options = {"hyperparameters": Hyperparameters(optimizer=optimizer, learning_rate=1e-3), "compression": "float16"}
    donor, states = donors.add(**options), []
    for step in range(1, 31):
        update(donor, step, seed=step)
        states.append((step, [tensor.clone() for tensor in snapshot(donor)[1]]))
    layout = donor.layout
    sizes = torch.tensor([parameter.numel() for parameter in layout.parameters], dtype=torch.float64)
    nothing, seed = torch.zeros(len(layout.parameters)), os.urandom(SEED_BYTES)
    digests = [Digest(step, fold(layout.groups(tensors), seed)) for step, tensors in states]
    for one in range(len(digests)):
        for other in range(max(0, one - 2), min(len(digests), one + 3)):
            before, now = digests[max(0, other - 1)], digests[other]
            moved = distances(now, before)[: len(sizes)] * 2 if other else None
            assert is_near(digests[one], now, sizes, moved, nothing), (one, other)


# Who is asked, and who is believed


def add_donor(donors: Donors, step: int, value: float = 1.0, reported: int | None = None, **options):
    """Add a donor whose parameters all have a value; it reports a step as trainers do, unless that is None."""
    donor = donors.add(**options)
    fill_parameters(donor, value)
    donor.copy_to_model()
    offer(donor, step=step)
    if reported is not None:
        donors.reports[donor.public_key] = reported
    return donor


def value_of(downloaded: tuple) -> float:
    return round(float(downloaded[2][0].flatten()[0]))


def test_donor_is_drawn_among_those_at_the_newest_step_that_two_trainers_report(donors):
    """The largest claim was asked first by everybody, each time."""
    asked = Counter()
    honest = [add_donor(donors, step, 1.0, reported=step) for step in (7, 7, 8)]
    stranger = add_donor(donors, 9, -1.0)
    late = add_donor(donors, 3, 1.0, reported=3)
    newcomer = donors.add()
    for _ in range(24):
        asked[newcomer.download_state()[0]] += 1
    assert asked.keys() == {str(donor.peer_id) for donor in honest} and min(asked.values()) > 0
    donors.reports[stranger.public_key] = 9  # a trainer as the others, by its own words
    assert all(value_of(newcomer.download_state()) == 1 for _ in range(5))
    for donor in honest:
        donor.allow_state_sharing = False
    stranger.allow_state_sharing = False
    assert newcomer.download_state()[0] == str(late.peer_id)


def test_only_members_vote(donors):
    """Seven keys that offer a state, but report no progress, neither vote nor are asked before the trainers."""
    for _ in range(2):
        add_donor(donors, 7, 1.0, reported=7)
    for _ in range(7):
        add_donor(donors, 9, -1.0)
    newcomer = donors.add()
    newcomer.must_agree = True
    assert all(value_of(newcomer.download_state()) == 1 for _ in range(5))


async def be_silent(*_args, **_options):
    raise P2PDaemonError("does not answer")


def test_what_is_published_agrees_with_most_trainers_or_there_is_none(donors, monkeypatch):
    honest = [add_donor(donors, 7, 1.0, reported=7) for _ in range(3)]
    liar, monitor = add_donor(donors, 8, -1.0, reported=8), donors.add()
    monitor.must_agree = True
    assert all(value_of(monitor.download_state()) == 1 for _ in range(5))
    for donor in honest:
        donor.behaviour = refuse  # they vote, but cannot be downloaded from
    assert monitor.download_state() is None
    newcomer = donors.add()
    assert value_of(newcomer.download_state()) == -1, "a newcomer has no better one"
    for donor in honest:
        donor.rpc_compare_state = be_silent
    assert monitor.download_state() is None, "nobody confirms it"
    for donor in honest:
        donor.allow_state_sharing = False
    assert monitor.download_state() is None, "they report, and do not answer"
    for donor in honest:
        del donors.reports[donor.public_key]
    assert value_of(monitor.download_state()) == -1, "the only trainer"
    liar.allow_state_sharing = False
    assert monitor.download_state() is None


def test_what_nobody_confirms_is_not_downloaded(donors):
    """Two minutes of a thin line for a state that is thrown away, again and again, while its owner averages."""
    donor, newcomer = add_donor(donors, 20, 1.0, reported=20), add_donor(donors, 20, 0.5, reported=20)
    sent = []

    async def count(messages):
        sent.append(donor)
        async for message in messages:
            yield message

    donor.behaviour = count
    newcomer.allow_state_sharing, monitor = False, donors.add()
    monitor.must_agree = True
    assert monitor.download_state() is None and not sent
    fill_parameters(newcomer, 1.0)
    assert value_of(monitor.download_state()) == 1 and sent
    sent.clear()
    newcomer.rpc_compare_state = be_silent
    assert monitor.download_state() is None and not sent
    del donors.reports[newcomer.public_key]
    assert value_of(monitor.download_state()) == 1, "the only trainer"


def test_paused_trainer_has_no_say_in_later_states(donors):
    """Of two trainers one pauses: until it continued, the monitor saved none of the other's steps."""
    add_donor(donors, 20, 1.0, reported=20)
    paused = add_donor(donors, 10, 0.5, reported=10)
    paused.allow_state_sharing, monitor = False, donors.add()
    monitor.must_agree = True
    assert monitor.download_state() is None, "it does not say that it is away"
    donors.away.add(paused.public_key)
    assert value_of(monitor.download_state()) == 1
    donors.reports[paused.public_key] = 20
    assert monitor.download_state() is None, "it finds no group, but has all steps"


def test_trainers_vote_whose_offers_are_hidden(donors):
    """One key that was the only donor in the answers of the DHT had its state published."""
    honest = [add_donor(donors, 7, 1.0, reported=7) for _ in range(2)]
    add_donor(donors, 7, -1.0, reported=7)
    monitor = donors.add()
    monitor.must_agree = True
    find, hidden = monitor.dht.get, {donor.public_key for donor in honest}

    async def get(key: str, **options):
        found = await find(key, **options)
        if key.endswith("all_averagers"):
            offers = {key: offer for key, offer in found.value.items() if key not in hidden}
            return ValueWithExpiration(offers, found.expiration_time)
        return found

    monitor.dht.get = get
    assert monitor.download_state() is None
    hidden.pop()
    assert value_of(monitor.download_state()) == 1, "with two further trainers, one of which has the same state"


def test_only_a_known_movement_widens_the_bound_of_what_is_published(donors):
    """A voter that took no step during the download allowed 20 % of a tensor's norm, to all."""
    for _ in range(3):
        add_donor(donors, 7, 1.0, reported=7, behaviour=refuse)
    add_donor(donors, 6, 1.15, reported=6)
    newcomer, monitor = donors.add(), donors.add()
    monitor.must_agree = True
    assert newcomer.download_state() is not None and monitor.download_state() is None


def test_trainer_that_lacks_an_update_votes(donors):
    """While all others lacked one and offered nothing, a monitor published nothing."""
    add_donor(donors, 7, 1.0, reported=7)
    lacking = add_donor(donors, 6, 1.03, reported=7)
    lacking.allow_state_sharing = False
    monitor = donors.add()
    monitor.must_agree = True
    assert value_of(monitor.download_state()) == 1
    fill_parameters(lacking, -1.0)
    assert monitor.download_state() is None


def test_newcomer_takes_no_marks_that_most_trainers_do_not_report(donors):
    """With such marks it would have a history of its own, and average with nobody."""
    marks = {digit: tuple((step, 12 * digit) for step in range(8, 72, 8)) for digit in "12"}
    honest = [add_donor(donors, 70, 1.0, reported=70) for _ in range(2)]
    liar = add_donor(donors, 71, 1.0, reported=70)
    for donor, digit in zip((*honest, liar), "112", strict=True):
        donor.marks = donors.marks[donor.public_key] = marks[digit]
        donor.newest_copy = None
    newcomer = donors.add()
    assert {newcomer.download_state()[0] for _ in range(8)} == {str(donor.peer_id) for donor in honest}
    del donors.reports[honest[1].public_key]
    assert newcomer.download_state() is not None, "one against one"


async def refuse(_messages):
    raise ConnectionResetError("as when the donor's process dies")
    yield


def test_revival_follows_the_initial_peers(donors):
    """After a night nobody reports. Whose address the user has passed is believed before others that offer a state."""
    monitor = add_donor(donors, 7, 1.0)
    for _ in range(3):
        add_donor(donors, 2**31 - 1, -1.0)
    newcomer = donors.add()
    newcomer.dht.initial_peers = [f"/ip4/127.0.0.1/tcp/1/p2p/{monitor.peer_id}"]
    for must_agree in (False, True):
        newcomer.must_agree = must_agree
        assert value_of(newcomer.download_state()) == 1


def test_trainers_may_move_on_during_a_download(donors, monkeypatch):
    """They take six steps of 4 %; a false state is told from that."""

    def move(factor: float) -> None:
        for donor in trainers:
            fill_parameters(donor, float(donor.layout.parameters[0].flatten()[0]) * factor)
            donor.state_sharing_priority += 1

    async def delay(messages):
        async for message in messages:
            yield message
        for _ in range(6):
            move(1.04)

    trainers = [add_donor(donors, 7, 1.0, reported=7, behaviour=delay) for _ in range(3)]
    monitor = donors.add()
    monitor.must_agree = True
    assert monitor.download_state() is not None
    liar = trainers[0]
    serialize = liar.to_messages
    liar.to_messages = lambda metadata, tensors: serialize(metadata, [3 * tensor for tensor in tensors])
    liar.newest_copy = None
    found = [monitor.download_state() for _ in range(6)]
    assert str(liar.peer_id) not in {donor for donor, *_ in filter(None, found)}


def test_read_that_fails_is_tried_again(donors):
    add_donor(donors, 7, reported=7)
    newcomer, faults = donors.add(), [ConnectionError("no route"), KeyError("x"), None]
    find = newcomer.dht.get

    async def get(key: str, **options):
        if key.endswith("all_averagers") and (fault := faults.pop(0)) is not None:
            raise fault
        return await find(key, **options)

    newcomer.dht.get = get
    assert newcomer.download_state() is not None and not faults


# Sides


def test_state_of_the_same_side_is_accepted():
    """The report whose marks are asked for may have one of its own: the side is what most have."""
    common = tuple((step, 12 * digit) for step, digit in ((8, "1"), (16, "2"), (24, "3")))
    report, others = (*common, (32, 12 * "a")), (*common, (32, 12 * "b"))
    assert not is_forked(report, others)
    assert common_marks([report, others, others]) == others
    assert common_marks([]) == ()
    assert is_forked(common, tuple((step, 12 * "9") for step, _ in common))
    long = tuple((step, 12 * "1") for step in range(8, 80, 8))
    assert common_marks([long]) == long[-8:]


@pytest.mark.parametrize("num_different", [0, 2, 3])
def test_state_with_few_differing_marks_is_loaded(donors, num_different):
    marks = tuple((step, 12 * "1") for step in range(8, 64, 8))
    donor = add_donor(donors, 60, reported=60)
    donor.marks = (
        *marks[: len(marks) - num_different],
        *((step, 12 * "2") for step, _ in marks[len(marks) - num_different :]),
    )
    donor.newest_copy = None
    found = donors.add().download_state(marks=marks)
    assert (found is not None) == (num_different < 3)
