"""When a trainer pauses: the rule, its clock, and the commands --pause and --resume."""

import time
from datetime import UTC, datetime, timedelta

import pytest

from arguments import CollaborationArguments
from cotrain.common.flags import ArgumentsError
from cotrain.status.pause import QUIET_SECONDS, PauseRule, is_within, request_pause
from cotrain.status.status import describe_status, write_status
from tests.status.test_status import make_status

EVENING = datetime(2026, 11, 27, 21, 59, tzinfo=UTC).timestamp()  # a clock in UTC, see `zone`


@pytest.fixture
def zone(monkeypatch):
    """Return a function that sets the zone of this process, at first UTC."""

    def set_zone(name: str) -> None:
        monkeypatch.setenv("TZ", name)
        time.tzset()

    set_zone("UTC")
    yield set_zone
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("hours", "inside", "outside"),
    [
        ("22:00-07:00", ["22:00", "23:59", "00:00", "06:59"], ["21:59", "07:00", "12:00"]),
        ("09:30-17:00", ["09:30", "16:59"], ["09:29", "17:00", "00:00"]),
        ("00:00-00:00", ["00:00", "12:00", "23:59"], []),
    ],
)
def test_hours_are_of_the_day_or_over_midnight(zone, hours, inside, outside):
    for clock in inside + outside:
        now = datetime.fromisoformat(f"2026-11-27T{clock}+00:00").timestamp()
        assert is_within(hours, now) == (clock in inside), clock


def test_hours_are_those_of_the_wall_clock_when_daylight_saving_ends(zone):
    """In the night in which 02:30 comes twice, and in that in which it does not come."""
    zone("CET-1CEST,M3.5.0,M10.5.0/3")
    for night, first in (("2026-10-25", "2026-10-24T22:00+02:00"), ("2026-03-29", "2026-03-28T22:00+01:00")):
        begin, end = datetime.fromisoformat(first), datetime.fromisoformat(f"{night}T07:00").astimezone()
        length = 10 if night == "2026-10-25" else 8
        assert (end - begin) == timedelta(hours=length)
        for moment, expected in ((begin, True), (begin - timedelta(seconds=1), False), (end, False)):
            assert is_within("22:00-07:00", moment.timestamp()) is expected
        assert all(is_within("22:00-07:00", begin.timestamp() + 60.0 * minute) for minute in range(60 * length))


def test_clock_that_jumps_over_the_begin_and_back_is_followed(zone, tmp_path):
    rule = PauseRule(tmp_path, "22:00-07:00")
    assert rule.find_reason(EVENING) == "until 22:00, since --only_between 22:00-07:00"
    assert rule.find_reason(EVENING + 3600.0) == "", "a laptop slept over 22:00"
    assert rule.find_reason(EVENING - 600.0) != "", "and then its clock was set"
    assert rule.find_reason(EVENING + 86400.0 * 400 + 120.0) == ""


def test_another_program_pauses_until_it_has_been_quiet_for_a_while(tmp_path):
    running = ["game"]
    rule = PauseRule(tmp_path, None, lambda: running[0])
    assert rule.find_reason(1000.0) == "while game uses the GPU"
    running[0] = ""
    assert rule.find_reason(1000.0 + QUIET_SECONDS - 1) != "", "a level is loaded"
    assert rule.find_reason(1000.0 + QUIET_SECONDS) == ""
    running[0] = "game"
    assert rule.find_reason(2000.0) != ""
    running[0] = ""
    assert rule.find_reason(-86400.0) == "", "a clock that goes back by a day pauses nobody for a day"


def test_local_steps_of_a_millisecond_ask_once_a_second(tmp_path):
    asked = []
    rule = PauseRule(tmp_path, None, lambda: asked.append(1) or "")
    for number in range(3000):
        rule.find_reason(100.0 + 0.001 * number)
    assert len(asked) == 3


@pytest.mark.parametrize("hours", ["22:00", "22-7", "2:00-03:00", "22:00-24:00", "22:00-07:60", "22:00-07:00-", ""])
def test_wrong_hours_are_refused_with_an_example(hours):
    with pytest.raises(ArgumentsError, match=r"--only_between must be two times of the day such as 22:00-07:00"):
        CollaborationArguments(run_id="run", only_between=hours)


def test_pause_and_resume_reach_the_trainer_of_the_folder(tmp_path, capsys):
    rule = PauseRule(tmp_path)
    assert request_pause(tmp_path, pauses=True) == 1 and rule.find_reason(1.0) == ""
    assert "No trainer has started in" in capsys.readouterr().out
    write_status(tmp_path, make_status())
    assert request_pause(tmp_path, pauses=True) == 0 and rule.find_reason(10.0) == "until --resume"
    assert PauseRule(tmp_path).find_reason(0.0) == "until --resume", "also after a restart, as by a service"
    rows = dict(describe_status(make_status(paused="until --resume")))
    assert rows["State"] == "paused: until --resume, at step #39"
    assert rows["Next step"] == "none before the end of the pause"
    assert request_pause(tmp_path, pauses=False) == 0 and rule.find_reason(20.0) == ""
    assert "continues" in capsys.readouterr().out
    write_status(tmp_path, make_status(paused="until 22:00, since --only_between 22:00-07:00"))
    assert request_pause(tmp_path, pauses=False) == 0
    assert "stays paused until 22:00, since --only_between 22:00-07:00: see" in capsys.readouterr().out
    assert request_pause(tmp_path, pauses=True) == 0
    write_status(tmp_path, make_status(ended_at=time.time()))
    assert request_pause(tmp_path, pauses=False) == 1, "it has ended"
    assert rule.find_reason(30.0) == "", "and would train if it was started again"
