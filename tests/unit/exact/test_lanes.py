"""Every lane is computed once, in a fixed order, whatever the number of ranks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unbroken.data.lanes import rank_lanes
from unbroken.errors import TooManyRanks

SIZES = st.integers(1, 40).flatmap(lambda lanes: st.tuples(st.just(lanes), st.integers(1, lanes)))


@given(SIZES)
def test_every_lane_runs_once_in_its_round_on_its_rank(sizes: tuple[int, int]) -> None:
    lanes, size = sizes
    plans = [rank_lanes(lanes, size, rank) for rank in range(size)]
    order = [plan.lane(number) for number in range(plans[0].rounds) for plan in plans]
    assert [lane for lane in order if lane is not None] == list(range(lanes))
    for plan in plans:
        for number in range(plan.rounds):
            lane = plan.lane(number)
            assert lane is None or (lane // size, lane % size) == (number, plan.rank)
            assert (lane is not None) == (plan.rank < plan.present(number))


@given(SIZES)
def test_what_the_ranks_say_is_put_in_lane_order(sizes: tuple[int, int]) -> None:
    lanes, size = sizes
    plans = [rank_lanes(lanes, size, rank) for rank in range(size)]
    rows = [[-1 if (lane := plan.lane(n)) is None else lane for n in range(plan.rounds)] for plan in plans]
    assert plans[0].in_lane_order(torch.tensor(rows)).tolist() == list(range(lanes))


def test_only_the_last_round_may_be_unfilled_and_every_rank_has_had_a_lane_before_it() -> None:
    plan = rank_lanes(7, 3, 2)
    assert [plan.present(number) for number in range(plan.rounds)] == [3, 3, 1]
    assert [plan.lane(number) for number in range(plan.rounds)] == [2, 5, None]


def test_more_ranks_than_lanes_is_refused_with_both_numbers() -> None:
    with pytest.raises(TooManyRanks, check=lambda each: (each.ranks, each.lanes) == (9, 8)):
        rank_lanes(8, 9, 0)


def test_a_step_has_a_lane() -> None:
    with pytest.raises(ValueError, match="one or more"):
        rank_lanes(0, 1, 0)
