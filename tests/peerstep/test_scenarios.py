"""Scenarios of many unequal peers, see tests/support/scenario.py. All seconds are simulated.

A step takes some 10 seconds, unless a test says otherwise.
"""

import itertools
from collections.abc import Collection

import pytest
import torch

from peerstep.reports.marks import MAX_DIFFERENT, different_marks
from peerstep.rounds import known_peers, uplink
from peerstep.step import joining
from tests.support import simulated_network
from tests.support.scenario import BATCH, Peer, Scenario

# Simulated ones, which take 10 seconds each. With the patches bans end in simulated time, too.
pytestmark = [pytest.mark.peers, pytest.mark.usefixtures("patches")]


def add_trainers(scenario: Scenario, number: int, **options) -> list[Peer]:
    """Add trainers of different speeds and uplinks; the sum of the speeds is their number."""
    middle = (number - 1) / 2
    return [
        scenario.add(speed=1 + 0.2 * (index - middle), uplink=3000.0 * (1 + index), **options)
        for index in range(number)
    ]


def took_steps_with(peers: Collection[Peer], number: int, since: int) -> bool:
    """Whether peers have taken all steps after one in rounds of so many."""
    rounds = [entry for peer in peers for entry in list(peer.rounds) if entry["step"] > since]
    return all(entry["outcome"] == "averaged" and len(entry["group"]) == number for entry in rounds)


def test_small_groups_do_not_refuse_each_others_parameters():
    """With local updates they move far between two rounds with parameters, each group by its own average."""
    settings = {"target_group_size": 2, "average_state_every": 8, "local_updates": True}
    with Scenario(4, grain=0.16, target_batch_size=96, **settings) as scenario:
        peers = [scenario.add(speed=0.7 + 0.1 * number) for number in range(6)]
        scenario.reach(17, seconds=900.0)
        assert not [line for peer in peers for line in peer.log if "kept this peer's" in line or "are far" in line]
        different = [different_marks(a.marks, b.marks) for a, b in itertools.combinations(peers, 2)]
    assert all(marks is not None and len(marks) <= MAX_DIFFERENT for marks in different)


# Uplinks and clocks


def measure(seconds: float, thin_uplink: bool) -> tuple[list[Peer], list[int], list[int]]:
    """Train with three trainers, and a fourth that needs twice the timeout for a round.

    :returns: the three, and what they have done in the given time: steps, and samples in steps
    """
    with Scenario(1, target_batch_size=96, averaging_timeout=20.0) as scenario:
        trainers = [scenario.add(speed=0.6 + 0.1 * number, uplink=3000.0 * 2**number) for number in range(3)]
        if thin_uplink:
            scenario.add(speed=0.2, uplink=40.0, clock=1.0)
        scenario.reach(3, *trainers)
        before = [(peer.step, peer.applied_samples) for peer in trainers]
        scenario.wait(seconds)
        steps = [peer.step - step for peer, (step, _) in zip(trainers, before, strict=True)]
        samples = [peer.applied_samples - samples for peer, (_, samples) in zip(trainers, before, strict=True)]
    return trainers, steps, samples


def test_thin_uplink_costs_the_others_neither_steps_nor_samples():
    _, steps_without, samples_without = measure(80.0, thin_uplink=False)
    trainers, steps, samples = measure(80.0, thin_uplink=True)
    edge = len(trainers)  # one step each may end just after the time
    assert sum(steps) >= 0.9 * sum(steps_without) - edge, (steps, steps_without)
    assert sum(samples) >= (0.9 - edge / sum(steps_without)) * sum(samples_without), (samples, samples_without)
    assert min(peer.received for peer in trainers) >= 0.98, [peer.received for peer in trainers]


