"""Tests of faulty peers: peers that send invalid values, report false steps, or belong to another run."""

import math

import pytest
import torch

from lib.averaging.progress import PeerProgress
from tests.support.hostile_peer import progress
from tests.support.peers import Script, wait_until
from tests.support.swarm import Replay, Swarm, Trainer, assert_equal_parameters, flat
from utils import store_record

# Values that no honest peer sends


def send(trainer: Trainer, kind: str, value: float) -> None:
    """Make a trainer send `value` in place of each element of its gradients or parameters, from its next step on."""
    averager, accumulator = trainer.averager, trainer.optimizer.accumulator
    load = accumulator.load

    def load_value(max_norm: float) -> int:
        num_samples = load(max_norm)
        for tensor in averager.gradients if kind == "gradients" else averager.parameters:
            tensor.fill_(value)
        return num_samples

    accumulator.load = load_value


def test_bad_sender_changes_nothing_and_is_banned(build_swarm):
    """The sender is in client mode and does not reduce; the next test has a faulty peer that does."""
    swarm, replay = build_swarm(max_grad_norm=0.5), Replay(max_grad_norm=0.5)
    *honest, bad = swarm.add_several(False, False, True)
    bad.averager.max_grad_norm = 0.0
    send(bad, "gradients", 1e20)
    swarm.compute(4, 5, 3)
    expected = replay.step(swarm.wait_for(1, honest))
    assert_equal_parameters(honest, expected)
    assert any(bad.name in trainer.entry["violations"] for trainer in honest)
    assert any(bad.id in trainer.optimizer.banned_peers() for trainer in honest)


@pytest.mark.parametrize(("kind", "value"), [("gradients", math.nan), ("parameters", 1e22)])
def test_faulty_reducer_is_banned_and_costs_its_part_of_one_round(build_swarm, kind, value):
    """The faulty peer also sends invalid averages. The other peers keep their own values there and continue."""
    swarm, replay = build_swarm(max_grad_norm=0.5), Replay(max_grad_norm=0.5)
    swarm.add_several(False, False, False)
    bad = swarm.in_order(step=1)[1]  # the second of three reduces gradients and parameters
    honest = [trainer for trainer in swarm.trainers if trainer is not bad]
    send(bad, kind, value)
    swarm.compute(4, 5, 3)
    swarm.wait_for(1, honest)
    senders = honest if kind == "gradients" else swarm.trainers  # gradients are sent before parameters
    gradients = [trainer.averager.gradients for trainer in senders]
    samples = [size for trainer, size in zip(swarm.trainers, (4, 5, 3), strict=True) if trainer in senders]
    for trainer in honest:
        assert trainer.entry["outcome"] == "averaged" and 0.3 < trainer.entry["received"] < 1
        assert list(trainer.optimizer.recent_rounds) == [False]
        averages = zip(trainer.averager.averaged_gradients, trainer.averager.gradients, *gradients, strict=True)
        for averaged, own, *parts in averages:
            mean = sum(size * part for size, part in zip(samples, parts, strict=True)) / sum(samples)
            assert torch.allclose(averaged, mean, atol=1e-6) or torch.equal(averaged, own)
        assert (flat(trainer.averager.averaged_parameters) - replay.parameters()).abs().max() < 1e-6
        assert all(statistic.isfinite().all() and statistic.abs().max() < 1 for statistic in statistics_of(trainer))
    # A peer with such parameters bans the other peers and returns no average to them.
    witnesses = [trainer for trainer in honest if bad.name in trainer.entry["violations"]]
    assert witnesses == honest if kind == "gradients" else witnesses
    for trainer in witnesses:
        wait_until(lambda trainer=trainer: bad.id in trainer.optimizer.banned_peers(), 10, "the ban")
        wait_until(lambda trainer=trainer: bad.id not in ids(trainer.tracker.others), 10, "that it is not counted")
        assert trainer.tracker.global_progress.num_peers == 2
    if kind == "gradients":
        swarm.global_step(6, 6, trainers=honest)
        for trainer in honest:
            assert trainer.entry["received"] == 1.0
            assert set(trainer.entry["group"]) == {peer.name for peer in honest}


