"""Peers that write arbitrary records to the DHT."""

import time

import pytest

from cotrain.training.checkpoints import list_checkpoints
from tests.support.peers import join_together, read_jsonl, steps_of, wait_until


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