def test_claims_follow_what_the_links_carry_from_the_second_round_on(monkeypatch):
    """Two trainers come later. The time of a measurement is as small as the links: a gradient has 800 bytes.

    The first round of a trainer that comes later may begin without it: it measures nothing then.
    """
    monkeypatch.setattr(uplink, "FIRST_CLAIM", 1e-4)
    monkeypatch.setattr(uplink, "RATE_SECONDS", 0.25)

    def claims() -> list[float]:
        """Return the claims in bytes per second."""
        return [peer.optimizer.grad_averager.claim.value / 8e-6 for peer in scenario.peers]

    with Scenario(20, target_batch_size=160, average_state_every=100) as scenario:
        for link in (1000.0, 1000.0, 1000.0, 100.0):
            scenario.add(uplink=link, bandwidth=None)
        assert claims() == pytest.approx([12.5] * 4)
        scenario.reach(3)
        assert claims() == pytest.approx([1000.0, 1000.0, 1000.0, 100.0], rel=0.25), scenario.describe()
        assert min(entry["received"] for peer in scenario.peers for entry in peer.rounds[1:3]) >= 0.98
        for link in (4000.0, 100.0):
            scenario.add(speed=0.5, uplink=link, bandwidth=None)
        scenario.wait_until(lambda: min(claims()[4:]) > 20.0, 300.0)
        *_, claim_of_fast, claim_of_slow = claims()
        assert claim_of_fast >= 400.0 and claim_of_slow == pytest.approx(100.0, rel=0.25), scenario.describe()


def test_models_in_channels_last_are_averaged():
    """As those that train images on a GPU often are."""
    with Scenario(1, target_batch_size=96) as scenario:
        params = scenario.initial.view(5, 4, 5, 2).contiguous(memory_format=torch.channels_last)
        peers = [scenario.add(speed=0.6 + 0.1 * number, params=params) for number in range(3)]
        scenario.reach(6)
        scenario.unite()
    assert not params.is_contiguous()
    assert all({*peer.outcomes()} == {"averaged"} and peer.received == 1.0 for peer in peers)
    assert {entry["attempts"] for peer in peers for entry in peer.rounds} == {1}


@pytest.mark.parametrize("seed", [1, 2])
def test_steps_with_short_local_steps_have_the_samples_of_the_target(seed):
    """A local step is a 128th of a step. Its samples come while the others are counted: at most 3 % too many."""
    with Scenario(seed, target_batch_size=512) as scenario:
        for speed in (8.0, 5.0, 3.0):
            scenario.add(speed=speed)
        scenario.reach(9, seconds=1000.0)
        counts = [sum(peer.samples.get(step) or 0 for peer in scenario.peers) for step in range(2, 10)]
    assert sum(counts) <= 1.03 * 512 * len(counts), counts


@pytest.mark.parametrize("delay_grad_averaging", [True, False])
def test_trainer_with_long_local_steps_contributes_to_each_round(delay_grad_averaging):
    """A local step takes longer than matchmaking, and most of a global step."""
    flags = {"matchmaking_time": 3.1, "delay_grad_averaging": delay_grad_averaging}
    with Scenario(22, target_batch_size=40, **flags) as scenario:
        slow, *others = (scenario.add(speed=speed) for speed in (0.25, 3.3, 3.3))
        slow.batch = 8
        for peer in others:
            peer.batch = 1
        scenario.reach(5)
        assert took_steps_with((slow, *others), 3, since=1), scenario.describe()
        assert all(slow.samples[step] for step in range(2, 6)), slow.samples


# Alone for a while


def test_trainer_that_nobody_reached_for_a_long_time_returns():
    """Its reports are of the run, although it has been in no roster for longer than a stranger is remembered."""
    with Scenario(6, target_batch_size=120) as scenario:
        others, lone = add_trainers(scenario, 3), scenario.add(speed=1.5)
        scenario.reach(2)
        scenario.cut(lone, *others)
        scenario.wait(known_peers.KNOWN_SECONDS + 60.0)
        scenario.heal()
        since = len(lone.rounds)
        scenario.wait_until(lambda: "averaged" in lone.outcomes()[since:], 40.0)


@pytest.mark.parametrize("seed", [1, 3])
def test_trainer_that_was_late_for_short_rounds_is_in_time_again(seed, monkeypatch):
    """Nobody waits for who has missed two rounds, and a step takes less time than to see that a round is over."""
    monkeypatch.setattr(simulated_network, "DHT_SECONDS", 0.4)
    with Scenario(seed, grain=0.02, target_batch_size=24, matchmaking_time=4.0) as scenario:
        _, _, late = (scenario.add(speed=speed, uplink=5000.0) for speed in (3.0, 3.5, 2.0))
        scenario.reach(4)
        late.freeze()
        scenario.wait(10.0)
        late.thaw()
        since = len(late.rounds)
        scenario.wait_until(lambda: late.outcomes()[since:].count("averaged") >= 3, 60.0)


