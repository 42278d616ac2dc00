"""A monitor that helps trainers average, and trainers that nobody can help: all of them in client mode."""

import re

import pytest

from tests.peers import LOCAL, LONG_STEPS, join_together

TARGET = (*LONG_STEPS, "--target_group_size", 4)


def test_assistant_averages_with_a_public_trainer_and_two_clients(scripts):
    monitor = scripts.monitor(
        "--assist_in_averaging", "--assistant_maddrs", LOCAL, *TARGET[:2], "--target_group_size", 4,
        "--averaging_timeout", 30, "--save_checkpoint_step_interval", 1,
    )  # fmt: skip
    common = ("--initial_peers", monitor.address, *TARGET, "--max_global_steps", 4)
    trainers = [
        scripts.trainer("public", *common),
        scripts.trainer("client-1", *common, "--client_mode"),
        scripts.trainer("client-2", *common, "--client_mode"),
    ]
    join_together(*trainers)
    for trainer in trainers:
        assert trainer.wait(300) == 0, trainer.output
        assert "Averaged gradients with 4 peers" in trainer.output, trainer.output
        assert "Traceback" not in trainer.output
    assert "Averaged gradients with 4 peers" in monitor.output, monitor.output
    assert re.search(r"Step #4\t.*\talive peers = 3\t", monitor.output), "it does not count as a trainer"
    assert monitor.stop() == 0, monitor.output
    monitor.assert_nothing_left()
    assert "Traceback" not in monitor.output


@pytest.mark.long
def test_each_peer_says_that_all_trainers_are_in_client_mode(scripts):
    monitor = scripts.monitor("--no_store_checkpoints")
    common = ("--initial_peers", monitor.address, *TARGET, "--client_mode")
    trainers = [scripts.trainer(name, *common) for name in ("one", "two")]
    for script in (*trainers, monitor):
        script.wait_for("All 2 trainers are in client mode, so that nobody can average with anybody", 120)
