"""How often to save, from what was measured."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.records.interval import (
    Auto,
    Every,
    Timings,
    daly_interval_s,
    interval_steps,
    is_due_by_time,
    mean_time_between_failures_s,
)
from unbroken.records.journal import Event

DAY = 86_400.0


def test_every_so_many_steps() -> None:
    assert [step for step in range(13) if Every(5).is_due_at(step)] == [5, 10]
    assert Every(1).describe(Timings(0, 0.0)) == "every step"
    assert Every(2000).describe(Timings(0, 0.0)) == "every 2,000 steps"


def test_every_so_many_seconds_at_the_last_edge_before_they_are_over() -> None:
    assert not is_due_by_time(60.0, steps=10, elapsed_s=49.0, step_s=10.0)
    assert is_due_by_time(60.0, steps=10, elapsed_s=51.0, step_s=10.0)
    assert not is_due_by_time(60.0, steps=0, elapsed_s=1000.0, step_s=10.0), "nothing was computed since the last save"


def test_young_and_daly() -> None:
    assert daly_interval_s(2.0, DAY) == pytest.approx(math.sqrt(4 * DAY))
    assert daly_interval_s(0.0, DAY) == 0.0
    assert interval_steps(100.0, 7.0) == 14
    assert interval_steps(3.0, 7.0) == 1 and interval_steps(3.0, 0.0) == 1


@given(st.floats(0.001, 600.0), st.floats(60.0, 1e7))
def test_the_interval_loses_least(cost_s: float, failures_s: float) -> None:
    def lost(interval_s: float) -> float:
        return cost_s / interval_s + interval_s / (2 * failures_s)

    best = daly_interval_s(cost_s, failures_s)
    assert lost(best) <= min(lost(best * 1.1), lost(best / 1.1)) * (1 + 1e-9)


def test_before_a_save_is_measured_the_first_comes_early() -> None:
    pace = Timings(1, 0.0, step_s=1.0)
    assert Auto().interval_s(pace) == 60.0
    assert "first after 60 s" in Auto().describe(pace)


def test_a_measured_save_is_repeated_as_often_as_pays_within_bounds() -> None:
    pace = Timings(1, 0.0, step_s=2.0, cost_s=2.0, mean_time_between_failures_s=DAY)
    assert Auto().interval_s(pace) == pytest.approx(588, abs=1)
    assert Auto().describe(pace) == "auto (every 588 s, 293 steps)"
    assert Auto().interval_s(replace(pace, cost_s=0.0)) == 30.0
    assert Auto().interval_s(replace(pace, cost_s=1e6)) == 3600.0
    assert Auto().interval_s(replace(pace, cost_s=0.0, write_s=100.0)) == 200.0, "one save at a time"
    assert Auto().interval_s(replace(pace, cost_s=1e6, write_s=7200.0)) == 14_400.0


def _job(job: int, start_s: float, end_s: float, status: str | None = None) -> list[Event]:
    last = Event(job, "commit", end_s) if status is None else Event(job, "job-end", end_s, {"status": status})
    return [Event(job, "job-start", start_s), last]


def test_failures_are_counted_from_the_journal_and_the_job_at_work_has_not_failed() -> None:
    assert mean_time_between_failures_s([]) == DAY
    assert mean_time_between_failures_s(_job(1, 0.0, 100.0)) == DAY + 100
    crashed = [*_job(1, 0.0, 100.0), *_job(2, 100.0, 300.0), *_job(3, 300.0, 350.0)]
    assert mean_time_between_failures_s(crashed) == pytest.approx((DAY + 350) / 3)
    stopped = [*_job(1, 0.0, 100.0, "stopped"), *_job(2, 100.0, 300.0, "error"), *_job(3, 300.0, 350.0)]
    assert mean_time_between_failures_s(stopped) == pytest.approx((DAY + 350) / 2)


def test_an_event_without_an_instant_counts_for_nothing() -> None:
    assert mean_time_between_failures_s([Event(1, "commit", None), Event(2, "commit", 5.0)]) == DAY
