"""Trainers that share one GPU."""

import os
import re

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
