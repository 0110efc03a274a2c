"""A plan follows from its numbers, and numbers that make none are all named."""

import math

import pytest

from unbroken.records.goodput import Numbers, make_plan, measured, problems
from unbroken.records.interval import daly_interval_s
from unbroken.records.journal import Event

NUMBERS = Numbers(steps=100_000, step_s=0.8, save_s=12.0, mtbf_s=86_400.0, walltime_s=14_400.0, reserve_s=60.0)


def test_a_plan_follows_from_its_numbers() -> None:
    plan = make_plan(NUMBERS, now_s=1_000.0)
    assert plan.interval_s == daly_interval_s(12.0, 86_400.0) == 1_440.0
    assert plan.interval_steps == 1_800
    assert plan.lost_per_failure_s == 1_440 / 2 + 12
    assert plan.training_s == 80_000
    assert plan.saving_s == pytest.approx(80_000 / 1_440 * 12)
    assert plan.total_s == pytest.approx(plan.training_s + plan.saving_s + plan.failures * plan.lost_per_failure_s)
    assert plan.failures == pytest.approx(plan.total_s / 86_400)
    assert plan.losing_s == pytest.approx(plan.failures * plan.lost_per_failure_s)
    assert plan.jobs == math.ceil(plan.total_s / (14_400 - 60)) == 6
    assert plan.ends_at_s == pytest.approx(1_000 + plan.total_s)
    assert plan.lost_share == pytest.approx((plan.saving_s + plan.losing_s) / plan.total_s)


def test_the_cadence_of_the_plan_loses_less_than_any_other() -> None:
    best = make_plan(NUMBERS, now_s=0.0).total_s
    for interval_s in (60.0, 300.0, 700.0, 2_900.0, 10_000.0):
        assert make_plan(NUMBERS, now_s=0.0, interval_s=interval_s).total_s > best


def test_a_run_that_has_no_step_left_is_done_now() -> None:
    plan = make_plan(Numbers(steps=0, step_s=1.0, save_s=1.0), now_s=7.0)
    assert (plan.total_s, plan.ends_at_s, plan.lost_share, plan.jobs) == (0, 7.0, 0, 1)


def test_all_that_is_missing_or_wrong_is_named_at_once() -> None:
    assert [each.partition(" ")[0] for each in problems(Numbers())] == ["--steps", "--step-time", "--save-time"]
    wrong = Numbers(-1, 0.0, -3.0, mtbf_s=math.nan, walltime_s=math.inf, reserve_s=-1.0, restart_s=-1.0)
    named = {each.partition(" ")[0] for each in problems(wrong)}
    assert named == {
        *("--steps", "--step-time", "--save-time", "--mtbf", "--max-runtime", "--walltime-reserve", "--restart-time"),
    }
    with pytest.raises(ValueError, match="--step-time"):
        make_plan(wrong, now_s=0.0)


def test_a_run_that_would_never_end_is_refused_with_the_reason() -> None:
    hopeless = Numbers(steps=10, step_s=1.0, save_s=12.0, mtbf_s=20.0, walltime_s=10.0)
    assert problems(hopeless) == [
        "it would never end: it fails every 20 s and each failure costs 27 s",
        "no job would do a step: it has 10 s and keeps 30 s for its last save",
    ]


def facts(*jobs: list[tuple[float, int]]) -> list[Event]:
    """Jobs that saved at these instants and steps; each save took 2 s, of which the loop stood still for half a one."""
    found = []
    for number, saves in enumerate(jobs, start=1):
        found.append(Event(number, "job-start", saves[0][0] - 10))
        for at_s, step in saves:
            found.append(Event(number, "save", at_s, {"step": step}))
            found.append(Event(number, "commit", at_s + 2, {"step": step, "seconds": 2.0, "paused_s": 0.5}))
    return found


def test_what_a_run_has_measured_is_taken_from_its_journal() -> None:
    numbers, assumed = measured(facts([(100.0, 10), (120.0, 20), (140.0, 30)], [(5_000.0, 40), (5_030.0, 50)]))
    # Between two jobs lies the time of a failure, not of steps.
    assert numbers.step_s == 2.0
    assert (numbers.save_s, numbers.paused_s) == (2.0, 0.5)
    assert numbers.mtbf_s == pytest.approx((52 + 42 + 86_400) / 2)
    assert numbers.reserve_s == 2 * 2.0 + 2.0 + 5.0
    assert "one failure a day" in assumed[0]


def test_of_a_run_that_has_measured_nothing_nothing_is_known() -> None:
    assert measured([]) == (Numbers(), [])
