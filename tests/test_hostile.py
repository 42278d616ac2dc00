"""Peers that send NaN, and peers that write what they like to the DHT."""

import re

import torch
from safetensors.torch import load_file

from checkpoints import list_checkpoints
from tests.peers import LONG_STEPS, join_together, read_jsonl, wait_until


def metrics(folder) -> list[dict]:
    return read_jsonl(folder / "metrics.jsonl")


def test_peer_that_sends_nan_hurts_nobody_else(scripts):
    monitor = scripts.monitor("--save_checkpoint_step_interval", 2)
    common = ("--initial_peers", monitor.address, *LONG_STEPS, "--target_group_size", 3)
    honest = [scripts.trainer(name, *common, "--max_global_steps", 5) for name in ("one", "two")]
    poisoner = scripts.trainer("poisoner", *common, name_of_script="tests/nan_peer.py")
    join_together(*honest, poisoner)
    for trainer in honest:
        assert trainer.wait(300) == 0, trainer.output
        weights = load_file(list_checkpoints(trainer.log.with_suffix(""))[0] / "model.safetensors")
        assert all(torch.isfinite(tensor).all() for tensor in weights.values())
        assert re.search(r"Averaged gradients with [23] peers", trainer.output)
    assert any("sent values that are not finite: not averaging with it" in trainer.output for trainer in honest)
    wait_until(lambda: metrics(scripts.folder / "monitor")[-1]["step"] >= 5, 120, "the monitor's report of step 5")
    losses = {record["step"]: record["loss"] for record in metrics(scripts.folder / "monitor")}
    assert losses[5] < losses[1] - 0.05


def test_hostile_records_stop_neither_monitor_nor_trainers(scripts):
    """The hostile peer is there before any trainer is, when nobody can contradict it."""
    monitor = scripts.monitor("--run_id", "target", "--save_checkpoint_step_interval", 2)
    hostile = scripts.start("tests/hostile_peer.py", "target", monitor.address, 1500, log="hostile")
    hostile.wait_for("hostile peer is up")
    common = (
        "--run_id", "target", "--initial_peers", monitor.address, *LONG_STEPS, "--max_global_steps", 6,
        "--load_state_timeout", 20,
    )  # fmt: skip
    trainers = [scripts.trainer(name, *common) for name in ("one", "two")]
    join_together(*trainers)
    for trainer in trainers:
        assert trainer.wait(300) == 0, trainer.output
        assert "Averaged gradients with 2 peers" in trainer.output
        assert "Traceback" not in trainer.output
    monitor.wait_for(r"Step #6\t", 120)
    hostile.wait_for("one lap of hostile records", 120)
    assert monitor.process.poll() is None and "Traceback" not in monitor.output
    records = metrics(scripts.folder / "monitor")
    records = [record for record in records if record["step"] < 1000]  # it may have believed the other for a while
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert all(5 < record["loss"] < 8 for record in records)
    assert list_checkpoints(scripts.folder / "monitor")[0].name == "checkpoint-6"
    assert monitor.output.count("Refused records") <= 6, "a summary at most once a minute"
