"""A run that has lost all its trainers resumes from the monitor's newest checkpoint."""

import re

import pytest

from cotrain.training.checkpoints import list_checkpoints
from tests.support.peers import read_jsonl, wait_until


@pytest.mark.parametrize(
    "reboot",
    [
        pytest.param(False, id="monitor stays"),
        pytest.param(True, id="monitor is killed, too, and trainers update locally", marks=pytest.mark.long),
    ],
)
def test_run_goes_on_after_all_its_trainers_were_killed(scripts, reboot):
    """The second trainer runs the custom loop and is slower."""
    mode = ("--local_updates", "--learning_rate", 0.01) if reboot else ()
    of_monitor = ("--save_checkpoint_step_interval", 2, "--metadata_expiration", 10, *mode)
    monitor = scripts.monitor(*of_monitor)
    address, folder = monitor.address, scripts.folder / "monitor"
    common = ("--initial_peers", address, "--target_batch_size", 512, "--metadata_expiration", 10,
              "--statistics_expiration", 20, *mode)  # fmt: skip
    trainers = [
        scripts.trainer("one", *common),
        scripts.trainer("two", *common, name_of_script="run_custom_trainer.py", pace=0.4),
    ]
    monitor.wait_for(r"Saved \S+checkpoint-", 120)
    wait_until(lambda: read_steps(folder)[-1] > newest_checkpoint(folder), 120, "a step after the checkpoint")
    for script in (*trainers, monitor) if reboot else trainers:
        script.kill()
    saved, reported = newest_checkpoint(folder), read_steps(folder)[-1]
    if reboot:
        monitor = scripts.monitor(*of_monitor, "--host_maddrs", address.split("/p2p/")[0])
        monitor.wait_for(f"Offering the checkpoint of step #{saved}")

    newcomer = scripts.trainer("newcomer", *common)
    joined = int(newcomer.wait_for(r"Joined the collaboration at step #(\d+)", 120)[1])
    # The trainer loads the checkpoint. A step later if the killed trainers still count as alive: theirs.
    assert saved <= joined <= saved + 1
    assert f"Loaded the state of step #{saved} from" in newcomer.output
    wait_until(lambda: read_steps(folder)[-1] > max(saved, reported) + 1, 120, "reports of new steps")
    wait_until(lambda: newest_checkpoint(folder) > saved, 120, "a checkpoint of the revived run")
    steps = read_steps(folder)
    first = len(steps) if reboot else max(index for index, step in enumerate(steps) if step == joined + 1)
    assert steps[:first] == list(range(1, first + 1)), "none lost"
    assert steps[first:] == list(range(joined + 1, steps[-1] + 1)) or reboot, "the steps of the revived run, each once"
    assert "Traceback" not in monitor.output + newcomer.output


def read_steps(folder) -> list[int]:
    return [record["step"] for record in read_jsonl(folder / "metrics.jsonl")] or [0]


def newest_checkpoint(folder) -> int:
    return int(re.search(r"\d+$", list_checkpoints(folder)[0].name)[0])
