"""A keyed permutation of ``range(n)`` of which any place is computed from its number alone.

A small one is a table, sorted by keyed words that never tie. A large one is a Feistel network on pairs (left, right) of
the mixed radix ``rows * columns``, the smallest near-square that holds n, walked along its cycles back into the range:
``rows * columns - n`` is less than a row, so about one value in ``sqrt(n)`` is walked a second time. Integers only;
memory does not depend on n.
"""

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from unbroken.data.keyed import mix64

ROUNDS: Final = 6
LARGEST: Final = 1 << 62
# A network of so few rounds cannot reach every order of a handful of places; a sort reaches each equally often.
LARGEST_TABLE: Final = 1 << 10
_STRIDE: Final = np.uint64(0x9E3779B97F4A7C15)
_HALF: Final = np.uint64(32)


class Permutation:
    """A bijection of ``range(n)`` chosen by a 64-bit key, at every n from 1 to ``LARGEST``."""

    def __init__(self, n: int, key: int) -> None:
        if not 1 <= n <= LARGEST:
            raise ValueError(f"a permutation has 1 to {LARGEST} places, not {n}")
        self.n = n
        self._table = _words(n, key).argsort(kind="stable") if n <= LARGEST_TABLE else None
        rows = math.isqrt(n - 1) + 1
        self._rows = np.uint64(rows)
        self._columns = np.uint64(-(-n // rows))
        self._keys = _words(ROUNDS, key)

    def __call__(self, x: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where each number of ``range(n)`` goes."""
        if self._table is not None:
            return self._table[x]
        placed = self._once(x.astype(np.uint64))
        limit = np.uint64(self.n)
        outside = np.flatnonzero(placed >= limit)
        while outside.size:
            # The network permutes the whole rectangle: following its cycle from a place outside ends inside, and no two
            # starts end at the same place.
            walked = self._once(placed[outside])
            placed[outside] = walked
            outside = outside[walked >= limit]
        return placed.astype(np.int64)

    def _once(self, x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left = x // self._columns
        right = x - left * self._columns
        for number, key in enumerate(self._keys):
            if number % 2:
                right = _turned(right, left ^ key, self._columns)
            else:
                left = _turned(left, right ^ key, self._rows)
        return left * self._columns + right


def _words(count: int, key: int) -> NDArray[np.uint64]:
    # The stream of splitmix64: its words are all different, because the finaliser is a bijection.
    counters = np.arange(1, count + 1, dtype=np.uint64) * _STRIDE
    counters += np.uint64(key % (1 << 64))
    return mix64(counters)


def _turned(half: NDArray[np.uint64], word: NDArray[np.uint64], radix: np.uint64) -> NDArray[np.uint64]:
    # The upper 32 bits as a fraction of the radix, which is at most 2**31: a product instead of a slow division.
    turned = ((mix64(word) >> _HALF) * radix) >> _HALF
    turned += half
    turned[turned >= radix] -= radix
    return turned
