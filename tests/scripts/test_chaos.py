"""A short run under fault injection; `make soak` has a long one, with an undisturbed run for comparison."""

import pytest

from tests.support.soak import play


@pytest.mark.peers
@pytest.mark.long
def test_short_run_under_fire(tmp_path, data, launcher):
    run, problems = play(
        tmp_path / "chaos", data, harm_every=8.0, seconds=400.0, launcher=launcher, num_steps=7, seed=1, max_faults=5,
        is_patient=True,
        max_difference=0.1,  # with steps this short, one of the three trainers may lag by an update for long
    )  # fmt: skip
    assert not problems
    assert run.faults
    losses = run.losses()
    assert losses[max(losses)] < losses[min(losses)]
