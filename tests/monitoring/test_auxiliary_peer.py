"""A monitor with an auxiliary peer, and a run whose trainers are all in client mode."""

import asyncio

import pytest
from hivemind.utils.crypto import RSAPrivateKey

from tests.support.peers import LOCAL, LONG_STEPS, invite, join_together, steps_of
from tests.support.visitor import list_answered, visit

STEPS = steps_of(seconds=5, num_trainers=3)
TOGETHER = ("--target_group_size", 4, "--averaging_timeout", 60)


def test_assistant_averages_with_a_public_trainer_and_two_clients(scripts):
    """All have invitations to the run. No service of monitor and trainer answers a stranger while they average."""
    authority = RSAPrivateKey()

    def invited(name: str, flag: str = "--invitation") -> tuple[str, str]:
        return flag, invite(authority, scripts.folder / f"{name}.invitation")

    monitor = scripts.monitor(
        "--assist_in_averaging", "--assistant_maddrs", LOCAL, *STEPS, *TOGETHER, *invited("monitor"),
        *invited("assistant", "--assistant_invitation"), "--save_checkpoint_step_interval", 1,
    )  # fmt: skip
    common = ("--initial_peers", monitor.address, *STEPS, *TOGETHER)
    trainers = [
        scripts.trainer("public", *common, *invited("public")),
        scripts.trainer("client-1", *common, *invited("client-1"), "--client_mode"),
        scripts.trainer("client-2", *common, *invited("client-2"), "--client_mode"),
    ]
    join_together(*trainers)
    for trainer in trainers:
        trainer.wait_for("Averaged gradients with 4 peers", 120)
    for address in (monitor.address, trainers[0].address):
        assert list_answered(asyncio.run(visit(address, run_id="albert"))) == []
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