def test_trainer_that_slept_for_many_short_steps_downloads_the_state(monkeypatch):
    """Its local updates are a target batch, so that its next step is always due."""
    monkeypatch.setattr(simulated_network, "DHT_SECONDS", 0.4)
    with Scenario(8, target_batch_size=14, local_updates=True, average_state_every=1) as scenario:
        one, two, late = (
            scenario.add(speed=speed, uplink=3000.0, clock=-5.0 * (speed < 1)) for speed in (1.0, 0.7, 0.4)
        )
        scenario.reach(3)
        late.freeze()
        scenario.reach(late.step + joining.MAX_MISSED_UPDATES + 5, one, two, seconds=600.0)
        late.thaw()
        since = len(late.rounds)
        scenario.wait_until(lambda: late.downloads and late.outcomes()[since:].count("averaged") >= 2, 60.0)


def test_clock_that_jumps_back_again_and_again_costs_no_round():
    """As in WSL. The run's clock is set again ten seconds later; until then nodes refused the records of this peer."""
    with Scenario(3, grain=0.03, target_batch_size=24) as scenario:
        peers = [scenario.add(speed=speed, uplink=9000.0 * speed) for speed in (1.0, 0.7, 0.4)]
        scenario.reach(3)
        since = min(peer.step for peer in peers)
        for _ in range(10):
            peers[2].clock = -5.0
            scenario.wait(8.0)
            peers[2].clock = 0.0
            scenario.wait(12.0)
        assert took_steps_with(peers, 3, since) and peers[2].step > 30


@pytest.mark.parametrize("seed", [18, 19])
def test_trainer_with_the_smallest_peer_id_that_reaches_only_the_dht_delays_two_steps_at_most(seed):
    """After three rounds in vain, it is the one that may take a step without those it does not reach."""
    with Scenario(seed, target_batch_size=160) as scenario:
        lone, *others = sorted(add_trainers(scenario, 4), key=lambda peer: peer.peer_id)
        scenario.reach(4)
        scenario.cut(lone, *others)
        since, began = max(scenario.steps_of()), scenario.time.read()
        scenario.reach(since + 2, *others)
        later, step_seconds = scenario.time.read(), 160 / (BATCH * sum(peer.speed for peer in others))
        scenario.reach(since + 9, *others)
        assert later - began < 2 * 2 * step_seconds
        assert scenario.time.read() - later < 7 * 1.15 * step_seconds, scenario.describe()
        assert took_steps_with(others, 3, since=since + 1), scenario.describe()
        assert scenario.have_one_history(*others, tolerance=0.005), scenario.describe()
        assert "alone" not in lone.outcomes() and not lone.downloads, scenario.describe()
        assert not lone.optimizer.state_averager.allow_state_sharing
        assert any("reach" in line for line in lone.log), scenario.describe()
        scenario.heal()
        scenario.unite()
        assert not any(peer.downloads for peer in others)


def test_of_two_trainers_that_do_not_reach_each_other_one_goes_on():
    with Scenario(6, target_batch_size=80, averaging_timeout=20.0) as scenario:
        peers = scenario.add(speed=0.8), scenario.add(speed=1.2)
        scenario.reach(2)
        scenario.cut(*peers)
        scenario.wait(60.0)
        before = [max(peer.history) for peer in peers]
        scenario.wait(60.0)
        goes_on = [max(peer.history) > step for peer, step in zip(peers, before, strict=True)]
        assert sorted(goes_on) == [False, True], scenario.describe()
        scenario.heal()
        scenario.unite()


