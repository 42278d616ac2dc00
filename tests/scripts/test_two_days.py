"""Two days of an organiser and three unlike volunteers: everything that anybody is told is what happened.

All are stopped at once in the evening, and start again from their folders in the morning.
"""

import json
import re
import signal
from collections import Counter
from pathlib import Path

import pytest
from hivemind.utils.crypto import RSAPrivateKey

from cotrain.admission.invitations import make_invitation, save_invitation
from cotrain.common.names import label
from cotrain.training.checkpoints import list_checkpoints
from tests.support.peers import ALTERED, BATCH_SIZE, Script, read_jsonl, reserve_maddr, steps_of, wait_until

PACES = {"alice": 0.25, "slow": 0.5, "dave": 0.3}  # seconds of a local step
CLIENT = "dave"  # in client mode, and with a clock that is an hour late
ROUND = f"Averaged gradients with {len(PACES)} peers"


def start_day(scripts, address: str) -> dict[str, Script]:
    """Start all peers as their owners would: trainers take the settings of the run from the monitor."""
    running = {"monitor": scripts.monitor(
        "--run_id", "days", "--host_maddrs", address, "--invitation", scripts.folder / "monitor.invitation",
        *steps_of(seconds=5, num_trainers=3), "--target_group_size", 3, "--matchmaking_time", 4, "--warmup_steps", 0,
        "--averaging_timeout", 30, "--learning_rate", 0.03, "--save_checkpoint_step_interval", 2,
        "--average_state_every", 2, "--refresh_period", 4,
    )}  # fmt: skip
    for name, pace in PACES.items():
        flags, env = (["--client_mode"], {"CLOCK": "-3600"}) if name == CLIENT else ([], {})
        running[name] = scripts.start(
            ALTERED, "run_trainer.py", "--initial_peers", running["monitor"].address,
            "--invitation", scripts.folder / f"{name}.invitation", "--tokenizer_path", scripts.data / "tokenizer",
            "--dataset_path", scripts.data / "dataset", "--output_dir", scripts.folder / name,
            "--per_device_train_batch_size", BATCH_SIZE, "--gradient_accumulation_steps", 1,
            "--dataloader_num_workers", 0, "--max_refresh_period", 2, *flags, log=name, env={"PACE": str(pace), **env},
        )  # fmt: skip
    return running


def read_day(output: str, name: str) -> tuple[dict[int, int], dict[int, float]]:
    """Return a trainer's samples and loss by step, of a day at whose end it is thanked for them."""
    text = re.sub(r"\x1b\[[\d;]*m", "", output)
    assert f"This peer is {name}\n" in text
    total, samples, losses = 0, {}, {}
    for block in re.split(r"(?=\bStep #\d+\n)", text)[1:]:
        step, contribution = (int(re.search(rf"{what}(\d+)", block)[1]) for what in ("Step #", "contribution: "))
        samples[step], total = contribution - total, contribution
        losses[step] = float(re.search(r"Local loss: ([\d.]+)", block)[1])
    (thanks,) = re.findall(r"Thank you, (.+)! Since this start you contributed ([\d,]+) samples to (\d+) global", text)
    assert thanks == (name, f"{total:,}", str(len(samples)))
    return samples, losses


def read_trainer(folder: Path, outputs: list[str], name: str) -> tuple[Counter, dict[int, float]]:
    """Return what a trainer was told on all days, which its rounds and its newest status agree with."""
    samples, losses = Counter(), {}
    for output in outputs:
        of_day, losses_of_day = read_day(output, name)
        samples.update(of_day)
        losses |= losses_of_day
    status = json.loads((folder / "status.json").read_text(encoding="utf-8"))
    newest = sum(of_day.values()), len(of_day), max(of_day), name
    assert (status["applied"], status["joined"], status["step"], status["name"]) == newest
    assert status["loss"] == pytest.approx(losses[max(losses)], abs=1e-5) and status["computed"] >= status["applied"]
    assert status["ended_at"] is not None and list_checkpoints(folder)
    return samples, losses


