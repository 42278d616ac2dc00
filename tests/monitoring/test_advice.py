"""What the monitor derives from the trainers' rounds: their shares, and advice to the organiser."""

import pytest

from cotrain.common.flags import ArgumentsError
from cotrain.monitoring.advice import ADVICE_SECONDS, Adviser, parse_shares
from run_training_monitor import RunArguments
from tests.support.dht_records import trainer_record

HONEST = [(90, 100)] * 19


def shares(*counts: tuple[int, int], **rounds: int) -> dict[str, float]:
    """Return the shares of trainers with these numbers of applied and computed samples, and two of four rounds."""
    records = [
        trainer_record(rounds=4, complete=2, applied=applied, computed=computed) for applied, computed in counts
    ]
    return parse_shares([*records, *([trainer_record(**rounds)] if rounds else [])])


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (shares(), {}),
        (shares((0, 0)), {"complete rounds": 0.5}),
        (shares((90, 100)), {"complete rounds": 0.5, "applied share": 0.9}),
        (shares((50, 50), (50, 100), (300, 300)), {"complete rounds": 0.5, "applied share": 200 / 250}),
        (shares((1, 2), rounds=8, complete=8), {"complete rounds": 10 / 12, "applied share": 0.5}),
        (shares((200, 100), (50, 100)), {"complete rounds": 0.5, "applied share": 0.75}),
    ],
    ids=["nobody", "no samples yet", "one", "a claim of many", "one without samples", "more than all count as all"],
)
def test_shares(found, expected):
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    "lie", [(0, 10**9), (10**9, 10**9), (0, 100)], ids=["nothing of a lot", "all of a lot", "nothing of the usual"]
)
def test_claim_of_many_samples_has_the_weight_of_an_average_trainer(lie):
    assert abs(shares(*HONEST, lie)["applied share"] - 0.9) <= 1 / 20


def make_adviser(**flags) -> Adviser:
    return Adviser(args := RunArguments(**flags), args)


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({}, "blockwise8, or --local_updates --gradient_compression topk"),
        ({"gradient_compression": "blockwise8"}, "with --local_updates --gradient_compression topk"),
        ({"local_updates": True}, "with --gradient_compression topk --average_state_every 64. "),
        ({"local_updates": True, "gradient_compression": "topk"}, "--average_state_every 64. "),
        (
            {"local_updates": True, "gradient_compression": "topk", "average_state_every": 64},
            "with a larger --target_batch_size. ",
        ),
    ],
)
def test_advice_depends_on_the_settings(settings, advice):
    adviser = make_adviser(**settings)
    assert adviser.advise(None) is None and adviser.advise(0.05) is None
    assert advice in adviser.advise(1.0) and adviser.advise(1.0) is None
    adviser.advised_at -= ADVICE_SECONDS
    assert adviser.advise(1.0)


def test_rounds_that_are_long_beside_a_step_are_told_once_with_the_target_that_they_need():
    adviser = make_adviser(target_batch_size=64)
    assert "A round takes 31% of a step" in (advice := adviser.advise(0.31)) and "--target_batch_size 400 " in advice
    assert adviser.advise(0.31) is None and adviser.advise(0.06) is None


def test_end_is_estimated_from_the_times_of_the_steps():
    adviser = make_adviser(total_steps=500, warmup_steps=5)
    assert adviser.estimate_end() == ""
    for step in (13, 14):  # one read of the reports may bring two steps
        adviser.record_step(step, 10.0 * step)
    assert adviser.estimate_end() == "; step #500, the last of the schedule, in about 81 min"
    adviser.record_step(5, 200.0)
    assert adviser.estimate_end() == "", "after a rollback"
    adviser.record_step(7, 180.0)  # of a clock that was set back
    assert adviser.estimate_end().endswith("in about 0 s")
    adviser.record_step(500, 9000.0)
    assert adviser.estimate_end() == ""


def test_sparse_compression_needs_local_updates():
    with pytest.raises(ArgumentsError, match="--gradient_compression topk also needs --local_updates"):
        RunArguments(gradient_compression="topk")
