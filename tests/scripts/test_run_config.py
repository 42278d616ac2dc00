"""A run that is joined with --initial_peers alone: real scripts, and data from a web server on this machine."""

import json
import re
import resource
from collections.abc import Callable

import pytest

from cotrain.models.config import CONFIGS
from tests.support.peers import ALTERED, LOCAL, PACE, Script, reserve_maddr, wait_until


def start_run(scripts, dataset_url: str, *flags: object) -> tuple[Script, Callable[..., Script]]:
    """Start a monitor with the settings of a run in a file.

    :param flags: more flags of the monitor
    :returns: the monitor, and a function that starts a trainer with an address and more flags
    """
    folder = scripts.folder
    settings, model = folder / "run.yaml", json.loads((CONFIGS / "albert-tiny.json").read_text(encoding="utf-8"))
    own_model = json.dumps({**model, "hidden_size": 96})  # a file of the organiser
    (folder / "config.json").write_text(own_model, encoding="utf-8")
    settings.write_text(
        f"run_id: tree\nmodel_name_or_path: {folder / 'config.json'}\ndataset_url: {dataset_url}\n"
        "target_batch_size: 32\nlearning_rate: 0.01\nends_at: 2100-01-02\n"
        "warmup_steps: 0\ngradient_compression: blockwise8\nmatchmaking_time: 4\n"
        "page: https://example.org/curves\n",
        encoding="utf-8",
    )
    monitor = scripts.start(
        "run_training_monitor.py", "--run_config", settings, "--tokenizer_path", scripts.data / "tokenizer",
        "--host_maddrs", reserve_maddr(), "--output_dir", folder / "monitor", *flags, log="monitor",
    )  # fmt: skip

    def volunteer(name: str, address: str, *flags: object) -> Script:
        # Where this machine listens and keeps its files is its own business.
        return scripts.start(
            ALTERED, "run_trainer.py", "--initial_peers", address,
            "--host_maddrs", LOCAL, "--output_dir", folder / name,
            "--dataset_path", folder / name / "data", "--tokenizer_path", folder / name / "tokenizer", *flags,
            log=name, env={"PACE": str(PACE)},
        )  # fmt: skip

    return monitor, volunteer


@pytest.mark.early
def test_volunteers_take_all_settings_from_the_run(scripts, dataset_url, tmp_path):
    """The second volunteer joins through the first one, after the organiser's machine has gone."""
    monitor, volunteer = start_run(scripts, dataset_url)
    monitor_address = monitor.address
    alice = volunteer("alice", monitor_address)
    alice.wait_for(r"Joining run tree of organiser Qm\w+\n")
    alice.wait_for(rf"Downloading {dataset_url}, [\d.]+ [kM]B")
    alice.wait_for("Curves of the run: https://example.org/curves\n")
    alice.wait_for(r"\bStep #2\b")
    checked = volunteer("finn", alice.address, "--check")
    assert checked.wait(120) in (0, 1), checked.output
    for line in (
        r"ok      /ip4/127.0.0.1/tcp/\d+/p2p/\w+: the port answers",
        r"ok      Qm\w+: it answers, it can dial this peer", r"ok      device: cpu: a micro-batch of 1 takes",
        r"ok      state: step #\d+, [\d.]+ MB in",
        r"ok      rounds: one of 2 trainers with the parameters takes about \d s at 5, 1 s at 14.7, 1 s at 100 Mbit/s",
    ):  # fmt: skip
        assert re.search(line, checked.output), (line, checked.output)
    limit_is_high = resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= 4096
    assert ("All checks passed" in checked.output) == (checked.process.returncode == 0) == limit_is_high
    assert monitor.stop() == 0
    checked = volunteer("finn", monitor_address, "--check", "--bootstrap_timeout", 3)
    assert checked.wait() == 1
    assert "Connection refused. Ask for the current address" in checked.output
    bob = volunteer("bob", alice.address, "--max_global_steps", 1000, "--run_id", "tree")
    bob.wait_for(r"Joining run tree of organiser Qm\w+, vouched for by Qm\w+")
    bob.wait_for("Averaged gradients with 2 peers")
    # A volunteer with two addresses finds the run again although the peer that it joined through is away for good.
    carol = volunteer("carol", bob.address)
    carol.wait_for("Averaged gradients with 3 peers")
    bob.kill_all()
    carol.kill_all()
    carol = volunteer("carol", f"{bob.address},{alice.address}")
    carol.wait_for("Averaged gradients with 2 peers")
    for trainer in (alice, carol):
        assert trainer.stop() == 0, trainer.output
        assert "Traceback" not in trainer.output


@pytest.mark.early
def test_a_second_monitor_needs_the_address_alone(scripts, dataset_url):
    """It stands in for the first one, also after a restart, and signs nothing."""
    first, volunteer = start_run(scripts, dataset_url, "--refresh_period", 1)
    port = reserve_maddr()

    def start_monitor(name: str, address: str, *flags: object) -> Script:
        folder = scripts.folder / name
        return scripts.start(
            "run_training_monitor.py", "--initial_peers", address, "--output_dir", folder,
            "--tokenizer_path", folder / "tokenizer", "--save_checkpoint_step_interval", 1, "--refresh_period", 1,
            "--bootstrap_timeout", 5, *flags, log=name,
        )  # fmt: skip

    first_address = first.address
    first_port = first_address.split("/p2p/")[0]
    second = start_monitor("second", first_address, "--host_maddrs", port)
    organiser = first_address.split("/")[-1]
    second.wait_for(rf"Joining run tree of organiser {organiser}\n")
    second.wait_for(rf"Downloading {dataset_url}, [\d.]+ [kM]B")
    alice = volunteer("alice", second.address)
    alice.wait_for(rf"Joining run tree of organiser {organiser}, vouched for by {second.address.split('/')[-1]}\n")
    alice.wait_for("Curves of the run: https://example.org/curves\n")
    second.wait_for(r"Step #1\tloss")
    second.wait_for(r"Saved .*second/checkpoint-\d+")
    first.kill()
    second.kill()
    second = start_monitor("second", first_address, "--host_maddrs", port)
    second.wait_for("Starting without them, and dialing them again periodically")
    second.wait_for(rf"Joining run tree of organiser {organiser}\n")
    bob = volunteer("bob", second.address)
    bob.wait_for(rf"Joining run tree of organiser {organiser}, vouched for by")
    bob.wait_for("Averaged gradients with 2 peers")
    # A step that both have taken, which the monitor may report before or after this line.
    bob.wait_for(r"Step #\d+")
    newest = max(bob.steps)
    wait_until(lambda: max(second.steps, default=0) >= newest, 120, f"the report of step {newest}")
    # The organiser's monitor joins through the second one, and changes what trainers may choose for themselves.
    first = start_monitor(
        "monitor", second.address, "--run_config", scripts.folder / "run.yaml", "--host_maddrs", first_port,
        "--page", "https://example.org/new", "--no_store_checkpoints", "--bootstrap_timeout", 60,
    )  # fmt: skip
    assert first.address == first_address
    carol = volunteer("carol", second.address)
    carol.wait_for("Curves of the run: https://example.org/new\n")
    third = start_monitor("third", carol.address, "--learning_rate", 1.0, "--bootstrap_timeout", 60)
    assert third.wait(120) == 1 and "--learning_rate is 1.0 here and 0.01 in run tree" in third.output
    for script in (alice, bob, carol, second, first):
        assert script.stop() == 0, script.output
        assert "Traceback" not in script.output
