"""Whatever the lengths: windows hold every fresh token once, and packing holds every window once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.unit.data.test_best_fit import bins_window_by_window
from unbroken.data.packing.best_fit import best_fit, lay_out, one_each
from unbroken.data.packing.windows import cut


@st.composite
def _entries(draw: st.DrawFn) -> tuple[list[int], list[int], int, int]:
    max_length = draw(st.integers(2, 40))
    overlap = draw(st.integers(0, max_length // 2))
    lengths = draw(st.lists(st.integers(1, 5 * max_length), max_size=30))
    baked = draw(st.booleans())
    prefixes = [draw(st.integers(0, length)) if baked else 0 for length in lengths]
    return lengths, prefixes, max_length, overlap


@pytest.mark.promise("G15")
@settings(max_examples=300, deadline=None)
@given(_entries())
def test_the_fresh_tokens_of_all_windows_are_the_entries_exactly(case: tuple[list[int], list[int], int, int]) -> None:
    lengths, prefixes, max_length, overlap = case
    windows = cut(np.array(lengths, np.int64), np.array(prefixes, np.uint16), max_length, overlap)
    fresh: list[tuple[int, int]] = []
    ends: list[int] = []
    rows = zip(windows.entry, windows.start, windows.length, windows.masked, strict=True)
    for entry, start, length, masked in rows:
        assert 1 <= length <= max_length and 0 <= masked < length
        assert start + length <= lengths[entry]
        fresh += [(int(entry), int(start + place)) for place in range(masked, length)]
        ends += [int(entry)] if start + length == lengths[entry] else []
    expected = [(entry, t) for entry, length in enumerate(lengths) for t in range(prefixes[entry], length)]
    # In the order of the windows, too: an entry is read from front to back.
    assert fresh == expected
    # EOD, the last token of an entry, is in exactly one window: the entry's last.
    assert ends == sorted({entry for entry, _ in expected})
    assert windows.dropped_entries == len(lengths) - len(ends)


@st.composite
def _histograms(draw: st.DrawFn) -> tuple[NDArray[np.int64], int]:
    capacity = draw(st.integers(2, 30))
    counts = draw(st.lists(st.integers(0, 12), min_size=capacity, max_size=capacity))
    return np.array([0, *counts], np.int64), capacity


@pytest.mark.promise("G16")
@settings(max_examples=300, deadline=None)
@given(_histograms(), st.booleans())
def test_every_window_is_packed_once_and_no_sequence_is_too_long(
    case: tuple[NDArray[np.int64], int], packing: bool
) -> None:
    histogram, capacity = case
    strategies = best_fit(histogram, capacity) if packing else one_each(histogram)
    layout = lay_out(strategies, histogram)
    # What a window's place in the sorted list says of its length, from the histogram alone.
    lengths = np.repeat(np.arange(capacity, -1, -1), histogram[::-1])
    seen = np.zeros(lengths.size, np.int64)
    for number, (begin, end) in enumerate(zip(layout.cumulative[:-1], layout.cumulative[1:], strict=True)):
        slots = slice(layout.first[number], layout.first[number + 1])
        assert int(layout.length[slots].sum()) <= capacity
        for repeat in range(end - begin):
            windows = layout.base[slots] + repeat
            seen[windows] += 1
            assert (lengths[windows] == layout.length[slots]).all()
    assert (seen == 1).all()
    if packing:
        one_by_one = bins_window_by_window(lengths.tolist(), capacity)
        assert int(layout.cumulative[-1]) == len(one_by_one)
