"""Tests of the formula for rounds, and of the recommendations that follow from it."""

import math
import sys
from dataclasses import replace

import pytest

from lib.common.errors import run_script
from lib.training import plan as plan_module
from lib.training.plan import (
    FIXED_SECONDS,
    MARGIN,
    MAX_LOCAL_STEPS,
    MIN_LOCAL_STEPS,
    MIN_STEP_SECONDS,
    OVERHEAD,
    SLOWDOWN,
    UPDATE_SECONDS,
    Line,
    Mode,
    Plan,
    describe,
    line_seconds,
    recommend,
    round_seconds,
    tensor_bytes,
)

ALBERT_LARGE = 17_847_474
SLOW, FAST = Line(10, 50), Line(1000, 1000)


def make_plan(peers: int = 8, line: Line = SLOW, speed: float = 8.0, batch: int = 4096, **mode) -> Plan:
    return Plan(ALBERT_LARGE, peers, line, speed, Mode(**mode), batch)


@pytest.mark.parametrize(("peers", "copies"), [(2, 1.0), (4, 1.5), (8, 1.75), (64, 1.96875)])
def test_peer_sends_less_than_two_copies(peers, copies):
    assert tensor_bytes(1000, peers, bits=16) == copies * 2000


def test_slower_direction_determines_the_round():
    seconds = line_seconds(10**6, 2, bits=16, line=Line(16, 32))
    assert seconds == 1.0
    assert line_seconds(10**6, 2, bits=16, line=Line(32, 16)) == seconds
    assert line_seconds(10**6, 2, bits=16, line=Line(16, math.inf)) == seconds


def test_round_has_a_fixed_part_and_one_for_the_line():
    assert round_seconds(ALBERT_LARGE, 1, 32, SLOW) == 0
    line = line_seconds(ALBERT_LARGE, 4, 32, SLOW)
    assert round_seconds(ALBERT_LARGE, 4, 32, SLOW) == pytest.approx(FIXED_SECONDS + SLOWDOWN * line)
    assert line == pytest.approx(85.7, abs=0.1)


@pytest.mark.parametrize(
    ("mode", "bits", "mean", "flags"),
    [
        (Mode(), (16, 32), 32, ""),
        (Mode(compression="none"), (32, 48), 48, "--gradient_compression none"),
        (Mode(compression="uniform8"), (8, 24), 24, "--gradient_compression uniform8"),
        (Mode(True, "uniform8", 4), (8, 24), 12,
         "--local_updates --gradient_compression uniform8 --average_state_every 4"),
    ],
)  # fmt: skip
def test_bits_and_flags_of_a_mode(mode, bits, mean, flags):
    assert (mode.bits(False), mode.bits(True), mode.mean_bits, mode.flags) == (*bits, mean, flags)


def test_round_without_overlap_is_time_without_computation():
    plan = make_plan(batch=6400)
    assert plan.compute == 100
    assert plan.waiting_share == pytest.approx(100 / (100 + plan.round + UPDATE_SECONDS))
    assert plan.local_steps == 100
    assert plan.sent_per_1000 == pytest.approx(OVERHEAD * tensor_bytes(ALBERT_LARGE, 8, 32) / 0.8)


def test_batch_grows_while_a_round_is_longer_than_it_takes():
    short, long = make_plan(batch=64), make_plan(batch=64_000)
    assert short.step == short.round + UPDATE_SECONDS
    assert short.actual_batch == pytest.approx(short.step * 64)
    assert (long.step, long.actual_batch) == (1000, 64_000)


def test_smallest_batches():
    plan = make_plan()
    hidden = replace(plan, batch=plan.hidden_batch())
    assert hidden.is_hidden
    assert not replace(hidden, batch=hidden.batch - 1).is_hidden
    assert hidden.compute == pytest.approx(MARGIN * (plan.round + UPDATE_SECONDS), rel=0.001)
    waiting = replace(plan, batch=plan.waiting_batch(0.95))
    assert waiting.waiting_share >= 0.95 > replace(waiting, batch=waiting.batch - 1).waiting_share


def test_smallest_batch_counts_the_rounds_with_parameters():
    plan = make_plan(compression="uniform8", state_every=4)
    assert plan.longest_round > plan.round
    assert replace(plan, batch=plan.hidden_batch()).compute >= MARGIN * plan.longest_round


def test_fast_lines_need_no_change():
    assert recommend(make_plan(line=FAST)) == make_plan(line=FAST)


def test_compression_is_recommended_before_local_updates():
    plan = make_plan()
    seconds = [replace(plan, mode=Mode(compression=name)).hidden_batch() / 64 for name in ("blockwise8", "float16")]
    plan = replace(plan, batch=round(64 * sum(seconds) / 2))
    assert recommend(plan) == replace(plan, mode=Mode(compression="blockwise8"))


def test_local_updates_are_recommended_on_slow_lines():
    best = recommend(make_plan(line=Line(4, 20)))
    assert best.mode.local_updates
    assert best.is_hidden
    assert best.batch == float(f"{best.batch:.1e}")  # two digits


def test_local_updates_have_some_local_steps():
    best = recommend(make_plan(peers=2, speed=0.1, batch=1))
    assert best.mode.local_updates
    assert best.local_steps >= MIN_LOCAL_STEPS
    assert best.compute >= MIN_STEP_SECONDS


def test_local_updates_are_compressed_on_very_slow_lines():
    assert recommend(make_plan(line=Line(4, 20))).mode == Mode(local_updates=True, state_every=4)
    best = recommend(make_plan(line=Line(1, 5)))
    assert best.mode == Mode(local_updates=True, compression="blockwise8", state_every=4)
    assert best.local_steps > MAX_LOCAL_STEPS


def test_description_has_flags_and_figures():
    text = "\n".join(describe(make_plan(batch=64_000, local_updates=True, compression="uniform8")))
    assert "--local_updates --gradient_compression uniform8 --target_batch_size 64000 --averaging_timeout" in text
    assert "global step: 1000 s" in text
    assert "1000 local steps of 8 samples" in text
    assert "instead" not in text
    assert "samples instead" in "\n".join(describe(make_plan(batch=64)))


def run_plan(monkeypatch, *args: object) -> int:
    """Run the command in this process, and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["plan", "--peers", "8", "--upload", "10", *map(str, args)])
    try:
        run_script(plan_module.main)
    except SystemExit as stopped:
        return stopped.code
    return 0


def test_command_line(monkeypatch, capsys):
    assert run_plan(monkeypatch, "--model", "albert-large-v2", "--samples_per_second", 20) == 0
    output = capsys.readouterr().out
    assert "17.85 M parameters" in output and "--local_updates" in output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--peers", 1), "--peers must be 2 or more, got 1"),
        (("--upload", 0), "--upload must be above zero, got 0.0"),
        (("--model", "pyproject.toml"), "--model: no model configuration at 'pyproject.toml'"),
    ],
)
def test_bad_input_is_one_line(monkeypatch, capsys, args, message):
    assert run_plan(monkeypatch, "--samples_per_second", 20, *args) in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
