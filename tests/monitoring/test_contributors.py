"""Contributions: counted once per peer and step, across restarts, with arbitrary names."""

import json
from pathlib import Path

import pytest

from cotrain.monitoring import contributors
from cotrain.monitoring.aggregation import StepReport
from cotrain.monitoring.contributors import Contributors, clean_name
from tests.support.dht_records import peer_step


def make_report(step: int, **samples: int) -> StepReport:
    """Build the report of a step with these samples per peer."""
    steps = tuple(peer_step(peer, step, number) for peer, number in samples.items())
    return StepReport(step, 1.0, 2, sum(samples.values()), 1.0, 2, 2, 0.0, steps)


def count(folder, *reports: StepReport, names: dict[str, str] | None = None) -> Contributors:
    counted = Contributors(folder, "run")
    counted.record_names(names or {})
    counted.record_names({})  # the names are kept after their records have expired
    for report in reports:
        counted.add(report)
    counted.save()
    return counted


def table(counted: Contributors) -> list[tuple[str, int, int]]:
    return [(leader.name, leader.samples, leader.steps) for leader in counted.leaders]


def test_samples_add_up_by_peer_and_two_of_one_name_stay_two(tmp_path):
    names = {"a": "alice", "b": "bob", "c": "alice"}
    counted = count(tmp_path, make_report(1, a=10, b=5, c=1), make_report(2, a=10, b=30, idle=0), names=names)
    assert table(counted) == [("bob", 35, 2), ("alice", 20, 2), ("alice", 1, 1)]
    assert len(counted.leaders) == 3


def test_own_loss_is_that_of_the_newest_record():
    """It stayed on the leaderboard of a trainer that had dropped its own data."""
    counted, base = Contributors(Path("none"), "run"), {"own_base_loss": 1.5, "own_loss": 1.25}
    counted.record_losses({"a": base, "b": base})
    counted.record_losses({"b": {"own_base_loss": None, "own_loss": None}})  # the record of the other is lost
    counted.count([peer_step("a", 1, 1), peer_step("b", 1, 1)])
    assert {leader.peer_id: leader.own_loss for leader in counted.leaders} == {"a": "1.500 -> 1.250", "b": ""}


def test_restarted_monitor_counts_each_step_once(tmp_path):
    count(tmp_path, make_report(1, a=10), make_report(2, a=10), names={"a": "alice"})
    restarted = count(tmp_path, make_report(2, a=10), make_report(3, a=5, b=7))
    assert table(restarted) == [("alice", 25, 3), ("anonymous", 7, 1)]
    restarted.add(make_report(3, b=4))  # the run has gone back to step 2
    assert table(restarted) == [("alice", 25, 3), ("anonymous", 11, 2)]
    restarted.record_names({"b": "bob", "a": ""})
    assert table(restarted) == [("alice", 25, 3), ("bob", 11, 2)]


@pytest.mark.parametrize("change", [{"contributors": [{"hostile": 1}]}, {"run_id": "another"}])
def test_file_of_something_else_is_kept_aside(tmp_path, change, caplog):
    content = json.dumps({"run_id": "run", "step": 1, "contributors": []} | change)
    (tmp_path / "contributors.json").write_text(content, encoding="utf-8")
    assert table(count(tmp_path, make_report(1, a=10))) == [("anonymous", 10, 1)]
    assert (tmp_path / "contributors.json.old").read_text(encoding="utf-8") == content
    assert len(caplog.records) == 1


def test_flood_of_keys_is_bounded_and_keeps_the_largest(tmp_path, monkeypatch):
    monkeypatch.setattr(contributors, "MAX_CONTRIBUTORS", 10)
    flood = {f"k{number}": 1 for number in range(50)}
    counted = count(
        tmp_path, make_report(1, honest=100), make_report(2, **flood), names={str(n): "x" for n in range(50)}
    )
    assert len(counted.leaders) <= 20 and counted.leaders[0].samples == 100
    counted.record_names({})
    assert len(counted.known) <= 20


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("alice", "alice"),
        ("  a\n\tb \r\n c ", "a b c"),
        ("\x1b[31mred\x07", "[31mred"),
        ("a\u202eb\u200b\u2066c", "abc"),
        ("\u2028x\u0085y", "x y"),
        ("e\u0301", "é"),
        ("x" * 100, "x" * 64),
        ("\u202e \n", ""),
    ],
)
def test_names_are_made_harmless_for_the_log(name, clean):
    assert clean_name(name) == clean
