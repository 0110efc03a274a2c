"""Where a deadline comes from, and how much of it is kept for a last save."""

import math

import pytest

from unbroken.errors import BadDeadline
from unbroken.records.deadline import UNMEASURED_S, Deadline, Reserve, find_deadline, learned_reserve
from unbroken.records.journal import Event

STARTED, NOW = 1_000.0, 1_010.0


def _find(max_runtime_s: float | None = None, /, **environ: str) -> Deadline | None:
    return find_deadline(max_runtime_s, environ, started_s=STARTED, now_s=NOW)


@pytest.mark.promise("G7")
def test_the_end_time_comes_from_the_run_then_the_scheduler_then_our_variable() -> None:
    both = {"SLURM_JOB_END_TIME": "5000", "UNBROKEN_MAX_RUNTIME": "60"}
    assert _find(100.0, **both) == Deadline(1100.0, "max_runtime_seconds", 100.0)
    assert _find(None, **both) == Deadline(5000.0, "SLURM_JOB_END_TIME", 4000.0)
    assert _find(UNBROKEN_MAX_RUNTIME=" 60.5 ") == Deadline(1060.5, "UNBROKEN_MAX_RUNTIME", 60.5)
    assert _find(UNBROKEN_MAX_RUNTIME="60", GPT_SIMPLE_MAX_RUNTIME="70") == Deadline(1060.0, "UNBROKEN_MAX_RUNTIME", 60)
    assert _find(UNBROKEN_MAX_RUNTIME="", GPT_SIMPLE_MAX_RUNTIME="70") == Deadline(1070.0, "GPT_SIMPLE_MAX_RUNTIME", 70)
    assert _find(SLURM_JOB_END_TIME="", UNBROKEN_MAX_RUNTIME="") is None
    assert _find() is None


@pytest.mark.parametrize("name", ["SLURM_JOB_END_TIME", "UNBROKEN_MAX_RUNTIME", "GPT_SIMPLE_MAX_RUNTIME"])
@pytest.mark.parametrize("text", ["soon", "1:00:00", "nan", "inf", "-1", "0", "1e999"])
def test_what_is_not_a_number_of_seconds_is_an_error_that_names_it(name: str, text: str) -> None:
    with pytest.raises(BadDeadline) as refused:
        _find(None, **{name: text})
    assert refused.value.at() == f"{name}={text}"


def test_a_deadline_that_is_over_is_an_error_that_names_it() -> None:
    with pytest.raises(BadDeadline, check=lambda bad: (bad.source, bad.value) == ("SLURM_JOB_END_TIME", "1000")):
        _find(SLURM_JOB_END_TIME="1000")
    with pytest.raises(BadDeadline):
        _find(5.0)
    for number in (0.0, -3.0, math.nan):
        with pytest.raises(BadDeadline, match="max_runtime_seconds"):
            _find(number)


def test_a_configured_reserve_wins_over_all_that_was_measured() -> None:
    assert Reserve(7.0).after_save(100.0).after_step(9.0).seconds(50.0) == 7.0
    assert Reserve(0.0).after_save(100.0).seconds() == 0.0


@pytest.mark.promise("G7")
def test_a_learned_reserve_is_twice_the_slowest_recent_save_and_a_step() -> None:
    reserve = Reserve().after_save(3.0).after_save(20.0).after_save(4.0).after_step(1.0).after_step(2.5)
    assert reserve.seconds() == 2 * 20.0 + 2.5 + 5.0
    for _ in range(8):
        reserve = reserve.after_save(1.0).after_step(0.1)
    assert reserve.seconds() == pytest.approx(2 * 1.0 + 0.1 + 5.0)


def test_before_a_save_was_measured_a_short_job_keeps_a_tenth() -> None:
    assert Reserve().seconds() == UNMEASURED_S
    assert Reserve().seconds(36_000.0) == UNMEASURED_S
    assert Reserve().seconds(60.0) == 6.0
    assert Reserve().after_step(4.0).seconds(60.0) == 10.0


def test_the_commits_of_earlier_jobs_teach_the_next() -> None:
    events = [
        Event(1, "commit", 0.0, {"seconds": 9.0}),
        Event(1, "save", 0.0, {"seconds": 900.0}),
        Event(2, "commit", 0.0, {"seconds": "nan"}),
        Event(2, "commit", 0.0, {"seconds": 2.0}),
        Event(2, "commit", 0.0, {"seconds": -5.0}),
    ]
    assert learned_reserve(events) == Reserve(None, (9.0, 2.0))
    assert learned_reserve(events, 3.0).seconds() == 3.0
