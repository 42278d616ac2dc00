"""Peers that send NaN, and peers that write arbitrary records to the DHT."""

import re
import time

import pytest
import torch
from safetensors.torch import load_file

from lib.training.checkpoints import list_checkpoints
from tests.support.peers import join_together, read_jsonl, steps_of, wait_until


@pytest.mark.early
def test_peer_that_sends_nan_harms_no_other_peer(scripts):
    monitor = scripts.monitor("--save_checkpoint_step_interval", 2)
    steps = steps_of(seconds=10, num_trainers=3)
    common = ("--initial_peers", monitor.address, *steps, "--target_group_size", 3)
    honest = [scripts.trainer(name, *common, "--max_global_steps", 5) for name in ("one", "two")]
    poisoner = scripts.trainer("poisoner", *common, env={"SEND_NAN": "1"})
    join_together(*honest, poisoner)
    for trainer in honest:
        assert trainer.wait(300) == 0, trainer.output
        weights = load_file(list_checkpoints(trainer.log.with_suffix(""))[0] / "model.safetensors")
        assert all(torch.isfinite(tensor).all() for tensor in weights.values())
        assert re.search(r"Averaged gradients with [23] peers", trainer.output)
    noticed = [
        trainer.output.partition("sent values that are not finite: not averaging with it")[2] for trainer in honest
    ]
    assert any(noticed)
    # The round that detects the NaN may end later; the other rounds have the two honest peers only.
    assert any("2" in re.findall(r"Averaged gradients with (\d+) peers", rest)[1:] for rest in noticed)
    wait_until(lambda: scripts.newest_step() >= 5, 120, "the monitor's report of step 5")
    losses = {record["step"]: record["loss"] for record in scripts.metrics()}
    assert losses[5] < losses[1] - 0.05


def rounds_of(folder, names) -> int:
    """Return the number of rounds that all trainers have completed together."""
    counts = []
    for name in names:
        rounds = read_jsonl(folder / name / "rounds.jsonl")
        counts.append(sum(entry["outcome"] == "averaged" and len(entry["group"]) >= len(names) for entry in rounds))
    return min(counts)


@pytest.mark.early
def test_hostile_records_stop_neither_trainers_nor_monitor(scripts):
    """Their writer knows one address. Such records brought a run from 29 rounds a minute to 0."""
    monitor = scripts.monitor("--save_checkpoint_step_interval", 4)
    common = ("--initial_peers", monitor.address, *steps_of(seconds=2, num_trainers=2), "--target_group_size", 4)
    paces = {"quick": 0.25, "usual": 0.5, "slow": 1.0}
    trainers = [scripts.trainer(name, *common, pace=pace) for name, pace in paces.items()]
    join_together(*trainers)
    wait_until(lambda: rounds_of(scripts.folder, paces) >= 3, 120, "the first rounds")

    def count_rounds(seconds: float) -> int:
        before = rounds_of(scripts.folder, paces)
        time.sleep(seconds)
        return rounds_of(scripts.folder, paces) - before

    without = count_rounds(20)
    hostile = scripts.start("tests/support/hostile_peer.py", "albert", monitor.address, log="hostile")
    hostile.wait_for("attacked 3 trainers")
    # A busy machine may take a part of one period, and not of another.
    assert without >= 4 and any(count_rounds(20) >= 0.8 * without for _ in range(3)), without
    newcomer = scripts.trainer("newcomer", *common)
    newcomer.wait_for("Loaded the state of step #", 60)
    newcomer.wait_for(r"Averaged gradients with [34] peers", 60)
    hostile.wait_for("attacked [34] trainers")
    step = int(newcomer.wait_for(r"\bStep #(\d+)")[1])
    monitor.wait_for(rf"Step #{step}\t", 120)
    records = scripts.metrics()
    assert [record["step"] for record in records] == list(range(1, len(records) + 1)), "none lost, false or repeated"
    assert all(5 < record["loss"] < 8 for record in records)
    assert list_checkpoints(scripts.folder / "monitor"), monitor.output
    assert 1 <= monitor.output.count("Refused records") <= 6, "a summary at most once a minute"
    for script in (monitor, *trainers, newcomer, hostile):
        assert script.process.poll() is None and "Traceback" not in script.output, script.output
