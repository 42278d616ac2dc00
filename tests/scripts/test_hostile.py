"""Peers that send NaN, and peers that write arbitrary records to the DHT."""

import re
import time

import pytest
import torch
from hivemind.dht import DHT
from hivemind.utils import get_dht_time
from safetensors.torch import load_file

from lib.training.checkpoints import list_checkpoints
from tests.support.hostile_peer import KEYS_OF_AVERAGERS, RAW, RawValues
from tests.support.peers import LOCAL, LONG_STEPS, join_together, local_peer, read_jsonl, steps_of, wait_until


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


@pytest.mark.long
def test_hostile_records_stop_neither_monitor_nor_trainers(scripts):
    """The hostile peer joins before any trainer, when no other peer contradicts it."""
    monitor = scripts.monitor("--run_id", "target", "--save_checkpoint_step_interval", 2)
    hostile = scripts.start("tests/support/hostile_peer.py", "target", monitor.address, 1500, log="hostile")
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
    monitor.wait_for("Refused records", 120)
    assert monitor.process.poll() is None and "Traceback" not in monitor.output
    records = scripts.metrics()
    # The monitor may have believed the hostile peer for a while.
    records = [record for record in records if record["step"] < 1000]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert all(5 < record["loss"] < 8 for record in records)
    assert list_checkpoints(scripts.folder / "monitor")[0].name == "checkpoint-6"
    assert 1 <= monitor.output.count("Refused records") <= 6, "a summary at most once a minute"


def rounds_of(folder, names) -> int:
    """Return the number of rounds that all trainers have completed together."""
    counts = []
    for name in names:
        rounds = read_jsonl(folder / name / "rounds.jsonl")
        counts.append(sum(entry["outcome"] == "averaged" and len(entry["group"]) >= len(names) for entry in rounds))
    return min(counts)


@pytest.mark.early
def test_stranger_without_a_gpu_does_not_stop_a_run(scripts):
    """It knows one address. With the records that it writes, it brought such a run from 29 rounds a minute to 0."""
    monitor = scripts.monitor()
    common = ("--initial_peers", monitor.address, *steps_of(seconds=2, num_trainers=2), "--target_group_size", 4)
    paces = {"quick": 0.25, "usual": 0.5, "slow": 1.0}
    trainers = [scripts.trainer(name, *common, pace=pace) for name, pace in paces.items()]
    join_together(*trainers)
    wait_until(lambda: rounds_of(scripts.folder, paces) >= 3, 120, "the first rounds")

    def count_rounds(seconds: float) -> int:
        before = rounds_of(scripts.folder, paces)
        time.sleep(seconds)
        return rounds_of(scripts.folder, paces) - before

    without = count_rounds(30)
    stranger = scripts.start("tests/support/stranger.py", "albert", monitor.address, log="stranger")
    stranger.wait_for("attacked 3 trainers")
    # A busy machine may take a part of one period, and not of another.
    assert without >= 4 and any(count_rounds(30) >= 0.8 * without for _ in range(3)), without
    newcomer = scripts.trainer("newcomer", *common)
    newcomer.wait_for("Loaded the state of step #", 60)
    newcomer.wait_for(r"Averaged gradients with [34] peers", 60)
    stranger.wait_for("attacked [34] trainers")
    assert stranger.process.poll() is None and all(trainer.process.poll() is None for trainer in trainers)


@pytest.mark.parametrize("attack", ["values that cannot be read", "a record without a subkey"])
@pytest.mark.peers
def test_hostile_records_under_the_averagers_keys_do_not_stop_their_readers(tmp_path, attack):
    """A record without a subkey would prevent peers from storing records with a subkey."""
    keys = [f"run_{name}" for name in (*KEYS_OF_AVERAGERS, "key_without_a_schema")]
    with local_peer(tmp_path / "one", "run") as first:
        address = str(first.dht.get_visible_maddrs()[0])
        hostile = DHT([address], start=True, host_maddrs=[LOCAL], record_validators=[RawValues()])
        try:
            with local_peer(tmp_path / "two", "run", (address,)) as second:
                expiration, subkey = get_dht_time() + 300, hostile.peer_id.to_bytes()
                for key in keys:
                    if attack == "a record without a subkey":
                        hostile.store(key, True, expiration)
                        continue
                    for raw in RAW:
                        hostile.store(key, {"raw": raw}, expiration, subkey=subkey)
                        expiration += 1  # each replaces the previous one
                values = {key: 3.0 if "all_averagers" in key else True for key in keys}
                own = second.public_key
                for key, value in values.items():
                    second.dht.store(key, value, get_dht_time() + 120, own, return_future=True).result(20)
                for peer in (first, second):
                    for key, value in values.items():
                        found = peer.dht.get(key, latest=True, return_future=True).result(20).value
                        assert {name: record.value for name, record in found.items()} == {own: value}, key
                    assert peer.dht.is_alive()
        finally:
            hostile.shutdown()
