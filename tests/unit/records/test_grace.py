"""What is done with the seconds between a signal and the kill."""

import itertools

import pytest

from unbroken.records.deadline import (
    Costs,
    GraceAnswer,
    answer,
    deadline_warning,
    is_patience_over,
    learned_costs,
    window_warning,
)
from unbroken.records.journal import Event

SAVE, DUMP, NOTHING = GraceAnswer.SAVE, GraceAnswer.DUMP, GraceAnswer.NOTHING
WINDOWS = (0.0, 5.0, 15.0, 25.0, 30.0, 120.0)

# For each cost of a save, of a dump and of a step: what each of the windows is used for, with an area and without.
TABLE = {
    Costs(save_s=2.0, dump_s=1.0, step_s=0.5): ("none save save save save save", "none save save save save save"),
    Costs(save_s=12.0, dump_s=3.0, step_s=1.0): ("none dump dump save save save", "none none save save save save"),
    Costs(save_s=60.0, dump_s=10.0, step_s=2.0): ("none none dump dump dump save", "none none none none none save"),
    Costs(save_s=600.0, dump_s=20.0, step_s=2.0): ("none none none dump dump dump", "none none none none none none"),
    Costs(save_s=600.0, dump_s=200.0, step_s=2.0): ("none none none none none none", "none none none none none none"),
    Costs(save_s=12.0, dump_s=3.0, step_s=20.0): ("none none none dump dump save", "none none none none none save"),
    Costs(save_s=None, dump_s=None, step_s=1.0): ("none dump dump dump dump dump", "none save save save save save"),
    Costs(save_s=60.0, dump_s=None, step_s=1.0): ("none dump dump dump dump save", "none none none none none save"),
}
WORDS = {"none": NOTHING, "dump": DUMP, "save": SAVE}


@pytest.mark.promise("M11")
@pytest.mark.parametrize("costs", TABLE, ids=str)
def test_each_window_is_used_for_what_fits_into_it(costs: Costs) -> None:
    for has_area, results in zip((True, False), TABLE[costs], strict=True):
        found = [answer(window, costs, edges=1, has_area=has_area) for window in WINDOWS]
        assert found == [WORDS[word] for word in results.split()], f"with an area: {has_area}"


def test_without_a_window_every_stop_saves() -> None:
    for costs, has_area in itertools.product(TABLE, (True, False)):
        assert answer(None, costs, edges=1, has_area=has_area) is SAVE


@pytest.mark.parametrize("has_area", [True, False])
def test_with_hours_to_go_an_unmeasured_save_is_made_all_the_same(has_area: bool) -> None:
    assert answer(36_000.0, Costs(step_s=1.0), edges=1, has_area=has_area) is SAVE


def test_a_larger_window_is_never_used_for_less() -> None:
    order = [NOTHING, DUMP, SAVE]
    for costs, has_area in itertools.product(TABLE, (True, False)):
        found = [order.index(answer(float(g), costs, edges=1, has_area=has_area)) for g in range(130)]
        assert found == sorted(found)


def test_the_ranks_are_waited_for_until_a_dump_would_no_longer_fit() -> None:
    costs = Costs(dump_s=4.0)
    assert not is_patience_over(None, 30.0, costs)
    assert not is_patience_over(7.1, 30.0, costs)
    assert is_patience_over(7.0, 30.0, costs)
    # Nothing was measured: half of the window is for the dump.
    assert not is_patience_over(15.1, 30.0, Costs())
    assert is_patience_over(15.0, 30.0, Costs())
    # And nobody said how long the window is: a deadline that is far away is none.
    assert not is_patience_over(36_000.0, None, Costs())
    assert is_patience_over(60.0, None, Costs())


def test_the_slowest_of_the_recent_saves_and_dumps_count() -> None:
    facts = [Event(1, "commit", None, {"seconds": s}) for s in (99.0, 3.0, 5.0, 4.0, 2.0)]
    facts += [Event(1, "emergency-save", None, {"seconds": s}) for s in (0.5, 0.25, -1.0)]
    assert learned_costs(facts) == Costs(save_s=5.0, dump_s=0.5)
    assert learned_costs([]) == Costs()


@pytest.mark.promise("M11")
def test_a_window_that_no_save_fits_into_is_reported_with_the_emergency_path_as_the_answer() -> None:
    costs = Costs(save_s=60.0, dump_s=10.0)
    assert "emergency_dir" in (window_warning(30.0, costs, has_area=False) or "")
    assert "emergency_dir" in (window_warning(30.0, Costs(), has_area=False) or "")
    # What is said depends on what a signal will bring: a dump, or neither of the two.
    said = {window_warning(window, costs, has_area=True) for window in (30.0, 5.0, 0.0)}
    assert None not in said and len(said) == 3
    for window in (120.0, None):
        assert window_warning(window, costs, has_area=False) is None


@pytest.mark.promise("G7")
def test_a_deadline_shorter_than_what_is_kept_for_a_save_is_reported() -> None:
    assert deadline_warning(100.0, 120.0) is not None
    assert deadline_warning(121.0, 120.0) is None
    assert deadline_warning(None, 120.0) is None
