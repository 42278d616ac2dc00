"""A run on data in shards: real trainers, of which one is slower and later, and one is killed; and an evaluator."""

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from cotrain.data.archive import file_sha256
from cotrain.data.manifest import Manifest
from tests.data.test_download import Host
from tests.support.peers import ALTERED, LOCAL, Script, prepare_data, read_jsonl, reserve_maddr, wait_until

CACHE = "1300kB"  # of 2.9 MB


def position(folder: Path) -> list[int]:
    path = folder / "samples.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


@pytest.fixture
def host(tmp_path) -> Iterator[Host]:
    (tmp_path / "public").mkdir()
    with Host(tmp_path / "public") as host:
        yield host


@pytest.mark.early
@pytest.mark.peers
def test_run_on_shards(scripts, host, tmp_path):
    prepare_data(
        tmp_path / "own", "mlm_sop", 500, "--archive", tmp_path / "public/data.tar.gz", "--shard_size", "90kB",
        launcher=scripts.launcher,
    )  # fmt: skip
    folder = scripts.folder
    (folder / "run.yaml").write_text(
        f"run_id: shards\nmodel_name_or_path: {scripts.data / 'config.json'}\ndataset_url: {host.url}\n"
        f"dataset_sha256: {file_sha256(tmp_path / 'public/data.tar.gz')}\n"
        "target_batch_size: 32\nlearning_rate: 0.01\nwarmup_steps: 0\nmatchmaking_time: 4\n",
        encoding="utf-8",
    )

    def start(script: str, name: str, *flags: object, pace: float = 0.3) -> Script:
        data = ("--dataset_path", folder / name / "data", "--data_cache", CACHE) if "training" not in script else ()
        return scripts.start(
            ALTERED, script, *data, "--tokenizer_path", folder / name / "tokenizer", "--output_dir", folder / name,
            *flags, log=name, env={"PACE": str(pace)},
        )  # fmt: skip

    monitor = start("run_training_monitor.py", "monitor", "--run_config", folder / "run.yaml", "--host_maddrs",
                    reserve_maddr())  # fmt: skip
    joining = "--initial_peers", monitor.address
    trainer = "--host_maddrs", LOCAL, "--per_device_train_batch_size", 4
    assert host.requests == ["/data.tar.gz"]
    alice = start("run_trainer.py", "alice", *joining, *trainer)
    alice.wait_for("Local step 1:")
    bob = start("run_trainer.py", "bob", *joining, *trainer, pace=1.0)
    bob.wait_for("Averaged gradients with 2 peers")

    shards = Manifest.load(folder / "alice/data").shards
    data = wait_until(lambda: json.loads((folder / "alice/status.json").read_text(encoding="utf-8"))["data"], 60, "it")
    assert re.search(rf"of pass 1; \d of {len(shards)} shards here, [\d.]+ [kM]B of at most {CACHE}; ", data)

    evaluator = start("run_evaluator.py", "evaluator", *joining, "--evaluation_interval", 1, "--refresh_period", 1)
    wait_until(lambda: read_jsonl(folder / "evaluator/evaluations.jsonl"), 120, "an evaluation")
    assert not (folder / "evaluator/data/train").exists()

    alice.kill()
    host.away = True  # it starts with what is here
    before, asked = position(folder / "alice"), len(host.requests)
    alice = start("run_trainer.py", "alice", *joining, *trainer)
    wait_until(lambda: position(folder / "alice") > before, 120, "a later position")
    assert position(folder / "alice")[0] == before[0] == 0
    alice.wait_for("Averaged gradients with 2 peers")
    assert "/data.tar.gz" not in host.requests[asked:]
    host.away = False
    check = start("run_trainer.py", "carol", *joining, *trainer, "--check")
    assert check.wait(300) == 0, check.output
    assert f"of {len(shards)} shards here" in check.output
    for script in (alice, bob, evaluator, monitor):
        assert script.stop(signal.SIGINT) == 0, script.output
        assert "Traceback" not in script.output
