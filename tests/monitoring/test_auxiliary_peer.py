"""A monitor with an auxiliary peer, and a run whose trainers are all in client mode."""

import pytest

from tests.support.peers import LOCAL, LONG_STEPS, join_together, steps_of

STEPS = steps_of(seconds=5, num_trainers=3)
TOGETHER = ("--target_group_size", 4, "--averaging_timeout", 60)


def test_assistant_averages_with_a_public_trainer_and_two_clients(scripts):
    monitor = scripts.monitor(
        "--assist_in_averaging", "--assistant_maddrs", LOCAL, *STEPS, *TOGETHER,
        "--save_checkpoint_step_interval", 1,
    )  # fmt: skip
    common = ("--initial_peers", monitor.address, *STEPS, *TOGETHER)
    trainers = [
        scripts.trainer("public", *common),
        scripts.trainer("client-1", *common, "--client_mode"),
        scripts.trainer("client-2", *common, "--client_mode"),
    ]
    join_together(*trainers)
    for trainer in trainers:
        trainer.wait_for("Averaged gradients with 4 peers", 120)
    monitor.wait_for("Assisted 3 peers in averaging step", 120)
    monitor.wait_for(r"Step #\d+\t.*\talive peers = 3\t")  # the auxiliary peer does not count as a trainer
    for script in (*trainers, monitor):
        assert script.stop() == 0, script.output
        script.assert_nothing_left()
        assert "Traceback" not in script.output, script.output


@pytest.mark.long
def test_each_peer_says_that_all_trainers_are_in_client_mode(scripts):
    monitor = scripts.monitor("--no_store_checkpoints")
    common = ("--initial_peers", monitor.address, *LONG_STEPS, "--client_mode")
    trainers = [scripts.trainer(name, *common) for name in ("one", "two")]
    for script in (*trainers, monitor):
        script.wait_for("All 2 trainers are in client mode: nobody can download the training state", 120)