@pytest.mark.parametrize("fault", ["cut", "freeze"])
@pytest.mark.parametrize("seed", [2, 12])
def test_two_clients_and_their_public_trainer_average_again_once_they_reach_it(fault, seed):
    """Friends at home: the router of the one with a public address restarts. The smallest peer ID is a client's."""
    with Scenario(seed, grain=0.12, target_batch_size=100, averaging_timeout=15.0) as scenario:
        trainers = public, *clients = [scenario.add(speed=speed, client=speed != 1) for speed in (1, 0.7, 1.2)]
        assert min(trainers, key=lambda peer: peer.peer_id.to_bytes()) in clients
        scenario.reach(4)
        scenario.cut(public, *clients) if fault == "cut" else public.freeze()
        scenario.wait(75.0)
        scenario.heal()
        public.thaw()
        scenario.wait(60.0)
        since = [len(peer.rounds) for peer in trainers]
        scenario.wait(90.0)
        found = [peer.outcomes()[number:] for peer, number in zip(trainers, since, strict=True)]
        assert all(outcomes.count("averaged") >= 6 for outcomes in found), scenario.describe()


def test_client_that_was_ahead_alone_joins_the_slower_public_trainer():
    """The line between two friends was down for minutes: the public trainer asked for a state that nobody offers."""
    with Scenario(3, target_batch_size=60) as scenario:
        public, client = scenario.add(speed=0.3), scenario.add(speed=0.9, client=True)
        scenario.reach(4)
        scenario.partition([client])
        scenario.wait(250.0)
        assert client.step > public.step + 4
        scenario.heal()
        scenario.unite()
        assert client.downloads and not public.downloads, scenario.describe()


def test_trainer_that_dies_sends_nobody_looking_for_its_step():
    """Its last report looks alive for 15 seconds, in which the others take some steps."""
    with Scenario(15, target_batch_size=110) as scenario:
        dying, *others = add_trainers(scenario, 5)
        scenario.reach(6)
        dying.kill(silently=True)
        scenario.reach(12, *others)
        assert not any(peer.downloads for peer in others), scenario.describe()


# Partitions


@pytest.mark.parametrize("sizes", [(2, 2), (5, 2)])
def test_sides_of_a_partition_return_to_one_history(sizes):
    with Scenario(7, target_batch_size=20 * sum(sizes), average_state_every=1) as scenario:
        peers = add_trainers(scenario, sum(sizes))
        sides = peers[: sizes[0]], peers[sizes[0] :]
        scenario.reach(2)
        scenario.partition(*sides)
        scenario.reach(max(scenario.steps_of()) + 4)
        assert not scenario.have_one_history(), "there is no fork"
        scenario.heal()
        scenario.unite()
        followed = [any(peer.downloads for peer in side) for side in sides]
        assert followed in ([False, True], [True, False]), "not exactly one side has taken over the state of the other"
        assert sizes[0] == sizes[1] or not followed[0], "the larger side has followed"


# Newcomers


def test_newcomer_whose_download_takes_six_steps_becomes_equal():
    with Scenario(8, target_batch_size=120) as scenario:
        others = add_trainers(scenario, 3)
        scenario.reach(2)
        newcomer = scenario.add(downlink=40.0)
        scenario.wait_until(lambda: newcomer.has_joined, 200.0)
        newcomer.downlink = 1e6
        joined = newcomer.step
        assert joined - newcomer.downloads[0][1] >= 3
        scenario.unite()
        # Without the gradients of the download's steps, its updates differ by 0.0033 to 0.0049 six steps later.
        # Given within 2 steps, averaged again in the round with parameters up to 8 steps later; seen up to 2 later.
        assert newcomer.step <= joined + 12, "late"
        given = next(entry for entry in newcomer.rounds if entry["outcome"] == "averaged")
        assert given["step"] <= joined + 2 and given["distance"] == 0
        assert not any(peer.downloads for peer in others) and newcomer.applied_samples


@pytest.mark.parametrize("number", [16, pytest.param(64, marks=pytest.mark.long)])
def test_newcomer_among_many_is_equal_at_once(number):
    with Scenario(9, target_batch_size=40 * number, grain=0.04) as scenario:
        others = [scenario.add(speed=0.5 + index % 16 / 15, client=index % 2 == 1) for index in range(number - 1)]
        scenario.reach(3)
        assert took_steps_with(others, number - 1, since=1), scenario.describe()
        newcomer = scenario.add(uplink=2000.0)
        scenario.wait_until(lambda: newcomer.has_joined, 100.0)
        scenario.reach(newcomer.step + 2)
        assert scenario.have_one_history(), scenario.describe()
        assert min(peer.received for peer in others) > 0.98


