"""Keys and the one mixing function that every keyed decision of the data stream is made of.

Both are integer functions with fixed values: the same on every machine, in every version of Python and NumPy. The order
of a run hangs on them, so they never change.
"""

from hashlib import blake2b
from typing import Final

import numpy as np
from numpy.typing import NDArray

_FIRST: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND: Final = np.uint64(0x94D049BB133111EB)
_SHIFTS: Final = (np.uint64(30), np.uint64(27), np.uint64(31))


def mix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64, value by value: a bijection of 64-bit words in which every bit stirs every other."""
    mixed = values ^ (values >> _SHIFTS[0])
    mixed *= _FIRST
    mixed ^= mixed >> _SHIFTS[1]
    mixed *= _SECOND
    mixed ^= mixed >> _SHIFTS[2]
    return mixed


def subkey(seed: int, *tags: str | int) -> int:
    """A 64-bit key for one purpose; another seed, another tag or another order of tags is another key."""
    hashed = blake2b(digest_size=8)
    for tag in (seed, *tags):
        kind, text = ("s", tag) if isinstance(tag, str) else ("i", str(int(tag)))
        encoded = text.encode()
        # Kind and length stand before each tag: 1 and "1" differ, and so do ("ab", "c") and ("a", "bc").
        hashed.update(f"{kind}{len(encoded)}:".encode() + encoded)
    return int.from_bytes(hashed.digest(), "little")
