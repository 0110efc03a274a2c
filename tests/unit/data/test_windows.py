"""Windows cover an entry's fresh tokens once and nothing else."""

import numpy as np
import pytest
from numpy.typing import NDArray

from unbroken.data.packing.windows import MOST_PREFIX, MOST_TOKENS, Windows, cut, require_bakeable, require_cuttable


def _cut(lengths: list[int], max_length: int, overlap: int, prefixes: list[int] | None = None) -> Windows:
    masked = np.array(prefixes or [0] * len(lengths), np.uint16)
    return cut(np.array(lengths, np.int64), masked, max_length, overlap)


def _rows(windows: Windows) -> list[list[int]]:
    table: NDArray[np.int64] = np.stack([windows.entry, windows.start, windows.length, windows.masked], axis=1)
    rows: list[list[int]] = table.tolist()
    return rows


def test_an_entry_that_fits_is_one_window() -> None:
    assert _rows(_cut([1, 7, 8], 8, 2)) == [[0, 0, 1, 0], [1, 0, 7, 0], [2, 0, 8, 0]]


def test_a_longer_one_continues_behind_its_overlap() -> None:
    assert _rows(_cut([9], 8, 2)) == [[0, 0, 8, 0], [0, 6, 3, 2]]
    assert _rows(_cut([14], 8, 2)) == [[0, 0, 8, 0], [0, 6, 8, 2]]
    assert _rows(_cut([15], 8, 2)) == [[0, 0, 8, 0], [0, 6, 8, 2], [0, 12, 3, 2]]
    assert _rows(_cut([17], 8, 0)) == [[0, 0, 8, 0], [0, 8, 8, 0], [0, 16, 1, 0]]


def test_a_prefix_is_masked_in_the_first_window_and_the_overlap_in_the_others() -> None:
    assert _rows(_cut([12], 8, 2, [5])) == [[0, 0, 8, 5], [0, 6, 6, 2]]


def test_a_prefix_that_outlasts_a_window_is_masked_to_its_end() -> None:
    assert _rows(_cut([12], 4, 1, [6])) == [[0, 3, 4, 3], [0, 6, 4, 1], [0, 9, 3, 1]]


def test_an_entry_without_a_fresh_token_is_dropped_and_counted() -> None:
    windows = _cut([4, 0, 5, 3, 30], 8, 2, [4, 0, 2, 3, 30])
    assert _rows(windows) == [[2, 0, 5, 2]]
    assert windows.dropped_entries == 4


def test_no_entries_make_no_windows() -> None:
    windows = _cut([], 8, 2)
    assert _rows(windows) == [] and windows.dropped_entries == 0


@pytest.mark.parametrize(("max_length", "overlap"), [(1, 0), (0, 0), (8, 5), (7, 4), (8, -1)])
def test_windows_that_cannot_be_are_refused(max_length: int, overlap: int) -> None:
    with pytest.raises(ValueError, match=r"max_length|overlap"):
        _cut([5], max_length, overlap)


def test_lengths_without_a_bound_are_refused_before_memory_is_requested() -> None:
    require_cuttable(MOST_TOKENS, 0)
    with pytest.raises(ValueError, match="at most 16777216 tokens"):
        require_cuttable(MOST_TOKENS + 1, 0)


def test_an_overlap_that_an_index_cannot_say_is_not_baked() -> None:
    require_bakeable(200_000, MOST_PREFIX)
    with pytest.raises(ValueError, match="holds at most 65535"):
        require_bakeable(200_000, MOST_PREFIX + 1)