@pytest.mark.early
def test_all_are_told_the_same(scripts):
    folder, authority, address = scripts.folder, RSAPrivateKey(), reserve_maddr()
    invitations = {name: make_invitation(authority, name, days=1) for name in ("monitor", *PACES)}
    peer_ids = {name: str(invitations[name].peer_id) for name in PACES}
    for name, invitation in invitations.items():
        save_invitation(invitation, folder / f"{name}.invitation")
    outputs = {name: [] for name in ("monitor", *PACES)}
    for evening in (signal.SIGINT, signal.SIGTERM):
        running = start_day(scripts, address)
        wait_until(lambda day=running: all(day[name].output.count(ROUND) >= 2 for name in PACES), 240, "two steps")
        for script in running.values():
            script.process.send_signal(evening)
        for name, script in running.items():
            assert script.wait(60) == 0, script.output
            script.assert_nothing_left()
            outputs[name].append(script.output)

    labels = {peer_id: label(name, peer_id) for name, peer_id in peer_ids.items()}
    told = {peer_id: read_trainer(folder / name, outputs[name], labels[peer_id]) for name, peer_id in peer_ids.items()}
    log = "".join(outputs["monitor"])
    late = re.findall(r"Step #(\d+): ([\d,]+) more samples of (.+), reported late", log)
    records = read_jsonl(folder / "monitor" / "metrics.jsonl")
    assert [record["step"] for record in records] == sorted(set().union(*(samples for samples, _ in told.values())))
    for record in records:
        step = record["step"]
        later = {name: int(number.replace(",", "")) for number_of, number, name in late if int(number_of) == step}
        parts = {
            peer_id: (samples[step], losses[step])
            for peer_id, (samples, losses) in told.items()
            if step in samples and labels[peer_id] not in later
        }
        assert record["samples"] == sum(samples for samples, _ in parts.values())
        assert all(told[peer_id][0][step] == later[name] for peer_id, name in labels.items() if name in later)
        loss = sum(samples * loss for samples, loss in parts.values()) / record["samples"]
        assert record["loss"] == pytest.approx(loss, rel=1e-5)
        assert record["contributors"] == len(parts) <= record["alive peers"] <= len(PACES)
        line = f"Step #{step}\tloss = {record['loss']:.5f}\talive peers = {record['alive peers']}\t"
        assert f"{line}samples = {record['samples']}\tperformance = {record['performance']:.2f} samples/s\n" in log
    for name in PACES:
        for entry in read_jsonl(folder / name / "rounds.jsonl"):
            weights = {peer_id: told[peer_id][0][entry["step"]] for peer_id in entry["weights"]}
            assert {peer_id: round(weight) for peer_id, weight in entry["weights"].items()} == weights

    totals = {peer_id: sum(samples.values()) for peer_id, (samples, _) in told.items()}
    board = json.loads((folder / "monitor" / "contributors.json").read_text(encoding="utf-8"))
    rows = {(row["peer_id"], row["username"], row["samples"], row["steps"]) for row in board["contributors"]}
    assert board["step"] == records[-1]["step"]
    assert rows == {(peer_id, name, totals[peer_id], len(told[peer_id][0])) for name, peer_id in peer_ids.items()}
    leaders = sorted(totals.items(), key=lambda item: -item[1])
    names = ", ".join(f"{labels[peer_id]} {number:,}" for peer_id, number in leaders)
    last = (
        rf"{sum(totals.values()):,} samples in all(.*\n)+?.*Contributors, by samples: {re.escape(names)}; 3 in all\n"
    )
    assert re.search(last, outputs["monitor"][-1])
    newest = max((path.name for path in folder.glob("monitor/checkpoint-*")), key=lambda name: int(name[11:]))
    assert f"stopped at step #{records[-1]['step']}; the newest checkpoint is {newest}\n" in outputs["monitor"][-1]
