"""The comparison of everything that people were told finds each wrong number."""

import json
from pathlib import Path

import pytest

from tests.support.told import compare, read_told

IDS = {"alice": "QmaaaaaaaaaaAlice01", "bob": "QmaaaaaaaaaaBobob01"}
# Two days of two trainers, which took three steps, one of them without bob, whose report of another came late.
ALICE = """\
\x1b[1m\x1b[34mNov 25 17:07:09.080 [INFO]\x1b[0m This peer is alice (Alice01)
Nov 25 17:07:09.234 [INFO] Local step 1: loss = 6.90492
Nov 25 17:07:16.733 [INFO] Step #1
Nov 25 17:07:16.733 [INFO] Your current contribution: 480 samples
Nov 25 17:07:16.733 [INFO] Performance: 53.836 samples/sec
Nov 25 17:07:16.733 [INFO] Local loss: 7.00000
Nov 25 17:07:24.234 [INFO] Step #2
Nov 25 17:07:24.234 [INFO] Your current contribution: 980 samples
Nov 25 17:07:24.234 [INFO] Performance: 53.093 samples/sec
Nov 25 17:07:24.235 [INFO] Local loss: 6.80000
Nov 25 17:07:41.807 [INFO] Thank you, alice (Alice01)! You contributed 980 samples to 2 global steps in 33 s
Nov 25 17:07:49.551 [INFO] This peer is alice (Alice01)
Nov 25 17:07:56.968 [INFO] Step #3
Nov 25 17:07:56.968 [INFO] Your current contribution: 500 samples
Nov 25 17:07:56.968 [INFO] Performance: 50.000 samples/sec
Nov 25 17:07:56.968 [INFO] Local loss: 6.50000
Nov 25 17:07:57.968 [INFO] Accumulated 340 of 640 samples for step #4 from 2 peers, 240 of them yours; ETA 4 s
Nov 25 17:08:21.758 [INFO] Thank you, alice (Alice01)! You contributed 500 samples to 1 global step in 32 s
"""
BOB = """\
Nov 25 17:07:09.080 [INFO] This peer is bob (Bobob01)
Nov 25 17:07:16.733 [INFO] Step #1
Nov 25 17:07:16.733 [INFO] Your current contribution: 160 samples
Nov 25 17:07:16.733 [INFO] Performance: 20.000 samples/sec
Nov 25 17:07:16.733 [INFO] Local loss: 6.60000
Nov 25 17:07:56.734 [INFO] Step #2
Nov 25 17:07:56.734 [INFO] Your current contribution: 360 samples
Nov 25 17:07:56.734 [INFO] Performance: 20.000 samples/sec
Nov 25 17:07:56.735 [INFO] Local loss: 6.61000
Nov 25 17:08:21.758 [INFO] Thank you, bob (Bobob01)! You contributed 360 samples to 2 global steps in 70 s
"""
MONITOR = """\
Nov 25 17:07:06.512 [INFO] Running a DHT peer. To connect other peers to this one on this machine, use ...
Nov 25 17:07:18.890 [INFO] Step #1\tloss = 6.90000\talive peers = 2\tsamples = 640\tperformance = 73.84 samples/s
Nov 25 17:07:18.892 [INFO] 640 samples in all
Nov 25 17:07:18.892 [INFO] Contributors, by samples: alice (Alice01) 480, bob (Bobob01) 160; 2 in all
Nov 25 17:07:25.000 [INFO] Step #2\tloss = 6.80000\talive peers = 2\tsamples = 500\tperformance = 50.00 samples/s
Nov 25 17:07:45.287 [INFO] 1,140 samples in all; step #125,000, the last of the schedule, in about 18 days
Nov 25 17:07:45.287 [INFO] Contributors, by samples: alice (Alice01) 980, bob (Bobob01) 160; 2 in all
Nov 25 17:07:45.287 [INFO] The monitor has stopped at step #2; the newest checkpoint is checkpoint-1
Nov 25 17:07:46.514 [INFO] Running a DHT peer. To connect other peers to this one on this machine, use ...
Nov 25 17:07:58.720 [INFO] Step #3\tloss = 6.50000\talive peers = 1\tsamples = 500\tperformance = 50.00 samples/s
Nov 25 17:07:58.721 [INFO] Step #2: 200 more samples of bob (Bobob01), reported late
Nov 25 17:08:21.000 [INFO] Accumulated 40 of 640 samples for step #4 from 2 trainers; ETA 4 s
Nov 25 17:08:28.604 [INFO] 1,840 samples in all
Nov 25 17:08:28.604 [INFO] Contributors, by samples: alice (Alice01) 1,480, bob (Bobob01) 360; 2 in all
Nov 25 17:08:28.605 [INFO] The monitor has stopped at step #3; the newest checkpoint is checkpoint-3
"""
METRICS = """\
{"step": 1, "loss": 6.9, "alive peers": 2, "samples": 640, "performance": 73.836, "contributors": 2, "time": 10.0}
{"step": 2, "loss": 6.8, "alive peers": 2, "samples": 500, "performance": 50.0, "contributors": 1, "time": 20.0}
{"step": 3, "loss": 6.5, "alive peers": 1, "samples": 500, "performance": 50.0, "contributors": 1, "time": 49.0}
"""
CONTRIBUTORS = """{"run_id": "days", "step": 3, "contributors": [
 {"peer_id": "QmaaaaaaaaaaAlice01", "username": "alice", "samples": 1480, "steps": 3},
 {"peer_id": "QmaaaaaaaaaaBobob01", "username": "bob", "samples": 360, "steps": 2}]}
"""
ROUNDS = """\
{"step": 1, "outcome": "averaged", "weights": {"QmaaaaaaaaaaAlice01": 480.0, "QmaaaaaaaaaaBobob01": 160.0}}
{"step": 2, "outcome": "alone", "weights": {}}
"""
ALICES_STATUS = """{"name": "alice (Alice01)", "run_id": "days", "target_batch_size": 640, "step": 3, "applied": 500,
 "joined": 1, "computed": 520, "loss": 6.5000012, "ended_at": 90.0, "time": 90.0}
"""
BOBS_STATUS = """{"name": "bob (Bobob01)", "run_id": "days", "target_batch_size": 640, "step": 2, "applied": 360,
 "joined": 2, "computed": 360, "loss": 6.61, "ended_at": 90.0, "time": 90.0}
"""
FILES = {
    "alice.log": ALICE, "bob.log": BOB, "monitor.log": MONITOR, "monitor/metrics.jsonl": METRICS,
    "monitor/contributors.json": CONTRIBUTORS, "alice/status.json": ALICES_STATUS, "bob/status.json": BOBS_STATUS,
    "alice/rounds.jsonl": ROUNDS, "bob/rounds.jsonl": "",
    **{f"monitor/checkpoint-{step}/collaboration.json": json.dumps({"step": step}) for step in (1, 3)},
}  # fmt: skip


