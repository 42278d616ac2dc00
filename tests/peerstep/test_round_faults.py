"""Tests of faulty peers: peers that send invalid values, report false steps, or belong to another run."""

import math

from tests.support.peers import Script, wait_until
from tests.support.swarm import Replay, assert_equal_parameters


def test_bad_sender_changes_nothing_and_is_banned(build_swarm):
    """It sends NaN in place of each element of its gradients."""
    swarm, replay = build_swarm(max_grad_norm=0.5), Replay(max_grad_norm=0.5)
    *honest, bad = swarm.add_several(False, False, True)
    accumulator, gradients = bad.optimizer.accumulator, bad.averager.gradients
    load = accumulator.load
    accumulator.load = lambda: (load(), [tensor.fill_(math.nan) for tensor in gradients])[0]
    swarm.compute(4, 5, 3)
    expected = replay.step(swarm.wait_for(1, honest))
    assert_equal_parameters(honest, expected)
    assert any(bad.name in trainer.entry["violations"] for trainer in honest)
    assert any(bad.id not in {peer.peer_id for peer in trainer.tracker.other_trainers} for trainer in honest)


def test_foreign_trainer_is_ignored(build_swarm, tmp_path, launcher):
    """The trainer is plain hivemind with the same run ID. A round that waited for it would take 300 seconds."""
    swarm, replay = build_swarm(matchmaking_time=300.0, averaging_timeout=1200.0), Replay()
    swarm.add_several(False, False)
    stranger = Script(
        "tests/support/foreign_peer.py", swarm.run_id, swarm.network.address, log=tmp_path / "stranger.log",
        launcher=launcher,
    )  # fmt: skip
    swarm.stack.callback(stranger.kill_all)
    stranger.wait_for(r"is at step [2-9]")
    for sizes in ((4, 8), (5, 7), (6, 6)):
        before = stranger.output.count("is at step")
        wait_until(lambda before=before: stranger.output.count("is at step") > before + 3, 120, "its local steps")
        assert all(trainer.tracker.estimate()[0] == 0 for trainer in swarm.trainers)
        expected = replay.step(swarm.global_step(*sizes))
        assert_equal_parameters(swarm.trainers, expected)
        for trainer in swarm.trainers:
            assert trainer.entry["outcome"] == "averaged" and len(trainer.entry["group"]) == 2
            assert trainer.entry["missed"] == {}
            assert len(trainer.tracker.other_trainers) == 1
            assert trainer.optimizer.local_epoch == len(trainer.log)
    stranger.wait_for(r"is at step \d\d")
    newcomer = swarm.add()
    newcomer.join()
    assert newcomer.version == 3, "it loaded the state of the stranger"
    assert_equal_parameters([newcomer], expected)
    assert stranger.process.poll() is None, stranger.output
