"""Models whose shapes, types and parameters are odd in many ways have the same bits in all worlds."""

import pytest

from tests.exact.odd_world import MOST_RANKS, Odd, bits_each
from unbroken.testing.worlds import logs, spawn

SEEDS = tuple(range(24))


@pytest.fixture(scope="module")
def alone() -> list[list[str]]:
    """The bits on one rank that holds everything."""
    [found] = spawn(1, bits_each, SEEDS, False)
    assert found.is_good, logs([found])
    bits: list[list[str]] = found.value
    return bits


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("size", range(1, MOST_RANKS + 1))
def test_an_odd_model_has_the_bits_of_one_rank_that_holds_everything(
    alone: list[list[str]], size: int, is_sharded: bool
) -> None:
    ended = spawn(size, bits_each, SEEDS, is_sharded)
    assert all(each.is_good for each in ended), logs(ended)
    for each in ended:
        for seed, found, expected in zip(SEEDS, each.value, alone, strict=True):
            assert found == expected, Odd.drawn(seed)


def test_the_seeds_draw_all_there_is() -> None:
    drawn = [Odd.drawn(seed) for seed in SEEDS]
    assert {each.dtype for each in drawn} >= {None} and len({each.dtype for each in drawn}) == 3
    assert {each.defers for each in drawn} == {each.is_tied for each in drawn} == {True, False}
    assert any(each.overflowing is not None for each in drawn)
    assert any(min(each.widths) < MOST_RANKS for each in drawn)
