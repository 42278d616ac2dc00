"""The real scripts as processes on 127.0.0.1: a monitor and trainers with a tiny model."""

import json
import math
import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import AlbertForPreTraining, AutoTokenizer

from cotrain.common.run_folder import find_checkpoint
from cotrain.monitoring.samples import build_pipeline, fill_masks
from cotrain.training.checkpoints import list_checkpoints
from cotrain.training.pretrained import load_checkpoint
from tests.support.peers import LONG_STEPS, join_together


def test_two_trainers_and_a_monitor_make_three_steps(scripts):
    text = "The value of [MASK]."
    monitor = scripts.monitor("--save_checkpoint_step_interval", 1, "--run_id", "three", "--sample_text", text)
    common = ("--run_id", "three", "--initial_peers", monitor.address, "--max_global_steps", 3, *LONG_STEPS)
    trainers = [scripts.trainer(name, *common, "--username", name) for name in ("alice", "bob")]
    join_together(*trainers)
    for trainer in trainers:
        assert trainer.wait(240) == 0, trainer.output
        trainer.assert_nothing_left()
    monitor.wait_for(r"Step #3\tloss = ")
    monitor.wait_for(rf"Step #3\t{re.escape(text)} -> \S.* [\d.]+%, ")
    assert monitor.stop() == 0
    monitor.assert_nothing_left()

    # log lines that users and scripts search for
    for trainer in trainers:
        for pattern in (r"--initial_peers /ip4/", r"Step #[1-3]\b", r"Your current contribution: \d+ samples",
                        r"Performance: [\d.]+ samples/sec", r"Local loss: [\d.]+"):  # fmt: skip
            assert re.search(pattern, trainer.output), pattern
        assert "Averaged gradients with 2 peers" in trainer.output
        assert "Traceback" not in trainer.output and "ERROR" not in trainer.output, trainer.output
    assert "Traceback" not in monitor.output and "ERROR" not in monitor.output, monitor.output

    # each step is reported once, with the samples of both peers
    output_dir = scripts.folder / "monitor"
    records = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3]
    assert records[0]["loss"] == pytest.approx(math.log(500) + math.log(2), rel=0.03)
    assert records[-1]["loss"] < records[0]["loss"]
    # A step begins when the target is expected to be reached, so samples vary around it. On a busy machine one of
    # the trainers may miss a step and catch up.
    assert sum(record["samples"] > LONG_STEPS[1] / 2 and record["contributors"] == 2 for record in records) >= 2
    assert records[-1]["alive peers"] == 2
    # 1, unless one of the trainers has missed a step
    assert records[-1]["complete rounds"] > 0 and records[-1]["applied share"] > 0.3

    # the last checkpoint can be loaded and equals the trainers' state
    newest = list_checkpoints(output_dir)[0]
    assert newest.name == "checkpoint-3"
    AlbertForPreTraining.from_pretrained(newest)
    assert len(AutoTokenizer.from_pretrained(newest)) == 500
    assert torch.load(newest / "training_state.pt", weights_only=True)["metadata"]["epoch"] == 3
    own = [list_checkpoints(scripts.folder / trainer)[0] for trainer in ("alice", "bob")]
    saved, *trained = (flatten(load_file(checkpoint / "model.safetensors")) for checkpoint in (newest, *own))
    differences = sorted(((weights - saved).norm() / saved.norm()).item() for weights in trained)
    for folder in (output_dir, scripts.folder / "alice"):
        completer = build_pipeline(*load_checkpoint(find_checkpoint(folder)))
        assert len(fill_masks(completer, text)[0]) == 5
    # The state is that of one trainer. A trainer that averaged the last step alone differs by 0.03.
    assert differences[0] < 2e-3 and differences[1] < 0.1, differences


def flatten(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([weights[name].flatten() for name in sorted(weights)])
