"""A lane draws the same numbers wherever and whenever it runs, and leaves no trace."""

import random

import numpy
import pytest
import torch

from unbroken.exact import lane_seed
from unbroken.exact.lane_rng import LaneRng


def drawn() -> tuple[float, float, list[float]]:
    return random.random(), float(numpy.random.random()), torch.rand(3).tolist()


def lane(step: int, number: int, *, seed: int = 1) -> tuple[float, float, list[float]]:
    with LaneRng(seed, step) as generators:
        generators.enter(number)
        return drawn()


def test_a_lanes_numbers_follow_from_seed_step_and_lane_alone() -> None:
    first = lane(3, 5)
    drawn()
    torch.manual_seed(123)
    assert lane(3, 5) == first
    others = [lane(3, 6), lane(4, 5), lane(3, 5, seed=2)]
    for one, two, three in zip(first, zip(*others, strict=True), range(3), strict=True):
        assert one not in two, three


def test_after_the_lanes_the_generators_continue_as_if_there_had_been_none() -> None:
    torch.manual_seed(5)
    random.seed(5)
    numpy.random.seed(5)
    expected = [drawn(), drawn()]
    torch.manual_seed(5)
    random.seed(5)
    numpy.random.seed(5)
    found = [drawn()]
    lane(0, 0)
    assert [*found, drawn()] == expected


def test_the_generators_come_back_after_an_error_too() -> None:
    def broken() -> None:
        with LaneRng(1, 0) as generators:
            generators.enter(0)
            raise RuntimeError("inside")

    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="inside"):
        broken()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_seed_is_a_literal_number_that_no_release_changes() -> None:
    # A run that was begun with one release resumes with the next: these numbers are part of the format.
    assert lane_seed(0, 0, 0) == LITERALS[0]
    assert lane_seed(99, 1_000, 7) == LITERALS[1]
    assert all(0 <= lane_seed(0, step, number) < 1 << 63 for step in range(9) for number in range(9))


LITERALS = (4808561972376111626, 6318770331385237050)
