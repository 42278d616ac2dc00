"""Local updates with the real scripts: a monitor and trainers with a tiny model."""

import pytest

from tests.support.peers import join_together, read_jsonl, steps_of

LOCAL = ("--local_updates", "--learning_rate", 0.01, "--target_group_size", 3, *steps_of(seconds=5, num_trainers=3))


@pytest.mark.long
def test_trainers_with_local_updates_outlive_kills_and_hand_over_through_the_monitor(scripts):
    """Both kinds of trainer and a client: one is killed and restarted. All leave later, and a new one continues."""
    monitor = scripts.monitor(
        "--local_updates", "--learning_rate", 0.01, "--save_checkpoint_step_interval", 1, "--refresh_period", 0.5
    )
    common = ("--initial_peers", monitor.address, *LOCAL)
    alice = scripts.trainer("alice", *common)
    bob = scripts.trainer("bob", *common, name_of_script="run_custom_trainer.py")
    carol = scripts.trainer("carol", *common, "--client_mode")
    join_together(alice, bob, carol)
    for trainer in (alice, bob, carol):
        trainer.wait_for("Averaged gradients with 3 peers")
    bob.kill_all()
    alice.wait_for(r"\bStep #\d+")  # reported by its next local step
    reached = max(alice.steps)
    bob = scripts.trainer("bob", *common, name_of_script="run_custom_trainer.py")
    joined = int(bob.wait_for(r"Joined the collaboration at step #(\d+)")[1])
    assert joined >= reached - 1
    bob.wait_for("Averaged gradients with 3 peers")
    for trainer in (alice, bob, carol):
        assert trainer.stop() == 0, trainer.output
        trainer.assert_nothing_left()
        assert "Traceback" not in trainer.output and "not finite" not in trainer.output, trainer.output

    rows = read_jsonl(scripts.folder / "monitor" / "metrics.jsonl")
    steps = [row["step"] for row in rows]
    assert steps == list(range(1, len(steps) + 1)), "no step is lost or repeated"
    assert rows[-1]["loss"] < rows[0]["loss"]

    # The trainers may have left before the monitor could download the state of their last step.
    saved = [int(path.name.removeprefix("checkpoint-")) for path in (scripts.folder / "monitor").glob("checkpoint-*")]
    assert max(saved) >= reached
    dora = scripts.trainer("dora", *common)
    joined = int(dora.wait_for(r"Joined the collaboration at step #(\d+)")[1])
    assert joined >= max(saved)
    dora.wait_for(rf"Step #{joined + 2}\b")
    assert dora.stop() == 0, dora.output
    again = scripts.trainer("dora", *LOCAL)
    step = int(again.wait_for(r"Resumed from a checkpoint at step #(\d+)")[1])
    again.wait_for(rf"Step #{step + 1}\b")
    assert again.stop() == 0, again.output
    assert monitor.stop() == 0, monitor.output
    assert "Traceback" not in monitor.output and "ERROR" not in monitor.output, monitor.output
