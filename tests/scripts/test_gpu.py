"""Trainers that share one GPU."""

import os
import re
import time

import psutil
import pytest

from tests.support.peers import LONG_STEPS, join_together, local_peer

pytestmark = pytest.mark.gpu
FIRST_GPU = {"CUDA_VISIBLE_DEVICES": "0", "OMP_NUM_THREADS": str(os.cpu_count())}


@pytest.mark.parametrize("name_of_script", ["run_trainer.py", "run_custom_trainer.py"])
def test_two_trainers_average_on_one_gpu(scripts, tmp_path, name_of_script):
    """One computes in the precision that the GPU supports best, the other in float16."""
    with local_peer(tmp_path, "albert") as peer:
        address = str(peer.dht.get_visible_maddrs()[0])
        common = ("--initial_peers", address, *LONG_STEPS, "--max_global_steps", 3, "--leave_timeout", 0)
        trainers = [
            scripts.trainer(name, *common, *flags, name_of_script=name_of_script, env=FIRST_GPU)
            for name, flags in (("one", ()), ("two", ("--fp16",)))
        ]
        join_together(*trainers)
        exit_codes = [trainer.wait(240) for trainer in trainers]
    for trainer, exit_code in zip(trainers, exit_codes, strict=True):
        assert exit_code == 0, trainer.output
        assert trainer.output.count("Averaged gradients with 2 peers") >= 2, trainer.output
        assert "Traceback" not in trainer.output and "not finite" not in trainer.output
        losses = [float(loss) for loss in re.findall(r"Local loss: ([\d.]+)", trainer.output)]
        assert losses[-1] < losses[0], trainer.output


def test_fast_local_steps_do_not_keep_the_dht_busy(scripts, tmp_path):
    """A GPU takes tens of local steps a second with a small model, and each reports its progress."""
    seconds = 15.0
    with local_peer(tmp_path, "albert") as peer:
        address = str(peer.dht.get_visible_maddrs()[0])
        flags = ("--initial_peers", address, "--target_batch_size", 10**7, "--logging_steps", 10)
        trainer = scripts.trainer("one", *flags, pace=0.0, env=FIRST_GPU)
        trainer.wait_for("Local step 10:")
        (daemon,) = (process for process in trainer.family() if process.name().startswith("p2pd"))
        busy, steps = cpu_seconds(daemon.parent()), count_local_steps(trainer)
        time.sleep(seconds)
        busy, steps = cpu_seconds(daemon.parent()) - busy, count_local_steps(trainer) - steps
    assert steps > 5 * seconds, f"{steps} local steps in {seconds} seconds"
    assert busy < 0.25 * seconds, f"the DHT was busy for {busy:.1f} of {seconds} seconds, with {steps} local steps"


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def count_local_steps(trainer) -> int:
    return max(map(int, re.findall(r"Local step (\d+):", trainer.output)))
