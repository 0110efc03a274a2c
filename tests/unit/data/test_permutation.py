"""A keyed permutation is one at every size, and looks like a random one."""

import numpy as np
import pytest
from numpy.typing import NDArray

from unbroken.data.order.keyed import LARGEST, LARGEST_TABLE, Permutation, subkey


def _whole(n: int, key: int) -> NDArray[np.int64]:
    return Permutation(n, key)(np.arange(n))


def _is_bijection(placed: NDArray[np.int64]) -> bool:
    return bool((np.sort(placed) == np.arange(placed.size)).all())


@pytest.mark.promise("C13")
def test_it_is_a_bijection_at_every_small_size() -> None:
    assert all(_is_bijection(_whole(n, subkey(n, "small"))) for n in range(1, 2001))


@pytest.mark.parametrize("n", [65_535, 65_536, 65_537, 262_143, 262_144, 262_145, 999_983, 10**6 + 3])
def test_it_is_a_bijection_at_large_sizes_too(n: int) -> None:
    assert _is_bijection(_whole(n, subkey(0, "large")))
    assert _is_bijection(_whole(n, subkey(1, "large")))


@pytest.mark.parametrize("n", [10**9, 2**40, 2**40 + 1, LARGEST - 1, LARGEST])
def test_no_two_of_many_places_meet_in_a_range_too_large_to_walk(n: int) -> None:
    drawn = np.random.default_rng(0).integers(0, n, 200_000)
    asked = np.unique(np.concatenate([np.arange(50_000), n - 1 - np.arange(50_000), drawn]))
    placed = Permutation(n, 9)(asked)
    assert np.unique(placed).size == asked.size
    assert placed.min() >= 0 and placed.max() < n


def test_the_values_never_change() -> None:
    assert Permutation(10, 1)(np.arange(10)).tolist() == SMALL
    assert Permutation(10**6 + 3, 1)(np.arange(5)).tolist() == MIDDLE
    assert Permutation(2**40, subkey(3, "x"))(np.array([0, 1, 2**39, 2**40 - 1])).tolist() == LARGE


def test_one_place_is_found_without_the_others() -> None:
    for n in (LARGEST_TABLE, LARGEST_TABLE + 1, 5_000):
        whole = _whole(n, 5)
        assert all(Permutation(n, 5)(np.array([place]))[0] == whole[place] for place in range(0, n, 97))
        assert Permutation(n, 5)(np.empty(0, np.int64)).size == 0


def test_another_key_is_another_order() -> None:
    n = 5_000
    same = [int((_whole(n, subkey(key, "k")) == _whole(n, subkey(key + 1, "k"))).sum()) for key in range(20)]
    # Two random orders agree at one place on average.
    assert max(same) < 10


@pytest.mark.parametrize("n", [0, -1, LARGEST + 1])
def test_a_size_out_of_range_is_refused(n: int) -> None:
    with pytest.raises(ValueError, match="elements"):
        Permutation(n, 0)


def _chi_square(first: NDArray[np.int64], second: NDArray[np.int64], cells: int) -> float:
    seen = np.bincount(first * cells + second, minlength=cells * cells)
    expected = seen.sum() / (cells * cells)
    return float(((seen - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("n", [2**17 + 7, 2**20 + 7, 10**6])
@pytest.mark.parametrize("stride", [1, 2, 1024])
def test_neighbours_are_independent_of_each_other(n: int, stride: int) -> None:
    """Pairs of places, by 32 x 32 cells: 961 degrees of freedom, so 961 on average, with a deviation of 44."""
    found = []
    for key in range(6):
        cell = _whole(n, subkey(key, "neighbours")) * 32 // n
        found.append(_chi_square(cell[:-stride], cell[stride:], 32))
    assert all(961 - 5 * 44 < value < 961 + 5 * 44 for value in found), found
    assert abs(sum(found) / len(found) - 961) < 3 * 44 / len(found) ** 0.5, found


def test_every_order_of_a_few_places_is_reached_about_equally_often() -> None:
    seen: dict[tuple[int, ...], int] = {}
    for key in range(4_800):
        order = tuple(_whole(4, subkey(key, "few")).tolist())
        seen[order] = seen.get(order, 0) + 1
    assert len(seen) == 24
    # 23 degrees of freedom: 49.7 is passed by one in a thousand.
    assert sum((count - 200) ** 2 / 200 for count in seen.values()) < 49.7


SMALL = [8, 4, 3, 7, 0, 1, 5, 9, 6, 2]
MIDDLE = [379859, 90068, 749485, 424494, 461309]
LARGE = [69089845173, 1067776160649, 69809427880, 446900012263]
