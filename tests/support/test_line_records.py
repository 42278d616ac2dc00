"""Tests of the figures of benchmarks/home_lines.py, with synthetic records."""

import pytest

from benchmarks.line_records import (
    PHASES,
    Fit,
    Point,
    fit,
    measured_table,
    planned_table,
    sufficient_table,
    summarize_rounds,
)
from lib.training.plan import Line, line_seconds, tensor_bytes

ELEMENTS = 10**6


def make_entry(due: float, load: float = 0.5, round: float = 4.0, update: float = 1.0, **values) -> dict:
    seconds = {"load": load, "matchmaking": 3.0, "waiting": 0.0, "allreduce": 3.5, "round": round, "update": update}
    return {
        "time": due + load + round + update,
        "received": 1.0,
        "group": ["one", "two"],
        "seconds": seconds,
        **values,
    }


def make_point(peers: int, upload: float, bits: int, fixed: float = 2.0, slowdown: float = 1.1, **values) -> Point:
    line = Line(upload, 5 * upload)
    seconds = fixed + slowdown * line_seconds(ELEMENTS, peers, bits, line)
    phases = {**dict.fromkeys(PHASES, 0.0), "load": 0.5, "round": seconds - 0.5, "update": 0.25, "applied": seconds}
    traffic = 1.04 * tensor_bytes(ELEMENTS, peers, bits)
    return Point(
        peers, "ordinary-float16", upload, 5 * upload, ELEMENTS, bits, 2, phases, traffic, traffic,
        **{"complete": 1.0, **values},
    )  # fmt: skip


def test_seconds_are_counted_from_the_first_peer():
    rounds = [[make_entry(10.0), make_entry(11.0)], [make_entry(30.0), make_entry(30.0, round=6.0)]]
    seconds, complete = summarize_rounds(rounds)
    assert seconds["round"] == 4.5
    assert seconds["allreduce"] == 3.5
    assert seconds["applied"] == pytest.approx((5.5 + 6.5 + 5.5 + 7.5) / 4)
    assert complete == 1


@pytest.mark.parametrize("values", [{"received": 0.9}, {"group": ["one"]}, {"group": [], "seconds": {}}])
def test_round_without_a_peer_or_a_part_is_incomplete(values):
    rounds = [[make_entry(10.0), make_entry(10.0)], [make_entry(30.0), make_entry(30.0, **values)]]
    assert summarize_rounds(rounds)[1] == 0.5


def test_fit_finds_the_constants():
    points = [make_point(peers, upload, bits) for peers in (2, 4) for upload in (5, 100) for bits in (8, 32)]
    fitted = fit(points)
    assert (fitted.fixed, fitted.slowdown) == pytest.approx((2.0, 1.1))
    assert (fitted.overhead, fitted.update) == pytest.approx((1.04, 0.25))
    assert fitted.round(points[0]) == pytest.approx(points[0].round)


def test_fit_weighs_relative_residuals():
    points = [make_point(2, upload, 16) for upload in (1, 100)]
    slower = [points[0], make_point(2, 100, 16, fixed=4.0)]
    # Absolute residuals of the slow line would hide the fixed seconds of the fast one
    assert fit([*points, *slower]).fixed > 2.2


def test_tables_show_measured_beside_fitted():
    points = [make_point(2, 10, 16), make_point(4, 10, 16, complete=0.5)]
    header, first, second = measured_table(points, Fit(fixed=2.0, slowdown=2.2, overhead=1.0, update=0.0))
    assert header.split()[-3:] == ["round", "fitted", "residual"]
    measured, predicted, residual = first.split()[-3:]
    assert (float(measured), float(predicted)) == (3.8, 5.5)
    assert residual == "+47%"
    assert second.endswith("not fitted: 50% complete, load 0")


@pytest.mark.parametrize(("complete", "load", "is_fit"), [(1.0, 2.0, True), (0.5, 2.0, False), (1.0, 20.0, False)])
def test_points_of_a_busy_machine_or_with_incomplete_rounds_are_not_fitted(complete, load, is_fit):
    assert make_point(2, 10, 16, complete=complete, load=load).is_fit is is_fit


def test_tables_of_planned_runs_have_all_gpus_and_modes():
    text = "\n".join(planned_table(ELEMENTS, Line(10, 50)))
    assert text.count("ordinary float16") == text.count("local blockwise8, H=500") == 2
    assert "T4, 8 samples/s each" in text
    assert len(sufficient_table(ELEMENTS, Line(10, 50), peers=8)) == 8
