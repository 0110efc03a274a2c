"""One job's clock: when a save is due, and what it has learned."""

import itertools

from unbroken.loop.save_clock import SaveClock
from unbroken.records.deadline import Reserve
from unbroken.records.interval import Auto, Every


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_cadence_of_steps_is_due_at_its_multiples_and_never_by_the_clock() -> None:
    clock = Clock()
    pace = SaveClock(Every(3), Reserve(), clock)
    assert [step for step in range(10) if pace.is_due_by_step(step)] == [3, 6, 9]
    clock.now_s = 1e6
    assert not pace.is_due_by_clock()
    assert pace.describe() == "every 3 steps"


def test_auto_saves_first_to_learn_and_then_as_often_as_pays() -> None:
    clock = Clock()
    pace = SaveClock(Auto(), Reserve(), clock)
    due: list[float] = []
    for _ in range(4000):
        clock.now_s += 1.0
        pace.step_done()
        if pace.is_due_by_clock():
            due.append(clock.now_s)
            pace.save_started()
            pace.save_ended(0.5, 2.0)
        pace.resume_clock()
    # sqrt(2 x one day x half a second) is 294 s.
    assert due[0] == 60.0
    assert {after - before for before, after in itertools.pairwise(due)} <= {293.0, 294.0}
    assert not any(pace.is_due_by_step(step) for step in range(100))


def test_the_reserve_follows_measured_saves_and_steps() -> None:
    clock = Clock()
    pace = SaveClock(Every(1), Reserve(), clock)
    before = pace.reserve.seconds(1000.0)
    clock.now_s = 4.0
    pace.step_done()
    pace.save_started()
    pace.save_ended(0.1, 30.0)
    assert pace.reserve.seconds(1000.0) == 2 * 30.0 + 4.0 + 5.0 != before


def test_time_spent_on_a_save_is_not_the_next_steps() -> None:
    clock = Clock()
    pace = SaveClock(Every(1), Reserve(), clock)
    clock.now_s = 1.0
    pace.step_done()
    clock.now_s = 100.0
    pace.resume_clock()
    clock.now_s = 101.0
    pace.step_done()
    assert pace.reserve.steps_s == (1.0, 1.0)


def test_without_a_cadence_only_the_end_is_saved() -> None:
    pace = SaveClock(None, Reserve(), Clock())
    assert not pace.is_due_by_step(10)
    assert not pace.is_due_by_clock()
    assert pace.describe() == "only at the end"