def statistics_of(trainer: Trainer) -> list[torch.Tensor]:
    """Return the gradient moments of the trainer's optimizer."""
    states = trainer.optimizer.state_averager.optimizer.state.values()
    return [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]


def ids(reports: list[PeerProgress]) -> set[bytes]:
    return {report.peer_id for report in reports}


# False reports


def claim(swarm: Swarm, **options) -> None:
    """Publish a progress report of a peer that does not train."""
    liar = swarm.borrow()
    report = progress(**options)
    store_record(liar.dht, f"{swarm.run_id}_training_progress", liar.public_key, report, lifetime=120)


def test_liar_about_the_step_is_ignored_though_others_offer_their_state(build_swarm):
    """Otherwise a trainer would load the same state repeatedly and drop its accumulated gradients each time."""
    swarm = build_swarm(load_state_timeout=10.0)
    trainer, _ = swarm.add_several(False, False)
    swarm.global_step(6, 6)
    trainer.local_step(swarm.take(4))
    before = trainer.optimizer.state_averager.snapshot()[1]
    claim(swarm, epoch=30_000)
    for _ in range(3):
        wait_until(lambda: trainer.tracker.global_epoch == 30_000, 60, "the claim")
        assert not trainer.optimizer.load_state_from_peers()
    assert trainer.tracker.seconds_to_step > 0, "a step is due because of what the liar claims to have"
    assert trainer.tracker.global_epoch == 1, "the liar is still believed"
    assert trainer.tracker.refresh() and trainer.tracker.global_epoch == 1
    assert trainer.optimizer.accumulator.num_samples == 4
    after = trainer.optimizer.state_averager.snapshot()[1]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


# Trainers that do not belong to the run


@pytest.mark.parametrize("kind", ["hivemind", "protocol"])
def test_foreign_trainer_is_ignored(build_swarm, tmp_path, caplog, launcher, kind):
    """The trainer is plain hivemind with the same run ID, or this project with another protocol number."""
    swarm, replay = build_swarm(matchmaking_time=15.0, averaging_timeout=40.0), Replay()
    swarm.add_several(False, False)
    stranger = Script(
        "tests/support/foreign_peer.py", kind, swarm.run_id, swarm.network.address, log=tmp_path / "stranger.log",
        launcher=launcher,
    )  # fmt: skip
    swarm.stack.callback(stranger.kill_all)
    stranger.wait_for(r"is at step [2-9]")
    with caplog.at_level("WARNING"):
        for sizes in ((4, 8), (5, 7), (6, 6)):
            before = stranger.output.count("is at step")
            wait_until(lambda before=before: stranger.output.count("is at step") > before + 3, 60, "its local steps")
            assert all(trainer.tracker.global_progress.samples_accumulated == 0 for trainer in swarm.trainers)
            expected = replay.step(swarm.global_step(*sizes))
            assert_equal_parameters(swarm.trainers, expected)
            for trainer in swarm.trainers:
                assert trainer.entry["outcome"] == "averaged" and len(trainer.entry["group"]) == 2
                assert trainer.entry["missed"] == {}
                assert trainer.entry["seconds"]["round"] < 15.0, "it waited for the stranger"
                assert len(trainer.tracker.others) == 1 and trainer.optimizer.local_epoch == len(trainer.log.entries)
    stranger.wait_for(r"is at step \d\d")
    newcomer = swarm.add()
    newcomer.join()
    assert newcomer.version == 3, "it loaded the state of the stranger"
    assert_equal_parameters([newcomer], expected)
    assert stranger.process.poll() is None, stranger.output
    warnings = [message for message in caplog.messages if "has protocol" in message]
    assert len(warnings) == (3 if kind == "protocol" else 0), "one line at each peer"
