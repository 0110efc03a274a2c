"""Keyed randomness: keys, a mixing function, and a random-access permutation of ``range(n)``."""

import math
from hashlib import blake2b
from typing import Final

import numpy as np
from numpy.typing import NDArray

_FIRST: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND: Final = np.uint64(0x94D049BB133111EB)
_SHIFTS: Final = (np.uint64(30), np.uint64(27), np.uint64(31))


def mix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64, by value: a bijection of 64-bit words in which every bit affects every other."""
    shifted = values >> _SHIFTS[0]
    mixed = values ^ shifted
    mixed *= _FIRST
    mixed ^= np.right_shift(mixed, _SHIFTS[1], out=shifted)
    mixed *= _SECOND
    mixed ^= np.right_shift(mixed, _SHIFTS[2], out=shifted)
    return mixed


def subkey(seed: int, *tags: str | int) -> int:
    """A 64-bit key for one purpose; it depends on the seed, the tags and their order."""
    hashed = blake2b(digest_size=8)
    for tag in (seed, *tags):
        kind, text = ("s", tag) if isinstance(tag, str) else ("i", str(int(tag)))
        encoded = text.encode()
        # Each tag is prefixed with its kind and length: 1 and "1" differ, and so do ("ab", "c") and ("a", "bc").
        hashed.update(f"{kind}{len(encoded)}:".encode() + encoded)
    return int.from_bytes(hashed.digest(), "little")


# ---- permutation ----

ROUNDS: Final = 6
LARGEST: Final = 1 << 62
# A network of so few rounds cannot reach every order of a few elements; a sort reaches each equally often.
LARGEST_TABLE: Final = 1 << 10
_STRIDE: Final = np.uint64(0x9E3779B97F4A7C15)
_HALF: Final = np.uint64(32)


class Permutation:
    """A bijection of ``range(n)`` chosen by a 64-bit key, at every n from 1 to ``LARGEST``."""

    def __init__(self, n: int, key: int) -> None:
        if not 1 <= n <= LARGEST:
            raise ValueError(f"a permutation has 1 to {LARGEST} elements, not {n}")
        self.n = n
        self._table = _words(n, key).argsort(kind="stable") if n <= LARGEST_TABLE else None
        rows = math.isqrt(n - 1) + 1
        self._rows = np.uint64(rows)
        self._columns = np.uint64(-(-n // rows))
        self._keys = _words(ROUNDS, key)

    def __call__(self, x: NDArray[np.int64]) -> NDArray[np.int64]:
        """The image of each number of ``range(n)``."""
        if self._table is not None:
            return self._table[x]
        placed = self._once(x.astype(np.uint64))
        limit = np.uint64(self.n)
        outside = np.flatnonzero(placed >= limit)
        while outside.size:
            # The network permutes the whole rectangle: following its cycle from a value outside ends inside, and no two
            # starts end at the same value.
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
    turned = mix64(word)
    turned >>= _HALF
    turned *= radix
    turned >>= _HALF
    turned += half
    # Below the radix the difference wraps round to a large number, so that the smaller one is the remainder.
    np.minimum(turned, turned - radix, out=turned)
    return turned