def find_differences(folder: Path, files: dict[str, str]) -> list[str]:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return compare(*read_told(folder, IDS))


def test_what_is_permitted(tmp_path):
    assert find_differences(tmp_path, FILES) == []


@pytest.mark.parametrize(
    ("file", "told", "wrong", "fault"),
    [
        ("alice.log", "contribution: 980", "contribution: 981", "samples of step 2: 500, but 501"),
        ("alice.log", "Local loss: 6.80000", "Local loss: 6.80100", "loss of step 2"),
        ("alice.log", "Performance: 53.836", "Performance: 54.836", "performance of step 1"),
        ("alice.log", "contributed 980 samples", "contributed 984 samples", "thanks to alice (Alice01) on day 1"),
        ("alice.log", "to 1 global", "to 2 global", "thanks to alice (Alice01) on day 2"),
        ("alice.log", "is alice (Alice01)", "is peer-Alice01", "name of alice (Alice01) on day 1"),
        ("alice.log", "340 of 640", "140 of 640", "progress of alice (Alice01) on day 2"),
        ("alice.log", "340 of 640", "340 of 600", "number of targets: 2"),
        ("alice.log", "Step #3", "Step #4", "steps in metrics.jsonl, and of the trainers: [1, 2, 3], but [1, 2, 4]"),
        ("monitor.log", "samples = 640", "samples = 641", "the monitor's line of step 1"),
        ("monitor.log", "loss = 6.90000", "loss = 6.90001", "the monitor's line of step 1"),
        ("monitor.log", "1,140 samples in all", "1,141 samples in all", "samples in all at step 2"),
        ("monitor.log", "(Bobob01) 160; 2 in all\n", "(Bobob01) 170; 2 in all\n", "bob (Bobob01) in the table"),
        ("monitor.log", "alice (Alice01) 980", "alice (Alice01) 940", "alice (Alice01) in the table of step 2: 940"),
        ("monitor.log", "360; 2 in all", "360; 3 in all", "contributors at step 3: 3"),
        ("monitor.log", "#2: 200 more", "#2: 201 more", "late samples of bob (Bobob01) in step 2: 201, but {200}"),
        ("monitor.log", "Step #2: 200 more samples of bob (Bobob01), reported late", "", "samples of step 2: 500"),
        ("monitor.log", "at step #2;", "at step #1;", "newest step at the monitor's end: 1, but 2"),
        ("monitor.log", "is checkpoint-3", "is checkpoint-2", "newest checkpoint at the monitor's last end: 2, but 3"),
        ("monitor/metrics.jsonl", '"samples": 640', '"samples": 641', "samples of step 1: 641, but 640"),
        ("monitor/metrics.jsonl", '"contributors": 2', '"contributors": 3', "contributors of step 1: 3, but 2"),
        ("monitor/metrics.jsonl", '"alive peers": 2', '"alive peers": 0', "alive peers of step 1: 0"),
        ("monitor/metrics.jsonl", '"time": 20.0', '"time": 19.0', "performance of step 2"),
        ("monitor/metrics.jsonl", '"time": 49.0', '"time": 9.0', "step 3 ended before step 2"),
        ("monitor/contributors.json", ": 360", ": 160", "leaderboard's samples of bob: 160, but 360"),
        ("monitor/contributors.json", '"steps": 3', '"steps": 2', "leaderboard's steps of alice: 2, but 3"),
        ("monitor/contributors.json", '"alice"', '"peer-Alice01"', "leaderboard's name of alice: peer-Alice01"),
        ("monitor/contributors.json", "QmaaaaaaaaaaBobob01", "QmaaaaaaaaaaEveve01", "rows of nobody"),
        ("alice/status.json", '"applied": 500', '"applied": 512', "samples in the status of alice (Alice01): 512"),
        ("alice/status.json", '"joined": 1', '"joined": 2', "steps in the status of alice (Alice01): 2, but 1"),
        ("alice/status.json", '"loss": 6.5000012', '"loss": 6.7', "loss in the status of alice (Alice01): 6.7"),
        ("alice/status.json", '"ended_at": 90.0', '"ended_at": null', "--status of alice (Alice01)"),
        ("alice/rounds.jsonl", "480.0", "1e-06", "samples of Alice01 in step 1 and weights: {480}, but {0}"),
        ("monitor/checkpoint-3/collaboration.json", "3", "2", "newest checkpoint at the monitor's last end: 3, but 2"),
    ],
)
def test_each_wrong_number_is_found(tmp_path, file, told, wrong, fault):
    assert told in FILES[file]
    found = find_differences(tmp_path, FILES | {file: FILES[file].replace(told, wrong, 1)})
    assert any(line.startswith(fault) for line in found), found