# Lost parts of rounds


def test_reducer_that_is_dead_for_everybody_costs_one_part_of_a_round():
    with Scenario(10, target_batch_size=160, averaging_timeout=20.0) as scenario:
        peers = add_trainers(scenario, 4)
        scenario.reach(2)
        dead = peers[3]
        dead.stall("rpc_aggregate_part")
        scenario.wait_until(lambda: any(peer.rounds[-1]["received"] not in (1, None) for peer in peers), 100.0)
        dead.recover()
        scenario.unite()
        assert not any(peer.downloads for peer in peers)


@pytest.mark.parametrize(("begin", "end"), [(7, 9), (9, 13)], ids=["the last round with parameters", "four steps"])
def test_trainer_that_slept_receives_the_parameters_before_the_next_round_that_averages_them(begin, end):
    with Scenario(11, target_batch_size=160, average_state_every=8) as scenario:
        peers = add_trainers(scenario, 4)
        scenario.reach(begin)
        peers[0].freeze()
        scenario.reach(end, *peers[1:])
        peers[0].thaw()
        # Without the gradients of four steps, its updates differ by up to 0.008 at first, and less after each round
        # that averages the parameters, every 80 s.
        scenario.unite(seconds=250.0)
        if begin < 8:
            assert max(scenario.steps_of()) <= end + 5
            return
        assert not peers[0].downloads, "it needs the state only without a mark in common"
        given = next(entry for entry in peers[0].rounds if entry["step"] > end)
        assert given["step"] <= end + 3 and given["distance"] == 0


def test_weak_downlink_that_lacks_parameters_each_time_does_not_fall_behind():
    # It takes part in every second step: with 2 instead of 8, it may be in those rounds only that average parameters,
    # where nobody gives it those that it lacks, and it receives a third of them at a time.
    with Scenario(12, grain=0.05, target_batch_size=160, average_state_every=8, averaging_timeout=20.0) as scenario:
        weak, others = scenario.add(uplink=60.0, downlink=60.0), add_trainers(scenario, 3)
        scenario.reach(12, *others)
        assert scenario.have_one_history(*others) and not any(peer.downloads for peer in others)
        assert min(peer.received for peer in others) > 0.98
        # Measured: 0.009 to 0.014, and 0.042 to 0.051 if nobody gives parameters.
        assert weak.step >= 10 and scenario.distance(weak, others[0]) < 0.035, scenario.describe()


# Restarts


def test_trainers_that_restart_from_checkpoints_of_different_steps_continue_with_the_newest():
    with Scenario(13, target_batch_size=120) as scenario:
        old, new = scenario.initial + 0.14, scenario.initial + 0.16
        for index, (step, parameters) in enumerate(((14, old), (14, old), (16, new))):
            scenario.add(speed=0.8 + 0.2 * index, start_step=step, params=parameters)
        scenario.reach(17)
        scenario.unite()
        assert not scenario.peers[2].downloads, "the newest state is lost"


def test_two_clients_whose_public_peer_has_left_do_not_fork():
    with Scenario(14, target_batch_size=120) as scenario:
        public, *clients = scenario.add(), scenario.add(client=True, speed=0.8), scenario.add(client=True, speed=1.2)
        scenario.reach(3)
        public.leave()
        scenario.wait(40.0)
        before = scenario.steps_of(*clients)
        scenario.wait(60.0)
        assert sum(now > then for now, then in zip(scenario.steps_of(*clients), before, strict=True)) <= 1
        newcomer = scenario.add()
        scenario.unite(*clients, newcomer)


def break_rounds(peer: Peer, method: str) -> None:
    """Let each round of a trainer raise from now on: before it is searched, or at its end."""

    def fail(*_args: object) -> None:
        raise RuntimeError("broken")

    if method == "average":
        peer.optimizer.coordinator.average = fail
    else:
        peer.optimizer.steps.apply_outcome = fail


