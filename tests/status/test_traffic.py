"""Traffic of a trainer: since its start, and of the month."""

import json
from types import SimpleNamespace

import pytest

from arguments import CollaborationArguments
from cotrain.common.flags import ArgumentsError
from cotrain.status import traffic
from cotrain.status.traffic import TrafficMeter


@pytest.fixture
def world(monkeypatch):
    """The clock, and the counters of the network."""
    world = SimpleNamespace(now=1000.0, month="2026-11", sent=10**12, local=0)

    def counters(pernic: bool) -> dict:
        return {
            "eth0": SimpleNamespace(bytes_sent=world.sent, bytes_recv=0),
            "lo": SimpleNamespace(bytes_sent=world.local, bytes_recv=world.local),
        }

    monkeypatch.setattr(traffic.psutil, "net_io_counters", counters)
    monkeypatch.setattr(traffic.time, "monotonic", lambda: world.now)
    monkeypatch.setattr(traffic.time, "strftime", lambda _: world.month)
    return world


def run(meter: TrafficMeter, world, seconds: int, rate: float) -> None:
    for _ in range(0, seconds, 5):
        world.now += 5
        world.sent += int(5 * rate)
        world.local += 10**9
        meter.update()


def test_traffic_of_a_month_survives_a_restart(tmp_path, world):
    meter = TrafficMeter(tmp_path)
    run(meter, world, 300, 1e6)
    assert meter.describe() == "300.0 MB; 300.0 MB in this month"
    world.sent += 10**12  # while no trainer runs
    meter = TrafficMeter(tmp_path)
    run(meter, world, 1800, 1e6)
    assert meter.describe() == "1.8 GB, 3.6 GB an hour; 2.1 GB in this month"
    world.sent = 0  # the interface is new, as after a change of the network
    run(meter, world, 5, 0)
    assert meter.bytes == 1.8e9
    world.month = "2026-12"
    run(meter, world, 10, 1e6)
    assert (meter.bytes, meter.of_month) == (1.81e9, 1e7)
    assert json.loads((tmp_path / "traffic.json").read_text(encoding="utf-8")) == {"month": "2026-12", "bytes": 10**7}


def test_trainer_leaves_before_the_limit_is_passed(tmp_path, world):
    meter = TrafficMeter(tmp_path)
    run(meter, world, 60, 10e6)  # it downloads the state
    run(meter, world, 600, 1e6)
    assert meter.of_month == 1.2e9 and not meter.is_used_up(2e9)
    while not meter.is_used_up(2e9):
        run(meter, world, 5, 1e6)
    assert 1.39e9 < meter.of_month < 1.41e9, "another minute like the busiest one still fits"


@pytest.mark.parametrize("kept", ["", "[]", '{"month": 1}', '{"month": "2026-11", "bytes": "x"}'])
def test_damaged_file_begins_anew(tmp_path, world, kept):
    (tmp_path / "traffic.json").write_text(kept, encoding="utf-8")
    assert TrafficMeter(tmp_path).of_month == 0


def test_limit_is_a_size():
    assert CollaborationArguments(max_traffic="50GB").max_traffic == "50GB"
    with pytest.raises(ArgumentsError, match="--max_traffic must be a size"):
        CollaborationArguments(max_traffic="50")
