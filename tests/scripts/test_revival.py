"""A run that has lost all its trainers resumes from the monitor's newest checkpoint."""

import re
import threading

import pytest
import torch

from arguments import HyperparameterArguments
from lib.averaging.state import TrainingStateAverager
from lib.training.checkpoints import TrainingState, list_checkpoints
from lib.training.optimizer import build_state_averager
from tests.support.peers import local_peer, read_jsonl, wait_until


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


def make_averager(peer) -> TrainingStateAverager:
    return build_state_averager(torch.nn.Linear(300, 300), peer, "run", HyperparameterArguments(), 20.0)


def make_state(averager: TrainingStateAverager, step: int) -> TrainingState:
    """Build a valid training state whose parameters all equal the step."""
    metadata, tensors = averager.snapshot()
    own = averager._parameters_and_extras()
    tensors[: len(own)] = [torch.full_like(tensor, step) for tensor in own]
    return TrainingState("run", {**metadata, "epoch": step}, tensors)


@pytest.mark.peers
def test_checkpoint_is_handed_out_whole_while_another_state_is_loaded(tmp_path):
    with local_peer(tmp_path / "monitor", "run") as monitor:
        address = str(monitor.dht.get_visible_maddrs()[0])
        donor = make_averager(monitor)
        assert donor.download_state() is None
        state = make_state(donor, 3)
        donor.restore(state.metadata, state.tensors)
        donor.offer(priority=2.5)
        with local_peer(tmp_path / "newcomer", "run", (address,)) as peer:
            newcomer = make_averager(peer)
            has_ended = threading.Event()

            def load_states() -> None:
                step = 4
                while not has_ended.is_set():
                    state = make_state(donor, step)
                    donor.restore(state.metadata, state.tensors)
                    step += 1

            loader = threading.Thread(target=load_states)
            loader.start()
            try:
                wait_until(lambda: newcomer.load_state_from_peers(), 60, "the donor's offer")
            finally:
                has_ended.set()
                loader.join()
            step = newcomer.local_epoch
            assert step >= 3
            assert all((parameter == step).all() for parameter in newcomer._parameters_and_extras())
            assert donor.download_state() is None, "a monitor does not ask itself"
            newcomer.shutdown()
        donor.shutdown()
