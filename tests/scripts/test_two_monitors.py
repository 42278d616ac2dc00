"""Two connected monitors: if one dies, the run continues, and peers join through the other."""

import pytest

from tests.support.peers import steps_of, wait_until

STEPS = steps_of(seconds=8, num_trainers=2)


@pytest.mark.long
def test_either_of_two_monitors_may_die(scripts):
    # The first start creates identities and ports; afterwards each monitor can be given the other's address.
    addresses = {}
    for name in ("first", "second"):
        monitor = scripts.monitor("--no_store_checkpoints", name=name)
        addresses[name] = monitor.address
        assert monitor.stop() == 0

    def start(name: str, other: str, *args):
        own = addresses[name].split("/p2p/")[0]
        return scripts.monitor(
            "--host_maddrs", own, "--initial_peers", addresses[other], "--bootstrap_timeout", 5, *args, name=name
        )

    first = start("first", "second", "--save_checkpoint_step_interval", 2)
    first.wait_for("Starting without them, and dialing them again periodically")
    assert first.address == addresses["first"]
    second = start("second", "first", "--no_store_checkpoints")
    assert second.address == addresses["second"]

    trainer = scripts.trainer("trainer", "--initial_peers", *addresses.values(), *STEPS)
    trainer.wait_for(r"Step #2\b", 120)
    second.wait_for(r"Step #2\t", 120)
    first.kill()
    newcomer = scripts.trainer("newcomer", "--initial_peers", addresses["second"], *STEPS)
    newcomer.wait_for(r"Joined the collaboration at step #[1-9]", 120)
    newcomer.wait_for("Averaged gradients with 2 peers", 120)

    first = start("first", "second", "--save_checkpoint_step_interval", 2)
    newest = max(trainer.steps) + 1
    wait_until(lambda: scripts.metrics("first")[-1]["step"] >= newest, 120, f"step {newest}")
    recorded = [record["step"] for record in scripts.metrics("first")]
    assert recorded == list(range(1, len(recorded) + 1)), "none lost, none repeated"
    assert not list((scripts.folder / "second").glob("checkpoint-*")), "only the first keeps checkpoints"
    for script in (trainer, newcomer, second, first):
        assert script.process.poll() is None and "Traceback" not in script.output, script.output
