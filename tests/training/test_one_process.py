"""The optimizers and the schedule of the scripts: real peers learn what one process of plain PyTorch learns."""

import pytest
import torch

from tests.peerstep.test_one_process import compare_with_one_process
from tests.support.peers import local_optimizer


@pytest.mark.parametrize("optimizer", ["lamb", "adamw", "muon"])
def test_peers_with_each_optimizer_learn_what_one_process_learns(build_swarm, optimizer, monkeypatch):
    """torch's Muon rounds to bfloat16. Here it computes in float32.

    Two plain processes that add the same gradients in another order differ by 1 % of the distance moved after eight
    steps.
    """
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
    compare_with_one_process(build_swarm, optimizer, monkeypatch, open_optimizer=local_optimizer)