@pytest.mark.parametrize("method", ["average", "apply"])
def test_trainers_that_fail_in_each_attempt_cost_the_others_no_rounds(method):
    """They live, report and answer, and are half of the run."""
    with Scenario(6, target_batch_size=40, averaging_timeout=20.0) as scenario:
        *healthy, _, _ = peers = [scenario.add(speed=speed) for speed in (0.8, 1.2, 1.0, 0.6)]
        scenario.reach(5)
        for peer in peers[2:]:
            break_rounds(peer, method)
        since = [len(peer.rounds) for peer in healthy]
        scenario.wait(60.0)
        # Two trainers with these speeds take 11 or 12 steps in a minute.
        rounds = [peer.outcomes()[number:].count("averaged") for peer, number in zip(healthy, since, strict=True)]
        assert min(rounds) >= 9, scenario.describe()


@pytest.mark.parametrize("local", [False, True], ids=["gradients", "local updates"])
def test_paused_trainer_costs_the_others_nothing_and_continues_without_a_download(local):
    """While others train, it offers its old state to nobody; alone, it is the only one that has the run's."""
    with Scenario(9, target_batch_size=96, averaging_timeout=60.0, local_updates=local) as scenario:
        peers = [scenario.add(speed=0.6 + 0.1 * index, uplink=3000.0 * 2**index) for index in range(4)]
        idle, others, offers = peers[1], [peers[0], *peers[2:]], []
        scenario.reach(3)

        def pause() -> float:
            del idle.compute_seconds
            idle.optimizer.pause(idle.model)
            for _ in range(90):
                scenario.time.sleep(1.0)
                idle.optimizer.share_state()
                offers.append(idle.optimizer.state_averager.allow_state_sharing)
            idle.optimizer.resume(idle.model, idle.model.weight.device)
            return idle.compute_seconds()

        idle.compute_seconds = pause
        scenario.wait_until(lambda: len(offers) >= 30, 60.0)  # a round that ran has ended
        began, step, num_rounds = scenario.time.read(), others[0].step, len(idle.rounds)
        scenario.reach(step + 4, *others)
        seconds = scenario.time.read() - began
        assert seconds < 100.0, "nobody waits: each of the steps is of three trainers with 2.5 samples a second each"
        assert took_steps_with(others, 3, since=step + 1)
        assert len(idle.rounds) == num_rounds and not any(offers[30:]), "it takes part in nothing"
        scenario.wait_until(lambda: len(offers) == 90, 60.0)
        scenario.unite()
        last = max(scenario.steps_of())
        scenario.reach(last + 2)
        assert took_steps_with(peers, 4, since=last)
        assert not idle.downloads


@pytest.mark.parametrize("local", [False, True])
def test_trainer_that_lacks_many_updates_after_a_pause_is_in_the_next_round(local):
    """The others do not count its samples: while it did, it looked for their group long before them."""
    with Scenario(9, target_batch_size=260, averaging_timeout=60.0, local_updates=local) as scenario:
        peers = [scenario.add(speed=0.6 + 0.1 * index, uplink=3000.0 * 2**index) for index in range(3)]
        idle, returned = peers[1], []
        scenario.reach(9)

        def pause() -> float:
            del idle.compute_seconds
            idle.optimizer.pause(idle.model)
            scenario.time.sleep(600.0)
            idle.optimizer.resume(idle.model, idle.model.weight.device)
            returned.append(len(idle.rounds))
            return idle.compute_seconds()

        idle.compute_seconds = pause
        scenario.wait_until(lambda: returned, 700.0)
        last = max(scenario.steps_of())
        scenario.reach(last + 4)
        assert "missed" not in idle.outcomes()[returned[0] :], scenario.describe()
        assert not idle.downloads


def test_newcomer_gets_the_state_of_a_run_whose_trainers_are_all_paused():
    with Scenario(3) as scenario:
        only = scenario.add(speed=2.0)
        scenario.reach(2)
        paused = []

        def pause() -> float:
            only.optimizer.pause(only.model)
            paused.append(only.step)
            while True:
                only.optimizer.share_state()
                scenario.time.sleep(1.0)

        only.compute_seconds = pause
        scenario.wait_until(lambda: paused, 20.0)
        newcomer = scenario.add()
        scenario.wait_until(lambda: newcomer.has_joined, 60.0)
        assert newcomer.step >= paused[0] >= 2
        scenario.reach(paused[0] + 2, newcomer)
