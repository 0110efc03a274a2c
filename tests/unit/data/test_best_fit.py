"""Packing on the histogram is best-fit-decreasing, and its tables lay every window once."""

from bisect import bisect_left, insort

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.unit.data.counted import web_like
from unbroken.data.packing.best_fit import Strategy, best_fit, lay_out, one_each
from unbroken.data.packing.windows import cut


def _histogram(lengths: list[int] | NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    return np.bincount(np.asarray(lengths, np.int64), minlength=capacity + 1)


def bins_window_by_window(lengths: list[int], capacity: int) -> list[tuple[int, ...]]:
    """Best-fit-decreasing as its name says it: each window into the tightest bin it fits, or a new one."""
    free: list[tuple[int, int]] = []
    bins: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        tightest = bisect_left(free, (length, -1))
        if tightest == len(free):
            bins.append([])
            room, number = capacity, len(bins) - 1
        else:
            room, number = free.pop(tightest)
        bins[number].append(length)
        insort(free, (room - length, number))
    return sorted(tuple(each) for each in bins)


def _bins(strategies: list[Strategy]) -> list[tuple[int, ...]]:
    filled = [tuple(n for n, times in each.runs for _ in range(times)) for each in strategies]
    return sorted(one for one, each in zip(filled, strategies, strict=True) for _ in range(each.sequences))


def test_a_window_goes_into_the_tightest_bin_it_fits() -> None:
    # 7 and 6 are open, with 3 and 4 free: the 3 goes to the 7.
    assert _bins(best_fit(_histogram([7, 6, 3], 10), 10)) == [(6,), (7, 3)]


def test_a_bin_takes_equal_windows_until_it_is_full() -> None:
    # One by one, best-fit fills the bin with 4 free twice over before it opens another.
    assert _bins(best_fit(_histogram([6, 6, 2, 2, 2], 10), 10)) == [(6, 2), (6, 2, 2)]


@pytest.mark.parametrize("seed", range(8))
def test_there_are_as_many_bins_as_window_by_window(seed: int) -> None:
    drawn = np.random.default_rng(seed)
    capacity = int(drawn.integers(8, 200))
    lengths = np.clip(drawn.lognormal(2.5, 1.2, 3_000), 1, capacity).astype(int).tolist()
    packed = _bins(best_fit(_histogram(lengths, capacity), capacity))
    expected = bins_window_by_window(lengths, capacity)
    assert len(packed) == len(expected)
    # Which of several equal bins is chosen is open; how much each is filled is not.
    assert sorted(map(sum, packed)) == sorted(map(sum, expected))


def test_no_windows_make_no_sequences() -> None:
    histogram = _histogram([], 10)
    layout = lay_out(best_fit(histogram, 10), histogram)
    assert layout.cumulative.tolist() == [0] and layout.base.size == 0


def test_windows_of_one_token_fill_a_sequence() -> None:
    strategies = best_fit(_histogram([1] * 25, 10), 10)
    assert _bins(strategies) == [(1,) * 5, (1,) * 10, (1,) * 10]


def test_without_packing_every_sequence_has_one_window() -> None:
    assert _bins(one_each(_histogram([3, 9, 9, 1], 10))) == [(1,), (3,), (9,), (9,)]


@pytest.mark.promise("G16")
@pytest.mark.parametrize(("max_length", "overlap"), [(2048, 256), (2048, 0), (512, 64)])
def test_a_web_like_mix_fills_sequences_to_more_than_99_percent(max_length: int, overlap: int) -> None:
    lengths = web_like(200_000, seed=1)
    windows = cut(lengths, np.zeros(lengths.size, np.uint16), max_length, overlap)
    strategies = best_fit(_histogram(windows.length, max_length), max_length)
    sequences = sum(each.sequences for each in strategies)
    assert int(windows.length.sum()) * 100 >= 99 * sequences * max_length


def test_the_cost_does_not_grow_with_the_windows() -> None:
    few = _histogram(web_like(20_000, seed=2) % 512 + 1, 512)
    strategies, many = best_fit(few, 512), best_fit(few * 1_000_000, 512)
    assert sum(each.sequences for each in many) <= 1_000_000 * sum(each.sequences for each in strategies)
    # Twenty thousand million windows are described by no more ways of filling than twenty thousand.
    assert len(many) <= 2 * len(strategies)
